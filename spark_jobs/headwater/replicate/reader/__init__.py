"""The process that reads the log, and the driver's side of it."""
