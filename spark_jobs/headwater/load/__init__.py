"""The first load of a table, and loads again."""
