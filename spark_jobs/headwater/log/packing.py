"""A chunk on its way from the reader to the driver, packed: its small blocks as one.

Where tables are many a chunk has hundreds of blocks of a few changes, and what the driver's interpreter spends on
unpickling them, array by array, it cannot spend on applying. So their arrays travel joined, and are cut into views
behind the way; and a relation travels once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from headwater.log.blocks import Block, Bytes, Chunk, Held, Int64, Relation

_SMALL: Final = 64 << 10
"""Bytes of the log: larger blocks travel as they are, without another copy."""


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """`rest`: the chunk with the blocks that are not packed. Of the others, in order: `places` among all blocks,
    `relations` (numbers), `sizes` (bytes) and `counts` (changes), and their contents one behind the other.
    `new_relations`: those that the receiver has not met, which get the next numbers."""

    rest: Chunk
    places: Int64
    relations: Int64
    sizes: Int64
    counts: Int64
    data: Bytes
    starts: Int64
    ends: Int64
    sequence: Int64
    new_relations: tuple[Relation, ...]


class Packer:
    """The reader's side; what it packs must be unpacked in order, by one `Unpacker`."""

    def __init__(self) -> None:
        self._numbers: dict[Relation, int] = {}

    def pack(self, chunk: Chunk) -> Chunk | PackedChunk:
        """The chunk itself, if there is nothing to be gained."""
        small: list[tuple[int, Block, Held]] = []
        for place, block in enumerate(chunk.blocks):
            if isinstance(block.content, Held) and block.size < _SMALL:
                small.append((place, block, block.content))
        if len(small) < 2:
            return chunk
        known = len(self._numbers)
        relations = [self._numbers.setdefault(block.relation, len(self._numbers)) for _, block, _ in small]
        held = [content for _, _, content in small]
        places = [place for place, _, _ in small]
        packed = set(places)
        return PackedChunk(
            rest=replace(chunk, blocks=tuple(b for place, b in enumerate(chunk.blocks) if place not in packed)),
            places=_numbers(places),
            relations=_numbers(relations),
            sizes=_numbers([content.size for content in held]),
            counts=_numbers([content.changes for content in held]),
            data=np.concatenate([content.data for content in held]),
            starts=np.concatenate([content.starts for content in held]),
            ends=np.concatenate([content.ends for content in held]),
            sequence=np.concatenate([content.sequence for content in held]),
            new_relations=tuple(self._numbers)[known:],
        )


class Unpacker:
    """The driver's side."""

    def __init__(self) -> None:
        self._relations: list[Relation] = []

    def unpack(self, packed: PackedChunk) -> Chunk:
        """The chunk as it was; the contents of its small blocks are views of joined arrays."""
        self._relations += packed.new_relations
        blocks = list(packed.rest.blocks)
        byte = change = 0
        places, relations = packed.places.tolist(), packed.relations.tolist()
        sizes, counts = packed.sizes.tolist(), packed.counts.tolist()
        for place, relation, size, count in zip(places, relations, sizes, counts, strict=True):
            rows = slice(change, change + count)
            data = packed.data[byte : byte + size]
            held = Held(data, packed.starts[rows], packed.ends[rows], packed.sequence[rows])
            blocks.insert(place, Block(self._relations[relation], held))
            byte += size
            change += count
        return replace(packed.rest, blocks=tuple(blocks))


def _numbers(values: Sequence[int]) -> Int64:
    return np.array(values, dtype=np.int64)
