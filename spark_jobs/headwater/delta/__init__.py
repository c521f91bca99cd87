"""Delta tables as files: their log, data files, vectors and statistics. Knows nothing of PostgreSQL."""
