"""The reader: a process of its own that receives and frames the log, so that the walsender is never kept waiting.

Priorities of its loop: stop > what the driver says > feedback due > log bytes. Reading pauses while the chunks
that the driver has not taken exceed the memory budget; feedback goes on, so a slow lake slows the reader and
nothing else. The reader ends when the driver is gone or silent, when the server ends the stream, and, so that a
shutdown of the server never waits for us, when the server waits for a confirmation that does not come in time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from headwater.errors import HeadwaterError, SourceUnreachable
from headwater.log.blocks import Chunk
from headwater.log.framing import Framer, ProtocolError
from headwater.source.stream import Keepalive, LogStream

CHUNK_BYTES: Final = 4 << 20
FEEDBACK_SECONDS: Final = 1.0
SHUTDOWN_PATIENCE: Final = 4.0
DRIVER_SILENCE: Final = 20.0


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    conninfo: str
    slot: str
    publications: tuple[str, ...]
    start_lsn: int
    server_version: int
    memory: int

    def __repr__(self) -> str:  # the connection string holds a password
        return f"ReaderOptions(slot={self.slot!r})"


@dataclass(frozen=True, slots=True)
class Progress:
    """No change, but news: the log has been read up to `read_position`; `heard`: monotonic time of the server's last
    message; `reply_wanted`: the server waits for a confirmation."""

    read_position: int
    heard: float
    reply_wanted: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """Streaming has begun: the slot is ours."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The reader's last word; None: it was told to stop."""

    error: HeadwaterError | None


class _Reader:
    def __init__(self, options: ReaderOptions, data: Connection, control: Connection) -> None:
        self._options = options
        self._data = data
        self._control = control
        self._framer = Framer()
        self._confirmed = options.start_lsn
        self._in_flight = 0
        self._stop = False
        self._wal_end = options.start_lsn
        self._reported = 0
        self._server_waits_since: float | None = None

    def run(self) -> None:
        stream = LogStream(self._options.conninfo)
        stream.start(
            self._options.slot, self._options.publications, self._options.start_lsn, self._options.server_version
        )
        self._data.send(Started())
        now = time.monotonic()
        self._heard = self._driver_heard = self._fed_back = self._told = now
        try:
            while not self._stop:
                self._round(stream)
        finally:
            stream.end()

    def _round(self, stream: LogStream) -> None:
        self._obey(stream)
        now = time.monotonic()
        if now - self._driver_heard > DRIVER_SILENCE:
            raise SourceUnreachable("the driver has been silent: the slot is given back", where="reader")
        if now - self._fed_back >= FEEDBACK_SECONDS:
            # Asking for an answer proves, both ways, that this connection is alive.
            self._feed_back(stream, ask=True)
        if self._server_waits_since is not None and now - self._server_waits_since > SHUTDOWN_PATIENCE:
            raise SourceUnreachable(
                "the server waits to shut down and the lake has not caught up: the log connection is dropped",
                where="reader",
                remedy="run replicate again when the server is back; it goes on from the ledger",
            )
        idle = True
        if self._in_flight < self._options.memory:
            stream.consume()
            idle = not self._drain(stream)
        if self._framer.has_chunk and (idle or self._framer.size >= CHUNK_BYTES):
            self._ship()
        elif now - self._told >= 0.25 or self._position() > self._reported:
            self._tell(reply_wanted=False)
        if idle:
            watched = [self._control.fileno()]
            if self._in_flight < self._options.memory:
                stream.wait_readable(0.2, *watched)
            else:
                self._control.poll(0.2)

    def _drain(self, stream: LogStream) -> bool:
        """Frame what is here, up to a chunk; whether there was anything."""
        framer = self._framer
        feed = framer.feed
        receive = stream.receive
        got = 0
        while framer.size < CHUNK_BYTES or framer.in_transaction:
            message = receive()
            if message is None:
                break
            got += 1
            if isinstance(message, Keepalive):
                self._keepalive(message)
                continue
            feed(message)
            if not got & 0xFFF:
                # A long transaction must not silence the feedback.
                self._obey(stream)
                if self._stop:
                    return True
                if time.monotonic() - self._fed_back >= FEEDBACK_SECONDS:
                    self._feed_back(stream, ask=True)
        if got:
            self._heard = time.monotonic()
        return got > 0

    def _keepalive(self, message: Keepalive) -> None:
        self._heard = time.monotonic()
        self._wal_end = max(self._wal_end, message.wal_end)
        # With feedback every second the server asks only when it is about to stop (walsender.c, WalSndDone).
        if message.reply and self._heard - self._fed_back < FEEDBACK_SECONDS * 5:
            if self._framer.has_chunk:
                self._ship()
            if self._server_waits_since is None:
                self._tell(reply_wanted=True)

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
        self._data.send(Progress(self._reported, self._heard, reply_wanted))

    def _ship(self) -> None:
        chunk = self._framer.cut()
        self._in_flight += chunk.size
        self._reported = max(self._reported, chunk.read_position)
        self._told = time.monotonic()
        self._data.send(chunk)

    def _obey(self, stream: LogStream) -> None:
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
            elif word == "server is going":
                self._server_waits_since = self._server_waits_since or time.monotonic()
            elif word == "stop":
                self._feed_back(stream, ask=False)
                self._stop = True

    def _feed_back(self, stream: LogStream, *, ask: bool) -> None:
        stream.confirm(self._confirmed, ask=ask)
        self._fed_back = time.monotonic()


def _main(options: ReaderOptions, data: Connection, control: Connection) -> None:
    # Ctrl-C and SIGTERM of a process group are the driver's to handle: it stops us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    error: HeadwaterError | None = None
    try:
        _Reader(options, data, control).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the driver is gone
    except HeadwaterError as known:
        error = known
    except ProtocolError as bad:
        error = HeadwaterError(str(bad), code="protocol_error", where="log", remedy="report this as a bug")
    except Exception as unexpected:
        error = HeadwaterError(f"the reader failed: {type(unexpected).__name__}: {unexpected}", where="log")
    with contextlib.suppress(OSError):
        data.send(Ended(error))


class LogReader:
    """The driver's side: starts the process, holds what arrives, confirms, stops. Use as a context manager.

    `wait` sleeps until something is there or the time is up; `take` gives the next chunk. `on_arrival` is called in
    the receiving thread for each chunk before it can be taken, so that the position file may name it pending.
    """

    def __init__(self, options: ReaderOptions, on_arrival: Any = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._data, data = context.Pipe(duplex=False)
        control, self._control = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_main, args=(options, data, control), name="headwater-reader", daemon=True
        )
        self._child_ends = (data, control)
        self._on_arrival = on_arrival
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._ended: Ended | None = None
        self._started = False
        self._closing = threading.Event()
        self._send_lock = threading.Lock()
        self.read_position = options.start_lsn
        self.heard = time.monotonic()
        self.reply_wanted = False

    def __enter__(self) -> LogReader:
        self._process.start()
        for end in self._child_ends:
            end.close()
        threading.Thread(target=self._receive, name="headwater-receiver", daemon=True).start()
        threading.Thread(target=self._beat, name="headwater-heartbeat", daemon=True).start()
        with self._changed:
            answered = self._changed.wait_for(lambda: self._started or self._ended is not None, timeout=60)
        try:
            self._raise_if_ended()
            if not answered:
                raise SourceUnreachable("the log connection did not start within 60 s", where="reader")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._send("stop", None)
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=5)
        self._closing.set()

    def wait(self, seconds: float) -> None:
        """Until a chunk, a wish of the server, the end, or `seconds` have passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._chunks) or self._ended is not None or self.reply_wanted, timeout=seconds
            )
            self._raise_if_ended()

    def take(self) -> Chunk | None:
        """The next chunk, or None. Its memory budget is returned by `taken`."""
        with self._changed:
            return self._chunks.popleft() if self._chunks else None

    def waiting(self) -> list[Chunk]:
        with self._changed:
            return list(self._chunks)

    @property
    def idle_position(self) -> int | None:
        """The read position if nothing waits to be taken; else None."""
        with self._changed:
            return None if self._chunks else self.read_position

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def taken(self, size: int) -> None:
        self._send("taken", size)

    def confirm(self, lsn: int) -> None:
        """Only ever behind the ledger."""
        self.reply_wanted = False
        self._send("confirm", lsn)

    def server_is_going(self) -> None:
        """The server is shutting down: confirm what is left within the patience, else drop the connection."""
        self._send("server is going", None)

    def _send(self, word: str, value: Any) -> None:
        with self._send_lock, contextlib.suppress(OSError):
            self._control.send((word, value))

    def _beat(self) -> None:
        while not self._closing.wait(1.0):
            self._send("alive", None)

    def _receive(self) -> None:
        ended = Ended(SourceUnreachable("the log reader process died", where="reader", remedy="run replicate again"))
        try:
            while True:
                item = self._data.recv()
                if isinstance(item, Ended):
                    ended = item
                    break
                self._arrived(item)
        except (EOFError, OSError):
            pass
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    def _arrived(self, item: Chunk | Progress | Started) -> None:
        if isinstance(item, Chunk) and self._on_arrival is not None:
            self._on_arrival(item)
        with self._changed:
            if isinstance(item, Chunk):
                self._chunks.append(item)
                self.read_position = max(self.read_position, item.read_position)
                self.heard = time.monotonic()
            elif isinstance(item, Progress):
                self.read_position = max(self.read_position, item.read_position)
                self.heard = item.heard
                self.reply_wanted = self.reply_wanted or item.reply_wanted
            else:
                self._started = True
            self._changed.notify_all()

    def _raise_if_ended(self) -> None:
        if self._ended is None:
            return
        raise self._ended.error or SourceUnreachable("the log reader has stopped", where="reader")
