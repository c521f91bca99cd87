"""The hand-over of a pipeline's slot from one driver to the next, without a pause in between.

A driver that is started to take over makes everything ready beside the one that runs, and then waits for the slot. It
says so by two advisory locks at the source, held by a session of its own: *announced* as soon as it has begun, *warm*
when it could go on at once. The running driver looks for them once a second. The locks decide nothing about who may
write: that is the slot's business and the generation's, exactly as if the one had died and the other were started.

Why locks and not a file or a registry record: they are put if absent, have one owner, and end with its session, whoever
is killed; nothing is left to be cleaned up, and no clock is asked (docs/decisions/0019).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from types import TracebackType
from typing import Final, Protocol, Self

from headwater.errors import LostLease
from headwater.failpoints import reach
from headwater.source.connection import Connection, connect, errors_named

log = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 300.0
"""So long past its slice's end a driver goes on for a successor that has announced itself and is not warm yet."""
_ANNOUNCED, _WARM = 1, 2
_LOOK_SECONDS: Final = 0.02
_PATIENT_SECONDS: Final = 0.2
"""Between looks at the slot: while it is expected to come free at any moment, and else."""
_SOON: Final = 10.0
_CLAIM_SECONDS: Final = 5.0

_HELD: Final = """
select l.objid::bigint, l.pid
  from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'advisory' and l.objsubid = 2 and l.granted and l.classid::bigint = %s
   and a.datname = current_database() and a.usename = current_user
   and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
"""


def _lock_class(slot: str) -> int:
    """The first of the two numbers of our advisory locks: one per slot, as a signed 32-bit number."""
    digest = hashlib.blake2b(f"headwater succession {slot}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big", signed=True)


class SuccessorWatch:
    """The running driver's eye on whoever wants to take over. `look` and `why_stop` may be called by two threads.

    `overtime`: so many seconds past its slice's end it goes on while nobody has come, so that there is no pause.
    `claim`: the server process of its own claim, which it has given up: a busy server may hold the locks of a session
    that has gone for a while yet, and who took them for a successor's would hand over to nobody.
    """

    def __init__(self, slot: str, overtime: float = 0.0, claim: int | None = None) -> None:
        self._class, self._overtime, self._claim = _lock_class(slot), overtime, claim
        self._held: frozenset[int] = frozenset()
        self.handed_over = False

    def look(self, connection: Connection) -> None:
        """Ask the source. Only locks of our own role count: anybody may take any advisory lock."""
        rows = connection.execute(_HELD, [self._class & 0xFFFFFFFF]).fetchall()
        if all(pid != self._claim for _, pid in rows):
            self._claim = None  # another session may come to have that number
        self._held = frozenset(number for number, pid in rows if pid != self._claim)

    def look_away(self) -> None:
        """The source cannot be asked: a successor that may be gone by now must not end this driver."""
        self._held = frozenset()

    def why_stop(self, target: int | None, deadline: float | None) -> str | None:
        """Whether a driver ends now, and by which of the interface's words. `deadline`: by `time.monotonic`.

        One with a target of its own is waited for: whoever started it wants to see it reached.
        """
        held = self._held
        warm = target is None and _WARM in held
        if warm and not self.handed_over:
            log.info("a successor is ready: handing over")
        self.handed_over = warm  # a driver that still has something to end asks again, and the other may be gone
        if warm:
            return "signal" if deadline is None else "seconds"
        if deadline is None:
            return None
        awaited = self._overtime + (PATIENCE_SECONDS if _ANNOUNCED in held else 0.0)
        return None if time.monotonic() < deadline + (awaited if target is None else 0.0) else "seconds"


class Successor:
    """A driver's claim to be the next. LostLease on entering when another one waits already; ends with the session."""

    def __init__(self, conninfo: str, slot: str) -> None:
        self._conninfo = conninfo
        self._slot = slot
        self._class = _lock_class(slot)

    def __enter__(self) -> Self:
        self._connection = connect(self._conninfo, application_name="headwater successor")
        try:
            if not self._announce():
                raise LostLease(
                    "another replicate waits to take over already",
                    code="successor_waiting",
                    where=f"replication slot {self._slot}",
                    remedy="nothing: it goes on when the running one ends",
                )
        except BaseException:
            self._connection.close()
            raise
        reach("take_over.announced")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _announce(self) -> bool:
        """Not refused at once: of two that start together, one takes a free slot and gives its claim up in a moment."""
        deadline = time.monotonic() + _CLAIM_SECONDS
        while not (announced := self._lock(_ANNOUNCED)) and time.monotonic() < deadline:
            time.sleep(_PATIENT_SECONDS)
        return announced

    @property
    def claim(self) -> int:
        """The server process that holds it."""
        return self._connection.info.backend_pid

    def close(self) -> None:
        """Give the claim up: when the slot is ours, the next one may announce itself."""
        self._connection.close()

    def say_warm(self) -> None:
        self._lock(_WARM)
        log.info("ready to take over")

    def slot_is_free(self) -> bool:
        """Also when there is no such slot: what that means is found out as at any start."""
        with errors_named("source"):
            row = self._connection.execute(
                "select active from pg_catalog.pg_replication_slots where slot_name = %s", [self._slot]
            ).fetchone()
        return row is None or not row[0]

    def _lock(self, number: int) -> bool:
        with errors_named("source"):
            row = self._connection.execute("select pg_try_advisory_lock(%s, %s)", [self._class, number]).fetchone()
        return row is not None and bool(row[0])


class Preparation(Protocol):
    """What is made ready while another driver runs, in a thread of its own."""

    @property
    def is_warm(self) -> bool: ...


def await_slot(
    successor: Successor, preparation: Preparation, stop: threading.Event, deadline: float | None
) -> str | None:
    """Until the slot is free: None. Else why the wait ended before, by one of the interface's words.

    A slot that comes free early (the other driver ended, or died) is taken as things stand.
    """
    began, warm_since = time.monotonic(), None
    while not successor.slot_is_free():
        now = time.monotonic()
        if stop.is_set():
            return "signal"
        if deadline is not None and now >= deadline:
            return "seconds"
        if warm_since is None and preparation.is_warm:
            warm_since = now
            successor.say_warm()
            reach("take_over.warm")
        soon = warm_since is not None and now - warm_since < _SOON
        stop.wait(_LOOK_SECONDS if soon else _PATIENT_SECONDS)
    log.info("the slot is free after %.1f s", time.monotonic() - began)
    reach("take_over.slot_is_free")
    return None
