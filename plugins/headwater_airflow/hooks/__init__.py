"""Airflow connections as Headwater's engine takes them: the source's (`source`, `connection`), the lake's (`store`)."""
