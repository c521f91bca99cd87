"""What the source's catalog says of the tables while a driver runs."""
