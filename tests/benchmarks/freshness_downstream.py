"""Commit at the source -> first line of the task behind the sensor, through a real Airflow, HEADWATER_BENCH_TIMES (15)
times for each kind of sensor: one that a worker begins and the triggerer ends, and one that only the triggerer sees.

The sensor waits already when the commit is made, for a position that this commit alone brings. By stages: until the
position is published, until the sensor's task has ended, until the next task's first line. Reference of the same run:
Airflow's own `DateTimeSensorAsync`, from the moment that it waits for.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mixed_load import report
from rich.console import Console

from headwater.jobs.demo.airflow_server import example_dags
from headwater.jobs.demo.environment import Demo, demo_environment
from headwater.jobs.demo.shop import Writer
from headwater.jobs.demo.story import Story
from headwater.lake.position_file import read_position_file
from headwater.position import format_lsn, parse_lsn

TIMES = int(os.environ.get("HEADWATER_BENCH_TIMES", "15"))
KINDS = ("deferred", "from_the_trigger", "by_airflow")
MESSAGE_BYTES = 64 << 10
"""Of the commit that is waited for: so far ahead is its position that nothing else reaches it."""

DAGS = """
import os
import time

from airflow.providers.standard.sensors.date_time import DateTimeSensorAsync
from airflow.sdk import DAG, Param, task
from headwater_airflow.sensors.freshness import FreshnessSensor

SHOP = os.path.join(os.environ["HEADWATER_PIPELINES"], "shop.yaml")


def dag(name, sensor):
    params = {"require": Param("now", type="string")}
    with DAG(name, schedule=None, catchup=False, is_paused_upon_creation=False, params=params) as made:

        @task
        def behind():
            return time.time()

        sensor() >> behind()
    return made


require = "{{ params.require }}"
deferred = dag("deferred", lambda: FreshnessSensor(task_id="waits", pipeline=SHOP, require=require))
from_the_trigger = dag(
    "from_the_trigger",
    lambda: FreshnessSensor(task_id="waits", pipeline=SHOP, require=require, start_from_trigger=True),
)
by_airflow = dag(
    "by_airflow", lambda: DateTimeSensorAsync(task_id="waits", target_time=require, end_from_trigger=True)
)
"""


def until(condition: Callable[[], bool], pause: float = 0.5) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it does not go on")
        time.sleep(pause)


def once(demo: Demo, kind: str) -> tuple[float, ...]:
    """Seconds of each stage: commit to published (not for Airflow's own), to the sensor's end, to the next first line."""
    client, root = demo.airflow.client, str(demo.lake)
    moment = datetime.now(UTC) + timedelta(seconds=8)
    with demo.server.connect("shop") as connection:
        row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        target = parse_lsn(row[0]) + MESSAGE_BYTES // 2
        run = client.trigger(kind, {"require": moment.isoformat() if kind == "by_airflow" else format_lsn(target)})
        until(lambda: client.tasks(kind, run).get("waits") == "deferred")
        stages = []
        if kind == "by_airflow":
            began = moment.timestamp()
            if time.time() > began - 1:
                raise TimeoutError("the sensor was late, it would be done before it waits")
        else:
            time.sleep(2)  # until the triggerer has it, too
            with connection.transaction():
                connection.execute("select pg_logical_emit_message(true, 'bench', repeat('x', %s))", [MESSAGE_BYTES])
                connection.execute("update products set stock = stock where id = 1")
            began = time.time()
            until(lambda: (file := read_position_file(root)) is not None and file.position.lsn >= target, 0.01)
            published = time.time()
            stages.append(published - began)
            began = published
    if client.wait_for_run(kind, run, 300) != "success":
        raise RuntimeError(f"{kind}: {client.tasks(kind, run)}")
    ended = datetime.fromisoformat(client.task(kind, run, "waits")["end_date"]).timestamp()
    first_line = float(client.xcom(kind, run, "behind"))
    return (*stages, ended - began, first_line - ended)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        for file in example_dags().glob("*.py"):
            shutil.copy(file, scratch)
        Path(scratch, "bench.py").write_text(DAGS)
        with demo_environment(dags=Path(scratch)) as demo:
            writer = Writer(demo.server.connect("shop"), rate=5)
            writer.start()
            story = Story(demo, writer, Console(stderr=True), time.monotonic())
            story.await_airflow()
            story.load()
            story.await_replication()
            writer.stop()
            until(lambda: set(KINDS) <= demo.airflow.client.dag_ids())
            found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
            for number in range(TIMES + 1):
                for kind in KINDS:
                    stages = once(demo, kind)
                    if number:  # the first one of each warms up
                        found[kind].append(stages)
    totals = {kind: [sum(stages) for stages in each] for kind, each in found.items()}
    for kind in KINDS[:2]:
        names = ("published", "sensor_ended", "next_first_line")
        medians = (statistics.median(stage) for stage in zip(*found[kind], strict=True))
        report(
            "commit to downstream",
            sensor=kind,
            times=TIMES,
            **{f"to_{name}_seconds": round(seconds, 2) for name, seconds in zip(names, medians, strict=True)},
            median_seconds=round(statistics.median(totals[kind]), 2),
            longest_seconds=round(max(totals[kind]), 2),
            reference="Airflow's own DateTimeSensorAsync, from its moment, median",
            reference_seconds=round(statistics.median(totals["by_airflow"]), 2),
            reference_to_sensor_ended_seconds=round(statistics.median(s[0] for s in found["by_airflow"]), 2),
        )


if __name__ == "__main__":
    main()
