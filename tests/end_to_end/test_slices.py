"""Successive slices in a running Airflow: the next run begins before the last one ends, and takes over from it.

The scheduler is a real one and so are the drivers, each with a JVM of its own, started by spark-submit. What a commit
needs from the source to the published position across these boundaries is printed, and judged by nobody.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from fixtures.jobs import beside, until
from fixtures.soak import SOAK
from headwater.jobs.demo.environment import Demo, demo_environment
from headwater.jobs.demo.shop import Writer
from headwater.jobs.demo.story import REPLICATE, Story
from headwater.lake.position_file import read_position_file
from headwater.position import parse_lsn

pytestmark = [pytest.mark.airflow, pytest.mark.postgres, pytest.mark.spark]

SLICE_SECONDS = 80.0
"""Of which the next one is given half to make itself ready."""
SLICES = 6 if SOAK else 1
"""How many end, each while the next one works."""
STEP, PER_STEP = 0.1, 10


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with demo_environment(slice_seconds=SLICE_SECONDS) as running:
        yield running


@pytest.fixture(scope="module")
def story(demo: Demo) -> Iterator[Story]:
    writer = Writer(demo.server.connect("shop"), rate=5)
    writer.start()
    story = Story(demo, writer, Console(), time.monotonic())
    story.await_airflow()
    story.load()
    story.await_replication()
    yield story
    writer.stop()


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


def _ended(demo: Demo) -> list[dict[str, Any]]:
    """The scheduled runs that have ended, oldest first."""
    runs = [run for run in demo.airflow.client.runs(REPLICATE) if run["run_type"] == "scheduled"]
    return sorted((run for run in runs if run["state"] in ("success", "failed")), key=lambda run: run["run_after"])


def test_slices_take_over_from_each_other_while_the_source_goes_on(demo: Demo, story: Story) -> None:
    client = demo.airflow.client
    marks: list[tuple[int, float]] = []
    delays: list[float] = []
    changing = beside(lambda stop: _change(demo, marks, stop))
    with changing, beside(lambda stop: _measure(demo, marks, delays, stop)):
        until(lambda: len(_ended(demo)) >= SLICES, f"{SLICES} slices have ended", 900)
        ended = _ended(demo)[:SLICES]
        measured = sorted(delays)
    for run in ended:
        result = client.xcom(REPLICATE, run["dag_run_id"], "replicate")
        assert run["state"] == "success"
        assert (result["stopped_by"], result["handed_over"]) == ("seconds", True), result
    runs = sorted(client.runs(REPLICATE), key=lambda run: run["run_after"])
    scheduled = [run for run in runs if run["run_type"] == "scheduled"][: SLICES + 1]
    assert [run["dag_run_id"] for run in scheduled[:-1]] == [run["dag_run_id"] for run in ended]
    for before, after in pairwise(scheduled):
        assert after["data_interval_start"] == before["data_interval_end"]
        assert after["start_date"] < before["end_date"], "two runs worked at once"
    assert len(runs) <= len(_ended(demo)) + 2
    print(
        f"commit to published over {len(ended)} boundaries: p50 {statistics.median(measured):.2f} s, "
        f"p99 {statistics.quantiles(measured, n=100)[98]:.2f} s, worst {measured[-1]:.2f} s of {len(measured)}"
    )
    outcome = story.prove(story.downstream())
    assert outcome.lake == outcome.source
