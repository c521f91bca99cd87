"""Example: a job that reads a cut only if the cut has met its expectations: wait, validate, and then report.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder). The suites are in
`expectations/` beside it; the basics of every table (its key is unique and not null) are always looked at.
"""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import DAG, task

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.operators.spark import ValidateOperator
from headwater_airflow.sensors.freshness import FreshnessSensor

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")

if os.path.exists(pipeline):
    with DAG(
        "headwater_example_gate",
        description="Sums what was sold, from a cut that has met its expectations",
        schedule=None,
        catchup=False,
        tags=["headwater", "example"],
    ):
        fresh = FreshnessSensor(
            task_id="fresh", pipeline=pipeline, tables=["public.orders", "public.order_lines"], require="now"
        )
        # Fails, and with it the run, if an expectation of severity error is not met: the report does not begin.
        valid = ValidateOperator(
            task_id="validate",
            pipeline=pipeline,
            tables=["public.orders", "public.order_lines"],
            cut=fresh.output,
        )

        @task
        def sold(cut: Any) -> dict[str, str]:
            import headwater

            lines = headwater.scan(cut, "public.order_lines", columns=["quantity", "price"])
            return {"sold": str(sum(line["quantity"] * line["price"] for batch in lines for line in batch.to_pylist()))}

        valid >> sold(fresh.output)
