"""`maintain` beside everything else: cuts that are kept stay readable, the others go, and no writer notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier, Event
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

import headwater
from fixtures.bank import (
    BY_SPARK,
    ENTRIES,
    TABLES,
    Bank,
    Seen,
    Writer,
    assert_epoch_consistent,
    create_bank,
    leave_to_spark,
    writing,
)
from fixtures.jobs import (
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
    registry_of,
    until,
)
from fixtures.loaded import loaded_pipeline, pipeline_in_step
from fixtures.postgres import new_database
from headwater.cli import main
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.small_tables import open_version
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import EXIT_DONE, EXIT_FAILED, LostLease, Refused
from headwater.gate import lease
from headwater.lake import horizon
from headwater.lake.cuts import HISTORY, pin_cut, read, release_pin, take_cut
from headwater.lake.ledger import read_epoch
from headwater.lake.reader import LakeReader
from headwater.lake_root import is_remote
from headwater.maintain.caretaker import Caretaker
from headwater.maintain.cleanup import Cleaned, clean
from headwater.maintain.control_tables import keep_ledger
from headwater.maintain.maintain import maintain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture
def bank(
    each_store: str, postgres: EmbeddedServer, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bank]:
    """A bank that keeps cuts for a tenth of a second, and of the log no more."""
    monkeypatch.setattr(horizon, "LOG_SECONDS", 0.0)
    with new_database(postgres) as database, database.connect() as connection:
        create_bank(database)
        database.allow_publishing()
        pipeline = pipeline_in_step(tmp_path, database, *ENTRIES, lake={"keep_cuts": "100ms"})
        yield Bank(database, pipeline, tmp_path, Writer(connection, seed=7))


def cut_now(bank: Bank) -> dict[str, Any]:
    root = bank.pipeline.lake_path()
    epoch = read_epoch(root)
    assert epoch is not None
    return take_cut(root, "shop", LakeReader(root, "shop").look(), epoch, TABLES, epoch.position.lsn)


def pin(bank: Bank, cut: dict[str, Any], hours: float = 1) -> str:
    return pin_cut(bank.pipeline.lake_path(), cut, "a test", datetime.now(UTC) + timedelta(hours=hours)).id


def batches(bank: Bank, count: int, transactions: int = 3) -> None:
    for _ in range(count):
        bank.writer.write(transactions)
        catch_up(bank.pipeline)


def history_of_keyed(bank: Bank) -> list[tuple[Any, ...]]:
    """Every change that the table ever had, in the log's order."""
    table = open_version(lake_path_of(bank.pipeline, "public.keyed") + HISTORY)
    wanted = "select _hw_lsn, _hw_sequence, _hw_operation, id, tag from t order by 1, 2"
    rows = pa.table(QueryBuilder().register("t", table).execute(wanted).read_all()).to_pylist()
    return [tuple(row.values()) for row in rows]


def rows_of(bank: Bank, spark: SparkSession, cut: dict[str, Any], name: str) -> int:
    """By Spark; in a store by delta-rs."""
    if is_remote(bank.pipeline.lake_path()):
        return int(headwater.scan(cut, name).read_all().num_rows)
    return read(spark, cut)[name].count()


def removed(result: dict[str, Any]) -> int:
    return sum(table["files_removed"] for table in result["tables"].values())


def test_in_a_store_tables_are_cleaned_side_by_side(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    batches(bank, 2)
    # A disk lets nobody wait: there it is one after the other.
    all_at_once = Barrier(len(TABLES) if is_remote(bank.pipeline.lake_path()) else 1, timeout=60)

    def cleaned(folder: str, *given: Any, **options: Any) -> Cleaned:
        if not folder.endswith(HISTORY):
            all_at_once.wait()
        return clean(folder, *given, **options)

    monkeypatch.setattr("headwater.maintain.maintain.clean", cleaned)
    said: list[str] = []
    result = maintain(bank.pipeline, progress=said.append)
    assert list(result["tables"]) == sorted(line.partition(": ")[0] for line in said)
    assert {*TABLES} < {*result["tables"]}
    assert not any(table["error"] or table["skipped"] for table in result["tables"].values()), result


def test_beside_a_driver_what_is_kept_stays_and_the_driver_goes_on(bank: Bank, spark: SparkSession) -> None:
    if not is_remote(bank.pipeline.lake_path()):  # where Spark writes nothing
        leave_to_spark(bank.pipeline)
    results: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        # The driver's own clean-up begins behind that of the first `maintain`: on a slow machine it would come first.
        patch.setattr(Caretaker, "written", lambda self, records: None)
        with following(bank.pipeline) as driver, writing(bank.database, seed=3, pace=0.3):
            begun = bank.epoch
            until(lambda: bank.epoch > begun + 2, "epochs enough to leave something behind")
            cut = cut_now(bank)
            kept = pin(bank, cut)
            until(lambda: bank.epoch > cut["epoch"], "an epoch behind the pinned one")
            for _ in range(2):
                results.append(maintain(bank.pipeline))
                patch.undo()
                keep_ledger(bank.pipeline.lake_path(), Event(), enough=2)
                before = bank.epoch
                until(lambda before=before: bank.epoch > before, "the driver goes on")  # type: ignore[misc]
            assert not driver.done()
            held = {name: record_of(bank.pipeline, name).state for name in TABLES}
    assert held == dict.fromkeys(TABLES, "active")
    assert all(result["driver"] for result in results)
    assert not any(table["error"] for result in results for table in result["tables"].values())
    assert {table["not_compacted"] for result in results for table in result["tables"].values()} == {
        "left to the driver that is running"
    }
    assert removed(results[0]) > 0, "what lies before the pinned cut"
    catch_up(bank.pipeline)
    assert_equal(bank.database, bank.pipeline, *TABLES)
    epochs = bank.epochs()
    assert [epoch.epoch for epoch in epochs] == list(range(1, len(epochs) + 1))
    seen: Seen = {}
    for epoch in epochs[cut["epoch"] - 1 :]:
        assert_epoch_consistent(bank.pipeline, epoch, seen)
    assert rows_of(bank, spark, cut, "public.documents") == 4
    release_pin(bank.pipeline.lake_path(), kept)
    assert removed(maintain(bank.pipeline)) > 0


def test_without_a_driver_tables_are_compacted_on_both_ways_and_replication_goes_on(
    bank: Bank, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_remote(bank.pipeline.lake_path()):  # where Spark writes nothing
        leave_to_spark(bank.pipeline)
        monkeypatch.setattr("headwater.apply.by_spark.tasks.LARGE_BYTES", 0)  # every table is large
    batches(bank, 6)
    before = {name: len(read_snapshot(lake_path_of(bank.pipeline, name)).files) for name in TABLES}
    history = history_of_keyed(bank)
    result = maintain(bank.pipeline)
    assert history_of_keyed(bank) == history
    assert result["driver"] is False
    assert result["tables"]["public.keyed~history"]["compacted"] is True, "a history is a table as well"
    for name in ("public.entries",) if is_remote(bank.pipeline.lake_path()) else ("public.entries", BY_SPARK):
        table = result["tables"][name]
        assert table["compacted"] is True, table
        assert table["files_after"] < table["files_before"] == before[name]
        assert rows_of(bank, spark, cut_now(bank), name) == len(lake_rows(bank.pipeline, name))
    assert_equal(bank.database, bank.pipeline, *TABLES)
    batches(bank, 2)
    assert_equal(bank.database, bank.pipeline, *TABLES)
    assert history_of_keyed(bank)[: len(history)] == history
    assert {record_of(bank.pipeline, name).state for name in TABLES} == {"active"}
    again = maintain(bank.pipeline)
    assert removed(again) > 0, "what was replaced by the compaction is not needed any more"


def test_a_pinned_cut_is_read_by_two_engines_after_the_clean_up_and_is_gone_after_its_pin(
    bank: Bank, spark: SparkSession
) -> None:
    batches(bank, 3)
    cut = cut_now(bank)
    expected = {name: rows_of(bank, spark, cut, name) for name in TABLES}
    kept = pin(bank, cut)
    batches(bank, 6)
    maintain(bank.pipeline)
    for name, table in cut["tables"].items():
        assert rows_of(bank, spark, cut, name) == expected[name]
        assert len(lake_rows(bank.pipeline, name, version=table["version"])) == expected[name]
    release_pin(bank.pipeline.lake_path(), kept)
    maintain(bank.pipeline)
    with pytest.raises(Refused, match="cannot be read any more") as refused:
        sum(rows_of(bank, spark, cut, name) for name in TABLES)
    assert refused.value.code == "cut_gone"
    assert rows_of(bank, spark, cut_now(bank), "public.entries") >= expected["public.entries"]


def test_the_log_ends_behind_the_checkpoint_and_spark_writes_on(bank: Bank, spark: SparkSession) -> None:
    batches(bank, 12, transactions=4)
    result = maintain(bank.pipeline)
    shortened = [name for name, table in result["tables"].items() if table["log_entries_removed"]]
    assert shortened, result
    for name in shortened:
        assert f"{0:020d}.json" not in storage.names(f"{lake_path_of(bank.pipeline, name)}/_delta_log")
        if not is_remote(bank.pipeline.lake_path()):
            assert spark.read.format("delta").load(lake_path_of(bank.pipeline, name)).count() >= 0
    batches(bank, 2)
    assert_equal(bank.database, bank.pipeline, *TABLES)


def test_the_command_says_what_it_did_and_a_second_one_beside_it_is_refused(
    bank: Bank, capfd: pytest.CaptureFixture[str]
) -> None:
    batches(bank, 1)
    capfd.readouterr()
    assert main(["maintain", bank.pipeline.file, "--table", "public.keyed", "--json"]) == EXIT_DONE
    result = json.loads(capfd.readouterr().out)
    assert set(result) == {"driver", "tables", "ledger", "registry", "validations", "expired_pins", "seconds"}
    assert list(result["tables"]) == ["public.keyed", "public.keyed~history"]
    table = result["tables"]["public.keyed"]
    assert table["version"] == open_version(lake_path_of(bank.pipeline, "public.keyed")).version()
    assert table["error"] == table["skipped"] == ""
    registry = registry_of(bank.pipeline)
    with lease.hold(bank.pipeline.conninfo(), registry, lease.MAINTAIN):
        assert main(["maintain", bank.pipeline.file, "--json"]) == EXIT_FAILED
    assert json.loads(capfd.readouterr().out)["error"]["code"] == "lease_held"


def test_a_load_does_not_begin_while_files_are_being_rewritten_nor_the_other_way_round(bank: Bank) -> None:
    registry = registry_of(bank.pipeline)
    with lease.hold(bank.pipeline.conninfo(), registry, lease.COMPACTION), pytest.raises(LostLease, match="compaction"):
        load_tables(bank.pipeline, "public.keyed", again=True)
    batches(bank, 4)
    with lease.hold(bank.pipeline.conninfo(), registry_of(bank.pipeline), lease.LOAD):
        result = maintain(bank.pipeline)
    # A table that is not worth it says nothing.
    told = {table["not_compacted"] for table in result["tables"].values()} - {""}
    assert told, result
    assert all("load is running" in why for why in told)
    assert not any(table["compacted"] for table in result["tables"].values())


def test_a_table_that_is_loaded_and_not_replicated_yet_keeps_its_history(bank: Bank) -> None:
    bank.database.execute("create table late (id int primary key)", "insert into late values (1)")
    bank.database.allow_publishing()
    pipeline = loaded_pipeline(bank.folder, bank.database, *ENTRIES, "public.late", lake={"keep_cuts": "100ms"})
    result = maintain(pipeline)
    assert "run replicate first" in result["tables"]["public.late"]["skipped"]
    catch_up(pipeline)
    assert maintain(pipeline)["tables"]["public.late"]["skipped"] == ""


def test_replicate_starts_while_a_table_is_being_compacted(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the one that links second is lost, and it looks again."""
    from headwater.apply.small_files import Rewritten, Upkeep

    batches(bank, 5)
    commit = Upkeep.commit
    waiting: list[str] = []

    def late(self: Upkeep, folder: str, state: Any, rewritten: list[Rewritten]) -> bool:
        if not waiting:
            waiting.append(folder)
            batches(bank, 1)  # a driver comes, applies and goes
        return commit(self, folder, state, rewritten)

    monkeypatch.setattr(Upkeep, "commit", late)
    job = in_thread(lambda: maintain(bank.pipeline))
    result = job.result(180)
    assert waiting
    assert not any(table["error"] for table in result["tables"].values()), result
    batches(bank, 1)
    assert_equal(bank.database, bank.pipeline, *TABLES)
