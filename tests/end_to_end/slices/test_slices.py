"""Successive slices in a running Airflow: the next run begins before the last one ends, and takes over from it.

The scheduler is a real one and so are the drivers, each with a JVM of its own, started by spark-submit. What a commit
needs from the source to the published position across these boundaries is printed, and judged by nobody. Airflow and
pipeline: tests/end_to_end/slices/conftest.py.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fixtures import waiting
from fixtures.airflow_processes import command_of, deploy_slices_of, drivers
from fixtures.jobs import beside
from fixtures.shop_answers import assert_a_new_cut_is_exact
from fixtures.soak import SOAK
from headwater.demo.environment import Demo
from headwater.demo.shop import TABLES, Writer
from headwater.demo.story import AGGREGATE, DOWNSTREAM, LOAD, RELOAD, REPLICATE, SENSOR, Story
from headwater.lake.position_file import read_position_file
from headwater.position import parse_lsn

pytestmark = [pytest.mark.airflow, pytest.mark.postgres, pytest.mark.spark]

LATER_SECONDS = 3600.0
"""Later, where their changes are not the subject, slices are long: each costs a Spark."""
SLICES = 6 if SOAK else 1
"""How many end, each while the next one works."""
STEP, PER_STEP = 0.1, 10


until = partial(waiting.until, pause=0.5)


def _change(demo: Demo, marks: list[tuple[int, float]], stop: threading.Event) -> None:
    """A hundred single-row commits a second; the position after each ten of them, and the moment."""
    with demo.server.connect("shop") as connection:
        due, number = time.monotonic(), 0
        while not stop.wait(max(0.0, due - time.monotonic())):
            for _ in range(PER_STEP):
                number += 1
                connection.execute("update products set stock = stock + 1 where id = %s", [1 + number % 200])
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            marks.append((parse_lsn(row[0]), time.monotonic()))
            due += STEP


def _measure(demo: Demo, marks: list[tuple[int, float]], delays: list[float], stop: threading.Event) -> None:
    """How long each mark took until its position was published."""
    while not stop.wait(0.02):
        file = read_position_file(str(demo.lake))
        now = time.monotonic()
        while file is not None and len(delays) < len(marks) and marks[len(delays)][0] <= file.position.lsn:
            delays.append(now - marks[len(delays)][1])


def _scheduled(demo: Demo, since: str = "") -> list[dict[str, Any]]:
    """The scheduled runs that were due at `since` or later, oldest first."""
    runs = [run for run in demo.airflow.client.runs(REPLICATE) if run["run_type"] == "scheduled"]
    return sorted((run for run in runs if run["run_after"] >= since), key=lambda run: run["run_after"])


def _has_ended(run: dict[str, Any]) -> bool:
    return run["state"] in ("success", "failed")


def _newest_works_alone(demo: Demo) -> bool:
    """Of the first two runs the older may begin last: a scheduler that has just started takes its time."""
    *before, newest = _scheduled(demo)
    return newest["state"] == "running" and all(map(_has_ended, before))


def assert_one_try(demo: Demo, run: str) -> None:
    """A slice that was tried again takes over from its own successor: the log of its first try says why."""
    client = demo.airflow.client
    tries = client.task(REPLICATE, run, "replicate")["try_number"]
    assert tries == 1, f"{run} was tried {tries} times. The first:\n{client.log(REPLICATE, run, 'replicate', 1)}"


def test_slices_take_over_from_each_other_while_the_source_goes_on(
    demo: Demo, story: Story, writer: Writer, dags: Path
) -> None:
    client = demo.airflow.client
    marks: list[tuple[int, float]] = []
    delays: list[float] = []
    until(lambda: _newest_works_alone(demo), "the newest slice works, and all before it have ended", 300)
    first = _scheduled(demo)[-1]["run_after"]

    def ended_since() -> list[dict[str, Any]]:
        return [run for run in _scheduled(demo, first) if _has_ended(run)]

    changing = beside(lambda stop: _change(demo, marks, stop))
    with changing, beside(lambda stop: _measure(demo, marks, delays, stop)):
        until(lambda: len(ended_since()) >= SLICES, f"{SLICES} slices have ended", 900)
        ended = ended_since()[:SLICES]
        measured = sorted(delays)
    for run in ended:
        assert_one_try(demo, run["dag_run_id"])
        result = client.xcom(REPLICATE, run["dag_run_id"], "replicate")
        assert run["state"] == "success"
        assert (result["stopped_by"], result["handed_over"]) == ("seconds", True), result
    scheduled = _scheduled(demo, first)[: SLICES + 1]
    for run in scheduled:
        assert_one_try(demo, run["dag_run_id"])
    assert [run["dag_run_id"] for run in scheduled[:-1]] == [run["dag_run_id"] for run in ended]
    for before, after in pairwise(scheduled):
        assert after["data_interval_start"] == before["data_interval_end"]
        assert after["start_date"] < before["end_date"], "two runs worked at once"
    runs = client.runs(REPLICATE)
    assert len(runs) <= sum(map(_has_ended, runs)) + 2
    print(
        f"commit to published over {len(ended)} boundaries: p50 {statistics.median(measured):.2f} s, "
        f"p99 {statistics.quantiles(measured, n=100)[98]:.2f} s, worst {measured[-1]:.2f} s of {len(measured)}"
    )
    assert_a_new_cut_is_exact(demo, writer, 300)
    deploy_slices_of(LATER_SECONDS, demo, dags)
    client.trigger(REPLICATE)  # by itself the next one would begin a whole new period behind the last


# What they tell OpenLineage


def _events(told: Path, job: str) -> list[dict[str, Any]]:
    """Of the task `job` (dag.task) that are complete, in order of their files: of their times."""
    found = []
    for file in sorted(told.glob(f"event-*-{job}-*.json")):
        text = file.read_text()
        if text.endswith("\n"):  # it is written as a whole, line feed last
            found.append(json.loads(text))
    return found


def _datasets(event: dict[str, Any], side: str) -> list[tuple[str, str]]:
    return [(dataset["namespace"], dataset["name"]) for dataset in event[side]]


def test_runs_tell_openlineage_which_tables_of_the_source_became_which_delta_tables(
    demo: Demo, story: Story, told: Path
) -> None:
    client = demo.airflow.client
    source = f"postgres://127.0.0.1:{demo.server.port}"

    def origins(*tables: str) -> list[tuple[str, str]]:
        return [(source, f"shop.public.{table}") for table in tables]

    def places(*tables: str) -> list[tuple[str, str]]:
        return [("file", f"{demo.lake}/public/{table}") for table in tables]

    def begins_and_ends(job: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The first event of a run of the task, and its last."""
        until(
            lambda: "COMPLETE" in [event["eventType"] for event in _events(told, job)], f"{job} has told its end", 300
        )
        events = _events(told, job)
        last = next(event for event in events if event["eventType"] == "COMPLETE")
        first = next(event for event in events if event["run"]["runId"] == last["run"]["runId"])
        assert (first["eventType"], first["job"]["name"]) == ("START", job)
        return first, last

    run = client.trigger(RELOAD, {"table": "public.orders", "partitions": []})
    assert client.wait_for_run(RELOAD, run, 300) == "success", client.log(RELOAD, run, "reload")
    until(lambda: any(map(_has_ended, _scheduled(demo))), "a slice has ended", 900)

    every = sorted(TABLES)
    before, loaded = begins_and_ends(f"{LOAD}.load")
    assert not any(dataset.get("facets") for dataset in before["outputs"]), "nothing is known before the load"
    for event in (before, loaded, *begins_and_ends(f"{REPLICATE}.replicate")):
        assert (_datasets(event, "inputs"), _datasets(event, "outputs")) == (origins(*every), places(*every))
    for event in begins_and_ends(f"{RELOAD}.reload"):
        assert (_datasets(event, "inputs"), _datasets(event, "outputs")) == (origins("orders"), places("orders"))
        (orders,) = event["outputs"]
        columns = [field["name"] for field in orders["facets"]["schema"]["fields"]]
        assert {"id", "customer_id"} <= set(columns)
        (origin,) = orders["facets"]["columnLineage"]["fields"]["id"]["inputFields"]
        assert (origin["namespace"], origin["name"], origin["field"]) == (source, "shop.public.orders", "id")
    assert [set(table["facets"]) >= {"schema", "columnLineage"} for table in loaded["outputs"]] == [True] * len(every)


def test_a_job_on_a_cut_tells_openlineage_the_versions_that_it_reads(demo: Demo, story: Story, told: Path) -> None:
    run = story.downstream()
    cut = demo.airflow.client.xcom(DOWNSTREAM, run, SENSOR)
    wanted = {f"{demo.lake}/{name.replace('.', '/')}": str(table["version"]) for name, table in cut["tables"].items()}

    def read() -> list[dict[str, str]]:
        ends = [event for event in _events(told, f"{DOWNSTREAM}.{AGGREGATE}") if event["eventType"] == "COMPLETE"]
        return [
            {table["name"]: table["facets"]["version"]["datasetVersion"] for table in event["inputs"]} for event in ends
        ]

    until(lambda: wanted in read(), "the end of the job is told, with the versions of its cut", 300)


def test_a_driver_knows_the_task_that_started_it_as_its_parent_and_no_event_tells_a_password(
    demo: Demo, story: Story, told: Path
) -> None:
    parent = f"spark.openlineage.parentJobName={REPLICATE}.replicate"
    # Of two slices one may be about to end.
    until(lambda: any(parent in command_of(one.jvm) for one in drivers(demo, "replicate")), "a slice knows it", 300)
    password = demo.source.split(":")[2].split("@")[0]
    files = list(told.iterdir())
    assert files
    assert not [file for file in files if password in file.read_text()]
