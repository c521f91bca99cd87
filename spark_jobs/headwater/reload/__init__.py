"""Parts of a table, or all of it, read again or written in another shape."""
