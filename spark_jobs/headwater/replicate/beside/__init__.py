"""What goes on beside a running driver: loads, reloads, pauses."""
