"""Unchanged TOAST values, as far as the log goes: where the large values come from that updates have left alone, and
that were therefore not sent.

The newest row of the batch that has it lends it, also under another key (`Stays`), also out of another hash part
(`MovedValues`): `filled`. What no row of the batch has is the stored row's: `NetChanges.unchanged` says so, column by
column, and `NetChanges.origins` under which key that row is stored; `headwater.apply.unchanged_values` fills these in
when the table's commit is made. A row that comes into view without its values cannot be helped (`refuse_lost`).

Of a key that is left out the server sends the old one in the same change: it is read from there, by
`headwater.log.net.decoded`, and by `headwater.log.net.hash_parts` for an update that becomes two changes.

A row's stay under a key is a stretch of that key's events: puts, and at most one removal, its end. An update to another
key ends a stay there and begins one here, whose `parent` is the other. Everything is numpy over whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.errors import Diverged
from headwater.log.blocks import INSERT
from headwater.log.net.decoded import DecodedChanges
from headwater.log.net.events import Events, keys_of
from headwater.log.net.on_disk import on_disk
from headwater.log.spill import SpillStore
from headwater.log.values.wire import fixed
from headwater.names import TableName
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]  # half the memory
Bool = npt.NDArray[np.bool_]
_Whole = TypeVar("_Whole", np.int32, np.int64)

_NONE: Final[Int64] = np.zeros(0, dtype=np.int64)


def refuse_lost(schema: TableSchema, decoded: DecodedChanges, moved: MovedValues | None) -> None:
    """Diverged for inserted rows that lack values: a row filter lets a row into view by an INSERT without those that
    its UPDATE left alone. They may have changed out of view: neither the batch nor a stored row can be trusted to have
    them."""
    inserts = decoded.operation == INSERT
    if moved is not None:
        inserts &= ~np.isin(decoded.sequence, moved.numbers, kind="sort")
    inserted = decoded.new[inserts]
    lacking = np.zeros(len(inserted), dtype=np.bool_)
    for mask in decoded.unchanged.values():
        lacking |= mask[inserted]
    if lacking.any():
        raise Diverged(
            f"{int(lacking.sum())} rows that came into view keep values that the log does not carry",
            where=str(TableName(schema.schema, schema.name)),
            remedy=f"headwater load PIPELINE.yaml --table {TableName(schema.schema, schema.name)} --again",
        )


def filled(
    schema: TableSchema,
    decoded: DecodedChanges,
    events: Events,
    puts: Int64,
    rows: pa.Table,
    unchanged: dict[str, Bool],
    moved: MovedValues | None,
) -> tuple[pa.Table, dict[str, Bool], pa.Table | None]:
    """Give rows, which the events `puts` have put, their unchanged values from earlier in the batch; what remains
    unchanged is the stored row's. The third: the keys of stored rows, where these are others than the rows' own."""
    at = np.flatnonzero(np.logical_or.reduce(list(unchanged.values())))
    lenders = Stays(decoded, events, moved.numbers if moved is not None else _NONE).lenders(puts[at], unchanged)
    elsewhere = np.flatnonzero(lenders.move >= 0)
    remaining: dict[str, Bool] = {}
    for name, mask in unchanged.items():
        lending = lenders.rows[name]
        given = mask[at] & (lending >= 0)
        lent = [decoded.rows[name].take(fixed(pa.int64(), lending[given], None))]
        to = [at[given]]
        asking = elsewhere[mask[at[elsewhere]] & ~given[elsewhere]]
        if moved is not None and len(asking):
            found, values = moved.values(name, lenders.move[asking])
            to.append(at[asking[found]])
            lent.append(values)
        rows = _with_values(rows, name, np.concatenate(to), lent)
        left = mask.copy()
        left[np.concatenate(to)] = False
        if left.any():
            remaining[name] = left
    if not remaining:
        return rows, remaining, None
    wanting = np.logical_or.reduce(list(remaining.values()))[at]
    origin = np.full(rows.num_rows, -1, dtype=np.int64)
    origin[at[wanting]] = np.where(lenders.move >= 0, -1, lenders.origin)[wanting]
    origin[origin == events.code[puts]] = -1
    origins = keys_of(decoded, events, origin, list(schema.key)) if (origin >= 0).any() else None
    asking = elsewhere[wanting[elsewhere]]
    if moved is not None and len(asking):
        keys = rows.select(list(schema.key)).schema
        if origins is None:
            origins = pa.table([pa.nulls(rows.num_rows, kind) for kind in keys.types], schema=keys)
        order, found_keys = moved.origins(lenders.move[asking], keys)
        for name in keys.names:
            origins = _with_values(origins, name, at[asking[order]], [found_keys[name]])
    return rows, remaining, origins


def _with_values(rows: pa.Table, name: str, to: Int64, values: Sequence[pa.ChunkedArray]) -> pa.Table:
    """`rows` with other values in the rows `to` of the column `name`."""
    if not len(to):
        return rows
    field = rows.schema.field(name)
    source = np.arange(rows.num_rows)
    source[to] = rows.num_rows + np.arange(len(to))
    both = pa.concat_arrays([chunk.cast(field.type) for column in (rows[name], *values) for chunk in column.chunks])
    return rows.set_column(rows.column_names.index(name), field, both.take(fixed(pa.int64(), source, None)))


@dataclass(frozen=True, slots=True)
class Lenders:
    """For each wanted row: `rows`: per column which new row of the batch has the value, -1: none has. `origin`: the
    code of the key under which the row was stored that has the others. `move`: the number of the change by which the
    row came from a key of another part, whose history is told there; -1: it did not."""

    rows: dict[str, Int64]
    origin: Int64
    move: Int64


class Stays:
    """The stays of a batch's rows. `moves`: as of `Moves.numbers`."""

    def __init__(self, decoded: DecodedChanges, events: Events, moves: Int64) -> None:
        by = np.argsort(events.code, kind="stable")
        code, self._row, order = events.code[by], events.row[by], events.order[by]
        self._position = np.empty(len(by), dtype=np.int64)
        self._position[by] = np.arange(len(by))
        put = self._row >= 0
        came_from = events.came_from[by]
        from_part = put & np.isin(order // 2, moves, kind="sort") if len(moves) else np.zeros(len(by), dtype=np.bool_)
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
        root = _followed(self._parent)[self._stay[at]]
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
        giving = _followed(np.where(of_stay >= 0, np.arange(len(of_stay)), self._parent))
        parent = self._parent[stay]
        above = np.where(parent != stay, of_stay[giving[parent]], -1)
        found = np.where(own >= 0, own, above)
        return np.where(found >= 0, self._row[found], -1)


class Moves:
    """Updates that moved a row to a key of another part and left values out: now they are two changes of the same
    number, a delete in one part and an insert in the other. `names`: columns with such values."""

    def __init__(self) -> None:
        self._numbers: list[Int64] = []
        self.names: set[str] = set()

    def note(self, numbers: Int64, names: Iterable[str]) -> None:
        self._numbers.append(numbers)
        self.names |= set(names)

    @property
    def numbers(self) -> Int64:
        """Ascending."""
        return np.unique(np.concatenate(self._numbers)) if self._numbers else _NONE


class MovedValues:
    """Values that rows had when they moved to a key of another part: every part tells of those that left it, then they
    are asked for by the number of the change that moved the row.

    Memory holds some numbers per such change; the values lie in files, which nobody else can find.
    """

    def __init__(self, moves: Moves, store: SpillStore) -> None:
        self.numbers = moves.numbers
        self._names = sorted(moves.names)
        self._store = store
        count = len(self.numbers)
        self._has = {name: np.zeros(count, dtype=np.bool_) for name in self._names}
        self._parent: Int32 = np.arange(count, dtype=np.int32)
        self._part, self._place = (np.zeros(count, dtype=np.int32) for _ in range(2))
        self._tables: list[pa.Table] = []

    def tell(self, schema: TableSchema, decoded: DecodedChanges, events: Events) -> None:
        """A part tells of the rows that moves took away from it."""
        left = np.flatnonzero((events.row < 0) & np.isin(events.order, self.numbers * 2, kind="sort"))
        if len(left):
            lenders = Stays(decoded, events, self.numbers).lenders(left, self._names)
            origins = keys_of(decoded, events, lenders.origin, list(schema.key))
            self._add(events.order[left] // 2, lenders, origins, decoded.rows)

    def _add(self, numbers: Int64, lenders: Lenders, origins: pa.Table, rows: pa.Table) -> None:
        """`origins`: the keys of the stored rows that have what the part has not; `rows`: the part's new rows."""
        at = np.searchsorted(self.numbers, numbers)
        self._part[at], self._place[at] = len(self._tables), np.arange(len(at))
        linked = lenders.move >= 0
        self._parent[at[linked]] = np.searchsorted(self.numbers, lenders.move[linked])
        # Key columns by their places: a large value may be of a column of any name.
        columns = dict(zip(map(str, range(origins.num_columns)), origins.columns, strict=True))
        for name in self._names:
            lending = lenders.rows[name]
            self._has[name][at] = lending >= 0
            columns["value " + name] = rows[name].take(fixed(pa.int64(), lending, lending >= 0))
        self._tables.append(on_disk(pa.table(columns), self._store))

    def values(self, name: str, numbers: Int64) -> tuple[Int64, pa.ChunkedArray]:
        """Of which of the changes the batch has the value of `name`, and these values."""
        has = self._has[name]
        giving = _followed(np.where(has, np.arange(len(has), dtype=np.int32), self._parent))
        target = giving[np.searchsorted(self.numbers, numbers)]
        found = np.flatnonzero(has[target])
        order, taken = self._taken(["value " + name], target[found])
        return found[order], taken.column(0)

    def origins(self, numbers: Int64, keys: pa.Schema) -> tuple[Int64, pa.Table]:
        """The keys under which the rows were stored before the batch; each of which of the changes."""
        target = _followed(self._parent)[np.searchsorted(self.numbers, numbers)]
        order, taken = self._taken([str(place) for place in range(len(keys))], target)
        return order, taken.rename_columns(keys.names)

    def _taken(self, columns: list[str], target: npt.NDArray[np.integer]) -> tuple[Int64, pa.Table]:
        """File by file, and in which order that is: to bring large values into another one copies them once more."""
        part = self._part[target]
        tables = [self._tables[0].select(columns).schema.empty_table()]
        for number in np.unique(part).tolist():
            places = self._place[target[part == number]].astype(np.int64)
            tables.append(self._tables[number].select(columns).take(fixed(pa.int64(), places, None)))
        return np.argsort(part, kind="stable"), pa.concat_tables(tables)


def _followed(parent: npt.NDArray[_Whole]) -> npt.NDArray[_Whole]:
    """Where each one comes to that goes from parent to parent, up to one that is its own."""
    while True:
        further = parent[parent]
        if np.array_equal(further, parent):
            return parent
        parent = further
