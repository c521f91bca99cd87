"""The net effect of a batch on one table: per key the one surviving change, as Arrow rows.

An update is delete(old key) + insert(new row); per key the last event wins; insert then delete leaves nothing. The
*first* event of a key says whether a stored row must exist, which is what lets the applier notice divergence.
Unchanged TOAST values are taken from earlier in the batch, along key changes, else named as "from the stored row"
(`headwater.log.net.unchanged_values`). Everything is numpy over whole columns.

Changes of large transactions, which lie on disk, are netted in parts by the hash of their keys, and their rows go back
to disk: memory holds one part. A part that is too large, since few keys have most of the changes, loses those that
later ones supersede, and is dealt out again if that is not enough. All parts tell what rows had that moved to a key of
another part before the first is netted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.log.blocks import INSERT, Block, Truncate
from headwater.log.net.decoded import DecodedChanges, decode_changes
from headwater.log.net.events import PUT_NEW, Events, keys_of
from headwater.log.net.hash_parts import Dealer, HashPart, new_parts
from headwater.log.net.on_disk import PartsOnDisk
from headwater.log.net.superseded import thinned
from headwater.log.net.unchanged_values import MovedValues, filled, refuse_lost
from headwater.log.spill import Spilled, SpillStore
from headwater.log.values.wire import booleans, fixed
from headwater.net_changes import Deletions, NetChanges
from headwater.schema import TableSchema
from headwater.stage_clock import stage

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

PART_CHANGES: Final = 125_000
"""Changes of transactions that lie on disk are netted in parts of about so many."""
PART_BYTES: Final = 32 << 20
"""And of about so many bytes of the log: large values are copied some times on their way."""
WHOLE_BYTES: Final = 64 << 20
"""Few changes of up to so many bytes are netted at once, as a batch in memory is: dealing them out writes and reads
all of them once more, which takes five times the seconds of the processor. Netting takes some five times the memory."""


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
        return _net_in_parts(schema, blocks, cuts, describe, count, store, finish)
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


def _net(schema: TableSchema, decoded: DecodedChanges, cuts: _Cuts, moved: MovedValues | None = None) -> NetChanges:
    """`moved`: what the rows had that came from keys of other parts."""
    if cuts.start >= 0:
        decoded = decoded.at(decoded.sequence > cuts.start)
    if decoded.unchanged:
        refuse_lost(schema, decoded, moved)
    truncated, changes = cuts.start >= 0, len(decoded.sequence)
    if not schema.key:
        return _insert_only(schema, decoded, changes, truncated=truncated, partial=cuts.partial)
    events = _events(schema, decoded, cuts)
    return _survivors(schema, decoded, events, changes, moved, truncated=truncated, partial=cuts.partial)


def _events(schema: TableSchema, decoded: DecodedChanges, cuts: _Cuts) -> Events:
    events = Events.of(schema, decoded)
    for sequence, relation_ids in cuts.partial:
        events = events.with_leaves_emptied(sequence, relation_ids, decoded)
    return events


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
    done = PartsOnDisk(store)
    with contextlib.ExitStack() as files:
        dealer = Dealer(schema, describe, store)
        parts = new_parts(count, store, files)
        dealer.deal(blocks, cuts.start, parts)
        small = [one for part in parts for one in _bounded(schema, part, cuts, dealer, describe, store, files)]
        moved = MovedValues(dealer.moves, store) if len(dealer.moves.numbers) else None
        if moved is not None:
            for part in small:
                _tell_moved(schema, decode_changes(schema, part.content, describe), cuts, moved)
        for part in small:
            # Nothing holds a part's rows while the next one is read.
            done.add(finish(_net(schema, decode_changes(schema, part.content, describe), cuts, moved)))
            part.file.remove()
    changes = sum(int(np.count_nonzero(mask & (block.sequence > cuts.start))) for block, mask in blocks)
    return replace(done.joined(), changes=changes)


def _tell_moved(schema: TableSchema, decoded: DecodedChanges, cuts: _Cuts, moved: MovedValues) -> None:
    moved.tell(schema, decoded, _events(schema, decoded, cuts))


def _bounded(
    schema: TableSchema,
    part: HashPart,
    cuts: _Cuts,
    dealer: Dealer,
    describe: Callable[[int], str],
    store: SpillStore,
    files: contextlib.ExitStack,
) -> list[HashPart]:
    """The part, or what it comes to when it is too large."""
    if not schema.key or not _is_large(part):
        return [part]
    borders = [sequence for sequence, _ in cuts.partial]
    while _is_large(part):
        most = max(1, min(PART_CHANGES, part.changes * PART_BYTES // max(part.size, 1)))
        (thin,) = new_parts(1, store, files)
        thinned(schema, part, thin, describe, borders, dealer.moves.numbers, most, store)
        part.file.remove()
        shrunk = thin.changes <= part.changes // 2
        part = thin
        if not shrunk:
            break
    if not _is_large(part):
        return [part]
    count = max(-(-part.changes // PART_CHANGES), -(-part.size // PART_BYTES))
    parts = new_parts(count, store, files)
    dealer.deal(part.content, -1, parts, seed=1)
    part.file.remove()
    return parts


def _is_large(part: HashPart) -> bool:
    return part.changes > 2 * PART_CHANGES or part.size > 2 * PART_BYTES


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


def _survivors(
    schema: TableSchema,
    decoded: DecodedChanges,
    events: Events,
    changes: int,
    moved: MovedValues | None,
    *,
    truncated: bool,
    partial: list[tuple[int, tuple[int, ...]]],
) -> NetChanges:
    last, first = events.last(), events.first()
    touched = np.flatnonzero(last >= 0)
    stored_before = events.kind[first[touched]] != PUT_NEW
    if truncated:
        stored_before &= False
    shown = _before_removal(events, last) if schema.soft_delete else last
    final_row = events.row[shown[touched]]
    present = final_row >= 0
    removed_codes = touched[~present & stored_before]
    # Survivors in the order of the log, so that neighbours are copied together, and none where all survive.
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
    origins = None
    if unchanged:
        rows, unchanged, origins = filled(schema, decoded, events, shown[put_codes], rows, unchanged, moved)
    return NetChanges(
        rows=rows,
        stored=stored[put_codes],
        unchanged=unchanged,
        origins=origins,
        removed=keys_of(decoded, events, removed_codes, keys),
        changes=changes,
        truncated=truncated,
        truncated_leaves=_leaves_of(partial),
        deletions=_deletions(events, last, put_codes, removed_codes, partial) if schema.soft_delete else None,
    )


def _before_removal(events: Events, last: Int64) -> Int64:
    """Per code its last event; for a key whose row was removed again, the put before that: the row stays, marked."""
    previous, shown = events.previous_of_same_code(), last.copy()
    removed = np.flatnonzero(last >= 0)
    removed = removed[events.row[last[removed]] < 0]
    put = previous[last[removed]]
    known = (put >= 0) & (events.row[put] >= 0)
    shown[removed[known]] = put[known]
    return shown


def _deletions(
    events: Events,
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
