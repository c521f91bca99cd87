"""Waiting for a fresh cut."""
