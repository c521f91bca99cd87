"""Example: a notebook runs on one cut, once the lake is fresh; the notebook with its results is kept.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder).
$HEADWATER_EXAMPLE_PAPERMILL is the program papermill (default: papermill), which has an environment of its own with the
notebook's libraries; $HEADWATER_EXAMPLE_NOTEBOOKS is where the results go, and without it the DAG is not there.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote

from airflow.sdk import DAG

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.operators.command import BashOnCutOperator
from headwater_airflow.sensors.freshness import FreshnessSensor

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")
papermill = os.environ.get("HEADWATER_EXAMPLE_PAPERMILL", "papermill")
results = os.environ.get("HEADWATER_EXAMPLE_NOTEBOOKS", "")
notebook = Path(__file__).with_name("headwater_example_notebook.ipynb")

if os.path.exists(pipeline) and results:
    with DAG(
        "headwater_example_notebook",
        description="A notebook about orders, at one cut",
        schedule=None,
        catchup=False,
        tags=["headwater", "example"],
    ):
        fresh = FreshnessSensor(
            task_id="fresh", pipeline=pipeline, tables=["public.customers", "public.orders"], require="now"
        )
        BashOnCutOperator(
            task_id="run",
            cut=fresh.output,
            bash_command=f"mkdir -p {quote(results)} && {quote(papermill)} {quote(str(notebook))} "
            f'{quote(results)}/orders_{{{{ dag_run.run_after | ts_nodash }}}}.ipynb -p cut_file "$HEADWATER_CUT"',
        )
