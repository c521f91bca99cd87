"""Transactions in progress: which changes belong to whom until a commit says that they happened.

Two kinds arrive. An *ordinary* transaction comes whole, at its commit, between Begin and Commit; nothing else stands in
between. A *streamed* one (`streaming 'on'`) comes in segments while it is open, segments of several transactions
interleaved; Stream Commit makes it a transaction of the chunk, Stream Abort drops it, and Stream Abort of a
subtransaction drops what it and the subtransactions inside it have done: everything from its first change on.

Numbers restore commit order: an ordinary change has its final number at once, a streamed one a number of its own
transaction, to which the commit adds the base. Memory is bounded: beyond `open_bytes` the largest goes to disk.

Relation messages within a streamed transaction hold for that transaction only, until it commits: the server sends them
again to others (pgoutput.c, `streamed_txns`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from headwater.log.blocks import Block, Chunk, Ddl, Int64, Message, Relation, Transactions, Truncate
from headwater.log.collecting import Changes
from headwater.log.hiding import Hiding
from headwater.log.large import Announcement, Gone, OpenBlocks
from headwater.log.messages import TruncateMessage
from headwater.log.spill import Spilled, SpillStore

OPEN_BYTES: Final = 64 << 20
"""Memory that open transactions may take together before the largest goes to disk."""


@dataclass(frozen=True, slots=True)
class Described:
    """A relation and the number of its message: a later one replaces an earlier one, whoever sent it."""

    relation: Relation
    number: int


class FirstChanges:
    """Per xid of a transaction the number of its first change: in 16 bytes, as there may be millions of savepoints."""

    def __init__(self) -> None:
        self._xids, self._numbers = array("q"), array("q")  # by xid

    def _place(self, xid: int) -> tuple[int, bool]:
        at = bisect_left(self._xids, xid)
        return at, at < len(self._xids) and self._xids[at] == xid

    def saw(self, xid: int, number: int) -> None:
        at, is_known = self._place(xid)
        if not is_known:
            self._xids.insert(at, xid)
            self._numbers.insert(at, number)

    def forget(self, xid: int) -> int | None:
        """The first change of `xid`, which is forgotten with all that began behind it; None: it is unknown."""
        at, is_known = self._place(xid)
        if not is_known:
            return None
        begin = self._numbers[at]
        # A subtransaction's xid is assigned behind its parent's; one with earlier changes ends by itself.
        kept = [place for place in range(at, len(self._xids)) if self._numbers[place] < begin]
        for values in (self._xids, self._numbers):
            values[at:] = array("q", [values[place] for place in kept])
        return begin


@dataclass(slots=True)
class StreamedTransaction:
    """One transaction in progress. `first`: changes by xid of it; `next`: the number of its next one."""

    xid: int
    changes: Changes
    relations: dict[int, Described] = field(default_factory=dict)
    truncates: list[Truncate] = field(default_factory=list)
    first: FirstChanges = field(default_factory=FirstChanges)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    next: int = 0
    demand: bool = False
    ddl: list[Ddl] = field(default_factory=list)
    announced: int = 0

    def announce(self) -> OpenBlocks | None:
        """The blocks on disk that nobody was told of yet, without what was rolled back by now."""
        new = self.changes.on_disk()[self.announced :]
        self.announced += len(new)
        dropped = tuple(self.dropped)
        counted = (Block(b.relation, b.content.rebased(0, dropped)) for b in new if isinstance(b.content, Spilled))
        blocks = tuple(block for block in counted if block.changes)
        return OpenBlocks(self.xid, blocks) if blocks else None

    def saw(self, xid: int, number: int) -> None:
        """The change `number` is by the (sub)transaction `xid`."""
        self.first.saw(xid, number)

    def rolled_back(self, subxid: int) -> None:
        """A subtransaction ended: its changes, and with them those of the subtransactions begun inside it, go.

        Whatever came after its first change is its own or theirs: its parent goes on only behind its end. One that
        has changed nothing is unknown here.
        """
        begin = self.first.forget(subxid)
        if begin is None:
            return
        self.dropped = [span for span in self.dropped if span[0] < begin]
        self.dropped.append((begin, self.next))

    def kept_truncates(self, base: int) -> Iterator[Truncate]:
        for t in self.truncates:
            if not any(begin <= t.sequence < end for begin, end in self.dropped):
                yield Truncate(base + t.sequence, t.relation_ids, t.cascade, t.restart_identity)


@dataclass(slots=True)
class OrdinaryTransaction:
    """The part that has come of a transaction between Begin and Commit."""

    changes: Changes
    truncates: list[Truncate] = field(default_factory=list)


class TransactionManager:
    """What is open, and the chunk of what has committed. `framing` calls it in the log's order."""

    def __init__(self, store: SpillStore | None = None, open_bytes: int = OPEN_BYTES, announce_from: int = 0) -> None:
        """`announce_from`: open transactions of so many bytes go to disk step by step and are told of; 0: never."""
        self._store = store
        self._announce_from = announce_from
        self.announcements: list[Announcement] = []
        self._open_bytes = open_bytes
        self._relations: dict[int, Described] = {}
        self._described = 0
        self._streams: dict[int, StreamedTransaction] = {}
        self.hiding = Hiding()
        self._ordinary = OrdinaryTransaction(self._changes())
        self._chunk = self._changes()
        self._transactions: list[Transactions] = []
        self._truncates: list[Truncate] = []
        self.segment: StreamedTransaction | None = None
        self.sequence = 0
        self.demand = False
        self.ddl: list[Ddl] = []  # joined once: at its start a connection describes thousands

    @property
    def size(self) -> int:
        """Bytes of the log in the chunk that is being collected."""
        return self._chunk.size

    @property
    def has_transactions(self) -> bool:
        return bool(self._transactions)

    def _changes(self, *, streamed: bool = False) -> Changes:
        # By what is to be hidden when a block is made, not when its first message came.
        return Changes(lambda block: self.hiding.block(block), streamed=streamed)

    def is_open(self, xid: int) -> bool:
        return xid in self._streams

    def forget_open(self) -> None:
        """The connection is gone: the server sends everything that has not committed once more."""
        for changes in self._open_changes():
            changes.discard()
        for transaction in self._streams.values():
            self._gone(transaction)
        self._streams, self._ordinary, self.segment = {}, OrdinaryTransaction(self._changes()), None
        self._relations = {}

    def relation(self, relation_id: int) -> Relation | None:
        """As it is described to whoever speaks now."""
        described = self.segment.relations.get(relation_id) if self.segment is not None else None
        described = described or self._relations.get(relation_id)
        return described.relation if described is not None else None

    def describe(self, relation: Relation) -> None:
        self._described += 1
        scope = self.segment.relations if self.segment is not None else self._relations
        known = scope.get(relation.relation_id)
        before = known or self._relations.get(relation.relation_id)
        # The first description on a connection shows no more: what it replaces came to another one, or to none.
        if before is None or _columns(before.relation) == _columns(relation):
            self.said(Ddl(is_told=False, described=frozenset({relation.relation_id})))
        if known is not None and known.relation == relation:
            relation = known.relation  # the same description again does not end a block
        scope[relation.relation_id] = Described(relation, self._described)

    def add(
        self, relation: Relation, messages: Sequence[Message], sequence: Int64, size: int, *, committed: bool
    ) -> None:
        """Changes of one relation, by whoever speaks now; `committed`: the commit is in the same run of messages."""
        if self.segment is not None:
            changes = self.segment.changes
        else:
            changes = self._chunk if committed else self._ordinary.changes
        changes.add(relation, messages, sequence, size)

    def truncate(self, message: TruncateMessage, number: int, *, committed: bool) -> None:
        if self.segment is not None:
            truncates = self.segment.truncates
        else:
            truncates = self._truncates if committed else self._ordinary.truncates
        truncates.append(Truncate(number, message.relation_ids, message.cascade, message.restart_identity))

    def ordinary_committed(self) -> None:
        """What has come of the open ordinary transaction before this run of messages belongs to the chunk."""
        self._chunk.absorb(self._ordinary.changes)
        self._truncates.extend(self._ordinary.truncates)
        self._ordinary = OrdinaryTransaction(self._changes())

    def committed(self, transactions: Transactions) -> None:
        """Ordinary transactions, whose changes were added."""
        self._transactions.append(transactions)

    def start_segment(self, xid: int) -> None:
        if xid not in self._streams:
            self._streams[xid] = StreamedTransaction(xid, self._changes(streamed=True))
        self.segment = self._streams[xid]

    def stop_segment(self) -> None:
        self.segment = None

    def commit(self, xid: int, end_lsn: int, commit_time: int) -> None:
        """A streamed transaction has committed: it is the chunk's newest."""
        transaction = self._streams.pop(xid)
        base = self.sequence
        self._chunk.take_over(transaction.changes.finish(base, tuple(transaction.dropped)))
        self._truncates.extend(transaction.kept_truncates(base))
        for relation_id, described in transaction.relations.items():
            known = self._relations.get(relation_id)
            if known is None or known.number < described.number:
                self._relations[relation_id] = described
        columns = (np.array([value], dtype=np.int64) for value in (xid, end_lsn, commit_time, base))
        self._transactions.append(Transactions(*columns))
        self.sequence += transaction.next
        self.demand = self.demand or transaction.demand
        self.ddl += transaction.ddl

    def said(self, ddl: Ddl) -> None:
        """In the open transaction: of an ordinary one the chunk holds all when it is cut."""
        (self.segment or self).ddl.append(ddl)

    def abort(self, xid: int, subxid: int) -> None:
        if subxid != xid:
            self._streams[xid].rolled_back(subxid)
            return
        transaction = self._streams.pop(xid)
        transaction.changes.discard()
        self._gone(transaction)

    def _gone(self, transaction: StreamedTransaction) -> None:
        if transaction.announced:
            self.announcements.append(Gone(transaction.xid))

    def bound_memory(self) -> None:
        """Spill the largest until what is open fits."""
        if self._store is None:
            return
        open_changes = self._open_changes()
        while sum(changes.memory for changes in open_changes) > self._open_bytes:
            max(open_changes, key=lambda changes: changes.memory).spill(self._store)
        for transaction in self._streams.values() if self._announce_from else ():
            changes = transaction.changes
            if changes.size >= self._announce_from and 4 * changes.memory >= self._announce_from:
                changes.spill(self._store)
                new = transaction.announce()
                if new is not None:
                    self.announcements.append(new)

    def _open_changes(self) -> list[Changes]:
        return [self._ordinary.changes, *(transaction.changes for transaction in self._streams.values())]

    def cut(self, read_position: int) -> Chunk:
        """What has committed so far; the next chunk begins."""
        chunk = Chunk(
            transactions=Transactions.joined(self._transactions),
            blocks=tuple(self._chunk.finish()),
            truncates=tuple(self._truncates),
            read_position=read_position,
            next_sequence=self.sequence,
            demand=self.demand,
            ddl=Ddl.joined(self.ddl),
        )
        self._chunk = self._changes()
        self._transactions, self._truncates, self.demand, self.ddl = [], [], False, []
        return chunk


def _columns(relation: Relation) -> set[tuple[str, int, int]]:
    """Without their order: partitions have one of their own, so names that changed places look as before."""
    return {(column.name, column.type_oid, column.typmod) for column in relation.columns}
