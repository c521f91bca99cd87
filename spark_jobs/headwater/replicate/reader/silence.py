"""A driver that has heard nothing from the server commits nothing: another driver may have the slot by now."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final

from headwater.errors import HeadwaterError, Transient
from headwater.replicate.reader.handle import LogReader
from headwater.source.connection import Connection, Session
from headwater.source.slot import read_slot
from headwater.source.stream import RECONNECT_SECONDS

_PATIENCE: Final = 0.2
_ASK_SECONDS: Final = 1.0


class Silence:
    """`limit`: seconds without a word of the server after which it may give the slot to another driver
    (`silence_limit`). `stop`: the run is to end."""

    def __init__(self, reader: LogReader, source: Session, slot: str, limit: float, stop: threading.Event) -> None:
        self._reader, self._source, self._slot = reader, source, slot
        self._limit, self._stop = limit, stop
        self._known = 0.0  # when the slot was ours for certain, by its own word
        self._asked = 0.0
        self._asking = threading.Lock()

    def refuse(self) -> None:
        """A driver that has heard nothing from the server may have lost the slot: it commits nothing before it has.

        Where this process itself stood still (SIGSTOP, a frozen machine) the next answer comes at once, or the reader
        connects anew. Whether somebody took the driver's place meanwhile the ledger's fence says. A reader that may
        hold no more in memory hears nothing either: then the slot is asked whose it is. After as long as a reader would
        try, silence is an error. From any thread.
        """
        deadline = time.monotonic() + RECONNECT_SECONDS
        # On another connection the reader hears nothing more before the driver says so.
        while (silence := self._silence()) > self._limit and not self._reader.started_again:
            self._reader.raise_if_ended()
            if time.monotonic() > deadline or self._stop.is_set():
                raise Transient(
                    f"the server has not answered for {silence:.0f} s: another driver may have taken the slot",
                    code="silent_source",
                    where="log connection",
                    remedy="run replicate again; it goes on from the ledger",
                )
            self._stop.wait(_PATIENCE)
            self._ask()

    def _silence(self) -> float:
        return time.monotonic() - max(self._reader.heard, self._known)

    def _ask(self) -> None:
        with self._asking:
            moment = time.monotonic()
            if self._silence() <= self._limit or moment - self._asked < _ASK_SECONDS:
                return
            self._asked = moment
            with contextlib.suppress(HeadwaterError), self._source.apart() as connection:
                slot = read_slot(connection, self._slot)
                if slot is not None and slot.active_pid == self._reader.walsender:
                    self._known = moment


def silence_limit(connection: Connection) -> float:
    """Half of wal_sender_timeout, after which the server may give the slot to another driver; 30 s if it is off."""
    row = connection.execute("select setting::int from pg_settings where name = 'wal_sender_timeout'").fetchone()
    milliseconds = int(row[0]) if row else 0
    return milliseconds / 2000 if milliseconds else 30.0
