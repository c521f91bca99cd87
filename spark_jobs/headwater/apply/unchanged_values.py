"""Unchanged TOAST values, where they are filled in: a stored value takes the place of one that the log did not send.

What the batch itself knows is there already (`headwater.log.net.unchanged_values`). What it does not, `NetChanges`
says: `unchanged`, per column the rows whose value is the stored row's, and `origins`, the key under which that row is
stored, where the batch moved it to another one. Each way into the table fills them in as it can:

- directly (`headwater.apply.direct`): `find_sources` looks for them by key, and `filled_rows` reads the values while
  the rows are written, a row group at a time;
- by Spark (`headwater.apply.by_spark.merge`): MERGE leaves the value of the row that it meets; values under another key
  are asked for before, and put by `with_values`;
- a reload (`headwater.apply.replacement`): the rows that were read at the source have them. `ReadValues` takes them as
  they pass, and fills the changes since.

A value is never NULL, nor a placeholder, for want of its row: where no row is stored that has it, the table has
diverged. What is staged before its commit lacks none (`headwater.apply.staged.files.CannotStage`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.apply.live_table import LiveTable
from headwater.apply.plan import Plan
from headwater.apply.soft_delete import are_marked
from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.index import NOWHERE, KeyIndex, file_of, place_of, row_of
from headwater.errors import Diverged
from headwater.net_changes import NetChanges
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

Keep = Callable[[pa.Table], pa.Table]
"""The same rows, mapped from a private file of the local disk, which goes with them."""
_BYTES: Final = 64 << 20
"""Of values that are given at a time."""


def lack_values(changes: NetChanges) -> Bool:
    """Rows with a value that is still to be read from the lake."""
    lacking = np.zeros(changes.rows.num_rows, dtype=np.bool_)
    for mask in changes.unchanged.values():
        lacking |= mask
    return lacking


def have_moved(changes: NetChanges, keys: list[str]) -> Bool:
    """Rows that take values from the row under the key that they had before."""
    if changes.origins is None:
        return np.zeros(changes.rows.num_rows, dtype=np.bool_)
    return np.array(changes.origins[keys[0]].is_valid(), dtype=np.bool_)


def need_own_row(changes: NetChanges, keys: list[str]) -> Bool:
    """Rows that need values of the row under their own key, which the log does not carry."""
    return lack_values(changes) & ~have_moved(changes, keys)


def find_sources(state: LiveTable, plan: Plan, changes: NetChanges, puts: Int64, written: Bool) -> Int64:
    """Where the unchanged large values of each row stand: under its key, or under the key that it had before. `puts`:
    where its key does; `written`: which rows are going to be written."""
    found = puts.copy()
    at = np.flatnonzero(have_moved(changes, list(plan.record.schema.key)))
    if changes.origins is not None and len(at):
        origins = state.find(encode(plan.record.schema, changes.origins.take(pa.array(at))))
        origins[are_marked(state, plan.record.schema, origins)] = NOWHERE
        found[at] = origins
    missing = int(((lack_values(changes) & written) & (found == NOWHERE)).sum())
    if missing:
        raise Diverged(
            f"{missing} rows keep values that the log does not carry, and no row is stored that has them",
            where=plan.record.name,
            remedy=f"headwater load PIPELINE.yaml --table {plan.record.name} --again",
        )
    return found


def filled_rows(
    state: LiveTable, changes: NetChanges, sources: Int64, written: Bool, order: list[Int64]
) -> Iterator[pa.Table]:
    """The rows to write, in parts; those that lack values by where these stand, a row group at a time. `order` takes
    which rows each part has."""
    rows, lacking = changes.rows, lack_values(changes)
    whole = np.flatnonzero(written & ~lacking)
    if len(whole):
        order.append(whole)
        yield rows.take(pa.array(whole))
    partial = np.flatnonzero(written & lacking)
    stored_schema = pa.schema([rows.schema.field(name) for name in changes.unchanged])
    for here, stored in state.rows_at(sources[partial], stored_schema):
        numbers = partial[here]
        part = rows.take(pa.array(numbers))
        for name, mask in changes.unchanged.items():
            column = pc.if_else(pa.array(mask[numbers]), stored[name], part[name])
            part = part.set_column(part.column_names.index(name), part.schema.field(name), column)
        order.append(numbers)
        yield part


def not_repairable(plan: Plan, count: int, example: str) -> Diverged:
    """A repair would have to write rows of which no row is stored that has their values."""
    return Diverged(
        f"{count} rows contradict the lake and cannot all be repaired, because the log does not carry their "
        f"unchanged large values: {example}",
        where=plan.record.name,
        remedy=f"headwater load PIPELINE.yaml --table {plan.record.name} --again",
    )


def with_values(changes: NetChanges, keys: Iterable[str], at: Int64, values: pa.Table) -> NetChanges:
    """The rows `at` of `changes` with their unchanged values taken from `values`, row by row."""
    rows, unchanged = changes.rows, {}
    for name, mask in changes.unchanged.items():
        fill = mask[at]
        source = np.arange(rows.num_rows)
        source[at[fill]] = rows.num_rows + np.flatnonzero(fill)
        field = rows.schema.field(name)
        both = pa.chunked_array([*rows[name].chunks, *values[name].cast(field.type).chunks], field.type)
        rows = rows.set_column(rows.column_names.index(name), field, both.take(pa.array(source)))
        left = mask.copy()
        left[at] = False
        if left.any():
            unchanged[name] = left
    origins = changes.origins if unchanged else None
    if origins is not None:
        stay = np.ones(rows.num_rows, dtype=np.bool_)
        stay[at] = False
        columns = [pc.if_else(pa.array(stay), origins[name], None) for name in keys]
        origins = pa.table(columns, schema=origins.schema)
    return replace(changes, rows=rows, unchanged=unchanged, origins=origins)


class ReadValues:
    """What changes want of rows that are read: first they all say what they want, then the rows pass, then the changes
    are filled. `names`: columns that they may want; `keep`: where values wait."""

    def __init__(self, schema: TableSchema, names: Iterable[str], keep: Keep) -> None:
        self._schema = schema
        self._keep = keep
        self._names = sorted(names)
        self._wanted = KeyIndex()
        self._count = 0
        self._values: list[pa.Table] = []
        self._places: Int64 = np.zeros(0, dtype=np.int64)
        """Per wanted row which of the tables has its values, and where."""

    def want(self, part: NetChanges) -> None:
        sources, at = self._sources(part)
        numbers = np.arange(self._count, self._count + len(at), dtype=np.int64)
        self._count += len(at)
        self._wanted.put(encode(self._schema, sources), place_of(1, numbers))

    def _sources(self, part: NetChanges) -> tuple[pa.Table, Int64]:
        """The keys under which the rows that want values stood when they were read, and which rows of `part` these
        are."""
        at = np.flatnonzero(lack_values(part))
        own = part.rows.select(list(self._schema.key)).take(pa.array(at))
        if part.origins is None:
            return own, at
        origins = part.origins.take(pa.array(at))
        there = origins[self._schema.key[0]].is_valid()
        columns = [pc.if_else(there, origins[name], own[name]) for name in self._schema.key]
        return pa.table(columns, schema=own.schema), at

    def take(self, codes: Codes, rows: pa.Table) -> None:
        """Rows that were read, and the codes of their keys: what is wanted of them is kept."""
        if not self._count:
            return
        if not len(self._places):
            self._places = np.full(self._count, NOWHERE, dtype=np.int64)
        places = self._wanted.find(codes)
        found = np.flatnonzero(places != NOWHERE)
        if len(found):
            here = np.arange(len(found), dtype=np.int64)
            self._places[row_of(places[found])] = place_of(len(self._values), here)
            self._values.append(self._keep(rows.select(self._names).take(pa.array(found))))

    def filled(self, part: NetChanges) -> Iterator[NetChanges]:
        """`part` with the values that were found, in pieces that memory holds with them; what is left is for the
        table's own rows to give."""
        if not part.unchanged or not self._values:
            yield part
            return
        sources, at = self._sources(part)
        places = self._places[row_of(self._wanted.find(encode(self._schema, sources)))]
        at, places = at[places != NOWHERE], places[places != NOWHERE]
        sizes = np.zeros(part.rows.num_rows)
        sizes[at] = np.array([table.nbytes / table.num_rows for table in self._values])[file_of(places)]
        piece = np.cumsum(sizes) // _BYTES
        borders = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), part.rows.num_rows]
        for begin, end in itertools.pairwise(borders):
            here = (at >= begin) & (at < end)
            values = self._taken(places[here])
            yield with_values(_piece(part, begin, end), self._schema.key, at[here] - begin, values)

    def _taken(self, places: Int64) -> pa.Table:
        """The values at these places, in their order."""
        tables = [self._values[0].slice(0, 0)]
        files = file_of(places)
        order = np.argsort(files, kind="stable")
        tables += [self._values[n].take(pa.array(row_of(places[files == n]))) for n in np.unique(files).tolist()]
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_tables(tables).take(pa.array(back))


def _piece(part: NetChanges, begin: int, end: int) -> NetChanges:
    return replace(
        part,
        rows=part.rows.slice(begin, end - begin),
        stored=part.stored[begin:end],
        unchanged={name: mask[begin:end] for name, mask in part.unchanged.items()},
        origins=part.origins.slice(begin, end - begin) if part.origins is not None else None,
    )
