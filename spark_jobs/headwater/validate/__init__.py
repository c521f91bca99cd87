"""Great Expectations on cuts."""
