"""Large transactions: what is told of them while they are open, and how they leave the chunk that they committed in.

A transaction of which enough bytes have come is written to disk in steps, and each step is announced with what had
been rolled back by then. Whoever works on such blocks ahead of the commit may compare: a block that was
announced with the ranges that its commit names holds exactly what counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from headwater.log.blocks import Block, Chunk, Int64, Transactions
from headwater.log.spill import Spilled

STAGE_FROM: Final = 32 << 20
"""Bytes of an open transaction from which on it is announced, in steps of a quarter of them."""


@dataclass(frozen=True, slots=True)
class OpenBlocks:
    """More of the open transaction `xid` lies on disk: the blocks that follow those announced before."""

    xid: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """The transaction `xid`, of which blocks were announced, was rolled back, or will come once more."""

    xid: int


Announcement = OpenBlocks | Gone


def place_of(block: Block) -> tuple[str, int] | None:
    """What names a block on disk, before and after its commit; None for one in memory."""
    content = block.content
    return (content.file.path, content.offset) if isinstance(content, Spilled) else None


def rolled_back_of(block: Block) -> tuple[tuple[int, int], ...]:
    """The numbers of the block on disk that do not count."""
    return block.content.dropped if isinstance(block.content, Spilled) else ()


def on_their_own(chunk: Chunk) -> list[Chunk]:
    """The chunk with each large transaction in a chunk of its own; order and size together stay."""
    if len(chunk.transactions) < 2 or not chunk.is_large:
        return [chunk]
    large = {_owner(chunk, block) for block in chunk.blocks if isinstance(block.content, Spilled)}
    borders = sorted({0, len(chunk.transactions), *large, *(index + 1 for index in large)})
    parts = [_part(chunk, begin, end) for begin, end in itertools.pairwise(borders)]
    return [*parts[:-1], replace(parts[-1], left_out=chunk.size - sum(part.size for part in parts))]


def _owner(chunk: Chunk, block: Block) -> int:
    content = block.content
    assert isinstance(content, Spilled)
    return int(chunk.transactions.index_of(np.array([content.first + content.base]))[0])


def _part(chunk: Chunk, begin: int, end: int) -> Chunk:
    transactions = chunk.transactions
    last = end == len(transactions)
    first_number = int(transactions.first_sequence[begin])
    next_number = chunk.next_sequence if last else int(transactions.first_sequence[end])
    inside = Transactions(*(column[begin:end] for column in _columns(transactions)))
    return replace(
        chunk,
        transactions=inside,
        blocks=tuple(_blocks(chunk.blocks, first_number, next_number)),
        truncates=tuple(t for t in chunk.truncates if first_number <= t.sequence < next_number),
        read_position=chunk.read_position if last else int(inside.end_lsn[-1]),
        next_sequence=next_number,
        demand=chunk.demand and last,
    )


def _columns(transactions: Transactions) -> tuple[Int64, ...]:
    return transactions.xid, transactions.end_lsn, transactions.commit_time, transactions.first_sequence


def _blocks(blocks: Sequence[Block], first: int, end: int) -> Iterator[Block]:
    """The changes numbered from `first` up to, but not including, `end`."""
    for block in blocks:
        content = block.content
        if isinstance(content, Spilled):
            if first <= content.first + content.base < end:
                yield block
            continue
        held = content.load()
        inside = (held.sequence >= first) & (held.sequence < end)
        if inside.all():
            yield block
        elif inside.any():
            rows = np.flatnonzero(inside)
            yield Block(block.relation, held.copied(held.starts[rows], held.ends[rows], rows))
