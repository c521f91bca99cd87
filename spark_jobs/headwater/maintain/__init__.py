"""Clean-up: what no cut needs any more goes."""
