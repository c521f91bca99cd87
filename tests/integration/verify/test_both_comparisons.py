"""Small tables are compared in the process and large ones by Spark: both find the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest

from headwater.arrow_types import lake_schema
from headwater.delta.tables import struct_type
from headwater.schema import Column, TableSchema, ValueType
from headwater.verify.by_spark import SparkComparison
from headwater.verify.candidates import Candidates
from headwater.verify.in_memory import MemoryComparison

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

VALUES: Final[dict[str, Sequence[Any]]] = {
    "boolean": [True, False],
    "smallint": [-32768, 0, 7],
    "bigint": [-(2**63), 2**63 - 1, 0, 5],
    "double": [0.0, -0.0, float("nan"), float("inf"), 1e-300, 0.1, 12345678901234567890.0],
    "float": [0.0, -0.0, 0.5, 3.25],
    "decimal(12,2)": [Decimal("0.00"), Decimal("-1.50"), Decimal("1234567890.12")],
    "string": ["", "a", "a b", "Ünï\n", 'q"\\'],
    "binary": [b"", b"\x00\xff", b"abc"],
    "date": [date(1, 1, 1), date(2024, 2, 29), date(9999, 12, 31)],
    "timestamp": [datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), datetime(2024, 1, 1, 12, 30, 0, 500000, UTC)],
    "timestamp_ntz": [datetime(1, 1, 1), datetime(2024, 1, 1, 0, 0, 0, 1)],
    "array<int>": [[], [1, None], [None], [1, 2]],
    "array<string>": [[], ["a", None, 'q"'], ["", "b"]],
    "array<double>": [[0.0], [-0.0], [float("nan"), None]],
}
FLOATING: Final = ("double", "float", "array<double>")
"""Their texts are exact either way, and written in two forms."""


def schema_of(kinds: dict[str, str], key: tuple[str, ...]) -> TableSchema:
    def value(kind: str) -> ValueType:
        if kind.startswith("array<"):
            return ValueType("array", kind, element=value(kind[6:-1]))
        return ValueType("", kind)

    columns = tuple(Column(name, i + 1, 0, -1, value(kind)) for i, (name, kind) in enumerate(kinds.items()))
    return TableSchema(1, "public", "compared", columns, key)


def found_by_both(
    spark: SparkSession, schema: TableSchema, source: list[dict[str, Any]], lake: list[dict[str, Any]], limit: int
) -> tuple[Candidates, Candidates]:
    kind = lake_schema(schema)
    there, here = pa.Table.from_pylist(source, schema=kind), pa.Table.from_pylist(lake, schema=kind)
    frames = [spark.createDataFrame(rows, schema=struct_type(schema)) for rows in (there, here)]
    rows, by_spark = SparkComparison(spark, schema).compare(frames[0], frames[1], limit)
    assert rows == len(source)
    return MemoryComparison(schema).compare(there, here, limit), by_spark


def _as_key(value: Any) -> str:
    """-0 and 0 are one key, for which either stands."""
    return repr(value + 0.0 if isinstance(value, float) else value)


def shown(candidates: Candidates, *, texts: bool) -> list[tuple[Any, ...]]:
    columns = [n for n in candidates.keys.column_names if n == "n" or n[0] == "x" or not texts]
    return [tuple(map(repr, row.values())) for row in candidates.keys.select(columns).to_pylist()]


@pytest.mark.parametrize("kind", VALUES)
def test_keys_of_every_type_that_differ_are_found_alike(spark: SparkSession, kind: str) -> None:
    schema = schema_of({"k": kind, "v": "string"}, ("k",))
    values = [*VALUES[kind], None]
    source = [{"k": value, "v": "same"} for value in values[:-1]]
    lake = [{"k": value, "v": "other" if number % 2 else "same"} for number, value in enumerate(values)]
    lake += lake[-2:]  # a key that is there twice, and so is NULL
    in_memory, by_spark = found_by_both(spark, schema, source, lake, 100)
    kinds = [(found.missing, found.extra, found.different, found.more) for found in (in_memory, by_spark)]
    assert kinds[0] == kinds[1]
    assert in_memory.keys.num_rows
    columns = ["n"] if kind in FLOATING else [*by_spark.keys.column_names]
    both = [sorted(map(repr, found.keys.select(columns).to_pylist())) for found in (in_memory, by_spark)]
    assert both[0] == both[1]
    if not kind.startswith("array<"):  # which Arrow puts in no order
        order = [[_as_key(k) for k in found.keys["k0"].to_pylist()] for found in (in_memory, by_spark)]
        assert order[0] == order[1]


@pytest.mark.parametrize("keyed", [True, False], ids=["by key", "as a multiset"])
def test_random_rows_that_differ_are_found_alike(spark: SparkSession, keyed: bool) -> None:
    kinds = {f"c{number}": kind for number, kind in enumerate(VALUES) if kind not in FLOATING}
    schema = schema_of({"id": "bigint", **kinds}, ("id", "c1") if keyed else ())

    def row() -> dict[str, Any]:
        some = {name: random.choice([*VALUES[kind], None]) for name, kind in kinds.items()}
        return {"id": random.randrange(40), **some}

    source = [row() for _ in range(60)]
    lake = [dict(one) for one in source if random.random() < 0.9] + [row() for _ in range(4)]
    lake += [{**one, "c6": "changed"} for one in random.sample(lake, 5)] + random.sample(lake, 3)
    random.shuffle(lake)
    for limit in (1000, 3):
        in_memory, by_spark = found_by_both(spark, schema, source, lake, limit)
        kinds_of = [(found.missing, found.extra, found.different, found.more) for found in (in_memory, by_spark)]
        assert kinds_of[0] == kinds_of[1]
        if keyed:  # rows without a key are told apart by digests, which are others
            assert in_memory.keys.to_pylist() == by_spark.keys.to_pylist()
        elif limit == 1000:
            assert sorted(shown(in_memory, texts=True)) == sorted(shown(by_spark, texts=True))
