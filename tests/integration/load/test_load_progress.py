"""Loads and reloads that show how far they are, as long as they live and no longer."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import Hold, Job, armed, assert_equal, catch_up, in_thread, load_tables, until
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.lake.load_files import read_load_files
from headwater.load import progress as load_progress
from headwater.load.load import load
from headwater.monitor import metrics
from headwater.monitor.overview import PipelineWatch
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

PARTED, FIRST, SECOND = "public.parted", "public.parted_1", "public.parted_2"


@dataclass(frozen=True)
class Shop:
    database: Database
    pipeline: Pipeline

    @property
    def shown(self) -> list[dict[str, Any]]:
        loads: list[dict[str, Any]] = status(self.pipeline)["loads"]
        return loads


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    database.allow_publishing()
    database.execute(
        f"create table {PARTED} (id int primary key, note text) partition by range (id)",
        f"create table {FIRST} partition of {PARTED} for values from (0) to (2000)",
        f"create table {SECOND} partition of {PARTED} for values from (2000) to (4000)",
        f"insert into {PARTED} select i, 'note ' || i from generate_series(1, 3000) i",
    )
    return Shop(database, write_pipeline(tmp_path, database, PARTED, load={"connections": 1}))


def test_a_load_shows_what_it_has_read_and_a_killed_one_nothing(
    shop: Shop, spark: SparkSession, tmp_path: Path
) -> None:
    hold = Hold(tmp_path / "reading")
    failpoint = f"load.before_commit={hold.action}"
    with Job(shop.pipeline, "load", failpoint=failpoint, spark=spark) as job, shop.database.connect() as locking:
        until(lambda: hold.is_reached or job.process.poll() is not None, "the load has its capture point")
        # The one partition is read, the other cannot be.
        locking.execute("begin")
        locking.execute(f"lock table {SECOND} in access exclusive mode")
        hold.release()

        def half() -> bool:
            return any(load["running"] and load["running"][0]["rows"] == 1999 for load in shop.shown)

        until(lambda: half() or job.process.poll() is not None, "the first partition's rows are shown")
        (shown,) = shop.shown
        (table,) = shown["running"]
        assert (shown["what"], shown["tables"], shown["tables_done"], shown["rows"]) == ("load", 1, 0, 1999)
        assert (table["table"], table["state"], table["done"]) == (PARTED, "reading", 0.5)
        assert table["snapshot_seconds"] > 0
        assert 0 < shown["done"] < 1
        watch = PipelineWatch(shop.pipeline)
        until(lambda: bool(watch.overview()["loads"]), "the page shows it, too")
        told = {metric.name: value for metric, _, value in metrics.samples(watch.overview(), ())}
        assert 0 < told["headwater_load_done_ratio"] < 1
        assert told["headwater_load_snapshot_seconds"] > 0
        os.killpg(job.pid, signal.SIGKILL)
        job.process.wait()
        until(lambda: not shop.shown, "a load that was killed is not shown")
        assert read_load_files(shop.pipeline.lake_path())
    until(lambda: not _reading(shop.database), "what the killed load had begun has ended")
    load_tables(shop.pipeline)
    assert not read_load_files(shop.pipeline.lake_path())
    catch_up(shop.pipeline)
    assert_equal(shop.database, shop.pipeline, PARTED)


def _reading(database: Database) -> bool:
    with database.connect() as connection:
        sessions = "select from pg_stat_activity where application_name like 'headwater load%'"
        return connection.execute(sessions).rowcount > 0


def test_a_load_tells_now_and_then_in_a_line_how_far_it_is(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_progress, "_LINE_SECONDS", 0.0)
    lines: list[str] = []
    with armed(tmp_path, "load.before_commit") as hold:
        job = in_thread(lambda: load(shop.pipeline, progress=lines.append))
        hold.reached(job)
        wanted = f"now {PARTED} (reading, 0%)"
        until(lambda: any(wanted in line for line in list(lines)) or job.done(), "a line says how far it is")
    job.result(120)
    assert any(line.startswith("0 of 1 tables, 0%") for line in lines)


def test_a_reload_is_shown_until_it_is_published(shop: Shop, tmp_path: Path) -> None:
    load_tables(shop.pipeline)
    catch_up(shop.pipeline)
    with armed(tmp_path, "reload.after_read") as hold:
        job = in_thread(lambda: reload(shop.pipeline, TableName.parse(PARTED), [TableName.parse(SECOND)]))
        hold.reached(job)

        def merging() -> bool:
            return any(load["running"] and load["running"][0]["state"] == "merging" for load in shop.shown)

        until(lambda: merging() or job.done(), "the reload is shown")
        (shown,) = shop.shown
        (table,) = shown["running"]
        assert shown["what"] == "reload"
        assert (table["table"], table["state"], table["rows"], table["done"]) == (PARTED, "merging", 1001, 1.0)
        assert "parted_2" in table["part"]
    job.result(120)
    assert not shop.shown
