"""Parquet files of a table, written and read without an engine: new rows with their statistics, rows by number.

Statistics are the Parquet writer's own, and only those whose order every reader shares: none for floats (NaN has no
place in Parquet's order and the last in Spark's), long texts cut to bounds that still hold. A wrong bound would hide
rows silently; a missing one costs a look into the file. Source: Delta protocol, "Per-file Statistics"; of Parquet's own
the format's `ColumnOrder`: its writers leave NaN out of bounds, and readers skip row groups by these.
"""

from __future__ import annotations

import contextlib
import json
import os.path
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater import store_options
from headwater.delta import storage
from headwater.delta.delta_log import DataFile, now_milliseconds
from headwater.delta.layout import PLAIN, Layout
from headwater.delta.partition_values import escaped

Int64 = npt.NDArray[np.int64]

_ROW_GROUP = 128 * 1024
_PART_BYTES = 64 << 20
_READ_BYTES = 16 << 20
"""Of values that are looked for row by row: each is copied some times on its way."""
_INDEXED_COLUMNS = 32
_TEXT_BOUND = 32
_LAST_CHARACTER = "\U0010ffff"
_WRITTEN_AS: Final = {"org.apache.spark.version": "4.2.0"}
"""In the footer: without it a reader takes dates of before 1582 for those of the old calendar, if its session says so
(`datetimeRebaseModeInRead`). By Spark's version, which files of Spark's carry, they are as they are."""
NO_VALUES: Mapping[str, str | None] = MappingProxyType({})


class NewFile:
    """A data file being written; it belongs to nothing until a commit adds it. Either `finish` or `discard` it."""

    def __init__(
        self,
        folder: str,
        schema: pa.Schema,
        layout: Layout = PLAIN,
        values: Mapping[str, str | None] = NO_VALUES,
        below: str = "",
        run: str = "",
    ) -> None:
        """`schema`: the rows' columns; `values`: of the partition columns, by their names in files, the same for all
        rows; `below`: the partition's folder, ending in "/"; `run`: that it is of, where the table is clustered."""
        self._stored = layout.stored(schema)
        self._names = [name for name in schema.names if name not in layout.partition_by]
        self._values = dict(values)
        self._below = below
        self._name = f"{f'run-{run}' if run else 'part'}-{uuid.uuid4()}.snappy.parquet"
        self._path = os.path.join(folder, self._below, self._name)
        if below:
            storage.make_folder(os.path.dirname(self._path))
        self._written: list[Any] = []
        self._float_nulls = {field.name: 0 for field in self._stored if pa.types.is_floating(field.type)}
        # Decimals as integers, as Spark writes them, and its compression.
        self._writer = storage.parquet_writer(
            self._path,
            self._stored.with_metadata(_WRITTEN_AS),
            compression="snappy",
            store_decimal_as_integer=True,
            write_page_checksum=True,  # by which `recovery` knows what a disk has lost of it; Spark writes it, too
            write_statistics=[name for name in self._stored.names if name not in self._float_nulls],
            metadata_collector=self._written,
        )

    def write(self, rows: pa.Table) -> None:
        stored = pa.table(rows.select(self._names).columns, schema=self._stored)
        for name in self._float_nulls:
            self._float_nulls[name] += stored[name].null_count
        self._writer.write_table(stored, row_group_size=_at_a_time(rows.num_rows, rows.nbytes, _PART_BYTES))

    def finish(self) -> DataFile:
        self._writer.close()
        (metadata,) = self._written
        found = _statistics(metadata, self._stored, self._float_nulls)
        stats = {"numRecords": metadata.num_rows, **found, "tightBounds": True}
        text = json.dumps(stats, separators=(",", ":"), ensure_ascii=False)
        name = escaped(self._below) + self._name
        size = self._writer.size()
        return DataFile(name, size, now_milliseconds(), text, self._values, None, metadata.num_rows)

    def discard(self) -> None:
        """Without an error: behind one that its caller is to hear. What cannot be removed now is swept with all that
        nobody names."""
        self._writer.abort()
        with store_options.impatient(), contextlib.suppress(OSError):
            storage.delete(self._path)


def write_batches(
    folder: str,
    schema: pa.Schema,
    batches: Iterable[pa.Table],
    layout: Layout = PLAIN,
    beside: DataFile | None = None,
    run: str = "",
) -> DataFile:
    """Write rows as one new data file. They may come in parts: not more than a part and a row group are held.

    `beside`: a file of the partition that all rows are of; `run`: as of `NewFile`.
    """
    values = beside.partition_values if beside is not None else NO_VALUES
    below = beside.path[: beside.path.rfind("/") + 1] if values and beside is not None else ""
    file = NewFile(folder, schema, layout, values, below, run)
    try:
        for batch in gathered(batches):
            file.write(batch)
        return file.finish()
    except BaseException:
        file.discard()
        raise


def column_batches(folder: str, file: DataFile, schema: pa.Schema, layout: Layout = PLAIN) -> Iterator[pa.Table]:
    """The columns of `schema` of all rows, in order and in parts."""
    names = layout.stored(schema).names
    with _open(folder, file) as parquet:
        if not names:
            yield layout.complete(pa.table({}), file, schema, parquet.metadata.num_rows)
            return
        for batch in parquet.iter_batches(_ROW_GROUP, columns=names):
            yield layout.complete(pa.Table.from_batches([batch]), file, schema, batch.num_rows)


def live_batches(
    folder: str, file: DataFile, deleted: BitMap, schema: pa.Schema, layout: Layout = PLAIN
) -> Iterator[pa.Table]:
    """The rows of the file that are not `deleted`, in order and in parts."""
    first = 0
    for part in column_batches(folder, file, schema, layout):
        rows = alive_rows(first, part.num_rows, deleted)
        yield part if len(rows) == part.num_rows else part.take(pa.array(rows - first))
        first += part.num_rows


def alive_rows(first: int, count: int, deleted: BitMap) -> Int64:
    """The numbers of the rows that are not `deleted` among `count` from `first` on."""
    rows = np.arange(first, first + count, dtype=np.int64)
    if not deleted.range_cardinality(first, first + count):
        return rows
    gone = np.array(deleted & BitMap(range(first, first + count)), dtype=np.int64)
    kept = np.ones(count, dtype=np.bool_)
    kept[gone - first] = False
    return rows[kept]


def read_columns(folder: str, file: DataFile, schema: pa.Schema, layout: Layout = PLAIN) -> pa.Table:
    """The columns of `schema`, all rows of the file in order; those that are gone included."""
    parquet = _open(folder, file)
    stored = parquet.read(columns=layout.stored(schema).names)
    return layout.complete(stored, file, schema, parquet.metadata.num_rows)


def read_rows(
    folder: str, file: DataFile, numbers: Int64, schema: pa.Schema, layout: Layout = PLAIN
) -> Iterator[tuple[Int64, pa.Table]]:
    """The columns of `schema` of the rows `numbers`, in parts: which of `numbers`, and their rows.

    Large values are what such columns hold: not more than `_READ_BYTES` of them are read at a time.
    """
    parquet = _open(folder, file)
    sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    first = np.concatenate([[0], np.cumsum(sizes)])
    group_of = np.searchsorted(first, numbers, side="right") - 1
    names = layout.stored(schema).names
    for group in np.unique(group_of):
        here = np.flatnonzero(group_of == group)
        if not names:
            yield here, layout.complete(pa.table({}), file, schema, len(here))
            continue
        at = int(first[group])
        step = _at_a_time(sizes[group], _bytes_of(parquet.metadata.row_group(int(group)), names), _READ_BYTES)
        for batch in parquet.iter_batches(step, row_groups=[int(group)], columns=names):
            some = here[(numbers[here] >= at) & (numbers[here] < at + batch.num_rows)]
            if len(some):
                rows = pa.Table.from_batches([batch]).take(pa.array(numbers[some] - at))
                yield some, layout.complete(rows, file, schema, len(some))
            at += batch.num_rows


def _at_a_time(rows: int, size: int, most: int) -> int:
    """How many rows, of so many that have so many bytes, have `most` bytes."""
    return max(1, min(_ROW_GROUP, rows * most // max(size, 1)))


def _bytes_of(group: Any, names: Sequence[str]) -> int:
    """Uncompressed, of some columns of a row group."""
    columns = [group.column(index) for index in range(group.num_columns)]
    paths = tuple(f"{name}." for name in names)  # a list's column has a longer one
    return sum(int(one.total_uncompressed_size) for one in columns if f"{one.path_in_schema}.".startswith(paths))


def count_rows(folder: str, file: DataFile) -> DataFile:
    """The same file with the number of its rows, from the file itself where its statistics do not tell."""
    rows = int(_open(folder, file).metadata.num_rows)
    stats = {**json.loads(file.stats or "{}"), "numRecords": rows}
    return replace(file, rows=rows, stats=json.dumps(stats, separators=(",", ":"), ensure_ascii=False))


def gathered(batches: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Many small parts as few larger ones: each that is written becomes a row group."""
    parts: list[pa.Table] = []
    rows = size = 0
    for batch in batches:
        parts.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _ROW_GROUP or size >= _PART_BYTES:
            yield pa.concat_tables(parts)
            parts, rows, size = [], 0, 0
    if parts:
        yield pa.concat_tables(parts)


def _open(folder: str, file: DataFile) -> Any:
    """Spark's own sessions write times as INT96 unless told otherwise: nanoseconds would not hold the year 9999."""
    return storage.parquet_file(file.in_folder(folder), coerce_int96_timestamp_unit="us")


@dataclass(slots=True)
class _Bounds:
    low: Any
    high: Any
    nulls: int


def _statistics(metadata: Any, schema: pa.Schema, nulls: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """`nulls`: of the columns of which the Parquet writer has counted none."""
    bounds: dict[str, _Bounds | None] = {}
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name = column.path_in_schema
            if name in schema.names[:_INDEXED_COLUMNS]:  # a list's column has a longer path
                bounds[name] = _joined(bounds.get(name), column, first=name not in bounds)
    counted = {name: nulls[name] for name in schema.names[:_INDEXED_COLUMNS] if name in nulls}
    stats: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": counted}
    for name, found in bounds.items():
        if found is None:
            continue
        stats["nullCount"][name] = found.nulls
        if found.low is None:
            continue
        low, high = _lower(found.low), _upper(found.high)
        if low is not None and high is not None:
            stats["minValues"][name], stats["maxValues"][name] = low, high
    return stats


def _joined(known: _Bounds | None, column: Any, *, first: bool) -> _Bounds | None:
    """Bounds over one more row group; None as soon as one of them has none."""
    found = column.statistics if column.is_stats_set else None
    if found is None or not found.has_null_count or (known is None and not first):
        return None
    if not found.has_min_max and found.num_values:
        return None
    here = (
        _Bounds(found.min, found.max, found.null_count) if found.has_min_max else _Bounds(None, None, found.null_count)
    )
    if known is None or known.low is None:
        return _Bounds(here.low, here.high, here.nulls + (known.nulls if known else 0))
    if here.low is None:
        return _Bounds(known.low, known.high, known.nulls + here.nulls)
    return _Bounds(min(known.low, here.low), max(known.high, here.high), known.nulls + here.nulls)


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_TEXT_BOUND]
    if isinstance(value, datetime):
        return _time_text(value - timedelta(microseconds=value.microsecond % 1000))
    return _exact(value)


def _upper(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) <= _TEXT_BOUND:
            return value
        # Nothing that begins like this is greater, but for one more of the last character itself.
        return None if value[_TEXT_BOUND] == _LAST_CHARACTER else value[:_TEXT_BOUND] + _LAST_CHARACTER
    if isinstance(value, datetime):
        rest = value.microsecond % 1000
        try:
            return _time_text(value + timedelta(microseconds=(1000 - rest) if rest else 0))
        except OverflowError:
            return None
    return _exact(value)


def _exact(value: Any) -> Any:
    """Values whose JSON is themselves; None for all others: floats, decimals, booleans, bytes."""
    if isinstance(value, date):
        return value.isoformat()
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time_text(value: datetime) -> str:
    """To the millisecond, which is what readers of Delta's statistics expect of a time."""
    text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return f"{text}Z" if value.tzinfo is not None else text
