"""The Airflow DAGs of every usable pipeline file in the folder $HEADWATER_PIPELINES."""

from __future__ import annotations

import os

from headwater_airflow.dag_factory import headwater_dags

if folder := os.environ.get("HEADWATER_PIPELINES"):
    slice_seconds = float(os.environ.get("HEADWATER_SLICE_SECONDS", "600"))
    globals().update(headwater_dags(os.path.join(folder, "*.yaml"), slice_seconds=slice_seconds))
