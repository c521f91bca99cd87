"""The log connection: START_REPLICATION on a logical slot, bytes in, feedback out.

PostgreSQL documentation, "Streaming Replication Protocol". libpq through `psycopg.pq`, non-blocking: `receive`
returns at once, `wait_readable` waits. Confirming is the caller's decision and happens only behind the ledger.
"""

from __future__ import annotations

import re
import select
import struct
import time
from dataclasses import dataclass
from typing import Final

from psycopg import conninfo as pg_conninfo
from psycopg import errors as pg_errors
from psycopg import pq

from headwater.errors import HeadwaterError, LostLease, Refused, SlotGap, SourceChanged, SourceUnreachable
from headwater.position import format_lsn, parse_lsn
from headwater.source.renewal import newest, renewed

# Text forms of types whose binary form is text, equal to those of the load's sessions; no timeout may cut a stream.
_SETTINGS = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
_WORK_MEM: Final = "4MB"
"""From here on the server sends an open transaction instead of keeping it in memory and then on its disk. `options` of
the connection string may say otherwise."""
_LONG: Final = 4096
"""Bytes of a message from which on a copy costs more than keeping libpq's buffer."""
RUN_MESSAGES: Final = 16_384
"""`receive` returns after so many, or at the end of the transaction that it is in by then."""
RECONNECT_SECONDS: Final = 20.0
"""How long whoever reads the slot tries to connect again before it gives up."""
_OPERATION: Final = 25
_ENDS: Final = b"CEcA"
"""Operations of Commit, and of the ends of a segment and of a transaction in progress."""
_KEEPALIVE_SIZE: Final = 18
_LOST_STATES: Final = ("08", "57", "25P04")
"""Connection exceptions; shutdown, crash, starting up, terminated, cancelled; transaction_timeout."""
_RESOURCE_STATES: Final = ("53", "58")
"""The server has no room or memory, or its disk fails: another try finds it as it is then."""
_NO_PUBLICATION: Final = "42704"
_BEYOND_LIMIT, _BEYOND_ALLOCATION = "54000", "invalid memory alloc request size"
"""Of a message and of one value; the latter has no SQLSTATE of its own, and its text is never translated."""
_UNTRANSLATABLE: Final = ("22P05", "22021")
"""A character that UTF-8 does not have; bytes that are not UTF-8, which a SQL_ASCII database takes."""
_EPOCH_2000 = 946_684_800
_FEEDBACK = struct.Struct(">cqqqqB")


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server's keepalive: `wal_end` is decoded and sent; `reply` asks for an answer at once."""

    wal_end: int
    reply: bool


class ConnectionLost(SourceUnreachable):
    """The connection has ended, the slot has not: it may be made again."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """Whose log it is, up to where it is on the server's disk, and up to where it was confirmed; None: there is no such
    slot, or it was given up."""

    system_id: str
    timeline: int
    end_lsn: int
    confirmed_lsn: int | None

    def refuse_difference(
        self, system_id: str, timeline: int, confirmed_lsn: int, read_lsn: int, *, again: bool
    ) -> None:
        """SourceChanged or SlotGap unless it is the log of `system_id` and `timeline`, and goes on where it was left:
        at `read_lsn`. `again`: we have read it before. If not, the slot may also have been another driver's since we
        looked at it: LostLease, and the next start tells whether that was one of this lake."""
        if (self.system_id, self.timeline) != (system_id, timeline):
            raise SourceChanged(
                f"the log is that of system {system_id} timeline {timeline}, and the log connection leads to system "
                f"{self.system_id} timeline {self.timeline} now",
                where="source.connection",
                remedy="run replicate again: it says what has to be done",
            )
        if self.end_lsn < read_lsn:
            raise SourceChanged(
                f"while the connection was away the source was restored from an older state: its log ends at "
                f"{format_lsn(self.end_lsn)}, and {format_lsn(read_lsn)} was read",
                where="source.connection",
                remedy="run replicate again: it says what has to be done",
            )
        if self.confirmed_lsn is not None and self.confirmed_lsn > confirmed_lsn and not again:
            raise LostLease(
                f"while this replicate started another one read from the slot: it stands at "
                f"{format_lsn(self.confirmed_lsn)} now, past {format_lsn(confirmed_lsn)}",
                code="already_running",
                where="source.slot",
                remedy="stop the other one, or wait until it ends; then run replicate again",
            )
        if self.confirmed_lsn is None or self.confirmed_lsn > confirmed_lsn:
            where = "is gone" if self.confirmed_lsn is None else f"stands at {format_lsn(self.confirmed_lsn)}"
            raise SlotGap(
                f"while the connection was away the slot was changed: it {where}, confirmed was "
                f"{format_lsn(confirmed_lsn)}",
                where="source.slot",
                remedy="run replicate again: it says what has to be done",
            )


def _parameters(conninfo: str, application_name: str) -> bytes:
    """`conninfo` for a log connection."""
    options = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
    given = pg_conninfo.conninfo_to_dict(conninfo)
    parameters = {
        "connect_timeout": "10",
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        **{name: str(value) for name, value in given.items() if value is not None},
        "replication": "database",
        "application_name": application_name,
        "client_encoding": "UTF8",
        "options": f"-c logical_decoding_work_mem={_WORK_MEM} {given.get('options') or ''} {options}",
    }
    return pg_conninfo.make_conninfo("", **parameters).encode()


class LogStream:
    """One replication connection. Not thread-safe."""

    def __init__(self, conninfo: str, application_name: str = "headwater") -> None:
        conninfo = newest(conninfo)
        self._connection = pq.PGconn.connect(_parameters(conninfo, application_name))
        wants_password = self._connection.status != pq.ConnStatus.OK and self._connection.used_password
        if wants_password and (newer := renewed(conninfo)) is not None:
            self._connection.finish()
            self._connection = pq.PGconn.connect(_parameters(newer, application_name))
        if self._connection.status != pq.ConnStatus.OK:
            message = self._error()
            self._connection.finish()
            raise SourceUnreachable(f"the log connection failed: {message}", where="source", remedy="check the server")
        if self._connection.server_version >= 170000:
            # Not among the options: an older server would refuse the connection. Decoding is one long transaction.
            self._connection.exec_(b"set transaction_timeout = 0")

    def start(
        self, slot: str, publications: tuple[str, ...], start_lsn: int, server_version: int, *, binary: bool = True
    ) -> None:
        """Begin streaming after `start_lsn`. LostLease when the slot is in use, SlotGap when it is lost.

        `binary`: values as their types' send functions write them; else all of them as text.
        """
        self._binary = binary
        version = 4 if server_version >= 160000 else 3
        names = ",".join('"' + name.replace('"', '""') + '"' for name in publications).replace("'", "''")
        command = (
            f"START_REPLICATION SLOT \"{slot}\" LOGICAL {format_lsn(start_lsn)} (proto_version '{version}', "
            f"publication_names '{names}', binary '{str(binary).lower()}', messages 'true', streaming 'on')"
        )
        result = self._connection.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._start_error(slot, result.error_field(pq.DiagnosticField.SQLSTATE) or b"")
        self._connection.nonblocking = 1

    def identify(self, slot: str) -> LogSource:
        """Before `start`: which log this is, and where `slot` stands. SourceUnreachable from a standby: an address that
        follows the primary may lead to the next one before it is promoted."""
        if self._query("select pg_is_in_recovery()")[0][0] == "t":
            raise SourceUnreachable(
                "the server is a standby that is not promoted",
                where="source",
                remedy="run replicate again when it is, or let source.connection lead to the primary",
            )
        system = self._query("IDENTIFY_SYSTEM")
        slot_rows = self._query(
            "select confirmed_flush_lsn from pg_replication_slots where wal_status is distinct from 'lost' and "
            f"slot_name = '{slot}'"
        )
        confirmed = slot_rows[0][0] if slot_rows else None
        system_id, timeline, end = system[0][:3]
        if system_id is None or timeline is None or end is None:
            raise SourceUnreachable("the server does not say which system it is", where="source")
        return LogSource(system_id, int(timeline), parse_lsn(end), parse_lsn(confirmed) if confirmed else None)

    def switch_points(self, timeline: int) -> dict[int, int]:
        """Where each of the timelines that `timeline` comes from ended, by its number, as LSN."""
        if timeline == 1:
            return {}
        content = self._query(f"TIMELINE_HISTORY {timeline}")[0][1] or ""
        lines = [line.split() for line in content.splitlines() if line.strip() and not line.startswith("#")]
        return {int(line[0]): parse_lsn(line[1]) for line in lines}

    def _query(self, statement: str) -> list[list[str | None]]:
        result = self._connection.exec_(statement.encode())
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise SourceUnreachable(f"the server did not answer: {self._error()}", where="source")
        values = [[result.get_value(r, c) for c in range(result.nfields)] for r in range(result.ntuples)]
        return [[None if value is None else value.decode() for value in row] for row in values]

    @property
    def fileno(self) -> int:
        return self._connection.socket

    @property
    def walsender(self) -> int:
        """The process that serves this connection, at the server."""
        return self._connection.backend_pid

    def wait_readable(self, seconds: float, *others: int) -> None:
        """Return when the server has sent something, one of the descriptors `others` is readable, or time is up."""
        select.select([self._connection.socket, *others], [], [], max(0.0, seconds))

    def receive(self, messages: list[bytes | memoryview], size: int) -> Keepalive | None:
        """Append the 'w' messages that are here, whole, until they are `size` bytes or many; the newest keepalive.

        Then it goes on to the end of the transaction, as long as that is no more than twice as much: only between two
        transactions can be shipped what was read, and a server that never pauses would else fill the memory.
        Reads from the socket when libpq holds nothing more, and returns when that brings nothing: never waits.
        """
        get = self._connection.get_copy_data
        keepalive: Keepalive | None = None
        dry, most = False, size
        for number in range(2 * RUN_MESSAGES):
            length, data = get(1)
            if length > _KEEPALIVE_SIZE:
                dry = False
                messages.append(bytes(data) if length < _LONG else data)
                size -= length
                enough = size <= 0 or number >= RUN_MESSAGES
                if enough and (data[_OPERATION] in _ENDS or size <= -most):
                    break
            elif length > 0:
                dry = False
                keepalive = _keepalive(data, keepalive)
            elif length < 0:
                raise self._ended()
            elif dry:
                break
            else:
                self._consume()
                dry = True
        return keepalive

    def _consume(self) -> None:
        try:
            self._connection.consume_input()
        except Exception as error:
            raise ConnectionLost(f"the log connection broke: {self._error()}", where="source") from error

    def confirm(self, flushed_lsn: int, *, ask: bool = False) -> None:
        """Tell the server that everything up to `flushed_lsn` may be forgotten. `ask`: it must answer."""
        clock = int((time.time() - _EPOCH_2000) * 1_000_000)
        message = _FEEDBACK.pack(b"r", flushed_lsn, flushed_lsn, flushed_lsn, clock, ask)
        try:
            self._connection.put_copy_data(message)
            self._connection.flush()
        except Exception as error:
            raise ConnectionLost(f"the log connection broke: {self._error()}", where="source") from error

    def end(self) -> None:
        """Leave COPY mode so that the server frees the slot before this returns (at most a second)."""
        try:
            self._connection.put_copy_end()
            self._connection.flush()
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                self._connection.consume_input()
                size, _ = self._connection.get_copy_data(1)
                if size == -1:
                    break
                if size == 0:
                    self.wait_readable(deadline - time.monotonic())
        except Exception:
            pass  # closing is what matters: the server notices it within wal_sender_timeout at the latest
        finally:
            self.close()

    def close(self) -> None:
        self._connection.finish()

    def _error(self) -> str:
        return self._connection.get_error_message().strip().replace("\n", " ")

    def _ended(self) -> HeadwaterError:
        """Why the stream ended: the connection, or an error that a new one would meet again."""
        result = self._connection.get_result()
        told = result.get_error_message().strip() if result is not None else ""
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode() if result is not None else ""
        if state in _UNTRANSLATABLE:
            return Refused(
                "a text in the log is not UTF-8, or has a character that UTF-8 does not have: the server cannot send "
                "it",
                code="untranslatable_text",
                where="source",
                remedy="put the text right at the source (the server's log names the bytes), drop the slot that "
                "source.slot names, then headwater verify PIPELINE.yaml --repair, which makes a new slot",
            )
        if result is not None and not self._binary and (state == _BEYOND_LIMIT or _BEYOND_ALLOCATION in told):
            return _too_large(result)
        if result is not None and state == _NO_PUBLICATION:
            return _without_publication(result)
        if result is not None and state.startswith("22"):
            return _failing_filter(result, state)
        lasting = state and not state.startswith(_LOST_STATES)
        return (SourceUnreachable if lasting else ConnectionLost)(
            f"the server ended the log stream: {told or self._error() or 'no reason given'}",
            code="log_unreadable" if lasting and not state.startswith(_RESOURCE_STATES) else None,
            where="source",
            remedy="run replicate again",
        )

    def _start_error(self, slot: str, sqlstate: bytes) -> HeadwaterError:
        message = self._error()
        where = f"replication slot {slot}"
        if sqlstate == b"55006":
            return LostLease(
                f"the slot is in use by another replicate: {message}",
                code="already_running",
                where=where,
                remedy="stop the other one, or wait until it ends",
            )
        if sqlstate in (b"42704", b"55000", b"58P01"):
            return SlotGap(
                f"the slot cannot be read: {message}",
                where=where,
                remedy="headwater verify PIPELINE.yaml --repair",
            )
        return SourceUnreachable(f"replication did not start: {message}", where=where, remedy="see the message")


def unreadable(met_again: HeadwaterError) -> Refused:
    """For an error of the stream that a new connection has met again, at the same position."""
    return Refused(
        met_again.message,
        code="log_unreadable",
        where="source",
        remedy="see the server's log; if replicate goes on failing, drop the slot that source.slot names, then "
        "headwater verify PIPELINE.yaml --repair, which makes a new slot",
    )


def _place(result: pq.abc.PGresult) -> str:
    """Where in the log, as the server says; it names no table."""
    position = re.search(r"[0-9A-F]+/[0-9A-F]+", (result.error_field(pq.DiagnosticField.CONTEXT) or b"").decode())
    return f" at {position[0]}" if position else ""


def _without_publication(result: pq.abc.PGresult) -> Refused:
    # Before 18, which leaves it out. The server decodes a change with the catalog of that moment.
    told = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
    return Refused(
        f"a change in the log{_place(result)} was committed while a publication of the pipeline was missing, and this "
        f"server can never read past it, even if the publication is created again ({told})",
        code="publication_missing",
        where="source.publication",
        remedy="drop the slot that source.slot names, then headwater verify PIPELINE.yaml --repair, which makes slot "
        "and publications",
    )


def _failing_filter(result: pq.abc.PGresult, state: str) -> Refused:
    # The message may quote a value. Of what decoding does, only row filters compute.
    return Refused(
        f"the `where` of a table fails for a row in the log{_place(result)}, so that the server cannot send it "
        f"({pg_errors.lookup(state).__name__})",
        code="row_filter_failed",
        where="source",
        remedy="correct `where` in the pipeline file so that it fails for no row, load that table (headwater load "
        "PIPELINE.yaml --table T --again), drop the slot that source.slot names, then headwater verify PIPELINE.yaml "
        "--repair, which makes a new slot",
    )


def _too_large(result: pq.abc.PGresult) -> Refused:
    # In binary form any row that the server can store can be sent.
    return Refused(
        f"a row in the log{_place(result)} is larger than the 1 GB that the server can send: "
        "a type of some table needs the log as text, where a bytea takes twice its size",
        code="row_too_large",
        where="source",
        remedy="make the value smaller at the source (octet_length finds it), drop the slot that source.slot names, "
        "then headwater verify PIPELINE.yaml --repair, which makes a new slot",
    )


def _keepalive(data: bytes | memoryview, earlier: Keepalive | None) -> Keepalive:
    """One that wants a reply is not forgotten over the next."""
    message = bytes(data)
    if len(message) != _KEEPALIVE_SIZE or message[0] != 0x6B:
        raise HeadwaterError(
            f"the log stream holds a message that is neither data nor a keepalive: {message.hex()}",
            code="protocol_error",
            where="log",
            remedy="report this as a bug",
        )
    wanted = message[17] == 1 or (earlier is not None and earlier.reply)
    return Keepalive(int.from_bytes(message[1:9], "big"), wanted)
