"""The direct apply paths: rows found by key and marked in deletion vectors, new rows in one file (in one for each
partition of a table that is partitioned by columns), one commit.

No engine takes part: the table's log, its data files and its deletion vectors are written here, the commit as exactly
the version after the one that was planned on. `append` and `replace` are the same without a look-up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from headwater.apply.live_table import Added, LiveTable
from headwater.apply.plan import Applied, Plan, PlanAgain
from headwater.apply.soft_delete import are_marked, end_deleted, others_marked
from headwater.apply.staged.files import StagedRows
from headwater.apply.staged.link import link_staged
from headwater.apply.work import DELETE_MISSED, INSERT_MET, UPDATE_MISSED, Work, examples
from headwater.delta import clustering, delta_log, layout
from headwater.delta.deletion_vectors import write_vectors
from headwater.delta.delta_log import DataFile, Snapshot
from headwater.delta.index.codes import encode
from headwater.delta.index.index import NOWHERE
from headwater.delta.index.only_adds import lie_above, only_adds
from headwater.delta.index.written_keys import WrittenKeys
from headwater.delta.log_entries import Action
from headwater.delta.new_files import Written, discard, write_rows
from headwater.delta.small_tables import LostRace
from headwater.errors import Diverged, Fenced
from headwater.net_changes import NetChanges
from headwater.predicate import OneOf, Predicate
from headwater.schema import PARTITION_COLUMN
from headwater.stage_clock import stage

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_KNOWN_FEATURES = frozenset(
    {"deletionVectors", "appendOnly", "invariants", "timestampNtz", "columnMapping", *clustering.FEATURES}
)
"""Table features whose rules this writer keeps; any other one is left to Delta's own."""


def obstacle(snapshot: Snapshot) -> str:
    """Why the table must be written by Delta's own writer; empty when it need not."""
    strange = snapshot.features - _KNOWN_FEATURES
    if strange:
        return f"it has the table features {', '.join(sorted(strange))}"
    if (
        "deletionVectors" not in snapshot.features
        or snapshot.configuration.get("delta.enableDeletionVectors") != "true"
    ):
        return "it has no deletion vectors"
    if snapshot.configuration.get("delta.appendOnly") == "true":
        return "it is append-only"
    return layout.obstacle(snapshot.metadata)


@dataclass(frozen=True, slots=True)
class Fence:
    """The driver's generation, which every commit carries: a table that has seen a newer one is another driver's."""

    app_id: str
    generation: int


def apply(state: LiveTable, plan: Plan, fence: Fence) -> Applied:
    """Commit `plan` on `state`. PlanAgain when the table does not stand at the planned version (any more)."""
    if state.version != plan.version:
        raise PlanAgain
    seen = state.snapshot.transactions.get(fence.app_id, 0)
    if seen > fence.generation:
        raise Fenced(
            f"generation {seen} has taken over from generation {fence.generation}",
            where=plan.record.name,
            remedy="nothing: the newer driver goes on",
        )
    if state.snapshot.transactions.get(plan.app_id, 0) >= plan.to_lsn:
        raise PlanAgain  # the position is in the table already
    work = Work(everything=plan.apply_path == "replace")
    staged = plan.changes.staged
    if isinstance(staged, StagedRows):
        with stage("plan"):
            added, keyed = link_staged(state, plan, staged, work)
    else:
        # Rows are found part by part while they are written: that stage is inside this one.
        with stage("write"):
            rows = _ROWS[plan.apply_path](state, plan, work)
            # What takes the place of all rows comes in the order of its table, as far as it has one.
            run = clustering.new_run() if work.everything and plan.record.schema.cluster_by else ""
            written = write_rows(plan.path, plan.changes.rows.schema, rows, state.layout, run)
        added, keyed = [one.file for one in written], _with_keys(written, work.written)
    with stage("write"):
        actions = _actions(state, plan, fence, work, added)
    gone = _rows_gone(state, work)
    try:
        with stage("commit"):
            delta_log.commit(plan.path, plan.version + 1, actions)
    except LostRace as lost:
        discard(plan.path, added)
        raise PlanAgain from lost
    state.follow_own(actions, work.deleted, keyed)
    taken = "append" if work.append_because else ""
    return Applied(plan.version + 1, work.divergence, work.example, apply_path=taken, gone=gone)


def take(folder: str, fence: Fence) -> None:
    """Let the table in `folder` carry the fence's generation, in a commit of nothing else: whoever commits under an
    older one is out. Nothing happens to a table that Delta's own writer must write, and that is not kept out by this:
    a commit without what its features ask for (a timestamp, say) would end its use."""
    while True:
        snapshot = delta_log.read_snapshot(folder)
        if obstacle(snapshot):
            return
        if snapshot.transactions.get(fence.app_id, 0) >= fence.generation:
            return
        actions = [
            delta_log.commit_info("HEADWATER FENCE", {}, {}, snapshot.version),
            delta_log.transaction(fence.app_id, fence.generation),
        ]
        with contextlib.suppress(LostRace):
            delta_log.commit(folder, snapshot.version + 1, actions)
            return


def _with_keys(written: list[Written], keys: WrittenKeys | None) -> Iterator[Added]:
    """The new files with the keys of their rows, one at a time."""
    for one in written:
        yield Added(one.file, keys.take(one.numbers) if keys is not None else None)


_NOTHING: Int64 = np.zeros(0, dtype=np.int64)


def _append(state: LiveTable, plan: Plan, work: Work) -> Iterator[pa.Table]:
    for part in plan.changes.in_parts():
        yield part.rows


def _replace(state: LiveTable, plan: Plan, work: Work) -> Iterator[pa.Table]:
    schema = plan.record.schema
    if plan.changes.emptied:
        yield from _emptied(state, plan, work)
        return
    work.written = WrittenKeys() if schema.key else None
    for part in plan.changes.in_parts():
        if work.written is not None:
            work.written.add(encode(schema, part.rows.select(list(schema.key))))
        yield part.rows


def _emptied(state: LiveTable, plan: Plan, work: Work) -> Iterator[pa.Table]:
    """A TRUNCATE where deleted rows stay: all rows are written anew, those that the batch leaves alone as deleted."""
    schema, keys = plan.record.schema, list(plan.record.schema.key)
    nothing = np.zeros(0, dtype=np.bool_)
    found: list[tuple[Int64, Bool]] = []
    for part in plan.changes.in_parts():
        with stage("plan"):
            puts = state.find(encode(schema, part.rows.select(keys)))
            missed = part.stored & ((puts == NOWHERE) | are_marked(state, schema, puts))
        shown = partial(_examples, part, keys, missed, nothing, nothing)
        work.diverged(int(missed.sum()), shown)
        found.append((puts, missed))
    (moment,) = plan.changes.emptied.values()
    taken = np.concatenate([np.where(missed, NOWHERE, puts) for puts, missed in found])
    yield from others_marked(state, schema, taken, moment)
    for part, (puts, missed) in zip(plan.changes.in_parts(), found, strict=True):
        yield from _parts(state, part, _sources(state, plan, part, puts, ~missed), ~missed, [])


def _positional(state: LiveTable, plan: Plan, work: Work) -> Iterator[pa.Table]:
    """The rows to write. No key is in two parts, and nothing is put into the index before the commit: so each part
    finds the rows that were stored before, those of moved rows under keys of other parts included."""
    work.written = WrittenKeys() if plan.record.schema.key else None
    gone = _emptied_by(plan.changes)
    emptied = state.rows_of(gone, plan.changes.rows.schema) if gone is not None else {}
    for part in plan.changes.in_parts():
        yield from _positional_part(state, plan, part, work, emptied)
    work.empty(state, emptied)


def _emptied_by(changes: NetChanges) -> Predicate | None:
    """The stored rows that go without being named."""
    leaves = changes.truncated_leaves
    return OneOf(PARTITION_COLUMN, leaves) if leaves else changes.replaced


def _positional_part(
    state: LiveTable, plan: Plan, changes: NetChanges, work: Work, emptied: dict[str, BitMap]
) -> Iterator[pa.Table]:
    schema, keys = plan.record.schema, list(plan.record.schema.key)
    rows, removed = changes.rows, changes.removed
    with stage("plan"):
        codes = encode(schema, rows.select(keys)) if keys else None
        adds = codes is not None and only_adds(changes)
        if adds and lie_above(schema, rows, state.snapshot.files.values(), state.layout):
            work.proved("inserts only, with keys above all that the statistics of its files show")
            work.wrote(codes)
            yield rows
            return
        puts = state.find(codes) if codes is not None else np.full(rows.num_rows, NOWHERE, dtype=np.int64)
        goes = state.find(encode(schema, removed)) if removed.num_rows else _NOTHING
        lives = (puts != NOWHERE) & ~are_marked(state, schema, puts)
    update_missed = changes.stored & ~lives
    # The row that a new one meets in a truncated leaf is the truncated row.
    insert_met = ~changes.stored & lives & ~state.are_among(puts, emptied)
    delete_missed = goes == NOWHERE
    diverged = int(update_missed.sum() + insert_met.sum() + delete_missed.sum())
    work.diverged(diverged, lambda: _examples(changes, keys, update_missed, insert_met, delete_missed))
    written = np.ones(rows.num_rows, dtype=np.bool_)
    if diverged and plan.record.on_divergence == "repair":
        # What was to be deleted and is not there needs no repair.
        written = ~(update_missed & end_deleted(changes))
        _refuse_partial(plan, written & update_missed & _partial(changes, keys), work.divergence, work.example)
    elif diverged:
        # A row that contradicts the log changes nothing.
        written = ~(update_missed | insert_met)
    gone = np.concatenate([puts[written & (puts != NOWHERE)], goes[goes != NOWHERE]])
    work.delete(state, gone)
    proved = adds and not diverged and not len(gone)
    work.proved("inserts only, and the index of its keys holds none of theirs" if proved else "")
    if not changes.unchanged and written.all():
        work.wrote(codes)
        yield rows
        return
    order: list[Int64] = []
    yield from _parts(state, changes, _sources(state, plan, changes, puts, written), written, order)
    if order and codes is not None:
        work.wrote(codes.take(np.concatenate(order)))


_ROWS = {"append": _append, "replace": _replace, "positional": _positional}


def _actions(state: LiveTable, plan: Plan, fence: Fence, work: Work, added: list[DataFile]) -> list[Action]:
    live, deleted = state.snapshot.files, work.deleted
    whole = {name for name, rows in deleted.items() if len(rows) == live[name].rows}
    removed = list(live.values()) if work.everything else [live[name] for name in whole]
    partly = {name: rows for name, rows in deleted.items() if name not in whole}
    vectors = write_vectors(plan.path, partly) if partly else {}
    changed = [(live[name], delta_log.with_vector(live[name], vector)) for name, vector in vectors.items()]
    metrics = {
        "numOutputRows": sum((file.rows or 0) - file.deleted for file in added),
        "numDeletedRows": sum(len(rows) - live[name].deleted for name, rows in deleted.items()),
        "numAddedFiles": len(added),
        "numRemovedFiles": len(removed),
        "numDeletionVectorsUpdated": len(changed),
    }
    parameters = {"path": plan.apply_path, "because": plan.because}
    if work.append_because:
        parameters = {"path": "append", "because": work.append_because}
    if work.everything and not plan.changes.emptied:  # what stays as deleted comes from the content before
        parameters["mode"] = "Overwrite"
    if plan.verified:
        parameters["verified"] = "true"
    return [
        delta_log.commit_info("HEADWATER APPLY", parameters, metrics, plan.version),
        delta_log.transaction(plan.app_id, plan.to_lsn),
        delta_log.transaction(fence.app_id, fence.generation),
        *(delta_log.remove(file) for file in removed),
        *(delta_log.remove(before) for before, _ in changed),
        *(delta_log.add(after) for _, after in changed),
        *(delta_log.add(file) for file in added),
    ]


def _rows_gone(state: LiveTable, work: Work) -> int:
    live = state.snapshot.files
    if work.everything:
        return sum((file.rows or 0) - file.deleted for file in live.values())
    return sum(len(rows) - live[name].deleted for name, rows in work.deleted.items())


def _sources(state: LiveTable, plan: Plan, changes: NetChanges, puts: Int64, written: Bool) -> Int64:
    """Where the unchanged large values of each row stand: under its key, or under the key that it had before."""
    sources = puts.copy()
    moved = np.flatnonzero(_moved(changes, list(plan.record.schema.key)))
    if changes.origins is not None and len(moved):
        origins = state.find(encode(plan.record.schema, changes.origins.take(pa.array(moved))))
        origins[are_marked(state, plan.record.schema, origins)] = NOWHERE
        sources[moved] = origins
    missing = int(((_wants(changes) & written) & (sources == NOWHERE)).sum())
    if missing:
        raise Diverged(
            f"{missing} rows keep values that the log does not carry, and no row is stored that has them",
            where=plan.record.name,
            remedy=f"headwater load PIPELINE.yaml --table {plan.record.name} --again",
        )
    return sources


def _parts(
    state: LiveTable, changes: NetChanges, sources: Int64, written: Bool, order: list[Int64]
) -> Iterator[pa.Table]:
    """The rows to write, in parts; those with unchanged large values by where these stand, a row group at a time."""
    rows, wants = changes.rows, _wants(changes)
    whole = np.flatnonzero(written & ~wants)
    if len(whole):
        order.append(whole)
        yield rows.take(pa.array(whole))
    partial = np.flatnonzero(written & wants)
    stored_schema = pa.schema([rows.schema.field(name) for name in changes.unchanged])
    for here, stored in state.rows_at(sources[partial], stored_schema):
        numbers = partial[here]
        part = rows.take(pa.array(numbers))
        for name, mask in changes.unchanged.items():
            column = pc.if_else(pa.array(mask[numbers]), stored[name], part[name])
            part = part.set_column(part.column_names.index(name), part.schema.field(name), column)
        order.append(numbers)
        yield part


def _wants(changes: NetChanges) -> Bool:
    """Rows with a value that is still to be read from the lake."""
    wants = np.zeros(changes.rows.num_rows, dtype=np.bool_)
    for mask in changes.unchanged.values():
        wants |= mask
    return wants


def _examples(changes: NetChanges, keys: list[str], *masks: Bool) -> list[str]:
    update_missed, insert_met, delete_missed = masks
    deleted = end_deleted(changes)
    missed = (
        (UPDATE_MISSED, changes.rows, update_missed & ~deleted),
        (INSERT_MET, changes.rows, insert_met),
        (DELETE_MISSED, changes.removed, delete_missed),
        (DELETE_MISSED, changes.rows, update_missed & deleted),
    )
    return [text for word, table, mask in missed for text in examples(word, table.select(keys), mask)]


def _partial(changes: NetChanges, keys: list[str]) -> Bool:
    """Rows that need values of the row under their own key, which the log does not carry."""
    return _wants(changes) & ~_moved(changes, keys)


def _moved(changes: NetChanges, keys: list[str]) -> Bool:
    """Rows that take values from the row under the key that they had before."""
    if changes.origins is None:
        return np.zeros(changes.rows.num_rows, dtype=np.bool_)
    return np.array(changes.origins[keys[0]].is_valid(), dtype=np.bool_)


def _refuse_partial(plan: Plan, partial: Bool, count: int, example: str) -> None:
    if partial.any():
        raise Diverged(
            f"{count} rows contradict the lake and cannot all be repaired, because the log does not carry their "
            f"unchanged large values: {example}",
            where=plan.record.name,
            remedy=f"headwater load PIPELINE.yaml --table {plan.record.name} --again",
        )
