"""A slot that cannot deliver what follows the ledger costs a compare: `verify --repair` makes a new one, writes what
differs, and the log goes on behind it, beside writers and through kills. With `source.on_slot_loss: repair` a driver
does it by itself."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from deltalake import DeltaTable

from fixtures.jobs import (
    Job,
    armed,
    assert_equal,
    beside,
    catch_up,
    following,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
    source_rows,
    until,
)
from fixtures.lake_waits import wait
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, new_database
from headwater.cli import main
from headwater.delta.log_entries import log_entry
from headwater.delta.tables import read_commit
from headwater.errors import EXIT_DONE, EXIT_REFUSED, LostLease, Refused, SlotGap
from headwater.lake.ledger import read_epoch
from headwater.load.driver_answers import is_running
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate import start
from headwater.replicate.pausing import pause
from headwater.replicate.takeover import continuity, new_source
from headwater.source.connection import Connection, connect, identify
from headwater.source.slot import SlotState, read_slot
from headwater.source.stream import LogStream
from headwater.verify.slot_loss import replicate_through_losses
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

KEYED, KEYLESS, PARTED, TRACKED, KEPT = (f"public.{n}" for n in ("keyed", "keyless", "parted", "tracked", "kept"))
LOST = "changes were lost with the slot: the slot does not exist any more"
PLAIN = (KEYED, KEYLESS, PARTED, TRACKED)
SOURCE = [
    "create table keyed (id int primary key, n int)",
    "insert into keyed select i, i from generate_series(1, 500) i",
    "create table keyless (what text, n int, at timestamptz, local timestamp, amount numeric(9, 2), b bytea, l int[])",
    "insert into keyless select 'event', i % 50 from generate_series(1, 100) i",
    "create table parted (id int, region text, n int, primary key (id, region)) partition by list (region)",
    "create table parted_eu partition of parted for values in ('eu')",
    "create table parted_us partition of parted for values in ('us')",
    "insert into parted select i, case when i % 2 = 0 then 'eu' else 'us' end, i from generate_series(1, 20) i",
    "create table tracked (id int primary key, n int)",
    "insert into tracked select i, i from generate_series(1, 20) i",
    "create table kept (id int primary key, n int)",
    "insert into kept select i, i from generate_series(1, 20) i",
]
MISSED = [
    "update keyed set n = -1 where id <= 3",
    "delete from keyed where id = 4",
    "insert into keyed values (900, 9)",
    "insert into keyless values ('event', 7), ('event', 7)",
    "insert into keyless values"
    " ('late', 1, '2026-03-01 12:00:00.123456+02', '1999-12-31 23:59:59', 1.10, '\\x00ff', '{1,null}')",
    "update parted set region = 'us' where id = 2",
    "delete from parted where id = 3",
    "update tracked set n = -1 where id = 1",
    "delete from kept where id = 2",
    "update kept set n = -1 where id = 1",
]


@dataclass
class Shop:
    """All tables are loaded and in step; nobody replicates now."""

    database: Database
    folder: Path
    tables: list[str | dict[str, Any]]
    pipeline: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        self.pipeline = self.written()

    def written(self, **source: Any) -> Pipeline:
        return write_pipeline(self.folder, self.database, *self.tables, source=source)

    def on_slot(self, statement: str) -> None:
        with self.database.superuser() as connection:
            connection.execute(statement, (self.pipeline.source.slot,))

    def lose_slot(self) -> None:
        self.on_slot("select pg_drop_replication_slot(%s)")

    def written_rows(self, name: str) -> list[int]:
        """What each of the commits that a repair has made wrote."""
        path = lake_path_of(self.pipeline, name)
        found = [read_commit(path, version) for version in range(DeltaTable(path).version() + 1)]
        ours = [one for one in found if one is not None and one.operation == "HEADWATER APPLY" and one.overwrites]
        return [int(one.metrics["numOutputRows"]) for one in ours]


def made(database: Database, folder: Path, tables: list[str | dict[str, Any]]) -> Shop:
    database.allow_publishing()
    database.execute(*SOURCE)
    shop = Shop(database, folder, tables)
    load_tables(shop.pipeline)
    catch_up(shop.pipeline)
    return shop


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    return made(
        database,
        tmp_path,
        [
            KEYED,
            {"name": KEYLESS, "insert_only": True},
            PARTED,
            {"name": TRACKED, "history": True},
            {"name": KEPT, "soft_delete": True},
        ],
    )


@pytest.fixture
def one_table(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    return made(database, tmp_path, [KEYED])


def test_every_kind_of_table_is_compared_and_only_what_differs_is_written(
    shop: Shop, spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    database, pipeline = shop.database, shop.pipeline
    before = read_epoch(pipeline.lake_path())
    shop.lose_slot()
    database.execute(*MISSED)
    assert main(["replicate", pipeline.file, "--until", "now", "--json"]) == EXIT_REFUSED
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["code"] == "slot_gap"
    assert f"headwater verify {pipeline.file} --repair" in error["remedy"]
    assert main(["verify", pipeline.file, "--repair", "--json"]) == EXIT_DONE
    result = json.loads(capfd.readouterr().out)
    tables = result["tables"]
    assert result["position"]["lsn"] == min(table["capture_lsn"] for table in tables.values())
    assert {
        name: (table["missing"], table["extra"], table["different"], table["repaired"])
        for name, table in tables.items()
    } == {
        KEYED: (1, 1, 3, 5),
        KEYLESS: (3, 0, 0, 3),
        PARTED: (1, 2, 0, 3),
        TRACKED: (0, 0, 1, 1),
        KEPT: (0, 1, 1, 2),
    }
    assert not any(table.get("written_anew") for table in tables.values())
    assert [shop.written_rows(name) for name in (*PLAIN, KEPT)] == [[4], [3], [1], [1], [2]]
    after = read_epoch(pipeline.lake_path())
    assert before is not None
    assert after is not None
    assert (after.epoch > before.epoch, after.position.lsn > before.position.lsn) == (True, True)
    database.execute(
        "update keyed set n = n + 1 where id % 2 = 0",
        "insert into keyless values ('after', 2)",
        "delete from parted where id = 5",
        "update tracked set n = 77 where id = 3",
        "insert into kept values (2, 22)",
    )
    catch_up(pipeline)
    assert wait(pipeline, None, result["position"]["lsn"], 60).outcome == "satisfied"
    assert_equal(database, pipeline, *PLAIN)
    assert lake_rows(pipeline, KEPT, ["id", "n"]) == source_rows(database, KEPT)[1]
    assert {table["state"] for table in status(pipeline)["tables"].values()} == {"active"}
    history = spark.read.format("delta").load(lake_path_of(pipeline, TRACKED) + "~history")
    assert history.where("_hw_operation = 'load'").count() == 2, "the history says where changes are missing"


def test_what_a_power_cut_has_torn_before_the_slot_was_lost_is_mended_with_it(one_table: Shop) -> None:
    """Without the slot nothing tells what of it was durable, so that no start before has mended it."""
    database, pipeline = one_table.database, one_table.pipeline
    database.execute("update keyed set n = -2 where id > 490")
    catch_up(pipeline)
    newest = DeltaTable(lake_path_of(pipeline, KEYED)).version()
    Path(log_entry(lake_path_of(pipeline, KEYED), newest)).write_bytes(b"")
    one_table.lose_slot()
    assert verify(pipeline, repair=True)["tables"][KEYED]["compared"]
    catch_up(pipeline)
    assert_equal(database, pipeline, KEYED)


@pytest.mark.parametrize("by", ["hand", "the driver"])
def test_a_table_that_cannot_be_repaired_keeps_no_other_one_from_it(
    database: Database, spark: SparkSession, tmp_path: Path, by: str
) -> None:
    shop = made(database, tmp_path, [KEPT, KEYED, TRACKED])
    pipeline = shop.pipeline if by == "hand" else shop.written(on_slot_loss="repair")
    shop.lose_slot()
    database.execute("alter table kept drop constraint kept_pkey", "delete from keyed where id = 4")
    if by == "hand":
        found = verify(pipeline, repair=True)["tables"]
        assert "it cannot be repaired: " in found[KEPT]["reason"]
        assert (found[KEPT]["compared"], found[KEYED]["repaired"]) == (False, 1)
    for _ in range(2):  # and again by every driver that begins later
        replicate_through_losses(pipeline, "now", None, threading.Event())
    shown = status(pipeline)["tables"]
    assert {name: shown[name]["state"] for name in (KEPT, KEYED, TRACKED)} == {
        KEPT: "suspended",
        KEYED: "active",
        TRACKED: "active",
    }
    assert_equal(database, pipeline, KEYED, TRACKED)
    without = write_pipeline(shop.folder, database, KEYED, TRACKED, source={"on_slot_loss": "repair"})
    replicate_through_losses(without, "now", None, threading.Event())  # nor does one that has left the file


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(lambda wrong: verify(wrong, repair=True), id="verify"),
        pytest.param(lambda wrong: verify(wrong, repair=True, new_source=True), id="verify-new-source"),
        pytest.param(new_source.adopt, id="load-new-source"),
        pytest.param(lambda wrong: replicate_through_losses(wrong, "now", None, threading.Event()), id="replicate"),
    ],
)
def test_a_database_without_the_lakes_tables_is_no_source_of_it(
    one_table: Shop, begin: Callable[[Pipeline], object]
) -> None:
    """As all databases of a server it has the system and the timeline of the lake's."""
    one_table.lose_slot()
    with new_database(one_table.database.server) as other:
        other.allow_publishing()
        source = {"slot": one_table.pipeline.source.slot, "on_slot_loss": "repair"}
        wrong = write_pipeline(one_table.folder, other, "public.k*", source=source)  # a pattern may find nothing
        with pytest.raises(Refused, match="no table that the lake holds") as refused:
            begin(wrong)
        assert refused.value.code == "table_missing"
        assert other.query("select pubname from pg_publication") == []
    assert not slot_exists(one_table)
    assert record_of(one_table.pipeline, KEYED).state == "active", "nothing was changed"


@pytest.mark.parametrize("for_another_source", [False, True])
def test_nothing_is_changed_while_the_pipeline_is_paused(one_table: Shop, for_another_source: bool) -> None:
    pause(one_table.pipeline)
    one_table.lose_slot()
    with pytest.raises(Refused, match="is paused since") as refused:
        verify(one_table.pipeline, repair=True, new_source=for_another_source)
    assert refused.value.code == "paused"
    assert not slot_exists(one_table)
    assert record_of(one_table.pipeline, KEYED).state == "active"


def slot_exists(shop: Shop) -> bool:
    with connect(shop.database.conninfo) as connection:
        return read_slot(connection, shop.pipeline.source.slot) is not None


def test_a_table_that_is_gone_keeps_no_other_one_from_its_repair(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    shop = made(database, tmp_path, [KEYED, TRACKED])
    shop.lose_slot()
    database.execute("drop table tracked", "delete from keyed where id = 4")
    found = verify(shop.pipeline, repair=True, new_source=True)["tables"]
    assert (found[TRACKED]["compared"], found[KEYED]["repaired"]) == (False, 1)


def test_a_load_from_a_new_source_is_refused_before_the_old_one_is_left(
    database: Database, spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shop = made(database, tmp_path, [KEYED, TRACKED])
    shop.lose_slot()
    database.execute("alter table tracked drop constraint tracked_pkey")
    assert main(["load", shop.pipeline.file, "--again", "--new-source", "--json"]) == EXIT_REFUSED
    assert json.loads(capfd.readouterr().out)["error"]["where"] == TRACKED
    assert {record_of(shop.pipeline, name).state for name in (KEYED, TRACKED)} == {"active"}
    assert not slot_exists(shop)


def test_rows_that_were_deleted_in_the_gap_stay_as_deleted_with_those_from_before(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    shop = made(database, tmp_path, [{"name": KEPT, "soft_delete": True}])
    shop.database.execute("delete from kept where id = 10")
    catch_up(shop.pipeline)
    shop.lose_slot()
    shop.database.execute("delete from kept where id = 11")
    verify(shop.pipeline, repair=True)
    columns = ["id", "n", "_hw_deleted", "_hw_deleted_lsn"]
    gone = [row for row in lake_rows(shop.pipeline, KEPT, columns) if row[2]]
    assert [row[:3] for row in gone] == [(10, 10, True), (11, 11, True)]
    capture = record_of(shop.pipeline, KEPT).capture
    assert capture is not None
    assert gone[1][3] == capture.lsn


def remade(shop: Shop) -> None:
    shop.lose_slot()
    shop.database.execute("update keyed set n = -1 where id <= 3")
    shop.on_slot("select pg_create_logical_replication_slot(%s, 'pgoutput')")


def advanced(shop: Shop) -> None:
    shop.database.execute("update keyed set n = -1 where id <= 3")
    shop.on_slot("select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())")


@pytest.mark.parametrize("lose", [remade, advanced])
def test_a_slot_that_somebody_has_made_again_or_moved_is_replaced(
    one_table: Shop, lose: Callable[[Shop], None]
) -> None:
    pipeline = one_table.pipeline
    lose(one_table)
    with pytest.raises(SlotGap, match="past the ledger's") as refused:
        catch_up(pipeline)
    assert "headwater verify PIPELINE.yaml --repair" in refused.value.remedy
    table = verify(pipeline, repair=True)["tables"][KEYED]
    assert (table["different"], table["repaired"], table["compared"]) == (3, 3, True)
    assert one_table.written_rows(KEYED) == [3]
    one_table.database.execute("delete from keyed where id > 400")
    catch_up(pipeline)
    assert_equal(one_table.database, pipeline, KEYED)


def test_killed_at_any_point_it_goes_on_when_it_is_started_again(one_table: Shop, spark: SparkSession) -> None:
    pipeline = one_table.pipeline
    one_table.lose_slot()
    one_table.database.execute("update keyed set n = -1 where id <= 3")
    for point in ("adopt.suspended", "adopt.slot", "adopt.ledger", "load.after_capture", "load.after_registry"):
        with Job(pipeline, "verify", "--repair", failpoint=point, spark=spark) as job:
            assert job.wait() == -signal.SIGKILL, job.log[-3000:]
        one_table.database.execute(
            "update keyed set n = n - 1 where id <= 3", "delete from keyed where id = (select max(id) from keyed)"
        )
        until(lambda: not is_read(one_table), "the killed job's sessions have ended")
    verify(pipeline, repair=True)
    catch_up(pipeline)
    assert_equal(one_table.database, pipeline, KEYED)
    assert record_of(pipeline, KEYED).state == "active"
    assert one_table.written_rows(KEYED)[0] < 20


def is_read(shop: Shop) -> bool:
    found = "select from pg_stat_activity where application_name like 'headwater%%' and datname = %s"
    with shop.database.superuser() as connection:
        return connection.execute(found, (shop.database.name,)).rowcount > 0


def test_a_slot_that_somebody_reads_is_not_taken_from_them(one_table: Shop) -> None:
    remade(one_table)
    stream = LogStream(one_table.database.conninfo)
    with connect(one_table.database.conninfo) as connection:
        version = identify(connection).version
    publication = one_table.pipeline.source.publication
    stream.start(one_table.pipeline.source.slot, (publication, f"{publication}_inserts"), 0, version)
    try:
        with pytest.raises(LostLease, match="in use"):
            verify(one_table.pipeline, repair=True)
    finally:
        stream.close()
    assert record_of(one_table.pipeline, KEYED).state == "active", "nothing was changed"


def test_a_driver_that_goes_on_meanwhile_has_lost_nothing(one_table: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, look, looks = one_table.pipeline, read_slot, []

    def later(connection: Connection, name: str) -> SlotState | None:
        newest = read_epoch(pipeline.lake_path())
        assert newest is not None
        one_table.database.execute("update keyed set n = n + 1 where id = 1")
        until(lambda: driver.done() or _has_passed(look(connection, name), newest.position.lsn), "it is confirmed")
        looks.append(name)
        return look(connection, name)

    with following(pipeline) as driver:
        with contextlib.closing(connect(pipeline.conninfo())) as connection:
            until(lambda: is_running(connection, pipeline) or driver.done(), "the driver runs")
        monkeypatch.setattr(new_source, "read_slot", later)
        assert new_source.begin_behind_gap(pipeline) == ""
    assert looks


def test_a_driver_that_starts_as_another_one_ends_goes_on_behind_it(
    one_table: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = read_slot, []

    def later(connection: Connection, name: str) -> SlotState | None:
        looks.append(name)
        if len(looks) == 1:
            one_table.database.execute("update keyed set n = n + 1 where id = 1")
            catch_up(one_table.pipeline)
        return look(connection, name)

    monkeypatch.setattr(continuity, "read_slot", later)
    catch_up(one_table.pipeline)
    assert len(looks) == 2
    assert_equal(one_table.database, one_table.pipeline, KEYED)


def test_of_two_drivers_that_start_together_one_is_late_and_compares_nothing(
    one_table: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, look = one_table.written(on_slot_loss="repair"), continuity.continuity
    with contextlib.ExitStack() as others:

        def late(connection: Connection, *of: Any) -> int:
            """Between its look at the slot and its log connection the other one takes the slot, and confirms."""
            begin = look(connection, *of)
            monkeypatch.setattr(start, "continuity", look)
            others.enter_context(following(pipeline))
            one_table.database.execute("update keyed set n = n + 1 where id = 1")
            until(lambda: _has_passed(read_slot(connection, pipeline.source.slot), begin), "it is confirmed")
            return begin

        monkeypatch.setattr(start, "continuity", late)
        with pytest.raises(LostLease, match="another one read from the slot") as lost:
            replicate_through_losses(pipeline, "now", None, threading.Event())
        assert lost.value.code == "already_running"
    assert_equal(one_table.database, pipeline, KEYED)
    assert record_of(pipeline, KEYED).reason == ""


def _has_passed(slot: SlotState | None, lsn: int) -> bool:
    return slot is not None and slot.has_passed(lsn)


def test_a_driver_repairs_by_itself_where_the_file_says_so(
    one_table: Shop, spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline = one_table.written(on_slot_loss="repair")
    one_table.lose_slot()
    one_table.database.execute("update keyed set n = -1 where id <= 3")
    with Job(pipeline, "replicate", "--until", "now", failpoint="adopt.ledger", spark=spark) as job:
        assert job.wait() == -signal.SIGKILL, job.log[-3000:]
    table = status(pipeline)["tables"][KEYED]
    assert (table["state"], table["reason"]) == ("suspended", LOST)
    assert table["remedy"].startswith("headwater replicate ")
    until(lambda: not is_read(one_table), "the killed job's sessions have ended")
    with Job(pipeline, "replicate", "--until", "now", failpoint="load.after_capture", spark=spark) as job:
        assert job.wait() == -signal.SIGKILL, job.log[-3000:]
    record = record_of(pipeline, KEYED)
    assert (record.state, record.reason) == ("loading", LOST)
    until(lambda: not is_read(one_table), "the killed job's sessions have ended")
    one_table.database.execute("update keyed set n = -2 where id = 2")
    assert main(["replicate", pipeline.file, "--until", "now", "--json"]) == EXIT_DONE
    assert json.loads(capfd.readouterr().out)["tables"][KEYED]["state"] == "active"
    assert_equal(one_table.database, pipeline, KEYED)
    assert one_table.written_rows(KEYED) == [3]


def test_a_running_driver_goes_on_behind_a_slot_that_is_pulled_from_it_beside_writers(one_table: Shop) -> None:
    pipeline = one_table.written(on_slot_loss="repair")
    database, slot = one_table.database, (pipeline.source.slot,)
    writing = threading.Event()

    def write(stop: threading.Event) -> None:
        number = 1000
        while not stop.is_set():
            number += 1
            database.execute(
                f"insert into keyed values ({number}, 0)", f"update keyed set n = n + 1 where id = {number % 500}"
            )
            writing.set()

    def cut() -> bool:
        with database.superuser() as connection:
            connection.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active",
                slot,
            )
            try:
                connection.execute("select pg_drop_replication_slot(%s)", slot)
            except psycopg.errors.ObjectInUse:
                return False
        return True

    with beside(lambda stop: replicate_through_losses(pipeline, None, None, stop)) as driver:
        with beside(write):
            assert wait(pipeline, None, "now", 60).outcome == "satisfied"
            incarnation = record_of(pipeline, KEYED).incarnation
            writing.wait(60)
            until(cut, "the slot is gone")

            def repaired() -> bool:
                record = record_of(pipeline, KEYED)
                return driver.done() or (record.incarnation > incarnation and record.state == "active")

            until(repaired, "the driver has repaired the table", 90)
        assert wait(pipeline, None, "now", 60).outcome == "satisfied"
        assert_equal(database, pipeline, KEYED)
    assert driver.result()["stopped_by"] == "signal"


def test_a_successor_may_take_over_while_the_repair_works(one_table: Shop) -> None:
    pipeline = one_table.written(on_slot_loss="repair")
    one_table.lose_slot()
    one_table.database.execute("update keyed set n = -1 where id <= 3")

    def reader() -> int:
        with connect(one_table.database.conninfo) as connection:
            slot = read_slot(connection, pipeline.source.slot)
        return (slot.active_pid or 0) if slot is not None else 0

    with armed(one_table.folder, "load.after_capture") as hold, beside(first_driver(pipeline)) as first:
        hold.reached(first)
        before = reader()
        with beside(lambda stop: replicate_through_losses(pipeline, None, None, stop, True)):
            until(lambda: reader() not in (0, before), "the successor has the slot", 60)
            hold.release()
            until(first.done, "the repair has ended", 60)
            assert (first.result()["handed_over"], first.result()["tables"][KEYED]["changes"]) == (True, 0)
            assert wait(pipeline, None, "now", 60).outcome == "satisfied"
    assert_equal(one_table.database, pipeline, KEYED)


def first_driver(pipeline: Pipeline) -> Callable[[threading.Event], Any]:
    return lambda stop: replicate_through_losses(pipeline, None, None, stop)
