"""A part of Airflow dies, or somebody takes a slice's task or run away while its driver works.

Each time the old driver ends by itself or goes on, as the pages say, and another takes over: no two write in turns, and
the lake is what the source is. One Airflow for all tests (tests/end_to_end/slices/conftest.py), whose slices do not
end by themselves meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import pytest

from fixtures import waiting
from fixtures.airflow_processes import RunningDriver, deploy_slices_of, drivers, kill_service, service
from fixtures.shop_answers import assert_a_new_cut_is_exact
from headwater.demo.environment import Demo
from headwater.demo.shop import TABLES, Writer
from headwater.demo.story import REPLICATE, Story
from headwater.lake.ledger import generation_app, read_all
from headwater.lake.position_file import PositionFile, read_position_file
from headwater.position import parse_lsn

pytestmark = [pytest.mark.airflow, pytest.mark.postgres, pytest.mark.spark]

SLICE_SECONDS, NEW_SLICE_SECONDS = 3600.0, 3333.0
LONG = 300
until = partial(waiting.until, pause=0.5)


@pytest.fixture(scope="module")
def services(demo: Demo) -> Iterator[ExitStack]:
    """What was started again; it goes on working for the tests that follow."""
    with ExitStack() as started:
        yield started


@pytest.fixture(scope="module")
def long_slices(demo: Demo, story: Story, dags: Path) -> None:
    deploy_slices_of(SLICE_SECONDS, demo, dags)
    if f"{SLICE_SECONDS:g}" not in _lengths(demo):
        demo.airflow.client.trigger(REPLICATE)  # takes over from one of another length
    until(lambda: _lengths(demo) == [f"{SLICE_SECONDS:g}"], "one slice runs, and is long", LONG)


@pytest.fixture
def driver(demo: Demo, long_slices: None, writer: Writer) -> Iterator[RunningDriver]:
    """The only one, publishing. At the end: whoever wrote, the lake and its history are exact."""
    if not _runs(demo):
        demo.airflow.client.trigger(REPLICATE)
    until(lambda: len(_runs(demo)) == len(drivers(demo, "replicate")) == 1, "one slice runs", LONG)
    _await_epochs(demo)
    yield drivers(demo, "replicate")[0]
    _assert_exact(demo, writer)


def _lengths(demo: Demo) -> list[str]:
    """Of the slices whose drivers run."""
    every = [driver.arguments for driver in drivers(demo, "replicate")]
    return [arguments[arguments.index("--max-seconds") + 1] for arguments in every]


def _runs(demo: Demo) -> list[str]:
    return [run["dag_run_id"] for run in demo.airflow.client.runs(REPLICATE) if run["state"] in ("running", "queued")]


def _published(demo: Demo) -> PositionFile:
    file = read_position_file(str(demo.lake))
    assert file is not None
    return file


def _await_epochs(demo: Demo) -> None:
    """Until what is written from now on is published."""
    epoch = _published(demo).epoch + 2
    until(lambda: _published(demo).epoch >= epoch, "epochs are published", LONG)


def _await_successor(demo: Demo, old: RunningDriver, generation: int) -> RunningDriver:
    until(lambda: old.is_gone, "the old driver has ended, and its JVM", LONG)
    until(lambda: _published(demo).generation > generation, "another driver publishes", LONG)
    (new,) = drivers(demo, "replicate")
    assert new.pid != old.pid
    return new


def _assert_exact(demo: Demo, writer: Writer) -> None:
    """A new cut is what the source's own log says; nobody has ever written behind a successor."""
    assert_a_new_cut_is_exact(demo, writer, LONG)
    for before, epoch in pairwise(read_all(str(demo.lake))):
        assert (epoch.epoch, epoch.from_lsn) == (before.epoch + 1, before.position.lsn)
        assert epoch.generation >= before.generation
    for name in TABLES:
        generations = _generations(demo.lake / "public" / name / "_delta_log")
        assert generations == sorted(generations)


def _generations(log: Path) -> list[int]:
    """Which drivers committed to a table, in the order of its versions."""
    actions = [json.loads(line) for file in sorted(log.glob("*.json")) for line in file.read_text().splitlines()]
    transactions = [action["txn"] for action in actions if "txn" in action]
    return [txn["version"] for txn in transactions if txn["appId"] == generation_app("shop")]


def test_a_slice_outlives_its_scheduler_and_the_next_one_begins_it_anew(
    demo: Demo, services: ExitStack, driver: RunningDriver
) -> None:
    generation, (run,) = _published(demo).generation, _runs(demo)
    kill_service(demo, "scheduler")
    _await_epochs(demo)
    assert not driver.is_gone
    assert _published(demo).generation == generation, "the same driver goes on without a scheduler"
    services.enter_context(service(demo, "scheduler"))
    _await_successor(demo, driver, generation)
    assert _runs(demo) == [run], "in the same run"


def test_a_slice_outlives_its_api_server(demo: Demo, services: ExitStack, driver: RunningDriver) -> None:
    client, generation, (run,) = demo.airflow.client, _published(demo).generation, _runs(demo)
    tries = client.task(REPLICATE, run, "replicate")["try_number"]
    kill_service(demo, "api-server")
    _await_epochs(demo)
    services.enter_context(service(demo, "api-server"))
    until(client.healthy, "Airflow answers again", LONG)
    _await_epochs(demo)
    task = client.task(REPLICATE, run, "replicate")
    assert (task["state"], task["try_number"], _runs(demo)) == ("running", tries, [run])
    assert not driver.is_gone
    assert _published(demo).generation == generation


def test_a_sensor_waits_on_for_the_same_position_when_its_triggerer_was_killed(
    demo: Demo, services: ExitStack, driver: RunningDriver
) -> None:
    client, (slice_,) = demo.airflow.client, _runs(demo)
    client.set_paused(REPLICATE, True)
    until(lambda: driver.is_gone, "nobody replicates", LONG)
    # Two writers of Airflow's database at the same moment may wait for each other, until it ends that.
    until(lambda: client.task(REPLICATE, slice_, "replicate")["state"] != "running", "its task has ended", LONG)
    run = client.trigger("waits")
    until(lambda: client.tasks("waits", run).get("fresh") == "deferred", "the sensor waits", LONG)

    def told() -> list[str]:
        return re.findall(r"wanted: ([0-9A-F]+/[0-9A-F]+)", client.log("waits", run, "fresh"))

    until(lambda: len(told()) >= 2, "the worker has said what is waited for, and then the triggerer", LONG)
    before = told()
    kill_service(demo, "triggerer")
    services.enter_context(service(demo, "triggerer"))
    until(lambda: len(told()) > len(before), "the next triggerer says it as well", LONG)
    client.set_paused(REPLICATE, False)
    assert client.wait_for_run("waits", run, LONG) == "success"
    cut = client.xcom("waits", run, "fresh")
    assert set(told()) == {cut["target"]}
    assert parse_lsn(cut["position"]["lsn"]) >= parse_lsn(cut["target"])


def test_a_task_that_is_cleared_while_it_runs_ends_its_driver_and_begins_anew(
    demo: Demo, driver: RunningDriver
) -> None:
    client, generation, (run,) = demo.airflow.client, _published(demo).generation, _runs(demo)
    client.call(
        "POST",
        f"dags/{REPLICATE}/clearTaskInstances",
        {"dry_run": False, "dag_run_id": run, "task_ids": ["replicate"], "only_failed": False},
    )
    _await_successor(demo, driver, generation)
    assert _runs(demo) == [run], "in the same run"


@pytest.mark.parametrize("state", ["success", "failed"])
def test_a_task_that_is_marked_while_it_runs_ends_its_driver_and_the_next_run_goes_on(
    demo: Demo, driver: RunningDriver, state: str
) -> None:
    client, generation, (run,) = demo.airflow.client, _published(demo).generation, _runs(demo)
    client.call(
        "PATCH", f"dags/{REPLICATE}/dagRuns/{quote(run, safe='')}/taskInstances/replicate", {"new_state": state}
    )
    until(lambda: driver.is_gone, "the driver of the task has ended, and its JVM", LONG)
    until(lambda: not _runs(demo), "its run is over", LONG)
    assert client.run(REPLICATE, run)["state"] == state
    client.trigger(REPLICATE)
    _await_successor(demo, driver, generation)


def test_a_run_of_newly_deployed_code_beside_an_older_one_takes_over_from_it(
    demo: Demo, dags: Path, driver: RunningDriver
) -> None:
    client, generation, (old,) = demo.airflow.client, _published(demo).generation, _runs(demo)
    deploy_slices_of(NEW_SLICE_SECONDS, demo, dags)
    _await_epochs(demo)
    assert not driver.is_gone, "what runs goes on with the code that it began with"
    new = client.trigger(REPLICATE)
    successor = _await_successor(demo, driver, generation)
    assert f"{SLICE_SECONDS:g}" in driver.arguments
    assert f"{NEW_SLICE_SECONDS:g}" in successor.arguments
    until(lambda: _runs(demo) == [new], "the older run is over", LONG)
    assert client.run(REPLICATE, old)["state"] == "success"
    assert client.xcom(REPLICATE, old, "replicate")["handed_over"] is True
