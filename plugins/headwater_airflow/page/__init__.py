"""Headwater's pages in the Airflow UI, and its metrics: a FastAPI app that the plugin mounts. Empty on purpose."""
