"""The rare messages of pgoutput, read field by field: what they say, never what they are applied to.

PostgreSQL documentation, "Logical Replication Message Formats", protocol versions 3 and 4. A message here is a whole
CopyData message: 'w', start, end, clock, and then pgoutput's own bytes. Whatever is too short, too long or unknown is a
`ProtocolError` that names the log position and the first bytes: nothing is guessed, nothing is read past its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headwater.log.blocks import Message, Relation, RelationColumn
from headwater.position import format_lsn

XLOG_HEADER: Final = 25
"""Bytes of a CopyData message before the pgoutput message: 'w', start, end and clock."""

_CASCADE, _RESTART_IDENTITY = 1, 2
_REPLICA_IDENTITIES = "dnfi"
_SHOWN_BYTES = 64
SHOWN_OF_VALUES: Final = 8
"""Of messages that hold a row or somebody's text only their headers are shown."""


class ProtocolError(Exception):
    """A message that this reader does not know or that stands where it must not; never guessed at."""


def unexpected(message: Message, what: str) -> ProtocolError:
    """The error about `message`: where in the log, what is wrong, how it begins."""
    start = int.from_bytes(message[1:9], "big")
    shown = SHOWN_OF_VALUES if message[XLOG_HEADER : XLOG_HEADER + 1] in (b"I", b"U", b"D", b"M") else _SHOWN_BYTES
    return ProtocolError(f"log position {format_lsn(start)}: {what}; first bytes {message[XLOG_HEADER:][:shown].hex()}")


class _Fields:
    """Reads one message from behind its operation byte; every read is checked against the message's end."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = XLOG_HEADER + 1

    def number(self, size: int, *, signed: bool = False) -> int:
        end = self._at + size
        if end > len(self._message):
            raise unexpected(self._message, "a message that ends within a number")
        value = int.from_bytes(self._message[self._at : end], "big", signed=signed)
        self._at = end
        return value

    def string(self) -> str:
        end = self._message.find(0, self._at)
        if end < 0:
            raise unexpected(self._message, "a message that ends within a string")
        raw, self._at = self._message[self._at : end], end + 1
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise unexpected(self._message, "a name that is not UTF-8") from None

    def skip(self, size: int) -> None:
        self.raw(size)

    def raw(self, size: int) -> bytes:
        if self._at + size > len(self._message):
            raise unexpected(self._message, "a message shorter than it says")
        begin, self._at = self._at, self._at + size
        return self._message[begin : self._at]

    def end(self) -> None:
        if self._at != len(self._message):
            raise unexpected(self._message, f"a message with {len(self._message) - self._at} bytes too many")


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """`subxid` equals `xid` when the whole transaction was rolled back."""

    xid: int
    subxid: int


@dataclass(frozen=True, slots=True)
class StreamCommit:
    xid: int
    end_lsn: int
    commit_time: int


@dataclass(frozen=True, slots=True)
class TruncateMessage:
    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    lsn: int
    prefix: str
    content: bytes


def relation(message: bytes, *, streamed: bool) -> Relation:
    """Relation. `streamed`: it stands between Stream Start and Stream Stop, where an xid comes first."""
    fields = _fields(message, streamed)
    relation_id = fields.number(4)
    schema, name = fields.string(), fields.string()
    identity = chr(fields.number(1))
    if identity not in _REPLICA_IDENTITIES:
        raise unexpected(message, f"a relation of unknown replica identity {identity!r}")
    columns = []
    for _ in range(fields.number(2)):
        flags = fields.number(1)
        column = fields.string()
        columns.append(RelationColumn(column, fields.number(4), fields.number(4, signed=True), bool(flags & 1)))
    fields.end()
    return Relation(relation_id, schema or "pg_catalog", name, identity, tuple(columns))


def truncate(message: bytes, *, streamed: bool) -> TruncateMessage:
    fields = _fields(message, streamed)
    count, options = fields.number(4), fields.number(1)
    if options & ~(_CASCADE | _RESTART_IDENTITY):
        raise unexpected(message, f"a truncate with unknown options {options}")
    if 4 * count > len(message):
        raise unexpected(message, f"a truncate that claims {count} relations")
    relation_ids = tuple(fields.number(4) for _ in range(count))
    fields.end()
    return TruncateMessage(relation_ids, bool(options & _CASCADE), bool(options & _RESTART_IDENTITY))


def logical_message(message: bytes, *, streamed: bool) -> LogicalMessage:
    """pg_logical_emit_message."""
    fields = _fields(message, streamed)
    fields.skip(1)
    lsn, prefix = fields.number(8), fields.string()
    content = fields.raw(fields.number(4))
    fields.end()
    return LogicalMessage(lsn, prefix, content)


def stream_start(message: bytes) -> tuple[int, bool]:
    """The transaction's xid, and whether this is its first segment."""
    fields = _Fields(message)
    xid, first = fields.number(4), fields.number(1)
    fields.end()
    return xid, first == 1


def stream_stop(message: bytes) -> None:
    _Fields(message).end()


def stream_commit(message: bytes) -> StreamCommit:
    fields = _Fields(message)
    xid = fields.number(4)
    fields.skip(1 + 8)
    end_lsn, commit_time = fields.number(8), fields.number(8, signed=True)
    fields.end()
    return StreamCommit(xid, end_lsn, commit_time)


def stream_abort(message: bytes) -> StreamAbort:
    """Without the position and time that only `streaming 'parallel'` brings."""
    fields = _Fields(message)
    abort = StreamAbort(fields.number(4), fields.number(4))
    fields.end()
    return abort


def _fields(message: bytes, streamed: bool) -> _Fields:
    fields = _Fields(message)
    if streamed:
        fields.skip(4)
    return fields
