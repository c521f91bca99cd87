"""Batches, the lanes that apply them, and the epochs that they become."""
