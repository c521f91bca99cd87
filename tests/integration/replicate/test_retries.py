"""What goes wrong with one table and may pass is tried again; others go on, and a lake that is out is no table's fault.

A table's folder is broken by a file in its place: that fails whoever tries, the superuser too, and is undone at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from fixtures.jobs import (
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_path_of,
    lake_rows,
    registry_of,
    until,
)
from fixtures.lake_waits import wait
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from headwater.delta import storage
from headwater.delta.log_entries import log_path
from headwater.errors import Transient
from headwater.lake.ledger import read_epoch
from headwater.monitor.doctor import doctor
from headwater.monitor.overview import PipelineWatch
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.replicate import replicate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres]

SICK, WELL = "public.sick", "public.well"


def pipeline_of(folder: Path, database: Database, seconds: float, *, history: bool = False) -> Pipeline:
    database.allow_publishing()
    database.execute(*(f"create table {name} (id int primary key, n int)" for name in (SICK, WELL)))
    database.execute(*(f"insert into {name} select i, i from generate_series(1, 3) i" for name in (SICK, WELL)))
    sick = {"name": SICK, "history": history}
    return pipeline_in_step(folder, database, sick, WELL, replicate={"retry_seconds": seconds})


@contextlib.contextmanager
def broken(place: Path) -> Iterator[None]:
    """No file of the folder `place` can be had, nor made; inside the block."""
    aside = place.with_name(place.name + ".aside")
    place.rename(aside)
    place.touch()
    try:
        yield
    finally:
        place.unlink()
        aside.rename(place)


def until_applying(database: Database, pipeline: Pipeline) -> None:
    """A driver is past its start, at which it reads every table."""
    database.execute("update well set n = n + 1")
    assert wait(pipeline, None, "now", 60).exit_status == 0


@pytest.mark.spark  # which begins a history
def test_a_table_that_fails_for_a_while_is_tried_again_and_nothing_is_lost(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = pipeline_of(tmp_path, database, 600, history=True)
    with following(pipeline):
        until_applying(database, pipeline)
        with broken(Path(lake_path_of(pipeline, SICK))):
            database.execute("insert into sick values (4, 4)")
            until(lambda: (status(pipeline)["tables"][SICK]["retrying"] or {}).get("attempts", 0) >= 2, "tried again")
            shown = status(pipeline)["tables"][SICK]
            assert shown["state"] == "active"
            assert "NotADirectoryError" in shown["retrying"]["reason"]
            assert shown["retrying"]["since"] in shown["reason"]
            assert [one["table"] for one in PipelineWatch(pipeline).overview()["retrying"]] == [SICK]
            findings, exit_status = doctor(pipeline)
            assert [(f["code"], f["where"]) for f in findings["findings"] if f["code"] == "retrying"] == [
                ("retrying", SICK)
            ]
            assert exit_status == 0
            # As beside a slow table: it goes on, its rows are in no cut before the other has caught up.
            before = read_epoch(pipeline.lake_path())
            log = log_path(lake_path_of(pipeline, WELL))
            count = len(storage.names(log))
            database.execute("insert into well values (4, 4)")
            until(lambda: len(storage.names(log)) > count, "the other table goes on")
            after = read_epoch(pipeline.lake_path())
            assert before is not None
            assert after is not None
            assert before.epoch == after.epoch
        assert wait(pipeline, None, "now", 60).exit_status == 0
        assert status(pipeline)["tables"][SICK]["retrying"] is None
        # The history was committed by an attempt that failed; the row that came of the next one names that version.
        newest, history = read_epoch(pipeline.lake_path()), DeltaTable(lake_path_of(pipeline, SICK) + "~history")
        assert newest is not None
        assert newest.tables[f"{SICK}~history"].version == history.version()
        assert lake_rows(pipeline, SICK, ["id"])[-1:] == [(4,)]
    assert_equal(database, pipeline, SICK, WELL)


def test_a_table_that_goes_on_failing_is_suspended_alone_with_how_often_it_was_tried(
    database: Database, tmp_path: Path
) -> None:
    pipeline = pipeline_of(tmp_path, database, 1)
    with broken(Path(lake_path_of(pipeline, SICK))):
        database.execute("insert into sick values (4, 4)", "insert into well values (4, 4)")
        result = catch_up(pipeline)
    assert {name: table["state"] for name, table in result["tables"].items()} == {SICK: "suspended", WELL: "active"}
    record = registry_of(pipeline).tables[SICK]
    assert "NotADirectoryError" in record.reason
    assert " attempts: " in record.reason
    assert f"headwater verify PIPELINE.yaml --table {SICK} --repair" in record.remedy
    assert_equal(database, pipeline, WELL)
    newest = read_epoch(pipeline.lake_path())
    assert newest is not None
    assert newest.tables[WELL].rows == 1


def test_a_driver_is_stopped_while_a_table_is_tried_again_and_the_next_one_goes_on(
    database: Database, tmp_path: Path
) -> None:
    pipeline = pipeline_of(tmp_path, database, 600)
    stop = threading.Event()
    driver = in_thread(lambda: replicate(pipeline, None, None, stop))
    until_applying(database, pipeline)
    with broken(Path(lake_path_of(pipeline, SICK))):
        database.execute("insert into sick values (4, 4)", "insert into well values (4, 4)")
        until(lambda: status(pipeline)["tables"][SICK]["retrying"], "it fails")
        stop.set()
        assert driver.result(30)["stopped_by"] == "signal"
    assert registry_of(pipeline).tables[SICK].state == "active"
    catch_up(pipeline)
    assert_equal(database, pipeline, SICK, WELL)


@pytest.mark.parametrize("folder", [".", "public"])
def test_an_outage_of_the_lake_ends_the_driver_and_suspends_no_table(
    database: Database, tmp_path: Path, folder: str
) -> None:
    pipeline = pipeline_of(tmp_path, database, 1)
    driver = in_thread(lambda: replicate(pipeline, None, None, threading.Event()))
    until_applying(database, pipeline)
    with broken(Path(pipeline.lake_path()) / folder):
        database.execute("insert into sick values (4, 4)", "insert into well values (4, 4)")
        failure = driver.exception(60)
    assert isinstance(failure, Transient)
    assert failure.code == "lake_unavailable"
    assert {record.state for record in registry_of(pipeline).tables.values()} == {"active"}
    if folder == "public":  # whoever is started again meanwhile finds it so at its start
        with broken(Path(pipeline.lake_path()) / folder), pytest.raises(Transient) as raised:
            catch_up(pipeline)
        assert raised.value.code == "lake_unavailable"
        assert {record.state for record in registry_of(pipeline).tables.values()} == {"active"}
    catch_up(pipeline)
    assert_equal(database, pipeline, SICK, WELL)
