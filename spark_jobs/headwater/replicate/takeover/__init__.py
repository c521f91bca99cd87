"""One driver after another: succession, a new source."""
