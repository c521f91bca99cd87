"""Comparing source and lake by Spark, where one of them is large: digests of all rows, the keys behind digests that
differ, then single keys again.

At the first look each side is read once. A row becomes its key and a digest of 128 bits, kept on the executors' disks
where it was read. What shares a hash of the key is a cell, and only sums over cells are shuffled, whatever order the
rows came in; keys are put together and compared in cells that differ alone. At a later look a row is compared by the
SHA-256 of its canonical text, in which each column's text is exact (floats by their shortest form that reads back, so
-0 is not 0; NULL is not the empty string). Both sides pass through the lake's types, by the load's own decoders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import Column as ColumnOfSpark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast, expr, lit
from pyspark.sql.types import LongType

from headwater.delta.tables import quoted, struct_type
from headwater.load.rows_by_key import ORIGIN
from headwater.schema import PARTITION_COLUMN, TableSchema
from headwater.spark.session import suit
from headwater.verify.candidates import INDEX, SHOWN_CHARACTERS, Candidates, is_multiset, shown_columns
from headwater.verify.settle import LakeRow, SourceRow, State
from headwater.verify.sides import Sides

_CELLS = 1 << 16
"""Of them the driver gets a row each. A key that differs brings the other keys of its cell into the second step."""

_BALANCE = [
    "sum(s) as n",
    # In halves: a sum of whole ones overflows. Not an exclusive or: two equal rows would cancel out.
    "sum(s * (a & 4294967295)) as al", "sum(s * shiftrightunsigned(a, 32)) as ah",
    "sum(s * (b & 4294967295)) as bl", "sum(s * shiftrightunsigned(b, 32)) as bh",
]  # fmt: skip
"""Source less lake, of a cell or of a key: 0 each when both hold the same rows. The row's digest is `a` and `b`; `s` is
1 at the source and -1 in the lake. Rows that differ agree in both by chance once in 2^128 times."""
_DIFFERS = "n <> 0 OR al <> 0 OR ah <> 0 OR bl <> 0 OR bh <> 0"
_KEYED = [
    "sum(s) as ns", "max(if(s = 1, d, null)) as sd", "max(o) as so",
    "sum(1 - s) as nt", "min(if(s = 0, d, null)) as low", "max(if(s = 0, d, null)) as high", "min(f) as file",
]  # fmt: skip


@contextlib.contextmanager
def _said_by_spark() -> Iterator[None]:
    """What tasks fail with while their rows come over as Arrow is a Java error; as everywhere else it is Spark's."""
    try:
        yield
    except Py4JJavaError as error:
        raise PySparkException(str(error)) from error


class SparkComparison:
    """Source against lake for one table. PySparkException for what tasks fail with."""

    def __init__(self, spark: SparkSession, schema: TableSchema) -> None:
        self._spark = spark
        self._schema = schema
        self.multiset = is_multiset(schema)
        self._shown = shown_columns(schema)
        names = [column.name for column in schema.columns] + ([PARTITION_COLUMN] if schema.partitioned else [])
        values = ", ".join(f"isnull({quoted(name)}), {self._exact(name)}" for name in names)
        self._digest = (f"xxhash64(1, {values})", f"xxhash64(2, {values})")
        if self.multiset:
            keys, whole = [f"concat_ws(':', {', '.join(self._digest)})"], "''"
        else:
            texts = ", ".join(f"'{index}', {self._text(name, quoted(name))}" for index, name in enumerate(names))
            keys = [quoted(name) for name in schema.key]
            whole = f"sha2(to_json(named_struct({texts}), map('ignoreNullFields', 'false')), 256)"
        self._whole = whole
        self._key = {f"k{index}": key for index, key in enumerate(keys)}
        self._keys = list(self._key)

    @_said_by_spark()
    def first_look(self, sides: Sides, limit: int) -> tuple[int, Candidates]:
        return self.compare(sides.source_by(self._spark), sides.lake_by(self._spark), limit)

    @_said_by_spark()
    def look_again(self, sides: Sides, candidates: Candidates, numbers: Sequence[int]) -> dict[int, State]:
        lake = sides.lake_by(self._spark)
        if self.multiset:
            return self._states(sides.source_by(self._spark), lake, self._numbered(candidates, numbers))
        states: dict[int, State] = {}
        kind = struct_type(self._schema).add(ORIGIN, LongType())
        for part, rows in sides.under(candidates, numbers):
            states |= self._states(self._spark.createDataFrame(rows, kind), lake, self._numbered(candidates, part))
        return states

    @_said_by_spark()
    def source_rows(self, sides: Sides, candidates: Candidates, numbers: Sequence[int]) -> pa.Table:
        source = sides.source_by(self._spark)
        columns = ", ".join(quoted(name) for name in source.columns)
        key = self._numbered(candidates, numbers).selectExpr(INDEX, *(f"{name} as _hw_{name}" for name in self._keys))
        on = " AND ".join(f"{one} <=> _hw_{name}" for name, one in self._key.items())
        found = source.join(broadcast(key), expr(on)).groupBy(INDEX)
        return found.agg(expr(f"first(struct({columns})) as _hw_row")).select("_hw_row.*", INDEX).toArrow()

    def compare(self, source: DataFrame, lake: DataFrame, limit: int) -> tuple[int, Candidates]:
        """How many rows the source has, and the keys that differ, `limit` of them with their values."""
        suit(self._spark, lake)
        both = self._kept(self._brief(source, 1).unionAll(self._brief(lake, -1)))
        cell = f"cast(pmod(xxhash64({', '.join(self._keys)}), {_CELLS}) as int)"
        try:
            cells = both.groupBy(expr(cell).alias("cell")).agg(*map(expr, ["count_if(s = 1) as rows", *_BALANCE]))
            found = cells.selectExpr("rows", f"if({_DIFFERS}, cell, null) as cell").toArrow()
            numbers = found["cell"].drop_null()
            some = self._spark.createDataFrame(pa.table({"cell": numbers}), "cell int")
            few = both.join(broadcast(some), expr(f"{cell} = cell"), "left_semi") if len(numbers) else both.limit(0)
            return pc.sum(found["rows"]).as_py() or 0, self._differing(few, limit)
        finally:
            both.unpersist()

    def _brief(self, rows: DataFrame, side: int) -> DataFrame:
        """Key and digest of each row; where the row is the key what is shown of it, too."""
        digest = [f"{part} as {name}" for part, name in zip(self._digest, "ab", strict=True)]
        keys = [f"{key} as {name}" for name, key in self._key.items()]
        if not self.multiset:
            return rows.selectExpr(*keys, *digest, f"{side} as s")
        shown = [f"left({self._text(n, quoted(n))}, {SHOWN_CHARACTERS}) as x{i}" for i, n in enumerate(self._shown)]
        return rows.selectExpr(*keys, *digest, f"{side} as s", *shown)

    def _kept(self, rows: DataFrame) -> DataFrame:
        """`rows`, on disk once they have been read, as they are: to look for what can be compressed in digests takes
        longer than to write them."""
        setting = "spark.sql.inMemoryColumnarStorage.compressed"
        before = str(self._spark.conf.get(setting))
        self._spark.conf.set(setting, "false")
        try:
            return rows.persist(StorageLevel.DISK_ONLY)
        finally:
            self._spark.conf.set(setting, before)

    def _differing(self, rows: DataFrame, limit: int) -> Candidates:
        """The keys that differ among these rows, the first `limit` of them with their texts."""
        if self.multiset:
            shown = texts = [f"x{index}" for index in range(len(self._shown))]
        else:
            shown = []
            texts = [f"{self._text(name, f'k{index}')} as x{index}" for index, name in enumerate(self._shown)]
        balance = [*_BALANCE, *(f"first({name}) as {name}" for name in shown)]
        differing = rows.groupBy(*self._keys).agg(*map(expr, balance)).where(_DIFFERS)
        kept = differing.selectExpr(*self._keys, "n", *texts).persist(StorageLevel.DISK_ONLY)
        counts = ["count(*)", "sum(greatest(n, 0))", "sum(greatest(-n, 0))", "count_if(n = 0)"]
        try:
            total, *kinds = (number or 0 for number in kept.selectExpr(*counts).collect()[0])
            some = kept.orderBy(*self._keys).limit(limit).toArrow()
            return Candidates(some, self._shown, max(0, total - limit), *kinds)
        finally:
            kept.unpersist()

    def _states(self, source: DataFrame, lake: DataFrame, chosen: DataFrame) -> dict[int, State]:
        """The state of the keys `chosen` (see `_numbered`)."""
        # Which file holds a row tells a row that stayed from one that was removed and put back.
        # Not by its name: a column of the table may have that.
        file = lit("") if self.multiset else lake.metadataColumn("_metadata").getField("file_path")
        origin = "0L" if self.multiset else ORIGIN
        both = self._of(chosen, source, 1, origin, lit(None)).unionAll(self._of(chosen, lake, 0, "0L", file))
        grouped = both.groupBy(INDEX).agg(*map(expr, _KEYED))
        return {row[INDEX]: self._state(row) for row in grouped.collect()}

    def _of(self, chosen: DataFrame, rows: DataFrame, side: int, origin: str, file: ColumnOfSpark) -> DataFrame:
        """The rows of one side that are of the keys `chosen`: only of these the whole text is made."""
        keys = chosen.selectExpr(INDEX, *(f"{name} as _hw_{name}" for name in self._keys))
        on = " AND ".join(f"{key} <=> _hw_{name}" for name, key in self._key.items())
        with_place = rows.select("*", expr(origin).alias("_hw_o"), file.cast("string").alias("_hw_f"))
        found = with_place.join(broadcast(keys), expr(on))
        return found.selectExpr(INDEX, f"{self._whole} as d", f"{side} as s", "_hw_o as o", "_hw_f as f")

    def _numbered(self, candidates: Candidates, numbers: Sequence[int]) -> DataFrame:
        """The keys `numbers` of `candidates` with their number."""
        table = candidates.typed(numbers).append_column(INDEX, pa.array(numbers, pa.int64()))
        if self.multiset:
            kind = "k0 string, " + f"{INDEX} bigint"
            return self._spark.createDataFrame(table, schema=kind)
        types = struct_type(self._schema)
        kind_of = {f"k{i}": types[name].dataType.simpleString() for i, name in enumerate(self._schema.key)}
        kind = ", ".join([*(f"{name} {kind_of[name]}" for name in self._keys), f"{INDEX} bigint"])
        return self._spark.createDataFrame(table, schema=kind)

    def _state(self, row: Mapping[str, Any] | Any) -> State:
        source = SourceRow(row["ns"], row["sd"] or "", row["so"])
        return State(source, LakeRow(row["nt"], row["low"] or "", row["high"] or "", row["file"] or ""))

    def _kind(self, name: str) -> str:
        return "bigint" if name == PARTITION_COLUMN else self._schema.column(name).value.lake

    def _exact(self, name: str) -> str:
        """What of column `name`, if it is not NULL, is hashed: of equal values the same, and of no others."""
        kind, value = self._kind(name), quoted(name)
        if kind.startswith("array<"):
            return self._text(name, value)  # by itself its NULLs are passed over
        if kind in ("float", "double"):
            return f"try_cast({value} as {kind}), if({value} = 0, cast({value} as string), null)"  # -0 as 0 by itself
        return f"try_cast({value} as {kind})"  # to one type on both sides

    def _text(self, name: str, value: str) -> str:
        """An exact text of `value`, an expression of the type of column `name`."""
        kind = self._kind(name)
        if kind == "binary":
            return f"concat(char(92), 'x', hex({value}))"  # a backslash, whatever the session takes it for in a literal
        if kind.startswith("array<"):
            return f"to_json(cast({value} as array<string>))"
        return f"cast({value} as string)"
