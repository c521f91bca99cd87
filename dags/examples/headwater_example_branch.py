"""Example: a report that runs on fresh data, and says so where it must use older data instead of waiting.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder).
"""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import DAG, task

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.operators.branch import FreshnessBranchOperator
from headwater_airflow.sensors.freshness import FreshnessSensor

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")

if os.path.exists(pipeline):
    with DAG(
        "headwater_example_branch",
        description="Counts open orders at most 30 seconds old, or the newest there are, with their age",
        schedule=None,
        catchup=False,
        tags=["headwater", "example"],
    ):
        choose = FreshnessBranchOperator(
            task_id="is_fresh",
            pipeline=pipeline,
            tables=["public.orders"],
            require="30s",
            if_fresh="report",
            if_not_fresh="newest",
        )
        # "continue" with 0 seconds takes the newest cut as it is, pinned. A suspended table still fails the run: nobody
        # knows what it lacks.
        newest = FreshnessSensor(
            task_id="newest",
            pipeline=pipeline,
            tables=["public.orders"],
            require="30s",
            max_wait=0,
            on_timeout="continue",
        )

        def open_orders(cut: Any) -> int:
            import headwater

            return sum(batch.num_rows for batch in headwater.scan(cut, "public.orders", where="status = 'new'"))

        @task
        def report(cut: Any) -> dict[str, Any]:
            return {"open_orders": open_orders(cut), "stale": False}

        @task
        def report_with_age(cut: Any) -> dict[str, Any]:
            # The lake may have become fresh since the branch was chosen: then this is a cut as any other.
            stale = "instead" in cut
            return {"open_orders": open_orders(cut), "stale": stale, "complete_until": cut.get("complete_until")}

        report(choose.output)
        choose >> newest
        report_with_age(newest.output)
