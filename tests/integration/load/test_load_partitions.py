"""Tables with `partition_by`, with names that Delta maps, or in another shape than before: loaded as all others are,
by those who read their rows, and resumed as they are."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from fixtures.jobs import (
    assert_equal,
    catch_up,
    files_below,
    following,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
    until,
)
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater import failpoints
from headwater.delta import new_files as partitioned_write
from headwater.delta import storage
from headwater.delta.delta_log import DataFile, read_snapshot
from headwater.delta.layout import layout_of
from headwater.failpoints import InjectedFailure
from headwater.lake.paths import stretches_path
from headwater.load import copy as table_copy
from headwater.load import one_table as table_load
from headwater.load import stretches, units
from headwater.pipeline_file.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

TABLE = "public.t"
ROWS = 168
BY_DAY, MIXED = "date '2024-01-01' + i / 56", "date '2024-01-01' + i % 21"
"""Three days that follow each other, of two stretches each; and twenty-one whose rows lie all over."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "PAGES_PER_UNIT", 2)
    monkeypatch.setattr(stretches, "UNITS_PER_STRETCH", 2)
    for module in (table_copy, table_load):
        monkeypatch.setattr(module, "BYTES_PER_PLAIN_UNIT", 2 * 8192)


def _table(database: Database, day: str, name: str = "day") -> None:
    """Of 24 pages, which are six stretches."""
    database.allow_publishing()
    database.execute(
        f'create table t (id int primary key, "{name}" date, note text not null) with (autovacuum_enabled = off)',
        f"insert into t select i, {day}, repeat(chr(97 + i % 26), 1000) from generate_series(0, {ROWS - 1}) i",
    )


def _pipeline(folder: Path, database: Database, *partition_by: str) -> Pipeline:
    return write_pipeline(
        folder, database, {"name": TABLE, **({"partition_by": list(partition_by)} if partition_by else {})}
    )


def _fail(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    failpoints._reached.clear()
    monkeypatch.setenv("HEADWATER_FAILPOINT", f"{point}=fail")
    with pytest.raises(InjectedFailure):
        load_tables(pipeline)
    monkeypatch.delenv("HEADWATER_FAILPOINT")


def _files(pipeline: Pipeline) -> list[DataFile]:
    return list(read_snapshot(lake_path_of(pipeline, TABLE)).files.values())


def _assert_whole(database: Database, pipeline: Pipeline, spark: SparkSession) -> None:
    """Source and lake are equal for two engines, each file is of one partition, and no load has left anything."""
    folder = lake_path_of(pipeline, TABLE)
    snapshot = read_snapshot(folder)
    written = {name for name in files_below(folder) if name.endswith(".parquet")}
    assert written == {file.name for file in snapshot.files.values()}
    assert storage.names(stretches_path(pipeline.lake_path(), record_of(pipeline, TABLE).path)) == []
    layout = layout_of(snapshot.metadata)
    of = {layout.in_files(name) for name in layout.partition_by}
    assert all(file.partition_values.keys() == of for file in snapshot.files.values())
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)
    columns = read_columns(folder)
    by_spark = spark.read.format("delta").load(folder).select(*(f"`{name}`" for name in columns)).collect()
    assert sorted(map(tuple, by_spark)) == sorted(map(tuple, lake_rows(pipeline, TABLE, columns)))


def read_columns(folder: str) -> list[str]:
    return [field.name for field in DeltaTable(folder).schema().fields]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["day", "order day"])
@pytest.mark.parametrize(
    ("day", "point"),
    [(BY_DAY, "load.after_stretches"), (MIXED, "load.after_stretches"), (MIXED, "load.after_ordering")],
)
def test_what_was_read_outlives_a_failure(
    database: Database,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    day: str,
    point: str,
    name: str,
) -> None:
    _table(database, day, name)
    pipeline = _pipeline(tmp_path, database, f'"{name}"')
    _fail(pipeline, monkeypatch, point)
    assert not _files(pipeline)
    database.execute("update t set note = 'x' where id = 1", "insert into t (id, note) values (1000, 'no day')")
    with caplog.at_level("INFO"):
        assert load_tables(pipeline)["tables"][TABLE]["rows"] == ROWS + 1
    kept = [record.args for record in caplog.records if "rows of an earlier attempt are still" in record.msg]
    assert kept == [(TABLE, 112)], "all stretches but the first and the last"
    # One of each day, and one more of those of which two stretches have some; all in files of some size are few enough.
    assert len(_files(pipeline)) <= (7 if day == BY_DAY else 22)
    if point == "load.after_stretches":
        _assert_whole(database, pipeline, spark)
    else:  # what was laid out in vain stays until the clean-up
        catch_up(pipeline)
        assert_equal(database, pipeline, TABLE)
    database.execute(f"update t set \"{name}\" = '2024-06-01' where id % 20 = 0", "delete from t where id % 20 = 1")
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)


@pytest.mark.usefixtures("small")
def test_a_partition_that_is_larger_than_others_has_files_of_bounded_size(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned_write, "_FILE_BYTES", 30_000)
    monkeypatch.setattr(stretches, "FEW_PARTITIONS", 0)
    _table(database, "case when i < 150 then date '2024-01-01' else date '2024-01-02' end")
    pipeline = _pipeline(tmp_path, database, "day")
    load_tables(pipeline)
    assert {file.partition_values["day"] for file in _files(pipeline)} == {"2024-01-01", "2024-01-02"}
    _assert_whole(database, pipeline, spark)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_table_takes_another_shape_by_its_load_and_older_cuts_keep_theirs(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """Partitioned and not, more and fewer columns, other types, a name that must be mapped and the way back: never by
    Spark, and the table keeps what somebody has set and said."""
    if is_large:
        for module in (table_copy, table_load):
            monkeypatch.setattr(module, "BYTES_PER_PLAIN_UNIT", 8192)
    monkeypatch.setattr(table_copy, "_copy_by_engine", lambda *_: pytest.fail("written by Spark"))
    _table(database, BY_DAY)
    pipeline = _pipeline(tmp_path, database)
    load_tables(pipeline)
    folder = lake_path_of(pipeline, TABLE)
    spark.sql(f"alter table delta.`{folder}` alter column note comment 'as it was'")
    spark.sql(f"alter table delta.`{folder}` set tblproperties ('team' = 'orders')")
    shapes = [
        ((), ["day"]),
        (("alter table t add seen timestamp default '2024-05-01'",), ["day"]),
        (('alter table t rename day to "order day"',), ['"order day"']),
        (("alter table t alter seen type date",), []),
        (('alter table t rename "order day" to day', "alter table t drop seen"), ["day"]),
    ]
    versions = [(DeltaTable(folder).version(), lake_rows(pipeline, TABLE))]
    for statements, partition_by in shapes:
        if statements:
            database.execute(*statements)
        pipeline = _pipeline(tmp_path, database, *partition_by)
        assert load_tables(pipeline, again=True)["tables"][TABLE]["state"] == "catching up"
        assert DeltaTable(folder).metadata().partition_columns == [name.strip('"') for name in partition_by]
        database.execute("update t set note = note || '!' where id = 3")
        catch_up(pipeline)
        assert_equal(database, pipeline, TABLE)
        versions.append((DeltaTable(folder).version(), lake_rows(pipeline, TABLE)))
    for version, rows in versions:
        assert sorted(map(repr, lake_rows(pipeline, TABLE, version=version))) == sorted(map(repr, rows))
        assert spark.read.format("delta").option("versionAsOf", version).load(folder).count() == ROWS
    fields = {field.name: field for field in spark.read.format("delta").load(folder).schema.fields}
    assert fields["note"].metadata.get("comment") == "as it was"
    assert DeltaTable(folder).metadata().configuration["team"] == "orders"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["day", "order day"])
def test_a_running_driver_goes_on_in_the_shape_that_a_load_has_given_its_table(
    database: Database, spark: SparkSession, tmp_path: Path, name: str
) -> None:
    _table(database, MIXED, name)
    pipeline = _pipeline(tmp_path, database)
    load_tables(pipeline)
    with following(pipeline) as running:
        # Neither begins while the other does.
        until(lambda: record_of(pipeline, TABLE).state == "active" or running.done(), "the driver follows the log")
        for partition_by in ([f'"{name}"'], []):
            database.execute("update t set note = note || '.' where id % 3 = 0")
            other = _pipeline(tmp_path, database, *partition_by)
            load_tables(other, again=True)
            database.execute(
                f"update t set \"{name}\" = '2024-06-01' where id % 20 = 0", "delete from t where id % 20 = 1"
            )
            wanted = database.query("select count(*) from t")
            until(partial(_holds, other, wanted, running), "the driver follows")
    catch_up(other)
    assert_equal(database, other, TABLE)


def _holds(pipeline: Pipeline, rows: list[tuple[int]], running: Future[Any]) -> bool:
    """Whether the table in the lake has so many and is in step, or nobody brings it there any more."""
    found = sum((file.rows or 0) - file.deleted for file in _files(pipeline))
    return running.done() or ([(found,)] == rows and record_of(pipeline, TABLE).state == "active")


@pytest.mark.parametrize("is_large", [False, True])
def test_a_value_that_no_folder_can_be_named_after_suspends_the_table(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        for module in (table_copy, table_load):
            monkeypatch.setattr(module, "BYTES_PER_PLAIN_UNIT", 1)
    database.allow_publishing()
    database.execute("create table t (id int primary key, part text)", "insert into t values (1, repeat('x', 300))")
    pipeline = _pipeline(tmp_path, database, "part")
    assert load_tables(pipeline)["tables"][TABLE]["state"] == "suspended"
    reason = record_of(pipeline, TABLE).reason
    assert "a value of the partition column part is too long for the name of a folder" in reason
    assert "xxx" not in reason
    database.execute("update t set part = 'short'")
    assert load_tables(pipeline, again=True)["tables"][TABLE]["state"] == "catching up"
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)
