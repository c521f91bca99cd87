"""Several tables of one load at once: never more sessions that read than the file allows, and each table by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from fixtures.jobs import (
    Hold,
    armed,
    assert_equal,
    catch_up,
    in_thread,
    lake_path_of,
    load_tables,
    record_of,
    until,
)
from fixtures.loaded import loaded_pipeline
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater import failpoints
from headwater.delta import tables as lake_tables
from headwater.delta.delta_log import read_snapshot
from headwater.delta.delta_types import fields_of
from headwater.errors import Refused
from headwater.load import copy as table_copy
from headwater.load import load as whole_load
from headwater.load import one_table as table_load
from headwater.load import units
from headwater.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

SMALL = ("public.a", "public.b", "public.c")
BAD, LARGE = "public.bad", "public.large"


def _sessions(database: Database, name: str, more: str = "") -> int:
    with database.superuser() as connection:
        found = f"select from pg_stat_activity where application_name = '{name}' {more}"
        return connection.execute(found).rowcount


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "PAGES_PER_UNIT", 4)
    for module in (table_copy, table_load):
        monkeypatch.setattr(module, "BYTES_PER_PLAIN_UNIT", 4 * 8192)


@pytest.mark.usefixtures("small_units")
def test_no_more_sessions_read_than_the_file_allows_and_a_table_fails_alone(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.allow_publishing()
    for name in SMALL:
        database.execute(f"create table {name} (id int primary key)", f"insert into {name} values (1), (2)")
    database.execute(
        f"create table {BAD} (id int primary key, at timestamp)",
        f"insert into {BAD} values (1, 'infinity')",
        f"create table {LARGE} (id int primary key, note text)",
        f"insert into {LARGE} select i, repeat('x', 1000) from generate_series(1, 200) i",
    )
    pipeline = write_pipeline(tmp_path, database, BAD, LARGE, *SMALL, load={"connections": 2})
    holds = {name: Hold(tmp_path / name) for name in SMALL}
    before_large = Hold(tmp_path / "large")
    points = [f"load.after_capture@{name}={hold.action}" for name, hold in holds.items()]
    failpoints._reached.clear()
    monkeypatch.setenv("HEADWATER_FAILPOINT", ";".join([*points, f"load.before_commit@{LARGE}={before_large.action}"]))
    job = in_thread(lambda: load_tables(pipeline))
    try:
        for name in ("public.a", "public.b"):
            holds[name].reached(job)
        # Two of them stand at their capture points: a third one would hold a snapshot for nothing.
        until(lambda: _sessions(database, "headwater capture point") == 2 or job.done(), "only they hold snapshots")
        assert not job.done()
        assert not holds["public.c"].is_reached
        holds["public.a"].release()
        holds["public.c"].reached(job)
        holds["public.b"].release()
        holds["public.c"].release()
        before_large.reached(job)
        assert {record_of(pipeline, name).state for name in SMALL} == {"catching up"}
        with database.connect() as locking, locking.transaction():
            locking.execute(f"lock table {LARGE} in access exclusive mode")
            before_large.release()
            waiting = "and wait_event_type = 'Lock'"
            until(lambda: _sessions(database, "headwater load unit", waiting) == 2 or job.done(), "it is read by two")
            assert not job.done()
        states = {name: table["state"] for name, table in job.result(120)["tables"].items()}
    finally:
        for hold in (*holds.values(), before_large):
            hold.release()
    assert states == {name: "suspended" if name == BAD else "catching up" for name in (*SMALL, BAD, LARGE)}
    assert "infinity" not in record_of(pipeline, BAD).reason
    catch_up(pipeline)
    assert_equal(database, pipeline, *SMALL, LARGE)


@pytest.mark.parametrize("partition_by", ["", "region"])
@pytest.mark.parametrize("since", ["since", "since when"])
def test_a_small_table_is_made_as_spark_would_make_it(
    database: Database, spark: SparkSession, tmp_path: Path, since: str, partition_by: str
) -> None:
    database.allow_publishing()
    database.execute(
        f'create table plain (id int primary key, at timestamp, "{since}" timestamptz, amount numeric(12,2), '
        "tags text[], region text)",
        "insert into plain values (1, now(), now(), 1.5, array['x', null], 'eu')",
    )
    options = {"partition_by": [partition_by]} if partition_by else {}
    pipeline = loaded_pipeline(tmp_path, database, {"name": "public.plain", **options})
    record = record_of(pipeline, "public.plain")
    by_spark = str(tmp_path / "by_spark")
    lake_tables.create(spark, by_spark, record.schema, pipeline.lake.keep_cuts)
    ours, theirs = read_snapshot(lake_path_of(pipeline, "public.plain")), read_snapshot(by_spark)
    assert ours.features == theirs.features
    assert ours.configuration == theirs.configuration
    assert ours.metadata["partitionColumns"] == theirs.metadata["partitionColumns"]
    assert _without_physical(fields_of(ours.metadata)) == _without_physical(fields_of(theirs.metadata))
    rows = spark.read.format("delta").load(lake_path_of(pipeline, "public.plain")).collect()
    assert [(row.id, float(row.amount), row.tags, row.region) for row in rows] == [(1, 1.5, ["x", None], "eu")]
    folder = lake_path_of(pipeline, "public.plain")
    told = [row.operation for row in spark.sql(f"describe history delta.`{folder}`").collect()]
    assert told == [commit["operation"] for commit in DeltaTable(folder).history()] == ["WRITE", "CREATE TABLE"]


def _without_physical(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every writer makes up names of its own for files."""
    name = "delta.columnMapping.physicalName"
    return [{**field, "metadata": {k: v for k, v in field["metadata"].items() if k != name}} for field in fields]


def test_a_small_table_is_loaded_again_over_what_somebody_else_has_made_of_it(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute("create table plain (id int primary key)", "insert into plain values (1), (2)")
    pipeline = loaded_pipeline(tmp_path, database, "public.plain")
    folder = lake_path_of(pipeline, "public.plain")
    with armed(tmp_path, "load.before_commit") as hold:
        job = in_thread(lambda: load_tables(pipeline, again=True))
        hold.reached(job)
        spark.createDataFrame([(7,)], "id int").write.format("delta").mode("append").save(folder)
    job.result(120)
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.plain")
    database.execute("alter table plain add note text default 'x'")
    load_tables(pipeline, again=True)
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.plain")


def test_spark_is_there_for_what_is_large_alone_and_before_anything_has_begun(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_java(*_: str) -> None:
        raise Refused("there is no Java", code="no_java")

    monkeypatch.setattr(session, "job_session", without_java)
    database.allow_publishing()
    database.execute("create table a (id int primary key)", "insert into a values (1), (2)")
    pipeline = write_pipeline(tmp_path, database, "public.a")
    assert load_tables(pipeline)["tables"]["public.a"]["rows"] == 2
    database.execute(f"create table {LARGE} (id int primary key)", f"insert into {LARGE} select generate_series(1, 9)")
    monkeypatch.setattr(whole_load, "BYTES_PER_PLAIN_UNIT", 8192)
    pipeline = write_pipeline(tmp_path, database, "public.a", LARGE)
    with pytest.raises(Refused, match="no Java"):
        load_tables(pipeline)
    assert record_of(pipeline, LARGE).phase == (0, "new")
    assert record_of(pipeline, "public.a").state == "catching up"
