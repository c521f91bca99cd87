"""Values as the log sends them become Arrow columns."""
