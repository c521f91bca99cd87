"""Framed tuples to Arrow, column by column over all rows of a block.

Two framings of the same values (the server's send functions write both, so load and log are equal by
construction):

- TupleData of pgoutput with `binary 'true'` (PostgreSQL documentation, "Logical Replication Message Formats"):
  int16 count of columns, then for each a kind byte: `n` NULL (in an old tuple: absent), `u` unchanged TOAST,
  `t` text or `b` binary, the last two with int32 length and bytes. A connection without `binary` sends `t` only.
- a row of `COPY ... (FORMAT binary)`: int16 count of fields, then for each int32 length (-1: NULL) and bytes.

Columns are walked in order, all rows at once: a column begins where the one before it ended. Those that are as wide
in every row are taken together (`headwater.log.values.fixed_width`). Every position is checked against the buffer
before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.arrow_types import arrow_type
from headwater.log.values.binary import TEXT_WIRES, Converted, convert, convert_wide
from headwater.log.values.fixed_width import Runs
from headwater.log.values.text import convert_text
from headwater.log.values.wire import Bytes, Fields, Ints, MalformedMessage, Mask, gather
from headwater.schema import SERVER_TEXT, Column, TableSchema, ValueType

__all__ = [
    "DecodedTuples",
    "MalformedMessage",
    "decode_copy_rows",
    "decode_tuples",
    "frame_copy",
    "mark_lost_in_partitions",
    "older_value",
    "older_values",
    "unchanged_of",
    "with_values_of",
]

_NULL, _UNCHANGED, _TEXT, _BINARY = (ord(kind) for kind in "nutb")
_Converter = Callable[[ValueType, Bytes, Ints, Ints], Converted]
_COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_OneColumn = Callable[["DecodedTuples", Column | None, Bytes, Ints], Ints]


@dataclass(frozen=True, slots=True)
class DecodedTuples:
    """The rows of one block.

    `columns`: an Arrow array for each column that was asked for. `unchanged`: only columns with an unchanged
    TOAST value anywhere, and in which rows; the value there is NULL. `bad`: column name and row of each value
    that the lake cannot hold and whose column says "suspend"; NULL in the array. `ends`: where each tuple ends.
    """

    rows: int
    columns: dict[str, Any]
    unchanged: dict[str, Mask]
    bad: list[tuple[str, int]]
    ends: Ints


def decode_tuples(buffer: Bytes, starts: Ints, columns: Sequence[Column | None]) -> DecodedTuples:
    """The TupleData that begin at `starts`. `columns` in the message's order; None is stepped over."""
    return _decoded(buffer, starts, columns, _tuple_column, kinds=True)


def decode_copy_rows(buffer: Bytes, starts: Ints, columns: Sequence[Column | None]) -> DecodedTuples:
    """The rows of a binary COPY that begin at `starts`; neither header nor trailer may be among them."""
    return _decoded(buffer, starts, columns, _copy_column, kinds=False)


def _decoded(
    buffer: Bytes, starts: Ints, columns: Sequence[Column | None], one: _OneColumn, *, kinds: bool
) -> DecodedTuples:
    """Run by run, and `one` column after the other where there is none."""
    if not len(starts):
        empty = {c.name: pa.nulls(0, arrow_type(c.value)) for c in columns if c is not None}
        return DecodedTuples(0, empty, {}, [], np.zeros(0, dtype=np.int64))
    decoded = _begin(buffer, starts, len(columns))
    runs = Runs(buffer, decoded.ends, columns, kinds=kinds)
    at = decoded.ends
    place = 0
    while place < len(columns):
        fields, width = runs.take(at, place)
        for column, values in zip(columns[place:], fields, strict=False):
            if column is not None:
                _take_run(decoded, column, values)
        at = at + width if fields else one(decoded, columns[place], buffer, at)
        place += len(fields) or 1
    decoded.ends[:] = at
    return decoded


def _tuple_column(decoded: DecodedTuples, column: Column | None, buffer: Bytes, at: Ints) -> Ints:
    """Decode one column of TupleData at `at`; returns where the next one begins."""
    found = tuple_fields(buffer, at)
    if column is not None:
        converter = found.converter(column)
        if not found.binary.all():
            unchanged = found.kinds == _UNCHANGED
            if unchanged.any():
                decoded.unchanged[column.name] = unchanged
        _put(decoded, column, *converter(column.value, buffer, found.starts, found.lengths))
    return found.ends


@dataclass(frozen=True, slots=True)
class TupleFields:
    """One column of TupleData: its kind bytes, where they stand, which are of binary values; where values begin, their
    lengths (-1: there is none), where the next column begins."""

    kinds: Bytes
    at: Ints
    binary: Mask
    starts: Ints
    lengths: Ints
    ends: Ints

    def converter(self, column: Column) -> _Converter:
        """By what the message says: the server writes text over a connection that asked for it, and for a type without
        a send function. A connection does not change its mind within a block."""
        wire, kinds, at = column.value.wire, self.kinds, self.at
        if wire == SERVER_TEXT and self.binary.any():
            where = int(at[np.argmax(self.binary)])
            raise MalformedMessage(f"column {column.name} came in a binary form that is not known here", where)
        if wire in TEXT_WIRES or self.binary.all():
            return convert  # the bytes of a text are the same in both forms
        text = kinds == _TEXT
        if not text.any():
            return convert
        if self.binary.any():
            where = int(at[np.argmax(text)])
            what = f"column {column.name} ({wire}) came as text in one row, as binary in another"
            raise MalformedMessage(what, where)
        return convert_text


def tuple_fields(buffer: Bytes, at: Ints) -> TupleFields:
    """The column of TupleData that begins at `at`."""
    kinds = gather(buffer, at, "u1")
    binary = kinds == _BINARY
    sized = binary if binary.all() else binary | (kinds == _TEXT)
    if not sized.all():
        _known_kinds(kinds, sized, at)
    return TupleFields(kinds, at, binary, *_sized(buffer, at + 1, sized))


def unchanged_of(buffer: Bytes, starts: Ints, columns: int) -> Mask:
    """A row for each of the TupleData that begin at `starts`: which of their columns are unchanged TOAST values."""
    at = starts + 2
    found = np.zeros((len(starts), columns), dtype=np.bool_)
    for place in range(columns):
        fields = tuple_fields(buffer, at)
        found[:, place] = fields.kinds == _UNCHANGED
        at = fields.ends
    return found


def with_values_of(buffer: Bytes, old: int, new: int, places: Sequence[int]) -> bytes:
    """The TupleData at `new`, with the values of the one at `old` in those of the columns `places` that are unchanged
    TOAST values."""
    before, values = _columns_of(buffer, old), _columns_of(buffer, new)
    for place in places:
        if values[place][0] == _UNCHANGED:
            values[place] = before[place]
    return buffer[new : new + 2].tobytes() + b"".join(values)


def _columns_of(buffer: Bytes, start: int) -> list[bytes]:
    """Kind byte and value of each column."""
    count = int.from_bytes(buffer[start : start + 2].tobytes(), "big")
    at, found = start + 2, []
    for _ in range(count):
        size = int.from_bytes(buffer[at + 1 : at + 5].tobytes(), "big") + 5 if buffer[at] in (_TEXT, _BINARY) else 1
        found.append(buffer[at : at + size].tobytes())
        at += size
    return found


def _copy_column(decoded: DecodedTuples, column: Column | None, buffer: Bytes, at: Ints) -> Ints:
    values, lengths, ends = _sized(buffer, at, np.ones(len(at), dtype=np.bool_), null_allowed=True)
    if column is not None:
        _put(decoded, column, *convert(column.value, buffer, values, lengths))
    return ends


def older_values(column: Column, count: int) -> pa.Array:
    """What `count` rows have in `column` that were written before it was added."""
    if not column.missing:
        return pa.nulls(count, arrow_type(column.value))
    value, _ = older_value(column)
    return value.take(pa.array(np.zeros(count, dtype=np.int64)))


def older_value(column: Column) -> tuple[pa.Array, bool]:
    """The one value that `column.missing` is, in an array, and whether the lake's type can hold it."""
    row = np.frombuffer(bytes.fromhex(column.missing), dtype=np.uint8)
    # As it was when it was added.
    then = column.narrower[0] if column.narrower else column
    decoded = decode_copy_rows(row, np.zeros(1, dtype=np.int64), [then])
    return decoded.columns[then.name].cast(arrow_type(column.value)), not decoded.bad


def mark_lost_in_partitions(schema: TableSchema, decoded: DecodedTuples) -> None:
    """An empty text in a partition column is a bad value: Delta stores it as NULL (Delta protocol, "Partition Value
    Serialization")."""
    for name in schema.partition_by:
        values = decoded.columns[name]
        if not pa.types.is_string(values.type):
            continue
        empty = pc.fill_null(pc.equal(values, ""), False)
        rows = np.flatnonzero(empty.to_numpy(zero_copy_only=False))
        if len(rows):
            decoded.columns[name] = pc.if_else(empty, pa.scalar(None, values.type), values)
            if schema.column(name).on_bad_value != "null":
                decoded.bad.extend((name, row) for row in rows.tolist())


def frame_copy(messages: Iterable[bytes | bytearray | memoryview]) -> tuple[Bytes, Ints]:
    """A buffer and the starts of its rows from CopyData messages, of which the server sends one a row.

    The header comes with the first row (or, of an empty table, with the trailer) and the trailer alone; both
    are left out, so any run of a stream's messages may be framed on its own.
    """
    parts: list[bytes] = []
    starts: list[int] = []
    size = 0
    for message in messages:
        row = bytes(message)
        if row.startswith(_COPY_SIGNATURE):
            extension = int.from_bytes(row[15:19], "big")
            row = row[19 + extension :]
        if not row or row == b"\xff\xff":
            continue
        parts.append(row)
        starts.append(size)
        size += len(row)
    return np.frombuffer(b"".join(parts), dtype=np.uint8), np.array(starts, dtype=np.int64)


def _begin(buffer: Bytes, starts: Ints, count: int) -> DecodedTuples:
    """Checks the column count of each tuple; `ends` is where its first column begins."""
    at = np.array(starts, dtype=np.int64)
    if at.min() < 0:
        raise MalformedMessage("a tuple that begins before the buffer", int(at.min()))
    counts = gather(buffer, at, ">i2")
    wrong = counts != count
    if wrong.any():
        row = int(np.argmax(wrong))
        raise MalformedMessage(f"a tuple of {counts[row]} columns where {count} are expected", int(at[row]))
    return DecodedTuples(len(at), {}, {}, [], at + 2)


def _sized(buffer: Bytes, at: Ints, sized: Mask, null_allowed: bool = False) -> tuple[Ints, Ints, Ints]:
    """Starts, lengths and ends of the values whose int32 length stands at `at`, for the rows that are `sized`."""
    if sized.all():
        values, lengths = at + 4, gather(buffer, at, ">i4").astype(np.int64)
    else:
        rows = np.flatnonzero(sized)
        lengths = np.full(len(at), -1, dtype=np.int64)
        lengths[rows] = gather(buffer, at[rows], ">i4")
        values = at + 4 * sized
    shortest = lengths.min()
    if shortest < 0:
        wrong = sized & (lengths < (-1 if null_allowed else 0))
        if wrong.any():
            raise MalformedMessage("a value of negative length", int(at[np.argmax(wrong)]))
    ends = values + (lengths if shortest >= 0 else np.maximum(lengths, 0))
    if ends.max() > len(buffer):
        row = int(np.argmax(ends > len(buffer)))
        raise MalformedMessage("a value that goes on behind the end of the buffer", int(at[row]))
    return values, lengths, ends


def _known_kinds(kinds: Bytes, sized: Mask, at: Ints) -> None:
    unknown = ~sized & (kinds != _NULL) & (kinds != _UNCHANGED)
    if unknown.any():
        row = int(np.argmax(unknown))
        raise MalformedMessage(f"a column of unknown kind {bytes([kinds[row]])!r}", int(at[row]))


def _take_run(decoded: DecodedTuples, column: Column, fields: Fields | None) -> None:
    """The values of a column in a run; None: NULL everywhere."""
    if fields is None:
        decoded.columns[column.name] = pa.nulls(decoded.rows, arrow_type(column.value))
    else:
        _put(decoded, column, *convert_wide(column.value, fields, None))


def _put(decoded: DecodedTuples, column: Column, array: pa.Array, bad: Mask | None) -> None:
    decoded.columns[column.name] = array
    if bad is not None and column.on_bad_value != "null":
        decoded.bad.extend((column.name, row) for row in np.flatnonzero(bad).tolist())
