"""The log connection: START_REPLICATION on a logical slot, bytes in, feedback out.

PostgreSQL documentation, "Streaming Replication Protocol". libpq through `psycopg.pq`, non-blocking: `receive`
returns at once, `wait_readable` waits. Confirming is the caller's decision and happens only behind the ledger.
"""

from __future__ import annotations

import select
import struct
import time
from dataclasses import dataclass

from psycopg import conninfo as pg_conninfo
from psycopg import pq

from headwater.errors import HeadwaterError, LostLease, SlotGap, SourceUnreachable
from headwater.position import format_lsn

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
_EPOCH_2000 = 946_684_800
_FEEDBACK = struct.Struct(">cqqqqB")


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server's keepalive: `wal_end` is decoded and sent; `reply` asks for an answer at once."""

    wal_end: int
    reply: bool


class LogStream:
    """One replication connection. Not thread-safe."""

    def __init__(self, conninfo: str, application_name: str = "headwater") -> None:
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
            "options": f"{given.get('options') or ''} {options}".strip(),
        }
        self._connection = pq.PGconn.connect(pg_conninfo.make_conninfo("", **parameters).encode())
        if self._connection.status != pq.ConnStatus.OK:
            message = self._error()
            self._connection.finish()
            raise SourceUnreachable(f"the log connection failed: {message}", where="source", remedy="check the server")

    def start(self, slot: str, publications: tuple[str, ...], start_lsn: int, server_version: int) -> None:
        """Begin streaming after `start_lsn`. LostLease when the slot is in use, SlotGap when it is lost."""
        version = 4 if server_version >= 160000 else 3
        names = ",".join('"' + name.replace('"', '""') + '"' for name in publications).replace("'", "''")
        command = (
            f"START_REPLICATION SLOT \"{slot}\" LOGICAL {format_lsn(start_lsn)} (proto_version '{version}', "
            f"publication_names '{names}', binary 'true', messages 'true')"
        )
        result = self._connection.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._start_error(slot, result.error_field(pq.DiagnosticField.SQLSTATE) or b"")
        self._connection.nonblocking = 1

    @property
    def fileno(self) -> int:
        return self._connection.socket

    def wait_readable(self, seconds: float, *others: int) -> None:
        """Return when the server has sent something, one of the descriptors `others` is readable, or time is up."""
        select.select([self._connection.socket, *others], [], [], max(0.0, seconds))

    def consume(self) -> None:
        """Take from the socket what is there."""
        try:
            self._connection.consume_input()
        except Exception as error:
            raise SourceUnreachable(f"the log connection broke: {self._error()}", where="source") from error

    def receive(self) -> bytes | Keepalive | None:
        """The next message that is already here: a 'w' message whole, a keepalive, or None."""
        size, data = self._connection.get_copy_data(1)
        if size > 0:
            message = bytes(data)
            if message[0] == 0x77:
                return message
            return Keepalive(int.from_bytes(message[1:9], "big"), message[17] == 1)
        if size == 0:
            return None
        raise SourceUnreachable(
            f"the server ended the log stream: {self._end_reason()}", where="source", remedy="run replicate again"
        )

    def confirm(self, flushed_lsn: int, *, ask: bool = False) -> None:
        """Tell the server that everything up to `flushed_lsn` may be forgotten. `ask`: it must answer."""
        clock = int((time.time() - _EPOCH_2000) * 1_000_000)
        message = _FEEDBACK.pack(b"r", flushed_lsn, flushed_lsn, flushed_lsn, clock, ask)
        try:
            self._connection.put_copy_data(message)
            self._connection.flush()
        except Exception as error:
            raise SourceUnreachable(f"the log connection broke: {self._error()}", where="source") from error

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

    def _end_reason(self) -> str:
        result = self._connection.get_result()
        return (result.get_error_message().strip() if result is not None else "") or self._error() or "no reason given"

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
                remedy="load the tables again: headwater load PIPELINE.yaml --again",
            )
        return SourceUnreachable(f"replication did not start: {message}", where=where, remedy="see the message")
