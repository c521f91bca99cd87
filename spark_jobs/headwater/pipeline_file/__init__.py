"""The pipeline file: read, checked, and its values."""
