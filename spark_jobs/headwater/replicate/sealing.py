"""When a batch begins, and what it takes of the chunks that wait."""

from __future__ import annotations

import time
from typing import Final

from headwater.log.blocks import Chunk
from headwater.pipeline_file.pipeline import Replicate
from headwater.replicate.batches.batch import Batch
from headwater.replicate.batches.lanes import Lanes
from headwater.replicate.batches.open_epochs import OpenEpochs
from headwater.replicate.batches.pace import Pace
from headwater.replicate.reader.handle import LogReader

_LOOK_SECONDS: Final = 0.02


class Sealing:
    """`open_epochs`: what began and is not published. Batches begin an interval apart (`pace`). One that somebody waits
    for, and one that is full, begin at once; none begins while shares of earlier ones wait for a thread, or while these
    hold as much as a batch may."""

    def __init__(self, limits: Replicate, reader: LogReader, lanes: Lanes, open_epochs: OpenEpochs, pace: Pace) -> None:
        self._limits, self._reader, self._lanes, self._open = limits, reader, lanes, open_epochs
        self.pace = pace
        self._next_batch = 0.0

    def next_batch(self) -> Batch | None:
        """The next one, sealed, if it is due. If not although chunks wait, after a short wait for the lanes."""
        batch = self._collect() if self._is_due() else None
        if batch is not None:
            self._next_batch = time.monotonic() + self.pace.interval
        return batch

    def _is_due(self) -> bool:
        left = self._next_batch - time.monotonic()
        waiting = self._reader.waiting()
        if waiting and (self._is_full(self._open.changes, self._open.size) or self._lanes.crowded):
            self._lanes.wait(_LOOK_SECONDS)
            return False
        wanted = self._reader.reply_wanted or any(chunk.demand for chunk in waiting)
        if left <= 0 or not waiting or wanted or self._is_full(*self._reader.backlog()):
            return True
        self._lanes.wait(min(left, _LOOK_SECONDS))
        return False

    def _collect(self) -> Batch | None:
        """Everything that waits, up to the limits."""
        batch = Batch()
        deadline = time.monotonic() + self._limits.max_seconds
        while (chunk := self._next_chunk(batch)) is not None:
            batch.add(chunk)
            self._reader.taken(chunk.size)
            full = self._is_full(batch.changes, batch.size)
            # Up to the newest demand that waits: a batch for each would let the log outrun a slow lake, as waiters
            # repeat their markers faster than a batch can be applied.
            sealed = chunk.demand and not any(waiting.demand for waiting in self._reader.waiting())
            if full or sealed or time.monotonic() >= deadline:
                break
        return batch if batch.chunks else None

    def _next_chunk(self, batch: Batch) -> Chunk | None:
        """A large transaction is a batch of its own: what was staged of it stands for all that the batch does."""
        waiting = self._reader.waiting()
        if batch.chunks and (batch.chunks[-1].is_large or (waiting and waiting[0].is_large)):
            return None
        return self._reader.take()

    def _is_full(self, changes: int, size: int) -> bool:
        return changes >= self._limits.max_rows or size >= self._limits.max_bytes
