"""The Airflow DAGs of every usable pipeline file in the folder of `[headwater] pipelines`, or $HEADWATER_PIPELINES."""

from __future__ import annotations

import os

from headwater_airflow.configuration import pipelines_folder, slice_seconds, warm_up_seconds
from headwater_airflow.dag_factory import headwater_dags

if folder := pipelines_folder():
    files = os.path.join(folder, "*.yaml")
    globals().update(headwater_dags(files, slice_seconds=slice_seconds(), warm_up_seconds=warm_up_seconds()))
