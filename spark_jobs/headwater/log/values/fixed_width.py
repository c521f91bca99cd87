"""Neighbouring columns that are as wide in every row of a block, taken out of it all at once.

A number, a date or a uuid is as wide in every row, and so is a column that is NULL in all of them. Such a run is
copied out of the buffer row below row; each of its columns is then a field with a stride, whose kinds and lengths are
compared with what they must be. Walking from column to column costs several times that, in the processor's cache as in
the number of numpy's steps, which are what a block of few rows costs.

What is as wide in every row is guessed from three rows, and checked in all: a guess that fails costs time, no more.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np

from headwater.log.values.binary import wide_form
from headwater.log.values.wire import Bytes, Fields, Ints, gather
from headwater.schema import Column

_NULL, _TEXT, _BINARY = (ord(kind) for kind in "ntb")
_NULL_LENGTH: Final = -1
_OTHER: Final = -2
_MOST_BYTES: Final = 256
"""Of a row: wider runs leave the processor's cache, and a failed guess costs more."""
_LENGTH = struct.Struct("!i")

Form = np.dtype[Any] | None
"""What a column of a run is: values that numpy reads so, or nothing but NULL."""


class Runs:
    """The runs of one block. `kinds`: whether a kind byte stands before each value, as in TupleData; not so in COPY."""

    def __init__(self, buffer: Bytes, at: Ints, columns: Sequence[Column | None], *, kinds: bool) -> None:
        """`at`: where the first column begins in each row, of which there is at least one."""
        self._buffer = buffer
        self._kinds = kinds
        samples = [
            _sizes(buffer.data, int(at[row]), len(columns), kinds=kinds) for row in {0, len(at) // 2, len(at) - 1}
        ]
        self._steady = [_steady(column, sizes) for column, *sizes in zip(columns, *samples, strict=True)]

    def take(self, at: Ints, place: int) -> tuple[list[Fields | None], int]:
        """Of the run that begins with column number `place`, at `at`: its columns' values, and its bytes in a row.

        None for a column that is NULL in every row. No columns when `place` is in no run, or was guessed wrong.
        """
        forms = self._forms_from(place)
        if not forms:
            return [], 0
        layout = _layout(tuple(forms), self._kinds)
        if int(at.max()) + layout.width > len(self._buffer):
            return [], 0
        rows = gather(self._buffer, at, f"V{layout.width}").view(layout.fields)
        for number, expected in enumerate(layout.expected):
            if any(np.count_nonzero(rows[name] == value) != len(rows) for name, value in expected):
                self._steady[place + number] = False
                forms = forms[:number]
                break
        values = [None if form is None else rows[f"value {number}"] for number, form in enumerate(forms)]
        return values, layout.begins[len(forms)]

    def _forms_from(self, place: int) -> list[Form]:
        forms: list[Form] = []
        room = _MOST_BYTES
        for form in self._steady[place:]:
            if form is False or room <= 0:
                break
            forms.append(form)
            room -= 5 + (form.itemsize if form is not None else 0)
        return forms


def _sizes(data: memoryview, at: int, count: int, *, kinds: bool) -> list[int]:
    """The lengths of one row's values. What is malformed is for others to find: it is in no run."""
    sizes: list[int] = []
    kind = _BINARY
    try:
        while len(sizes) < count:
            if kinds:
                kind, at = data[at], at + 1
            if kind in (_BINARY, _TEXT):
                (length,) = _LENGTH.unpack_from(data, at)
                at += 4 + max(length, 0)
                sizes.append(length if kind == _BINARY and (length >= 0 or not kinds) else _OTHER)
            else:
                sizes.append(_NULL_LENGTH if kind == _NULL else _OTHER)
    except (IndexError, struct.error):
        pass
    return sizes + [_OTHER] * (count - len(sizes))


def _steady(column: Column | None, sizes: Sequence[int]) -> Form | Literal[False]:
    """What the column is in a run; False if it is in none."""
    size = sizes[0]
    if sizes.count(size) != len(sizes):
        return False
    if size == _NULL_LENGTH:
        return None
    form = wide_form(column.value) if column is not None else None
    return form if form is not None and form.itemsize == size else False


@dataclass(frozen=True, slots=True)
class _Layout:
    """A row of a run. `expected`: per column the fields that are the same in every row, and what they are.

    `begins`: where each column begins, and where the run ends.
    """

    fields: np.dtype[Any]
    expected: tuple[tuple[tuple[str, int], ...], ...]
    begins: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.begins[-1]


@lru_cache(maxsize=1024)
def _layout(forms: tuple[Form, ...], kinds: bool) -> _Layout:
    names, formats, offsets = [], [], []
    expected, begins = [], [0]

    def add(name: str, form: Any, size: int) -> str:
        names.append(name)
        formats.append(form)
        offsets.append(begins[-1])
        begins[-1] += size
        return name

    for number, form in enumerate(forms):
        begins.append(begins[-1])
        same = []
        if kinds:
            same.append((add(f"kind {number}", "u1", 1), _NULL if form is None else _BINARY))
        if form is not None or not kinds:
            length = _LENGTH.pack(_NULL_LENGTH if form is None else form.itemsize)
            same.append((add(f"length {number}", "=u4", 4), int.from_bytes(length, sys.byteorder)))
        if form is not None:
            add(f"value {number}", form, form.itemsize)
        expected.append(tuple(same))
    layout = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": begins[-1]})
    return _Layout(layout, tuple(expected), tuple(begins))
