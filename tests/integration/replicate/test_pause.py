"""A pause that is recorded in the lake: no driver replicates until it ends, and nothing is lost over it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import Job, assert_equal, beside, catch_up, following, lake_rows, load_tables, record_of, until
from fixtures.lake_waits import wait
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from headwater.cli import main
from headwater.errors import Refused
from headwater.lake.position_file import read_position_file
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.pausing import pause, resume
from headwater.replicate.replicate import replicate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ORDERS, LINES = "public.orders", "public.lines"


@pytest.fixture
def pipeline(database: Database, spark: SparkSession, tmp_path: Path) -> Pipeline:
    database.allow_publishing()
    for name in (ORDERS, LINES):
        database.execute(f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1)")
    return pipeline_in_step(tmp_path, database, ORDERS, LINES)


def test_a_paused_pipeline_stands_still_and_goes_on_where_it_ended(database: Database, pipeline: Pipeline) -> None:
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        since = pause(pipeline)["paused"]
        assert running.result(60)["stopped_by"] == "paused"
    assert pause(pipeline)["paused"] == since
    assert status(pipeline)["paused"] == since
    database.execute("update orders set n = 2")
    with pytest.raises(Refused) as refused:
        catch_up(pipeline)
    assert refused.value.code == "paused"
    waited = wait(pipeline, None, "now", 60)
    assert (waited.outcome, waited.exit_status) == ("paused", 3)
    assert f"paused since {since}" in waited.verdict.reason
    assert replicate(pipeline, None, 0.5, threading.Event())["stopped_by"] == "seconds"
    with beside(lambda stop: replicate(pipeline, None, None, stop)) as waiting:
        assert not status(pipeline)["running"]
        assert lake_rows(pipeline, ORDERS, ["n"]) == [(1,)]
        assert main(["resume", pipeline.file]) == 0
        until(lambda: lake_rows(pipeline, ORDERS, ["n"]) == [(2,)] or waiting.done(), "the driver that waited goes on")
    assert status(pipeline)["paused"] is None
    assert_equal(database, pipeline, ORDERS, LINES)


def test_a_paused_table_stays_behind_alone_and_comes_back_whole(database: Database, pipeline: Pipeline) -> None:
    table = TableName.parse(LINES)
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        assert pause(pipeline, [table])["tables"] == {LINES: {"state": "suspended"}}
        until(lambda: _stands(pipeline, LINES) or running.done(), "its driver knows")
        database.execute("update lines set n = 2", "update orders set n = 2")
        until(lambda: lake_rows(pipeline, ORDERS, ["n"]) == [(2,)] or running.done(), "the other table goes on")
        assert lake_rows(pipeline, LINES, ["n"]) == [(1,)]
        assert resume(pipeline, [table])["tables"][LINES]["state"] == "catching up"
        database.execute("insert into lines values (2, 2)")
        until(lambda: record_of(pipeline, LINES).state == "active" or running.done(), "it is in step again")
        until(lambda: len(lake_rows(pipeline, LINES, ["n"])) == 2 or running.done(), "it is followed")
    assert_equal(database, pipeline, ORDERS, LINES)


@pytest.mark.parametrize("again", [["resume"], ["reload"], ["load", "--again"], ["verify", "--repair"]])
def test_a_load_that_was_killed_is_ended_by_whatever_is_run_next(
    pipeline: Pipeline, database: Database, spark: SparkSession, again: list[str]
) -> None:
    with Job(pipeline, "load", "--again", "--table", LINES, failpoint="load.after_capture", spark=spark) as job:
        assert job.wait() == -9, job.log[-3000:]
    assert record_of(pipeline, LINES).state == "loading"
    database.execute("update lines set n = 2")
    assert main([again[0], pipeline.file, "--table", LINES, *again[1:]]) == 0
    catch_up(pipeline)
    assert record_of(pipeline, LINES).state == "active"
    assert_equal(database, pipeline, ORDERS, LINES)


def test_a_pause_outlasts_a_load_behind_a_lost_slot(pipeline: Pipeline, database: Database) -> None:
    since = pause(pipeline)["paused"]
    with database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", (pipeline.source.slot,))
    load_tables(pipeline, again=True)
    assert status(pipeline)["paused"] == since


def _stands(pipeline: Pipeline, name: str) -> bool:
    file = read_position_file(pipeline.lake_path())
    return file is not None and "paused by hand" in file.states.get(name, {}).get("reason", "")
