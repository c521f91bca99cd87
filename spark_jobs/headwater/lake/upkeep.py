"""Upkeep of the directly written tables beside their writer: many small files made into one, and checkpoints.

Every batch leaves a small file. As in a log-structured merge tree, files are gathered by size: as soon as enough of
one tier are there, one of the next is made of them, so a row is written anew only a few times in its life. Files of
which most rows are gone are made anew as well. The rewriting works on files that never change, beside the writer; the
commit is made in the writer's turn and takes along what was deleted meanwhile, so neither ever waits for the other
and no race is lost. Such a commit rearranges rows and changes none (`dataChange` false).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import DeltaTable
from pyroaring import BitMap

from headwater.arrow_types import lake_schema
from headwater.lake import delta_log
from headwater.lake.commits import LostRace
from headwater.lake.data_files import live_batches, write_batches
from headwater.lake.deletion_vectors import write_vectors
from headwater.lake.delta_log import DataFile
from headwater.lake.key_codes import Codes, encode
from headwater.lake.positional import Fence
from headwater.lake.table_state import Added, TableState
from headwater.schema import TableSchema

log = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]

_TIERS = (256 << 10, 4 << 20, 64 << 20)
"""Upper ends of the tiers, bytes; larger files are left as they are."""
_ENOUGH = 16
_AT_MOST = 256 << 20
_LOOK_EVERY = 8


def choose(files: list[DataFile]) -> tuple[list[DataFile], str]:
    """The files to be made into one, and why; none when there is nothing to do."""
    files = [file for file in files if file.rows is not None]  # without the number no row of the new file is known
    for file in files:
        if file.rows and file.deleted * 2 > file.rows and file.deleted > 1000:
            return [file], "most of its rows are gone"
    low = 0
    for high in _TIERS:
        tier = sorted((file for file in files if low <= file.size < high), key=lambda file: file.size)
        if len(tier) >= _ENOUGH:
            total = np.cumsum([file.size for file in tier])
            return tier[: max(2, int(np.searchsorted(total, _AT_MOST)))], f"{len(tier)} files below {high} bytes"
        low = high
    return [], ""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """`sources` as they were read, each with the rows that were gone then; `added`: what was made of the rest."""

    sources: list[tuple[DataFile, BitMap]]
    added: DataFile
    codes: Codes | None
    because: str

    def rows_gone_since(self, now: dict[str, BitMap]) -> BitMap:
        """Rows of the new file that were deleted from the old ones after these were read."""
        found, first = BitMap(), 0
        for file, before in self.sources:
            gone = np.array(now[file.name] - before, dtype=np.int64)
            # A row's number in the new file: its rank among the rows that were alive.
            rank = gone - np.array([before.rank(int(row)) for row in gone], dtype=np.int64)
            found |= BitMap((first + rank).astype(np.uint32))
            first += (file.rows or 0) - len(before)
        return found


class Upkeep:
    """One thread for the upkeep of all tables of a driver; `close` ends it."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headwater-upkeep")
        self._running: dict[str, Future[Rewritten]] = {}
        self._seen: dict[str, int] = {}  # the version at the last look
        self._stop = Event()

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def after_commit(self, folder: str, state: TableState, schema: TableSchema) -> None:
        """In the writer's turn, behind the ledger: commit what is ready, begin what is due."""
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
        if state.version // _LOOK_EVERY > last // _LOOK_EVERY:
            files, because = choose(list(state.snapshot.files.values()))
            if files:
                sources = [(file, state.deleted_rows(file.name)) for file in files]
                self._running[folder] = self._pool.submit(self.rewrite, folder, schema, sources, because)

    def rewrite(
        self, folder: str, schema: TableSchema, sources: list[tuple[DataFile, BitMap]], because: str
    ) -> Rewritten:
        """Make one file of the live rows of `sources`. Beside the writer: nothing of the table changes."""
        codes: list[Codes] = []

        def batches() -> Iterator[pa.Table]:
            for file, deleted in sources:
                for batch in live_batches(folder, file, deleted, lake_schema(schema)):
                    if self._stop.is_set():
                        raise InterruptedError
                    if schema.key:
                        codes.append(encode(schema, batch.select(list(schema.key))))
                    yield batch

        added = write_batches(folder, lake_schema(schema), batches())
        return Rewritten(sources, added, Codes.joined(codes) if codes else None, because)

    def finish(self, folder: str, state: TableState, running: Future[Rewritten]) -> None:
        """Commit what was rewritten, less the rows that were deleted meanwhile."""
        error = running.exception()
        if error is not None:
            log.warning("%s: its files could not be rearranged: %s", folder, error)
            return
        rewritten = running.result()
        live = state.snapshot.files
        if any(file.name not in live for file, _ in rewritten.sources):
            # Truncated or rearranged by somebody else meanwhile.
            (Path(folder) / rewritten.added.name).unlink(missing_ok=True)
            return
        gone = rewritten.rows_gone_since({file.name: state.deleted_rows(file.name) for file, _ in rewritten.sources})
        added = rewritten.added
        if gone:
            added = delta_log.with_vector(added, write_vectors(folder, {added.name: gone})[added.name])
        actions = [
            delta_log.commit_info(
                "OPTIMIZE",
                {"because": rewritten.because},
                {"numRemovedFiles": len(rewritten.sources), "numAddedFiles": 1},
                state.version,
            ),
            delta_log.transaction(self._fence.app_id, self._fence.generation),
            *(delta_log.remove(live[file.name], data=False) for file, _ in rewritten.sources),
            delta_log.add(added, data=False),
        ]
        try:
            delta_log.commit(folder, state.version + 1, actions)
        except LostRace:
            (Path(folder) / rewritten.added.name).unlink(missing_ok=True)
            return  # the next batch looks what has happened
        state.follow_own(actions, {}, [Added(added, rewritten.codes, gone)])


def _checkpoint(folder: str) -> None:
    try:
        DeltaTable(folder).create_checkpoint()
        # Hadoop would compare the new pointer with the checksum of the one that Spark wrote before.
        with contextlib.suppress(FileNotFoundError):
            (Path(folder) / "_delta_log" / "._last_checkpoint.crc").unlink()
    except Exception as error:  # a table without a new checkpoint is slower to open, and nothing else
        log.warning("%s: no checkpoint was written: %s", folder, error)
