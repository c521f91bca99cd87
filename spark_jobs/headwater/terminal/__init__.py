"""A person's screen."""
