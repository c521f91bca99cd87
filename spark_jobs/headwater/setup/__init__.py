"""The first pipeline file, and the end of a pipeline."""
