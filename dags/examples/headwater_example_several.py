"""Example: a job that joins tables of several pipelines, and begins when all of them are fresh.

$HEADWATER_EXAMPLE_PIPELINES are the files, with `:` between them (default: all in the pipelines' folder). Each pipeline
has a cut of its own: they follow different logs.
"""

from __future__ import annotations

import os
from glob import glob
from typing import Any

from airflow.sdk import DAG, task

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.sensors.freshness import FreshnessSensor

named, folder = os.environ.get("HEADWATER_EXAMPLE_PIPELINES", ""), pipelines_folder()
pipelines = named.split(":") if named else sorted(glob(os.path.join(folder, "*.yaml"))) if folder else []

if pipelines:
    with DAG(
        "headwater_example_several",
        description="Counts the rows of every table of all pipelines, each pipeline at its own cut",
        schedule=None,
        catchup=False,
        tags=["headwater", "example"],
    ):
        fresh = FreshnessSensor.partial(task_id="fresh", require="now", max_wait="10m").expand(pipeline=pipelines)

        @task
        def rows(cuts: Any) -> dict[str, int]:
            import headwater

            return {
                f"{cut['pipeline']}: {table}": sum(batch.num_rows for batch in headwater.scan(cut, table))
                for cut in cuts
                for table in cut["tables"]
            }

        rows(fresh.output)
