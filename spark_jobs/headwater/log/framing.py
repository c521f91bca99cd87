"""From pgoutput messages to chunks of whole transactions.

Protocol: PostgreSQL documentation, "Logical Streaming Replication Protocol" and "Logical Replication Message
Formats", version 1 to 4 without streaming of transactions in progress. Headers are read at fixed offsets; tuples
stay bytes. Commit order and framing are asserted: a message out of place stops with its position.
"""

from __future__ import annotations

import struct
from typing import Final

from headwater.log.blocks import BlockBuilder, Chunk, Relation, RelationColumn, Transactions, Truncate
from headwater.position import format_lsn

XLOG_HEADER: Final = 25
"""Bytes of a CopyData message before the pgoutput message: 'w', start, end and clock."""

MARKER_PREFIX: Final = "headwater"

_BEGIN = struct.Struct(">qqI")
_COMMIT = struct.Struct(">Bqqq")
_RELATION_ID = struct.Struct(">I")
_COLUMN = struct.Struct(">Ii")
_CHANGES = frozenset(b"IUD")


class ProtocolError(Exception):
    """A message that this reader does not know or that stands where it must not; never guessed at."""


class Framer:
    """Feed it messages in order; take chunks out. `read_position` follows commits and our marker messages."""

    def __init__(self) -> None:
        self._relations: dict[int, Relation] = {}
        self._builders: dict[int, BlockBuilder] = {}
        self._closed: list[BlockBuilder] = []
        self._transactions: list[tuple[int, int, int, int]] = []
        self._truncates: list[Truncate] = []
        self._sequence = 0
        self._demand = False
        self._open: tuple[int, int, int] | None = None  # xid, commit time, first sequence
        self._last_commit = 0
        self.read_position = 0
        self.size = 0

    @property
    def in_transaction(self) -> bool:
        return self._open is not None

    @property
    def has_chunk(self) -> bool:
        """Whether whole transactions (or a waiter's demand) stand ready and no transaction is open."""
        return self._open is None and (bool(self._transactions) or self._demand)

    def feed(self, message: bytes) -> None:
        """Take one CopyData 'w' message, header included."""
        operation = message[XLOG_HEADER]
        if operation in _CHANGES:
            builder = self._builders.get(_RELATION_ID.unpack_from(message, XLOG_HEADER + 1)[0])
            if builder is None or self._open is None:
                builder = self._open_builder(message)
            builder.messages.append(message)
            builder.sequence.append(self._sequence)
            self._sequence += 1
            self.size += len(message)
            return
        handler = _HANDLERS.get(operation)
        if handler is None:
            raise self._unexpected(message, f"unknown message {chr(operation)!r}")
        handler(self, message)

    def cut(self) -> Chunk:
        """The transactions collected so far; the framer starts the next chunk."""
        builders = [b for b in (*self._closed, *self._builders.values()) if b.messages]
        chunk = Chunk(
            transactions=Transactions.of(self._transactions),
            blocks=tuple(builder.build(XLOG_HEADER) for builder in builders),
            truncates=tuple(self._truncates),
            read_position=self.read_position,
            next_sequence=self._sequence,
            demand=self._demand,
        )
        self._closed, self._builders = [], {}
        self._transactions, self._truncates = [], []
        self._demand, self.size = False, 0
        return chunk

    def _open_builder(self, message: bytes) -> BlockBuilder:
        (relation_id,) = _RELATION_ID.unpack_from(message, XLOG_HEADER + 1)
        if self._open is None:
            raise self._unexpected(message, "a change outside of a transaction")
        if relation_id not in self._relations:
            raise self._unexpected(message, f"a change of relation {relation_id}, which was never described")
        builder = BlockBuilder(self._relations[relation_id])
        self._builders[relation_id] = builder
        return builder

    def _begin(self, message: bytes) -> None:
        if self._open is not None:
            raise self._unexpected(message, "a transaction begins inside another")
        _, commit_time, xid = _BEGIN.unpack_from(message, XLOG_HEADER + 1)
        self._open = (xid, commit_time, self._sequence)

    def _commit(self, message: bytes) -> None:
        if self._open is None:
            raise self._unexpected(message, "a commit without a transaction")
        _, _, end_lsn, _ = _COMMIT.unpack_from(message, XLOG_HEADER + 1)
        if end_lsn <= self._last_commit:
            raise self._unexpected(message, f"commit {format_lsn(end_lsn)} after {format_lsn(self._last_commit)}")
        xid, commit_time, first = self._open
        self._open = None
        self._last_commit = end_lsn
        self.read_position = max(self.read_position, end_lsn)
        self._transactions.append((xid, end_lsn, commit_time, first))

    def _relation(self, message: bytes) -> None:
        at = XLOG_HEADER + 1
        (relation_id,) = _RELATION_ID.unpack_from(message, at)
        schema, at = _string(message, at + 4)
        name, at = _string(message, at)
        identity = chr(message[at])
        count = int.from_bytes(message[at + 1 : at + 3], "big")
        at += 3
        columns = []
        for _ in range(count):
            flags = message[at]
            column, at = _string(message, at + 1)
            type_oid, typmod = _COLUMN.unpack_from(message, at)
            at += _COLUMN.size
            columns.append(RelationColumn(column, type_oid, typmod, bool(flags & 1)))
        relation = Relation(relation_id, schema or "pg_catalog", name, identity, tuple(columns))
        if relation != self._relations.get(relation_id) and relation_id in self._builders:
            self._closed.append(self._builders.pop(relation_id))
        self._relations[relation_id] = relation

    def _truncate(self, message: bytes) -> None:
        count = int.from_bytes(message[XLOG_HEADER + 1 : XLOG_HEADER + 5], "big")
        relation_ids = struct.unpack_from(f">{count}I", message, XLOG_HEADER + 6)
        self._truncates.append(Truncate(self._sequence, relation_ids))
        self._sequence += 1

    def _message(self, message: bytes) -> None:
        lsn = int.from_bytes(message[XLOG_HEADER + 2 : XLOG_HEADER + 10], "big")
        prefix, _ = _string(message, XLOG_HEADER + 10)
        # A message outside of transactions is delivered when the decoder meets it: all commits before it were sent.
        if self._open is None:
            self.read_position = max(self.read_position, lsn)
        if prefix == MARKER_PREFIX:
            self._demand = True

    def _ignore(self, message: bytes) -> None:
        """Origin and Type messages: nothing here depends on them."""

    def _unexpected(self, message: bytes, what: str) -> ProtocolError:
        start = int.from_bytes(message[1:9], "big")
        return ProtocolError(
            f"log position {format_lsn(start)}: {what}; first bytes {message[XLOG_HEADER:][:64].hex()}"
        )


def _string(message: bytes, at: int) -> tuple[str, int]:
    end = message.index(0, at)
    return message[at:end].decode(), end + 1


_HANDLERS = {
    ord("B"): Framer._begin,
    ord("C"): Framer._commit,
    ord("R"): Framer._relation,
    ord("T"): Framer._truncate,
    ord("M"): Framer._message,
    ord("O"): Framer._ignore,
    ord("Y"): Framer._ignore,
}
