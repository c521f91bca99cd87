"""What a running driver asks the source once a second, in a thread of its own.

(clock, insert LSN), whether its catalog has changed under a table, how much of its log it keeps for us, whether its
commits have come to wait for us, and whether another driver wants to take over. The same session tells a shutdown of
the server early: it is ended before the walsenders are, and the log connection must not hold the shutdown up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from headwater import store_options
from headwater.errors import Fenced, HeadwaterError, SourceChanged, Transient
from headwater.gate.check import APPLICATION_NAME
from headwater.gate.same_source import log_ends_before
from headwater.gate.wal_ceiling import CeilingWatch
from headwater.lake_root import is_remote
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.replicate.batches.retries import outage, reason_of
from headwater.replicate.catalog_watch.watch import CatalogWatch
from headwater.replicate.pending import Pending
from headwater.replicate.publisher import Publisher
from headwater.replicate.reader.handle import LogReader
from headwater.replicate.takeover.succession import SuccessorWatch
from headwater.source.connection import Connection, connect, primary_position, says_it_stops
from headwater.source.samples import Sample, emit_marker, take_sample
from headwater.source.settings import standby_problems

log = logging.getLogger(__name__)

_PERIOD = 1.0
_SAY_SECONDS = 60.0  # an outage is said when it begins, and then so seldom: its message is long and the same
_LAGGING = 3.0  # seconds that an idle log may stand below a sample before a marker is written


def sample_with_offset(connection: Connection) -> tuple[Sample, float]:
    """A sample, and the source's clock, in seconds since 1970, less our monotonic one."""
    before = time.monotonic()
    sample = take_sample(connection)
    return sample, sample.time.timestamp() - (before + time.monotonic()) / 2


class Sampler:
    """`log_of`: which log the driver reads. `clock_offset`: of `sample_with_offset`, as it was last."""

    def __init__(
        self,
        pipeline: Pipeline,
        log_of: Position,
        reader: LogReader,
        pending: Pending,
        publisher: Publisher,
        watch: CatalogWatch,
        successor: SuccessorWatch,
        ceiling: CeilingWatch,
        clock_offset: float,
    ) -> None:
        self._pipeline, self._log_of = pipeline, log_of
        self._reader, self._pending, self._publisher = reader, pending, publisher
        self._watch, self._successor, self._ceiling = watch, successor, ceiling
        self._stop = threading.Event()
        self._behind_since: float | None = None
        self._unsaid_since: float | None = None
        self.clock_offset = clock_offset
        self.failure: HeadwaterError | None = None
        """Why the driver must end."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="headwater-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(timeout=10)

    def _run(self) -> None:
        connection: Connection | None = None
        away_since: float | None = None
        say_again = 0.0
        try:
            while not self._stop.wait(_PERIOD):
                say = self._publisher.tick
                try:
                    if connection is None:
                        connection = self._connect()
                    self._sample(connection)
                    self._watch.poll(connection)
                    self._successor.look(connection)
                    self.failure = self.failure or self._ceiling.look(connection) or self._waited_for(connection)
                    if away_since is not None:
                        log.info("the source answers again, after %.0f s", time.monotonic() - away_since)
                        away_since = None
                except Exception as error:
                    now = time.monotonic()
                    if away_since is None:
                        away_since = now
                        log.warning("the source does not answer, it is asked again each second: %s", error)
                    elif now >= say_again:
                        log.warning("the source has not answered for %.0f s", now - away_since)
                    if now >= say_again:
                        say_again = now + _SAY_SECONDS
                    self._successor.look_away()
                    # The file alone shows then that a driver lives.
                    say = self._publisher.write
                    # A server that shuts down ends this session first; one that is only slow keeps it.
                    if connection is None or connection.closed:
                        connection = None
                        # Behind another server's answer the log's connection is to one that nobody means any more.
                        self._reader.no_session(stops=isinstance(error, SourceChanged) or says_it_stops(error))
                self._say(say)
        except Fenced as error:
            self.failure = error
        except Exception as error:
            self.failure = outage(
                f"the position file cannot be written: {reason_of(error)}", self._pipeline.lake_path()
            )
        finally:
            if connection is not None:
                connection.close()

    def _say(self, say: Callable[[], None]) -> None:
        """Not to be held up by a store that is away: this thread alone notices that the server shuts down."""
        try:
            with store_options.impatient():
                say()
            self._unsaid_since = None
        except OSError as error:
            self._unsaid_since = self._unsaid_since or time.monotonic()
            away = time.monotonic() - self._unsaid_since
            if not is_remote(self._pipeline.lake_path()) or away > store_options.JOB_PATIENCE_SECONDS:
                raise
            log.warning("the position file cannot be written: %s", reason_of(error))

    def _connect(self) -> Connection:
        """To the source that the driver reads. By the same address another server may answer by now, which was promoted
        while the log's connection lives on, or the same one as it was before: its clock beside its positions is no
        sample of this lake's log."""
        connection = connect(self._pipeline.conninfo(), application_name="headwater sampler", statement_timeout=5)
        try:
            found, published, changed = primary_position(connection), self._publisher.position, ""
            if not found.same_log(self._log_of):
                changed = (
                    f"system {found.system_id} timeline {found.timeline} answers, and the log that is read is of "
                    f"system {self._log_of.system_id} timeline {self._log_of.timeline}"
                )
            elif found.lsn < published:
                changed = log_ends_before(found.lsn, published)
            if changed:
                raise SourceChanged(
                    changed, where="source.connection", remedy="run replicate again: it says what has to be done"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _waited_for(self, connection: Connection) -> Transient | None:
        """Why the driver must end: its log connection has become a synchronous standby, by a setting that a start
        refuses. Transient: what watches over a cluster sets `*` for a moment as it fails over."""
        problems = standby_problems(connection, [APPLICATION_NAME, self._pipeline.source.slot])
        if not problems:
            return None
        [waited] = problems
        return Transient(waited.message, code=waited.code, where=waited.where, remedy=waited.remedy)

    def _sample(self, connection: Connection) -> None:
        sample, self.clock_offset = sample_with_offset(connection)
        self._publisher.sampled(sample)
        if sample.lsn <= self._reader.read_position or self._pending.since():
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = time.monotonic()
        elif time.monotonic() - self._behind_since > _LAGGING:
            # The insert position may stand past a page header or an unflushed commit, where an idle log never comes.
            emit_marker(connection)
            self._behind_since = None
