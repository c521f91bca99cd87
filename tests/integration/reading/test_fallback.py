"""A cut that fell back: its tables come from the source, in one snapshot, as the lake would have shown them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headwater
from fixtures.jobs import in_thread
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from headwater.errors import Refused
from headwater.lake.cuts import Cut
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reading.newest_views import newest_cut

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

ACCOUNTS, MARKED, PARTED = "public.accounts", "public.marked", "public.parted"


@pytest.fixture
def pipeline(database: Database, tmp_path: Path, spark: SparkSession) -> Pipeline:
    """A lake with a plain table, one that keeps deleted rows, and a partitioned one."""
    database.allow_publishing()
    database.execute(
        "create table accounts (id int primary key, balance numeric(12,2), tags text[], at timestamptz)",
        "insert into accounts select g, g / 4.0, array['a', null], '2024-02-29 12:00Z' from generate_series(1, 50) g",
        "create table marked (id int primary key, balance bigint)",
        "insert into marked select g, 100 from generate_series(1, 50) g",
        "create table parted (id int, day date, primary key (id, day)) partition by range (day)",
        "create table parted_1 partition of parted for values from ('2024-01-01') to ('2025-01-01')",
        "insert into parted select g, '2024-05-05' from generate_series(1, 7) g",
    )
    return pipeline_in_step(tmp_path, database, ACCOUNTS, {"name": MARKED, "soft_delete": True}, PARTED)


def fallen_back(pipeline: Pipeline, database: Database) -> Cut:
    database.execute("update accounts set balance = balance where id = 50")  # which the lake does not get
    return headwater.wait(pipeline, require="now", timeout=0, on_timeout="fallback")


def test_what_is_read_at_the_source_looks_as_it_would_in_the_lake(
    pipeline: Pipeline, database: Database, spark: SparkSession
) -> None:
    in_lake = headwater.read(spark, newest_cut(pipeline))
    database.execute("update accounts set balance = 77 where id = 1")
    cut = fallen_back(pipeline, database)
    assert (cut["outcome"], cut["fallback"]["repeatable"]) == ("not_running", False)
    at_source = headwater.read(spark, cut)
    assert set(at_source) == {ACCOUNTS, MARKED, PARTED}
    for name, frame in at_source.items():
        fields = [(field.name, field.dataType) for field in frame.schema]
        assert fields == [(field.name, field.dataType) for field in in_lake[name].schema]
        stale = in_lake[name].where("id > 1" if name == ACCOUNTS else "true")
        fresh = frame.where("id > 1" if name == ACCOUNTS else "true")
        assert sorted(map(tuple, fresh.collect()), key=repr) == sorted(map(tuple, stale.collect()), key=repr)
    # What the lake does not have yet is there.
    assert [str(row.balance) for row in at_source[ACCOUNTS].where("id = 1").collect()] == ["77.00"]


def test_all_tables_of_one_call_are_one_moment_which_lasts(
    pipeline: Pipeline, database: Database, spark: SparkSession
) -> None:
    stop = threading.Event()

    def move() -> None:
        with database.connect(autocommit=False) as connection:
            while not stop.is_set():
                connection.execute("update accounts set balance = balance - 1 where id = 1")
                connection.execute("update marked set balance = balance + 1 where id = 1")
                connection.commit()

    total = 50 * 51 / 2 / 4 + 50 * 100
    writer = in_thread(move)
    try:
        for _ in range(2):
            frames = headwater.read(spark, fallen_back(pipeline, database))
            # Twice: the rows stay those of the call, whatever the source does since.
            for _ in range(2):
                sums = [float(frames[name].selectExpr("sum(balance)").collect()[0][0]) for name in (ACCOUNTS, MARKED)]
                assert sum(sums) == pytest.approx(total)
    finally:
        stop.set()
        writer.result(timeout=30)


def test_the_source_is_no_substitute_where_its_columns_are_others(
    pipeline: Pipeline, database: Database, spark: SparkSession
) -> None:
    cut = fallen_back(pipeline, database)
    database.execute("alter table marked add column more int")
    with pytest.raises(Refused) as refused:
        headwater.read(spark, cut)
    assert (refused.value.code, refused.value.where) == ("columns_changed", MARKED)


def test_a_partition_that_was_created_anew_is_read_at_the_source_as_it_is_now(
    pipeline: Pipeline, database: Database, spark: SparkSession
) -> None:
    database.execute(
        "drop table parted_1",
        "create table parted_1 partition of parted for values from ('2024-01-01') to ('2025-01-01')",
        "create table parted_2 partition of parted for values from ('2025-01-01') to ('2026-01-01')",
        "insert into parted values (8, '2024-06-06'), (9, '2025-06-06')",
    )
    parts = {PARTED: "parted_1"}
    cut = headwater.wait(pipeline, tables=[PARTED], timeout=0, on_timeout="fallback", partitions=parts)
    assert [row.id for row in headwater.read(spark, cut)[PARTED].collect()] == [8]


def test_what_needs_versions_of_the_lake_refuses_a_cut_without_them(
    pipeline: Pipeline, database: Database, spark: SparkSession
) -> None:
    with pytest.raises(Refused) as refused:
        headwater.views(spark, fallen_back(pipeline, database), temporary=True)
    assert refused.value.code == "at_source"
