"""What PostgreSQL's catalog says of tables, columns and publications."""
