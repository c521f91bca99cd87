"""Change blocks: the changes of one relation as raw tuple bytes and offsets, and the chunks that carry them.

Nothing in here looks at a row's value. A chunk holds whole transactions in commit order; the changes of small
transactions share a block per relation, so that decoding works on thousands of rows at a time.
`sequence` numbers all changes of a connection in commit order: it restores the order between relations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headwater.log.values.wire import byte_strings

INSERT, UPDATE, DELETE = ord("I"), ord("U"), ord("D")

Message = bytes | memoryview
"""As it came from the connection: long ones are not copied out of libpq's memory before their block is made."""
BLOCK_CHANGES: Final = 16_384
"""A block never holds more."""
BLOCK_BYTES: Final = 4 << 20
"""A block takes no further change past so many bytes."""

_LONGEST_ID: Final = 10
"""Digits of an oid."""

Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]


class RelationColumn(NamedTuple):
    """A column as a Relation message shows it; `identity`: part of the replica identity.

    A tuple, for the sake of pickle: each chunk brings the columns of all its tables, thousands where tables are many.
    """

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
    """TRUNCATE of all `relation_ids` at once. `cascade` and `restart_identity`: as the statement said; the relations
    that a cascade reached are among the ids."""

    sequence: int
    relation_ids: tuple[int, ...]
    cascade: bool = False
    restart_identity: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A block's content in memory. `starts[i]`: index in `data` of change i's operation byte (I, U or D), behind
    which stand int32 relation id and the tuples, up to `ends[i]`."""

    data: Bytes
    starts: Int64
    ends: Int64
    sequence: Int64

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def memory(self) -> int:
        return self.data.nbytes + self.starts.nbytes + self.ends.nbytes + self.sequence.nbytes

    @property
    def changes(self) -> int:
        return len(self.starts)

    def load(self) -> Held:
        return self

    def part(self, rows: Rows) -> Held:
        return self if rows.all() else Held(self.data, self.starts[rows], self.ends[rows], self.sequence[rows])

    def copied(self, starts: Int64, ends: Int64, rows: Int64) -> Held:
        """These byte ranges, one behind the other, as a content of its own; they are of the changes `rows`."""
        values = byte_strings(self.data, starts, ends - starts)
        _, offsets, data = values.buffers()
        borders = np.frombuffer(offsets, dtype=np.int32, count=len(values) + 1).astype(np.int64)
        bytes_: Bytes = np.frombuffer(data, dtype=np.uint8)[borders[0] : borders[-1]]
        return Held(bytes_, borders[:-1] - borders[0], borders[1:] - borders[0], self.sequence[rows])

    @classmethod
    def joined(cls, pieces: Sequence[Held]) -> Held:
        """Piece behind piece, whatever the numbers of their changes are."""
        if len(pieces) == 1:
            return pieces[0]
        shifts = np.cumsum([0, *(piece.size for piece in pieces[:-1])])
        shifted = [[piece.starts + shift, piece.ends + shift] for piece, shift in zip(pieces, shifts, strict=True)]
        starts, ends = (np.concatenate(borders) for borders in zip(*shifted, strict=True))
        data, sequence = ([getattr(piece, name) for piece in pieces] for name in ("data", "sequence"))
        return cls(np.concatenate(data), starts, ends, np.concatenate(sequence))


class Content(Protocol):
    """Where a block's bytes are: in memory (`Held`), or on disk (`headwater.log.spill.Spilled`).

    `size`: bytes of the log. `memory`: bytes held in memory.
    """

    @property
    def size(self) -> int: ...
    @property
    def memory(self) -> int: ...
    @property
    def changes(self) -> int: ...
    def load(self) -> Held: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Changes of one relation. What `load` gives may be a view of a file: let go of it before the next block's."""

    relation: Relation
    content: Content

    def load(self) -> Held:
        return self.content.load()

    @property
    def sequence(self) -> Int64:
        return self.content.load().sequence

    @property
    def size(self) -> int:
        return self.content.size

    @property
    def changes(self) -> int:
        return self.content.changes


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
    def joined(cls, parts: Sequence[Transactions]) -> Transactions:
        if len(parts) == 1:
            return parts[0]
        names = ("xid", "end_lsn", "commit_time", "first_sequence")
        return cls(*(_concatenated([getattr(part, name) for part in parts]) for name in names))

    def index_of(self, sequence: Int64) -> Int64:
        """For each change the index of its transaction."""
        return np.searchsorted(self.first_sequence, sequence, side="right") - 1


def _concatenated(arrays: Sequence[Int64]) -> Int64:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Ddl:
    """What the log says of DDL: the source's event triggers, that some was run and that these relations were written
    anew; or no more than that relations were `described`, for the first time on a connection or once more with the
    columns of before, in whatever order (not `is_told`): the server does the latter where its catalog has changed, and
    behind a vacuum, too."""

    rewritten: frozenset[int] = frozenset()
    is_told: bool = True
    described: frozenset[int] = frozenset()

    @classmethod
    def said(cls, content: bytes) -> Ddl:
        """Of one message. Anybody may send one: what is no relation's id says that something was run."""
        return cls(frozenset({int(content)}) if content.isdigit() and len(content) <= _LONGEST_ID else frozenset())

    @classmethod
    def joined(cls, parts: Iterable[Ddl | None]) -> Ddl | None:
        some = [part for part in parts if part is not None]
        if not some:
            return None
        return cls(
            frozenset().union(*(part.rewritten for part in some)),
            any(part.is_told for part in some),
            frozenset().union(*(part.described for part in some)),
        )


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
    received: float = 0.0
    """When its messages arrived, on average; monotonic seconds."""
    shipped: float = 0.0
    """When the reader let go of it; monotonic seconds."""
    ddl: Ddl | None = None
    left_out: int = 0
    """Bytes that belonged to no change when the chunk was made of a larger one: they count for its size."""
    size: int = field(init=False)
    """Bytes of the log, in memory or on disk."""
    changes: int = field(init=False)

    def __post_init__(self) -> None:
        # Asked again and again while the chunk waits, and it may have hundreds of blocks.
        object.__setattr__(self, "size", sum(block.size for block in self.blocks) + self.left_out)
        object.__setattr__(self, "changes", sum(block.changes for block in self.blocks))

    @property
    def is_large(self) -> bool:
        """Whether a transaction of it was too large for memory; then it is the only one (`log.large`)."""
        return any(block.changes and not block.content.memory for block in self.blocks)
