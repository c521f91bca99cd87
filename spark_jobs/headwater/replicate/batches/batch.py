"""A batch: consecutive chunks that are sealed together, and each table's share of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import add

import numpy as np

from headwater.log.blocks import Block, Chunk, Ddl, Rows, Transactions, Truncate

_EPOCH_2000 = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When the transactions of a batch were on their way, as means over `count` of them: `committed` by the source's
    clock in seconds since 1970, `received` and `shipped` (by the reader) monotonic. `oldest`: when the first of them
    was committed. Of no transaction both are None."""

    count: int
    committed: float | None
    received: float
    shipped: float
    oldest: float | None

    @classmethod
    def of(cls, chunk: Chunk) -> Arrivals:
        times = chunk.transactions.commit_time
        if not len(times):
            return cls(0, None, chunk.received, chunk.shipped, None)
        mean, least = (float(micros) / 1e6 + _EPOCH_2000.timestamp() for micros in (times.mean(), times.min()))
        return cls(len(times), mean, chunk.received, chunk.shipped, least)

    def __add__(self, other: Arrivals) -> Arrivals:
        if not (self.count and other.count):
            return self if self.count else other
        assert self.committed is not None
        assert other.committed is not None
        assert self.oldest is not None
        assert other.oldest is not None
        count = self.count + other.count

        def mean(mine: float, others: float) -> float:
            return (mine * self.count + others * other.count) / count

        return Arrivals(
            count,
            mean(self.committed, other.committed),
            mean(self.received, other.received),
            mean(self.shipped, other.shipped),
            min(self.oldest, other.oldest),
        )


@dataclass(slots=True)
class Batch:
    """Consecutive chunks that are applied together."""

    chunks: list[Chunk] = field(default_factory=list)
    changes: int = field(init=False, default=0)
    size: int = field(init=False, default=0)
    """Bytes of the log."""

    def __post_init__(self) -> None:
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            self.add(chunk)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.changes += chunk.changes
        self.size += chunk.size

    @property
    def demand(self) -> bool:
        return any(chunk.demand for chunk in self.chunks)

    @property
    def ddl(self) -> Ddl | None:
        return Ddl.joined(chunk.ddl for chunk in self.chunks)

    @property
    def transaction_count(self) -> int:
        return sum(len(chunk.transactions) for chunk in self.chunks)

    @property
    def read_position(self) -> int:
        return self.chunks[-1].read_position

    @property
    def source_time(self) -> datetime | None:
        """The newest commit time in the batch, by the source's clock."""
        times = [int(c.transactions.commit_time[-1]) for c in self.chunks if len(c.transactions)]
        return _EPOCH_2000 + timedelta(microseconds=max(times)) if times else None

    @property
    def arrivals(self) -> Arrivals:
        return reduce(add, (Arrivals.of(chunk) for chunk in self.chunks))

    def transactions(self) -> Transactions:
        return Transactions.joined([chunk.transactions for chunk in self.chunks])


@dataclass(slots=True)
class Share:
    """What of one or more batches concerns one table, in the log's order."""

    blocks: list[Block] = field(default_factory=list)
    truncates: list[Truncate] = field(default_factory=list)

    def that_count(self, transactions: Transactions, counts: Rows) -> tuple[list[tuple[Block, Rows]], list[Truncate]]:
        """The blocks, each with the mask of changes whose transaction counts, and the truncates that count."""
        if counts.all():
            return [(block, np.ones(block.changes, dtype=np.bool_)) for block in self.blocks], self.truncates
        blocks = [(block, counts[transactions.index_of(block.sequence)]) for block in self.blocks]
        return blocks, [t for t in self.truncates if counts[transactions.index_of(np.array([t.sequence]))[0]]]

    def without(self, relation_ids: Collection[int]) -> Share:
        """What is not of these relations."""
        return Share(
            [block for block in self.blocks if block.relation.relation_id not in relation_ids],
            [truncate for truncate in self.truncates if not set(truncate.relation_ids) <= set(relation_ids)],
        )

    @classmethod
    def joined(cls, shares: Sequence[Share]) -> Share:
        if len(shares) == 1:
            return shares[0]
        return cls([b for share in shares for b in share.blocks], [t for share in shares for t in share.truncates])
