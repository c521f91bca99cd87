"""Snapshots of the source: which transactions one of them sees, and the capture point of a load.

A load hands over to the log by visibility alone. "The commit's LSN is below the LSN noted before" does not mean
that a snapshot saw it: a commit is in the log before it is visible (for as long as a synchronous standby stalls).

Transaction ids are 64 bit here (epoch included, PostgreSQL's xid8), the log and the catalogs carry their low 32
bits. A snapshot lists top-level transactions only: never ask it about a subtransaction's id.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from headwater.errors import Transient
from headwater.position import Position, parse_lsn
from headwater.source.connection import Connection, connect, errors_named, primary_position

log = logging.getLogger(__name__)

_WRAP = 1 << 32
_FIRST_WORD_SECONDS, _WORD_SECONDS = 5.0, 60.0
VISIBLE_SECONDS = 10.0
"""How long what the log has told of is waited for: a commit is in the log before other sessions see it."""
_VISIBLE_LOOK_SECONDS = 0.02
_MOST_MILLISECONDS = (1 << 31) - 1  # that a time-out of the server can be: 24 days


@dataclass(frozen=True, slots=True)
class VisibilitySnapshot:
    """`xmin`: all below have ended. `xmax`: none from here on had begun. `in_progress`: those running in between."""

    xmin: int
    xmax: int
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> VisibilitySnapshot:
        """From the form of PostgreSQL's type pg_snapshot, e.g. `10:20:10,14,15`."""
        try:
            xmin, xmax, running = text.split(":")
            snapshot = cls(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))
        except ValueError:
            raise ValueError(f"{text!r} is not a snapshot; one looks like 10:20:10,14,15") from None
        if not 0 < snapshot.xmin <= snapshot.xmax or any(
            not snapshot.xmin <= xid < snapshot.xmax for xid in snapshot.in_progress
        ):
            raise ValueError(f"{text!r} is not a snapshot: its parts contradict each other")
        return snapshot

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.in_progress)))}"

    def visible(self, xid: int) -> bool:
        """Whether what the top-level transaction `xid` (64 bit) committed is in the snapshot."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.in_progress)

    def visible_mask(self, xids32: Sequence[int]) -> list[bool]:
        """`visible` for top-level ids as the log carries them."""
        return [self.visible(widen_xid(xid, self.xmax)) for xid in xids32]


def widen_xid(xid32: int, near: int) -> int:
    """The 64-bit transaction id with the low half `xid32` that lies nearest to `near`.

    Exact as long as the two are less than 2**31 transactions apart, which PostgreSQL itself enforces for all it keeps.
    """
    ahead = (xid32 - near) % _WRAP
    wide = near + (ahead if ahead < _WRAP // 2 else ahead - _WRAP)
    return wide if wide >= 0 else wide + _WRAP


def all_visible(connection: Connection, xids32: Collection[int]) -> bool:
    """Whether a statement that begins now sees what the committed top-level transactions `xids32` did."""
    if not xids32:
        return True
    _needs_fresh_snapshots(connection)
    with errors_named("the visible transactions"):
        row = connection.execute("select pg_current_snapshot()::text").fetchone()
    assert row is not None
    return all(VisibilitySnapshot.parse(row[0]).visible_mask(list(xids32)))


def become_visible(connection: Connection, xids32: Collection[int], seconds: float) -> bool:
    """Whether `all_visible`, which is waited for, so long at most."""
    deadline = time.monotonic() + seconds
    while not (visible := all_visible(connection, xids32)) and time.monotonic() < deadline:
        time.sleep(_VISIBLE_LOOK_SECONDS)
    return visible


def require_visible(connection: Connection, xids32: Collection[int], where: str) -> None:
    """Before the catalog is asked about what these committed top-level transactions hold of `where`: else it would
    answer for the time before them. Transient when they do not become visible in `VISIBLE_SECONDS`."""
    if not become_visible(connection, xids32, VISIBLE_SECONDS):
        raise Transient(
            f"what was committed at the source is not visible there {VISIBLE_SECONDS:g} s later: a synchronous standby "
            "does not answer",
            code="not_visible",
            where=where,
            remedy="bring the standby back, or change synchronous_standby_names; then run replicate again: nothing is "
            "lost",
        )


@dataclass(frozen=True, slots=True)
class CapturePoint:
    """Where a load reads. Every commit that `snapshot` sees ends at or below `position`; the reverse does not hold.

    `snapshot_id` can be imported by other sessions of the same database (`set transaction snapshot`) while
    `connection`, whose transaction holds it, stays open.
    """

    snapshot_id: str
    snapshot: VisibilitySnapshot
    position: Position
    connection: Connection


@contextlib.contextmanager
def capture_point(conninfo: str, max_age: float = 0) -> Iterator[CapturePoint]:
    """One REPEATABLE READ, READ ONLY transaction, held open inside the block and then rolled back. `max_age`: seconds
    after which the server ends it, whatever has become of us; 0: never. It counts from the last question to the
    session: inside the block only a load asks one, at its beginning, for the catalog. SourceUnreachable (`in_recovery`)
    at a standby, which lacks what its primary has committed."""
    connection = connect(conninfo, application_name="headwater capture point")
    with contextlib.closing(connection):
        with errors_named("the capture point"):
            bound = f"{min(round(max_age * 1000), _MOST_MILLISECONDS)}ms"
            connection.execute("select set_config('idle_in_transaction_session_timeout', %s, false)", [bound])
            connection.execute("begin isolation level repeatable read, read only")
            row = connection.execute("select pg_export_snapshot(), pg_current_snapshot()::text").fetchone()
        assert row is not None
        # In a later statement: in the same one it could be read before the snapshot is taken.
        position = primary_position(connection)
        yield CapturePoint(row[0], VisibilitySnapshot.parse(row[1]), position, connection)


def handover_end(connection: Connection, snapshot: VisibilitySnapshot) -> int | None:
    """A position above which no transaction with an id below the snapshot's xmax commits; None while such ones run.

    From that position on nothing has to be asked of the snapshot any more. A statement takes its own snapshot
    before it calls functions, so the position is read after the look at the transactions; and a transaction
    leaves the list of running ones only after its commit record is in the log.
    """
    _needs_fresh_snapshots(connection)
    with errors_named("the end of the hand-over"):
        row = connection.execute(
            "select pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_current_wal_insert_lsn()::text"
        ).fetchone()
    assert row is not None
    return parse_lsn(row[1]) if row[0] >= snapshot.xmax else None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that others wait for. `age` in seconds, None where the role may not see it."""

    xid: int
    pid: int | None
    user: str
    database: str
    age: float | None
    prepared_as: str | None

    def __str__(self) -> str:
        what = f"prepared transaction '{self.prepared_as}'" if self.prepared_as is not None else f"process {self.pid}"
        age = "" if self.age is None else f", open for {self.age:.0f} s"
        return f"{what} (user {self.user or '?'}, database {self.database or '?'}, transaction {self.xid}{age})"


def open_transactions(connection: Connection, below: int) -> list[OpenTransaction]:
    """Transactions of the whole server, prepared ones too, with an id lower than `below` (64 bit). Needs no right."""
    with errors_named("the open transactions"):
        rows = connection.execute(
            """
            select backend_xid::text::bigint, pid, usename::text, datname::text,
                   extract(epoch from clock_timestamp() - xact_start)::float8, null
              from pg_stat_activity where backend_xid is not null
            union all
            select transaction::text::bigint, null, owner::text, database::text,
                   extract(epoch from clock_timestamp() - prepared)::float8, gid
              from pg_prepared_xacts
            """
        ).fetchall()
    found = [
        OpenTransaction(widen_xid(xid, below), pid, user or "", database or "", age, gid)
        for xid, pid, user, database, age, gid in rows
    ]
    return sorted((transaction for transaction in found if transaction.xid < below), key=lambda one: one.xid)


def open_now(connection: Connection) -> list[OpenTransaction]:
    """Every transaction of the server that has an id, prepared ones too. Needs no right, uses up no id."""
    with errors_named("the open transactions"):
        row = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    # Running ones may have ids above the snapshot's end; half the range of ids is far above them all.
    return open_transactions(connection, int(row[0]) + _WRAP // 4)


def next_transaction_id(connection: Connection) -> int:
    """An id (64 bit) above that of every transaction that has one now.

    Uses one up, in a transaction that is rolled back. `pg_snapshot_xmax` is not such an id: it is one more than
    the newest *ended* transaction, and a running one may have that id or a higher one.
    """
    _needs_fresh_snapshots(connection)
    with errors_named("the next transaction id"), connection.transaction(force_rollback=True):
        row = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


def wait_for_old_transactions(
    connection: Connection,
    xmax: int,
    timeout: float,
    *,
    where: str = "",
    stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Waits until every transaction has ended that has an id below `xmax` or has one now; True when so.

    Call it when what those transactions must not have missed is committed. `xmax` alone would not do: read from a
    snapshot, it may lie at or below the id of a running transaction (see `next_transaction_id`), which would then
    not be waited for and lose in the log what it wrote before.

    Counts the whole server, prepared transactions too. False when `stopped()` said to give up. After `timeout`
    seconds `Transient` ("old_transactions") that names those still open; so does the log while it waits.
    """
    xmax = max(xmax, next_transaction_id(connection))
    began = time.monotonic()
    deadline, next_word = began + timeout, began + _FIRST_WORD_SECONDS
    pause = 0.02
    while not stopped():
        with errors_named("the open transactions"):
            row = connection.execute("select pg_snapshot_xmin(pg_current_snapshot())::text::bigint").fetchone()
        assert row is not None
        if row[0] >= xmax:
            return True
        left = deadline - time.monotonic()
        if left <= 0:
            names = "; ".join(map(str, open_transactions(connection, xmax))) or "they have just ended"
            raise Transient(
                f"transactions that began before it are still open after {timeout:g} s: {names}",
                code="old_transactions",
                where=where,
                remedy="end them (a process: select pg_terminate_backend(pid); a prepared one: rollback prepared), or "
                "raise load.wait_for_old_transactions, and run the command again",
            )
        if time.monotonic() >= next_word and (open_now := open_transactions(connection, xmax)):
            next_word = time.monotonic() + _WORD_SECONDS
            names = "; ".join(map(str, open_now))
            log.info("%s: waiting, for %.0f s more at most, for the end of older transactions: %s", where, left, names)
        time.sleep(min(pause, left))
        pause = min(pause * 2, 1.0)
    return False


def _needs_fresh_snapshots(connection: Connection) -> None:
    if not connection.autocommit:
        raise ValueError("this needs a connection in autocommit mode: an open transaction may keep seeing the past")
