"""The driver's side of the reader process: holds the chunks that arrive, confirms, stops.

The process itself is `headwater.jobs.reader_process`; what it spills lies in a folder that belongs to the driver.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from headwater.errors import SourceUnreachable
from headwater.jobs.chunk_pipe import ChunkReceiver
from headwater.jobs.reader_process import ConninfoWanted, Ended, Progress, ReaderOptions, Started, main
from headwater.log.blocks import Chunk
from headwater.log.large import Announcement, Gone, OpenBlocks, on_their_own
from headwater.log.spill import SpillFolder, spill_files

__all__ = ["LogReader", "ReaderOptions"]

log = logging.getLogger(__name__)


class LogReader:
    """The driver's side: starts the process, holds what arrives, confirms, stops. Use as a context manager.

    `wait` sleeps until something is there or the time is up; `take` gives the next chunk. `on_arrival` is called in
    the receiving thread for each chunk before it can be taken, so that the position file may name it pending.
    `conninfo` gives the connection string anew when the connection has dropped; without it the first one is used.
    `on_open` is told, in the same thread, of large transactions that are still open.
    """

    def __init__(
        self,
        options: ReaderOptions,
        on_arrival: Any = None,
        conninfo: Callable[[], str] | None = None,
        on_open: Callable[[Announcement], None] | None = None,
    ) -> None:
        self._options = options
        self._conninfo = conninfo or (lambda: options.conninfo)
        self._folder = SpillFolder()
        self._on_arrival = on_arrival
        self._on_open = on_open
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
        self._folder.__enter__()
        context = multiprocessing.get_context("spawn")
        self._data, data = context.Pipe(duplex=False)
        control, self._control = context.Pipe(duplex=False)
        self._process = context.Process(
            target=main, args=(self._options, self._folder.path, data, control), name="headwater-reader", daemon=True
        )
        self._process.start()
        for end in (data, control):
            end.close()
        threading.Thread(target=self._receive, name="headwater-receiver", daemon=True).start()
        threading.Thread(target=self._beat, name="headwater-heartbeat", daemon=True).start()
        try:
            with self._changed:
                answered = self._changed.wait_for(lambda: self._started or self._ended is not None, timeout=60)
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
        self._folder.__exit__()

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
    def spill_folder(self) -> str:
        """Where what is too large for memory lies, as long as the block lasts."""
        return self._folder.path

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
        receiver = ChunkReceiver(self._data)
        try:
            while True:
                item = receiver.receive()
                if isinstance(item, Ended):
                    ended = item
                    break
                self._arrived(item)
                del item  # a chunk belongs to whoever takes it: its files go when that one lets go
        except (EOFError, OSError):
            pass
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    def _arrived(self, item: Chunk | Progress | Started | ConninfoWanted | Announcement) -> None:
        if isinstance(item, ConninfoWanted):
            self._tell_conninfo()
            return
        if isinstance(item, OpenBlocks | Gone):
            if self._on_open is not None:
                self._on_open(item)
            return
        if isinstance(item, Chunk):
            for file in spill_files(item.blocks):
                file.remove_after_use()
            for chunk in on_their_own(item):
                self._chunk_arrived(chunk)
            return
        with self._changed:
            if isinstance(item, Progress):
                self.read_position = max(self.read_position, item.read_position)
                self.heard = item.heard
                self.reply_wanted = self.reply_wanted or item.reply_wanted
            else:
                self._started = True
            self._changed.notify_all()

    def _chunk_arrived(self, chunk: Chunk) -> None:
        if self._on_arrival is not None:
            self._on_arrival(chunk)
        with self._changed:
            self._chunks.append(chunk)
            self.read_position = max(self.read_position, chunk.read_position)
            self.heard = time.monotonic()
            self._changed.notify_all()

    def _tell_conninfo(self) -> None:
        try:
            now = self._conninfo()
        except Exception:
            log.warning("the connection string cannot be read anew: the reader goes on with the one it had")
            now = self._options.conninfo
        self._send("conninfo", now)

    def _raise_if_ended(self) -> None:
        if self._ended is None:
            return
        raise self._ended.error or SourceUnreachable("the log reader has stopped", where="reader")
