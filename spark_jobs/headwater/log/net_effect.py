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

from headwater.changes import Deletions, NetChanges
from headwater.errors import Diverged
from headwater.log.blocks import INSERT, UPDATE, Block, Truncate
from headwater.log.decoded_changes import DecodedChanges, decode_changes
from headwater.log.key_codes import key_codes
from headwater.log.net_parts import PartsOnDisk
from headwater.log.partitions import partitioned
from headwater.log.spill import Spilled, SpillStore
from headwater.log.wire import booleans, fixed
from headwater.names import TableName
from headwater.schema import TableSchema
from headwater.stages import stage

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

PART_CHANGES: Final = 125_000
"""Changes of transactions that lie on disk are netted in parts of about so many."""
PART_BYTES: Final = 64 << 20
"""And of about so many bytes of the log."""
WHOLE_BYTES: Final = 256 << 20
"""Few changes of up to so many bytes are netted at once, as a batch in memory is: dealing them out writes and reads
all of them once more, which takes five times the seconds of the processor."""

_REMOVE, _PUT_OVER_STORED, _PUT_NEW = 0, 1, 2


@stage("net")
def net_effect(
    schema: TableSchema,
    blocks: Sequence[tuple[Block, Bool]],
    truncates: Sequence[Truncate],
    describe: Callable[[int], str],
    store: SpillStore | None = None,
    finish: Callable[[NetChanges], NetChanges] = lambda net: net,
) -> NetChanges:
    """The net effect of `blocks` (each with the mask of changes that count) and `truncates` on the table `schema`.

    `describe(sequence)` names a change's position for messages. `store`: where to net in parts what is too much for
    memory; without it that is done where the blocks lie. `finish`: what becomes of each part, or of the whole, before
    it is kept. Raises BadValue for a value that the lake cannot hold, naming column and position.
    """
    cuts = _Cuts.of(schema, truncates)
    file = next((block.content.file for block, _ in blocks if isinstance(block.content, Spilled)), None)
    store = store or (SpillStore.beside(file) if file is not None else None)
    changes = sum(int(np.count_nonzero(mask)) for _, mask in blocks)
    size = sum(block.size for block, _ in blocks)
    count = max(-(-changes // PART_CHANGES), -(-size // PART_BYTES) if size > WHOLE_BYTES else 1)
    if store is not None and count > 1:
        try:
            return _net_in_parts(schema, blocks, cuts, describe, count, store, finish)
        except _UnchangedAcrossParts:
            pass
    return finish(_net(schema, decode_changes(schema, blocks, describe), cuts))


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
        if schema.soft_delete:
            # Rows that were put before a TRUNCATE stay, as deleted: nothing of the batch is without effect.
            every = [(s, leaves if ids & whole else ids & leaves) for s, ids in cuts]
            return cls(-1, [(s, tuple(sorted(ids))) for s, ids in every if ids])
        start = max((sequence for sequence, ids in cuts if ids & whole or leaves <= ids), default=-1)
        return cls(start, [(s, tuple(sorted(ids & leaves))) for s, ids in cuts if s > start and ids & leaves])


class _UnchangedAcrossParts(Exception):
    """A row moved to a key of another part and kept a value that only its old key's history knows."""


def _net(schema: TableSchema, decoded: DecodedChanges, cuts: _Cuts) -> NetChanges:
    if cuts.start >= 0:
        decoded = decoded.at(decoded.sequence > cuts.start)
    if decoded.unchanged and (row := _unchanged_in_inserts(decoded)):
        # A row filter lets a row into view by an INSERT without the values that its UPDATE left alone. They may have
        # changed out of view: neither the batch nor a stored row can be trusted to have them.
        raise Diverged(
            f"{row} rows that came into view keep values that the log does not carry",
            where=str(TableName(schema.schema, schema.name)),
            remedy=f"headwater load PIPELINE.yaml --table {TableName(schema.schema, schema.name)} --again",
        )
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
    finish: Callable[[NetChanges], NetChanges],
) -> NetChanges:
    """Part by part; rows and keys go to disk, so that memory holds one part."""
    parts = PartsOnDisk(store)
    with contextlib.closing(partitioned(schema, blocks, describe, cuts.start, count, store)) as dealt:
        for part in dealt:
            decoded = decode_changes(schema, part, describe)
            if decoded.unchanged and _unchanged_in_inserts(decoded):
                raise _UnchangedAcrossParts
            parts.add(finish(_net(schema, decoded, cuts)))
    return parts.joined()


def _unchanged_in_inserts(decoded: DecodedChanges) -> int:
    """How many inserted rows lack values."""
    inserted = decoded.new[decoded.operation == INSERT]
    lacking = np.zeros(len(inserted), dtype=np.bool_)
    for mask in decoded.unchanged.values():
        lacking |= mask[inserted]
    return int(lacking.sum())


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
        rows = decoded.rows.take(fixed(pa.int64(), decoded.new[kept], None))
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
        new_codes, old_codes, count = key_codes(decoded.rows.select(list(schema.key)), decoded.old_keys)
        key_row = np.zeros(count, dtype=np.int64)
        key_row[old_codes] = np.arange(len(old_codes)) + len(new_codes)
        key_row[new_codes] = np.arange(len(new_codes))
        put, update = decoded.new >= 0, decoded.operation == UPDATE
        code = new_codes[decoded.new] if put.all() else _chosen(put, new_codes, decoded.new, old_codes, decoded.old)
        moved = update & (decoded.old >= 0)
        came_from = np.full(len(code), -1, dtype=np.int64)
        if moved.any():
            came_from[moved] = old_codes[decoded.old[moved]]
            moved &= came_from != code
            came_from[~moved] = -1
        kind = np.where(put, np.where(update & ~moved, _PUT_OVER_STORED, _PUT_NEW), _REMOVE).astype(np.int8)
        events = cls(decoded.sequence * 2 + put, code, kind, decoded.new, came_from, key_row, new_codes)
        return events.with_removals(decoded.sequence[moved] * 2, came_from[moved]) if moved.any() else events

    def with_removals(self, order: Int64, code: Int64) -> _Events:
        """Further events, of keys that go."""
        nothing = np.full(len(code), -1, dtype=np.int64)
        return replace(
            self,
            order=np.concatenate([self.order, order]),
            code=np.concatenate([self.code, code]),
            kind=np.concatenate([self.kind, np.full(len(code), _REMOVE, dtype=np.int8)]),
            row=np.concatenate([self.row, nothing]),
            came_from=np.concatenate([self.came_from, nothing]),
        )._sorted()

    def _sorted(self) -> _Events:
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
        return self.with_removals(np.full(len(gone), sequence * 2, dtype=np.int64), gone)


def _chosen(put: Bool, new_codes: Int64, new: Int64, old_codes: Int64, old: Int64) -> Int64:
    """Per change the code of its new key, or of the old one where nothing is put."""
    codes = np.empty(len(put), dtype=np.int64)
    codes[put], codes[~put] = new_codes[new[put]], old_codes[old[~put]]
    return codes


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
    shown = _before_removal(events, last) if schema.soft_delete else last
    final_row = events.row[shown[touched]]
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
        rows, unchanged, origin_codes = _fill(decoded, events, shown, put_codes, rows, unchanged)
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
        deletions=_deletions(events, last, put_codes, removed_codes, partial) if schema.soft_delete else None,
    )


def _before_removal(events: _Events, last: Int64) -> Int64:
    """Per code its last event; for a key whose row was removed again, the put before that: the row stays, marked."""
    previous, shown = _previous_of_same_code(events), last.copy()
    removed = np.flatnonzero(last >= 0)
    removed = removed[events.row[last[removed]] < 0]
    put = previous[last[removed]]
    known = (put >= 0) & (events.row[put] >= 0)
    shown[removed[known]] = put[known]
    return shown


def _deletions(
    events: _Events,
    last: Int64,
    put_codes: Int64,
    removed_codes: Int64,
    partial: list[tuple[int, tuple[int, ...]]],
) -> Deletions:
    end = last[put_codes]
    return Deletions(
        rows=np.where(events.row[end] < 0, events.order[end] // 2, -1),
        removed=events.order[last[removed_codes]] // 2,
        leaves={leaf: sequence for sequence, leaves in reversed(partial) for leaf in leaves},
    )


def _keys_of(decoded: DecodedChanges, events: _Events, codes: Int64, keys: list[str]) -> pa.Table:
    """The key columns behind `codes`; null for -1. Any event of a code may lend its key: a new row or an old tuple."""
    both = pa.concat_tables([decoded.rows.select(keys), decoded.old_keys.select(keys)])
    if not len(codes):
        return both.slice(0, 0)
    return both.take(fixed(pa.int64(), events.key_row[codes], codes >= 0))


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
        lenders = decoded.rows.take(fixed(pa.int64(), np.array(lent, dtype=np.int64), None))
        for name, source in sources.items():
            values = pa.concat_arrays([*rows[name].chunks, *lenders[name].chunks])
            rows = rows.set_column(
                rows.column_names.index(name), rows.schema.field(name), values.take(fixed(pa.int64(), source, None))
            )
    return rows, {name: mask for name, mask in remaining.items() if mask.any()}, origin_codes


def _previous_of_same_code(events: _Events) -> Int64:
    by_code = np.argsort(events.code, kind="stable")
    previous = np.full(len(events.code), -1, dtype=np.int64)
    same = events.code[by_code][1:] == events.code[by_code][:-1]
    previous[by_code[1:][same]] = by_code[:-1][same]
    return previous
