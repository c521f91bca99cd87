"""Loads beside a running driver: it keeps what is committed meanwhile, goes on with the other tables, and joins the
loaded one when it holds all of it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import (
    Job,
    armed,
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_rows,
    load_tables,
    looks_for_jobs_every,
    record_of,
    registry_of,
    source_rows,
    until,
)
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.delta import storage
from headwater.errors import LostLease, Transient
from headwater.gate import lease
from headwater.lake.ledger import read_all, read_epoch
from headwater.lake.paths import kept_path
from headwater.lake.reload_records import Keeping, load_name
from headwater.lake_root import is_remote
from headwater.load import one_table
from headwater.load.driver_answers import await_answer, await_keeping, is_running
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.batches.batch import Batch, Share
from headwater.replicate.beside.following import Following
from headwater.replicate.pausing import pause
from headwater.replicate.tables.shares import Shares
from headwater.source.connection import connect
from headwater.source.slot import read_slot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

OLD, NEW = "public.old", "public.new"


@dataclass(frozen=True)
class Shop:
    database: Database
    pipeline: Pipeline

    def is_equal(self, name: str) -> bool:
        columns, rows = source_rows(self.database, name)
        return lake_rows(self.pipeline, name, columns) == rows

    def kept(self) -> list[str]:
        return storage.names(kept_path(self.pipeline.lake_path(), load_name(record_of(self.pipeline, NEW))))


@pytest.fixture
def shop(each_store: str, database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    database.allow_publishing()
    for name in (OLD, NEW):
        database.execute(
            f"create table {name} (id int primary key, n int, note text)",
            f"alter table {name} alter note set storage external",
            f"insert into {name} select i, i, repeat('x', 3000) || i from generate_series(1, 50) i",
        )
    load_tables(write_pipeline(tmp_path, database, OLD))
    return Shop(database, write_pipeline(tmp_path, database, OLD, NEW))


def _write(shop: Shop) -> None:
    shop.database.execute(
        "insert into new values (100, 1, 'new')",
        "update new set n = n + 1000 where id <= 10",
        "update new set id = id + 500 where id between 5 and 15",
        "delete from new where id = 20",
        "update old set n = n + 1",
    )


def test_a_table_joins_a_running_pipeline(shop: Shop, tmp_path: Path) -> None:
    with following(shop.pipeline) as running, armed(tmp_path, "load.after_capture") as hold:
        until(lambda: record_of(shop.pipeline, OLD).state == "active" or running.done(), "the driver follows the log")
        with shop.database.connect() as open_since_before:
            job = in_thread(lambda: load_tables(shop.pipeline, NEW))
            hold.reached(job)
            with shop.database.connect() as during, during.transaction():
                during.execute("insert into new values (200, 1, 'open while it is read')")
                _write(shop)
                until(lambda: shop.is_equal(OLD) or running.done(), "the other table goes on")
                assert shop.kept()
            _moves_on(shop)
            del open_since_before
        hold.release()
        assert job.result(120)["tables"][NEW]["state"] == "catching up"
        until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the table joins the cuts")
        until(lambda: shop.is_equal(NEW) or running.done(), "it holds what was committed meanwhile")
        _write_again(shop)
        until(lambda: (shop.is_equal(NEW) and shop.is_equal(OLD)) or running.done(), "both are followed")
        assert not shop.kept()
    assert_equal(shop.database, shop.pipeline, OLD, NEW)
    newest = read_epoch(shop.pipeline.lake_path())
    assert newest is not None
    assert newest.tables[NEW].state == "active"


def _write_again(shop: Shop) -> None:
    shop.database.execute("update new set n = n + 1", "update old set n = n + 1", "delete from new where id = 1")


def _moves_on(shop: Shop) -> None:
    """What is kept need not be sent again."""
    with connect(shop.database.conninfo) as connection:
        row = connection.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
        assert row is not None

        def confirmed() -> bool:
            slot = read_slot(connection, shop.pipeline.source.slot)
            return slot is not None and (slot.confirmed_lsn or 0) >= int(row[0])

        shop.database.execute("update old set n = n + 1")
        until(confirmed, "the slot moves on while a table is being loaded")


def test_a_load_that_did_not_see_a_driver_which_was_connecting_again_reads_once_more(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked: list[str] = []

    def keeps(*arguments: Any) -> bool:
        asked.append("")
        return await_keeping(*arguments) if len(asked) > 1 else False

    monkeypatch.setattr(one_table, "await_keeping", keeps)
    with following(shop.pipeline) as running, armed(tmp_path, "load.after_capture") as hold:
        until(lambda: record_of(shop.pipeline, OLD).state == "active" or running.done(), "the driver follows the log")
        job = in_thread(lambda: load_tables(shop.pipeline, NEW))
        hold.reached(job)
        _write(shop)
        until(lambda: bool(registry_of(shop.pipeline).kept) or running.done(), "the driver keeps its changes")
        hold.release()
        assert job.result(120)["tables"][NEW]["state"] == "catching up"
        until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the table joins the cuts")
        until(lambda: shop.is_equal(NEW) or running.done(), "it holds what was committed meanwhile")
    assert len(asked) == 2
    assert "replicate was connecting to the source again" in caplog.text
    assert_equal(shop.database, shop.pipeline, OLD, NEW)


def test_a_driver_is_waited_for_as_long_as_it_lives(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("create table old (id int primary key)")
    database.allow_publishing()
    pipeline = pipeline_in_step(tmp_path, database, OLD)
    registry = registry_of(pipeline)
    began = time.monotonic()

    def late() -> None:
        if time.monotonic() - began > 5.0 and "asked" not in registry.kept:
            registry.write(Keeping("asked", OLD, "keeping", 1, 0, ""))

    with following(pipeline) as running, connect(pipeline.conninfo()) as connection:
        until(lambda: is_running(connection, pipeline) or running.done(), "it reads the slot")
        asked = (connection, pipeline, registry, "asked", "the load of it")
        assert await_answer(*asked, seconds=2.5, meanwhile=late) is not None
        monkeypatch.setattr("headwater.load.driver_answers.read_position_file", lambda root: None)  # it stands still
        with pytest.raises(Transient) as silent:
            await_answer(*asked, lambda answer: False, seconds=0.1)
        assert silent.value.code == "no_answer"


def test_a_table_is_loaded_again_beside_its_driver(shop: Shop, tmp_path: Path) -> None:
    load_tables(shop.pipeline, NEW)
    with following(shop.pipeline) as running, armed(tmp_path, "load.after_commit") as hold:
        until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the driver follows the log")
        shop.database.execute("alter table new add column more int default 7")
        job = in_thread(lambda: load_tables(shop.pipeline, NEW, again=True))
        hold.reached(job)
        _write(shop)
        hold.release()
        job.result(120)
        until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the table joins the cuts")
        until(lambda: shop.is_equal(NEW) or running.done(), "it holds what was committed meanwhile")
        _write_again(shop)
        until(lambda: shop.is_equal(NEW) or running.done(), "it is followed")
    assert_equal(shop.database, shop.pipeline, OLD, NEW)


def test_a_table_does_not_join_the_cuts_before_its_driver_has_followed_its_load(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of the driver's own, after a lost race, reads the registry again as well: the table is "catching up"
    there before the look at loads comes, and everything that was kept of it is still to be applied."""
    load_tables(shop.pipeline, NEW)
    looks_for_jobs_every(monkeypatch, 4.0)
    follow = Following.follow_if_due

    def reading_again(driver: Following, *given: int) -> bool:
        driver._registry.refresh()
        return follow(driver, *given)

    monkeypatch.setattr(Following, "follow_if_due", reading_again)
    with following(shop.pipeline) as running, armed(tmp_path, "load.after_capture") as hold:
        until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the driver follows the log")
        job = in_thread(lambda: load_tables(shop.pipeline, NEW, again=True))
        hold.reached(job)
        _write(shop)
        until(lambda: (shop.is_equal(OLD) and shop.kept()) or running.done(), "the changes are kept")
        hold.release()
        job.result(120)
        shop.database.execute("update old set n = n + 1")
        until(lambda: shop.is_equal(OLD) or running.done(), "a row is published")
        _write_again(shop)
        until(lambda: (shop.is_equal(NEW) and shop.is_equal(OLD)) or running.done(), "both are followed")
    assert_equal(shop.database, shop.pipeline, OLD, NEW)


@pytest.mark.parametrize("failpoint", ["replicate.after_kept_share", "replicate.after_table_commit@public.new"])
def test_a_driver_that_dies_over_what_it_has_kept_is_followed_by_one_that_ends_it(
    shop: Shop, spark: SparkSession, tmp_path: Path, failpoint: str
) -> None:
    with (
        armed(tmp_path, "load.after_capture") as hold,
        Job(shop.pipeline, "replicate", failpoint=failpoint, spark=spark) as driver,
    ):
        until(lambda: _runs(shop) or driver.process.poll() is not None, "the driver runs")
        job = in_thread(lambda: load_tables(shop.pipeline, NEW))
        hold.reached(job)
        _write(shop)
        until(lambda: bool(shop.kept()) or driver.process.poll() is not None, "a first share is kept")
        _write_again(shop)
        hold.release()
        job.result(120)
        assert driver.wait() == -9, driver.log[-2000:]
    assert record_of(shop.pipeline, NEW).state == "catching up"
    shop.database.execute("update new set n = n + 1")
    catch_up(shop.pipeline)
    assert_equal(shop.database, shop.pipeline, OLD, NEW)
    assert record_of(shop.pipeline, NEW).state == "active"
    assert not shop.kept()


def _runs(shop: Shop) -> bool:
    with connect(shop.database.conninfo) as connection:
        slot = read_slot(connection, shop.pipeline.source.slot)
    return slot is not None and slot.active


def test_a_driver_that_starts_while_a_table_is_loaded_keeps_its_changes_from_the_first_one_on(
    shop: Shop, tmp_path: Path
) -> None:
    with armed(tmp_path, "load.after_capture") as hold:
        job = in_thread(lambda: load_tables(shop.pipeline, NEW))
        hold.reached(job)
        _write(shop)
        with following(shop.pipeline) as running:
            until(lambda: shop.is_equal(OLD) or running.done(), "the driver goes on beside the load")
            assert load_name(record_of(shop.pipeline, NEW)) in registry_of(shop.pipeline).kept
            hold.release()
            job.result(120)
            until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the table joins the cuts")
            until(lambda: shop.is_equal(NEW) or running.done(), "it holds what was committed meanwhile")


@pytest.mark.parametrize("what", ["load", "pause"])
def test_no_cut_is_without_changes_of_a_table_that_another_job_has_just_taken(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whatever the driver enters into the registry itself may show it the other job's state before it follows that."""
    load_tables(shop.pipeline, NEW)
    looks_for_jobs_every(monkeypatch, 3.0)
    by_table = Shares.of

    def seen_already(shares: Shares, batch: Batch) -> dict[str, Share]:
        shares._states.read_again()
        return by_table(shares, batch)

    monkeypatch.setattr(Shares, "of", seen_already)
    with following(shop.pipeline) as running:
        until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the driver follows the log")
        lake = shop.pipeline.lake_path()
        # The registry says "active" before the ledger has its first row.
        until(lambda: read_epoch(lake) is not None or running.done(), "an epoch is published")
        first = read_epoch(lake)
        assert first is not None

        def take() -> None:
            if what == "load":
                load_tables(shop.pipeline, NEW, again=True)
            else:
                pause(shop.pipeline, [TableName("public", "new")])

        both_written = "with o as (update old set n = n + 1 where id = 1) update new set n = n + 1 where id = 1"
        enough = first.epoch + 3 if is_remote(lake) else 0  # few would come before the driver follows the job
        while (read_epoch(lake) or first).epoch < enough and not running.done():
            shop.database.execute(both_written)
            time.sleep(0.03)
        job = in_thread(take)
        written = 0
        while not (job.done() and written > 100) and not running.done():
            shop.database.execute(both_written)
            written += 1
            time.sleep(0.03)
        job.result(120)
        until(lambda: shop.is_equal(OLD) or running.done(), "the other table goes on")
    both = 0
    for epoch in read_all(shop.pipeline.lake_path()):
        found = {name: epoch.tables.get(name) for name in (OLD, NEW)}
        if epoch.epoch < first.epoch or not all(v is not None and v.state == "active" for v in found.values()):
            continue
        both += 1
        counts = {
            name: lake_rows(shop.pipeline, name, ["id", "n"], version=version.version)[0]
            for name, version in found.items()
            if version is not None
        }
        assert counts[OLD] == counts[NEW], epoch
    assert both > 2


def test_a_load_whose_session_is_cut_does_not_end_as_if_all_were_kept(shop: Shop, tmp_path: Path) -> None:
    with following(shop.pipeline) as running, armed(tmp_path, "load.after_commit") as hold:
        until(lambda: record_of(shop.pipeline, OLD).state == "active" or running.done(), "the driver follows the log")
        job = in_thread(lambda: load_tables(shop.pipeline, NEW))
        hold.reached(job)
        _write(shop)
        until(lambda: bool(shop.kept()) or running.done(), "what was committed meanwhile is kept")
        session = registry_of(shop.pipeline).leases[lease.LOAD].session
        with shop.database.superuser() as connection:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", [session]
            )
        until(lambda: not shop.kept() or running.done(), "the driver takes the load for dead")
        hold.release()
        with pytest.raises(LostLease, match="session at the source was cut"):
            job.result(120)
        assert record_of(shop.pipeline, NEW).state == "loading"
    with following(shop.pipeline) as running:
        shop.database.execute("update old set n = n + 1")
        until(lambda: shop.is_equal(OLD) or running.done(), "the driver follows the log")  # no set-up is in its way
        load_tables(shop.pipeline, NEW)
        until(lambda: record_of(shop.pipeline, NEW).state == "active" or running.done(), "the next load ends it")
        assert_equal(shop.database, shop.pipeline, OLD, NEW)


def test_what_is_kept_for_a_load_that_has_failed_goes(shop: Shop, tmp_path: Path) -> None:
    with following(shop.pipeline) as running, armed(tmp_path, "load.after_capture") as hold:
        until(lambda: record_of(shop.pipeline, OLD).state == "active" or running.done(), "the driver follows the log")
        job = in_thread(lambda: load_tables(shop.pipeline, NEW))
        hold.reached(job)
        _write(shop)
        until(lambda: bool(shop.kept()) or running.done(), "what was committed meanwhile is kept")
        record, registry = record_of(shop.pipeline, NEW), registry_of(shop.pipeline)
        registry.write(replace(registry.leases[lease.LOAD], session=""))  # as a load does that ends, however it ends
        until(lambda: not shop.kept() or running.done(), "nobody needs it any more")
        assert registry_of(shop.pipeline).kept[load_name(record)].state == "failed"
        hold.release()
        with pytest.raises(LostLease):
            job.result(120)
