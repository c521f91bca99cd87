"""What a batch means for a table becomes one commit: planned, written, committed."""
