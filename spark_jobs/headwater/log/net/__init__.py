"""The net effect of a batch: one row for each key."""
