"""Source and lake compared, and put right."""
