"""A source that keeps too much of its log for us: the slot goes before the disk is full, and everybody learns of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import assert_equal, catch_up, following, load_tables, record_of, registry_of
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.config import BadPipelineFile, Pipeline
from headwater.errors import SlotGap
from headwater.jobs.overview import PipelineWatch
from headwater.jobs.status import status
from headwater.jobs.wait import wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ORDERS, LINES = "public.orders", "public.lines"
CEILING = 32 << 20


@pytest.fixture
def pipeline(database: Database, spark: SparkSession, tmp_path: Path) -> Pipeline:
    database.allow_publishing()
    for name in (ORDERS, LINES):
        database.execute(f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1)")
    database.execute("create table unheard (note text)")
    made = write_pipeline(tmp_path, database, ORDERS, LINES, source={"wal_ceiling": "32MiB"})
    load_tables(made)
    catch_up(made)
    return made


def write_log(database: Database, mib: int = 48) -> None:
    """So much log of a table that is not replicated."""
    database.execute(f"insert into unheard select repeat('x', 1000) from generate_series(1, {mib * 1024})")


def slot_is_there(database: Database, pipeline: Pipeline) -> bool:
    return bool(database.query(f"select from pg_replication_slots where slot_name = '{pipeline.source.slot}'"))


def by_status(pipeline: Pipeline) -> None:
    status(pipeline)


def by_waiting(pipeline: Pipeline) -> None:
    waited = wait(pipeline, None, "now", 60)
    assert (waited.outcome, waited.exit_status) == ("suspended", 4)
    assert "source.wal_ceiling" in waited.verdict.reason or "does not exist any more" in waited.verdict.reason


def by_page(pipeline: Pipeline) -> None:
    watch = PipelineWatch(pipeline)
    until(lambda: watch.overview()["slot"].get("reason") == "there is no such slot at the source", "the page has asked")


def by_replicating(pipeline: Pipeline) -> None:
    with pytest.raises(SlotGap) as refused:
        catch_up(pipeline)
    assert refused.value.code == "wal_ceiling"
    assert "more than source.wal_ceiling (32.0 MiB)" in refused.value.message


@pytest.mark.parametrize("look", [by_status, by_waiting, by_page, by_replicating])
def test_whoever_looks_first_gives_up_the_slot_that_keeps_too_much(
    database: Database, pipeline: Pipeline, look: Callable[[Pipeline], None]
) -> None:
    status(pipeline)
    assert slot_is_there(database, pipeline)
    write_log(database)
    database.execute("update orders set n = 2")
    look(pipeline)
    assert not slot_is_there(database, pipeline)
    shown = status(pipeline)
    assert shown["slot"]["retained_wal_bytes"] is None
    for name in (ORDERS, LINES):
        assert shown["tables"][name]["state"] == "suspended"
        assert "more than source.wal_ceiling (32.0 MiB) allows" in shown["tables"][name]["reason"]
        assert "load PIPELINE.yaml --again" in shown["tables"][name]["remedy"]
    waited = wait(pipeline, None, "now", 60)
    assert (waited.outcome, waited.exit_status) == ("suspended", 4)
    assert "source.wal_ceiling" in waited.verdict.reason
    with pytest.raises(SlotGap, match="does not exist any more"):
        catch_up(pipeline)
    assert set(load_tables(pipeline, again=True)["tables"]) == {ORDERS, LINES}
    catch_up(pipeline)
    assert_equal(database, pipeline, ORDERS, LINES)
    assert wait(pipeline, None, "now", 60).outcome == "satisfied"


def test_a_driver_that_cannot_let_go_of_the_log_ends_and_gives_up_its_slot(
    database: Database, pipeline: Pipeline
) -> None:
    with database.connect(autocommit=False) as forgotten:
        forgotten.execute("select pg_current_xact_id()")  # the log from here on is kept until this ends
        with pytest.raises(SlotGap) as ended:
            _follow_until_it_ends(database, pipeline)
        assert ended.value.code == "wal_ceiling"
    assert not slot_is_there(database, pipeline)
    assert {registry_of(pipeline).tables[name].state for name in (ORDERS, LINES)} == {"suspended"}
    load_tables(pipeline, again=True)
    catch_up(pipeline)
    assert_equal(database, pipeline, ORDERS, LINES)


def _follow_until_it_ends(database: Database, pipeline: Pipeline) -> None:
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        write_log(database)
        until(running.done, "the driver has seen how much is kept")


def test_a_slot_that_is_not_ours_is_left(database: Database, pipeline: Pipeline) -> None:
    write_log(database)
    with database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", [pipeline.source.slot])
        connection.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", [pipeline.source.slot])
    write_log(database)
    shown = status(pipeline)
    assert shown["slot"]["retained_wal_bytes"] > CEILING
    assert slot_is_there(database, pipeline)


def test_without_a_ceiling_the_slot_stays(database: Database, pipeline: Pipeline, tmp_path: Path) -> None:
    write_log(database)
    unbounded = write_pipeline(tmp_path, database, ORDERS, LINES)
    assert status(unbounded)["slot"]["retained_wal_bytes"] > CEILING
    database.execute("update lines set n = 2")
    catch_up(unbounded)
    assert_equal(database, pipeline, ORDERS, LINES)


def test_a_slot_that_somebody_dropped_is_known_at_once(database: Database, pipeline: Pipeline) -> None:
    with database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", [pipeline.source.slot])
    waited = wait(pipeline, None, "now", 60)
    assert (waited.outcome, waited.exit_status) == ("suspended", 4)
    assert "the slot does not exist any more" in waited.verdict.reason
    assert status(pipeline)["tables"][LINES]["state"] == "suspended"
    assert record_of(pipeline, LINES).state == "active"  # it was seen, and nothing was written
    load_tables(pipeline, again=True)
    catch_up(pipeline)
    assert wait(pipeline, None, "now", 60).outcome == "satisfied"


@pytest.mark.parametrize("size", ["0", "-1GiB", "much"])
def test_a_ceiling_is_a_size(database: Database, tmp_path: Path, size: str) -> None:
    with pytest.raises(BadPipelineFile, match=r"source\.wal_ceiling"):
        write_pipeline(tmp_path, database, ORDERS, source={"wal_ceiling": size})
