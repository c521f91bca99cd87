"""A chunk that was packed for its way comes out as it was, relations included."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np

from headwater.log.blocks import Block, Chunk, Held, Relation, RelationColumn, Transactions
from headwater.log.packing import PackedChunk, Packer, Unpacker
from headwater.log.spill import Spilled, SpillFile

_generator = np.random.default_rng(5)


def _relation(number: int, name: str = "a") -> Relation:
    return Relation(number, "public", f"t{number}", "d", (RelationColumn(name, 20, -1, True),))


def _block(relation: Relation, changes: int, size: int, first: int = 0) -> Block:
    ends = np.sort(_generator.integers(0, size, changes))
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64) if changes else np.zeros(0, np.int64)
    data = _generator.integers(0, 256, size, dtype=np.uint8)
    return Block(relation, Held(data, starts, ends, first + np.arange(changes)))


def _chunk(*blocks: Block) -> Chunk:
    numbers = np.arange(3)
    return Chunk(Transactions(numbers, numbers + 9, numbers, numbers), blocks, (), 12, 99, demand=True, received=1.5)


def _sent(packer: Packer, unpacker: Unpacker, chunk: Chunk) -> Chunk:
    item = pickle.loads(pickle.dumps(packer.pack(chunk), protocol=5))
    return unpacker.unpack(item) if isinstance(item, PackedChunk) else item


def _assert_same(sent: Chunk, got: Chunk) -> None:
    def rest(chunk: Chunk) -> Chunk:
        empty = np.zeros(0, np.int64)
        return replace(chunk, transactions=Transactions(empty, empty, empty, empty), blocks=())

    assert repr(rest(got)) == repr(rest(sent))
    assert (got.size, got.changes) == (sent.size, sent.changes)
    assert got.transactions.end_lsn.tolist() == sent.transactions.end_lsn.tolist()
    assert [block.relation for block in got.blocks] == [block.relation for block in sent.blocks]
    for mine, yours in zip(got.blocks, sent.blocks, strict=True):
        if isinstance(yours.content, Spilled):
            assert repr(mine.content).split("file=")[1:] != []
            assert (mine.size, mine.changes) == (yours.size, yours.changes)
            continue
        for name in ("data", "starts", "ends", "sequence"):
            found, wanted = getattr(mine.load(), name), getattr(yours.load(), name)
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted)


def test_blocks_of_all_sizes_arrive_in_order() -> None:
    packer, unpacker = Packer(), Unpacker()
    on_disk = Spilled(SpillFile("nowhere", 1), 0, 500, 7, 0, 6, changes=7)
    chunks = [
        _chunk(),
        _chunk(_block(_relation(1), 4, 100)),
        _chunk(*(_block(_relation(number % 3), number, 10 + 10 * number) for number in range(20))),
        _chunk(
            _block(_relation(7), 9, 200_000),
            _block(_relation(1), 5, 70),
            Block(_relation(8), on_disk),
            _block(_relation(7), 0, 0),
            _block(_relation(2), 5, (64 << 10) - 1),
            _block(_relation(2), 5, 64 << 10),
        ),
    ]
    for chunk in chunks:
        _assert_same(chunk, _sent(packer, unpacker, chunk))


def test_a_relation_travels_once_and_is_one_object_from_then_on() -> None:
    packer, unpacker = Packer(), Unpacker()
    first = packer.pack(_chunk(_block(_relation(1), 2, 30), _block(_relation(2), 2, 30)))
    again = packer.pack(_chunk(_block(_relation(2), 2, 30), _block(_relation(1, "renamed"), 2, 30)))
    assert isinstance(first, PackedChunk)
    assert isinstance(again, PackedChunk)
    assert first.new_relations == (_relation(1), _relation(2))
    assert again.new_relations == (_relation(1, "renamed"),)
    blocks = unpacker.unpack(first).blocks
    later = unpacker.unpack(again).blocks
    assert later[0].relation is blocks[1].relation
    assert later[1].relation == _relation(1, "renamed")
