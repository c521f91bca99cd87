"""What a load asks of its source is bounded there: how long a snapshot is held, and how long it waits for a lock."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import (
    armed,
    assert_equal,
    catch_up,
    in_thread,
    lake_path_of,
    load_tables,
    record_of,
    states_of,
    until,
)
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.errors import Refused
from headwater.load import units
from headwater.load.load import load
from headwater.names import TableName
from headwater.schema import Leaf
from headwater.source.catalog.catalog import read_catalog, signature
from headwater.source.connection import connect
from headwater.source.snapshots import capture_point

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

PLAIN = "public.plain"


_HELD = "from pg_stat_activity where application_name = 'headwater capture point'"


def test_the_server_ends_a_snapshot_that_is_held_too_long(database: Database) -> None:
    with capture_point(database.conninfo, 1.0), database.superuser() as watcher:
        until(lambda: watcher.execute(f"select {_HELD}").rowcount == 0, "it is ended")


@pytest.mark.parametrize("is_by_spark", [False, True])
def test_a_table_whose_snapshot_is_gone_is_read_at_another_one(
    database: Database, spark: SparkSession, tmp_path: Path, is_by_spark: bool
) -> None:
    database.allow_publishing()
    database.execute(f"create table {PLAIN} (id int primary key)", f"insert into {PLAIN} values (1)")
    pipeline = write_pipeline(tmp_path, database, PLAIN)
    if is_by_spark:  # a feature whose rules only Delta's own writer keeps
        load_tables(pipeline)
        table = f"delta.`{lake_path_of(pipeline, PLAIN)}`"
        spark.sql(f"alter table {table} set tblproperties ('delta.enableChangeDataFeed' = 'true')")
    before = record_of(pipeline, PLAIN).incarnation if is_by_spark else 0
    lines: list[str] = []
    with armed(tmp_path, "load.before_commit") as hold:
        job = in_thread(lambda: load(pipeline, again=True, progress=lines.append))
        hold.reached(job)
        with database.superuser() as watcher:
            watcher.execute(f"select pg_terminate_backend(pid) {_HELD}")
            until(lambda: watcher.execute(f"select {_HELD}").rowcount == 0, "it is ended")
        database.execute(f"insert into {PLAIN} values (2)")
        hold.release()
    assert job.result(120)["tables"][PLAIN]["state"] == "catching up"
    assert any("its snapshot is gone: it was held for load.max_snapshot_age" in line for line in lines)
    assert record_of(pipeline, PLAIN).incarnation == before + 2
    catch_up(pipeline)
    assert_equal(database, pipeline, PLAIN)


@pytest.mark.parametrize("bound", ["lock_timeout", "statement_timeout"])
def test_a_table_that_is_locked_is_read_at_another_capture_point(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setitem(units._BOUNDS, bound, 1.0)
    database.allow_publishing()
    database.execute(f"create table {PLAIN} (id int primary key)", f"insert into {PLAIN} values (1)")
    pipeline = write_pipeline(tmp_path, database, PLAIN)
    with armed(tmp_path, "load.before_commit") as hold, database.connect() as locking:
        job = in_thread(lambda: load_tables(pipeline))
        hold.reached(job)
        locking.execute("begin")
        locking.execute(f"lock table only {PLAIN} in access exclusive mode")
        hold.release()
        # The next attempt waits for the lock before it begins to read, with the bound that is in the code.
        until(lambda: record_of(pipeline, PLAIN).incarnation == 2 or job.done(), "it is loaded again")
        locking.execute("rollback")
    assert job.result(120)["tables"][PLAIN]["state"] == "catching up"
    catch_up(pipeline)
    assert_equal(database, pipeline, PLAIN)


def test_what_has_taken_the_name_of_a_relation_is_not_read_for_it(database: Database, tmp_path: Path) -> None:
    """A default partition that is rotated: its unit would find the new one empty."""
    database.execute(
        "create table m (id int) partition by range (id)",
        "create table m_default partition of m default",
        "insert into m select generate_series(1, 10)",
    )
    database.grant("m", "m_default")
    pipeline = write_pipeline(tmp_path, database, {"name": "public.m", "insert_only": True})
    with contextlib.closing(connect(database.conninfo)) as connection:
        schema = read_catalog(connection, pipeline).table(TableName("public", "m")).schema
        ids = [leaf.relation_id for leaf in schema.leaves]
        with capture_point(database.conninfo, 60.0) as capture:
            reader = units.UnitReader(database.conninfo, capture.snapshot_id, schema, signature(connection, ids))
            those = [unit for leaf in schema.leaves for unit in units.cut_units(leaf, units.Extent(1, 8192))]
            assert sum(batch.num_rows for batch in reader.rows_of(those)) == 10
            with database.connect(autocommit=False) as owner:
                owner.execute("alter table m detach partition m_default")
                owner.execute("alter table m_default rename to m_2025")
                owner.execute("create table m_default partition of m default")
                owner.execute(f"grant select on m_default to {database.role}")
            with pytest.raises(units.TableChanged, match="has another name"):
                list(reader.rows_of(those))


def test_batches_of_wide_rows_have_fewer_of_them(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "BYTES_PER_BATCH", 100_000)
    database.execute(
        "create table wide (id int primary key, note text)",
        "insert into wide select i, repeat('x', 10000) from generate_series(1, 95) i",
    )
    database.grant("wide")
    pipeline = write_pipeline(tmp_path, database, "public.wide")
    with contextlib.closing(connect(database.conninfo)) as connection:
        schema = read_catalog(connection, pipeline).table(TableName("public", "wide")).schema
        ids = [leaf.relation_id for leaf in schema.leaves]
        with capture_point(database.conninfo, 60.0) as capture:
            reader = units.UnitReader(database.conninfo, capture.snapshot_id, schema, signature(connection, ids))
            whole = units.Unit(ids[0], "public", "wide", 0, None)
            assert [batch.num_rows for batch in reader.rows_of([whole])] == [10] * 9 + [5]


def test_a_table_that_the_source_cannot_read_is_suspended_alone(database: Database, tmp_path: Path) -> None:
    database.allow_publishing()
    names = ["public.a", "public.b", "public.c"]
    for name in names:
        database.execute(f"create table {name} (id int primary key, v int)", f"insert into {name} values (1, 0)")
    odd = {"name": names[1], "insert_only": True, "where": "100 / v > 5"}
    pipeline = write_pipeline(tmp_path, database, names[0], odd, names[2], load={"connections": 1})
    states = [table["state"] for table in load(pipeline)["tables"].values()]
    assert states == ["catching up", "suspended", "catching up"]
    record = record_of(pipeline, names[1])
    assert record.reason.startswith("the source cannot read its rows: DivisionByZero (SQLSTATE 22012)")
    database.execute(f"delete from {names[1]}", f"insert into {names[1]} values (1, 10)")
    assert load_tables(pipeline, names[1], again=True)["tables"][names[1]]["rows"] == 1


def test_a_table_that_cannot_be_replicated_keeps_no_other_from_being_loaded_again(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute(f"create table {PLAIN} (id int primary key)", f"insert into {PLAIN} values (1)")
    pipeline = write_pipeline(tmp_path, database, "public.*")
    load_tables(pipeline)
    database.execute("create table scratch (id int)")
    assert load_tables(pipeline, PLAIN, again=True)["tables"][PLAIN]["state"] == "catching up"
    for names, again in (((), True), (("public.scratch",), False)):
        with pytest.raises(Refused, match="scratch"):
            load_tables(pipeline, *names, again=again)
    database.execute("create table late (id int primary key)")
    found = load_tables(pipeline)
    assert states_of(found) == {PLAIN: "catching up", "public.late": "catching up", "public.scratch": "suspended"}
    assert "key" in found["tables"]["public.scratch"]["reason"]


def test_units_are_small_also_where_most_lies_beside_the_pages() -> None:
    leaf = Leaf(1, "public", "t", 1)
    plain = units.cut_units(leaf, units.Extent(8192, 8192 * 8192))
    assert [(unit.first, unit.end) for unit in plain] == [(0, 4096), (4096, None)]
    toasted = units.cut_units(leaf, units.Extent(100, 100 << 30))
    assert len(toasted) == 100
    assert units.cut_units(leaf, units.Extent(0, 0)) == [replace(plain[1], first=0)]
