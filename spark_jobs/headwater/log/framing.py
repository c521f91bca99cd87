"""From pgoutput messages to chunks of whole transactions.

Protocol: PostgreSQL documentation, "Logical Streaming Replication Protocol" and "Logical Replication Message
Formats", versions 3 and 4, with streaming of transactions in progress. A run of messages is looked at all at once:
their bytes are joined, and numpy reads operations, relation ids and positions at fixed offsets; tuples stay bytes.
Only messages that change what the following ones mean (Relation, Stream Start, Stop, Commit, Abort) are taken one by
one. Commit order and framing are asserted: a message out of place stops with its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.log import messages as fields
from headwater.log.blocks import Bytes, Chunk, Ddl, Int64, Message, Transactions
from headwater.log.hiding import Hiding
from headwater.log.large import Announcement
from headwater.log.messages import XLOG_HEADER, ProtocolError, unexpected
from headwater.log.spill import SpillStore
from headwater.log.transactions import OPEN_BYTES, TransactionManager
from headwater.log.values.wire import gather
from headwater.position import format_lsn

__all__ = ["DDL_PREFIX", "MARKER_PREFIX", "XLOG_HEADER", "Framer", "ProtocolError"]

MARKER_PREFIX: Final = "headwater"
DDL_PREFIX: Final = "headwater.ddl"

_DATA: Final = ord("w")
_UNKNOWN, _CHANGE, _TRUNCATE, _BEGIN, _COMMIT, _MESSAGE, _IGNORED, _TURN = range(8)
_KINDS = np.full(256, _UNKNOWN, dtype=np.uint8)
_KINDS[list(b"IUD")] = _CHANGE
_KINDS[list(b"OY")] = _IGNORED  # Origin and Type: nothing here depends on them
_KINDS[list(b"T")] = _TRUNCATE
_KINDS[list(b"B")] = _BEGIN
_KINDS[list(b"C")] = _COMMIT
_KINDS[list(b"M")] = _MESSAGE
_KINDS[list(b"RSEcA")] = _TURN

# Sizes behind the header of a CopyData message.
_BEGIN_SIZE: Final = 1 + 8 + 8 + 4
_COMMIT_SIZE: Final = 1 + 1 + 8 + 8 + 8
_CHANGE_SIZE: Final = 1 + 4 + 1 + 2
_XID: Final = 4
_HEAD: Final = XLOG_HEADER + _COMMIT_SIZE
"""No field that is read here lies behind this."""
_LONG: Final = 512
"""Bytes of an average message from which on copying the heads alone is cheaper."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Messages between two that change the meaning of what follows. `starts`: of the operations, in `joined`."""

    messages: Sequence[Message]
    joined: Bytes
    starts: Int64
    lengths: Int64
    kinds: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.messages)

    def part(self, begin: int, end: int) -> _Run:
        return _Run(
            self.messages[begin:end],
            self.joined,
            self.starts[begin:end],
            self.lengths[begin:end],
            self.kinds[begin:end],
        )

    def field(self, rows: Int64, offset: int, dtype: str) -> Int64:
        """The numbers `offset` bytes behind the operations of `rows`, whose lengths have been checked."""
        return gather(self.joined, self.starts[rows] + offset, dtype).astype(np.int64)

    def need(self, rows: Int64, size: int, *, exactly: bool) -> None:
        lengths = self.lengths[rows] - XLOG_HEADER
        wrong = lengths != size if exactly else lengths < size
        if wrong.any():
            row = int(np.argmax(wrong))
            raise unexpected(self.messages[rows[row]], f"a message of {lengths[row]} bytes instead of {size}")


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
        lengths = np.fromiter(map(len, messages), dtype=np.int64, count=len(messages))
        if lengths.min() <= XLOG_HEADER:
            raise unexpected(messages[int(np.argmin(lengths))], "a message without content")
        joined, starts = _heads(messages, lengths)
        foreign = joined[starts - XLOG_HEADER] != _DATA
        if foreign.any():
            raise unexpected(messages[int(np.argmax(foreign))], "a message of the connection that is no log data")
        run = _Run(messages, joined, starts, lengths, _KINDS[joined[starts]])
        at = 0
        for turn in np.flatnonzero(run.kinds == _TURN).tolist():
            self._run(run.part(at, turn))
            message = bytes(messages[turn])
            _TURNS[message[XLOG_HEADER]](self, message)
            at = turn + 1
        self._run(run.part(at, len(messages)) if at else run)
        self._manager.bound_memory()

    def cut(self) -> Chunk:
        """The transactions collected so far; the framer starts the next chunk."""
        return self._manager.cut(self.read_position)

    def announcements(self) -> list[Announcement]:
        """What is to be told of large open transactions since the last call."""
        told, self._manager.announcements = self._manager.announcements, []
        return told

    # Runs

    def _run(self, run: _Run) -> None:
        if not len(run):
            return
        if self._manager.segment is not None:
            self._segment_run(run)
        else:
            self._ordinary_run(run)

    def _ordinary_run(self, run: _Run) -> None:
        """Begin, Commit and what stands between them. Changes behind the last Commit belong to the open one."""
        kinds = run.kinds
        begins, commits = np.flatnonzero(kinds == _BEGIN), np.flatnonzero(kinds == _COMMIT)
        inside = self._begun is not None
        before = np.full(len(kinds), inside, dtype=np.int64)
        if len(begins) or len(commits):
            steps = (kinds == _BEGIN).astype(np.int64) - (kinds == _COMMIT)
            before += np.cumsum(steps) - steps
        self._assert_order(run, before)
        numbered = kinds <= _TRUNCATE  # nothing unknown is left: changes and truncates
        numbers = self._manager.sequence + np.cumsum(numbered) - numbered
        last_commit = int(commits[-1]) if len(commits) else -1
        if last_commit >= 0 and inside:
            self._manager.ordinary_committed()
        changes = np.flatnonzero(kinds == _CHANGE)
        run.need(changes, _CHANGE_SIZE, exactly=False)
        relation_ids = run.field(changes, 1, ">u4")
        border = int(np.searchsorted(changes, last_commit))
        self._collect(run, changes[:border], relation_ids[:border], numbers, committed=True)
        self._collect(run, changes[border:], relation_ids[border:], numbers, committed=False)
        for row in np.flatnonzero(kinds == _TRUNCATE).tolist():
            message = fields.truncate(bytes(run.messages[row]), streamed=False)
            self._manager.truncate(message, int(numbers[row]), committed=row < last_commit)
        self._manager.sequence += int(np.count_nonzero(numbered))
        if len(begins) or len(commits):
            self._transactions(run, begins, commits, numbers)
        for row in np.flatnonzero(kinds == _MESSAGE).tolist():
            self._logical_message(bytes(run.messages[row]), outside=not before[row])

    def _assert_order(self, run: _Run, before: Int64) -> None:
        """`before`: whether a transaction is open before each message (0 or 1 as long as all is well)."""
        kinds = run.kinds
        wanted = (kinds == _CHANGE) | (kinds == _TRUNCATE) | (kinds == _COMMIT)
        wrong = (kinds == _UNKNOWN) | (wanted & (before != 1)) | ((kinds == _BEGIN) & (before != 0))
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        message, kind = run.messages[row], kinds[row]
        if kind == _UNKNOWN:
            raise _unknown(message)
        if kind == _BEGIN:
            raise unexpected(message, "a transaction begins inside another")
        raise unexpected(message, "a commit without a transaction" if kind == _COMMIT else "a change outside of one")

    def _transactions(self, run: _Run, begins: Int64, commits: Int64, numbers: Int64) -> None:
        run.need(begins, _BEGIN_SIZE, exactly=True)
        run.need(commits, _COMMIT_SIZE, exactly=True)
        xid, lsn = run.field(begins, 17, ">u4"), run.field(begins, 1, ">i8")
        time, first = run.field(begins, 9, ">i8"), numbers[begins]
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
        differs = run.field(commits, 2, ">i8") != lsn[:count]
        if differs.any():
            raise unexpected(run.messages[commits[int(np.argmax(differs))]], "a commit that its begin did not announce")
        end_lsn = run.field(commits, 10, ">i8")
        falls = np.diff(end_lsn, prepend=self._last_commit) <= 0
        if falls.any():
            row = int(np.argmax(falls))
            raise _out_of_order(
                run.messages[commits[row]], int(end_lsn[row]), int(end_lsn[row - 1]) if row else self._last_commit
            )
        self._manager.committed(Transactions(xid[:count], end_lsn, time[:count], first[:count]))
        self._committed_to(int(end_lsn[-1]))

    def _segment_run(self, run: _Run) -> None:
        """Between Stream Start and Stream Stop: every message carries the xid of its (sub)transaction first."""
        kinds, transaction = run.kinds, self._manager.segment
        assert transaction is not None
        wrong = (kinds == _UNKNOWN) | (kinds == _BEGIN) | (kinds == _COMMIT)
        if wrong.any():
            message = run.messages[int(np.argmax(wrong))]
            known = _KINDS[message[XLOG_HEADER]] != _UNKNOWN
            raise unexpected(message, "a transaction's border inside a segment") if known else _unknown(message)
        numbered = np.flatnonzero(kinds <= _TRUNCATE)
        run.need(numbered, 1 + _XID, exactly=False)
        numbers = np.zeros(len(kinds), dtype=np.int64)
        numbers[numbered] = transaction.next + np.arange(len(numbered))
        xids = run.field(numbered, 1, ">u4")
        if len(xids) and xids[0] == xids.min() == xids.max():
            transaction.saw(int(xids[0]), transaction.next)
        else:
            for xid, index in zip(*np.unique(xids, return_index=True), strict=True):
                transaction.saw(int(xid), transaction.next + int(index))
        transaction.next += len(numbered)
        changes = np.flatnonzero(kinds == _CHANGE)
        run.need(changes, _CHANGE_SIZE + _XID, exactly=False)
        self._collect(run, changes, run.field(changes, 1 + _XID, ">u4"), numbers, committed=False)
        for row in np.flatnonzero(kinds == _TRUNCATE).tolist():
            message_ = fields.truncate(bytes(run.messages[row]), streamed=True)
            self._manager.truncate(message_, int(numbers[row]), committed=False)
        for row in np.flatnonzero(kinds == _MESSAGE).tolist():
            found = fields.logical_message(bytes(run.messages[row]), streamed=True)
            if found.prefix == MARKER_PREFIX:
                transaction.demand = True
            elif found.prefix == DDL_PREFIX:
                self._manager.said(Ddl.said(found.content))

    def _collect(self, run: _Run, rows: Int64, relation_ids: Int64, numbers: Int64, *, committed: bool) -> None:
        """Hand the changes at `rows` on, relation by relation."""
        if not len(rows):
            return
        borders = [0, len(rows)]
        if not relation_ids[0] == relation_ids.min() == relation_ids.max():
            order = np.argsort(relation_ids, kind="stable")
            rows, relation_ids = rows[order], relation_ids[order]
            borders = [0, *(np.flatnonzero(np.diff(relation_ids)) + 1).tolist(), len(rows)]
        sizes = np.add.reduceat(run.lengths[rows], borders[:-1]).tolist()
        for begin, end, size in zip(borders[:-1], borders[1:], sizes, strict=True):
            members, relation_id = rows[begin:end], int(relation_ids[begin])
            relation = self._manager.relation(relation_id)
            if relation is None:
                what = f"a change of relation {relation_id}, which was never described"
                raise unexpected(run.messages[members[0]], what)
            self._manager.add(relation, _picked(run.messages, members), numbers[members], size, committed=committed)

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


def _heads(messages: Sequence[Message], lengths: Int64) -> tuple[Bytes, Int64]:
    """What is looked at, in one buffer, and where the operations stand: of long messages only the beginning."""
    if int(lengths.sum()) > _LONG * len(messages):
        messages, lengths = [message[:_HEAD] for message in messages], np.minimum(lengths, _HEAD)
    return np.frombuffer(b"".join(messages), dtype=np.uint8), np.cumsum(lengths) - lengths + XLOG_HEADER


def _picked(messages: Sequence[Message], rows: Int64) -> Sequence[Message]:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return messages[first : last + 1]
    return list(itemgetter(*rows.tolist())(messages))


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
