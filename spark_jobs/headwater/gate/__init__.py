"""May this job begin here? The checks, leases and repairs before any work."""
