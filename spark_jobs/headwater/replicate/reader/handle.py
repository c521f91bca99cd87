"""The driver's side of the reader: holds the chunks that arrive, confirms, stops.

The process itself is `headwater.replicate.reader.process`; who starts and ends it, `headwater.replicate.reader.child`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from headwater.errors import HeadwaterError, SourceUnreachable
from headwater.failpoints import reach
from headwater.log.blocks import Chunk
from headwater.log.hiding import Hiding
from headwater.log.large import Announcement, Gone, OpenBlocks, on_their_own
from headwater.log.packing import PackedChunk, Unpacker
from headwater.log.spill import spill_files
from headwater.replicate.batches.stage_times import BusyShares
from headwater.replicate.reader.child import ReaderProcess
from headwater.replicate.reader.pipe import ChunkReceiver
from headwater.replicate.reader.process import (
    DRIVER_SILENCE,
    Awake,
    ConninfoWanted,
    Ended,
    Hides,
    LogProgress,
    ReaderOptions,
    Spent,
    Started,
    StartedAgain,
    kind_and_place,
)

__all__ = ["LogReader", "ReaderOptions"]

log = logging.getLogger(__name__)


class LogReader:
    """The driver's side: starts the process, holds what arrives, confirms, stops. Use as a context manager.

    `wait` sleeps until something is there or the time is up; `take` gives the next chunk. `on_arrival` is called in
    the receiving thread for each chunk before it can be taken, so that the position file may name it pending.
    `conninfo` gives the connection string anew when the connection has dropped; without it the first one is used.
    `process`: one that was started before; it is ended here, too.
    `on_open` is told, in the same thread, of large transactions that are still open.
    """

    def __init__(
        self,
        options: ReaderOptions,
        on_arrival: Callable[[Chunk], None] | None = None,
        conninfo: Callable[[], str] | None = None,
        process: ReaderProcess | None = None,
        on_open: Callable[[Announcement], None] | None = None,
    ) -> None:
        self._options = options
        self._conninfo = conninfo or (lambda: options.conninfo)
        self._prepared = process
        self._on_arrival = on_arrival
        self._on_open = on_open
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._ended: Ended | None = None
        self._started = False
        self._told_to_hide = self._hides = 0
        self._hidden: Hiding | None = None
        self._hiding_lock = threading.Lock()
        self.read_position = options.start_lsn
        self.heard = time.monotonic()
        self.walsender = 0
        """The server's process on the log connection."""
        self.reply_wanted = False
        self.started_again = 0
        """So many times on another connection, of which nothing is read before `read_on`. 0: it reads."""
        self.busy = BusyShares()
        """Of the reader's stages; the driver adds its own."""
        self._woken = False

    def __enter__(self) -> LogReader:
        self._child = self._prepared or ReaderProcess()
        self._child.read(self._options)
        threading.Thread(target=self._receive, name="headwater-receiver", daemon=True).start()
        try:
            with self._changed:
                answered = self._changed.wait_for(lambda: self._started or self._ended is not None, timeout=60)
            self.raise_if_ended()
            if not answered:
                raise SourceUnreachable("the log connection did not start within 60 s", where="reader")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._child.tell("stop")
        self._child.end()

    def release(self) -> None:
        """Give the slot back and return at once: nothing more will be taken or confirmed."""
        self._child.tell("stop")

    def wait(self, seconds: float) -> None:
        """Until a chunk, a wish of the server, another connection, the end, a `wake`, or `seconds` have passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._chunks) or self._ended is not None or self.reply_wanted or self._woken,
                timeout=seconds,
            )
            self._woken = False
            self.raise_if_ended()

    def wake(self) -> None:
        """End a `wait`, from another thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self) -> Chunk | None:
        """The next chunk, or None. Its memory budget is returned by `taken`."""
        with self._changed:
            return self._chunks.popleft() if self._chunks else None

    def waiting(self) -> list[Chunk]:
        with self._changed:
            return list(self._chunks)

    def backlog(self) -> tuple[int, int]:
        """Changes and bytes of the log that wait to be taken."""
        waiting = self.waiting()
        return sum(chunk.changes for chunk in waiting), sum(chunk.size for chunk in waiting)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    @property
    def spill_folder(self) -> str:
        """Where what is too large for memory lies, as long as the block lasts."""
        return self._child.folder

    @property
    def idle_position(self) -> int | None:
        """The read position if nothing waits to be taken; else None."""
        with self._changed:
            return None if self._chunks else self.read_position

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def taken(self, size: int) -> None:
        self._child.tell("taken", size)

    def confirm(self, lsn: int) -> None:
        """Only ever behind the ledger."""
        self.reply_wanted = False
        self._child.tell("confirm", lsn)

    def hide(self, hiding: Hiding) -> None:
        """Returns when it holds for whatever the log brings from now on; one call after the other."""
        with self._hiding_lock:
            if hiding == self._hidden:
                return
            self._told_to_hide += 1
            self._child.tell("hide", (self._told_to_hide, hiding))
            with self._changed:
                self._changed.wait_for(
                    lambda: self._hides == self._told_to_hide or self._ended is not None, timeout=DRIVER_SILENCE
                )
                self.raise_if_ended()
                if self._hides != self._told_to_hide:
                    raise SourceUnreachable("the log reader does not answer", where="reader")
            self._hidden = hiding

    def read_on(self, started_again: int) -> None:
        """What jobs have asked for before it has `started_again` so many times is known."""
        with self._changed:
            if self.started_again == started_again:
                self.started_again = 0
        self._child.tell("read on", started_again)

    def no_session(self, *, stops: bool) -> None:
        """The server has ended a SQL session, or admits none. `stops`: since it shuts down: what is left is confirmed
        within the patience, else the connection is dropped. If that is not known, the log connection tells."""
        self._child.tell("no session", stops)

    def _receive(self) -> None:
        ended = Ended(SourceUnreachable("the log reader process died", where="reader", remedy="run replicate again"))
        receiver, unpacker = ChunkReceiver(self._child.data), Unpacker()
        try:
            while True:
                try:
                    item = receiver.receive()
                except (EOFError, OSError):
                    break
                if isinstance(item, Ended):
                    ended = item
                    break
                if isinstance(item, PackedChunk):
                    item = unpacker.unpack(item)
                self._arrived(item)
                del item  # a chunk belongs to whoever takes it: its files go when that one lets go
        except HeadwaterError as known:
            ended = Ended(known)
        except Exception as error:
            ended = Ended(HeadwaterError(f"the log could not be taken in: {kind_and_place(error)}", where="log"))
        finally:
            with self._changed:
                self._ended = ended
                self._changed.notify_all()

    def _arrived(
        self, item: Chunk | LogProgress | Awake | Started | StartedAgain | Spent | ConninfoWanted | Announcement | Hides
    ) -> None:
        if isinstance(item, ConninfoWanted):
            self._tell_conninfo()
            return
        if isinstance(item, Spent):
            self.busy.add(item.stages, item.size)
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
            if isinstance(item, LogProgress):
                self.read_position = max(self.read_position, item.read_position)
                self.heard = item.heard
                self.reply_wanted = self.reply_wanted or item.reply_wanted
            elif isinstance(item, Started):
                self._started = True
                self.walsender = item.walsender
            elif isinstance(item, StartedAgain):
                self.heard, self.walsender = item.heard, item.walsender
                self.started_again = item.number
                self._woken = True
            elif isinstance(item, Hides):
                self._hides = item.number
            self._changed.notify_all()

    def _chunk_arrived(self, chunk: Chunk) -> None:
        reach("replicate.before_chunk")
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
            log.warning("the connection string cannot be read again: the reader goes on with the one it had")
            now = self._options.conninfo
        self._child.tell("conninfo", now)

    def raise_if_ended(self) -> None:
        """The reader's last word as an error, if it has spoken it."""
        if self._ended is None:
            return
        raise self._ended.error or SourceUnreachable("the log reader has stopped", where="reader")
