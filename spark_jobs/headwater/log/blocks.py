"""Change blocks: the changes of one relation as raw tuple bytes and offsets, and the chunks that carry them.

Nothing in here looks at a row's value. A chunk holds whole transactions in commit order; the changes of small
transactions share a block per relation, so that decoding works on thousands of rows at a time.
`sequence` numbers all changes of a connection: it restores the order between relations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

INSERT, UPDATE, DELETE = ord("I"), ord("U"), ord("D")

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as a Relation message shows it; `identity`: part of the replica identity."""

    name: str
    type_oid: int
    typmod: int
    identity: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A Relation message (PostgreSQL documentation, "Logical Replication Message Formats")."""

    relation_id: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    sequence: int
    relation_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """`starts[i]`: index in `data` of change i's operation byte (I, U or D)."""

    relation: Relation
    data: bytes
    starts: Int64
    sequence: Int64


@dataclass(frozen=True, slots=True)
class Transactions:
    """Committed transactions in commit order, one element each.

    `end_lsn`: end of the commit record. `first_sequence`: number of its first change; `commit_time`: us since 2000.
    """

    xid: Int64
    end_lsn: Int64
    commit_time: Int64
    first_sequence: Int64

    def __len__(self) -> int:
        return len(self.xid)

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int]]) -> Transactions:
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])

    @classmethod
    def joined(cls, parts: Sequence[Transactions]) -> Transactions:
        names = ("xid", "end_lsn", "commit_time", "first_sequence")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def index_of(self, sequence: Int64) -> Int64:
        """For each change the index of its transaction."""
        return np.searchsorted(self.first_sequence, sequence, side="right") - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole transactions, in commit order. Every commit at or below `read_position` is in this chunk or before it."""

    transactions: Transactions
    blocks: tuple[Block, ...]
    truncates: tuple[Truncate, ...]
    read_position: int
    next_sequence: int
    demand: bool = False
    """A waiter's marker message was met: the open batch is to be sealed now."""

    @property
    def size(self) -> int:
        return sum(len(block.data) for block in self.blocks)

    @property
    def changes(self) -> int:
        return sum(len(block.starts) for block in self.blocks)


@dataclass(slots=True)
class BlockBuilder:
    """Collects one relation's messages until the chunk is cut."""

    relation: Relation
    messages: list[bytes] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)

    def build(self, header: int) -> Block:
        """`header`: bytes before the operation byte in every collected message."""
        lengths = np.fromiter(map(len, self.messages), dtype=np.int64, count=len(self.messages))
        starts = np.cumsum(lengths) - lengths + header
        return Block(self.relation, b"".join(self.messages), starts, np.array(self.sequence, dtype=np.int64))
