"""The reader: a process of its own that receives and frames the log, so that the walsender is never kept waiting.

Priorities of its loop: stop > what the driver says > feedback due > log bytes. Reading pauses while the chunks that the
driver has not taken exceed the memory budget; feedback goes on, so a slow lake slows the reader and nothing else. A
connection that drops is made again, with credentials asked anew, behind the last commit that was framed; there the
driver says first what jobs have asked for meanwhile. A driver that is silent may be stopped: the slot is given back,
and asked for again when it speaks. The reader ends when the driver is gone, when the server cannot be reached for
`RECONNECT_SECONDS` or says that the slot cannot be read. So that a shutdown of the server never waits for us, it drops
the connection when the server waits for a confirmation that does not come in time.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Final

from headwater.errors import HeadwaterError, LostLease, SourceUnreachable
from headwater.log.blocks import Message
from headwater.log.framing import Framer, ProtocolError
from headwater.log.hiding import Hiding
from headwater.log.packing import Packer
from headwater.log.spill import SpillStore
from headwater.log.values.wire import MalformedMessage
from headwater.replicate.reader.pipe import ChunkSender
from headwater.source.stream import RECONNECT_SECONDS, ConnectionLost, Keepalive, LogStream, unreadable
from headwater.stage_clock import measured, stage

CHUNK_BYTES: Final = 4 << 20
FEEDBACK_SECONDS: Final = 1.0
SHUTDOWN_PATIENCE: Final = 4.0
DRIVER_SILENCE: Final = 20.0
_SESSION_SECONDS: Final = 15.0
"""The driver asks for a session each second, and gives up an attempt after ten."""
_ASLEEP_SECONDS: Final = 2.0
"""Two looks at the driver are never so far apart, unless this process stood still."""
_FIRST_BACKOFF: Final = 0.1
_LONGEST_BACKOFF: Final = 2.0
_CONNINFO_SECONDS: Final = 5.0

_COLLECT_SECONDS: Final = 0.02
"""A driver that still has a chunk before it gets the next small one no sooner: blocks grow meanwhile."""
_BUSY_MESSAGES: Final = 64
_NAP: Final = 0.002
"""While the log flows: the server writes each message to the socket, and waking us for each costs both more."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """`memory`: bytes of chunks that the driver has not taken; `spill`: bytes on disk; `patience`: seconds without a
    connection after which the reader gives up; `driver_silence`: without a word of the driver, after which the slot is
    given back until it speaks again. `binary`: the form of all values, on every connection of a run.
    `announce_from`: bytes of an open transaction from which on it is told of, 0: never. `hiding`: None: on no
    connection anything is read before the driver has said what is to be hidden. `log_of`: system id and timeline of the
    log, as the driver has found it; None: whatever is met first. The conninfo is secret."""

    conninfo: str
    slot: str
    publications: tuple[str, ...]
    start_lsn: int
    server_version: int
    memory: int
    spill: int = 20 << 30
    patience: float = RECONNECT_SECONDS
    driver_silence: float = DRIVER_SILENCE
    binary: bool = True
    announce_from: int = 0
    hiding: Hiding | None = field(default_factory=Hiding)
    log_of: tuple[str, int] | None = None

    def __repr__(self) -> str:  # the connection string holds a password
        return f"ReaderOptions(slot={self.slot!r})"


@dataclass(frozen=True, slots=True)
class LogProgress:
    """No change, but news: the log has been read up to `read_position`; `heard`: monotonic time of the server's last
    message; `reply_wanted`: the server waits for a confirmation."""

    read_position: int
    heard: float
    reply_wanted: bool = False


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds since the last one by stage, and the bytes of log that were framed meanwhile."""

    stages: dict[str, float]
    size: int


@dataclass(frozen=True, slots=True)
class Awake:
    """The process has started and waits for its options."""


@dataclass(frozen=True, slots=True)
class Started:
    """Streaming has begun: the slot is ours. `walsender`: the server's process on this connection."""

    walsender: int


@dataclass(frozen=True, slots=True)
class StartedAgain:
    """For the `number`th time on another connection, whose server was `heard` first at this monotonic time; `walsender`
    as of `Started`. Nothing is read of it before the driver says so: a job that began meanwhile saw no driver, and what
    it asks for must be known first."""

    number: int
    heard: float
    walsender: int


@dataclass(frozen=True, slots=True)
class ConninfoWanted:
    """The connection has dropped; the driver answers with the connection string of now."""


@dataclass(frozen=True, slots=True)
class Hides:
    """From the next message on, what the driver has said for the `number`th time is hidden."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The reader's last word; None: it was told to stop."""

    error: HeadwaterError | None


class _Reader:
    def __init__(self, options: ReaderOptions, folder: str, data: Connection, control: Connection) -> None:
        self._options = options
        self._conninfo = options.conninfo
        self._data = ChunkSender(data)
        self._packer = Packer()
        self._control = control
        self._framer = Framer(SpillStore(folder, options.spill), announce_from=options.announce_from)
        self._hides = options.hiding is not None
        self._started_again = self._may_read = 0
        self._framer.hide(options.hiding or Hiding())
        self._log_of = options.log_of
        self._confirmed = 0  # what the slot says, until the driver has something that is on disk
        self._in_flight = 0
        self._stop = False
        self._wal_end = options.start_lsn
        self._reported = 0
        self._unread_behind: int | None = None  # where the server could not read on, when that was no lost connection
        self._server_waits_since: float | None = None
        self._no_session = -math.inf  # when the driver last found that the server admits no session
        self._shipped = 0.0
        self._messages, self._moments = 0, 0.0  # of the open chunk: how many, and the sum of their moments of arrival
        self._framed = 0

    def run(self) -> None:
        stream = self._connect()
        self._data.send(Started(stream.walsender))
        now = time.monotonic()
        self._heard = self._driver_heard = self._fed_back = self._told = self._looked = now
        try:
            while not self._stop:
                with measured() as spent:
                    until = time.monotonic() + FEEDBACK_SECONDS
                    while not self._stop and time.monotonic() < until:
                        if self._driver_is_silent():
                            # Whoever takes its place needs the slot. It may be stopped for a while, and go on.
                            stream.end()
                            self._await_driver()
                            given_back = "the driver was silent, and the slot was given back meanwhile"
                            stream = self._connect_again(ConnectionLost(given_back, where="reader"))
                        try:
                            self._round(stream)
                        except SourceUnreachable as lost:
                            stream.close()
                            if not isinstance(lost, ConnectionLost):
                                self._refuse_again(lost)
                            stream = self._connect_again(lost)
                self._data.send(Spent(spent, self._framed))
                self._framed = 0
        finally:
            stream.end()

    # The connection

    def _connect(self) -> LogStream:
        """Streaming behind the last commit that was framed, if it is still the same log."""
        options = self._options
        stream = LogStream(self._conninfo)
        try:
            found = stream.identify(options.slot)
            start = max(options.start_lsn, self._framer.last_commit)
            # What the driver has found it found on another connection, whose address may lead elsewhere by now.
            if self._log_of is not None:
                confirmed = self._confirmed or options.start_lsn
                found.refuse_difference(*self._log_of, confirmed, start, again=self._confirmed > 0)
            stream.start(options.slot, options.publications, start, options.server_version, binary=options.binary)
        except BaseException:
            stream.close()
            raise
        self._log_of = found.system_id, found.timeline
        # Not less than the slot has: an older server takes a smaller one. Nor more before the driver says so.
        self._confirmed = max(self._confirmed, found.confirmed_lsn or 0)
        return stream

    def _refuse_again(self, failure: SourceUnreachable) -> None:
        """Raise what ended the stream, though its connection was fine; once per position it may have been by chance."""
        if failure.code != "log_unreadable":
            raise failure
        if self._unread_behind == self._framer.last_commit:
            raise unreadable(failure)
        self._unread_behind = self._framer.last_commit
        self._pause(_LONGEST_BACKOFF)

    def _connect_again(self, lost: SourceUnreachable) -> LogStream:
        """Try until the patience is at its end; raises what the last attempt met."""
        self._framer.reconnected()
        deadline = time.monotonic() + self._options.patience
        backoff = _FIRST_BACKOFF
        failure: HeadwaterError = lost
        while True:
            self._ask_conninfo()
            if self._driver_is_silent():
                self._await_driver()
                deadline = time.monotonic() + self._options.patience
            if self._stop or time.monotonic() >= deadline:
                raise failure
            try:
                stream = self._connect()
            except (SourceUnreachable, LostLease) as error:
                # The server may believe in the old connection for a while: then the slot is still in use.
                failure = error
            else:
                self._server_waits_since = None
                self._heard = time.monotonic()
                self._started_again += 1
                self._data.send(StartedAgain(self._started_again, self._heard, stream.walsender))
                return stream
            self._pause(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    def _ask_conninfo(self) -> None:
        self._data.send(ConninfoWanted())
        deadline = time.monotonic() + _CONNINFO_SECONDS
        self._conninfo = ""
        while not self._conninfo and not self._stop and time.monotonic() < deadline:
            self._pause(0.1)
        self._conninfo = self._conninfo or self._options.conninfo

    def _pause(self, seconds: float) -> None:
        self._control.poll(seconds)
        self._obey(None)

    # A round

    def _round(self, stream: LogStream) -> None:
        self._obey(stream)
        now = time.monotonic()
        if now - self._fed_back >= FEEDBACK_SECONDS:
            # Asking for an answer proves, both ways, that this connection is alive.
            self._feed_back(stream, ask=True)
        if self._server_waits_since is not None and now - self._server_waits_since > SHUTDOWN_PATIENCE:
            stream.end()
            raise ConnectionLost(
                "the server waits to shut down and the lake has not caught up: the log connection is dropped",
                where="reader",
                remedy="run replicate again when the server is back; it goes on from the ledger",
            )
        followed = self._options.hiding is not None or self._may_read == self._started_again
        reading = self._hides and followed and self._in_flight < self._options.memory
        got = self._drain(stream) if reading else 0
        for announcement in self._framer.announcements():
            self._data.send(announcement)
        if self._framer.has_chunk and self._is_due(got == 0, now):
            self._ship()
        elif now - self._told >= 0.25 or self._position() > self._reported:
            self._tell(reply_wanted=False)
        if got >= _BUSY_MESSAGES:
            time.sleep(_NAP)
        elif not got and reading:
            # What is collected must not wait for the next message.
            seconds = _COLLECT_SECONDS if self._framer.has_chunk else 0.2
            stream.wait_readable(seconds, self._control.fileno())
        elif not got:
            self._control.poll(0.2)

    def _driver_is_silent(self) -> bool:
        now = time.monotonic()
        # Only the time counts in which we were awake to hear it: whoever stops the one stops the other as a rule.
        self._driver_heard += max(0.0, now - self._looked - _ASLEEP_SECONDS)
        self._looked = now
        return now - self._driver_heard > self._options.driver_silence

    def _await_driver(self) -> None:
        """Until it speaks again; when it is gone, the pipe says so."""
        silent_since = self._driver_heard
        while self._driver_heard == silent_since:
            self._control.poll(None)
            self._obey(None)

    def _is_due(self, idle: bool, now: float) -> bool:
        framer = self._framer
        if framer.size >= CHUNK_BYTES or framer.demand:
            return True
        return idle and (self._in_flight == 0 or now - self._shipped >= _COLLECT_SECONDS)

    def _drain(self, stream: LogStream) -> int:
        """Frame what is here, up to a chunk; how many messages there were."""
        messages: list[Message] = []
        with stage("receive"):
            keepalive = stream.receive(messages, CHUNK_BYTES)
        if messages or keepalive is not None:
            self._heard = time.monotonic()
            self._messages += len(messages)
            self._moments += len(messages) * self._heard
        before = self._framer.size
        with stage("frame"):
            self._framer.take(messages)
        self._framed += max(0, self._framer.size - before)
        if keepalive is not None:
            self._keepalive(keepalive)
        return len(messages)

    def _keepalive(self, message: Keepalive) -> None:
        self._wal_end = max(self._wal_end, message.wal_end)
        # With feedback every second the server asks only when it is about to stop (walsender.c, WalSndDone).
        if message.reply and self._heard - self._fed_back < FEEDBACK_SECONDS * 5:
            if self._framer.has_chunk:
                self._ship()
            if self._server_waits_since is None:
                self._tell(reply_wanted=True)
                # Either alone is no shutdown: a full server refuses sessions, a short wal_sender_timeout asks as well.
                if self._heard - self._no_session < _SESSION_SECONDS:
                    self._server_waits_since = self._heard

    def _position(self) -> int:
        """Everything committed up to here was received; valid while no transaction is half received."""
        if self._framer.in_transaction:
            return self._reported
        return max(self._framer.read_position, self._wal_end)

    def _tell(self, *, reply_wanted: bool) -> None:
        if self._framer.has_chunk:
            return  # its chunk will carry the position
        self._reported = max(self._reported, self._position())
        self._told = time.monotonic()
        self._data.send(LogProgress(self._reported, self._heard, reply_wanted))

    def _ship(self) -> None:
        now = time.monotonic()
        received = self._moments / self._messages if self._messages else now
        chunk = replace(self._framer.cut(), received=received, shipped=now)
        self._messages, self._moments = 0, 0.0
        self._in_flight += chunk.size
        self._reported = max(self._reported, chunk.read_position)
        with stage("ship"):
            self._data.send(self._packer.pack(chunk))
        self._told = self._shipped = time.monotonic()

    def _obey(self, stream: LogStream | None) -> None:
        while self._control.poll(0):
            self._driver_heard = time.monotonic()
            word, value = self._control.recv()
            if word == "confirm":
                self._confirmed = max(self._confirmed, value)
                if self._confirmed >= self._position():
                    self._server_waits_since = None
                self._feed_back(stream, ask=False)
            elif word == "taken":
                self._in_flight -= value
            elif word == "conninfo":
                self._conninfo = value
            elif word == "hide":
                number, hiding = value
                self._framer.hide(hiding)
                self._hides = True
                self._data.send(Hides(number))
            elif word == "read on":
                self._may_read = value
            elif word == "no session":
                self._no_session = time.monotonic()
                if value:
                    self._server_waits_since = self._server_waits_since or self._no_session
            elif word == "stop":
                self._feed_back(stream, ask=False)
                self._stop = True

    def _feed_back(self, stream: LogStream | None, *, ask: bool) -> None:
        if stream is None:
            return
        stream.confirm(self._confirmed, ask=ask)
        self._fed_back = time.monotonic()


def main(folder: str, data: Connection, control: Connection) -> None:
    """The process. `folder`: the driver's spill folder. The first thing that `control` brings are its options: they may
    come long after the start."""
    # Ctrl-C and SIGTERM of a process group are the driver's to handle: it stops us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    error: HeadwaterError | None = None
    try:
        ChunkSender(data).send(Awake())
        options: ReaderOptions = control.recv()
        _Reader(options, folder, data, control).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the driver is gone
    except HeadwaterError as known:
        error = known
    except ProtocolError as bad:
        error = HeadwaterError(str(bad), code="protocol_error", where="log", remedy="report this as a bug")
    except MalformedMessage as bad:
        error = HeadwaterError(
            f"it cannot be read: {bad}", code="protocol_error", where="log", remedy="report this as a bug"
        )
    except Exception as unexpected:
        error = HeadwaterError(f"the reader failed: {kind_and_place(unexpected)}", where="log")
    with contextlib.suppress(OSError):
        ChunkSender(data).send(Ended(error))


def kind_and_place(error: Exception) -> str:
    """Its kind, and where it came from. Not its text: it may show a row's value, a hidden one even."""
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error.strerror or 'no reason given'}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.name} ({os.path.basename(last.filename)}, line {last.lineno})"
