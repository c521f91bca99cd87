"""Upkeep of the directly written tables beside their writer: many small files made into one, and checkpoints.

Every batch leaves a small file. As in a log-structured merge tree, files are gathered by size: as soon as enough of
one tier are there, one of the next is made of them, so a row is written anew only a few times in its life; in a
table that is partitioned by columns, files of one partition only; of a table that is clustered, runs of files
(`headwater.delta.clustering`), whose rows come into one order by it. Files of which many rows are gone are made anew as
well. The rewriting works on files that never change, beside the writer; the commit is made in the writer's turn and
takes along what was deleted meanwhile, so neither ever waits for the other and no race is lost. Such a commit
rearranges rows and changes none (`dataChange` false).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.apply.clustered_files import rewrite_in_order
from headwater.apply.live_table import Added, LiveTable
from headwater.delta import delta_log
from headwater.delta.clustering import run_of
from headwater.delta.data_files import live_batches, write_batches
from headwater.delta.deletion_vectors import write_vectors
from headwater.delta.delta_log import DataFile
from headwater.delta.delta_types import stored_schema
from headwater.delta.index.codes import Codes, encode
from headwater.delta.layout import layout_of
from headwater.delta.log_entries import Action
from headwater.delta.new_files import discard, discard_vectors
from headwater.delta.small_tables import LostRace, write_checkpoint
from headwater.schema import TableSchema

if TYPE_CHECKING:
    from headwater.apply.direct import Fence

log = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]

_TIERS = ((256 << 10, 4), (4 << 20, 3), (64 << 20, 4))
"""Upper ends of the tiers, bytes, and how many files of one are made into one; larger files are left as they are. A
small table's few megabytes are quickly written again, and each file costs every query of it."""
_GONE = 0.3
"""Share of deleted rows from which a file is written anew: half of it, on average, is what queries read in vain."""
_AT_MOST = 256 << 20
_LOOK_EVERY = 4
_REST, _LONGEST_REST = 19.0, 10.0
"""So many times as long as a round took, up to so many seconds, the next one of any table waits: where hundreds of
tables are written at once, rows come first, and files are gathered less often and more of them together."""


@dataclass(frozen=True, slots=True)
class Group:
    """Files of one partition that are to be made into one, or into one run, and why."""

    files: list[DataFile]
    because: str


def choose(files: Iterable[DataFile], enough: int | None = None) -> list[Group]:
    """What is to be rewritten now: at least one group if any is due, and others up to the limit of one round.
    `enough`: so many files of any tier are worth it."""
    partitions: dict[frozenset[tuple[str, str | None]], list[DataFile]] = {}
    for file in files:
        partitions.setdefault(frozenset(file.partition_values.items()), []).append(file)
    chosen: list[Group] = []
    left = _AT_MOST
    for together in partitions.values():
        group = _mostly_gone(together) or _choose(_runs(together), enough)
        if group is None:
            continue
        size = sum(file.size for file in group.files)
        if chosen and size > left:
            continue
        chosen.append(group)
        left -= size
    return chosen


def _mostly_gone(files: list[DataFile]) -> Group | None:
    for file in files:
        if file.rows and file.deleted > _GONE * file.rows and file.deleted > 1000:
            return Group([file], f"{file.deleted} of its {file.rows} rows are gone")
    return None


def _runs(files: list[DataFile]) -> list[list[DataFile]]:
    """Files of one run together, every other one for itself."""
    found: dict[str, list[DataFile]] = {}
    for file in files:
        found.setdefault(run_of(file.name) or file.name, []).append(file)
    return list(found.values())


def _choose(runs: list[list[DataFile]], enough: int | None) -> Group | None:
    sized = sorted(((sum(file.size for file in run), run) for run in runs), key=lambda each: each[0])
    low = 0
    for high, many in _TIERS:
        tier = [(size, run) for size, run in sized if low <= size < high]
        if len(tier) >= (enough or many):
            total = np.cumsum([size for size, _ in tier])
            taken = tier[: max(2, int(np.searchsorted(total, _AT_MOST)))]
            return Group([file for _, run in taken for file in run], f"{len(tier)} files below {high} bytes")
        low = high
    return None


Source = tuple[DataFile, BitMap]
"""A file, and which of its rows were gone when it was read."""


def as_read(state: LiveTable, groups: list[Group]) -> list[tuple[list[Source], str]]:
    """The groups with what is gone of their files now, in the writer's turn; and why each is rewritten."""
    return [([(file, state.deleted_rows(file.name)) for file in group.files], group.because) for group in groups]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """`sources` as they were read; `added`: what was made of the rest, with the codes of the keys in each (None: the
    table has no key). `order`: of the rows that were alive, in that of the sources, the place of each among the new
    ones; None: the same."""

    sources: list[Source]
    added: list[tuple[DataFile, Codes | None]]
    because: str
    order: Int64 | None = None

    @property
    def files(self) -> list[DataFile]:
        return [file for file, _ in self.added]

    def rows_gone_since(self, now: Callable[[str], BitMap]) -> list[BitMap]:
        """Of each new file, the rows that were deleted from the old ones after these were read."""
        found: list[Int64] = [np.zeros(0, dtype=np.int64)]
        first = 0
        for file, before in self.sources:
            gone = np.array(now(file.name) - before, dtype=np.int64)
            # A row's number among those that were alive.
            rank = gone - np.array([before.rank(int(row)) for row in gone], dtype=np.int64)
            found.append(first + rank)
            first += (file.rows or 0) - len(before)
        rows = np.concatenate(found)
        if self.order is not None:
            rows = self.order[rows]
        rows.sort()
        ends = np.cumsum([0, *(file.rows or 0 for file in self.files)])
        cuts = np.searchsorted(rows, ends)
        return [
            BitMap((rows[low:high] - start).astype(np.uint32))
            for low, high, start in zip(cuts, cuts[1:], ends, strict=False)
        ]


def rewrite(
    folder: str,
    schema: TableSchema,
    metadata: Action,
    sources: list[Source],
    because: str,
    still_wanted: Callable[[], None],
) -> Rewritten:
    """Make one file, or run, of the live rows of `sources`, which are of one partition; `metadata`: the table's.
    `still_wanted` raises when it is not."""
    kind, layout = stored_schema(metadata), layout_of(metadata)
    if schema.cluster_by:
        added, order = rewrite_in_order(folder, schema, sources, kind, layout, still_wanted)
        return Rewritten(sources, added, because, order)
    codes: list[Codes] = []

    def batches() -> Iterator[pa.Table]:
        for file, deleted in sources:
            for batch in live_batches(folder, file, deleted, kind, layout):
                still_wanted()
                if schema.key:
                    codes.append(encode(schema, batch.select(list(schema.key))))
                yield batch

    file = write_batches(folder, kind, batches(), layout, beside=sources[0][0])
    return Rewritten(sources, [(file, Codes.joined(codes) if codes else None)], because)


class Upkeep:
    """One thread for the upkeep of all tables of a driver; `close` ends it.

    Lanes come here side by side. What they share is copied before it is gone through: even `list` of a dictionary's
    items makes objects, at which Python may collect garbage, and let another thread change it.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headwater-upkeep")
        self._running: dict[str, Future[list[Rewritten]]] = {}
        self._seen: dict[str, int] = {}  # the version at the last look
        self._due: dict[str, float] = {}  # folders that were due while the thread rested, and their last commits
        self._begun: dict[str, float] = {}  # when files of each were looked at last
        self._rests_until = 0.0
        self._stop = Event()

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for folder in list(self._running):
            self.leave(folder)

    def after_commit(self, folder: str, state: LiveTable, schema: TableSchema) -> None:
        """In the writer's turn, behind the ledger or because it is `next_idle`: commit what is ready, begin what is
        due."""
        last, self._seen[folder] = self._seen.get(folder, state.version - 1), state.version
        every = int(state.snapshot.configuration.get("delta.checkpointInterval", "10"))
        if state.version // every > last // every:
            self._pool.submit(_checkpoint, folder)
        running = self._running.get(folder)
        if running is not None:
            if running.done():
                del self._running[folder]
                self.finish(folder, state, running)
            return
        now, idle = time.monotonic(), state.version == last
        if not idle and (folder in self._due or state.version // _LOOK_EVERY > last // _LOOK_EVERY):
            self._due[folder] = now
        if folder in self._due and self._rested and (idle or self._is_next(folder, now)):
            del self._due[folder]
            self._begun[folder] = now
            groups = choose(state.snapshot.files.values())
            if groups:
                read = as_read(state, groups)
                metadata = state.snapshot.metadata
                self._running[folder] = self._pool.submit(self.rewrite_all, folder, schema, read, metadata)

    def leave(self, folder: str) -> None:
        """Somebody else writes it now."""
        self._due.pop(folder, None)
        running = self._running.pop(folder, None)
        if running is not None:
            running.add_done_callback(partial(_discard_rewritten, folder))

    @property
    def waits(self) -> bool:
        """Whether a folder waits for its turn."""
        return bool(self._due or self._running)

    def next_idle(self, idle: Collection[str]) -> str | None:
        """Of these folders, to which nothing is written just now, the one that is to have a turn all the same: what was
        made of its files waits to be committed, or none of them has waited longer for its turn."""
        for folder, one in self._running.copy().items():
            if one.done() and folder in idle:
                return folder
        due = [folder for folder in list(self._due) if folder in idle] if self._rested else []
        return min(due, key=lambda folder: self._begun.get(folder, 0.0), default=None)

    @property
    def _rested(self) -> bool:
        return time.monotonic() >= self._rests_until and all(one.done() for one in self._running.copy().values())

    def _is_next(self, folder: str, now: float) -> bool:
        """Whether none has waited longer that is written to just now: of tables that are written one behind the other
        it would always be the first one's turn."""
        waiting = [other for other, at in self._due.copy().items() if at >= now - _LONGEST_REST]
        return min(waiting, key=lambda other: self._begun.get(other, 0.0)) == folder

    def rewrite_all(
        self, folder: str, schema: TableSchema, groups: list[tuple[list[Source], str]], metadata: Action
    ) -> list[Rewritten]:
        """One file, or run, of each group. Beside the writer: nothing of the table changes."""
        began = time.monotonic()
        done: list[Rewritten] = []
        try:
            for sources, because in groups:
                done.append(rewrite(folder, schema, metadata, sources, because, self._refuse_to_go_on))
        except BaseException:
            discard(folder, [file for one in done for file in one.files])
            raise
        finally:
            now = time.monotonic()
            self._rests_until = now + min(_REST * (now - began), _LONGEST_REST)
        return done

    def _refuse_to_go_on(self) -> None:
        """InterruptedError when the driver ends."""
        if self._stop.is_set():
            raise InterruptedError

    def finish(self, folder: str, state: LiveTable, running: Future[list[Rewritten]]) -> None:
        """Commit what was rewritten, less the rows that were deleted meanwhile."""
        error = running.exception()
        if error is not None:
            log.warning("%s: its files could not be rearranged: %s", folder, error)
            return
        self.commit(folder, state, running.result())

    def commit(self, folder: str, state: LiveTable, rewritten: list[Rewritten]) -> bool:
        """Whether new files took the old ones' place; when somebody else was faster, nothing has changed."""
        live = state.snapshot.files
        done, late = list[Rewritten](), list[Rewritten]()
        for one in rewritten:
            # Not there any more: truncated, or rearranged by somebody else meanwhile.
            (done if all(file.name in live for file, _ in one.sources) else late).append(one)
        discard(folder, [file for one in late for file in one.files])
        if not done:
            return False
        gone = {
            file.name: rows
            for one in done
            for file, rows in zip(one.files, one.rows_gone_since(state.deleted_rows), strict=True)
        }
        touched = {name: rows for name, rows in gone.items() if rows}
        vectors = write_vectors(folder, touched) if touched else {}
        added = [
            (delta_log.with_vector(file, vectors[file.name]) if file.name in vectors else file, codes)
            for one in done
            for file, codes in one.added
        ]
        actions = self._actions(state, done, [file for file, _ in added])
        try:
            delta_log.commit(folder, state.version + 1, actions)
        except LostRace:
            discard(folder, [file for file, _ in added])
            discard_vectors(folder, [file for file, _ in added])
            return False  # the next batch looks what has happened
        state.follow_own(actions, {}, [Added(file, codes, gone[file.name]) for file, codes in added])
        return True

    def _actions(self, state: LiveTable, done: list[Rewritten], added: list[DataFile]) -> list[Action]:
        removed = [state.snapshot.files[file.name] for one in done for file, _ in one.sources]
        metrics = {"numRemovedFiles": len(removed), "numAddedFiles": len(added)}
        because = "; ".join(sorted({one.because for one in done}))
        return [
            delta_log.commit_info("OPTIMIZE", {"because": because}, metrics, state.version),
            delta_log.transaction(self._fence.app_id, self._fence.generation),
            *(delta_log.remove(file, data=False) for file in removed),
            *(delta_log.add(file, data=False) for file in added),
        ]


def _discard_rewritten(folder: str, done: Future[list[Rewritten]]) -> None:
    if not done.cancelled() and done.exception() is None:
        discard(folder, [file for one in done.result() for file in one.files])


def _checkpoint(folder: str) -> None:
    try:
        write_checkpoint(folder)
    except Exception as error:  # a table without a new checkpoint is slower to open, and nothing else
        log.warning("%s: no checkpoint was written: %s", folder, error)
