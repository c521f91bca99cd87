"""A driver whose connection to the source has dropped lives, though the source does not show it: what jobs do meanwhile
it knows before it goes on with the log, and nobody takes it for gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import (
    armed,
    assert_equal,
    beside,
    following,
    in_thread,
    lake_rows,
    load_tables,
    looks_for_jobs_every,
    record_of,
    registry_of,
    until,
)
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.gate import drivers
from headwater.gate.drivers import without_driver
from headwater.gate.wal_ceiling import CeilingWatch
from headwater.lake.registry import TableRecord
from headwater.load import load as loading
from headwater.load.driver_answers import is_running
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.reload.reload import reload
from headwater.replicate.batches.lanes import Result
from headwater.replicate.beside.loads import LoadsFollowed
from headwater.replicate.pausing import pause
from headwater.replicate.reader.handle import LogReader, ReaderOptions
from headwater.replicate.replicate import replicate
from headwater.source.connection import Connection, connect, position_now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

OLD, NEW = "public.old", "public.new"


@pytest.fixture
def pipeline(database: Database, spark: SparkSession, tmp_path: Path) -> Pipeline:
    database.allow_publishing()
    for name in (OLD, NEW):
        database.execute(f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1)")
    return pipeline_in_step(tmp_path, database, OLD, source={"wal_ceiling": "32MiB"})


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    with connect(database.conninfo) as made:
        yield made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver goes on connecting, however long what comes meanwhile takes."""
    monkeypatch.setattr("headwater.replicate.start.ReaderOptions", partial(ReaderOptions, patience=600.0))


@contextmanager
def cut_off(database: Database, pipeline: Pipeline, patched: pytest.MonkeyPatch) -> Iterator[None]:
    """The driver of this process has lost its connection to the log, and gets another one behind the block."""
    tell = LogReader._tell_conninfo

    def nowhere(reader: LogReader) -> None:
        reader._child.tell("conninfo", "host=/nowhere")

    patched.setattr(LogReader, "_tell_conninfo", nowhere)
    with database.superuser() as admin:
        admin.execute(
            "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where slot_name = %s",
            [pipeline.source.slot],
        )
        free = "select not active from pg_replication_slots where slot_name = %s"
        until(lambda: admin.execute(free, [pipeline.source.slot]).fetchone() == (True,), "nobody reads the slot")
        yield
    patched.setattr(LogReader, "_tell_conninfo", tell)


@pytest.mark.usefixtures("patient")
def test_a_load_that_began_and_ended_meanwhile_misses_nothing(
    database: Database, pipeline: Pipeline, connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a store: no lock tells of the driver, and it looks at the registry now and then only."""
    monkeypatch.setattr(loading, "await_return", lambda *_: False)
    looks_for_jobs_every(monkeypatch, 600.0)
    both = write_pipeline(tmp_path, database, OLD, NEW)
    with following(pipeline) as driver:
        until(lambda: is_running(connection, pipeline) or driver.done(), "the driver runs")
        with cut_off(database, pipeline, monkeypatch), armed(tmp_path, "load.after_capture") as hold:
            job = in_thread(lambda: load_tables(both, NEW))
            hold.reached(job)
            database.execute("insert into new values (2, 2)", "update new set n = 7 where id = 1")
            hold.release()
            assert job.result(120)["tables"][NEW]["state"] == "catching up"
            database.execute("insert into new values (3, 3)")
        until(lambda: record_of(both, NEW).state == "active" or driver.done(), "the table joins the cuts")
        database.execute("insert into new values (4, 4)", "insert into old values (4, 4)")
        until(lambda: len(lake_rows(both, OLD)) == 2 or driver.done(), "the driver goes on")
    assert_equal(database, both, OLD, NEW)


@pytest.mark.usefixtures("patient")
def test_nothing_is_read_before_the_table_s_lane_keeps_for_its_load(
    database: Database,
    pipeline: Pipeline,
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All lanes may be busy when the driver is back, and a table's own changes come before its errands."""
    monkeypatch.setattr(loading, "await_return", lambda *_: False)
    keep, begins, may = LoadsFollowed._keep, threading.Event(), threading.Event()

    def late(loads: LoadsFollowed, record: TableRecord) -> Result:
        begins.set()
        assert may.wait(60)
        return keep(loads, record)

    monkeypatch.setattr(LoadsFollowed, "_keep", late)
    looks_for_jobs_every(monkeypatch, 600.0)
    both = write_pipeline(tmp_path, database, OLD, NEW)
    with following(pipeline) as driver:
        until(lambda: is_running(connection, pipeline) or driver.done(), "the driver runs")
        with cut_off(database, pipeline, monkeypatch):
            load_tables(both, NEW)
            database.execute("insert into new values (2, 2)")
        until(lambda: begins.is_set() or driver.done(), "the driver is back, and knows of the load")
        database.execute("insert into new values (3, 3)", "update new set n = 7 where id = 1")
        sent = "select sent_lsn >= %s::pg_lsn and reply_time > now() - interval '1 s' from pg_stat_replication"
        here = format_lsn(position_now(connection).lsn)
        with database.superuser() as admin:
            until(lambda: admin.execute(sent, [here]).fetchone() == (True,), "the server has sent it")
            row = admin.execute("select now() + interval '2 s'").fetchone()
            assert row is not None
            answered = "select reply_time > %s from pg_stat_replication"
            until(lambda: admin.execute(answered, row).fetchone() == (True,), "the reader answers for 2 s")
        may.set()
        until(lambda: record_of(both, NEW).state == "active" or driver.done(), "the table joins the cuts")
        until(lambda: len(lake_rows(both, NEW)) == 3 or driver.done(), "it has all rows")
    assert "tried again" not in caplog.text
    assert_equal(database, both, OLD, NEW)


def test_a_job_that_needs_a_driver_waits_for_it(
    database: Database, pipeline: Pipeline, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    looks = threading.Event()
    may_live = drivers.may_live

    def looked(*of: Any) -> bool:
        looks.set()
        return may_live(*of)

    with following(pipeline) as driver:
        until(lambda: is_running(connection, pipeline) or driver.done(), "the driver runs")
        with cut_off(database, pipeline, monkeypatch):
            monkeypatch.setattr(drivers, "may_live", looked)
            job = in_thread(lambda: reload(pipeline, TableName.parse(OLD), where="id = 1", progress=said.append))
            until(lambda: looks.is_set() or job.done(), "the job looks for the driver")
        assert job.result(120)["tables"][OLD]["rows"] == 1
        assert not driver.done()
    assert "no replicate runs" not in " ".join(said)


def test_its_slot_is_not_given_up(database: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """By others: its driver, which looks every few seconds, may do it, and is kept from that here."""
    monkeypatch.setattr(CeilingWatch, "look", lambda *_: None)
    database.execute("create table unheard (note text)")
    with following(pipeline) as driver:
        until(lambda: status(pipeline)["running"] or driver.done(), "the driver runs")
        with cut_off(database, pipeline, monkeypatch):
            database.execute(f"insert into unheard select repeat('x', 1000) from generate_series(1, {48 * 1024})")
            shown = status(pipeline)
            assert shown["slot"]["retained_wal_bytes"] > 32 << 20
            assert shown["tables"][OLD]["state"] == "active"
            assert not driver.done()


def test_who_waits_while_the_pipeline_is_paused_is_no_driver(
    database: Database, pipeline: Pipeline, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause(pipeline)
    waits = threading.Event()
    refresh = type(registry_of(pipeline)).refresh

    def looked(*of: Any) -> bool:
        waits.set()
        return refresh(*of)

    monkeypatch.setattr(type(registry_of(pipeline)), "refresh", looked)
    with beside(lambda stop: replicate(pipeline, None, None, stop)) as waiting:
        until(lambda: waits.is_set() or waiting.done(), "it waits")
        with without_driver(pipeline.lake_path()) as no_driver:
            assert no_driver
        sessions = "select count(*) from pg_stat_activity where application_name = 'headwater replicate'"
        assert connection.execute(sessions).fetchone() == (0,)
