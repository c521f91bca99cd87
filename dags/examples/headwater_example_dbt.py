"""Example: dbt builds its models from one cut, once the lake is fresh. dbt has an environment of its own.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder). $HEADWATER_EXAMPLE_DBT
is dbt's program (default: dbt). $HEADWATER_EXAMPLE_WAREHOUSE is the DuckDB file that dbt writes, beside which its logs
go; without it the DAG is not there. The project is `headwater_example_dbt/` beside this file.
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
dbt = os.environ.get("HEADWATER_EXAMPLE_DBT", "dbt")
warehouse = os.environ.get("HEADWATER_EXAMPLE_WAREHOUSE", "")
project = Path(__file__).with_name("headwater_example_dbt")

if os.path.exists(pipeline) and warehouse:
    with DAG(
        "headwater_example_dbt",
        description="Revenue per region by dbt, of everything that was sold before this run began",
        schedule=None,
        catchup=False,
        max_active_runs=1,  # DuckDB lets one program write to a file
        tags=["headwater", "example"],
    ):
        fresh = FreshnessSensor(
            task_id="fresh",
            pipeline=pipeline,
            tables=["public.customers", "public.orders", "public.order_lines"],
            require="now",
        )
        BashOnCutOperator(
            task_id="build",
            cut=fresh.output,
            bash_command=f"{quote(dbt)} build --project-dir {quote(str(project))} --profiles-dir {quote(str(project))} "
            f"--target-path {quote(warehouse)}.target --log-path {quote(warehouse)}.logs",
        )
