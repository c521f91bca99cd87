"""Example: a job that waits until the lake is fresh enough for it, and reads all tables at one consistent cut.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder), with the tables
customers, orders and order_lines of `headwater demo`; $HEADWATER_EXAMPLE_OUTPUT is where the result goes.
"""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.operators.spark import SparkOnCutOperator, entry_script
from headwater_airflow.sensors.freshness import FreshnessSensor

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")

if os.path.exists(pipeline):
    with DAG(
        "headwater_example_downstream",
        description="Revenue per region of everything that was sold before this run began",
        schedule=None,
        catchup=False,
        is_paused_upon_creation=False,
        # A busy Airflow may fail a task that comes back from its trigger before the executor has said that it had left;
        # a retry waits for what is committed by then.
        default_args={"retries": 2, "retry_delay": timedelta(seconds=5)},
        tags=["headwater", "example"],
    ):
        fresh = FreshnessSensor(
            task_id="wait_for_fresh_lake",
            pipeline=pipeline,
            tables=["public.customers", "public.orders", "public.order_lines"],
            require="now",
            max_wait=600,
        )
        SparkOnCutOperator(
            task_id="revenue_per_region",
            application=entry_script("example_aggregate"),
            cut=fresh.output,
            application_args=[os.environ.get("HEADWATER_EXAMPLE_OUTPUT", "/tmp/headwater_example_revenue")],
        )
