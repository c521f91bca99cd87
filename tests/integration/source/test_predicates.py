"""Source, lake and Spark find the same rows by a predicate, as the server does by the text that a person wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from fixtures.postgres import Database
from fixtures.soak import examples
from headwater.apply.by_spark.where_sql import spark_condition
from headwater.delta.data_files import write_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import PLAIN, Layout
from headwater.delta.where_files import columns_read, matches, may_match
from headwater.errors import Refused
from headwater.pipeline_file.where_text import parse
from headwater.predicate import Predicate
from headwater.schema import Column, Leaf, TableSchema, ValueType
from headwater.source.catalog.where_sql import condition, exclude_each_other, reach_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

# Column: its type at the source, there by oid, on the wire, in the lake and in Arrow; and values, in order.
COLUMNS: dict[str, tuple[str, int, str, str, Any, list[Any]]] = {
    "small": ("int2", 21, "int2", "smallint", pa.int16(), [-32768, -1, 0, 7, 32767]),
    "n": ("int4", 23, "int4", "int", pa.int32(), [-(2**31), 0, 5, 2**31 - 1]),
    "big": ("int8", 20, "int8", "bigint", pa.int64(), [-(2**63), 0, 2**40, 2**63 - 1]),
    "Note's": ("text", 25, "text", "string", pa.string(), ["", "%s", "a", "A", "it's \\", "Ünï€😀", "x" * 40]),
    "word": ("varchar(9)", 1043, "text", "string", pa.string(), ["", "null", "or"]),
    "yes": ("boolean", 16, "bool", "boolean", pa.bool_(), [False, True]),
    "day": ("date", 1082, "date", "date", pa.date32(), [date(1, 1, 1), date(1582, 10, 10), date(2024, 2, 29)]),
    "at": ("timestamp", 1114, "timestamp", "timestamp_ntz", pa.timestamp("us"), [
        datetime(1, 1, 1), datetime(2024, 1, 1, 0, 0, 0, 999_999), datetime(9999, 12, 31, 23, 59, 59, 999_999)
    ]),
    "moment": ("timestamptz", 1184, "timestamptz", "timestamp", pa.timestamp("us", "UTC"), [
        datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC), datetime(2024, 3, 31, 1, 30, tzinfo=UTC)
    ]),
    "price": ("numeric(12,2)", 1700, "numeric", "decimal(12,2)", pa.decimal128(12, 2), [
        Decimal("-9999999999.99"), Decimal("0.00"), Decimal("0.10"), Decimal("2.50"), Decimal("9999999999.99")
    ]),
    "wide": ("numeric(38,6)", 1700, "numeric", "decimal(38,6)", pa.decimal128(38, 6), [
        Decimal(f"-{'9' * 32}.999999"), Decimal("0.000001"),
        Decimal(f"{'9' * 31}8.000001"), Decimal(f"{'9' * 31}8.000002"),
    ]),
    "number": ("numeric(10)", 1700, "numeric", "decimal(10,0)", pa.decimal128(10, 0), [
        Decimal("-1"), Decimal("7"), Decimal("9999999999")
    ]),
    "code": ("uuid", 2950, "uuid", "string", pa.string(), [
        "0eebc990-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
    ]),
}  # fmt: skip


def _value_type(wire: str, lake: str) -> ValueType:
    digits = re.fullmatch(r"decimal\((\d+),(\d+)\)", lake)
    return ValueType(wire, lake, int(digits[1]), int(digits[2])) if digits else ValueType(wire, lake)


SCHEMA = TableSchema(
    1, "public", "known",
    tuple(Column(name, i, oid, -1, _value_type(wire, lake)) for i, (name, (_, oid, wire, lake, *_)) in
        enumerate(COLUMNS.items(), 1)),
    ("n",), (Leaf(1, "public", "known", 1),),
)  # fmt: skip
EQUAL_ONLY = ("Note's", "word", "yes")
ROWS = pa.table(
    {
        name: pa.array(
            [None if row % 5 == 4 else values[(row // (i + 1) + row) % len(values)] for row in range(120)], kind
        )
        for i, (name, (*_, kind, values)) in enumerate(COLUMNS.items())
    }
)


@pytest.fixture(scope="module")
def known(shared_database: Database) -> Iterator[psycopg.Connection[Any]]:
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, (kind, *_) in COLUMNS.items()
    )
    with shared_database.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute(sql.SQL("create table known (id int, {})").format(columns))
        with connection.cursor().copy("copy known from stdin") as copy:
            for number, row in enumerate(ROWS.to_pylist()):
                copy.write_row([number, *row.values()])
        yield connection


def written(value: Any) -> str:
    return f"{value}" if isinstance(value, int | Decimal) else "'" + str(value).replace("'", "''") + "'"


def quoted(name: str) -> str:
    return '"' + name + '"'


@st.composite
def comparisons(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(list(COLUMNS)))
    values = st.sampled_from(COLUMNS[name][-1]).map(written)
    forms = ["{0} = {1}", "{0} <> {1}", "{0} IN ({1}, {2})", "{0} not in ({1},{2})", "{0} is null", "{0} Is Not Null"]
    if name not in EQUAL_ONLY:
        forms += ["{0} < {1}", "{0}<={1}", "{0} > {1}", "{0} >= {1}", "{0} between {1} and {2}",
                  "{0} not between {1} and {2}"]  # fmt: skip
    form = draw(st.sampled_from(forms))
    return form.format(quoted(name) if name != name.lower() or "'" in name else name, draw(values), draw(values))


texts = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(" or ".join),
        st.tuples(inner, inner).map(" AND ".join),
        inner.map("not ({})".format),
        inner.map("NOT {}".format),
        inner.map("({})".format),
    ),
    max_leaves=6,
)


def found_at_source(known: psycopg.Connection[Any], where: Any) -> list[int]:
    query = sql.SQL("select id from known where {} order by id").format(where)
    return [number for (number,) in known.execute(query)]


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=texts)
def test_the_lake_finds_the_rows_that_the_server_finds(known: psycopg.Connection[Any], text: str) -> None:
    predicate = parse(text, SCHEMA)
    expected = found_at_source(known, sql.SQL(text))
    assert found_at_source(known, condition(predicate)) == expected
    assert np.flatnonzero(matches(predicate, ROWS)).tolist() == expected


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(predicate=texts.map(lambda text: parse(text, SCHEMA)))
def test_a_file_with_such_a_row_is_never_left_out(files: list[tuple[DataFile, pa.Table]], predicate: Predicate) -> None:
    for file, rows in files:
        if matches(predicate, rows).any():
            assert may_match(predicate, file, PLAIN, columns_read(predicate, rows.schema))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[DataFile, pa.Table]]:
    folder = str(tmp_path_factory.mktemp("files"))
    parts = [ROWS.sort_by(name).slice(at, 12) for name in ROWS.column_names for at in range(0, 120, 12)]
    return [(write_batches(folder, ROWS.schema, [part]), part) for part in parts]


def test_files_and_partitions_that_hold_none_of_the_rows_are_not_read(files: list[tuple[DataFile, pa.Table]]) -> None:
    predicate = parse("n between 1 and 10 or \"Note's\" = 'A' and n = 5", SCHEMA)
    read = columns_read(predicate, ROWS.schema)
    assert [file for file, rows in files if not may_match(predicate, file, PLAIN, read)]
    file = replace(files[0][0], stats=json.dumps({"numRecords": 1}), partition_values={"day": "2024-02-29"})
    days = pa.schema([ROWS.schema.field("day")])
    in_folders = Layout(partition_by=("day",))
    assert may_match(parse("day = date '2024-02-29'", SCHEMA), file, in_folders, days)
    assert not may_match(parse("day < '2024-02-29'", SCHEMA), file, in_folders, days)


def test_spark_finds_the_rows_that_the_lake_finds(spark: SparkSession) -> None:
    texts = [
        "big = -9223372036854775808 or big >= 1099511627776",
        "\"Note's\" in ('', '%s', 'it''s \\', 'Ünï€😀') and not yes = true",
        "word not in ('or') or day <= '1582-10-10'",
        "at > '2024-01-01 00:00:00.999998' and moment <= '2024-03-31 02:30:00+01'",
        "code >= 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11' and (small is null or n is not null)",
        "n < 99999999999 and yes <> false",
        "price >= 2.5 or wide < -0.5 or wide = 99999999999999999999999999999998.000001",
        "number in (7, -1) and price <> 0.1 and wide > -99999999999999999999999999999999.999999",
    ]
    predicates = [parse(text, SCHEMA) for text in texts]
    rows = spark.createDataFrame(ROWS).alias("t")
    found = rows.selectExpr(*(f"coalesce({spark_condition(p, 't')}, false)" for p in predicates)).toArrow()
    for text, predicate, column in zip(texts, predicates, found.columns, strict=True):
        assert column.to_pylist() == matches(predicate, ROWS).tolist(), text


def test_the_planner_knows_predicates_and_partitions_that_exclude_each_other(known: psycopg.Connection[Any]) -> None:
    def excluded(one: str, other: str) -> bool:
        return exclude_each_other(known, SCHEMA, parse(one, SCHEMA), parse(other, SCHEMA))

    assert excluded("n between 1 and 5", "n between 6 and 9")
    assert excluded("word = 'a'", "word in ('b', 'c')")
    assert excluded("n < 3 or n > 8", "n in (3, 4, 8)")
    assert not excluded("n between 1 and 5", "n between 5 and 9")
    assert not excluded("n = 1", "small = 2")
    known.execute("create table split (n int, word varchar(9)) partition by range (n)")
    known.execute("create table split_low partition of split for values from (0) to (10)")
    assert reach_of(known, Leaf(0, "public", "split_low", 0), parse("n >= 10", SCHEMA)).nothing
    assert not reach_of(known, Leaf(0, "public", "split_low", 0), parse("n >= 9", SCHEMA)).nothing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a column is wanted where 'its end' stands"),
        ("n = 1; drop table known", "it cannot be read from '; drop table known'"),
        ("n = 1 or", "a column is wanted"),
        ("n = 1 n = 2", "nothing may follow here: 'n'"),
        ("nothing = 1", "has no column nothing"),
        ("1 = n", "a column is wanted where '1' stands"),
        ("n = 1.5", "1.5 is no integer"),
        ("n = 1.", "it cannot be read from '1.'"),
        ("exact = 1.005", "1.005 is no numeric"),
        ("exact = '1'", "is no numeric"),
        ("exact < 1234567890123456789012345678901234567", "is no numeric"),
        ("vague = 1", "is of a type that is not compared alike"),
        ("n = '1'", "is no integer"),
        ("n = 9223372036854775808", "is no integer"),
        ("n = null", "null is no integer"),
        ("n not = 1", "a comparison, IN, BETWEEN or IS NULL is wanted"),
        ("word < 'a'", "collation"),
        ("word between 'a' and 'b'", "collation"),
        ("word like 'a%'", "a comparison, IN, BETWEEN or IS NULL is wanted where 'like' stands"),
        ("word = lower('A')", "lower is no text"),
        ("day = '2024-02-30'", "is no date"),
        ("day = '2024-02-29 12:00:00'", "is no date"),
        ("at < '2024-01-01 00:00:00+01'", "is no timestamp"),
        ("weight = 1", "is of a type that is not compared alike"),
        ("padded = 'a'", "is of a type that is not compared alike"),
        ("lenient = '2024-01-01'", "may hold another value in the lake"),
        ("(" * 200 + "n = 1" + ")" * 200, "deeper"),
        ("n = 1" + " or n = 1" * 5000, "longer"),
        ("word = 'a\0'", "no value of the source"),
    ],
)
def test_what_is_no_predicate_is_refused_with_the_reason(text: str, words: str) -> None:
    more = (
        Column("weight", 90, 701, -1, ValueType("float8", "double")),
        Column("exact", 93, 1700, 655366, ValueType("numeric", "decimal(10,2)", 10, 2)),
        Column("vague", 94, 1700, -1, ValueType("numeric", "string")),
        Column("padded", 91, 1042, 5, ValueType("text", "string")),
        Column("lenient", 92, 1082, -1, ValueType("date", "date"), on_bad_value="null"),
    )
    with pytest.raises(Refused) as refused:
        parse(text, replace(SCHEMA, columns=(*SCHEMA.columns, *more)))
    assert words in refused.value.message
    assert refused.value.code == "bad_predicate"
