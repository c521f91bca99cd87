"""The loop of a running driver: seal a batch, apply it, publish, confirm; and what is done while nothing comes.

Order in the loop: every table of a batch commits, then the ledger row, then the position file, and only then is the
slot confirmed.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from headwater.config import Pipeline
from headwater.errors import Fenced, Transient
from headwater.failpoints import reach
from headwater.jobs.applying import Batch, Tables
from headwater.jobs.catalog_watch import CatalogWatch
from headwater.jobs.handovers import Handovers
from headwater.jobs.publisher import Publisher
from headwater.jobs.reader import LogReader
from headwater.lake.ledger import Ledger
from headwater.log.blocks import Chunk
from headwater.position import Position

log = logging.getLogger(__name__)


IDLE_ROW_SECONDS = 10.0
_SEAL_LOOK_SECONDS = 0.02


@dataclass(slots=True)
class Totals:
    """What the run has done, for its report."""

    epochs: int = 0
    transactions: int = 0
    changes: int = 0
    per_table: dict[str, int] = field(default_factory=dict)


class Driver:
    """One run over `reader`'s chunks; `report` says afterwards what it did."""

    def __init__(
        self,
        pipeline: Pipeline,
        ledger: Ledger,
        tables: Tables,
        publisher: Publisher,
        reader: LogReader,
        position: Position,
        watch: CatalogWatch,
        handovers: Handovers,
    ) -> None:
        self._limits = pipeline.replicate
        self._ledger, self._tables, self._publisher, self._reader = ledger, tables, publisher, reader
        self._at = position
        self._watch = watch
        self._handovers = handovers
        self._totals = Totals()
        self._processed = ledger.newest.position.lsn if ledger.newest else 0
        self._last_row = 0.0
        self._next_batch = 0.0

    def run(self, target: int | None, deadline: float | None, stop: threading.Event) -> str:
        """Batches until there is a reason to stop, which is returned."""
        try:
            self._publish_states()
            while True:
                self._suspend_found()
                reason = self._why_stop(target, deadline, stop)
                if reason is not None:
                    self._rest(force=True)
                    return reason
                patience = 0.2 if deadline is None else max(0.0, min(0.2, deadline - time.monotonic()))
                self._reader.wait(patience)
                self._refuse_silence()
                self._handovers.finish_if_due()
                batch = self._collect() if self._is_due(stop) else None
                if batch is not None:
                    self._process(batch)
                else:
                    self._rest(force=self._reader.reply_wanted)
        except Fenced as fenced:
            log.warning("%s", fenced)
            return "fenced"

    def report(self, reason: str) -> dict[str, Any]:
        totals, newest = self._totals, self._ledger.newest
        return {
            "epochs": totals.epochs,
            "transactions": totals.transactions,
            "changes": totals.changes,
            "position": newest.position.to_json() if newest else None,
            "stopped_by": reason,
            "tables": {
                name: {"changes": totals.per_table.get(name, 0), "state": record.state}
                for name, record in self._tables.records.items()
            },
        }

    def _why_stop(self, target: int | None, deadline: float | None, stop: threading.Event) -> str | None:
        if self._publisher.failure is not None:
            raise self._publisher.failure
        if stop.is_set():
            return "signal"
        idle = self._reader.idle_position
        reached = max(self._processed, idle or 0)
        if target is not None and reached >= target and not self._tables.withholding(reached):
            return "until"
        if deadline is not None and time.monotonic() >= deadline:
            return "seconds"
        return None

    def _suspend_found(self) -> None:
        """Suspend what the catalog watch has found: the log itself would never say it."""
        found = [self._tables.suspend(name, error) for name, error in self._watch.take()]
        if any(found):
            self._publish_states()
            self._publisher.write()

    def _refuse_silence(self) -> None:
        """A driver that has heard nothing from the server may have lost the slot: it commits nothing more."""
        silence = time.monotonic() - self._reader.heard
        if silence > self._tables.silence_limit:
            raise Transient(
                f"the server has not answered for {silence:.0f} s: the slot may be another driver's by now",
                code="silent_source",
                where="log connection",
                remedy="run replicate again; it goes on from the ledger",
            )

    def _is_due(self, stop: threading.Event) -> bool:
        """Batches begin `max_seconds` apart: each costs a commit and a file per table. The first one after a pause,
        one that somebody waits for, and one that is full begin at once."""
        left = self._next_batch - time.monotonic()
        waiting = self._reader.waiting()
        wanted = self._reader.reply_wanted or any(chunk.demand for chunk in waiting)
        if left <= 0 or not waiting or wanted:
            return True
        full = sum(chunk.changes for chunk in waiting) >= self._limits.max_rows
        if full or sum(chunk.size for chunk in waiting) >= self._limits.max_bytes:
            return True
        stop.wait(min(left, _SEAL_LOOK_SECONDS))
        return False

    def _collect(self) -> Batch | None:
        """The next batch: everything that waits, up to the limits."""
        batch = Batch()
        deadline = time.monotonic() + self._limits.max_seconds
        while (chunk := self._next_chunk(batch)) is not None:
            batch.chunks.append(chunk)
            self._reader.taken(chunk.size)
            full = batch.changes >= self._limits.max_rows or batch.size >= self._limits.max_bytes
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

    def _process(self, batch: Batch) -> None:
        started = time.monotonic()
        self._next_batch = started + self._limits.max_seconds
        outcome = self._tables.apply(batch, self._refuse_silence)
        reach("replicate.after_all_tables")
        applied = time.monotonic()
        self._processed = max(self._processed, batch.read_position)
        totals = self._totals
        totals.transactions += batch.transaction_count
        for name, version in outcome.touched.items():
            totals.changes += version.rows
            totals.per_table[name] = totals.per_table.get(name, 0) + version.rows
        if self._tables.touched_since_row() or outcome.changed_states:
            self._publish_row(batch.read_position, applied - started, batch)
        else:
            self._publisher.passed(batch.read_position)
            self._rest(force=False)
            if batch.demand:
                self._publisher.write()  # somebody waits for exactly this position

    def _rest(self, *, force: bool) -> None:
        """Nothing to apply: let ledger and slot follow a log that moved, at most every ten seconds unless forced."""
        idle = self._reader.idle_position
        if idle is not None:
            self._processed = max(self._processed, idle)
        newest = self._ledger.newest
        moved = newest is None or self._processed > newest.position.lsn
        # Tables found ahead of the ledger (after a crash) are published as soon as the log has reached them.
        waiting = bool(self._tables.touched_since_row())
        due = newest is None or waiting or time.monotonic() - self._last_row >= IDLE_ROW_SECONDS
        if moved and (force or due):
            self._publish_row(self._processed, 0.0, None)
        elif force:
            # What the ledger holds may be confirmed again: a server that shuts down waits for it.
            self._reader.confirm(newest.position.lsn if newest else 0)

    def _publish_row(self, lsn: int, apply_seconds: float, batch: Batch | None) -> None:
        tables = self._tables
        if tables.withholding(lsn):
            return
        tables.join_cuts(lsn)
        reach("replicate.before_ledger")
        stages = {"apply": round(apply_seconds, 4)}
        epoch = self._ledger.publish(
            self._at.at(lsn),
            tables.touched_since_row(),
            all_tables=tables.versions(),
            source_time=batch.source_time if batch is not None else None,
            sample=self._publisher.last_sample,
            stages=stages,
        )
        self._totals.epochs += 1
        self._last_row = time.monotonic()
        written = tables.touched_since_row()
        tables.row_written()
        reach("replicate.after_ledger")
        rate = batch.size / apply_seconds if batch is not None and apply_seconds > 0 else 0.0
        self._publisher.published(epoch, tables.records, {"apply_bytes_per_second": round(rate, 1)})
        reach("replicate.after_position_file")
        reach("replicate.before_confirm")
        self._reader.confirm(lsn)
        reach("replicate.after_confirm")
        tables.keep_up(written)

    def _publish_states(self) -> None:
        self._publisher.states(self._tables.records)
