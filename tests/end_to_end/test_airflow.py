"""The pipeline's DAGs in a running Airflow on a real source: started once for all tests of this module."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from psycopg import sql
from rich.console import Console

from fixtures import waiting
from fixtures.airflow_processes import AT_REST, RunningDriver, drivers, parse_again
from fixtures.browser import Browser
from fixtures.lakes import HandLake, position_at
from fixtures.object_stores import S3Server
from fixtures.shop_answers import assert_a_new_cut_is_exact
from headwater.demo.airflow_server import example_dags
from headwater.demo.environment import Demo, demo_environment
from headwater.demo.shop import Writer
from headwater.demo.story import DOWNSTREAM, LOAD, RELOAD, REPLICATE, SENSOR, Story
from headwater.errors import HeadwaterError
from headwater.lake.position_file import read_position_file
from headwater.names import TableName
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.pipeline_file.values import connection_variable
from headwater.position import parse_lsn
from headwater.replicate.pausing import pause
from headwater.source.samples import commit_position

pytestmark = [pytest.mark.airflow, pytest.mark.postgres, pytest.mark.spark]

until = partial(waiting.until, seconds=600, pause=0.5)
MOVED = "headwater_example_moved"
SOURCE, SECOND_PASSWORD = "shop_source", "another-S3cret"


UNMANNED = """
import os

from airflow.sdk import DAG, task
from headwater_airflow.sensors.freshness import FreshnessSensor

with DAG("unmanned", schedule=None, catchup=False, is_paused_upon_creation=False) as dag:

    @task
    def asked():
        return "now"

    FreshnessSensor(
        task_id="waits",
        pipeline="{{ params.folder }}/shop.yaml",
        tables=["public.orders"],
        require="{{ ti.xcom_pull(task_ids='asked', map_indexes=-1) }}",
        start_from_trigger=True,
        params={"folder": os.environ["HEADWATER_PIPELINES"]},
    ).set_upstream(asked())
"""
"""A sensor that no worker begins nor ends, with templates that the triggerer renders."""

BY_THE_CLOCK = """
import os

from airflow.sdk import DAG, task
from headwater_airflow.assets import cut_of, fresh, moment_of

shop = os.path.join(os.environ["HEADWATER_PIPELINES"], "shop.yaml")
with DAG("by_the_clock", schedule=[fresh(shop, "* * * * * */5", ["public.orders"])], max_active_runs=1):

    @task
    def cut(triggering_asset_events=None):
        return {**cut_of(triggering_asset_events), "moment": moment_of(triggering_asset_events).isoformat()}

    cut()
"""
"""A DAG that begins as soon as the lake is fresh for a moment: here one every five seconds."""

ON_REQUEST = """
import os

from airflow.sdk import DAG
from headwater_airflow.operators.spark import RebuildOperator, ValidateOperator
from headwater_airflow.sensors.freshness import FreshnessSensor

shop = os.path.join(os.environ["HEADWATER_PIPELINES"], "shop.yaml")
common = {"schedule": None, "catchup": False, "is_paused_upon_creation": False}
with DAG("rebuild", **common):
    RebuildOperator(task_id="rebuild", pipeline=shop, table="{{ dag_run.conf['table'] }}")
with DAG("validated", **common, default_args={"retries": 3}):
    fresh = FreshnessSensor(task_id="fresh", pipeline=shop, tables=["public.customers"], require="now")
    ValidateOperator(task_id="validate", pipeline=shop, tables=["public.customers"], cut=fresh.output)
with DAG("past", **common):
    FreshnessSensor(task_id="looks", pipeline=shop, tables=["public.orders"], require="0/1")
"""
"""Operators that the factory has no DAG for, or none with a cut, and a wait whose first look is enough."""

IN_A_STORE = """
import os

from airflow.sdk import DAG
from headwater_airflow.operators.spark import LoadOperator, ReplicateOperator
from headwater_airflow.sensors.freshness import FreshnessSensor

depot = os.path.join(os.environ["HEADWATER_PIPELINES"], "elsewhere", "depot.yaml")
with DAG("in_a_store", schedule=None, catchup=False, is_paused_upon_creation=False):
    load = LoadOperator(task_id="load", pipeline=depot)
    replicate = ReplicateOperator(task_id="replicate", pipeline=depot, max_seconds=20)
    fresh = FreshnessSensor(
        task_id="fresh", pipeline=depot, tables=["public.customers"], require="now", start_from_trigger=True
    )
    load >> [replicate, fresh]
"""
"""A lake in a store that nobody's environment opens: its keys are an Airflow connection's."""


class Metrics:
    """What Airflow sends to StatsD, as the lines that come out of the socket. Airflow's own metrics are not kept."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._lines: list[str] = []
        threading.Thread(target=self._receive, daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        """Settings of an Airflow that sends its metrics here, in the dialect that knows tags."""
        port = self._socket.getsockname()[1]
        return {
            "AIRFLOW__METRICS__STATSD_ON": "True",
            "AIRFLOW__METRICS__STATSD_HOST": "127.0.0.1",
            "AIRFLOW__METRICS__STATSD_PORT": str(port),
            "AIRFLOW__METRICS__STATSD_INFLUXDB_ENABLED": "True",
        }

    def count(self, start: str, end: str) -> int:
        """How many lines begin and end so, by now."""
        return sum(line.startswith(start) and line.endswith(end) for line in list(self._lines))

    def _receive(self) -> None:
        while True:
            lines = self._socket.recv(65536).decode().splitlines()
            self._lines += [line for line in lines if "headwater" in line.partition(":")[0].split(",")[0]]


@pytest.fixture(scope="module")
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture(scope="module")
def dags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dags")
    for file in example_dags().glob("*.py"):
        shutil.copy(file, folder)
    (folder / "unmanned.py").write_text(UNMANNED)
    (folder / "by_the_clock.py").write_text(BY_THE_CLOCK)
    (folder / "on_request.py").write_text(ON_REQUEST)
    (folder / "in_a_store.py").write_text(IN_A_STORE)
    return folder


@pytest.fixture(scope="module")
def demo(metrics: Metrics, dags: Path) -> Iterator[Demo]:
    environ = {**metrics.environ, **AT_REST, "AIRFLOW__CORE__TEST_CONNECTION": "Enabled"}
    # One slice for all tests, unless one ends it: each costs a Spark, and how they follow each other is the subject of
    # tests/end_to_end/slices.
    with demo_environment(slice_seconds=3600, dags=dags, environ=environ) as running:
        # As most deployments have it: the source is an Airflow connection, and nobody's environment holds it.
        file = running.pipeline_file
        file.write_text(file.read_text().replace("${HEADWATER_SOURCE}", f'"airflow: {SOURCE}"'))
        yield running


def set_connection(demo: Demo, method: str, password: str) -> None:
    """Creates (POST) or changes (PATCH) the connection in Airflow; the test's own commands have it, too."""
    body = {
        "connection_id": SOURCE,
        "conn_type": "headwater",
        "host": "127.0.0.1",
        "port": demo.server.port,
        "schema": "shop",
        "login": "headwater",
        "password": password,
    }
    demo.airflow.client.call(method, "connections" if method == "POST" else f"connections/{SOURCE}", body)
    os.environ[connection_variable(SOURCE)] = demo.server.conninfo("shop", "headwater", password)


def first_password(demo: Demo) -> str:
    return unquote(demo.source.split(":")[2].split("@")[0])


@pytest.fixture(scope="module")
def writer(demo: Demo) -> Iterator[Writer]:
    writer = Writer(demo.server.connect("shop"), rate=1)
    writer.start()
    yield writer
    writer.stop()


@pytest.fixture(scope="module")
def story(demo: Demo, writer: Writer) -> Story:
    """Loaded, and replicating."""
    story = Story(demo, writer, Console(), time.monotonic())
    story.await_airflow()
    set_connection(demo, "POST", first_password(demo))
    assert demo.airflow.client.is_paused(REPLICATE)
    story.load()
    story.await_replication()
    return story


def unpause(demo: Demo, dags: Path, dag: str) -> None:
    """Airflow watches for a DAG's assets from its next parsing on."""
    demo.airflow.client.set_paused(dag, False)
    parse_again(dags)


def newest_epoch(demo: Demo) -> int:
    file = read_position_file(str(demo.lake))
    assert file is not None
    return file.epoch


def test_airflow_reports_no_import_error_of_dags_or_plugins(demo: Demo, story: Story) -> None:
    until(lambda: not demo.airflow.client.import_errors(), "no import errors")


def test_a_connection_to_the_source_is_tested_by_airflows_button(demo: Demo, story: Story) -> None:
    def tested(password: str) -> tuple[bool, str]:
        body = {
            "connection_id": "shop_db",
            "conn_type": "headwater",
            "host": "127.0.0.1",
            "port": demo.server.port,
            "schema": "shop",
            "login": "headwater",
            "password": password,
        }
        answer = demo.airflow.client.call("POST", "connections/test", body)
        return answer["status"], answer["message"]

    works, said = tested(first_password(demo))
    assert works, said
    assert "database shop, as headwater" in said
    works, said = tested("another-one")
    assert not works
    assert "password" in said
    assert "another-one" not in said


def test_a_downstream_job_sees_what_was_committed_before_it_began_and_computes_what_the_source_held_at_its_cut(
    demo: Demo, story: Story
) -> None:
    with demo.server.connect("shop") as connection:
        connection.execute("update products set stock = stock + 1 where id = 1")
        committed = commit_position(connection)
    outcome = story.prove(story.downstream())
    assert outcome.lake == outcome.source
    assert outcome.cut["pipeline"] == "shop"
    assert set(outcome.cut["tables"]) == {"public.customers", "public.orders", "public.order_lines"}
    assert parse_lsn(outcome.cut["position"]["lsn"]) >= committed.lsn


def test_a_sensor_waits_from_beginning_to_end_without_a_worker(demo: Demo, story: Story) -> None:
    client = demo.airflow.client
    with demo.server.connect("shop") as connection:
        connection.execute("update orders set status = status where id = 1")
        committed = commit_position(connection)
    run = client.trigger("unmanned")
    assert client.wait_for_run("unmanned", run, 300) == "success", client.tasks("unmanned", run)
    cut = client.xcom("unmanned", run, "waits")
    assert set(cut["tables"]) == {"public.orders"}
    assert parse_lsn(cut["position"]["lsn"]) >= committed.lsn
    waited = client.task("unmanned", run, "waits")
    assert (waited["try_number"], waited["pid"]) == (1, None), "no process of a worker"


@pytest.mark.parametrize("dag", ["unmanned", "past"])
def test_a_wait_is_counted_in_airflows_own_metrics_wherever_it_ends(
    demo: Demo, story: Story, metrics: Metrics, dag: str
) -> None:
    """In the triggerer; in a worker."""
    client = demo.airflow.client

    def sent() -> tuple[int, int]:
        return (
            metrics.count("airflow.headwater_wait.satisfied,pipeline=shop:", "1|c"),
            metrics.count("airflow.headwater_wait.duration,pipeline=shop:", "|ms"),
        )

    before = sent()
    run = client.trigger(dag)
    assert client.wait_for_run(dag, run, 300) == "success", client.tasks(dag, run)
    until(lambda: sent() == (before[0] + 1, before[1] + 1), "one wait more is counted, with its time")


def test_a_dag_runs_when_a_table_has_moved_and_a_pause_loses_nothing(demo: Demo, story: Story, dags: Path) -> None:
    client = demo.airflow.client

    def ran(*, from_epoch: int) -> bool:
        """Whether a run has had an event with a cut of that epoch or a later one."""
        done = [run["dag_run_id"] for run in client.runs(MOVED) if run["state"] == "success"]
        return bool(done) and client.xcom(MOVED, done[0], "cut")["epoch"] >= from_epoch

    unpause(demo, dags, MOVED)
    until(lambda: ran(from_epoch=1), "a first run, on the cut of an event")
    client.set_paused(MOVED, True)
    epoch = newest_epoch(demo) + 2
    until(lambda: newest_epoch(demo) >= epoch, "the writer's orders are published during the pause")
    assert not ran(from_epoch=epoch)
    unpause(demo, dags, MOVED)
    until(lambda: ran(from_epoch=epoch), "the next event covers what came in the pause")
    client.set_paused(MOVED, True)


def test_a_dag_begins_when_the_lake_holds_everything_before_its_moment(demo: Demo, story: Story, dags: Path) -> None:
    client = demo.airflow.client

    def moments() -> list[datetime]:
        done = [run["dag_run_id"] for run in client.runs("by_the_clock") if run["state"] == "success"]
        return sorted(datetime.fromisoformat(client.xcom("by_the_clock", run, "cut")["moment"]) for run in done)

    unpause(demo, dags, "by_the_clock")
    until(lambda: len(moments()) >= 2, "two moments have their runs")
    client.set_paused("by_the_clock", True)
    found = moments()
    assert found[0] < found[1]
    assert all(moment.second % 5 == 0 and not moment.microsecond for moment in found)


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


def test_a_backfill_reloads_what_lies_in_the_interval_of_each_run(demo: Demo, story: Story) -> None:
    client = demo.airflow.client

    def asked(conf: dict[str, Any], first: str, last: str) -> list[dict[str, Any]]:
        known = {run["dag_run_id"] for run in client.runs(RELOAD)}
        bounds = {"from_date": f"{first}T00:00:00Z", "to_date": f"{last}T00:00:00Z"}
        body = {"dag_id": RELOAD, **bounds, "max_active_runs": 2, "dag_run_conf": conf}
        made: list[int] = []

        def is_made() -> bool:
            try:
                made.append(client.call("POST", "backfills", body)["id"])
            except HeadwaterError as error:
                # This Airflow stands on SQLite, where a backfill is not made while anything else writes.
                if "Database is locked" not in error.message:
                    raise
            return bool(made)

        # What a try that failed had made already, and takes back, the scheduler must not have seen: it would end.
        client.set_paused(RELOAD, True)
        until(is_made, "the backfill is made")
        client.set_paused(RELOAD, False)
        until(lambda: client.call("GET", f"backfills/{made[0]}")["completed_at"], "the backfill is done")
        return [run for run in client.runs(RELOAD) if run["dag_run_id"] not in known]

    assert {run["run_type"] for run in client.runs(RELOAD)} <= {"manual"}, "the scheduler begins none"
    where = "id >= {start:%-d} and id < {end:%-d}"
    runs = asked({"table": "public.orders", "where": where}, "2026-03-01", "2026-03-03")
    said = [(run["run_type"], run["state"], client.tasks(RELOAD, run["dag_run_id"])) for run in runs]
    assert said == [("backfill", "success", {"reload": "success"})] * 3
    for run in runs:
        day = int(run["data_interval_start"][8:10])
        # On a busy machine Airflow may have taken a try for lost before it began.
        tries = client.task(RELOAD, run["dag_run_id"], "reload")["try_number"]
        told = client.log(RELOAD, run["dag_run_id"], "reload", tries)
        assert f"--where=id >= {day} and id < {day + 1}" in told
        assert client.xcom(RELOAD, run["dag_run_id"], "reload")["tables"]["public.orders"]["state"] == "active"
    (refused,) = asked({"table": "public.orders"}, "2026-03-10", "2026-03-10")
    assert refused["state"] == "failed"
    assert "each run of a backfill would reload the same" in client.log(RELOAD, refused["dag_run_id"], "reload")


def test_a_table_takes_the_shape_that_the_file_gives_it_by_now_while_its_slice_goes_on(
    demo: Demo, story: Story
) -> None:
    client, table = demo.airflow.client, demo.lake / "public" / "products"
    until(lambda: drivers(demo, "replicate"), "a slice runs")
    before = set(drivers(demo, "replicate"))
    text = demo.pipeline_file.read_text()
    demo.pipeline_file.write_text(
        text.replace("  - public.products\n", "  - {name: public.products, types: {stock: bigint}}\n")
    )
    run = client.trigger("rebuild", {"table": "public.products"})
    assert client.wait_for_run("rebuild", run, 300) == "success", client.log("rebuild", run, "rebuild")
    rebuilt = client.xcom("rebuild", run, "rebuild")["tables"]["public.products"]
    assert (rebuilt["state"], rebuilt["rows"]) == ("active", 200)
    assert before & set(drivers(demo, "replicate")), "the slice that ran before still runs"
    types = {field.name: str(field.type) for field in DeltaTable(table).schema().fields}
    assert types["stock"] == 'PrimitiveType("long")'


def test_a_lake_in_a_store_is_written_and_waited_for_with_the_keys_of_an_airflow_connection(
    demo: Demo, story: Story, s3_server: S3Server
) -> None:
    client, root = demo.airflow.client, s3_server.uri(s3_server.bucket(), "depot")
    extra = {"endpoint_url": s3_server.endpoint, "region_name": s3_server.region}
    keys = {"login": s3_server.access_key, "password": s3_server.secret_key}
    client.call(
        "POST", "connections", {"connection_id": "depot", "conn_type": "aws", **keys, "extra": json.dumps(extra)}
    )
    file = demo.pipeline_file.parent / "elsewhere" / "depot.yaml"
    file.parent.mkdir()
    file.write_text(
        f"pipeline: depot\nsource: {{connection: 'airflow: {SOURCE}'}}\n"
        f"lake: {{root: {root}, airflow: depot}}\ntables: [public.customers]\n"
    )
    run = client.trigger("in_a_store", {})
    assert client.wait_for_run("in_a_store", run, 300) == "success", client.log("in_a_store", run, "load")
    cut = client.xcom("in_a_store", run, "fresh")
    table = cut["tables"]["public.customers"]
    opened = DeltaTable(f"{root}/public/customers", table["version"], storage_options=s3_server.options)
    with demo.server.connect("shop") as connection:
        at_source = connection.execute("select id from customers order by id").fetchall()
    found = pa.table(QueryBuilder().register("t", opened).execute("select id from t order by id").read_all())
    assert found["id"].to_pylist() == [row[0] for row in at_source]
    assert (table["state"], table["path"]) == ("in step", f"{root}/public/customers")
    for task in ("load", "replicate", "fresh"):
        assert s3_server.secret_key not in client.log("in_a_store", run, task)


def test_a_cut_that_does_not_meet_its_suite_fails_the_task_at_once_and_names_the_rows(demo: Demo, story: Story) -> None:
    client = demo.airflow.client
    suite = demo.pipeline_file.parent / "expectations" / "public.customers.yaml"
    suite.parent.mkdir()
    suite.write_text(
        "name: rules\nexpectations:\n"
        "  - {type: expect_column_values_to_be_between, kwargs: {column: id, min_value: 2}}\n"
    )
    try:
        run = client.trigger("validated")
        assert client.wait_for_run("validated", run, 300) == "failed"
    finally:
        shutil.rmtree(suite.parent)
    found, cut = client.xcom("validated", run, "validate", "result"), client.xcom("validated", run, "fresh")
    assert (found["success"], found["epoch"], list(found["tables"])) == (False, cut["epoch"], ["public.customers"])
    assert [row["key"] for row in found["tables"]["public.customers"]["keys"]] == [{"id": 1}]
    assert client.task("validated", run, "validate")["try_number"] == 1


def slices(demo: Demo) -> list[str]:
    return [run["dag_run_id"] for run in demo.airflow.client.runs(REPLICATE) if run["state"] == "running"]


def the_one_slice(demo: Demo) -> tuple[str, RunningDriver]:
    """Where one takes over from another there are two, and the newer one may not have begun."""
    found: list[tuple[str, RunningDriver]] = []

    def is_alone() -> bool:
        runs, running = slices(demo), drivers(demo, "replicate")
        if len(runs) == len(running) == 1:
            found.append((runs[0], running[0]))
        return bool(found)

    until(is_alone, "one slice runs")
    return found[0]


def test_pausing_the_dag_stops_its_slice_and_unpausing_it_goes_on(demo: Demo, story: Story) -> None:
    client = demo.airflow.client
    slice_run, _ = the_one_slice(demo)
    client.set_paused(REPLICATE, True)
    until(lambda: not drivers(demo, "replicate"), "no slice runs")
    until(lambda: client.tasks(REPLICATE, slice_run)["replicate"] == "up_for_reschedule", "its task waits")
    assert slices(demo) == [slice_run], "its run is not over"
    # Now: a scheduler that has met the task while its DAG was paused may count another try when that is over.
    assert "the slice has stopped" in client.log(REPLICATE, slice_run, "replicate")
    client.set_paused(REPLICATE, False)
    until(lambda: client.tasks(REPLICATE, slice_run)["replicate"] == "running", "the slice that was stopped goes on")


def test_a_driver_whose_task_was_killed_ends_by_itself_and_the_retry_goes_on(
    demo: Demo, story: Story, writer: Writer
) -> None:
    until(lambda: drivers(demo, "replicate"), "a slice runs")
    orphan = drivers(demo, "replicate")[0]
    os.kill(orphan.task, signal.SIGKILL)
    until(lambda: orphan.is_gone, "the driver without a task has ended, and its JVM")
    until(lambda: drivers(demo, "replicate"), "another slice runs")
    assert_a_new_cut_is_exact(demo, writer, 300)


def test_a_slice_goes_on_with_the_password_that_the_connection_has_by_now(
    demo: Demo, story: Story, writer: Writer
) -> None:
    _, driver = the_one_slice(demo)
    with demo.server.connect("shop") as connection:
        connection.execute(sql.SQL("alter role headwater password {}").format(sql.Literal(SECOND_PASSWORD)))
        set_connection(demo, "PATCH", SECOND_PASSWORD)
        connection.execute("select pg_terminate_backend(pid, 10000) from pg_stat_activity where usename = 'headwater'")
        connection.execute("update products set stock = stock + 1 where id = 1")
        committed = commit_position(connection)

    def published() -> bool:
        file = read_position_file(str(demo.lake))
        return file is not None and file.position.lsn >= committed.lsn

    until(lambda: published() or driver.is_gone, "the change is published")
    assert driver in drivers(demo, "replicate"), "the same driver goes on"  # and its successor may have begun
    assert_a_new_cut_is_exact(demo, writer, 300)


def test_a_faulty_pipeline_file_leaves_the_others_alone(demo: Demo, story: Story, dags: Path) -> None:
    client = demo.airflow.client
    faulty = demo.pipeline_file.with_name("faulty.yaml")
    faulty.write_text("pipeline: faulty\nsauce: {}\n")
    parse_again(dags)
    try:
        until(lambda: any("sauce" in error["stack_trace"] for error in client.import_errors()), "an import error")
        assert {LOAD, REPLICATE} <= client.dag_ids()
    finally:
        faulty.unlink()
        parse_again(dags)
    until(lambda: not client.import_errors(), "the import error goes with its cause")


# The pages, in a real browser


@pytest.fixture(scope="module")
def pages(demo: Demo, story: Story, browser: Browser) -> Browser:
    """The browser of somebody who has signed in, the system's colours light."""
    browser.open(f"{demo.airflow.address}/auth/token/login?next=/")
    browser.script("localStorage.setItem('theme', 'light')")
    return browser


CHANGES = 7
"""The column of the pipeline's tables that says how many changes came lately."""


def shows(browser: Browser, *words: str) -> None:
    for word in words:
        browser.wait(lambda: word in browser.script("return document.body.innerText"), f"the page shows {word!r}")  # noqa: B023


def test_the_ui_leads_from_all_pipelines_to_one_and_its_tables(demo: Demo, pages: Browser) -> None:
    pages.open(f"{demo.airflow.address}/plugin/headwater")
    pages.into_frame("iframe[title=Headwater]")
    shows(pages, "Pipelines", "shop", "Up to date: 4 tables", "running", "retained WAL", "oldest open transaction")
    pages.one("a[href='pipelines/shop']").click()
    shows(pages, "End-to-end latency", "Where the time goes", "Newest epochs", "shop.replicate")
    pages.wait(lambda: len(pages.all("a[href^='pipelines/shop/tables/']")) == 4, "every table")
    pages.one("latency-chart[aria-label^='End-to-end latency of the last 6 h: at most '] canvas")
    next(button for button in pages.all(".choices button") if button.text == "1 h").click()
    chart = pages.one("latency-chart[aria-label^='End-to-end latency of the last 1 h: at most ']")
    drawn = json.loads(chart.get_attribute("data-drawn"))
    assert len(drawn["longest"]) == len(drawn["behind"]) == 60
    # The oldest commit of an epoch has waited at least as long as the mean one.
    least = [(longest, behind) for longest, behind in zip(drawn["longest"], drawn["behind"], strict=True) if longest]
    assert least
    assert all(behind is not None and behind >= longest - 0.001 for longest, behind in least), least
    assert pages.texts(".choices button[aria-pressed=true]") == ["1 h"]
    pages.script("sessionStorage.clear()")
    pages.one("a[href='pipelines/shop/tables/public.orders']").click()
    shows(pages, "public.orders", "Files", "What was applied", "Schema", "positional")
    pages.out_of_frame()
    # The address of the surrounding UI follows: what it shows can be sent to somebody.
    place = "/plugin/headwater/headwater/pipelines/shop/tables/public.orders"
    pages.wait(lambda: pages.driver.current_url.endswith(place), "the address in the surrounding UI")
    assert pages.errors() == []


def test_a_task_that_runs_leads_to_the_page_of_its_pipeline(demo: Demo, pages: Browser) -> None:
    client = demo.airflow.client
    until(lambda: drivers(demo, "replicate"), "a slice runs")
    run = next(run["dag_run_id"] for run in client.runs(REPLICATE) if run["state"] == "running")
    place = f"dags/{REPLICATE}/dagRuns/{quote(run, safe='')}/taskInstances/replicate/links"
    until(lambda: client.call("GET", place)["extra_links"]["Pipeline"], "the running task's link")
    pages.open(client.call("GET", place)["extra_links"]["Pipeline"])
    pages.into_frame("iframe[title=Headwater]")
    shows(pages, "Where the time goes", "Newest epochs")
    pages.out_of_frame()


def test_a_page_is_light_or_dark_as_the_ui_around_it(demo: Demo, pages: Browser) -> None:
    pages.open(f"{demo.airflow.address}/plugin/headwater")
    colours = {}
    for theme in ("light", "dark"):
        pages.out_of_frame()
        other = {"light": "dark", "dark": "light"}[theme]
        pages.script(f"document.documentElement.classList.replace('{other}', '{theme}')")
        pages.into_frame("iframe[title=Headwater]")
        pages.one(f"html[data-theme={theme}]")
        colours[theme] = pages.script("return getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]
    pages.out_of_frame()
    pages.script("localStorage.setItem('theme', 'dark')")
    pages.open(f"{demo.airflow.address}/headwater/")
    pages.one("html[data-theme=dark]")
    pages.script("localStorage.setItem('theme', 'light')")


def test_a_page_is_readable_on_a_narrow_screen(demo: Demo, pages: Browser) -> None:
    pages.size(320)
    try:
        for place, word in (
            ("", "retained WAL"),
            ("pipelines/shop", "Where the time goes"),
            ("pipelines/shop/tables/public.orders", "Schema"),
        ):
            pages.open(f"{demo.airflow.address}/headwater/{place}")
            shows(pages, word)
            assert pages.script("return document.documentElement.scrollWidth") <= 320, place
    finally:
        pages.size(1280)


def test_a_page_sorts_by_keyboard_and_looks_again_without_losing_its_place(demo: Demo, pages: Browser) -> None:
    pages.open(f"{demo.airflow.address}/headwater/pipelines/shop")
    header = "section th button"
    shows(pages, "public.order_lines")
    rows = "section table:has(a[href*='/tables/']) tbody tr"
    pages.all(header)[CHANGES - 1].send_keys("\n")
    pages.one("th[aria-sort=descending]")
    counted = [int(text.replace(",", "")) for text in pages.texts(f"{rows} td:nth-child({CHANGES})")]
    assert counted == sorted(counted, reverse=True)
    assert len(set(counted)) > 1
    search = pages.one("input[type=search]")
    search.send_keys("order")
    pages.wait(lambda: len(pages.all(rows)) == 2, "two tables with that name")
    before = pages.texts("footer")
    pages.wait(lambda: pages.texts("footer") != before, "the page has looked again")
    assert pages.script("return document.activeElement.type") == "search"
    assert pages.script("return document.activeElement.value") == "order"
    assert len(pages.all(rows)) == 2
    pages.script("sessionStorage.clear()")


def test_a_hidden_page_does_not_look(demo: Demo, pages: Browser) -> None:
    pages.open(f"{demo.airflow.address}/headwater/")
    shows(pages, "retained WAL")
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => arguments[0]});"
    asked = "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/')).length"
    pages.script(
        f"const [value] = arguments; {hide.replace('arguments[0]', 'value')}"
        "document.dispatchEvent(new Event('visibilitychange'))",
        True,
    )
    before = pages.script(asked)
    time.sleep(6)  # it would have looked after five
    assert pages.script(asked) <= before + 2  # what was under way
    settled = pages.script(asked)
    pages.script("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    pages.wait(lambda: pages.script(asked) > settled, "it looks as soon as it is seen again")


def test_a_button_starts_a_run_through_airflows_api(demo: Demo, pages: Browser) -> None:
    client = demo.airflow.client
    maintain = "shop.maintain"
    pages.open(f"{demo.airflow.address}/plugin/headwater/headwater/pipelines/shop")
    pages.into_frame("iframe[title=Headwater]")
    pages.wait(lambda: "Maintain" in pages.texts("header button"), "the button of a DAG that is there")
    assert pages.texts("header button") == ["Load", "Reload…", "Verify", "Maintain", "Pause replication"]
    next(button for button in pages.all("header button") if button.text == "Maintain").click()
    pages.one("dialog[open] button.primary").click()
    shows(pages, "was started: it waits, because the DAG is paused")
    (run,) = client.runs(maintain)
    assert run["run_type"] == "manual"
    client.call("DELETE", f"dags/{maintain}/dagRuns/{quote(run['dag_run_id'], safe='')}")
    # A link to Airflow's own page leads the surrounding UI there.
    next(link for link in pages.all(".dags a") if link.text == "shop.load").click()
    pages.out_of_frame()
    pages.wait(lambda: pages.driver.current_url.endswith("/dags/shop.load"), "the DAG's page")


def test_a_reload_is_asked_for_on_the_page_of_its_table(demo: Demo, pages: Browser) -> None:
    client = demo.airflow.client
    pages.open(f"{demo.airflow.address}/headwater/pipelines/shop/tables/public.customers")
    pages.wait(lambda: pages.texts("header button") == ["Reload…"], "the button")
    pages.all("header button")[0].click()
    pages.one("dialog[open] textarea").send_keys("public.customers_eu\n\n public.customers_us \n")
    pages.one("dialog[open] button.primary").click()
    shows(pages, "a run of shop.reload was started")
    run = client.runs("shop.reload")[0]
    # There are no such partitions: the job would refuse them.
    client.call("PATCH", f"dags/shop.reload/dagRuns/{quote(run['dag_run_id'], safe='')}", {"state": "failed"})
    assert run["conf"] == {"table": "public.customers", "partitions": ["public.customers_eu", "public.customers_us"]}
    # What was asked for by the trigger form before.
    pages.open(f"{demo.airflow.address}/headwater/pipelines/shop/tables/public.orders")
    shows(pages, "Reloads", "done")


def test_the_button_of_the_banner_cures_what_the_banner_says(demo: Demo, pages: Browser) -> None:
    pipeline = load_pipeline(demo.pipeline_file)
    pause(pipeline, [TableName.parse("public.products")])
    pages.open(f"{demo.airflow.address}/headwater/pipelines/shop")
    shows(pages, "Degraded: public.products is suspended: it was paused by hand.", "Load public.products again")
    pages.one(".health button.primary").click()
    pages.one("dialog[open] button.primary").click()
    shows(pages, "a run of shop.load was started")
    run = demo.airflow.client.runs(LOAD)[0]
    assert run["conf"] == {"tables": ["public.products"], "again": True}
    until(lambda: demo.airflow.client.tasks(LOAD, run["dag_run_id"]).get("load") == "success", "it is loaded again")
    shows(pages, "Up to date: 4 tables")


def test_the_button_of_a_paused_pipeline_resumes_it(demo: Demo, pages: Browser) -> None:
    pause(load_pipeline(demo.pipeline_file))
    pages.open(f"{demo.airflow.address}/headwater/pipelines/shop")
    shows(pages, "Paused since", "Resume the pipeline")
    pages.one(".health button.primary").click()
    pages.one("dialog[open] button.primary").click()
    shows(pages, "a run of shop.resume was started")
    shows(pages, "Up to date: 4 tables")


def test_a_sensor_that_waits_for_the_lake_is_shown_beside_it(demo: Demo, pages: Browser) -> None:
    client = demo.airflow.client
    run = client.trigger(DOWNSTREAM, {"headwater": {"require": "2099-01-01T00:00:00Z"}})
    until(lambda: client.tasks(DOWNSTREAM, run).get(SENSOR) == "deferred", "the sensor waits for what is to come")
    pages.open(f"{demo.airflow.address}/headwater/pipelines/shop")
    shows(pages, "Waiting sensors", f"{DOWNSTREAM} / {SENSOR}", "it is not reached yet")
    address = f"dags/{DOWNSTREAM}/dagRuns/{quote(run, safe='')}"
    client.call("PATCH", f"{address}?update_mask=state", {"state": "failed"})
    client.call("DELETE", address)


def test_what_needs_a_person_says_why_and_what_to_do(demo: Demo, pages: Browser, tmp_path: Path, dags: Path) -> None:
    """A second pipeline, whose source is down and whose lake was made by hand; and a file that cannot be used."""
    nowhere = "postgresql://someone:not-to-be-seen@127.0.0.1:1/nowhere"
    lake = HandLake(tmp_path / "lake", position_at(), ["public.a", "public.b"], pipeline="bank")
    lake.publish(0x2000, "public.a", "public.b")
    lake.enter("public.b", "suspended", "a value does not fit", "headwater load bank.yaml --table public.b --again")
    bank, broken = (demo.pipeline_file.with_name(name) for name in ("bank.yaml", "broken.yaml"))
    bank.write_text(
        f"pipeline: bank\nsource: {{connection: '{nowhere}'}}\nlake: {{root: '{lake.root}'}}\n"
        "tables: [public.a, public.b]\n"
    )
    broken.write_text("pipeline: broken\nsauce: {}\n")
    try:
        pages.open(f"{demo.airflow.address}/headwater/")
        shows(pages, "broken.yaml cannot be used", "unknown key", "bank", "a value does not fit", "See what to do")
        assert pages.texts(".card .badge.bad")[0] == "suspended"
        pages.open(f"{demo.airflow.address}/headwater/pipelines/bank")
        shows(pages, "Source unreachable", "Connection refused", "public.b is suspended", "What to do:", "--again")
        assert "not-to-be-seen" not in pages.driver.page_source
    finally:
        bank.unlink()
        broken.unlink()
    pages.open(f"{demo.airflow.address}/headwater/pipelines/bank")
    shows(pages, "there is no pipeline bank")
    parse_again(dags)
    until(lambda: not demo.airflow.client.import_errors(), "the import error goes with its cause")


def test_metrics_are_scraped_with_a_token(demo: Demo, story: Story) -> None:
    """Without one they are not (`tests/unit/airflow/test_pages.py`); here everybody is an administrator."""
    address = f"{demo.airflow.address}/headwater/metrics"
    with urllib.request.urlopen(f"{demo.airflow.address}/auth/token", timeout=60) as answer:
        token = json.loads(answer.read())["access_token"]
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    scraped = {
        (sample.name, sample.labels.get("table")): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    assert scraped["headwater_pipeline_up", None] == 1
    assert scraped["headwater_pipeline_lag_seconds", None] < 600
    assert scraped["headwater_slot_retained_wal_bytes", None] >= 0
    assert scraped["headwater_table_version", "public.orders"] >= 1


def test_the_password_is_in_no_log_and_no_rendered_field(demo: Demo, story: Story) -> None:
    passwords = first_password(demo), SECOND_PASSWORD
    logs = [file for file in demo.airflow.home.rglob("*.log") if file.is_file()]
    assert logs
    assert not [
        file
        for file in logs
        if any(password in file.read_text(encoding="utf-8", errors="replace") for password in passwords)
    ]
    for dag, task in ((LOAD, "load"), (REPLICATE, "replicate")):
        for run in demo.airflow.client.runs(dag):
            shown = str(demo.airflow.client.task(dag, run["dag_run_id"], task))
            assert not any(password in shown for password in passwords)
