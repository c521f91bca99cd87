"""The loop of a running driver: seal a batch, give it to the lanes, publish what every table holds, confirm; and what
is done while nothing comes.

Successive batches overlap, each table at its own speed; the order behind them does not change: every table of a batch
commits, then the ledger row, then the position file. The slot is confirmed beside it, up to the newest row that is on
disk (`headwater.lake.durability`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deltalake.exceptions import DeltaError

from headwater.errors import Fenced, HeadwaterError, Transient
from headwater.failpoints import reach
from headwater.lake.cuts import table_of
from headwater.lake.durability import Durability
from headwater.lake.ledger import Ledger
from headwater.lake.registry import TableRecord
from headwater.load.handover import Handovers
from headwater.log.blocks import Chunk, Ddl, Transactions
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.replicate.batches.batch import Batch, Share
from headwater.replicate.batches.lanes import Lanes, Result
from headwater.replicate.batches.open_epochs import OpenEpoch, OpenEpochs
from headwater.replicate.batches.pace import Pace
from headwater.replicate.batches.retries import outage, reason_of
from headwater.replicate.batches.stage_times import ApplyRate, latency
from headwater.replicate.beside.following import Following
from headwater.replicate.catalog_watch.watch import CatalogWatch
from headwater.replicate.publisher import Publisher
from headwater.replicate.reader.handle import LogReader
from headwater.replicate.reader.process import RECONNECT_SECONDS
from headwater.replicate.rounds import Rounds
from headwater.replicate.tables.tables import Tables
from headwater.replicate.takeover.succession import SuccessorWatch
from headwater.source.connection import Connection

log = logging.getLogger(__name__)


IDLE_ROW_SECONDS = 10.0
_SEAL_LOOK_SECONDS = 0.02
_PATIENCE = 0.2


@dataclass(slots=True)
class Totals:
    """What the run has done, for its report."""

    epochs: int = 0
    transactions: int = 0
    changes: int = 0
    per_table: dict[str, int] = field(default_factory=dict)


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
        successor: SuccessorWatch,
        following: Callable[[Callable[[], None]], Following],
        ask: Callable[[Callable[[Connection], None]], None],
        durability: Durability,
    ) -> None:
        self._limits, self._root = pipeline.replicate, pipeline.lake_path()
        self._ledger, self._tables, self._publisher, self._reader = ledger, tables, publisher, reader
        self._at = position
        self._watch = watch
        self._handovers = handovers
        self._successor = successor
        self._following = following(self._await_server)
        self._ask = ask
        self._durability = durability
        self._totals = Totals()
        self._open = OpenEpochs()
        self._pace = Pace(pipeline.replicate.max_seconds)
        self._rounds = Rounds()
        self._speed = ApplyRate(time.monotonic())
        self._processed = ledger.newest.position.lsn if ledger.newest else 0
        self._last_row = 0.0
        self._next_batch = 0.0
        self._stop = threading.Event()

    def run(self, target: int | None, deadline: float | None, stop: threading.Event) -> str:
        """Batches until there is a reason to stop, which is returned."""
        self._stop = stop
        try:
            self._following.begin(self._processed)
            with Lanes(self._apply, self._reader.wake) as self._lanes:
                self._following.start(self._lanes, lambda: self._processed)
                self._publish_states()
                return self._loop(target, deadline, stop)
        except Fenced as fenced:
            log.warning("%s", fenced)
            return "fenced"
        except ConnectionError:
            raise  # to a process of ours
        except (OSError, DeltaError) as error:
            raise outage(reason_of(error), self._root) from error

    def _loop(self, target: int | None, deadline: float | None, stop: threading.Event) -> str:
        while True:
            self._suspend_found()
            self._look_at_others()
            if self._following.follow_if_due():
                self._publish_states()
            self._settle()
            reason = self._why_stop(target, deadline, stop)
            if reason is not None and not self._open:
                self._rest(force=True)
                self._remember()
                self._durability.settle()
                self._publisher.write()
                return reason
            if reason is not None and self._lanes.only_resting:
                # Nothing is lost: as after a crash the next run begins at the ledger's position.
                log.warning(
                    "stopped (%s) while tables are tried again: %s", reason, ", ".join(self._tables.retries.shown())
                )
                return reason
            if reason is not None:
                self._lanes.wait(_PATIENCE)  # only what has begun is brought to its end
                continue
            left = _PATIENCE if deadline is None else deadline - time.monotonic()
            self._reader.wait(min(left, _PATIENCE) if left > 0 else _PATIENCE)  # past it a successor is awaited
            self._await_server()
            self._handovers.finish_if_due()
            batch = self._collect() if self._is_due() else None
            if batch is not None:
                self._begin(batch)
            elif not self._open:
                self._rest(force=self._reader.reply_wanted)
                name = self._tables.upkeep.next(self._lanes.is_idle)
                if name is not None:
                    self._lanes.behind(name, partial(self._tables.upkeep.keep_up, name))

    def rates(self) -> dict[str, float]:
        """For the position file; from any thread."""
        return {**self._speed.rates(), **self._reader.busy.rates()}

    def report(self, reason: str) -> dict[str, Any]:
        return report(self._totals, self._ledger, self._tables.records, reason, self._successor.handed_over)

    def _why_stop(self, target: int | None, deadline: float | None, stop: threading.Event) -> str | None:
        if self._publisher.failure is not None:
            raise self._publisher.failure
        if self._durability.failure is not None:
            raise self._durability.failure
        if stop.is_set():
            return "signal"
        if self._following.paused:
            return "paused"
        idle = self._reader.idle_position if not self._open else None
        reached = max(self._processed, idle or 0)
        behind = self._tables.joining.catching_up or self._tables.next_row.must_wait(reached)
        if target is not None and reached >= target and not behind:
            return "until"
        return self._successor.why_stop(target, deadline)

    def _suspend_found(self) -> None:
        """Suspend what the catalog watch has found: the log itself would never say it."""
        for name, meanings in self._watch.learned().items():
            self._tables.columns.remember(name, meanings)
        found = [self._tables.states.suspend(name, error) for name, error in self._watch.take()]
        if any(found):
            self._publish_states()
            self._publisher.write()

    def _remember(self) -> None:
        """At the end: what was there before any column that the next driver finds."""
        with contextlib.suppress(HeadwaterError):  # a source that shuts down is not waited for
            self._ask(self._watch.look)
        for name in list(self._tables.records):
            self._tables.columns.remember(name)

    def _look_at_others(self) -> None:
        """Somebody else may have written to a table to which nothing comes from the log: its next commit would notice,
        and there may be none for days."""
        for name in self._rounds.due(lambda: list(self._tables.records)):
            # A lane at work looks for itself.
            idle = self._tables.states.is_followed(name) and self._lanes.is_idle(name)
            if idle and self._tables.foreign.has_news(name):
                self._lanes.behind(name, partial(self._tables.foreign.look_at_others, name))

    def _await_server(self) -> None:
        """A driver that has heard nothing from the server may have lost the slot: it commits nothing before it has.

        Where this process itself stood still (SIGSTOP, a frozen machine) the next answer comes at once, or the reader
        connects anew. Whether somebody took the driver's place meanwhile the ledger's fence says. After as long as a
        reader would try, silence is an error. From any thread.
        """
        deadline = time.monotonic() + RECONNECT_SECONDS
        while (silence := time.monotonic() - self._reader.heard) > self._tables.silence_limit:
            self._reader.raise_if_ended()
            if time.monotonic() > deadline or self._stop.is_set():
                raise Transient(
                    f"the server has not answered for {silence:.0f} s: the slot may be another driver's by now",
                    code="silent_source",
                    where="log connection",
                    remedy="run replicate again; it goes on from the ledger",
                )
            self._stop.wait(_PATIENCE)

    def _is_due(self) -> bool:
        """Batches begin an interval apart (`Pace`). One that somebody waits for, and one that is full, begin at once;
        none begins while shares of earlier ones wait for a thread, or while these hold as much as a batch may."""
        left = self._next_batch - time.monotonic()
        waiting = self._reader.waiting()
        limits = self._limits
        full = self._open.changes >= limits.max_rows or self._open.size >= limits.max_bytes
        if waiting and (full or self._lanes.crowded):
            self._lanes.wait(_SEAL_LOOK_SECONDS)
            return False
        wanted = self._reader.reply_wanted or any(chunk.demand for chunk in waiting)
        if left <= 0 or not waiting or wanted:
            return True
        if sum(chunk.changes for chunk in waiting) >= limits.max_rows:
            return True
        if sum(chunk.size for chunk in waiting) >= limits.max_bytes:
            return True
        self._lanes.wait(min(left, _SEAL_LOOK_SECONDS))
        return False

    def _collect(self) -> Batch | None:
        """The next batch: everything that waits, up to the limits."""
        batch = Batch()
        deadline = time.monotonic() + self._limits.max_seconds
        while (chunk := self._next_chunk(batch)) is not None:
            batch.add(chunk)
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

    def _begin(self, batch: Batch) -> None:
        """Into the lanes with it; what the catalog says of DDL in it comes first."""
        if (ddl := batch.ddl) is not None:
            self._look_behind(ddl, batch.transactions().xid.tolist())
            self._suspend_found()
        now = time.monotonic()
        self._next_batch = now + self._pace.interval
        shares = self._tables.shares.of(batch)
        epoch = self._open.begin(batch, shares, now)
        self._lanes.submit(epoch.number, shares, batch.transactions())

    def _look_behind(self, ddl: Ddl, xids: list[int]) -> None:
        """As often as it takes to reach the catalog, for as long as the reader would try: the batch is not applied
        without a look, and its rows come again if the driver ends here."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                return self._ask(partial(self._watch.look_behind, ddl, xids))
            except Transient as reason:
                if time.monotonic() > deadline:
                    raise
                log.warning("the source's catalog could not be read behind DDL, trying again: %s", reason)
                time.sleep(_PATIENCE)

    def _apply(self, name: str, share: Share, transactions: Transactions) -> Result:
        return self._tables.shares.apply(name, share, transactions, self._await_server)

    def _settle(self) -> None:
        """What the lanes have done; publish what every table holds."""
        for done in self._lanes.take_done():
            if done.failure is not None:
                raise done.failure
            if done.result.error is not None:
                self._publish_states()
            self._reader.busy.add(done.stages)
            if not done.numbers and done.result.new_rows:
                self._tables.next_row.to_come(done.result.versions)
            elif not done.numbers:
                self._tables.next_row.rearranged(done.result.versions)
            self._open.resolve(done)
            if not done.numbers:
                self._following.settled(done.name, done.result)
        epoch = self._open.publishable()
        if epoch is None:
            return
        reach("replicate.after_all_tables")
        self._processed = max(self._processed, epoch.lsn)
        self._count(epoch)
        self._tables.next_row.note(epoch.touched)
        self._tables.applied(epoch.xids)
        if self._tables.next_row.waits_for(epoch.lsn):
            self._publish_row(epoch.lsn, epoch)
            return
        self._publisher.passed(epoch.lsn)
        if not self._open:
            self._rest(force=False)
        if epoch.demand:
            self._publisher.write()  # somebody waits for exactly this position

    def _count(self, epoch: OpenEpoch) -> None:
        totals = self._totals
        totals.transactions += epoch.transactions
        for name, version in epoch.touched.items():
            if name not in self._tables.records:
                continue  # a history: its rows are the same changes
            totals.changes += version.rows
            totals.per_table[name] = totals.per_table.get(name, 0) + version.rows

    def _rest(self, *, force: bool) -> None:
        """Nothing to apply: let ledger and slot follow a log that moved, at most every ten seconds unless forced."""
        idle = self._reader.idle_position
        if idle is not None:
            self._processed = max(self._processed, idle)
        newest = self._ledger.newest
        moved = newest is None or self._processed > newest.position.lsn
        # Tables found ahead of the ledger (after a crash) are published as soon as the log has reached them; one that
        # joins the cuts need not wait until the log of an idle source moves: two rows may say the same position.
        waiting = self._tables.next_row.waits_for(self._processed)
        due = newest is None or time.monotonic() - self._last_row >= IDLE_ROW_SECONDS
        if waiting or (moved and (force or due)):
            self._publish_row(self._processed, None)
        elif force:
            self._durability.hurry()  # a server that shuts down waits for what the ledger holds

    def _publish_row(self, lsn: int, epoch: OpenEpoch | None) -> None:
        tables, next_row = self._tables, self._tables.next_row
        next_row.adopt(lsn)
        if next_row.must_wait(lsn):
            return
        tables.joining.join_cuts(lsn)
        reach("replicate.before_ledger")
        publishing = time.monotonic()
        if tables.foreign.suspend_replaced(next_row.touched()):
            self._publish_states()
        written = next_row.touched()
        stages = latency(epoch, publishing, self._publisher.clock_offset) if epoch is not None else {}
        row = self._ledger.publish(
            self._at.at(lsn),
            written,
            all_tables=next_row.versions(),
            source_time=epoch.source_time if epoch is not None else None,
            sample=self._publisher.last_sample,
            stages=stages,
        )
        self._totals.epochs += 1
        self._last_row = time.monotonic()
        next_row.written(written)
        reach("replicate.after_ledger")
        if epoch is not None:
            distance, offset = row.position.lsn - row.from_lsn, self._publisher.clock_offset
            self._speed.published(epoch.arrivals, distance, self._last_row, offset)
            stages["publish"] += self._last_row - publishing
            self._publisher.latencies = stages
            self._pace.applied(self._last_row - epoch.begun, len(epoch.touched))
        self._publisher.published(row, tables.records)
        reach("replicate.after_position_file")
        self._durability.published(lsn)
        tables.upkeep.written(written)
        for name in {table_of(name) for name in written}:
            self._lanes.behind(name, partial(tables.upkeep.keep_up, name))

    def _publish_states(self) -> None:
        self._publisher.states(self._tables.records)
