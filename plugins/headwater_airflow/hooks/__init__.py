"""Hooks: the source's Airflow connection as Headwater's engine takes it (`source`)."""
