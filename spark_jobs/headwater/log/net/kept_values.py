"""Where the values come from that the log left out: from earlier in the batch, also under another key, else from the
row that was stored before.

A row's stay under a key is a stretch of that key's events: puts, and at most one removal, its end. An update to another
key ends a stay there and begins one here, whose `parent` is the other. Everything is numpy over whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headwater.log.net.decoded import DecodedChanges
from headwater.log.net.events import Events

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_Whole = TypeVar("_Whole", np.int32, np.int64)


@dataclass(frozen=True, slots=True)
class Lenders:
    """For each wanted row: `rows`: per column which new row of the batch has the value, -1: none has. `origin`: the
    code of the key under which the row was stored that has the others. `move`: the number of the change by which the
    row came from a key of another part, whose history is told there; -1: it did not."""

    rows: dict[str, Int64]
    origin: Int64
    move: Int64


class Stays:
    """The stays of a batch's rows. `kept`: numbers of the changes that are a delete in one part and an insert in
    another, ascending."""

    def __init__(self, decoded: DecodedChanges, events: Events, kept: Int64) -> None:
        by = np.argsort(events.code, kind="stable")
        code, self._row, order = events.code[by], events.row[by], events.order[by]
        self._position = np.empty(len(by), dtype=np.int64)
        self._position[by] = np.arange(len(by))
        put = self._row >= 0
        came_from = events.came_from[by]
        from_part = put & np.isin(order // 2, kept, kind="sort") if len(kept) else np.zeros(len(by), dtype=np.bool_)
        begins = (came_from >= 0) | from_part
        if len(by):
            begins[0] = True
        begins[1:] |= (code[1:] != code[:-1]) | ~put[:-1]
        self._begin = np.flatnonzero(begins)
        self._end = np.concatenate([self._begin[1:], [len(by)]])[: len(self._begin)] - 1
        self._stay = np.cumsum(begins) - 1
        self._unchanged = decoded.unchanged
        self._origin = np.where(came_from[self._begin] >= 0, came_from[self._begin], code[self._begin])
        self._move = np.where(from_part[self._begin], order[self._begin] // 2, -1)
        self._parent = np.arange(len(self._begin))
        moved = np.flatnonzero(came_from[self._begin] >= 0)
        # The removal under the old key, which is of the same change.
        removal = self._position[np.searchsorted(events.order, order[self._begin[moved]] - 1)]
        before = self._stay[removal]
        known = self._begin[before] < removal
        self._parent[moved[known]] = before[known]

    def lenders(self, wanted: Int64, names: Iterable[str]) -> Lenders:
        """Of the rows that the events `wanted` put, or had put before the removals that these are."""
        at = self._position[wanted]
        root = followed(self._parent)[self._stay[at]]
        rows = {name: self._lending(name, at) for name in names}
        return Lenders(rows, self._origin[root], self._move[root])

    def _lending(self, name: str, at: Int64) -> Int64:
        has = self._row >= 0
        if name in self._unchanged:
            has[has] = ~self._unchanged[name][self._row[has]]
        newest = np.maximum.accumulate(np.where(has, np.arange(len(has)), -1))
        of_stay = np.where(newest[self._end] >= self._begin, newest[self._end], -1)
        stay = self._stay[at]
        own = np.where(newest[at] >= self._begin[stay], newest[at], -1)
        # What an ended stay did not have is its parent's to give.
        giving = followed(np.where(of_stay >= 0, np.arange(len(of_stay)), self._parent))
        parent = self._parent[stay]
        above = np.where(parent != stay, of_stay[giving[parent]], -1)
        found = np.where(own >= 0, own, above)
        return np.where(found >= 0, self._row[found], -1)


def followed(parent: npt.NDArray[_Whole]) -> npt.NDArray[_Whole]:
    """Where each one comes to that goes from parent to parent, up to one that is its own."""
    while True:
        further = parent[parent]
        if np.array_equal(further, parent):
            return parent
        parent = further
