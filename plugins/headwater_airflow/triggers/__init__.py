"""Triggers: the waiting of deferred sensors (`freshness`)."""
