"""Every supported type, every edge value, both ways into the lake: by load and by log, read back by two engines."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from fixtures.jobs import catch_up, load_tables, record_of
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.type_values import EXTENSIONS, GOOD, ONLY_TEXT, PREPARE, PREPARE_ONLY_TEXT
from headwater.arrow_types import lake_schema
from headwater.delta.tables import struct_type
from headwater.verify.by_spark import SparkComparison
from headwater.verify.in_memory import MemoryComparison
from headwater.verify.verify import verify


def _exact(value: Any) -> Any:
    """Comparable with nothing lost: floats by their bits, decimals with their scale."""
    if isinstance(value, float):
        return struct.pack("!d", value)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return [_exact(element) for element in value]
    return value


def _literals(types: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Of each type its values as SQL, filled up with NULL to one more than any has."""
    rows = max(map(len, types.values())) + 1
    return [
        [f"'{value.replace(chr(39), chr(39) * 2)}'" for value in values] + ["null"] * (rows - len(values))
        for values in types.values()
    ]


def _of_extensions(database: Database) -> dict[str, list[str]]:
    """Types of the extensions that this server has, made in the database."""
    with database.superuser() as connection:
        there = {name for (name,) in connection.execute("select name::text from pg_available_extensions").fetchall()}
        for name in EXTENSIONS.keys() & there:
            connection.execute(f"create extension {name}")
    return dict(kind for name, kind in EXTENSIONS.items() if name in there)


@pytest.mark.parametrize("form", ["binary", "text"])
def test_a_value_is_the_same_in_the_lake_whether_it_came_by_load_or_by_log(
    database: Database, tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    with database.superuser() as connection:
        has_xml = bool(connection.execute("select 1 from pg_config where setting like '%--with-libxml%'").fetchall())
    binary = {name: values for name, values in GOOD.items() if name != "xml" or has_xml}
    types = dict(binary)
    if form == "text":
        types |= ONLY_TEXT | _of_extensions(database)
    columns = [f"c{index}" for index in range(len(types))]
    literals = _literals(types)
    rows = len(literals[0])  # the last row is NULL throughout
    database.allow_publishing()
    database.execute(
        *PREPARE,
        *PREPARE_ONLY_TEXT,
        f"create table everything (id int primary key, {', '.join(map(' '.join, zip(columns, types, strict=True)))})",
        *(
            f"insert into everything values ({number}, {', '.join(column[number] for column in literals)})"
            for number in range(rows)
        ),
    )
    pipeline = write_pipeline(tmp_path, database, "public.everything")
    loaded = load_tables(pipeline)["tables"]["public.everything"]
    assert (loaded["state"], loaded["rows"]) == ("catching up", rows)
    # The same rows by the log, as inserts and as updates of rows that were NULL.
    names = ", ".join(columns)
    assignments = ", ".join(f"{name} = e.{name}" for name in columns)
    database.execute(
        f"insert into everything select id + 1000, {names} from everything where id < 1000",
        "insert into everything (id) select id + 2000 from everything where id < 1000",
        f"update everything t set {assignments} from everything e where t.id = e.id + 2000 and e.id < 1000",
    )
    done = catch_up(pipeline)
    told = [record.getMessage() for record in caplog.records if "text format" in record.getMessage()]
    assert len(told) == (form == "text"), told
    assert all(f"public.everything.{name}" in told[0] for name in columns[len(binary) :] if told)
    assert done["tables"]["public.everything"] == {"changes": 4 * rows - rows, "state": "active"}

    path = str(tmp_path / "lake" / "public" / "everything")
    by_rust = pa.table(
        QueryBuilder().register("t", DeltaTable(path)).execute("select * from t order by id").read_all()
    ).to_pylist()
    by_spark = spark.read.format("delta").load(path).orderBy("id").toArrow().to_pylist()
    for engine in (by_spark, by_rust):
        found = {row["id"]: row for row in engine}
        assert len(found) == 3 * rows
        for number in range(rows):
            for name, kind in zip(columns, types, strict=True):
                by_load, by_insert, by_update = (_exact(found[number + step][name]) for step in (0, 1000, 2000))
                assert by_load == by_insert == by_update, f"{kind}, value {number}"
        assert all(value is None for name, value in found[rows - 1].items() if name != "id")
        assert all(found[0][name] is not None for name in columns)
        for name, kind in zip(columns, types, strict=True):
            if kind not in GOOD:
                statement = f"select format('%s', {name}) from everything where id < 1000 order by id"
                texts = [text for (text,) in database.query(statement)][: len(types[kind])]
                assert [found[number][name] for number in range(len(texts))] == texts, kind


def test_verify_tells_each_value_of_every_type_from_the_others_and_finds_it_equal_to_itself(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    types = {name: values for name, values in GOOD.items() if name != "xml"}
    columns = [f"c{index}" for index in range(len(types))]
    declared = ", ".join(map(" ".join, zip(columns, types, strict=True)))
    database.allow_publishing()
    database.execute(*PREPARE, f"create table everything (id int primary key, {declared})")
    for number, values in enumerate(zip(*_literals(types), strict=True)):
        database.execute(f"insert into everything values ({number}, {', '.join(values)})")
    pipeline = pipeline_in_step(tmp_path, database, "public.everything")
    table = verify(pipeline)["tables"]["public.everything"]
    assert (table["different"], table["missing"], table["extra"], table["compared"]) == (0, 0, 0, True)

    # For each column all rows again, where its values stand a row further down, the last one in the first row.
    rows = spark.read.format("delta").load(str(tmp_path / "lake" / "public" / "everything")).orderBy("id").toArrow()
    count = rows.num_rows
    as_they_are, moved, different = [], [], set()
    for index, name in enumerate(columns):
        ids = pa.array(range(index * count, (index + 1) * count), pa.int32())
        copy = rows.set_column(0, "id", ids)
        values = rows[name].take([*range(1, count), 0])
        as_they_are.append(copy)
        moved.append(copy.set_column(index + 1, name, values))
        pairs = zip(rows[name].to_pylist(), values.to_pylist(), strict=True)
        different |= {index * count + row for row, (one, other) in enumerate(pairs) if _exact(one) != _exact(other)}
    schema = record_of(pipeline, "public.everything").schema
    source, lake = (pa.concat_tables(part) for part in (as_they_are, moved))
    kind = struct_type(schema)
    source_by, lake_by = (spark.createDataFrame(rows, schema=kind) for rows in (source, lake))
    compared, by_spark = SparkComparison(spark, schema).compare(source_by, lake_by, 100_000)
    assert compared == count * len(columns)
    arrow = lake_schema(schema)
    in_memory = MemoryComparison(schema).compare(source.cast(arrow), lake.cast(arrow), 100_000)
    for candidates in (by_spark, in_memory):
        assert set(candidates.keys["k0"].to_pylist()) == different
