"""From pgoutput messages to chunks of whole transactions.

Protocol: PostgreSQL documentation, "Logical Streaming Replication Protocol" and "Logical Replication Message
Formats", versions 3 and 4, with streaming of transactions in progress. Messages that came together are looked at all at
once (`headwater.log.headers`). Only those that change what the following ones mean (Relation, Stream Start, Stop,
Commit, Abort) are taken one by one. Commit order and framing are asserted: a message out of place stops with its
position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from headwater.log import messages as fields
from headwater.log.blocks import Chunk, Ddl, Int64, Message, Transactions
from headwater.log.headers import (
    BEGIN,
    BEGIN_SIZE,
    CHANGE,
    CHANGE_SIZE,
    COMMIT,
    COMMIT_SIZE,
    KINDS,
    MESSAGE,
    TRUNCATE,
    TURN,
    UNKNOWN,
    XID,
    Headers,
)
from headwater.log.hiding import Hiding
from headwater.log.large import Announcement
from headwater.log.messages import XLOG_HEADER, ProtocolError, unexpected
from headwater.log.spill import SpillStore
from headwater.log.transactions import OPEN_BYTES, TransactionManager
from headwater.position import format_lsn

__all__ = ["DDL_PREFIX", "MARKER_PREFIX", "XLOG_HEADER", "Framer", "ProtocolError"]

MARKER_PREFIX: Final = "headwater"
DDL_PREFIX: Final = "headwater.ddl"


@dataclass(frozen=True, slots=True)
class _Begun:
    """The open ordinary transaction: what its Begin said, and the number of its first change."""

    xid: int
    commit_lsn: int
    commit_time: int
    first_sequence: int


class Framer:
    """Give it messages in order; take chunks out. `read_position` follows commits and our marker messages."""

    def __init__(self, store: SpillStore | None = None, open_bytes: int = OPEN_BYTES, announce_from: int = 0) -> None:
        self._manager = TransactionManager(store, open_bytes, announce_from)
        self._begun: _Begun | None = None
        self._last_commit = 0
        self.read_position = 0

    def hide(self, hiding: Hiding) -> None:
        """In every block from now on."""
        self._manager.hiding = hiding

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction, or a segment of one in progress, has come in part."""
        return self._begun is not None or self._manager.segment is not None

    @property
    def has_chunk(self) -> bool:
        """Whether whole transactions, or a waiter's demand, stand ready."""
        return not self.in_transaction and (self._manager.has_transactions or self._manager.demand)

    @property
    def demand(self) -> bool:
        """Whether a waiter's marker was met since the last chunk."""
        return self._manager.demand

    @property
    def size(self) -> int:
        """Bytes of the log in the next chunk."""
        return self._manager.size

    @property
    def last_commit(self) -> int:
        """End of the last commit that was framed: a new connection goes on behind it."""
        return self._last_commit

    def reconnected(self) -> None:
        """A new connection sends what has not committed once more, and describes every relation again."""
        self._begun = None
        self._manager.forget_open()

    def feed(self, message: bytes) -> None:
        self.take([message])

    def take(self, messages: Sequence[Message]) -> None:
        """CopyData 'w' messages, headers included, in the order in which they came."""
        if not messages:
            return
        headers = Headers.of(messages)
        at = 0
        for turn in np.flatnonzero(headers.kinds == TURN).tolist():
            self._between_turns(headers.part(at, turn))
            message = bytes(messages[turn])
            _TURNS[message[XLOG_HEADER]](self, message)
            at = turn + 1
        self._between_turns(headers.part(at, len(messages)) if at else headers)
        self._manager.bound_memory()

    def cut(self) -> Chunk:
        """The transactions collected so far; the framer starts the next chunk."""
        return self._manager.cut(self.read_position)

    def announcements(self) -> list[Announcement]:
        """What is to be told of large open transactions since the last call."""
        told, self._manager.announcements = self._manager.announcements, []
        return told

    # Messages between two that change what the following ones mean

    def _between_turns(self, headers: Headers) -> None:
        if not len(headers):
            return
        if self._manager.segment is not None:
            self._inside_segment(headers)
        else:
            self._outside_segments(headers)

    def _outside_segments(self, headers: Headers) -> None:
        """Begin, Commit and what stands between them. Changes behind the last Commit belong to the open one."""
        kinds = headers.kinds
        begins, commits = np.flatnonzero(kinds == BEGIN), np.flatnonzero(kinds == COMMIT)
        inside = self._begun is not None
        before = np.full(len(kinds), inside, dtype=np.int64)
        if len(begins) or len(commits):
            steps = (kinds == BEGIN).astype(np.int64) - (kinds == COMMIT)
            before += np.cumsum(steps) - steps
        self._assert_order(headers, before)
        numbered = kinds <= TRUNCATE  # nothing unknown is left: changes and truncates
        numbers = self._manager.sequence + np.cumsum(numbered) - numbered
        last_commit = int(commits[-1]) if len(commits) else -1
        if last_commit >= 0 and inside:
            self._manager.ordinary_committed()
        changes = np.flatnonzero(kinds == CHANGE)
        headers.need(changes, CHANGE_SIZE, exactly=False)
        relation_ids = headers.field(changes, 1, ">u4")
        border = int(np.searchsorted(changes, last_commit))
        self._collect(headers, changes[:border], relation_ids[:border], numbers, committed=True)
        self._collect(headers, changes[border:], relation_ids[border:], numbers, committed=False)
        for row in np.flatnonzero(kinds == TRUNCATE).tolist():
            message = fields.truncate(bytes(headers.messages[row]), streamed=False)
            self._manager.truncate(message, int(numbers[row]), committed=row < last_commit)
        self._manager.sequence += int(np.count_nonzero(numbered))
        if len(begins) or len(commits):
            self._transactions(headers, begins, commits, numbers)
        for row in np.flatnonzero(kinds == MESSAGE).tolist():
            self._logical_message(bytes(headers.messages[row]), outside=not before[row])

    def _assert_order(self, headers: Headers, before: Int64) -> None:
        """`before`: whether a transaction is open before each message (0 or 1 as long as all is well)."""
        kinds = headers.kinds
        wanted = (kinds == CHANGE) | (kinds == TRUNCATE) | (kinds == COMMIT)
        wrong = (kinds == UNKNOWN) | (wanted & (before != 1)) | ((kinds == BEGIN) & (before != 0))
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        message, kind = headers.messages[row], kinds[row]
        if kind == UNKNOWN:
            raise _unknown(message)
        if kind == BEGIN:
            raise unexpected(message, "a transaction begins inside another")
        raise unexpected(message, "a commit without a transaction" if kind == COMMIT else "a change outside of one")

    def _transactions(self, headers: Headers, begins: Int64, commits: Int64, numbers: Int64) -> None:
        headers.need(begins, BEGIN_SIZE, exactly=True)
        headers.need(commits, COMMIT_SIZE, exactly=True)
        xid, lsn = headers.field(begins, 17, ">u4"), headers.field(begins, 1, ">i8")
        time, first = headers.field(begins, 9, ">i8"), numbers[begins]
        if self._begun is not None:
            b = self._begun
            opened = ((b.xid, xid), (b.commit_lsn, lsn), (b.commit_time, time), (b.first_sequence, first))
            xid, lsn, time, first = (np.concatenate([[value], array]) for value, array in opened)
            self._begun = None
        count = len(commits)
        if len(xid) > count:
            self._begun = _Begun(int(xid[-1]), int(lsn[-1]), int(time[-1]), int(first[-1]))
        if not count:
            return
        differs = headers.field(commits, 2, ">i8") != lsn[:count]
        if differs.any():
            raise unexpected(
                headers.messages[commits[int(np.argmax(differs))]], "a commit that its begin did not announce"
            )
        end_lsn = headers.field(commits, 10, ">i8")
        falls = np.diff(end_lsn, prepend=self._last_commit) <= 0
        if falls.any():
            row = int(np.argmax(falls))
            raise _out_of_order(
                headers.messages[commits[row]], int(end_lsn[row]), int(end_lsn[row - 1]) if row else self._last_commit
            )
        self._manager.committed(Transactions(xid[:count], end_lsn, time[:count], first[:count]))
        self._committed_to(int(end_lsn[-1]))

    def _inside_segment(self, headers: Headers) -> None:
        """Between Stream Start and Stream Stop: every message carries the xid of its (sub)transaction first."""
        kinds, transaction = headers.kinds, self._manager.segment
        assert transaction is not None
        wrong = (kinds == UNKNOWN) | (kinds == BEGIN) | (kinds == COMMIT)
        if wrong.any():
            message = headers.messages[int(np.argmax(wrong))]
            known = KINDS[message[XLOG_HEADER]] != UNKNOWN
            raise unexpected(message, "a transaction's border inside a segment") if known else _unknown(message)
        numbered = np.flatnonzero(kinds <= TRUNCATE)
        headers.need(numbered, 1 + XID, exactly=False)
        numbers = np.zeros(len(kinds), dtype=np.int64)
        numbers[numbered] = transaction.next + np.arange(len(numbered))
        xids = headers.field(numbered, 1, ">u4")
        if len(xids) and xids[0] == xids.min() == xids.max():
            transaction.saw(int(xids[0]), transaction.next)
        else:
            for xid, index in zip(*np.unique(xids, return_index=True), strict=True):
                transaction.saw(int(xid), transaction.next + int(index))
        transaction.next += len(numbered)
        changes = np.flatnonzero(kinds == CHANGE)
        headers.need(changes, CHANGE_SIZE + XID, exactly=False)
        self._collect(headers, changes, headers.field(changes, 1 + XID, ">u4"), numbers, committed=False)
        for row in np.flatnonzero(kinds == TRUNCATE).tolist():
            message_ = fields.truncate(bytes(headers.messages[row]), streamed=True)
            self._manager.truncate(message_, int(numbers[row]), committed=False)
        for row in np.flatnonzero(kinds == MESSAGE).tolist():
            found = fields.logical_message(bytes(headers.messages[row]), streamed=True)
            if found.prefix == MARKER_PREFIX:
                transaction.demand = True
            elif found.prefix == DDL_PREFIX:
                self._manager.said(Ddl.said(found.content))

    def _collect(self, headers: Headers, rows: Int64, relation_ids: Int64, numbers: Int64, *, committed: bool) -> None:
        """Hand the changes at `rows` on, relation by relation."""
        if not len(rows):
            return
        borders = [0, len(rows)]
        if not relation_ids[0] == relation_ids.min() == relation_ids.max():
            order = np.argsort(relation_ids, kind="stable")
            rows, relation_ids = rows[order], relation_ids[order]
            borders = [0, *(np.flatnonzero(np.diff(relation_ids)) + 1).tolist(), len(rows)]
        sizes = np.add.reduceat(headers.lengths[rows], borders[:-1]).tolist()
        for begin, end, size in zip(borders[:-1], borders[1:], sizes, strict=True):
            members, relation_id = rows[begin:end], int(relation_ids[begin])
            relation = self._manager.relation(relation_id)
            if relation is None:
                what = f"a change of relation {relation_id}, which was never described"
                raise unexpected(headers.messages[members[0]], what)
            self._manager.add(relation, headers.picked(members), numbers[members], size, committed=committed)

    # Single messages

    def _relation(self, message: bytes) -> None:
        self._manager.describe(fields.relation(message, streamed=self._manager.segment is not None))

    def _logical_message(self, message: bytes, *, outside: bool) -> None:
        found = fields.logical_message(message, streamed=False)
        # A message outside of transactions is delivered when the decoder meets it: all commits before it were sent.
        if outside:
            self.read_position = max(self.read_position, found.lsn)
        if found.prefix == MARKER_PREFIX:
            self._manager.demand = True
        elif found.prefix == DDL_PREFIX:
            self._manager.said(Ddl.said(found.content))

    def _stream_start(self, message: bytes) -> None:
        xid, first = fields.stream_start(message)
        self._assert_between(message)
        if first == self._manager.is_open(xid):
            raise unexpected(message, f"transaction {xid} begins twice" if first else f"{xid} was never begun")
        self._manager.start_segment(xid)

    def _stream_stop(self, message: bytes) -> None:
        fields.stream_stop(message)
        if self._manager.segment is None:
            raise unexpected(message, "the end of a segment without its start")
        self._manager.stop_segment()

    def _stream_commit(self, message: bytes) -> None:
        commit = fields.stream_commit(message)
        self._assert_between(message)
        if not self._manager.is_open(commit.xid):
            raise unexpected(message, f"the end of transaction {commit.xid}, which was never begun")
        if commit.end_lsn <= self._last_commit:
            raise _out_of_order(message, commit.end_lsn, self._last_commit)
        self._manager.commit(commit.xid, commit.end_lsn, commit.commit_time)
        self._committed_to(commit.end_lsn)

    def _stream_abort(self, message: bytes) -> None:
        """Of a transaction of which nothing has come there is nothing to drop: 18 tells of its subtransactions all the
        same when it found the whole of it rolled back before it had sent anything (reorderbuffer.c,
        ReorderBufferCheckAndTruncateAbortedTXN)."""
        abort = fields.stream_abort(message)
        self._assert_between(message)
        if self._manager.is_open(abort.xid):
            self._manager.abort(abort.xid, abort.subxid)

    def _assert_between(self, message: bytes) -> None:
        if self.in_transaction:
            raise unexpected(message, "a segment begins or a transaction in progress ends inside another transaction")

    def _committed_to(self, end_lsn: int) -> None:
        self._last_commit = end_lsn
        self.read_position = max(self.read_position, end_lsn)


def _unknown(message: Message) -> ProtocolError:
    return unexpected(message, f"unknown message {chr(message[XLOG_HEADER])!r}")


def _out_of_order(message: Message, end_lsn: int, last: int) -> ProtocolError:
    return unexpected(message, f"commit {format_lsn(end_lsn)} after {format_lsn(last)}")


_TURNS: dict[int, Callable[[Framer, bytes], None]] = {
    ord("R"): Framer._relation,
    ord("S"): Framer._stream_start,
    ord("E"): Framer._stream_stop,
    ord("c"): Framer._stream_commit,
    ord("A"): Framer._stream_abort,
}
