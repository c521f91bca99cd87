"""A table's changes dealt out by the hash of their keys, so that each part can be netted on its own, in bounded memory.

Grace hash partitioning: one pass reads the blocks and writes each change, undecoded, to the file of its part; all
changes of a key are in one part, in the log's order. An update that moves a row from a key of one part to a key of
another becomes a delete here and an insert there, which is what it is. Changes below `after` are skipped by header.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.blocks import BLOCK_BYTES, BLOCK_CHANGES, DELETE, INSERT, Block, Bytes, Held, Int64, Relation, Rows
from headwater.log.copying import copied
from headwater.log.decoded_changes import Tuples, key_rows, read_tuples
from headwater.log.spill import SpillFile, SpillStore
from headwater.log.wire import gather
from headwater.schema import TableSchema

_HEADER: Final = 5
"""Operation and relation id."""
_NOBODY: Final = -1
_MEMORY: Final = 32 << 20
"""Bytes of all parts together that wait for their files."""
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)

Hash = npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Part:
    """One part on its way to its file: pieces of one relation at a time, `room` bytes of them in memory."""

    file: SpillFile
    room: int
    blocks: list[Block] = field(default_factory=list)
    relation: Relation | None = None
    pieces: list[Held] = field(default_factory=list)

    def add(self, relation: Relation, piece: Held, store: SpillStore) -> None:
        if self.relation is not relation:
            self.flush(store)
            self.relation = relation
        self.pieces.append(piece)
        changes, size = sum(p.changes for p in self.pieces), sum(p.size for p in self.pieces)
        if changes >= BLOCK_CHANGES or size >= self.room:
            self.flush(store)

    def flush(self, store: SpillStore) -> None:
        if self.relation is not None and self.pieces:
            self.blocks += store.write(self.file, [Block(self.relation, Held.joined(self.pieces))])
        self.pieces = []


def partitioned(
    schema: TableSchema,
    blocks: Iterable[tuple[Block, Rows]],
    describe: Callable[[int], str],
    after: int,
    count: int,
    store: SpillStore,
) -> Generator[list[tuple[Block, Rows]]]:
    """The changes numbered above `after` in `count` parts. A part's file goes when the next part is asked for."""
    parts = [_Part(store.new_file(), min(BLOCK_BYTES, _MEMORY // count)) for _ in range(count)]
    try:
        for block, mask in blocks:
            held = block.load()
            held = held.part(mask & (held.sequence > after))
            if held.changes:
                tuples = read_tuples(schema, block.relation, held, describe, keys_only=True)
                _deal(schema, block.relation, held, tuples, parts, store)
        for part in parts:
            part.flush(store)
            yield [(block, np.ones(block.changes, dtype=np.bool_)) for block in part.blocks]
            part.file.remove()
    finally:
        for part in parts:
            part.file.remove()


def _deal(
    schema: TableSchema, relation: Relation, held: Held, tuples: Tuples, parts: Sequence[_Part], store: SpillStore
) -> None:
    if schema.key:
        new, old, old_ends = _parts_of(schema, tuples, len(parts))
    else:  # only inserts count, which never meet: any even share will do
        new = held.sequence // BLOCK_CHANGES % len(parts)
        old = old_ends = np.full(held.changes, _NOBODY, dtype=np.int64)
    moves = (new != _NOBODY) & (old != _NOBODY) & (new != old)
    whole = np.where(moves, _NOBODY, np.where(new != _NOBODY, new, old))
    for number, part in enumerate(parts):
        pieces = []
        if (kept := np.flatnonzero(whole == number)).size:
            pieces.append(copied(held, held.starts[kept], held.ends[kept], kept))
        if moves.any():
            if (gone := np.flatnonzero(moves & (old == number))).size:
                pieces.append(_relabelled(copied(held, held.starts[gone], old_ends[gone], gone), DELETE, relation))
            if (come := np.flatnonzero(moves & (new == number))).size:
                # The last bytes of the old tuple make room for the insert's header.
                pieces.append(
                    _relabelled(copied(held, old_ends[come] - _HEADER, held.ends[come], come), INSERT, relation)
                )
        for piece in pieces:
            part.add(relation, piece, store)


def _parts_of(schema: TableSchema, tuples: Tuples, count: int) -> tuple[Int64, Int64, Int64]:
    """Per change the part of its new key and of its old one (or nobody's), and where its old tuple ends."""
    new, old, old_ends = (np.full(len(tuples.operation), _NOBODY, dtype=np.int64) for _ in range(3))
    new[tuples.has_new] = _hash(key_rows(schema, tuples.new)) % np.uint64(count)
    old[tuples.has_old] = _hash(key_rows(schema, tuples.old)) % np.uint64(count)
    old_ends[tuples.has_old] = tuples.old.ends
    return new, old, old_ends


def _relabelled(held: Held, operation: int, relation: Relation) -> Held:
    data = held.data.copy()
    data[held.starts] = operation
    for place, byte in enumerate(relation.relation_id.to_bytes(4, "big"), 1):
        data[held.starts + place] = byte
    return Held(data, held.starts, held.ends, held.sequence)


def _hash(keys: pa.Table) -> Hash:
    """A number per row, equal for equal keys. Of long texts length, first and last bytes count."""
    result = np.zeros(keys.num_rows, dtype=np.uint64)
    for name in keys.column_names:
        result = (result ^ _words(keys[name].combine_chunks())) * _FACTOR
        result ^= result >> np.uint64(29)
    return result


def _words(values: pa.Array) -> Hash:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _text_words(values)
    if pa.types.is_floating(kind):
        values = pc.add(values.cast(pa.float64()), pa.scalar(0.0))  # -0 is 0
        bits: Hash = values.fill_null(0.0).to_numpy(zero_copy_only=False).view(np.uint64)
        return bits
    if pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        numbers = values.cast(pa.int32()) if pa.types.is_date32(kind) else values
        whole: Hash = numbers.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
        return whole
    return _text_words(values.cast(pa.string()))


def _text_words(values: pa.Array) -> Hash:
    _, offsets, data = values.buffers()
    borders = np.frombuffer(offsets, dtype=np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    lengths = np.diff(borders)
    result = lengths.astype(np.uint64)
    if data is None or not len(lengths):
        return result
    buffer: Bytes = np.frombuffer(data, dtype=np.uint8)
    long = lengths >= 8
    for at in (borders[:-1][long], borders[1:][long] - 8):
        result[long] = (result[long] ^ gather(buffer, at, ">u8")) * _FACTOR
    for place in range(7):
        short = ~long & (lengths > place)
        result[short] = (result[short] ^ buffer[borders[:-1][short] + place]) * _FACTOR
    return result
