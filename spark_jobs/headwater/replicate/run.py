"""What one run of `replicate` works with, and what it has done so far.

`Run` is built once, by `headwater.replicate.start`, and changed by the main thread only. The page
(`headwater.replicate.replicate`) and what it calls take it as it is; whatever else needs a part of it gets that part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from headwater.lake.cuts import table_of
from headwater.lake.durability import Durability
from headwater.lake.ledger import Epoch, Ledger
from headwater.lake.registry import TableRecord
from headwater.load.handover import Handovers
from headwater.log.large import STAGE_FROM
from headwater.position import Position
from headwater.replicate.batches.lanes import Done, Lanes
from headwater.replicate.batches.open_epochs import OpenEpoch, OpenEpochs
from headwater.replicate.batches.stage_times import ApplyRate, RowTimes
from headwater.replicate.beside.following import Following
from headwater.replicate.catalog_watch.watch import CatalogWatch
from headwater.replicate.minutes import Minutes
from headwater.replicate.publisher import Publisher
from headwater.replicate.reader.handle import LogReader
from headwater.replicate.reader.silence import Silence
from headwater.replicate.rounds import Rounds
from headwater.replicate.sampler import Sampler
from headwater.replicate.sealing import Sealing
from headwater.replicate.tables.tables import Tables
from headwater.replicate.takeover.succession import SuccessorWatch
from headwater.source.connection import Session

PATIENCE: Final = 0.2
"""Seconds that the loop waits at most for what comes without notice."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a run was started for. `until`: "now", or an LSN; `max_seconds`: of its slice; `overtime`: seconds behind it
    while no successor has come; `take_over`: from a driver that runs; `stage_from`: bytes of an open transaction from
    which on it is worked on before its commit, 0: never."""

    until: str | None
    max_seconds: float | None
    stop: threading.Event
    take_over: bool = False
    overtime: float = 0.0
    stage_from: int = STAGE_FROM

    def deadline(self) -> float | None:
        """Of a slice that begins now, by `time.monotonic`."""
        return time.monotonic() + self.max_seconds if self.max_seconds is not None else None


@dataclass(slots=True)
class Totals:
    """What the run has done, for its report."""

    epochs: int = 0
    transactions: int = 0
    changes: int = 0
    per_table: dict[str, int] = field(default_factory=dict)

    def count(self, epoch: OpenEpoch, tables: Mapping[str, TableRecord]) -> None:
        self.transactions += epoch.transactions
        for name, version in epoch.touched.items():
            if name not in tables:
                continue  # a history: its rows are the same changes
            self.changes += version.rows
            self.per_table[name] = self.per_table.get(name, 0) + version.rows


@dataclass(slots=True, kw_only=True)
class Run:
    """`log_of`: the source and the timeline whose log is read; its LSN is 0. `processed`: up to there every table holds
    all. `target` (LSN) and `deadline` (monotonic): when to stop, if anything is said of it. `last_row`: when there was
    one. `oldest`: of the commits that tables hold and no row says, when the first was made (seconds since 1970)."""

    root: str
    log_of: Position
    reader: LogReader
    silence: Silence
    tables: Tables
    lanes: Lanes
    open_epochs: OpenEpochs
    sealing: Sealing
    ledger: Ledger
    publisher: Publisher
    sampler: Sampler
    durability: Durability
    source: Session
    watch: CatalogWatch
    following: Following
    handovers: Handovers
    successor: SuccessorWatch
    speed: ApplyRate
    minutes: Minutes
    rounds: Rounds
    target: int | None
    deadline: float | None
    stop: threading.Event
    processed: int
    last_row: float = 0.0
    oldest: float | None = None
    totals: Totals = field(default_factory=Totals)

    def await_log(self) -> None:
        """Until a chunk has come, or something else is to be done; then the server is known to be there."""
        left = PATIENCE if self.deadline is None else self.deadline - time.monotonic()
        self.reader.wait(min(left, PATIENCE) if left > 0 else PATIENCE)  # past it a successor is awaited
        self.silence.refuse()

    def note(self, done: Done) -> None:
        """What a lane has done. Raises what it has failed with, if that is more than the table's matter."""
        if done.failure is not None:
            raise done.failure
        if done.result.error is not None:
            self.publisher.states(self.tables.records)
        self.reader.busy.add(done.stages, lane=done.name, took=done.ended - done.began)
        if not done.numbers and done.result.new_rows:
            self.tables.next_row.to_come(done.result.versions)
        elif not done.numbers:
            self.tables.next_row.rearranged(done.result.versions)
        self.open_epochs.resolve(done)
        if not done.numbers:
            self.following.settled(done.name, done.result)

    def passed(self, epoch: OpenEpoch) -> None:
        """Every table holds it."""
        self.processed = max(self.processed, epoch.lsn)
        self.totals.count(epoch, self.tables.records)
        self.tables.next_row.note(epoch.touched)
        if epoch.touched:
            self.oldest = min((at for at in (self.oldest, epoch.arrivals.oldest) if at is not None), default=None)
        self.tables.applied(epoch.xids)

    def published(self, row: Epoch, times: RowTimes) -> None:
        """The row was written just now."""
        self.totals.epochs += 1
        self.last_row, self.oldest = time.monotonic(), None
        if times.epoch is None:
            return
        times.written(self.last_row)
        if times.stages:
            self.publisher.latencies = times.stages
        distance = row.position.lsn - row.from_lsn
        self.speed.published(times.epoch.arrivals, distance, self.last_row, self.sampler.clock_offset)
        self.sealing.pace.applied(self.last_row - times.epoch.begun, len(times.epoch.touched))

    def keep_up(self, written: Collection[str]) -> None:
        """A row named these tables and histories: their files and checkpoints have a turn in their lanes."""
        self.tables.upkeep.written(written)
        for name in {table_of(name) for name in written}:
            self.lanes.behind(name, partial(self.tables.upkeep.keep_up, name))

    def keep_up_idle(self) -> None:
        """Nothing is to be applied: the turn of one whose upkeep waits though nothing came."""
        if (name := self.tables.upkeep.next(self.lanes.is_idle)) is not None:
            self.lanes.behind(name, partial(self.tables.upkeep.keep_up, name))

    def report(self, reason: str) -> dict[str, Any]:
        return report(self.totals, self.ledger, self.tables.records, reason, self.successor.handed_over)


def report(
    totals: Totals, ledger: Ledger, records: Mapping[str, TableRecord], reason: str, handed_over: bool = False
) -> dict[str, Any]:
    """The JSON of interface "replicate"."""
    newest = ledger.newest
    return {
        "epochs": totals.epochs,
        "transactions": totals.transactions,
        "changes": totals.changes,
        "position": newest.position.to_json() if newest else None,
        "stopped_by": reason,
        "handed_over": handed_over,
        "tables": {
            name: {
                "changes": totals.per_table.get(name, 0),
                "state": record.state,
                **({"reason": record.reason, "remedy": record.remedy} if record.state == "suspended" else {}),
            }
            for name, record in records.items()
        },
    }
