"""Rows of an open transaction, written before its commit and linked into the table at it."""
