"""The Airflow DAGs of every usable pipeline file in the folder $HEADWATER_PIPELINES."""

from __future__ import annotations

import os

from headwater_airflow.dag_factory import headwater_dags

if folder := os.environ.get("HEADWATER_PIPELINES"):
    slice_seconds = float(os.environ.get("HEADWATER_SLICE_SECONDS", "600"))
    warm_up_seconds = float(os.environ.get("HEADWATER_WARM_UP_SECONDS", "60"))
    files = os.path.join(folder, "*.yaml")
    globals().update(headwater_dags(files, slice_seconds=slice_seconds, warm_up_seconds=warm_up_seconds))
