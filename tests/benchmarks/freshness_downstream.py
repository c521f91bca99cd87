"""The last commit before a moment -> first line of the task behind the sensor, through a real Airflow,
HEADWATER_BENCH_TIMES (15) times for each kind of sensor: one that a worker begins and the triggerer ends, and one that
only the triggerer sees.

While a shop goes on writing, the sensor waits for everything that is committed before a moment a few seconds away. By
stages: from the moment until the cut's epoch is published, until the sensor's task has ended, until the next task's
first line. Reference of the same run: Airflow's own `DateTimeSensorAsync` for such a moment.

Then HEADWATER_BENCH_SENSORS (100) sensors wait in the triggerer for one moment: from the publication of the epoch until
each task has ended, and how much of that the last verdict takes, which the log of waits has.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from figures import figure
from rich.console import Console

from headwater.demo.airflow_server import example_dags
from headwater.demo.environment import Demo, demo_environment
from headwater.demo.shop import Writer
from headwater.demo.story import Story
from headwater.lake.position_file import read_position_file
from headwater.lake.wait_log import WaitLog

TIMES = int(os.environ.get("HEADWATER_BENCH_TIMES", "15"))
SENSORS = int(os.environ.get("HEADWATER_BENCH_SENSORS", "100"))
KINDS = ("deferred", "from_the_trigger", "by_airflow")

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
DAGS += f"""
params = {{"require": Param("now", type="string")}}
with DAG("many", schedule=None, is_paused_upon_creation=False, params=params, max_active_tasks={SENSORS}) as many:
    for number in range({SENSORS}):
        FreshnessSensor(task_id=f"waits_{{number}}", pipeline=SHOP, require=require, start_from_trigger=True)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it does not go on")
        time.sleep(0.5)


class Published:
    """When each epoch was first seen in the position file, in a thread of its own."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._seen: list[tuple[int, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Published:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def moment_of(self, epoch: int) -> float:
        return next(moment for number, moment in self._seen if number >= epoch)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            file = read_position_file(self._root)
            if file is not None and (not self._seen or self._seen[-1][0] < file.epoch):
                self._seen.append((file.epoch, time.time()))


def once(demo: Demo, kind: str, published: Published) -> tuple[float, ...]:
    """Seconds of each stage: from the moment until the cut's epoch is published (not of Airflow's own), until the
    sensor's task has ended, until the next task's first line."""
    client = demo.airflow.client
    moment = datetime.now(UTC) + timedelta(seconds=10)
    run = client.trigger(kind, {"require": moment.isoformat()})
    until(lambda: client.tasks(kind, run).get("waits") == "deferred")
    began = moment.timestamp()
    if time.time() > began - 1:
        raise TimeoutError("the machine is too busy: the moment comes before the sensor waits for it")
    if client.wait_for_run(kind, run, 300) != "success":
        raise RuntimeError(f"{kind}: {client.tasks(kind, run)}")
    ended = datetime.fromisoformat(client.task(kind, run, "waits")["end_date"]).timestamp()
    first_line = float(client.xcom(kind, run, "behind"))
    if kind == "by_airflow":
        return ended - began, first_line - ended
    epoch = published.moment_of(client.xcom(kind, run, "waits")["epoch"])
    return epoch - began, ended - epoch, first_line - ended


def many(demo: Demo, published: Published) -> tuple[list[float], list[float]]:
    """Seconds from the publication of the epoch of its cut, of each sensor: until the wait knew it, until its task had
    ended."""
    client = demo.airflow.client
    moment = datetime.now(UTC) + timedelta(seconds=30 + SENSORS / 2)
    run = client.trigger("many", {"require": moment.isoformat()})
    until(lambda: [*client.tasks("many", run).values()].count("deferred") == SENSORS)
    if time.time() > moment.timestamp() - 1:
        raise TimeoutError("the machine is too busy: the moment comes before all sensors wait for it")
    if client.wait_for_run("many", run, 300) != "success":
        raise RuntimeError(f"many: {client.tasks('many', run)}")
    known = {
        waited.who: datetime.fromisoformat(waited.last_at).timestamp()
        for waited in WaitLog(str(demo.lake)).since(moment)
    }
    verdicts, ends = [], []
    for task in client.tasks("many", run):
        epoch = published.moment_of(client.xcom("many", run, task)["epoch"])
        verdicts.append(known[f"many.{task}"] - epoch)
        ends.append(datetime.fromisoformat(client.task("many", run, task)["end_date"]).timestamp() - epoch)
    return verdicts, ends


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
            until(lambda: set(KINDS) <= demo.airflow.client.dag_ids())
            found: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
            with Published(str(demo.lake)) as published:
                for number in range(TIMES + 1):
                    for kind in KINDS:
                        stages = once(demo, kind, published)
                        if number:  # the first one of each warms up
                            found[kind].append(stages)
                until(lambda: "many" in demo.airflow.client.dag_ids())
                verdicts, ends = many(demo, published)
            writer.stop()
    alone = statistics.median(stages[0] for stages in found["by_airflow"])
    own = "Airflow's DateTimeSensorAsync, alone, from its moment to its end"
    for to, seconds in (("the verdict", verdicts), ("the end of their tasks", ends)):
        for share, shown in ((0.5, "p50"), (0.99, "p99")):
            what = f"{SENSORS} sensors that wait together, from publication to {to}: {shown}"
            figure(what, float(np.quantile(seconds, share)), "s", own, alone)
    totals = {kind: [sum(stages) for stages in each] for kind, each in found.items()}
    for kind in KINDS[:2]:
        shown = kind.replace("_", " ")
        what = f"everything committed before a moment, from the moment to the next task's first line, {shown}"
        sensor = "Airflow's DateTimeSensorAsync for such a moment"
        theirs = statistics.median(totals["by_airflow"])
        figure(f"{what}: median of {TIMES}", statistics.median(totals[kind]), "s", sensor, theirs)
        figure(f"{what}: longest of {TIMES}", max(totals[kind]), "s", sensor, theirs)
        published_after, ended_after, begun_after = (statistics.median(s) for s in zip(*found[kind], strict=True))
        figure(f"{what}: the cut's epoch is published after", published_after, "s")
        figure(f"{what}: then the sensor's task ends after", ended_after, "s", sensor, alone)
        figure(f"{what}: then the next task's first line after", begun_after, "s")


if __name__ == "__main__":
    main()
