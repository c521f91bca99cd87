"""Where the rows of a table lie, by key: sorted runs, newest first, in memory or in files of the local disk.

A cache of the lake, never its truth: built from key columns, dropped at will. An entry says "the row with this key
was put at this place"; whether it still stands there, the table's live files and their deletion vectors know. The
newest entry of a key supersedes the older ones, so a key that it does not lead to a live row has none.

Runs are merged as in a log-structured merge tree. Small ones at once; large ones beside the writer, whose turn only
swaps the result in: the entries put meanwhile lie in newer runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.runs import (
    NOWHERE,
    Abandoned,
    Bool,
    Int64,
    KeyRun,
    RunFile,
    merged,
    part_of,
    remove_runs,
    run_of,
    sorted_run,
)
from headwater.schema import TableSchema

__all__ = ["NOWHERE", "KeyIndex", "KeySet", "file_of", "place_of", "row_of"]

log = logging.getLogger(__name__)

_ROW_BITS = 32
_ON_DISK_ABOVE = 1 << 21
"""More entries than so many are kept on disk: mapped, so that the memory is the page cache's to give and to take."""
_LOOKED_UP = 1 << 16
"""Keys after which the mapped pages that their look-ups have touched are let go."""
_AT_ONCE = 1 << 17
"""Entries that are merged in the writer's turn: some ten milliseconds."""


@dataclass(slots=True)
class _Merge:
    """`runs` are being made into one, beside the writer."""

    runs: list[KeyRun]
    result: Future[KeyRun]


class KeyIndex:
    """Places by key. A place is a file's number and a row's number in it, packed into 64 bits by `place_of`.

    One thread at a time; merging goes on in `beside` (None: in the writer's turn after all).
    """

    def __init__(
        self,
        live: Callable[[], Bool] | None = None,
        beside: Executor | None = None,
        folder: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`live`: which file numbers are files of the table now (None: all); entries of others are forgotten.

        `folder`: where large runs get files with names; None: they have none.
        """
        self._live = live
        self._beside = beside
        self._folder = folder
        self._runs: list[KeyRun] = []  # oldest first
        self._merge: _Merge | None = None
        self._pinned: set[str] = set()  # files that the saved state needs, or one that is being saved
        self._closed = False
        self._looked_up = 0

    def work_beside(self, beside: Executor, folder: Callable[[], str | None]) -> None:
        """From now on large runs are merged in `beside` and get files in `folder`."""
        self._beside, self._folder = beside, folder

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def put(self, codes: Codes, places: Int64) -> None:
        """These keys stand at these places now. No key may occur twice in one call."""
        if not len(codes):
            return
        self._runs.append(sorted_run(codes, places))
        self._settle()

    def build(self, parts: Iterable[tuple[Codes, Int64]], *, in_order: bool = False) -> None:
        """As one `put` of all parts, of any size: no more than some of them are in memory. No key may occur twice.
        `in_order`: the entries of each part are, by their codes."""
        waiting: list[tuple[Codes, Int64]] = []
        runs: list[KeyRun] = []

        def as_run() -> None:
            codes, places = Codes.joined([c for c, _ in waiting]), np.concatenate([p for _, p in waiting])
            run = run_of(codes, places) if in_order else sorted_run(codes, places)
            waiting.clear()
            runs.append(run if not runs and len(run) <= _ON_DISK_ABOVE else self._on_disk(run))

        try:
            for codes, places in parts:
                if len(codes):
                    waiting.append((codes, places))
                if waiting and (in_order or sum(len(places) for _, places in waiting) > _ON_DISK_ABOVE):
                    as_run()
            if waiting:
                as_run()
            if len(runs) > 1:
                whole = self._merged(runs)
                self._forget(runs)
                runs = [whole]
        except BaseException:
            self._forget(runs)
            raise
        self._runs += runs
        self._settle()

    def find(self, codes: Codes) -> Int64:
        """The newest place of each key, NOWHERE for keys that were never put."""
        self._take_merged()
        order = np.argsort(codes.first)  # neighbours in the run are met one after the other
        wanted = codes.take(order)
        sorted_found = np.full(len(codes), NOWHERE, dtype=np.int64)
        open_ = np.arange(len(codes))
        for run in reversed(self._runs):
            if not len(open_):
                break
            sorted_found[open_] = run.look_up(wanted.take(open_))
            open_ = open_[sorted_found[open_] == NOWHERE]
        found = np.empty(len(codes), dtype=np.int64)
        found[order] = sorted_found
        self._looked_up += len(codes)
        if self._looked_up >= _LOOKED_UP:
            self._looked_up = 0
            for run in self._runs:
                run.let_pages_go()
        return found

    def capture(self) -> list[KeyRun]:
        """All runs as they are now, oldest first, to be saved; their files stay until `saved` or the next capture."""
        self._take_merged()
        self._pinned |= {run.stored.name for run in self._runs if run.stored is not None}
        return list(self._runs)

    def saved(self, names: set[str]) -> None:
        """What was captured has been saved and needs these files; older ones may go."""
        gone = self._pinned - names - self._named()
        self._pinned = names
        self._unlink(gone)

    def adopt(self, runs: list[KeyRun]) -> None:
        """Begin with runs that were saved. Nothing may have been put before."""
        self._runs = list(runs)
        self._pinned = self._named()

    def as_it_is(self) -> KeyIndex:
        """The same keys at the same places, whatever is put here from now on; another thread may look them up."""
        self._take_merged()
        found = KeyIndex()
        found._runs = list(self._runs)
        return found

    def take(self, other: KeyIndex) -> None:
        """All that `other` holds, as the newest here. It is not used any more."""
        self._take_merged()
        self._runs += other._runs
        self._settle()

    def keys(self) -> Iterator[Codes]:
        """All that were ever put, in parts; some of them several times."""
        for run in self._runs:
            for first in range(0, len(run), _LOOKED_UP):
                yield part_of(run.codes, first, first + _LOOKED_UP)
            run.let_pages_go()

    def close(self) -> None:
        """End what runs beside the writer; the index can still be looked up."""
        self._closed = True
        if self._merge is not None and not self._merge.result.cancel():
            self._merge.result.exception()
        self._take_merged()

    def _settle(self) -> None:
        self._take_merged()
        while self._ripe() and sum(len(run) for run in self._runs[-2:]) <= _AT_ONCE:
            self._runs[-2:] = [self._merged(self._runs[-2:])]
        self._begin_merge()
        # A large commit puts faster than runs are merged beside it.
        waiting = self._waiting_in_memory()
        if sum(map(len, waiting)) > _ON_DISK_ABOVE:
            self._runs[-len(waiting) :] = [self._merged(waiting, on_disk=True)]

    def _waiting_in_memory(self) -> list[KeyRun]:
        """The newest runs that are neither on disk nor being merged."""
        first = len(self._runs)
        merging = self._merge.runs if self._merge is not None else []
        while first > 0 and self._runs[first - 1].mapping is None and self._runs[first - 1] not in merging:
            first -= 1
        return self._runs[first:]

    def _named(self) -> set[str]:
        return {run.stored.name for run in self._runs if run.stored is not None}

    def _ripe(self) -> bool:
        """Whether the two newest runs are to be one. Each entry is merged a number of times that grows with the
        logarithm of all."""
        if len(self._runs) < 2 or len(self._runs[-1]) * 2 < len(self._runs[-2]):
            return False
        return self._merge is None or self._runs[-2] not in self._merge.runs

    def _begin_merge(self) -> None:
        """Beside the writer: the newest neighbours that are large enough together."""
        if self._merge is not None or self._closed:
            return
        first, end = self._ripe_neighbours()
        chosen = self._runs[first:end]
        if len(chosen) < 2:
            return
        if self._beside is None:
            self._runs[first:end] = [self._merged(chosen)]
            self._forget(chosen)
        else:
            submitted = self._beside.submit(self._merged, chosen, live=self._live_now(chosen), stop=self._is_closed)
            self._merge = _Merge(chosen, submitted)

    def _ripe_neighbours(self) -> tuple[int, int]:
        """First and end of some runs of which the newer ones together are at least half of each older one."""
        sizes = [len(run) for run in self._runs]
        for newest in range(len(sizes) - 1, 0, -1):
            first, total = newest, sizes[newest]
            while first > 0 and total * 2 >= sizes[first - 1]:
                first -= 1
                total += sizes[first]
            if first < newest:
                return first, newest + 1
        return 0, 0

    def _take_merged(self) -> None:
        """Put the finished run in the place of those that it was made of."""
        merge = self._merge
        if merge is None or not merge.result.done():
            return
        self._merge = None
        if merge.result.cancelled():
            return
        error = merge.result.exception()
        if error is not None:
            if not isinstance(error, Abandoned):
                log.warning("runs of an index of keys could not be merged, it goes on with more of them: %s", error)
            return
        first = next(at for at, run in enumerate(self._runs) if run is merge.runs[0])
        self._runs[first : first + len(merge.runs)] = [merge.result.result()]
        self._forget(merge.runs)

    def _is_closed(self) -> bool:
        return self._closed

    def _merged(
        self,
        runs: list[KeyRun],
        *,
        live: Bool | None = None,
        on_disk: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> KeyRun:
        known = self._live_now(runs) if live is None else live
        total = sum(len(run) for run in runs)
        sink = None
        if on_disk or total > _ON_DISK_ABOVE:
            sink = self._file_for(total, 1 if runs[0].codes.second is None else 2)
        try:
            return merged(runs, lambda places: known[file_of(places)], sink, stop)
        except BaseException:
            if sink is not None:
                sink.discard()
            raise

    def _on_disk(self, run: KeyRun) -> KeyRun:
        sink = self._file_for(len(run), 1 if run.codes.second is None else 2)
        try:
            sink.write(run.codes, run.place)
            return sink.finish()
        except BaseException:
            sink.discard()
            raise

    def _file_for(self, entries: int, words: int) -> RunFile:
        folder = self._folder()
        try:
            return RunFile(folder, entries, words)
        except OSError:
            if folder is None:
                raise
            return RunFile(None, entries, words)  # somebody removed the folder, or it is full

    def _live_now(self, runs: list[KeyRun]) -> Bool:
        if self._live is not None:
            return self._live()
        most = max((int(file_of(run.place).max()) for run in runs if len(run)), default=-1)
        return np.ones(most + 1, dtype=np.bool_)

    def _forget(self, runs: list[KeyRun]) -> None:
        self._unlink({run.stored.name for run in runs if run.stored is not None} - self._pinned)

    def _unlink(self, names: set[str]) -> None:
        folder = self._folder() if names else None
        if folder is not None:
            remove_runs(folder, names)


class KeySet:
    """Some keys of a table, to be asked which rows have one of them."""

    def __init__(self, schema: TableSchema, keys: pa.Table) -> None:
        self._schema = schema
        self._index = KeyIndex()
        self._index.put(encode(schema, keys), np.arange(keys.num_rows, dtype=np.int64))

    def has(self, rows: pa.Table) -> Bool:
        """Of which of the rows, which hold at least the key's columns, it has the key."""
        found: Bool = self.numbers(rows) != NOWHERE
        return found

    def numbers(self, rows: pa.Table) -> Int64:
        """Of each row the number of the key that it has, of equal keys the last one's; NOWHERE: it has none of them."""
        return self._index.find(encode(self._schema, rows.select(list(self._schema.key))))


def place_of(file: int, rows: Int64) -> Int64:
    return (np.int64(file) << np.int64(_ROW_BITS)) | rows


def file_of(places: Int64) -> Int64:
    return places >> np.int64(_ROW_BITS)


def row_of(places: Int64) -> Int64:
    return places & np.int64((1 << _ROW_BITS) - 1)
