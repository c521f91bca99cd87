"""Example: one file for each day, of the orders that were placed on it. A backfill makes the files of past days.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder);
$HEADWATER_EXAMPLE_DAYS is the folder of the files. A run waits until everything is in the lake that was committed up to
an hour after its day: an order that is placed before midnight may be committed after it. It then writes these orders as
they are by now, in place of an older file. So a day that has changed since is written again by

    airflow dags unpause headwater_example_days
    airflow backfill create --dag-id headwater_example_days --from-date 2026-01-01 --to-date 2026-01-31 \\
      --reprocess-behavior completed
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, CronDataIntervalTimetable, task

from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.sensors.freshness import FreshnessSensor

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")
folder = os.environ.get("HEADWATER_EXAMPLE_DAYS", "/tmp/headwater_example_days")

if os.path.exists(pipeline):
    with DAG(
        "headwater_example_days",
        description="The orders of each day as a Parquet file, once the lake holds all of them",
        # Not "@daily" alone, whose runs have an interval without a length.
        schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        is_paused_upon_creation=True,
        default_args={"retries": 3, "retry_delay": timedelta(minutes=5)},
        tags=["headwater", "example"],
    ):
        fresh = FreshnessSensor(
            task_id="day_is_complete",
            pipeline=pipeline,
            tables=["public.orders"],
            require="{{ (data_interval_end + macros.timedelta(hours=1)).isoformat() }}",
            max_wait="2h",
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
