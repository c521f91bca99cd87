"""No DAG of its own: shows as an Airflow import error what is wrong with files in the pipelines' folder."""

from __future__ import annotations

import os

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.dag_factory import report_faults

if folder := pipelines_folder():
    report_faults(os.path.join(folder, "*.yaml"))
