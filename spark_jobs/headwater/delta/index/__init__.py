"""Where the rows of a table lie, by key: a cache beside the table."""
