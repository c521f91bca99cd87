"""Ranges and multiranges, from the wire to PostgreSQL's own text.

The wire of a range (range_send): a byte of flags, then for each bound that is there int32 length and its subtype's
bytes. Of a multirange (multirange_send): int32 count, then for each range int32 length and its bytes. The bounds of a
whole column are converted together, by the subtype's own converter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from headwater.log.values.wire import Bytes, Ints, MalformedMessage, Mask
from headwater.schema import ValueType

Converter = Callable[[ValueType, Bytes, Ints, Ints], tuple[pa.Array, Mask | None]]

_EMPTY, _LOWER_INCLUDED, _UPPER_INCLUDED, _NO_LOWER, _NO_UPPER = 0x01, 0x02, 0x04, 0x08, 0x10
_KNOWN: Final = _EMPTY | _LOWER_INCLUDED | _UPPER_INCLUDED | _NO_LOWER | _NO_UPPER
_QUOTED: Final = frozenset('"\\()[], \t\n\r\v\f')

_Range = tuple[int, int, int]
"""Flags, and the numbers of the bounds among all bounds of the column (-1: none)."""


class _Bounds:
    """Where the bounds of all values stand."""

    def __init__(self, buffer: Bytes) -> None:
        self._view = buffer.data
        self.starts: list[int] = []
        self.lengths: list[int] = []

    def range(self, at: int, end: int) -> _Range:
        if at >= end:
            raise MalformedMessage("a range without flags", at)
        flags = self._view[at]
        if flags & ~_KNOWN:
            raise MalformedMessage("a range with unknown flags", at)
        after = at + 1
        numbers = [-1, -1]
        for place, absent in enumerate((_NO_LOWER, _NO_UPPER)):
            if not flags & (absent | _EMPTY):
                numbers[place] = len(self.starts)
                start, length = self.sized(after, end)
                self.starts.append(start)
                self.lengths.append(length)
                after = start + length
        if after != end:
            raise MalformedMessage("a range that does not end with its bytes", at)
        return flags, numbers[0], numbers[1]

    def ranges(self, at: int, end: int) -> list[_Range]:
        """Those of a multirange."""
        count, after = self.number(at, end), at + 4
        if not 0 <= count <= (end - after) // 5:
            raise MalformedMessage("a multirange that claims more ranges than it has", at)
        found = []
        for _ in range(count):
            start, length = self.sized(after, end)
            found.append(self.range(start, start + length))
            after = start + length
        if after != end:
            raise MalformedMessage("a multirange that does not end with its bytes", at)
        return found

    def sized(self, at: int, end: int) -> tuple[int, int]:
        """Start and length of what stands behind an int32 length."""
        length = self.number(at, end)
        if not 0 <= length <= end - at - 4:
            raise MalformedMessage("a range that ends within a bound", at)
        return at + 4, length

    def number(self, at: int, end: int) -> int:
        if at + 4 > end:
            raise MalformedMessage("a range that ends within a number", at)
        return int.from_bytes(self._view[at : at + 4], "big", signed=True)


def texts(
    subtype: ValueType, buffer: Bytes, starts: Ints, lengths: Ints, convert: Converter, *, several: bool
) -> tuple[pa.Array, Mask | None]:
    """range_out of every value, or, with `several`, multirange_out. `subtype`: as a string."""
    bounds = _Bounds(buffer)
    found: list[list[_Range] | None] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length < 0:
            found.append(None)
        elif several:
            found.append(bounds.ranges(start, start + length))
        else:
            found.append([bounds.range(start, start + length)])
    ints = (np.array(numbers, dtype=np.int64) for numbers in (bounds.starts, bounds.lengths))
    values, _ = convert(subtype, buffer, *ints)
    quoted = [_quoted(text) for text in values.to_pylist()]
    shown = (None if ranges is None else ",".join(_shown(ranges, quoted)) for ranges in found)
    result = [text if text is None or not several else f"{{{text}}}" for text in shown]
    return pa.array(result, pa.string()), None


def _shown(ranges: list[_Range], bounds: list[str]) -> Iterator[str]:
    for flags, lower, upper in ranges:
        if flags & _EMPTY:
            yield "empty"
            continue
        low, high = (bounds[number] if number >= 0 else "" for number in (lower, upper))
        yield f"{'[' if flags & _LOWER_INCLUDED else '('}{low},{high}{']' if flags & _UPPER_INCLUDED else ')'}"


def _quoted(text: str) -> str:
    """range_bound_escape: quotes and backslashes are doubled."""
    if text and _QUOTED.isdisjoint(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '""')
    return f'"{escaped}"'
