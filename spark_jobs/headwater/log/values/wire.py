"""Big-endian fields and byte ranges of a buffer, gathered for many rows at once.

What every converter is made of: a block is one `uint8` buffer, a column is an array of `starts` and one of
`lengths` (-1: NULL) into it. Nothing here knows a type of PostgreSQL. Ranges are checked by whoever made them
(`decode` for values, `arrays` for elements); lengths of fixed types are checked here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Fields = npt.NDArray[Any]
"""One field of many rows."""


class MalformedMessage(ValueError):
    """Bytes that no server of the protocol writes. `position` is the byte of the buffer where it shows."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, position)
        self.message = message
        self.position = position

    def __str__(self) -> str:
        return f"{self.message} (at byte {self.position})"


def gather(buffer: Bytes, positions: Ints, dtype: str | np.dtype[Any]) -> Fields:
    """The fields of numpy type `dtype` that begin at `positions`, which are not negative; in the machine's byte order.

    An overlapping view with a stride of one byte makes every position an index; numpy's indexing does the
    unaligned reads. Four times faster than gathering the bytes one by one.
    """
    field = np.dtype(dtype)
    room = max(len(buffer) - field.itemsize + 1, 0)
    view: Fields = np.ndarray((room,), dtype=field, buffer=buffer, strides=(1,)) if room else np.empty(0, field)
    try:
        return view[positions].astype(field.newbyteorder("="), copy=False)
    except IndexError:
        outside = positions + field.itemsize > len(buffer)
        raise MalformedMessage("a field behind the end of the buffer", int(positions[np.argmax(outside)])) from None


def gather_bytes(buffer: Bytes, positions: Ints, width: int) -> Bytes:
    """A matrix with one row of `width` bytes for each of `positions`."""
    return gather(buffer, positions, f"V{width}").view(np.uint8).reshape(len(positions), width)


def present(starts: Ints, lengths: Ints, size: int, what: str) -> tuple[Ints, Mask | None]:
    """The starts of the values that are not NULL, and which rows these are (None: all of them).

    A value whose length is not `size` is malformed.
    """
    if len(lengths) == 0 or (lengths.min() == size and lengths.max() == size):
        return starts, None
    known = lengths >= 0
    wrong = known & (lengths != size)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise MalformedMessage(f"a value of type {what} has {lengths[row]} bytes instead of {size}", int(starts[row]))
    return starts[known], known


def spread(values: npt.NDArray[Any], known: Mask | None) -> npt.NDArray[Any]:
    """`values` of the `known` rows at their places among all rows, zero elsewhere."""
    if known is None:
        return values
    full: npt.NDArray[Any] = np.zeros((len(known), *values.shape[1:]), dtype=values.dtype)
    full[known] = values
    return full


def validity(known: Mask | None) -> Any:
    """Arrow's validity bitmap (None: everything is valid)."""
    if known is None or known.all():
        return None
    return pa.py_buffer(np.packbits(known, bitorder="little"))


def fixed(kind: Any, values: npt.NDArray[Any], known: Mask | None) -> pa.Array:
    """An Arrow array of a fixed-width type over the memory of `values`."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [validity(known), data])


def booleans(bits: Mask, known: Mask | None = None) -> pa.Array:
    """A boolean array (not by `pa.array`, whose first call on a numpy array imports pandas, for seconds)."""
    data = pa.py_buffer(np.packbits(bits, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(bits), [validity(known), data])


def integers(values: pa.Array) -> Ints:
    """Integers, none of them NULL, as numpy's (not by `to_numpy`, which imports pandas as well)."""
    width = values.type.bit_width // 8
    data = np.frombuffer(values.buffers()[1], f"i{width}", len(values), values.offset * width)
    return data.astype(np.int64)


def byte_strings(buffer: Bytes, starts: Ints, lengths: Ints) -> pa.Array:
    """The byte ranges as an Arrow binary array, NULL where the length is negative.

    The buffer itself is presented to Arrow as an array of values and the gaps between them, of which Arrow
    then takes every second: no byte is touched by numpy. That needs ranges in ascending order, as the rows
    of a block have; others are sorted first.
    """
    count = len(starts)
    known = lengths >= 0 if count and lengths.min() < 0 else None
    ends = starts + (lengths if known is None else np.maximum(lengths, 0))
    picks = np.arange(0, 2 * count, 2, dtype=np.int64)
    if count > 1 and (starts[1:] < ends[:-1]).any():
        order = np.lexsort((ends, starts))
        picks[order] = picks.copy()
        starts, ends = starts[order], ends[order]
        if (starts[1:] < ends[:-1]).any():  # a range read twice: no order makes them disjoint
            return _overlapping(buffer, starts, ends, picks >> 1, known)
    large = len(buffer) > np.iinfo(np.int32).max
    borders = np.empty(2 * count + 1, dtype=np.int64 if large else np.int32)
    borders[0:-1:2] = starts
    borders[1::2] = ends
    borders[-1] = ends[-1] if count else 0
    kind = pa.large_binary() if large else pa.binary()
    ranges = pa.Array.from_buffers(kind, 2 * count, [None, pa.py_buffer(borders), pa.py_buffer(buffer)])
    taken = ranges.take(fixed(pa.int64(), picks, None))
    return _nulls(taken.cast(pa.binary()) if large else taken, known)


def _overlapping(buffer: Bytes, starts: Ints, ends: Ints, places: Ints, known: Mask | None) -> pa.Array:
    pieces = [buffer[start:end].tobytes() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return _nulls(pa.array([pieces[place] for place in places.tolist()], pa.binary()), known)


def _nulls(values: pa.Array, known: Mask | None) -> pa.Array:
    if known is None:
        return values
    _, offsets, data = values.buffers()
    return pa.Array.from_buffers(values.type, len(values), [validity(known), offsets, data])


def is_ascii(values: pa.Array) -> bool:
    """Whether no byte of a fresh array of byte strings lies above 127."""
    data = values.buffers()[2]
    return data is None or int(np.frombuffer(data, dtype=np.uint8).max(initial=0)) < 128


def wide_texts(characters: Bytes, known: Mask | None) -> pa.Array:
    """A string array from a matrix of ASCII characters with a row for each of the `known` rows; all of them count."""
    rows, width = characters.shape
    count = rows if known is None else len(known)
    if rows * width > np.iinfo(np.int32).max:
        raise ValueError("more than 2 GiB of text in one column of one block")
    if known is None:
        offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    else:
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(known, out=offsets[1:])
        offsets *= width
    parts = [validity(known), pa.py_buffer(offsets), pa.py_buffer(characters)]
    return pa.Array.from_buffers(pa.string(), count, parts)


def shown_characters(characters: Bytes, shown: Mask | None, known: Mask | None) -> pa.Array:
    """A string array from a matrix with one row of ASCII characters for each row, of which those `shown` count."""
    count, width = characters.shape
    if known is not None:
        shown = (np.ones((count, width), np.bool_) if shown is None else shown) & known[:, None]
    offsets = np.zeros(count + 1, dtype=np.int64)
    if shown is None:
        offsets[:] = np.arange(count + 1, dtype=np.int64) * width
        data = np.ascontiguousarray(characters).reshape(-1)
    else:
        np.cumsum(shown.sum(axis=1), out=offsets[1:])
        data = characters[shown]
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("more than 2 GiB of text in one column of one block")
    parts = [validity(known), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), count, parts)
