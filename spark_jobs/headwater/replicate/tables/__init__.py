"""What a driver knows of its tables, and does to each."""
