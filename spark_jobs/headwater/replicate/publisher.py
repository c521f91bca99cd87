"""What pollers see while a driver runs: the position file, after each epoch, and now and then."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC
from typing import Final

from headwater.lake.durability import Durability
from headwater.lake.freshness import SOURCE_RATE
from headwater.lake.ledger import Epoch, Ledger, last_sample
from headwater.lake.look import NOT_YET_SHOWN
from headwater.lake.looks import Growing, often
from headwater.lake.position_file import PositionFile, read_position_file, write_position_file
from headwater.lake.registry import TableRecord, now_text
from headwater.replicate.batches.lanes import side_by_side
from headwater.replicate.batches.retries import Retries
from headwater.replicate.batches.stage_times import ApplyRate
from headwater.replicate.pending import Pending
from headwater.replicate.reader.handle import LogReader
from headwater.replicate.recent_samples import RecentSamples
from headwater.source.samples import Sample

_MOVED_SECONDS: Final = 5.0
"""Between two writings of a file that says no more than that the log has gone on: by it lags are told."""


class Publisher:
    """Keeps the position file true; its methods may be called by any thread. `first`: a sample from before there is
    anything to publish, without which a run that is over within a second would leave none. `durability` says up to
    where a power cut would leave the lake, `speed`, `retries` what else the file shows."""

    def __init__(
        self,
        root: str,
        ledger: Ledger,
        reader: LogReader,
        pending: Pending,
        durability: Durability,
        speed: ApplyRate,
        retries: Retries,
        first: Sample,
    ) -> None:
        self._root, self._ledger, self._reader, self._pending = root, ledger, reader, pending
        self._durability, self._speed, self._retries = durability, speed, retries
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._epoch = ledger.newest
        self._samples = self._samples_before()
        self._states: dict[str, dict[str, str]] = {}
        self._writings = Growing(1.0, often(root).file)
        self._said: PositionFile | None = None
        self._ended = False
        self.latencies: dict[str, float] = {}
        """Seconds by stage of the newest epoch with changes."""
        self.sampled(first)

    def _samples_before(self) -> RecentSamples:
        before, newest = read_position_file(self._root), self._epoch
        if newest is not None and before is not None and before.position.same_log(newest.position):
            return RecentSamples(before.samples)
        samples = RecentSamples()
        if newest is not None and (known := last_sample(self._root, newest.position)) is not None:
            samples.add(known[0].astimezone(UTC), known[1], newest.position.lsn)  # a power cut took the file
        return samples

    @property
    def position(self) -> int:
        """That of the newest epoch; 0: there is none."""
        with self._lock:
            return self._epoch.position.lsn if self._epoch is not None else 0

    def sampled(self, sample: Sample) -> None:
        """The newest sample: `last_sample` from now on, and in the file from its next writing on."""
        moment = sample.time.astimezone(UTC)
        self.last_sample = (moment, sample.lsn)
        with self._lock:
            self._samples.add(moment, sample.lsn, self._epoch.position.lsn if self._epoch is not None else 0)

    def published(self, epoch: Epoch, tables: Mapping[str, TableRecord], *, is_idle: bool) -> None:
        """An epoch is in the ledger: from now on the file may claim it. `is_idle`: it touches no table, and the file
        goes on being written as rarely as before."""
        with self._lock:
            self._epoch = epoch
            self._pending.passed(epoch.position.lsn)
            self._states = _not_in_step(tables, epoch)
        self.write(has_looked=True, is_idle=is_idle)  # a row of ours says that no newer driver has begun

    def passed(self, lsn: int) -> None:
        """The log up to `lsn` changed no table: the newest epoch still says it all."""
        with self._lock:
            self._pending.passed(lsn)

    def states(self, tables: Mapping[str, TableRecord]) -> None:
        """What the file says of tables that are not in step, from its next writing on."""
        with self._lock:
            self._states = _not_in_step(tables, self._epoch)

    def tick(self) -> None:
        """Once a second: replace the file, or let it be a while where that costs money, as long as it would say nothing
        but that time has passed. Who waits has the log say so (`emit_marker`)."""
        if self._writing.locked():
            return  # by another thread, just now; a store may take its time
        content, said = self._content(), self._said
        if content is None:
            return
        news = said is None or content.pending or _told(content) != _told(said)
        has_moved = said is not None and content.read_position != said.read_position
        if news or self._writings.is_due or (has_moved and self._writings.since >= _MOVED_SECONDS):
            self.write()

    def end(self) -> None:
        """The last writing: from now on the file says that this driver publishes nothing any more."""
        self._ended = True
        self.write()

    def write(self, *, has_looked: bool = False, is_idle: bool = False) -> None:
        """Replace the file now, unless nothing was published yet or another driver has taken over, for which the ledger
        is looked at unless the caller `has_looked`."""
        # What was seen before a wait for another thread's writing is old.
        is_fresh = has_looked and not self._writing.locked()
        with self._writing:
            content = self._content()
            if content is None:
                return
            if not is_fresh:
                self._ledger.check_fence()
            write_position_file(self._root, content)
            said = self._said if self._said is None or not is_idle else replace(self._said, epoch=content.epoch)
            self._writings.looked(new=said is None or _told(content) != _told(said))
            self._said = content

    def _content(self) -> PositionFile | None:
        with self._lock:
            epoch = self._epoch
            if epoch is None:
                return None
            # The read position first: whatever it covers has become pending before.
            read_position = max(self._reader.read_position, epoch.position.lsn)
            return PositionFile(
                generation=self._ledger.generation,
                epoch=epoch.epoch,
                position=epoch.position,
                read_position=read_position,
                durable_position=epoch.position.at(min(self._durability.position, epoch.position.lsn)),
                written_at=now_text(),
                pending=self._pending.since(),
                states=self._states,
                retrying=self._retries.shown(),
                samples=self._samples.as_tuple(),
                rates=self._rates(),
                ended=self._ended,
            )

    def _rates(self) -> dict[str, float]:
        latencies = {f"{stage}_seconds": spent for stage, spent in self.latencies.items()}
        rates = {**self._speed.rates(), **self._reader.busy.rates(side_by_side(self._root)), **latencies}
        source = self._samples.source_rate()
        return rates if source is None else {**rates, SOURCE_RATE: source}


def _told(file: PositionFile) -> tuple[object, ...]:
    """What is news as soon as it changes."""
    return file.epoch, file.pending, file.states, file.retrying


def _not_in_step(tables: Mapping[str, TableRecord], epoch: Epoch | None) -> dict[str, dict[str, str]]:
    """Also those that the registry has in step while `epoch`, the newest, is of before: a driver that died between the
    two leaves them so, and what it had read of them is not read again."""
    found = {}
    for name, record in tables.items():
        if record.state not in ("active", "removed"):
            found[name] = {"state": record.state, "reason": record.reason, "since": record.since}
        elif record.state == "active" and epoch is not None and not _is_shown(record, epoch):
            found[name] = {"state": "catching up", "reason": NOT_YET_SHOWN, "since": record.since}
    return found


def _is_shown(record: TableRecord, epoch: Epoch) -> bool:
    return epoch.shows(record.name) and not record.began_above(epoch.position.lsn)
