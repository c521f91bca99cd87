"""The driver: from the log to published epochs."""
