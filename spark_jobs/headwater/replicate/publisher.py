"""What pollers see while a driver runs: the position file, once a second and after each epoch, and the samples.

A thread of its own asks the source for (clock, insert LSN) each second, whether its catalog has changed under a
table, how much of its log it keeps for us, and whether another driver wants to take over. The same session tells a
shutdown of the server early: it is ended before the walsenders are, and the log connection must not hold the shutdown
up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from headwater.errors import Fenced, HeadwaterError, SourceChanged
from headwater.gate.wal_ceiling import CeilingWatch
from headwater.lake.freshness import SOURCE_RATE
from headwater.lake.ledger import Epoch, Ledger, last_sample
from headwater.lake.position_file import PositionFile, read_position_file, write_position_file
from headwater.lake.registry import TableRecord, now_text
from headwater.log.blocks import Chunk
from headwater.position import Position
from headwater.replicate.batches.retries import outage, reason_of
from headwater.replicate.catalog_watch.watch import CatalogWatch
from headwater.replicate.reader.handle import LogReader
from headwater.replicate.recent_samples import RecentSamples
from headwater.replicate.takeover.succession import SuccessorWatch
from headwater.source.connection import Connection, connect, primary_position
from headwater.source.samples import Sample, emit_marker, take_sample

log = logging.getLogger(__name__)

_PERIOD = 1.0
_LAGGING = 3.0  # seconds that an idle log may stand below a sample before a marker is written


class Publisher:
    """Keeps the position file true. `pending` is entered before the read position that covers it can be shown."""

    def __init__(
        self,
        root: str,
        conninfo: str,
        log_of: Position,
        owners: Callable[[Iterable[int]], set[str]],
        watch: CatalogWatch,
        successor: SuccessorWatch,
        ceiling: CeilingWatch,
    ) -> None:
        self._root = root
        self._conninfo = conninfo
        self._log_of = log_of
        self._owners = owners
        self._watch = watch
        self._successor = successor
        self._ceiling = ceiling
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pending: dict[str, deque[tuple[int, int]]] = {}
        self._samples = RecentSamples()
        self.last_sample: tuple[datetime, int] | None = None
        self._epoch: Epoch | None = None
        self._states: dict[str, dict[str, str]] = {}
        self._rates: Callable[[], dict[str, float]] = dict
        self._retrying: Callable[[], dict[str, Any]] = dict
        self.latencies: dict[str, float] = {}
        """Seconds by stage of the newest epoch with changes."""
        self.clock_offset: float | None = None
        """The source's clock, in seconds since 1970, less our monotonic one."""
        self._behind_since: float | None = None
        self.failure: HeadwaterError | None = None

    def arrived(self, chunk: Chunk) -> None:
        """Note the tables that `chunk` touches as pending; called before the chunk's position becomes readable."""
        transactions = chunk.transactions
        if not len(transactions):
            return
        first = int(transactions.end_lsn[0])
        last = int(transactions.end_lsn[-1])
        relations = {block.relation.relation_id for block in chunk.blocks}
        relations |= {relation_id for truncate in chunk.truncates for relation_id in truncate.relation_ids}
        names = self._owners(relations)
        with self._lock:
            for name in names:
                self._pending.setdefault(name, deque()).append((first, last))

    @contextlib.contextmanager
    def running(
        self,
        ledger: Ledger,
        reader: LogReader,
        rates: Callable[[], dict[str, float]],
        retrying: Callable[[], dict[str, Any]],
        durable: Callable[[], int],
        first: Sample,
    ) -> Iterator[None]:
        """Publish while the block runs. `retrying`: the tables that are tried again, as the file says it; `durable`: up
        to which LSN a power cut would leave the lake; `first`: a sample from before the block, without which a run that
        is over within a second would leave none."""
        self._ledger, self._reader, self._rates, self._retrying = ledger, reader, rates, retrying
        self._durable = durable
        self._epoch = ledger.newest
        self._remember_samples()
        self._add(first)
        thread = threading.Thread(target=self._run, name="headwater-publisher", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(timeout=10)

    def _remember_samples(self) -> None:
        before, newest = read_position_file(self._root), self._epoch
        if newest is None:
            return
        if before is not None and before.position.same_log(newest.position):
            self._samples = RecentSamples(before.samples)
        elif (known := last_sample(self._root, newest.position)) is not None:  # a power cut took the file
            self._samples.add(known[0].astimezone(UTC), known[1], newest.position.lsn)

    def published(self, epoch: Epoch, tables: Mapping[str, TableRecord]) -> None:
        """An epoch is in the ledger: from now on the file may claim it."""
        with self._lock:
            self._epoch = epoch
            self._drop_pending(epoch.position.lsn)
            self._states = _not_in_step(tables)
        self.write()

    def passed(self, lsn: int) -> None:
        """The log up to `lsn` changed no table: the newest epoch still says it all."""
        with self._lock:
            self._drop_pending(lsn)

    def _drop_pending(self, lsn: int) -> None:
        for name in list(self._pending):
            spans = self._pending[name]
            while spans and spans[0][1] <= lsn:
                spans.popleft()
            if not spans:
                del self._pending[name]

    def states(self, tables: Mapping[str, TableRecord]) -> None:
        """What the file says of tables that are not in step, from its next writing on."""
        with self._lock:
            self._states = _not_in_step(tables)

    def write(self) -> None:
        """Replace the file now, unless nothing was published yet or another driver has taken over."""
        with self._lock:
            epoch = self._epoch
            if epoch is None:
                return
            # The read position first: whatever it covers has entered `pending` before.
            read_position = max(self._reader.read_position, epoch.position.lsn)
            content = PositionFile(
                generation=self._ledger.generation,
                epoch=epoch.epoch,
                position=epoch.position,
                read_position=read_position,
                durable_position=epoch.position.at(min(self._durable(), epoch.position.lsn)),
                written_at=now_text(),
                pending={name: spans[0][0] for name, spans in self._pending.items() if spans},
                states=self._states,
                retrying=self._retrying(),
                samples=self._samples.as_tuple(),
                rates=self._all_rates(),
            )
            self._ledger.check_fence()
            write_position_file(self._root, content)

    def _all_rates(self) -> dict[str, float]:
        rates = {**self._rates(), **{f"{stage}_seconds": spent for stage, spent in self.latencies.items()}}
        source = self._samples.source_rate()
        return rates if source is None else {**rates, SOURCE_RATE: source}

    def _run(self) -> None:
        connection: Connection | None = None
        try:
            while not self._stop.wait(_PERIOD):
                try:
                    if connection is None:
                        connection = self._connect()
                    self._sample(connection)
                    self._watch.poll(connection)
                    self._successor.look(connection)
                    self.failure = self.failure or self._ceiling.look(connection)
                except Exception as error:
                    log.warning("the source does not answer the sampler: %s", error)
                    self._successor.look_away()
                    # A server that shuts down ends this session first; one that is only slow keeps it.
                    if connection is None or connection.closed:
                        connection = None
                        self._reader.server_is_going()
                self.write()
        except Fenced as error:
            self.failure = error
        except Exception as error:
            self.failure = outage(f"the position file cannot be written: {reason_of(error)}", self._root)
        finally:
            if connection is not None:
                connection.close()

    def _connect(self) -> Connection:
        """To the source that the driver reads. By the same address another server may answer by now, which was promoted
        while the log's connection lives on: its clock beside its positions is no sample of this lake's log."""
        connection = connect(self._conninfo, application_name="headwater sampler", statement_timeout=5)
        try:
            found = primary_position(connection)
            if not found.same_log(self._log_of):
                raise SourceChanged(
                    f"system {found.system_id} timeline {found.timeline} answers, and the log that is read is of "
                    f"system {self._log_of.system_id} timeline {self._log_of.timeline}",
                    where="source.connection",
                    remedy="run replicate again: it says what has to be done",
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _sample(self, connection: Connection) -> None:
        before = time.monotonic()
        sample = take_sample(connection)
        self.clock_offset = sample.time.timestamp() - (before + time.monotonic()) / 2
        self._add(sample)
        if sample.lsn <= self._reader.read_position or self._pending:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = time.monotonic()
        elif time.monotonic() - self._behind_since > _LAGGING:
            # The insert position may stand past a page header or an unflushed commit, where an idle log never comes.
            emit_marker(connection)
            self._behind_since = None

    def _add(self, sample: Sample) -> None:
        moment = sample.time.astimezone(UTC)
        self.last_sample = (moment, sample.lsn)
        with self._lock:
            self._samples.add(moment, sample.lsn, self._epoch.position.lsn if self._epoch is not None else 0)


def _not_in_step(tables: Mapping[str, TableRecord]) -> dict[str, dict[str, str]]:
    return {
        name: {"state": record.state, "reason": record.reason, "since": record.since}
        for name, record in tables.items()
        if record.state not in ("active", "removed")
    }
