"""No DAG of its own: shows as an Airflow import error what is wrong with files in the folder $HEADWATER_PIPELINES."""

from __future__ import annotations

import os

from headwater_airflow.dag_factory import report_faults

if folder := os.environ.get("HEADWATER_PIPELINES"):
    report_faults(os.path.join(folder, "*.yaml"))
