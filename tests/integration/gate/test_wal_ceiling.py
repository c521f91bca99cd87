"""A source that keeps too much of its log for us: the slot goes before the disk is full, and everybody learns of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import assert_equal, catch_up, failing, following, lake_rows, load_tables, record_of, registry_of
from fixtures.lake_waits import wait
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.errors import SlotGap
from headwater.gate import lease
from headwater.gate.wal_ceiling import CeilingWatch
from headwater.monitor.overview import PipelineWatch
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import BadPipelineFile, Pipeline
from headwater.source.slot import SlotState

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
    return pipeline_in_step(tmp_path, database, ORDERS, LINES, source={"wal_ceiling": "32MiB"})


def write_log(database: Database, mib: int = 48) -> bool:
    """So much log of a table that is not replicated; False."""
    database.execute(f"insert into unheard select repeat('x', 1000) from generate_series(1, {mib * 1024})")
    return False


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


@pytest.mark.parametrize("look", [by_status, by_waiting, by_page])
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
        assert f"load {pipeline.file} --again" in shown["tables"][name]["remedy"]
    waited = wait(pipeline, None, "now", 60)
    assert (waited.outcome, waited.exit_status) == ("suspended", 4)
    assert "source.wal_ceiling" in waited.verdict.reason
    with pytest.raises(SlotGap, match="does not exist any more"):
        catch_up(pipeline)
    assert set(load_tables(pipeline, again=True)["tables"]) == {ORDERS, LINES}
    catch_up(pipeline)
    assert_equal(database, pipeline, ORDERS, LINES)
    with following(pipeline):  # the server's own records lie above what a driver has read that is gone
        assert wait(pipeline, None, "now", 60).outcome == "satisfied"


def test_a_driver_that_cannot_let_go_of_the_log_ends_and_gives_up_its_slot(
    database: Database, pipeline: Pipeline
) -> None:
    with database.connect(autocommit=False) as forgotten:
        # The log from here on is kept until this ends.
        forgotten.execute("select pg_logical_emit_message(true, 'forgotten', '')")
        with pytest.raises(SlotGap) as ended:
            _follow_until_it_ends(database, pipeline)
        assert ended.value.code == "wal_ceiling"
    assert not slot_is_there(database, pipeline)
    assert {registry_of(pipeline).tables[name].state for name in (ORDERS, LINES)} == {"suspended"}
    load_tables(pipeline, again=True)
    catch_up(pipeline)
    assert_equal(database, pipeline, ORDERS, LINES)


def test_a_driver_beside_a_load_goes_on_past_the_ceiling_until_the_load_has_ended(
    database: Database, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    with database.connect(autocommit=False) as forgotten, failing(pipeline) as running:
        # It has written: else the next list of running transactions would let the slot move on past it.
        forgotten.execute("select pg_logical_emit_message(true, 'forgotten', '')")
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        with lease.hold(database.conninfo, registry_of(pipeline), lease.LOAD):

            def is_past() -> bool:
                write_log(database, 16)
                return running.done() or "when the load that works has ended" in caplog.text

            until(is_past, "the driver has seen how much is kept")
            database.execute("update orders set n = 5")
            until(lambda: lake_rows(pipeline, ORDERS, ["n"]) == [(5,)] or running.done(), "it still applies")
            assert not running.done()
            assert slot_is_there(database, pipeline)
        until(running.done, "the driver has ended")
    ended = running.exception()
    assert isinstance(ended, SlotGap)
    assert ended.code == "wal_ceiling"
    assert not slot_is_there(database, pipeline)


def _follow_until_it_ends(database: Database, pipeline: Pipeline) -> None:
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        # More and more: a driver that has found so much at its start may catch up.
        until(lambda: write_log(database, 16) or running.done(), "the driver has seen how much is kept")


def test_a_slot_that_is_not_this_lakes_is_left(database: Database, pipeline: Pipeline, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    elsewhere = write_pipeline(other, database, ORDERS, LINES, source={"wal_ceiling": "32MiB"})
    write_log(database)
    assert status(elsewhere)["slot"]["retained_wal_bytes"] > CEILING
    assert slot_is_there(database, pipeline)
    with database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", [pipeline.source.slot])
        connection.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", [pipeline.source.slot])
    write_log(database)
    assert status(pipeline)["slot"]["retained_wal_bytes"] > CEILING
    assert slot_is_there(database, pipeline)


def test_while_a_load_works_the_slot_is_kept_and_its_driver_catches_up(database: Database, pipeline: Pipeline) -> None:
    write_log(database)
    database.execute("update orders set n = 2")
    with lease.hold(database.conninfo, registry_of(pipeline), lease.LOAD):
        assert status(pipeline)["slot"]["retained_wal_bytes"] > CEILING
    assert slot_is_there(database, pipeline)
    catch_up(pipeline)
    assert_equal(database, pipeline, ORDERS, LINES)
    assert {registry_of(pipeline).tables[name].state for name in (ORDERS, LINES)} == {"active"}


def test_a_driver_that_starts_above_the_ceiling_may_catch_up_and_no_more(pipeline: Pipeline) -> None:
    watch = CeilingWatch(pipeline, lambda _: False)

    def judged(kept: int) -> str | None:
        slot = SlotState("s", "pgoutput", "d", True, 1, 0, 0, kept, "reserved", None, False, False)
        problem = watch.judge(slot, 0.0)
        return problem.code if problem is not None else None

    assert judged(10 * CEILING) is None
    assert judged(10 * CEILING + 1) is None
    assert judged(5 * CEILING) is None
    assert judged(7 * CEILING) == "wal_ceiling"
    assert judged(CEILING // 2) is None
    assert judged(CEILING + 1) == "wal_ceiling"


def test_a_load_of_all_tables_needs_no_slot_that_keeps_too_much(database: Database, pipeline: Pipeline) -> None:
    write_log(database)
    load_tables(pipeline, again=True)
    shown = status(pipeline)
    assert shown["slot"]["retained_wal_bytes"] < CEILING
    database.execute("update orders set n = 3")
    catch_up(pipeline)
    assert_equal(database, pipeline, ORDERS, LINES)


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
    with following(pipeline):
        assert wait(pipeline, None, "now", 60).outcome == "satisfied"


@pytest.mark.parametrize("size", ["0", "-1GiB", "much", "20", "1048575"])
def test_a_ceiling_is_a_size(database: Database, tmp_path: Path, size: str) -> None:
    with pytest.raises(BadPipelineFile, match=r"source\.wal_ceiling"):
        write_pipeline(tmp_path, database, ORDERS, source={"wal_ceiling": size})
