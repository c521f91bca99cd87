"""Comparing source and lake in Spark: every row of a table, then single keys again.

A row is compared by the SHA-256 of its canonical text, in which each column's text is exact (floats by their
shortest form that reads back, so -0 is not 0; NULL is not the empty string). Both sides pass through the lake's
types, by the load's own decoders. Only keys and digests are shuffled, whatever the rows weigh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import broadcast, count, expr, lit
from pyspark.sql.types import LongType

from headwater.jobs.differences import LakeRow, SourceRow, State
from headwater.jobs.key_reader import ORIGIN
from headwater.lake.tables import quoted, struct_type
from headwater.schema import PARTITION_COLUMN, TableSchema

_SHOWN_COLUMNS = 12
_SHOWN_CHARACTERS = 60
_INDEX = "_hw_i"

_KEYED = [
    "sum(s) as ns", "max(if(s = 1, d, null)) as sd", "max(o) as so",
    "sum(1 - s) as nt", "min(if(s = 0, d, null)) as low", "max(if(s = 0, d, null)) as high", "min(f) as file",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidates:
    """Keys that differ at a first look. `keys`: one row each: `k…` the key as typed in the lake, `x…` its text.

    `names`: what the text columns show. `more`: how many further keys differ that are not among them.
    """

    keys: pa.Table
    names: tuple[str, ...]
    more: int = 0

    def shown(self, number: int) -> dict[str, Any]:
        """Key `number` for people and programs: numbers and booleans as they are, everything else as text."""
        row = self.keys.slice(number, 1).to_pylist()[0]
        found = {}
        for index, name in enumerate(self.names):
            typed = row.get(f"k{index}") if len(self.key_columns) == len(self.names) else None
            found[name] = typed if isinstance(typed, bool | int) else row[f"x{index}"]
        return found

    @property
    def key_columns(self) -> list[str]:
        return [name for name in self.keys.column_names if name.startswith("k")]

    def texts(self, numbers: Iterable[int]) -> list[tuple[str | None, ...]]:
        columns = [self.keys[f"x{index}"] for index in range(len(self.names))]
        return [tuple(column[number].as_py() for column in columns) for number in numbers]


class Comparison:
    """Source against lake for one table. Without a key, or insert-only, both sides are multisets of rows."""

    def __init__(self, spark: SparkSession, schema: TableSchema) -> None:
        self._spark = spark
        self._schema = schema
        self.multiset = schema.insert_only or not schema.key
        shown = schema.key or tuple(column.name for column in schema.columns)[:_SHOWN_COLUMNS]
        self._shown = tuple(shown)
        names = [column.name for column in schema.columns] + ([PARTITION_COLUMN] if schema.partitioned else [])
        texts = ", ".join(f"'{index}', {self._text(name)}" for index, name in enumerate(names))
        digest = f"sha2(to_json(named_struct({texts}), map('ignoreNullFields', 'false')), 256)"
        keys = [f"{digest} as k0"] if self.multiset else [f"{quoted(k)} as k{i}" for i, k in enumerate(schema.key)]
        self._row = [*keys, f"{digest} as d"]
        self._keys = [f"k{index}" for index in range(len(keys))]

    def first_look(self, source: DataFrame, lake: DataFrame, limit: int) -> tuple[int, Candidates]:
        """How many rows the source has, and the keys that differ, `limit` of them with their values."""
        texts = [f"left({self._text(name)}, {_SHOWN_CHARACTERS}) as x{i}" for i, name in enumerate(self._shown)]
        if not self.multiset:
            texts = [f"{self._text(name)} as x{i}" for i, name in enumerate(self._shown)]
        rows = Observation()
        both = (
            source.observe(rows, count(lit(1)).alias("rows"))
            .selectExpr(*self._row, *texts, "1 as s", "0L as o", "'' as f")
            .unionAll(lake.selectExpr(*self._row, *texts, "0 as s", "0L as o", "'' as f"))
        )
        names = [f"x{index}" for index in range(len(self._shown))]
        shown = [f"first({name}) as {name}" for name in names]
        differing = both.groupBy(*self._keys).agg(*map(expr, [*_KEYED, *shown])).where(f"NOT ({self._agrees})")
        kept = differing.select(*self._keys, *names).persist(StorageLevel.DISK_ONLY)
        try:
            total = kept.count()
            keys = kept.limit(limit).toArrow()
            return int(rows.get["rows"]), Candidates(keys, self._shown, max(0, total - limit))
        finally:
            kept.unpersist()

    def look_again(self, source: DataFrame, lake: DataFrame, chosen: DataFrame) -> dict[int, State]:
        """The state of the keys `chosen` (see `numbered`); those on neither side are left out."""
        # Which file holds a row tells a row that stayed from one that was removed and put back.
        origin, file = ("0L", "''") if self.multiset else (ORIGIN, "_metadata.file_path")
        both = source.selectExpr(*self._row, "1 as s", f"{origin} as o", "'' as f").unionAll(
            lake.selectExpr(*self._row, "0 as s", "0L as o", f"{file} as f")
        )
        on = " AND ".join(f"both.{name} <=> chosen.{name}" for name in self._keys)
        found = both.alias("both").join(broadcast(chosen.alias("chosen")), expr(on))
        columns = ["d", "s", "o", "if(s = 1, null, f) as f"]
        grouped = found.selectExpr(_INDEX, *columns).groupBy(_INDEX).agg(*map(expr, _KEYED))
        return {row[_INDEX]: self._state(row) for row in grouped.collect()}

    def numbered(self, candidates: Candidates, numbers: Sequence[int]) -> DataFrame:
        """The keys `numbers` of `candidates` with their number."""
        table = candidates.keys.select(self._keys).take(pa.array(numbers, pa.int64()))
        table = table.append_column(_INDEX, pa.array(numbers, pa.int64()))
        if self.multiset:
            kind = "k0 string, " + f"{_INDEX} bigint"
            return self._spark.createDataFrame(table, schema=kind)
        types = struct_type(self._schema)
        kind_of = {f"k{i}": types[name].dataType.simpleString() for i, name in enumerate(self._schema.key)}
        kind = ", ".join([*(f"{name} {kind_of[name]}" for name in self._keys), f"{_INDEX} bigint"])
        return self._spark.createDataFrame(table, schema=kind)

    def frame(self, batches: Sequence[pa.RecordBatch]) -> DataFrame:
        """Rows of a KeyReader as a DataFrame."""
        kind = struct_type(self._schema).add(ORIGIN, LongType())
        if not batches:
            return self._spark.createDataFrame([], schema=kind)
        return self._spark.createDataFrame(pa.Table.from_batches(batches), schema=kind)

    @property
    def _agrees(self) -> str:
        return "ns = nt" if self.multiset else "ns = 1 AND nt = 1 AND sd = low"

    def _state(self, row: Mapping[str, Any] | Any) -> State:
        source = SourceRow(row["ns"], row["sd"] or "", row["so"])
        return State(source, LakeRow(row["nt"], row["low"] or "", row["high"] or "", row["file"] or ""))

    def _text(self, name: str) -> str:
        """An exact text of column `name`."""
        kind = "bigint" if name == PARTITION_COLUMN else self._schema.column(name).value.lake
        if kind == "binary":
            return f"concat('\\\\x', hex({quoted(name)}))"
        if kind.startswith("array<"):
            return f"to_json(cast({quoted(name)} as array<string>))"
        return f"cast({quoted(name)} as string)"
