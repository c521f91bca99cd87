"""Arrays, from the wire (array_send) to Arrow lists or to PostgreSQL's own text.

The wire: int32 dimensions, int32 "has NULLs", uint32 element type, then int32 size and int32 lower bound of each
dimension, then the elements, each int32 length (-1: NULL) and bytes. A list of the lake can hold one dimension
that begins at 1; another shape is a bad value there and exists only as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.log.values.wire import Bytes, Ints, MalformedMessage, Mask, booleans, fixed, gather
from headwater.schema import ValueType

Converter = Callable[[ValueType, Bytes, Ints, Ints], tuple[pa.Array, Mask | None]]

_MAX_DIMENSIONS = 6
_MAX_ELEMENTS = 1 << 28
_FEW_ROWS = 8
_SPACE = frozenset(" \t\n\r\v\f")
_SPECIAL = frozenset('"\\{},') | _SPACE


def lists(
    element: ValueType, kind: Any, buffer: Bytes, starts: Ints, lengths: Ints, convert: Converter
) -> tuple[pa.Array, Mask | None]:
    """A list array; values of another shape, or with an element that is bad, are NULL and marked."""
    known = lengths >= 0
    dimensions = _dimensions(buffer, starts, lengths, known)
    bad = dimensions > 1
    one = np.flatnonzero(dimensions == 1)
    _need(starts, lengths, 20, one)
    counts = np.zeros(len(starts), dtype=np.int64)
    counts[one] = gather(buffer, starts[one] + 12, ">i4")
    bad[one] |= gather(buffer, starts[one] + 16, ">i4") != 1
    counts[bad] = 0
    wrong = (counts < 0) | (counts > np.maximum(lengths, 0) // 4)
    if wrong.any():
        raise MalformedMessage("an array that claims more elements than it has", int(starts[np.argmax(wrong)]))
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    places, sizes = _elements(buffer, starts + 20, starts + lengths, counts, offsets)
    values, bad_elements = convert(element, buffer, places, sizes)
    if bad_elements is not None:
        bad[np.repeat(np.arange(len(starts)), counts)[bad_elements]] = True
    missing = ~known | bad
    mask = booleans(missing) if missing.any() else None
    borders = fixed(pa.int32(), offsets.astype(np.int32), None)
    return pa.ListArray.from_arrays(borders, values, type=kind, mask=mask), bad if bad.any() else None


def _dimensions(buffer: Bytes, starts: Ints, lengths: Ints, known: Mask) -> Ints:
    """Number of dimensions of each value, -1 for NULL."""
    there = np.flatnonzero(known)
    _need(starts, lengths, 12, there)
    dimensions = np.full(len(starts), -1, dtype=np.int64)
    dimensions[there] = gather(buffer, starts[there], ">i4")
    wrong = known & ((dimensions < 0) | (dimensions > _MAX_DIMENSIONS))
    if wrong.any():
        raise MalformedMessage("an array of an impossible number of dimensions", int(starts[np.argmax(wrong)]))
    return dimensions


def _need(starts: Ints, lengths: Ints, size: int, rows: Ints) -> None:
    short = lengths[rows] < size
    if short.any():
        raise MalformedMessage("an array shorter than its header", int(starts[rows[np.argmax(short)]]))


def _elements(buffer: Bytes, begins: Ints, ends: Ints, counts: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Where the bytes of every element begin and how many they are (-1: NULL), row after row.

    Arrays of the same length are walked side by side; the few that are longer than the rest one by one, so that
    one array of a million elements does not cost a million steps of numpy.
    """
    places = np.zeros(int(offsets[-1]), dtype=np.int64)
    sizes = np.full(len(places), -1, dtype=np.int64)
    cursor = begins.copy()
    rows = np.flatnonzero(counts > 0)
    index = 0
    while len(rows) > _FEW_ROWS:
        at = cursor[rows]
        _inside(at, 4, ends[rows])
        length = gather(buffer, at, ">i4").astype(np.int64)
        _inside(at + 4, np.maximum(length, 0), ends[rows])
        if (length < -1).any():
            raise MalformedMessage("an element of negative length", int(at[np.argmax(length < -1)]))
        places[offsets[rows] + index], sizes[offsets[rows] + index] = at + 4, length
        cursor[rows] = at + 4 + np.maximum(length, 0)
        index += 1
        rows = rows[counts[rows] > index]
    for row in rows.tolist():
        _walk(buffer, int(cursor[row]), int(ends[row]), places, sizes, int(offsets[row]) + index, int(offsets[row + 1]))
    return places, sizes


def _inside(at: Ints, size: Ints | int, ends: Ints) -> None:
    over = at + size > ends
    if over.any():
        raise MalformedMessage("an array that ends within an element", int(at[np.argmax(over)]))


def _walk(buffer: Bytes, at: int, end: int, places: Ints, sizes: Ints, first: int, last: int) -> None:
    view = buffer.data
    for index in range(first, last):
        if at + 4 > end:
            raise MalformedMessage("an array that ends within an element", at)
        length = int.from_bytes(view[at : at + 4], "big", signed=True)
        if length < -1 or at + 4 + max(length, 0) > end:
            raise MalformedMessage("an array that ends within an element", at)
        places[index], sizes[index] = at + 4, length
        at += 4 + max(length, 0)


def texts(
    element: ValueType, buffer: Bytes, starts: Ints, lengths: Ints, convert: Converter
) -> tuple[pa.Array, Mask | None]:
    """array_out of every value, whatever its shape. `element` is the element's type as a string."""
    known = lengths >= 0
    dimensions = _dimensions(buffer, starts, lengths, known)
    shapes: list[list[tuple[int, int]]] = []
    counts = np.zeros(len(starts), dtype=np.int64)
    begins = starts + 12 + 8 * np.maximum(dimensions, 0)
    _need(begins, starts + lengths - begins, 0, np.flatnonzero(known))
    for row, count in enumerate(dimensions.tolist()):
        shape = []
        if count > 0:
            fields = gather(buffer, starts[row] + 12 + 4 * np.arange(2 * count), ">i4").tolist()
            shape = list(zip(fields[::2], fields[1::2], strict=True))
            counts[row] = _size(shape, int(lengths[row]), int(starts[row]))
        shapes.append(shape)
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    places, sizes = _elements(buffer, begins, starts + lengths, counts, offsets)
    strings, bad_elements = convert(element, buffer, places, sizes)
    quoted = iter([_quoted(text) for text in strings.to_pylist()])
    result = [
        _text(shape, quoted) if count >= 0 else None for shape, count in zip(shapes, dimensions.tolist(), strict=True)
    ]
    if bad_elements is None:
        return pa.array(result, pa.string()), None
    bad = np.zeros(len(starts), dtype=np.bool_)
    bad[np.repeat(np.arange(len(starts)), counts)[bad_elements]] = True
    return pa.array(result, pa.string(), mask=bad | ~known), bad


def _size(shape: list[tuple[int, int]], length: int, position: int) -> int:
    size = 1
    for count, _ in shape:
        if not 0 < count <= _MAX_ELEMENTS:
            raise MalformedMessage("an array with an impossible dimension", position)
        size *= count
    if size > length // 4:
        raise MalformedMessage("an array that claims more elements than it has", position)
    return size


def _quoted(text: str | None) -> str:
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and _SPECIAL.isdisjoint(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(shape: list[tuple[int, int]], quoted: Iterator[str]) -> str:
    if not shape:
        return "{}"
    bounds = "".join(f"[{lower}:{lower + count - 1}]" for count, lower in shape)
    prefix = f"{bounds}=" if any(lower != 1 for _, lower in shape) else ""
    return prefix + _braces([count for count, _ in shape], quoted)


def _braces(counts: list[int], quoted: Iterator[str]) -> str:
    if len(counts) == 1:
        return "{" + ",".join(next(quoted) for _ in range(counts[0])) + "}"
    return "{" + ",".join(_braces(counts[1:], quoted) for _ in range(counts[0])) + "}"
