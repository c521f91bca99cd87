"""A repair leaves exactly the source's rows, in the shape that the pipeline file declares, and says what it found."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from fixtures.jobs import assert_equal, catch_up, lake_path_of, lake_rows, record_of
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.load.rows_by_key import KeyReader
from headwater.load.source_rows import units_of
from headwater.load.units import UnfitValue, UnitReader
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.catalog import read_catalog, signature
from headwater.source.connection import connect
from headwater.source.snapshots import capture_point
from headwater.verify import repair
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

AMOUNTS, CITIES, PAIRS, TWICE = "public.amounts", "public.cities", "public.pairs", "public.twice"
PATHS = "public.paths"


def damage(spark: SparkSession, pipeline: Pipeline, table: str, statement: str) -> None:
    """Another program writes to the table in the lake."""
    spark.sql(statement.replace("TABLE", f"delta.`{lake_path_of(pipeline, table)}`"))


def loaded(folder: Path, database: Database, *tables: str | dict[str, Any]) -> Pipeline:
    database.allow_publishing()
    return pipeline_in_step(folder, database, *tables)


@pytest.mark.usefixtures("each_comparison")
def test_keys_that_the_source_takes_for_equal_are_repaired_as_the_lakes_own_texts(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is read once however the keys fall that are asked for together."""
    monkeypatch.setattr(repair, "KEYS_PER_READ", 1)
    database.execute(
        "create table amounts (v numeric primary key, n int)",
        "insert into amounts select i::numeric(3, 1), i from generate_series(1, 5) i",
    )
    pipeline = loaded(tmp_path, database, AMOUNTS)
    damage(spark, pipeline, AMOUNTS, "update TABLE set v = concat(v, '0') where n <= 3")
    found = verify(pipeline, repair=True)["tables"][AMOUNTS]
    assert (found["missing"], found["extra"], found["different"], found["repaired"]) == (3, 3, 0, 6)
    assert "written_anew" not in found
    catch_up(pipeline)
    assert sorted(lake_rows(pipeline, AMOUNTS)) == [(f"{i}.0", i) for i in range(1, 6)]


@pytest.mark.usefixtures("each_comparison")
def test_rows_under_keys_that_are_arrays_are_put_right(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    database.execute(
        "create table paths (way text[], turns int[], n int, primary key (way, turns))",
        """insert into paths select array['a "' || i, null, 'Ü{,}'], array[i, -i], i from generate_series(1, 5) i""",
        "insert into paths values ('{}', '{}', 6)",
    )
    pipeline = loaded(tmp_path, database, PATHS)
    damage(spark, pipeline, PATHS, "update TABLE set n = -n where n in (2, 6)")
    found = verify(pipeline, repair=True)["tables"][PATHS]
    assert (found["missing"], found["extra"], found["different"], found["repaired"]) == (0, 0, 2, 2)
    assert "written_anew" not in found
    assert_equal(database, pipeline, PATHS)


def test_keys_of_types_that_sql_reads_in_a_way_of_its_own_are_compared(database: Database, tmp_path: Path) -> None:
    database.execute(
        "create domain small as numeric(4, 1)",
        "create domain positive as small",
        "create domain word as text",
        "create type \"we{ird}%s\" as enum ('a', 'b')",
        "create table older (v positive, w word, n int, primary key (v, w))",
        "insert into older values (-1, 'old', 1), (5, 'new', 1)",
        "alter domain positive add constraint above check (value > 0) not valid",
        "alter domain word add constraint new check (value = 'new') not valid",
        'create table weird (kind "we{ird}%s" primary key, n int)',
        "insert into weird values ('a', 1), ('b', 1)",
    )
    pipeline = loaded(tmp_path, database, "public.older", "public.weird")
    for name in ("public.older", "public.weird"):
        DeltaTable(lake_path_of(pipeline, name)).update({"n": "2"})
    for repaired in (2, 0):
        for found in verify(pipeline, repair=True)["tables"].values():
            assert (found["missing"], found["extra"], found["different"]) == (0, 0, repaired)
            assert (found["repaired"], found["rows"]) == (repaired, 2)
        catch_up(pipeline)


def test_what_the_pipeline_file_says_by_now_holds_after_the_repair(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    wanted: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
        "public.hidden": ({"columns": {"exclude": ["note"]}}, ["id", "region"], []),
        "public.parted": ({"partition_by": ["region"]}, ["id", "region", "note"], ["region"]),
        "public.kept": (
            {"soft_delete": True},
            ["id", "region", "note", "_hw_deleted", "_hw_deleted_lsn", "_hw_deleted_at"],
            [],
        ),
    }
    for name in wanted:
        database.execute(
            f"create table {name} (id int primary key, region text, note text)",
            f"insert into {name} select i, 'eu', 'secret' from generate_series(1, 10) i",
        )
    pipeline = loaded(tmp_path, database, *wanted)
    for name in wanted:
        damage(spark, pipeline, name, "delete from TABLE where id = 3")
    catch_up(pipeline)
    pipeline = write_pipeline(tmp_path, database, *({"name": name, **wanted[name][0]} for name in wanted))
    found = verify(pipeline, repair=True)["tables"]
    for name, (_, columns, partitions) in wanted.items():
        assert found[name]["written_anew"]
        table = DeltaTable(lake_path_of(pipeline, name))
        assert [field.name for field in table.schema().fields] == columns
        assert table.metadata().partition_columns == partitions
        assert len(lake_rows(pipeline, name, ["id"])) == 10
        assert record_of(pipeline, name).state in ("active", "catching up")


def test_a_read_by_keys_gives_what_a_load_gives_and_refuses_what_it_refuses(database: Database, tmp_path: Path) -> None:
    database.execute(
        "create table cities (id int primary key, region text, size numeric(10, 2))",
        "insert into cities values (1, 'eu', 1.5), (2, '', 2.5), (3, null, 3.5)",
    )
    database.grant(CITIES)
    entry = {"name": CITIES, "partition_by": ["region"], "on_bad_value": {"region": "null"}}
    pipeline = write_pipeline(tmp_path, database, entry)
    with contextlib.closing(connect(database.conninfo)) as connection:
        schema = read_catalog(connection, pipeline).table(TableName.parse(CITIES)).schema
        ids = [leaf.relation_id for leaf in schema.leaves]

        def read(*keys: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            with capture_point(database.conninfo, 60.0) as capture:
                known = (database.conninfo, capture.snapshot_id, schema, signature(connection, ids))
                by_keys = list(KeyReader(*known, keys=[(key,) for key in keys]).read())
                by_units = list(UnitReader(*known).rows_of(units_of(connection, schema.leaves)[0]))
            return rows_of(by_keys), rows_of(by_units)

        def rows_of(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
            names = [column.name for column in schema.columns]
            return [row for batch in batches for row in batch.select(names).to_pylist()]

        by_keys, by_units = read("1", "2", "3", "4")
        assert by_keys == by_units
        assert by_keys[1]["region"] is None, "Delta stores an empty text in a partition column as NULL"
        database.execute("insert into cities values (4, 'eu', 'NaN')")
        with pytest.raises(UnfitValue, match='"size"'):
            read("4")


def test_a_repair_leaves_nothing_where_more_keys_differ_than_are_looked_at(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.verify.verify._CANDIDATES", 4)
    database.execute(
        "create table cities (id int primary key, size int)",
        "insert into cities select i, i from generate_series(1, 20) i",
    )
    pipeline = loaded(tmp_path, database, CITIES)
    damage(spark, pipeline, CITIES, "update TABLE set size = -size where id > 10")
    found = verify(pipeline, repair=True)["tables"][CITIES]
    assert (found["different"], found["repaired"]) == (10, 10)
    assert not found.get("unsettled")
    catch_up(pipeline)
    assert_equal(database, pipeline, CITIES)


@pytest.mark.usefixtures("each_comparison")
def test_a_repair_says_what_it_found_whether_it_writes_anew_or_by_keys_that_are_there_more_than_once(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_MOST", 4)
    for name in (PAIRS, TWICE):
        database.execute(
            f"create table {name} (a int, b text, primary key (a, b))",
            f"insert into {name} select i, 'k' from generate_series(1, 20) i",
        )
    pipeline = loaded(tmp_path, database, PAIRS, TWICE)
    damage(spark, pipeline, PAIRS, "update TABLE set b = 'other' where a <= 3")
    twice = "insert into TABLE select a, b from TABLE where a <= 3 union all values (3, 'k'), (77, 'x'), (77, 'x')"
    damage(spark, pipeline, TWICE, twice)
    database.execute("delete from twice where a = 2")
    found = verify(pipeline, repair=True)["tables"]
    assert found[PAIRS]["written_anew"] == "more than 4 rows differ"
    assert [found[PAIRS][kind] for kind in ("missing", "extra", "different", "repaired")] == [3, 3, 0, 6]
    assert found[PAIRS]["keys"][:2] == [
        {"key": {"a": 1, "b": "k"}, "kind": "missing"},
        {"key": {"a": 1, "b": "other"}, "kind": "extra"},
    ]
    assert [found[TWICE][kind] for kind in ("missing", "extra", "different", "repaired")] == [0, 7, 0, 7]
    assert "written_anew" not in found[TWICE]
    catch_up(pipeline)
    assert_equal(database, pipeline, PAIRS, TWICE)
