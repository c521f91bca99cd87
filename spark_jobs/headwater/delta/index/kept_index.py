"""What a table's state does with its kept index (`index_cache`): begins with it, and saves it beside the writer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

import numpy as np

from headwater.delta.index.cache import IndexCache, Manifest, Subject, commit_digest, open_cache
from headwater.delta.index.index import KeyIndex, file_of
from headwater.delta.index.runs import Bool, Int64, KeyRun, RunFile, Stored, merged

log = logging.getLogger(__name__)

WORTH_KEEPING = 200_000
"""Entries; below, reading the keys anew takes a fraction of a second."""
_SAVE_EVERY = 300.0
"""Seconds between two savings while the driver runs."""
_WORD = 8

Files = tuple[tuple[int, str, int], ...]


class KeptIndex:
    """Of one table. All but what `save` hands to the executor happens in the writer's turn."""

    def __init__(self, subject: Subject, generation: int) -> None:
        self._subject, self._generation = subject, generation
        self._cache: IndexCache | None = None
        self._closed = False
        self._opening = threading.Lock()
        self._saving: Future[set[str]] | None = None
        self._saved_at = time.monotonic()
        self._saved_version = -1

    def folder(self) -> str | None:
        """Where large runs get their files; None when nothing can be kept."""
        with self._opening:  # by the writer, or by the thread that merges
            if self._cache is None and not self._closed:
                # Asked again each time: a driver that hands over to this one holds it until it has ended.
                self._cache = open_cache(self._subject, make=True)
                if self._cache is not None:
                    self._cache.clear()  # of an index that this one does not go on with
            return str(self._cache.path) if self._cache is not None else None

    def restore(self, version: int) -> tuple[Manifest, list[KeyRun]] | None:
        """The index as it was saved, if the table at `version` has come from there."""
        with self._opening:
            self._cache = self._cache or open_cache(self._subject, make=False)
        found = self._cache.read(version, self._generation) if self._cache is not None else None
        if found is not None:
            self._saved_version = found[0].version
        return found

    def is_due(self, version: int) -> bool:
        return self._saving is None and version != self._saved_version and self._seconds() > _SAVE_EVERY

    def save(
        self, index: KeyIndex, version: int, numbers: int, files: Files, live: Callable[[Int64], Bool], beside: Executor
    ) -> None:
        """Begin to save `index`, which is that of `version`, whose `files` have these numbers."""
        self.collect(index)
        folder = self.folder() if len(index) >= WORTH_KEEPING else None
        if self._saving is not None or folder is None or version == self._saved_version:
            return
        self._saved_at, self._saved_version = time.monotonic(), version
        runs = index.capture()
        alive = live(np.arange(numbers))

        def write() -> set[str]:
            assert self._cache is not None
            stored = _all_on_disk(runs, folder, alive)
            size = sum(one.capacity * len(one.checksums) * _WORD for one in stored)
            if not self._cache.has_room(size):
                raise OSError("the disk is nearly full, or the indexes of other tables, in use, leave no room")
            commit = commit_digest(self._subject.folder, version)
            self._cache.write(Manifest(version, commit, self._generation, numbers, files, stored))
            return {one.name for one in stored}

        self._saving = beside.submit(write)

    def collect(self, index: KeyIndex) -> None:
        """Take note of a saving that has ended."""
        saving = self._saving
        if saving is None or not saving.done():
            return
        self._saving = None
        error = None if saving.cancelled() else saving.exception()
        if error is not None:
            log.warning("%s: the index of its keys was not saved: %s", self._subject.folder, error)
        elif not saving.cancelled():
            index.saved(saving.result())

    def close(self, index: KeyIndex) -> None:
        """Wait for what is being saved, and let go of the folder."""
        if self._saving is not None:
            wait([self._saving])
        self.collect(index)
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self._closed = True

    def _seconds(self) -> float:
        return time.monotonic() - self._saved_at


def _all_on_disk(runs: list[KeyRun], folder: str, alive: Bool) -> tuple[Stored, ...]:
    """The runs with those in memory, neighbours as one, written to files as well."""
    found: list[Stored] = []
    waiting: list[KeyRun] = []

    def write() -> None:
        if waiting:
            words = 1 if waiting[0].codes.second is None else 2
            sink = RunFile(folder, sum(map(len, waiting)), words)
            run = merged(waiting, lambda places: alive[file_of(places)], sink)
            waiting.clear()
            found.extend([run.stored] if run.stored is not None else [])

    for run in runs:
        if run.stored is None:
            waiting.append(run)
        else:
            write()
            found.append(run.stored)
    write()
    return tuple(found)
