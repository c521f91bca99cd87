"""The net effect of a batch on one table: per key the one surviving change, as Arrow rows.

An update is delete(old key) + insert(new row); per key the last event wins; insert then delete leaves nothing. The
*first* event of a key says whether a stored row must exist, which is what lets the applier notice divergence.
Unchanged TOAST values are taken from earlier in the batch, along key changes, else named as "from the stored row".
Everything ordinary is numpy over whole columns; Python loops only over rows with unchanged values and history.

Changes of large transactions, which lie on disk, are netted in parts by the hash of their keys, and their rows go back
to disk: memory holds one part. One case needs everything at once: a row that moves
to a key of another part and keeps an unchanged TOAST value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.changes import NetChanges
from headwater.log.blocks import DELETE, INSERT, UPDATE, Block, Truncate
from headwater.log.decoded_changes import DecodedChanges, decode_changes
from headwater.log.net_parts import PartsOnDisk
from headwater.log.partitions import partitioned
from headwater.log.spill import Spilled, SpillStore
from headwater.log.wire import booleans
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

PART_CHANGES: Final = 125_000
"""Changes of transactions that lie on disk are netted in parts of about so many."""
PART_BYTES: Final = 64 << 20
"""And of about so many bytes of the log."""

_REMOVE, _PUT_OVER_STORED, _PUT_NEW = 0, 1, 2


def net_effect(
    schema: TableSchema,
    blocks: Sequence[tuple[Block, Bool]],
    truncates: Sequence[Truncate],
    describe: Callable[[int], str],
) -> NetChanges:
    """The net effect of `blocks` (each with the mask of changes that count) and `truncates` on the table `schema`.

    `describe(sequence)` names a change's position for messages. Raises BadValue for a value that the lake cannot
    hold, naming column and position.
    """
    cuts = _Cuts.of(schema, truncates)
    file = next((block.content.file for block, _ in blocks if isinstance(block.content, Spilled)), None)
    changes = sum(int(np.count_nonzero(mask)) for _, mask in blocks)
    count = max(-(-changes // PART_CHANGES), -(-sum(block.size for block, _ in blocks) // PART_BYTES))
    if file is not None and count > 1:
        try:
            return _net_in_parts(schema, blocks, cuts, describe, count, SpillStore.beside(file))
        except _UnchangedAcrossParts:
            pass
    return _net(schema, decode_changes(schema, blocks, describe), cuts)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """TRUNCATEs: nothing before the change `start` (-1: none) counts; after it leaves were emptied, at `partial`."""

    start: int
    partial: list[tuple[int, tuple[int, ...]]]

    @classmethod
    def of(cls, schema: TableSchema, truncates: Sequence[Truncate]) -> _Cuts:
        leaves = {leaf.relation_id for leaf in schema.leaves}
        whole = {schema.relation_id} if schema.partitioned else leaves
        cuts = [(t.sequence, frozenset(t.relation_ids)) for t in truncates]
        start = max((sequence for sequence, ids in cuts if ids & whole or leaves <= ids), default=-1)
        return cls(start, [(s, tuple(sorted(ids & leaves))) for s, ids in cuts if s > start and ids & leaves])


class _UnchangedAcrossParts(Exception):
    """A row moved to a key of another part and kept a value that only its old key's history knows."""


def _net(schema: TableSchema, decoded: DecodedChanges, cuts: _Cuts) -> NetChanges:
    if cuts.start >= 0:
        decoded = decoded.at(decoded.sequence > cuts.start)
    truncated, changes = cuts.start >= 0, len(decoded.sequence)
    if not schema.key:
        return _insert_only(schema, decoded, changes, truncated=truncated, partial=cuts.partial)
    events = _Events.of(schema, decoded)
    for sequence, relation_ids in cuts.partial:
        events = events.with_leaves_emptied(sequence, relation_ids, decoded)
    return _survivors(schema, decoded, events, changes, truncated=truncated, partial=cuts.partial)


def _net_in_parts(
    schema: TableSchema,
    blocks: Sequence[tuple[Block, Bool]],
    cuts: _Cuts,
    describe: Callable[[int], str],
    count: int,
    store: SpillStore,
) -> NetChanges:
    """Part by part; rows and keys go to disk, so that memory holds one part."""
    parts = PartsOnDisk(store)
    with contextlib.closing(partitioned(schema, blocks, describe, cuts.start, count, store)) as dealt:
        for part in dealt:
            decoded = decode_changes(schema, part, describe)
            if decoded.unchanged and _unchanged_in_inserts(decoded):
                raise _UnchangedAcrossParts
            parts.add(_net(schema, decoded, cuts))
    return parts.joined()


def _unchanged_in_inserts(decoded: DecodedChanges) -> bool:
    inserted = decoded.new[decoded.operation == INSERT]
    return any(bool(mask[inserted].any()) for mask in decoded.unchanged.values())


def _insert_only(
    schema: TableSchema,
    decoded: DecodedChanges,
    changes: int,
    *,
    truncated: bool,
    partial: list[tuple[int, tuple[int, ...]]],
) -> NetChanges:
    kept = decoded.operation == INSERT
    for sequence, relation_ids in partial:
        kept &= ~(np.isin(decoded.relation, relation_ids) & (decoded.sequence < sequence))
    if kept.all() and not (np.diff(decoded.new) < 0).any() and len(decoded.new) == decoded.rows.num_rows:
        rows = decoded.rows
    else:
        rows = decoded.rows.take(pa.array(decoded.new[kept]))
    return NetChanges(
        rows=rows,
        stored=np.zeros(rows.num_rows, dtype=np.bool_),
        unchanged={},
        origins=None,
        removed=rows.select([]).slice(0, 0),
        changes=changes,
        truncated=truncated,
        truncated_leaves=_leaves_of(partial),
    )


def _leaves_of(partial: list[tuple[int, tuple[int, ...]]]) -> tuple[int, ...]:
    return tuple(sorted({leaf for _, leaves in partial for leaf in leaves}))


@dataclass(slots=True)
class _Events:
    """What happens to keys, in order: `code` numbers the key, `row` the new row (-1: removal).

    `order` is twice the change's sequence, plus one for a put, so that an update's removal comes before its put.
    `came_from`: for the put of an update that changed the key, the code of the old key; else -1.
    """

    order: Int64
    code: Int64
    kind: npt.NDArray[np.int8]
    row: Int64
    came_from: Int64
    key_row: Int64
    """Per code a row that has its key: of the new rows, and behind them the old tuples."""
    row_code: Int64
    """Per new row its key's code."""

    @property
    def codes(self) -> int:
        return len(self.key_row)

    @classmethod
    def of(cls, schema: TableSchema, decoded: DecodedChanges) -> _Events:
        new_codes, old_codes, count = _key_codes(decoded.rows.select(list(schema.key)), decoded.old_keys)
        key_row = np.zeros(count, dtype=np.int64)
        key_row[old_codes] = np.arange(len(old_codes)) + len(new_codes)
        key_row[new_codes] = np.arange(len(new_codes))
        old = np.where(decoded.old >= 0, old_codes[decoded.old] if len(old_codes) else -1, -1)
        new = np.where(decoded.new >= 0, new_codes[decoded.new] if len(new_codes) else -1, -1)
        moved = (decoded.operation == UPDATE) & (decoded.old >= 0) & (old != new)
        removal = moved | (decoded.operation == DELETE)
        put = decoded.operation != DELETE
        put_kind = np.where((decoded.operation == UPDATE) & ~moved, _PUT_OVER_STORED, _PUT_NEW).astype(np.int8)
        order = np.concatenate([decoded.sequence[removal] * 2, decoded.sequence[put] * 2 + 1])
        events = cls(
            order,
            np.concatenate([old[removal], new[put]]),
            np.concatenate([np.full(int(removal.sum()), _REMOVE, dtype=np.int8), put_kind[put]]),
            np.concatenate([np.full(int(removal.sum()), -1, dtype=np.int64), decoded.new[put]]),
            np.concatenate([np.full(int(removal.sum()), -1, dtype=np.int64), np.where(moved, old, -1)[put]]),
            key_row,
            new_codes,
        )
        return events._sorted()

    def _sorted(self) -> _Events:
        if not (np.diff(self.order) < 0).any():
            return self
        by = np.argsort(self.order, kind="stable")
        return replace(
            self,
            order=self.order[by],
            code=self.code[by],
            kind=self.kind[by],
            row=self.row[by],
            came_from=self.came_from[by],
        )

    def last(self) -> Int64:
        """Per code the index of its last event, -1 for codes without one."""
        result = np.full(self.codes, -1, dtype=np.int64)
        result[self.code] = np.arange(len(self.code))
        return result

    def first(self) -> Int64:
        result = np.full(self.codes, -1, dtype=np.int64)
        result[self.code[::-1]] = np.arange(len(self.code))[::-1]
        return result

    def with_leaves_emptied(self, sequence: int, relation_ids: tuple[int, ...], decoded: DecodedChanges) -> _Events:
        """Truncating leaves removes the keys whose row, at that moment, was put there earlier in the batch."""
        before = self.order < sequence * 2
        last = np.full(self.codes, -1, dtype=np.int64)
        last[self.code[before]] = np.flatnonzero(before)
        alive = last[last >= 0]
        alive = alive[self.row[alive] >= 0]
        leaf = np.zeros(decoded.rows.num_rows, dtype=np.int64)
        puts = decoded.new >= 0
        leaf[decoded.new[puts]] = decoded.relation[puts]
        gone = self.code[alive[np.isin(leaf[self.row[alive]], relation_ids)]]
        extra = len(gone)
        return _Events(
            np.concatenate([self.order, np.full(extra, sequence * 2, dtype=np.int64)]),
            np.concatenate([self.code, gone]),
            np.concatenate([self.kind, np.full(extra, _REMOVE, dtype=np.int8)]),
            np.concatenate([self.row, np.full(extra, -1, dtype=np.int64)]),
            np.concatenate([self.came_from, np.full(extra, -1, dtype=np.int64)]),
            self.key_row,
            self.row_code,
        )._sorted()


def _key_codes(new: pa.Table, old: pa.Table) -> tuple[Int64, Int64, int]:
    """Number the distinct keys of both tables together: codes of `new`, codes of `old`, how many there are."""
    total = new.num_rows + old.num_rows
    codes, count = np.zeros(total, dtype=np.int64), 1
    for name in new.column_names:
        values = pa.concat_arrays([*new[name].chunks, *old[name].chunks]) if total else pa.array([], new[name].type)
        column, size = _numbered(_comparable(values))
        if count > 1:
            # Renumbering keeps the product of the columns' sizes within 64 bits.
            column, size = _numbered(pa.array(codes * max(size, 1) + column))
        codes, count = column, size
    return codes[: new.num_rows], codes[new.num_rows :], count


def _numbered(values: pa.Array) -> tuple[Int64, int]:
    """Each value's number, in the order of first appearance, and how many there are."""
    encoded = values.dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def _comparable(values: pa.Array) -> pa.Array:
    """Floats as keys compare as in PostgreSQL: -0 equals 0."""
    return pc.add(values, pa.scalar(0.0, values.type)) if pa.types.is_floating(values.type) else values


def _survivors(
    schema: TableSchema,
    decoded: DecodedChanges,
    events: _Events,
    changes: int,
    *,
    truncated: bool,
    partial: list[tuple[int, tuple[int, ...]]],
) -> NetChanges:
    last, first = events.last(), events.first()
    touched = np.flatnonzero(last >= 0)
    stored_before = events.kind[first[touched]] != _PUT_NEW
    if truncated:
        stored_before &= False
    final_row = events.row[last[touched]]
    present = final_row >= 0
    removed_codes = touched[~present & stored_before]
    # Survivors in the order of the log, so that whole runs of rows are copied, and none where all survive.
    survives = np.zeros(decoded.rows.num_rows, dtype=np.bool_)
    survives[final_row[present]] = True
    row_numbers = np.flatnonzero(survives)
    put_codes = events.row_code[row_numbers]
    stored = np.zeros(events.codes, dtype=np.bool_)
    stored[touched] = stored_before
    keys = list(schema.key)
    rows = decoded.rows if len(row_numbers) == len(survives) else decoded.rows.filter(booleans(survives))
    unchanged = {
        name: mask[row_numbers]
        for name, mask in decoded.unchanged.items()
        if name not in keys and mask[row_numbers].any()
    }
    origins: pa.Table | None = None
    if unchanged:
        rows, unchanged, origin_codes = _fill(decoded, events, last, put_codes, rows, unchanged)
        origins = _keys_of(decoded, events, origin_codes, keys) if (origin_codes >= 0).any() else None
    return NetChanges(
        rows=rows,
        stored=stored[put_codes],
        unchanged=unchanged,
        origins=origins,
        removed=_keys_of(decoded, events, removed_codes, keys),
        changes=changes,
        truncated=truncated,
        truncated_leaves=_leaves_of(partial),
    )


def _keys_of(decoded: DecodedChanges, events: _Events, codes: Int64, keys: list[str]) -> pa.Table:
    """The key columns behind `codes`; null for -1. Any event of a code may lend its key: a new row or an old tuple."""
    indices = events.key_row[codes] if events.codes else codes
    both = pa.concat_tables([decoded.rows.select(keys), decoded.old_keys.select(keys)])
    return both.take(pa.array(indices, mask=codes < 0))


def _fill(
    decoded: DecodedChanges,
    events: _Events,
    last: Int64,
    put_codes: Int64,
    rows: pa.Table,
    unchanged: dict[str, Bool],
) -> tuple[pa.Table, dict[str, Bool], Int64]:
    """Give rows their unchanged values from earlier in the batch; what remains unchanged is the stored row's.

    Returns the rows, the masks that remain, and per row the code of the stored row to take from, when that is another
    key than the row's own (-1: its own, or none needed).
    """
    previous = _previous_of_same_code(events)
    event_at_order = (
        {int(order): index for index, order in enumerate(events.order)} if (events.came_from >= 0).any() else {}
    )
    wanted = np.zeros(rows.num_rows, dtype=np.bool_)
    for mask in unchanged.values():
        wanted |= mask
    origin_codes = np.full(rows.num_rows, -1, dtype=np.int64)
    sources = {name: np.arange(rows.num_rows) for name in unchanged}
    remaining = {name: mask.copy() for name, mask in unchanged.items()}
    lent: list[int] = []
    for index in np.flatnonzero(wanted):
        event = int(last[put_codes[index]])
        open_names = [name for name, mask in unchanged.items() if mask[index]]
        code = int(put_codes[index])
        while open_names:
            if events.came_from[event] >= 0:
                code = int(events.came_from[event])
                event = event_at_order[int(events.order[event]) - 1]
            event = int(previous[event])
            if event < 0:
                break
            row = int(events.row[event])
            if row < 0:
                break  # the log updates a row that it removed before: the stored row decides, as divergence
            for name in list(open_names):
                if not decoded.unchanged[name][row]:
                    sources[name][index] = rows.num_rows + len(lent)
                    remaining[name][index] = False
                    open_names.remove(name)
            lent.append(row)
        if open_names and code != put_codes[index]:
            origin_codes[index] = code
    if lent:
        lenders = decoded.rows.take(pa.array(lent))
        for name, source in sources.items():
            values = pa.concat_arrays([*rows[name].chunks, *lenders[name].chunks])
            rows = rows.set_column(
                rows.column_names.index(name), rows.schema.field(name), values.take(pa.array(source))
            )
    return rows, {name: mask for name, mask in remaining.items() if mask.any()}, origin_codes


def _previous_of_same_code(events: _Events) -> Int64:
    by_code = np.argsort(events.code, kind="stable")
    previous = np.full(len(events.code), -1, dtype=np.int64)
    same = events.code[by_code][1:] == events.code[by_code][:-1]
    previous[by_code[1:][same]] = by_code[:-1][same]
    return previous
