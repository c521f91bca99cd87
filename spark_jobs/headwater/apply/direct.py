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
from pyroaring import BitMap

from headwater.apply.find_rows import Found, Work, find_rows, find_stored
from headwater.apply.live_table import Added, LiveTable
from headwater.apply.made_ready import MadeReady
from headwater.apply.plan import Applied, Plan, PlanAgain, diverged
from headwater.apply.soft_delete import end_deleted, others_marked
from headwater.apply.staged.files import StagedRows
from headwater.apply.staged.link import link_staged
from headwater.apply.unchanged_values import filled_rows, find_sources, need_own_row, not_repairable
from headwater.delta import clustering, delta_log, layout, storage
from headwater.delta.deletion_vectors import write_vectors
from headwater.delta.delta_log import DataFile, Snapshot
from headwater.delta.index.codes import encode
from headwater.delta.index.index import NOWHERE
from headwater.delta.index.only_adds import lie_above, only_adds
from headwater.delta.index.written_keys import WrittenKeys
from headwater.delta.log_entries import Action
from headwater.delta.metadata import columns_change
from headwater.delta.new_files import Written, discard, discard_vectors, write_rows
from headwater.delta.small_tables import LostRace
from headwater.errors import Diverged, Fenced
from headwater.lake_root import is_remote
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

    def refuse_newer(self, snapshot: Snapshot, table: str) -> None:
        """Fenced when the table has seen a newer one."""
        seen = snapshot.transactions.get(self.app_id, 0)
        if seen > self.generation:
            raise Fenced(
                f"generation {seen} has taken over from generation {self.generation}",
                where=table,
                remedy="nothing: the newer driver goes on",
            )


def commit(state: LiveTable, plan: Plan, fence: Fence) -> Applied:
    """Commit `plan` on `state`. PlanAgain when the table does not stand at the planned version (any more), Diverged
    when it refuses what contradicts the stored rows."""
    if state.version != plan.version:
        raise PlanAgain
    fence.refuse_newer(state.snapshot, plan.record.name)
    if state.snapshot.transactions.get(plan.app_id, 0) >= plan.to_lsn:
        raise PlanAgain  # the position is in the table already
    work, ready = Work(everything=plan.apply_path == "replace"), _made_ready(plan)
    added: list[DataFile] = []
    marked: _Marked = []
    try:
        with stage("write"), storage.uploads_beside(plan.path):
            added, keyed = _written(state, plan, work)
            marked = _marked(state, plan, work)
            if plan.refuses_divergence and work.divergence:
                raise diverged(plan, work.divergence, work.example)
            # In a store a look takes as long as an upload; on disk it comes last, as close to the commit as can be.
            if has_looked := is_remote(plan.path):
                delta_log.look_below(plan.path, plan.version + 1)
            actions = _actions(state, plan, fence, work, added, marked)
            gone = _rows_gone(state, work)
        with stage("commit"):
            delta_log.commit(plan.path, plan.version + 1, actions, has_looked=has_looked)
    except (LostRace, Diverged) as failed:
        if ready is None:  # what was made ready waits for the next attempt
            discard(plan.path, added)
        discard_vectors(plan.path, (after for _, after in marked))
        if isinstance(failed, LostRace):
            raise PlanAgain from failed
        raise
    if ready is None:
        state.follow_own(actions, work.deleted, keyed)
    else:
        state.follow_ready(actions, work.deleted, ready.rows, ready.moved_out)
    taken = "append" if work.append_because else ""
    return Applied(plan.version + 1, work.divergence, work.example, apply_path=taken, gone=gone)


def bring_forward(ready: MadeReady, plan: Plan) -> None:
    """As `commit`, on what is made ready beside the table: in no log."""
    state, work = ready.rows, Work(everything=plan.apply_path == "replace")
    with storage.uploads_beside(plan.path):
        added, keyed = _written(state, plan, work)
        marked = _marked(state, plan, work)
    state.follow_own(_changed(state, work, added, marked), work.deleted, keyed)
    ready.brought_forward(plan.changes, [*added, *(after for _, after in marked)])


def _made_ready(plan: Plan) -> MadeReady | None:
    staged = plan.changes.staged
    return staged if isinstance(staged, MadeReady) else None


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


def _written(state: LiveTable, plan: Plan, work: Work) -> tuple[list[DataFile], Iterator[Added]]:
    """The new files, and again with the keys of their rows."""
    staged = plan.changes.staged
    if isinstance(staged, MadeReady):
        return staged.link(state, work), iter(())
    if isinstance(staged, StagedRows):
        with stage("plan"):
            return link_staged(state, plan, staged, work)
    # Rows are found part by part while they are written.
    rows = _ROWS[plan.apply_path](state, plan, work)
    # What takes the place of all rows comes in the order of its table, as far as it has one.
    run = clustering.new_run() if work.everything and plan.record.schema.cluster_by else ""
    written = write_rows(plan.path, plan.changes.rows.schema, rows, state.layout, run)
    return [one.file for one in written], _with_keys(written, work.written)


def _with_keys(written: list[Written], keys: WrittenKeys | None) -> Iterator[Added]:
    """The new files with the keys of their rows, one at a time."""
    for one in written:
        yield Added(one.file, keys.take(one.numbers) if keys is not None else None)


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
    schema = plan.record.schema
    repairs = plan.record.on_divergence == "repair"
    found: list[tuple[Int64, Bool]] = []
    for part in plan.changes.in_parts():
        with stage("plan"):
            here = find_stored(state, schema, part)
        work.diverged(here.divergence, partial(here.examples, part, list(schema.key)))
        found.append((here.puts, _repaired(plan, work, part, here) if repairs else ~here.update_missed))
    (moment,) = plan.changes.emptied.values()
    # A row that is written takes its key's place, also from a marked one: no key has two rows.
    taken = np.concatenate([np.where(written, puts, NOWHERE) for puts, written in found])
    yield from others_marked(state, schema, taken, moment)
    for part, (puts, written) in zip(plan.changes.in_parts(), found, strict=True):
        yield from filled_rows(state, part, find_sources(state, plan, part, puts, written), written, [])


def _repaired(plan: Plan, work: Work, changes: NetChanges, found: Found) -> Bool:
    """Which rows of the log are written where one that contradicts the lake is to be, too."""
    # What was to be deleted and is not there needs no repair.
    written: Bool = ~(found.update_missed & end_deleted(changes))
    if (written & found.update_missed & need_own_row(changes, list(plan.record.schema.key))).any():
        raise not_repairable(plan, work.divergence, work.example)
    return written


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
    rows = changes.rows
    with stage("plan"):
        codes = encode(schema, rows.select(keys)) if keys else None
        adds = codes is not None and only_adds(changes)
        if adds and lie_above(schema, rows, state.snapshot.files.values(), state.layout):
            work.proved("inserts only, with keys above all that the statistics of its files show")
            work.wrote(codes)
            yield rows
            return
        found = find_rows(state, schema, changes, codes, emptied)
    puts, goes, contradictions = found.puts, found.goes, found.divergence
    work.diverged(contradictions, partial(found.examples, changes, keys))
    written = np.ones(rows.num_rows, dtype=np.bool_)
    if contradictions and plan.record.on_divergence == "repair":
        written = _repaired(plan, work, changes, found)
    elif contradictions:
        # A row that contradicts the log changes nothing.
        written = ~(found.update_missed | found.insert_met)
    gone = np.concatenate([puts[written & (puts != NOWHERE)], goes[goes != NOWHERE]])
    work.delete(state, gone)
    proved = adds and not contradictions and not len(gone)
    work.proved("inserts only, and the index of its keys holds none of theirs" if proved else "")
    if not changes.unchanged and written.all():
        work.wrote(codes)
        yield rows
        return
    order: list[Int64] = []
    yield from filled_rows(state, changes, find_sources(state, plan, changes, puts, written), written, order)
    if order and codes is not None:
        work.wrote(codes.take(np.concatenate(order)))


_ROWS = {"append": _append, "replace": _replace, "positional": _positional}


_Marked = list[tuple[DataFile, DataFile]]
"""Files that lose some of their rows: as they are, and with their new vectors."""


def _marked(state: LiveTable, plan: Plan, work: Work) -> _Marked:
    live = state.snapshot.files
    partly = {name: rows for name, rows in work.deleted.items() if len(rows) != live[name].rows}
    vectors = write_vectors(plan.path, partly) if partly else {}
    return [(live[name], delta_log.with_vector(live[name], vector)) for name, vector in vectors.items()]


def _actions(
    state: LiveTable, plan: Plan, fence: Fence, work: Work, added: list[DataFile], changed: _Marked
) -> list[Action]:
    live, deleted = state.snapshot.files, work.deleted
    removed = _removed(state, work, changed)
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
        *(delta_log.transaction(app_id, number) for app_id, number in plan.counters.items()),
        *(columns_change(state.snapshot, plan.becomes) if plan.becomes is not None else ()),
        *_changed(state, work, added, changed),
    ]


def _removed(state: LiveTable, work: Work, changed: _Marked) -> list[DataFile]:
    """Files of which no row is left."""
    live = state.snapshot.files
    if work.everything:
        return list(live.values())
    return [live[name] for name in work.deleted.keys() - {before.name for before, _ in changed}]


def _changed(state: LiveTable, work: Work, added: list[DataFile], changed: _Marked) -> list[Action]:
    return [
        *(delta_log.remove(file) for file in _removed(state, work, changed)),
        *(delta_log.remove(before) for before, _ in changed),
        *(delta_log.add(after) for _, after in changed),
        *(delta_log.add(file) for file in added),
    ]


def _rows_gone(state: LiveTable, work: Work) -> int:
    live = state.snapshot.files
    if work.everything:
        return sum((file.rows or 0) - file.deleted for file in live.values())
    return sum(len(rows) - live[name].deleted for name, rows in work.deleted.items())
