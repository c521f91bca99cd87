"""Samples and positions: what the source's clock and log say now.

A sample is (source clock, log position) of one query, and the only clock that freshness knows. The clock is read
first: every transaction committed before that time has its commit record below the position read after it.

Positions in this module are ends of what was written, never guesses below it, so a reader that has passed one
has everything up to it. A standby knows none: asked there, all of this raises `SourceUnreachable` (`in_recovery`).
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from psycopg.pq import TransactionStatus

from headwater.errors import Refused
from headwater.position import Position, parse_lsn
from headwater.source.connection import Connection, errors_named, not_the_primary, primary_position

MARKER_PREFIX = "headwater"
_FLUSH_SINCE = 170000


@dataclass(frozen=True, slots=True)
class Sample:
    """Every transaction committed at the source before `time` (its clock, UTC) ends at or below `lsn`."""

    time: datetime.datetime
    lsn: int


def take_sample(connection: Connection) -> Sample:
    """Clock and insert position, in that order."""
    with errors_named("the source's clock"):
        row = connection.execute(
            "select clock_timestamp(), (case when not pg_is_in_recovery() then pg_current_wal_insert_lsn() end)::text"
        ).fetchone()
    assert row is not None
    if row[1] is None:
        raise not_the_primary()
    return Sample(row[0].astimezone(datetime.UTC), parse_lsn(row[1]))


def insert_position(connection: Connection) -> Position:
    """Where the next record of the log begins.

    It may lie above anything that is flushed, and just above a page header, so that the position of an idle
    connection that streams the log stays below it: whoever waits for it writes a marker.
    """
    return primary_position(connection)


def commit_position(connection: Connection) -> Position:
    """A position at or above the end of the last commit of the caller's own session: wait for it to see that commit.

    The insert position read after COMMIT has returned is one: the session wrote its commit record before that,
    and the position only rises. (The exact end is not told by the server.) It may include commits of others.
    ValueError inside an open transaction, whose commit is still to come.
    """
    if connection.info.transaction_status != TransactionStatus.IDLE:
        raise ValueError("the connection is inside a transaction: commit it before asking for its position")
    if connection.autocommit:
        return primary_position(connection)
    with connection.transaction():  # leaves the caller's connection as idle as it was
        return primary_position(connection)


def emit_marker(connection: Connection) -> int:
    """Writes a logical message into the log, flushed when this returns, and gives the end of its record.

    So that a reader of the log meets something at or above every position asked for before the call: ask first,
    then mark. The log reports the message with just the position returned (run on 15 and 18).

    It never waits for a synchronous standby. Since 17 the function itself can flush: no transaction is involved.
    Before, an unflushed message would stay unseen until something else flushes the log, so it is sent as a
    transaction of its own, whose COMMIT flushes, with `synchronous_commit = local` against the wait. The result is
    the message's own end there too, which lies below the end of that COMMIT: a reader that has read it has passed
    the result. (The insert position after the COMMIT would not do: others may have written, and not flushed, more.)

    Needs a connection in autocommit mode and a primary: `Refused` (`cannot_mark`) on a standby.
    """
    if not connection.autocommit or connection.info.transaction_status != TransactionStatus.IDLE:
        raise ValueError("a marker needs a connection in autocommit mode, outside of a transaction")
    if connection.info.server_version >= _FLUSH_SINCE:
        message = f"pg_logical_emit_message(false, '{MARKER_PREFIX}', '', true)"
    else:
        message = f"pg_logical_emit_message(true, '{MARKER_PREFIX}', '')"
    query = f"select (case when not pg_is_in_recovery() then {message} end)::text"
    with errors_named("a marker in the source's log"):
        if connection.info.server_version >= _FLUSH_SINCE:
            row = connection.execute(query).fetchone()
        else:
            with connection.transaction():
                connection.execute("set local synchronous_commit = local")
                row = connection.execute(query).fetchone()
    if row is None or row[0] is None:
        raise Refused(
            "the source is a standby, whose log nobody writes but its primary",
            code="cannot_mark",
            remedy="wait without markers: replicate.max_seconds is then the bound",
        )
    return parse_lsn(row[0])
