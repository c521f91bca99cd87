"""Tables with `history` and `soft_delete` from a real source: every change once, in the log's order, in the same cut.

What the history must hold is known from a second slot, whose log the test reads on its own at the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

import headwater
from fixtures.jobs import Job, catch_up, lake_path_of, lake_rows, load_tables, record_of, states_of, until
from fixtures.log_of import Committed, Source, source_of
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.delta import storage
from headwater.delta.log_entries import log_path
from headwater.delta.tables import commits_after
from headwater.errors import Refused
from headwater.gate.check import check
from headwater.lake.cuts import HISTORY
from headwater.lake.ledger import read_epoch
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reading.newest_views import newest_cut
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ORDERS, EVENTS, SALES = "public.orders", "public.events", "public.sales"
BIG = "repeat(md5(random()::text), 200)"


@dataclass
class Shop:
    database: Database
    pipeline: Pipeline
    log: Source
    spark: SparkSession

    def run(self, *statements: str) -> None:
        """One transaction each, and the lake follows."""
        self.database.execute(*statements)
        assert set(states_of(catch_up(self.pipeline)).values()) == {"active"}

    def changes(self, name: str) -> list[dict[str, Any]]:
        """The history at the newest cut, in the log's order."""
        frame = headwater.history(self.spark, newest_cut(self.pipeline), name)
        rows = [row.asDict() for row in frame.collect()]
        return sorted(rows, key=lambda row: (row["_hw_lsn"], row["_hw_sequence"]))

    def marks(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        return lake_rows(self.pipeline, name, [*columns, "_hw_deleted"])


@pytest.fixture(scope="module")
def shop(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shared_database.execute(
        "create table orders (id int primary key, note text, body text)",
        "alter table orders alter column body set storage external",
        f"insert into orders select i, 'old ' || i, {BIG} from generate_series(1, 5) i",
        "create table events (id int, what text)",
        "insert into events values (1, 'before')",
        "create table sales (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table sales_eu partition of sales for values in ('eu')",
        "create table sales_us partition of sales for values in ('us')",
        "insert into sales select i, case when i % 2 = 0 then 'eu' else 'us' end, i from generate_series(1, 6) i",
        "create table plain (id int primary key, n int)",
        "insert into plain select i, i from generate_series(1, 5) i",
    )
    pipeline = write_pipeline(
        tmp_path_factory.mktemp("history"),
        shared_database,
        {"name": ORDERS, "history": True, "soft_delete": True},
        {"name": EVENTS, "history": True, "insert_only": True},
        {"name": SALES, "history": True, "soft_delete": True},
        {"name": "public.plain", "soft_delete": True, "partition_by": ["n"]},
    )
    load_tables(pipeline)
    catch_up(pipeline)
    with source_of(shared_database, ORDERS, "public.sales_eu", "public.sales_us") as log:
        yield Shop(shared_database, pipeline, log, spark)


def told(committed: list[Committed], *tables: str) -> list[tuple[str, int, int, Any]]:
    """Of the log as the test reads it: operation, commit end, xid and key of each change."""
    return [
        (
            {"I": "insert", "U": "update", "D": "delete"}[change.operation],
            transaction.end_lsn,
            transaction.xid,
            (change.new or change.old or {}).get("id"),
        )
        for transaction in committed
        for change in transaction.changes
        if change.table in tables
    ]


def test_the_history_holds_every_change_of_the_log_and_says_what_it_is(shop: Shop) -> None:
    shop.run(
        "insert into orders values (6, 'new', 'b6')",
        "update orders set note = 'changed' where id = 1",
        "update orders set id = 10, note = 'moved' where id = 2",
        "delete from orders where id = 3",
        "delete from orders where id = 6",
    )
    rows = shop.changes(ORDERS)
    assert rows[0]["_hw_operation"] == "load"
    assert rows[0]["_hw_incarnation"] == 1
    found = [
        (row["_hw_operation"], row["_hw_before_id"], row["id"], row["note"], row["_hw_unchanged"]) for row in rows[1:]
    ]
    assert found == [
        ("insert", None, 6, "new", []),
        ("update", 1, 1, "changed", ["body"]),
        ("update", 2, 10, "moved", ["body"]),
        ("delete", 3, 3, None, None),
        ("delete", 6, 6, None, None),
    ]
    assert [row["body"] for row in rows[1:]] == ["b6", None, None, None, None]
    assert all(row["_hw_committed_at"] is not None for row in rows[1:])


def test_deleted_rows_stay_marked_and_a_key_comes_to_life_again(shop: Shop) -> None:
    shop.run("insert into orders values (3, 'back', 'b3')", "update plain set n = 9 where id = 1")
    shop.run("delete from plain where id in (1, 2)", "delete from orders where id = 4")
    assert shop.marks(ORDERS, "id") == [
        (1, False), (10, False), (2, True), (3, False), (4, True), (5, False), (6, True)
    ]  # fmt: skip
    assert shop.marks("public.plain", "id", "n") == [
        (1, 9, True), (2, 2, True), (3, 3, False), (4, 4, False), (5, 5, False)
    ]  # fmt: skip
    (body,) = [row[1] for row in lake_rows(shop.pipeline, ORDERS, ["id", "body"]) if row[0] == 4]
    assert len(body) == 32 * 200, "a marked row keeps the values that the log never carried"
    shown = status(shop.pipeline)["tables"]
    assert (shown[ORDERS]["rows"], shown["public.plain"]["rows"]) == (4, 3)
    checked = verify(shop.pipeline)["tables"]
    for name in (ORDERS, "public.plain", SALES):
        counted = checked[name]
        assert (counted["compared"], counted["missing"], counted["extra"], counted["different"]) == (True, 0, 0, 0)
    assert checked[ORDERS]["rows"] == 4


def test_truncates_mark_what_lived_and_are_a_row_each(shop: Shop) -> None:
    shop.run("truncate sales_eu", "insert into sales values (2, 'eu', 20)")
    assert shop.marks(SALES, "id") == [(1, False), (2, False), (3, False), (4, True), (5, False), (6, True)]
    shop.run("truncate orders, events, plain", "insert into plain values (3, 7), (8, 8)")
    assert all(deleted for _, deleted in shop.marks(ORDERS, "id"))
    assert [row for row in shop.marks("public.plain", "id", "n") if not row[-1]] == [(3, 7, False), (8, 8, False)]
    assert lake_rows(shop.pipeline, EVENTS) == []
    truncates = [row for row in shop.changes(SALES) if row["_hw_operation"] == "truncate"]
    (oid,) = shop.database.query("select 'sales_eu'::regclass::oid::bigint")[0]
    assert [row["_hw_partition"] for row in truncates] == [oid]
    assert [row["_hw_operation"] for row in shop.changes(EVENTS)] == ["load", "truncate"]
    assert shop.changes(ORDERS)[-1]["_hw_operation"] == "truncate"
    assert status(shop.pipeline)["tables"][ORDERS]["rows"] == 0
    counted = verify(shop.pipeline)["tables"]
    assert {name: counted[name]["extra"] + counted[name]["missing"] for name in counted} == dict.fromkeys(counted, 0)


@pytest.mark.parametrize("point", ["replicate.after_history_commit", "replicate.after_table_commit"])
def test_killed_between_its_commits_every_change_is_written_once(shop: Shop, spark: SparkSession, point: str) -> None:
    for number in range(100, 103):
        shop.database.execute(
            f"insert into orders values ({number}, 'x', 'y') on conflict (id) do update set note = 'z'"
        )
        shop.database.execute(f"update sales set n = n + 1 where id = {number - 99}")
    with Job(shop.pipeline, "replicate", "--until", "now", failpoint=f"{point}=kill", spark=spark) as job:
        assert job.wait() == -signal.SIGKILL, job.log[-3000:]
        until(lambda: not job.left, "the reader of the killed driver has ended")
    shop.run("delete from orders where id = 101")
    committed = shop.log.committed()
    for name, tables in ((ORDERS, ("orders",)), (SALES, ("sales_eu", "sales_us"))):
        found = [
            (row["_hw_operation"], row["_hw_lsn"], row["_hw_xid"], row["id"])
            for row in shop.changes(name)
            if row["_hw_operation"] not in ("load", "truncate")
        ]
        assert found == told(committed, *tables)


def test_another_load_leaves_the_history_and_marks_itself(shop: Shop) -> None:
    before = shop.changes(ORDERS)
    shop.database.execute("alter table orders add column extra int", "alter table orders drop column note")
    load_tables(shop.pipeline, ORDERS, again=True)
    shop.run("insert into orders values (200, 'b', 7)")
    after = shop.changes(ORDERS)
    kept = [{name: value for name, value in row.items() if name != "extra"} for row in after[: len(before)]]
    assert kept == before
    new = after[len(before) :]
    assert [(row["_hw_operation"], row["_hw_incarnation"]) for row in new] == [("load", 2), ("insert", 2)]
    assert (new[1]["id"], new[1]["body"], new[1]["extra"], new[1]["note"]) == (200, "b", 7, None)


def test_a_cut_names_the_version_of_the_history_and_reads_it_as_it_was(shop: Shop) -> None:
    earlier = newest_cut(shop.pipeline)
    count = headwater.history(shop.spark, earlier, ORDERS).count()
    shop.run("insert into orders values (300, 'b', 1)")
    later = newest_cut(shop.pipeline)
    assert headwater.history(shop.spark, earlier, ORDERS).count() == count
    assert headwater.history(shop.spark, later, ORDERS).count() == count + 1
    before, after = (cut["tables"][ORDERS]["history"] for cut in (earlier, later))
    # Upkeep may gather its files in between: of the commits one has brought rows.
    commits = commits_after(storage.path_of(after["path"]), before["version"])
    assert [commit.data for commit in commits if commit.version <= after["version"]].count(True) == 1
    epoch = read_epoch(shop.pipeline.lake_path())
    assert epoch is not None
    assert epoch.tables[ORDERS + HISTORY].applied_lsn == epoch.tables[ORDERS].applied_lsn
    with pytest.raises(Refused) as refused:
        headwater.history(shop.spark, later, "public.plain")
    assert refused.value.code == "no_history"


def test_an_option_that_was_changed_after_the_load_is_a_warning_until_the_next_one(shop: Shop, tmp_path: Path) -> None:
    tables = [{"name": ORDERS, "soft_delete": True}, {"name": SALES, "history": True, "soft_delete": True}]
    changed = write_pipeline(tmp_path, shop.database, *tables, lake={"root": shop.pipeline.lake.root})
    found = [problem for problem in check(changed).problems if problem.code == "option_waits_for_load"]
    assert [(problem.where, problem.severity) for problem in found] == [(ORDERS, "warning")]
    assert found[0].message.startswith("history is another")
    assert not [p for p in check(shop.pipeline).problems if p.code == "option_waits_for_load"]


def test_a_history_that_somebody_else_wrote_to_suspends_its_table_alone(shop: Shop) -> None:
    path = lake_path_of(shop.pipeline, EVENTS) + HISTORY
    write_deltalake(path, pa.table({"_hw_operation": ["insert"]}), mode="append", schema_mode="merge")
    shop.database.execute("insert into events values (9, 'after')", "insert into orders values (400, 'b', 1)")
    states = states_of(catch_up(shop.pipeline))
    assert (states[EVENTS], states[ORDERS]) == ("suspended", "active")
    assert "its history was written by another program" in record_of(shop.pipeline, EVENTS).reason


def test_verify_counts_a_marked_row_that_lives_as_missing_and_a_living_one_that_is_gone_as_extra(shop: Shop) -> None:
    plain = lake_path_of(shop.pipeline, "public.plain")
    shop.spark.sql(f"update delta.`{plain}` set _hw_deleted = not _hw_deleted where id in (1, 3)")
    found = verify(shop.pipeline, [TableName.parse("public.plain")])["tables"]["public.plain"]
    assert (found["rows"], found["missing"], found["extra"], found["different"]) == (2, 1, 1, 0)
    assert found["keys"] == [{"key": {"id": 1}, "kind": "extra"}, {"key": {"id": 3}, "kind": "missing"}]


@pytest.mark.parametrize("left", [(), (".a1b2.tmp",), ("00000000000000000000.crc", ".a1b2.tmp")])
def test_a_load_that_died_over_the_first_entry_of_a_log_is_no_hindrance_to_the_next(
    database: Database, spark: SparkSession, tmp_path: Path, left: tuple[str, ...]
) -> None:
    """Killed, or without power: the log's folder is there and holds no entry. To Spark that is no table, and no place
    for one either."""
    database.execute("create table kept (id int primary key, n int)", "insert into kept values (1, 1)")
    database.allow_publishing()
    pipeline = write_pipeline(tmp_path, database, {"name": "public.kept", "history": True})
    for folder in (lake_path_of(pipeline, "public.kept"), lake_path_of(pipeline, "public.kept") + HISTORY):
        storage.make_folder(log_path(folder))
        for name in left:
            storage.replace(os.path.join(log_path(folder), name), b"{")
    load_tables(pipeline)
    database.execute("update kept set n = 2")
    assert states_of(catch_up(pipeline)) == {"public.kept": "active"}
    assert lake_rows(pipeline, "public.kept", ["id", "n"]) == [(1, 2)]
