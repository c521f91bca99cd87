"""Example: a DAG that runs when a table has moved, on the cut that the event carries. Paused at first.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder).
"""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import DAG, task

from headwater_airflow.assets import cut_of, moved
from headwater_airflow.configuration import pipelines_folder

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")

if os.path.exists(pipeline):
    with DAG(
        "headwater_example_moved",
        description="Says at which versions the tables stand, each time that one of them has moved",
        schedule=[moved(pipeline, at_most_every=10)],
        max_active_runs=1,
        is_paused_upon_creation=True,
        tags=["headwater", "example"],
    ):

        @task
        def cut(triggering_asset_events: Any = None) -> dict[str, Any]:
            return cut_of(triggering_asset_events)

        cut()
