"""Sensors: wait until the lake is fresh enough (`freshness`)."""
