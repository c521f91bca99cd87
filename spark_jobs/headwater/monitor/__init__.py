"""What people and programs are shown of a pipeline."""
