"""A table's changes dealt out by the hash of their keys, so that each part can be netted on its own, in bounded memory.

Grace hash partitioning: one pass reads the blocks and writes each change, undecoded, to the file of its part; all
changes of a key are in one part, in the log's order. An update that moves a row to another key becomes a delete there
and an insert here, which is what it is. Changes below `after` are skipped by header.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.key_equality import comparable
from headwater.log.blocks import BLOCK_BYTES, BLOCK_CHANGES, DELETE, INSERT, Block, Held, Int64, Relation, Rows
from headwater.log.net.decoded import Tuples, key_rows, read_tuples
from headwater.log.net.unchanged_values import Moves
from headwater.log.spill import SpillFile, SpillStore
from headwater.log.values.decode import unchanged_of, with_values_of
from headwater.schema import TableSchema

_HEADER: Final = 5
"""Operation and relation id."""
_NOBODY: Final = -1
_MEMORY: Final = 32 << 20
"""Bytes of all parts together that wait for their files."""
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)

Hash = npt.NDArray[np.uint64]


@dataclass(slots=True)
class HashPart:
    """One part: its blocks in its file. On the way there pieces of one relation at a time, `room` bytes of them in
    memory."""

    file: SpillFile
    room: int
    blocks: list[Block] = field(default_factory=list)
    relation: Relation | None = None
    pieces: list[Held] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return sum(block.changes for block in self.blocks)

    @property
    def size(self) -> int:
        """Bytes of the log."""
        return sum(block.size for block in self.blocks)

    @property
    def content(self) -> list[tuple[Block, Rows]]:
        """The blocks, all of whose changes count."""
        return [(block, np.ones(block.changes, dtype=np.bool_)) for block in self.blocks]

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


def new_parts(count: int, store: SpillStore, files: contextlib.ExitStack) -> list[HashPart]:
    """Empty parts, whose files go with `files`."""
    parts = [HashPart(store.new_file(), min(BLOCK_BYTES, _MEMORY // count)) for _ in range(count)]
    for part in parts:
        files.callback(part.file.remove)
    return parts


class Dealer:
    """Deals out the changes of one table, any number of times. `moves`: what left values out on its way to another
    part."""

    def __init__(self, schema: TableSchema, describe: Callable[[int], str], store: SpillStore) -> None:
        self._schema, self._describe, self._store = schema, describe, store
        self.moves = Moves()

    def deal(self, blocks: Iterable[tuple[Block, Rows]], after: int, parts: Sequence[HashPart], seed: int = 0) -> None:
        """Add the changes numbered above `after` to `parts`."""
        for block, mask in blocks:
            held = block.load()
            held = held.part(mask & (held.sequence > after))
            if held.changes:
                tuples = read_tuples(self._schema, block.relation, held, self._describe, keys_only=True)
                self._deal(block.relation, held, tuples, parts, seed)
        for part in parts:
            part.flush(self._store)

    def _deal(self, relation: Relation, held: Held, tuples: Tuples, parts: Sequence[HashPart], seed: int) -> None:
        old_ends = np.full(held.changes, _NOBODY, dtype=np.int64)
        if self._schema.key:
            new, old, moves = self._places(tuples, len(parts), seed)
            old_ends[tuples.has_old] = tuples.old.ends
        else:  # only inserts count, which never meet: any even share will do
            new = held.sequence // BLOCK_CHANGES % len(parts)
            old, moves = old_ends, np.zeros(held.changes, dtype=np.bool_)
        lacking = self._lacking(relation, held, old_ends, moves) if moves.any() else moves
        whole = np.where(moves, _NOBODY, np.where(new != _NOBODY, new, old))
        for number, part in enumerate(parts):
            if (stay := np.flatnonzero(whole == number)).size:
                part.add(relation, held.copied(held.starts[stay], held.ends[stay], stay), self._store)
            if not moves.any():
                continue
            # Deletes before inserts, as in an update.
            if (gone := np.flatnonzero(moves & (old == number))).size:
                piece = _relabelled(held.copied(held.starts[gone], old_ends[gone], gone), DELETE, relation)
                part.add(relation, piece, self._store)
            come = moves & (new == number)
            if (plain := np.flatnonzero(come & ~lacking)).size:
                # The last bytes of the old tuple make room for the insert's header.
                piece = held.copied(old_ends[plain] - _HEADER, held.ends[plain], plain)
                part.add(relation, _relabelled(piece, INSERT, relation), self._store)
            if (few := np.flatnonzero(come & lacking)).size:
                part.add(relation, self._completed(relation, held, old_ends, few), self._store)

    def _places(self, tuples: Tuples, count: int, seed: int) -> tuple[Int64, Int64, Rows]:
        """Per change the part of its new key and of its old one (or nobody's), and whether these are two keys."""
        hashes, places = [], []
        for there, rows in ((tuples.has_new, tuples.new), (tuples.has_old, tuples.old)):
            hashed = np.zeros(len(tuples.operation), dtype=np.uint64)
            hashed[there] = _hash(key_rows(self._schema, rows), seed)
            hashes.append(hashed)
            places.append(np.where(there, (hashed % np.uint64(count)).astype(np.int64), _NOBODY))
        return places[0], places[1], tuples.has_new & tuples.has_old & (hashes[0] != hashes[1])

    def _lacking(self, relation: Relation, held: Held, old_ends: Int64, moves: Rows) -> Rows:
        """Notes the moves that left values out; which of them have left out values of their key."""
        lacking = np.zeros(held.changes, dtype=np.bool_)
        at = np.flatnonzero(moves)
        left_out = unchanged_of(held.data, old_ends[at] + 1, len(relation.columns))
        of_key = np.array([column.name in self._schema.key for column in relation.columns])
        others = left_out & ~of_key
        if others.any():
            names = {relation.columns[place].name for place in np.flatnonzero(others.any(axis=0))}
            self.moves.note(held.sequence[at[others.any(axis=1)]], names)
        lacking[at] = (left_out & of_key).any(axis=1)
        return lacking

    def _completed(self, relation: Relation, held: Held, old_ends: Int64, rows: Int64) -> Held:
        """Inserts of new tuples whose key is in part in the old tuple alone: it was too large to be written again."""
        header = bytes([INSERT]) + relation.relation_id.to_bytes(4, "big") + b"N"
        keys = [place for place, column in enumerate(relation.columns) if column.name in self._schema.key]
        tuples = [
            header + with_values_of(held.data, int(held.starts[row]) + _HEADER + 1, int(old_ends[row]) + 1, keys)
            for row in rows.tolist()
        ]
        ends = np.cumsum([len(one) for one in tuples])
        data = np.frombuffer(b"".join(tuples), dtype=np.uint8)
        return Held(data, np.concatenate([[0], ends[:-1]]), ends, held.sequence[rows])


def _relabelled(held: Held, operation: int, relation: Relation) -> Held:
    data = held.data.copy()
    data[held.starts] = operation
    for place, byte in enumerate(relation.relation_id.to_bytes(4, "big"), 1):
        data[held.starts + place] = byte
    return Held(data, held.starts, held.ends, held.sequence)


def _hash(keys: pa.Table, seed: int) -> Hash:
    """A number per row, the same for the same keys; others for another `seed`."""
    result = np.full(keys.num_rows, seed, dtype=np.uint64)
    for name in keys.column_names:
        result = (result ^ _words(comparable(keys[name].combine_chunks()))) * _FACTOR
        result ^= result >> np.uint64(29)
    return result


def _words(values: pa.Array) -> Hash:
    kind = values.type
    if pa.types.is_floating(kind):
        bits: Hash = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False).view(np.uint64)
        return bits
    if pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        numbers = values.cast(pa.int32()) if pa.types.is_date32(kind) else values
        whole: Hash = numbers.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
        return whole
    # Python's hash takes in every byte, and is another one in each process: nobody can write keys that meet.
    return np.fromiter(map(hash, values.to_pylist()), np.int64, len(values)).view(np.uint64)
