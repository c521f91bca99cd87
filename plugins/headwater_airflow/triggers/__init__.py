"""Triggers: the waiting of deferred sensors (`freshness`), the watching for assets (`movement`)."""
