"""Example: one file for each day, of everything that was committed before the day's end. A backfill makes past days.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder);
$HEADWATER_EXAMPLE_DAYS is the folder of the files. Each run replaces the file of its own day, so it may run again:

    airflow backfill create --dag-id headwater_example_days --from-date 2026-01-01 --to-date 2026-01-31
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, CronDataIntervalTimetable, task

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.sensors.freshness import FreshnessSensor

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")
folder = os.environ.get("HEADWATER_EXAMPLE_DAYS", "/tmp/headwater_example_days")

if os.path.exists(pipeline):
    with DAG(
        "headwater_example_days",
        description="The orders of each day as a Parquet file, once the lake holds the whole day",
        # Not "@daily" alone, whose runs have an interval without a length.
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        is_paused_upon_creation=True,
        max_active_runs=4,
        tags=["headwater", "example"],
    ):
        fresh = FreshnessSensor(
            task_id="day_is_complete", pipeline=pipeline, tables=["public.orders"], require="data_interval_end"
        )

        @task
        def write(cut: Any, data_interval_start: Any = None, data_interval_end: Any = None) -> str:
            from pyarrow import parquet

            import headwater

            first, behind = data_interval_start.isoformat(), data_interval_end.isoformat()
            of_the_day = f"placed_at >= timestamp '{first}' and placed_at < timestamp '{behind}'"
            file = os.path.join(folder, f"orders_{data_interval_start:%Y-%m-%d}.parquet")
            os.makedirs(folder, exist_ok=True)
            parquet.write_table(headwater.scan(cut, "public.orders", where=of_the_day).read_all(), file + ".new")
            os.replace(file + ".new", file)  # readers see the old file or the new one
            return file

        write(fresh.output)
