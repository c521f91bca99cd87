"""The pipeline's DAGs in a running Airflow on a real source: started once for all tests of this module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from headwater.jobs.demo.environment import Demo, demo_environment
from headwater.jobs.demo.shop import Writer
from headwater.jobs.demo.story import DOWNSTREAM, LOAD, RELOAD, REPLICATE, SENSOR, Story
from headwater.parent_watch import PARENT_PID

pytestmark = [pytest.mark.airflow, pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with demo_environment() as running:
        yield running


@pytest.fixture(scope="module")
def writer(demo: Demo) -> Iterator[Writer]:
    writer = Writer(demo.server.connect("shop"), rate=5)
    writer.start()
    yield writer
    writer.stop()


@pytest.fixture(scope="module")
def story(demo: Demo, writer: Writer) -> Story:
    """Loaded, and replicating."""
    story = Story(demo, writer, Console(), time.monotonic())
    story.await_airflow()
    assert demo.airflow.client.is_paused(REPLICATE)
    story.load()
    story.await_replication()
    return story


def until(condition: Callable[[], object], what: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds:.0f} s: {what}"
        time.sleep(0.2)


def drivers(demo: Demo, job: str) -> dict[int, int]:
    """Python drivers of `job` that tasks of this Airflow started, each with the id of its task's process."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environ = dict(
                part.split(b"=", 1) for part in (process / "environ").read_bytes().split(b"\0") if b"=" in part
            )
        except (OSError, ValueError):
            continue
        is_driver = b"python" in os.path.basename(command[0]) and any(
            f"headwater_{job}.py".encode() in c for c in command
        )
        if is_driver and environ.get(b"AIRFLOW_HOME") == str(demo.airflow.home).encode():
            found[int(process.name)] = int(environ[PARENT_PID.encode()])
    return found


def test_airflow_reports_no_import_error_of_dags_or_plugins(demo: Demo, story: Story) -> None:
    until(lambda: not demo.airflow.client.import_errors(), "no import errors")


def test_a_downstream_job_computes_on_its_cut_what_the_source_held_at_that_position(story: Story) -> None:
    outcome = story.prove(story.downstream())
    assert outcome.lake == outcome.source
    assert outcome.cut["pipeline"] == "shop"
    assert set(outcome.cut["tables"]) == {"public.customers", "public.orders", "public.order_lines"}


def test_a_waiting_task_sees_what_was_committed_before_it_began(demo: Demo, story: Story) -> None:
    from headwater.position import parse_lsn
    from headwater.source.samples import commit_position

    with demo.server.connect("shop") as connection:
        connection.execute("update products set stock = stock + 1 where id = 1")
        committed = commit_position(connection)
    run = story.downstream()
    cut = demo.airflow.client.xcom(DOWNSTREAM, run, SENSOR)
    assert parse_lsn(cut["position"]["lsn"]) >= committed.lsn


def test_a_table_is_reloaded_from_the_trigger_form_while_its_slice_goes_on(demo: Demo, story: Story) -> None:
    client = demo.airflow.client
    until(lambda: drivers(demo, "replicate"), "a slice runs")
    before = set(drivers(demo, "replicate"))
    run = client.trigger(RELOAD, {"table": "public.orders", "partitions": []})
    assert client.wait_for_run(RELOAD, run, 300) == "success", client.log(RELOAD, run, "reload")
    table = client.xcom(RELOAD, run, "reload")["tables"]["public.orders"]
    assert table["state"] == "active"
    assert table["rows"] > 0
    assert before & set(drivers(demo, "replicate")), "the slice that ran before still runs"
    story.prove(story.downstream())


def test_pausing_the_dag_stops_its_slice_and_unpausing_it_goes_on(demo: Demo, story: Story) -> None:
    client = demo.airflow.client
    until(lambda: drivers(demo, "replicate"), "a slice runs")
    slice_run = next(run["dag_run_id"] for run in client.runs(REPLICATE) if run["state"] == "running")
    client.set_paused(REPLICATE, True)
    until(lambda: not drivers(demo, "replicate"), "no slice runs")
    client.set_paused(REPLICATE, False)
    until(lambda: client.tasks(REPLICATE, slice_run)["replicate"] == "running", "the slice that was stopped goes on")
    # Its XCom is gone as soon as the task begins again.
    assert "the slice has stopped" in client.log(REPLICATE, slice_run, "replicate")


def test_a_driver_whose_task_was_killed_ends_by_itself_and_the_retry_goes_on(demo: Demo, story: Story) -> None:
    until(lambda: drivers(demo, "replicate"), "a slice runs")
    orphan, task = next(iter(drivers(demo, "replicate").items()))
    os.kill(task, signal.SIGKILL)
    until(lambda: orphan not in drivers(demo, "replicate"), "the driver without a task has ended")
    until(lambda: drivers(demo, "replicate"), "another slice runs")
    outcome = story.prove(story.downstream())
    assert outcome.lake == outcome.source


def test_a_faulty_pipeline_file_leaves_the_others_alone(demo: Demo, story: Story) -> None:
    client = demo.airflow.client
    faulty = demo.pipeline_file.with_name("faulty.yaml")
    faulty.write_text("pipeline: faulty\nsauce: {}\n")
    try:
        until(lambda: any("sauce" in error["stack_trace"] for error in client.import_errors()), "an import error")
        assert {LOAD, REPLICATE} <= client.dag_ids()
    finally:
        faulty.unlink()
    until(lambda: not client.import_errors(), "the import error goes with its cause")


def test_the_password_is_in_no_log_and_no_rendered_field(demo: Demo, story: Story) -> None:
    password = demo.source.split(":")[2].split("@")[0]
    logs = [file for file in demo.airflow.home.rglob("*.log") if file.is_file()]
    assert logs
    assert not [file for file in logs if password in file.read_text(encoding="utf-8", errors="replace")]
    for dag, task in ((LOAD, "load"), (REPLICATE, "replicate")):
        for run in demo.airflow.client.runs(dag):
            assert password not in str(demo.airflow.client.task(dag, run["dag_run_id"], task))
