"""One table's share of a batch as bytes that outlive the driver: raw changes, undecoded, and their transactions.

A piece is a length, a header in JSON, and arrays one behind the other, whose checksum the header has. Large shares
come in several pieces, none of which is worth anything without the last one; blocks are read one at a time. What is
read back decides by positions and transaction ids alone: the numbers of changes are given anew, since those of another
connection began elsewhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Final

import numpy as np

from headwater.log.blocks import Block, Held, Int64, Relation, RelationColumn, Rows, Transactions, Truncate

PIECE_BYTES: Final = 32 << 20
_MAGIC: Final = b"HWKEPT1\n"
_NUMBER: Final = 8
_READ_BYTES: Final = 4 << 20

ReadRange = Callable[[int, int], bytes]
"""`length` bytes from `offset` of a piece."""


def pieces(
    blocks: Sequence[tuple[Block, Rows]], truncates: Sequence[Truncate], transactions: Transactions, to_lsn: int
) -> Iterator[bytes]:
    """The changes that the masks leave, in pieces of about PIECE_BYTES and at least one block; the last one says so.

    `to_lsn`: every change of the table up to there is in these and in earlier shares.
    """
    numbers = [np.array([t.sequence for t in truncates], dtype=np.int64)]
    waiting: list[tuple[Block, Held]] = []
    for block, mask in blocks:
        held = block.load().part(mask)
        if not held.changes:
            continue
        if waiting and sum(h.memory for _, h in waiting) + held.memory > PIECE_BYTES:
            yield _piece(waiting)
            waiting = []
        numbers.append(held.sequence)
        waiting.append((block, held))
    all_numbers = np.concatenate(numbers)
    used = _chosen(transactions, np.unique(transactions.index_of(all_numbers)))
    yield _piece(waiting, _Last(truncates, used, to_lsn, int(all_numbers.max()) + 1))


@dataclass(frozen=True, slots=True)
class _Last:
    """What only the last piece has; `next`: above the number of every change of the share."""

    truncates: Sequence[Truncate]
    transactions: Transactions
    to_lsn: int
    next: int


def _chosen(transactions: Transactions, used: Int64) -> Transactions:
    return Transactions(
        transactions.xid[used],
        transactions.end_lsn[used],
        transactions.commit_time[used],
        transactions.first_sequence[used],
    )


def _piece(blocks: Sequence[tuple[Block, Held]], last: _Last | None = None) -> bytes:
    relations = list(dict.fromkeys(block.relation for block, _ in blocks))
    header: dict[str, Any] = {
        "relations": [
            {**asdict(relation), "columns": [column._asdict() for column in relation.columns]} for relation in relations
        ],
        "blocks": [[relations.index(block.relation), held.size, held.changes] for block, held in blocks],
    }
    arrays: list[Any] = [part for _, h in blocks for part in (h.data, h.starts, h.ends, h.sequence)]
    if last is not None:
        known = last.transactions
        arrays += [known.xid, known.end_lsn, known.commit_time, known.first_sequence]
        header |= {
            "transactions": len(known),
            "truncates": [asdict(truncate) for truncate in last.truncates],
            "to_lsn": last.to_lsn,
            "next": last.next,
        }
    content = [array.tobytes() for array in arrays]
    header["checksum"] = _checksum(content)
    text = json.dumps(header).encode()
    return b"".join([_MAGIC, len(text).to_bytes(_NUMBER, "big"), text, *content])


def _checksum(parts: Iterable[bytes]) -> int:
    return reduce(lambda found, part: zlib.crc32(part, found), parts, 0)


@dataclass(frozen=True, slots=True)
class KeptContent:
    """A block's content in a piece, read when it is asked for."""

    read: ReadRange
    offset: int
    size: int
    changes: int
    shift: int

    @property
    def memory(self) -> int:
        return 0

    def load(self) -> Held:
        data = self.read(self.offset, self.size + 3 * _NUMBER * self.changes)
        numbers = np.frombuffer(data[self.size :], dtype=np.int64).reshape(3, self.changes)
        bytes_ = np.frombuffer(data, dtype=np.uint8, count=self.size)
        return Held(bytes_, numbers[0], numbers[1], numbers[2] + self.shift)


@dataclass(frozen=True, slots=True)
class KeptShare:
    """A share as it is read back. Numbers of changes begin at the `base` that it was read with; `next`: the first free
    one."""

    blocks: tuple[Block, ...]
    truncates: tuple[Truncate, ...]
    transactions: Transactions
    to_lsn: int
    next: int

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def changes(self) -> int:
        return sum(block.changes for block in self.blocks)


def share_of(readers: Sequence[ReadRange], base: int) -> KeptShare | None:
    """The share whose pieces these are, in order; None when the last one is missing: it was never said to be kept."""
    found = [_header(read) for read in readers]
    if not found or "transactions" not in found[-1][0]:
        return None
    header, start = found[-1]
    read = readers[-1]
    at = start + sum(size + 3 * _NUMBER * changes for _, size, changes in header["blocks"])
    count = header["transactions"]
    parts = np.frombuffer(read(at, 4 * _NUMBER * count), dtype=np.int64).reshape(4, count)
    shift = base - int(parts[3][0])
    transactions = Transactions(parts[0], parts[1], parts[2], parts[3] + shift)
    blocks = [
        block
        for (header, start), read in zip(found, readers, strict=True)
        for block in _blocks(header, start, read, shift)
    ]
    truncates = tuple(
        Truncate(t["sequence"] + shift, tuple(t["relation_ids"]), t["cascade"], t["restart_identity"])
        for t in header["truncates"]
    )
    return KeptShare(tuple(blocks), truncates, transactions, header["to_lsn"], header["next"] + shift)


def is_whole(read: ReadRange, size: int) -> bool:
    """Whether a piece of `size` bytes is as it was written. Those of an older Headwater have no checksum: as long."""
    if size < len(_MAGIC) + _NUMBER:
        return False
    try:
        header, start = _header(read)
    except ValueError:
        begin = read(0, len(_MAGIC))
        if begin == _MAGIC or not any(begin):  # a power cut may leave a file its length, and zeros for content
            return False
        raise
    blocks = sum(size + 3 * _NUMBER * changes for _, size, changes in header["blocks"])
    transactions = int(header.get("transactions", 0))
    if size != start + int(blocks) + 4 * _NUMBER * transactions:
        return False
    parts = (read(at, min(_READ_BYTES, size - at)) for at in range(start, size, _READ_BYTES))
    return "checksum" not in header or _checksum(parts) == header["checksum"]


def _header(read: ReadRange) -> tuple[dict[str, Any], int]:
    """The header of a piece, and where its arrays begin."""
    start = len(_MAGIC) + _NUMBER
    begin = read(0, start)
    if begin[: len(_MAGIC)] != _MAGIC:
        raise ValueError("this is no file of kept changes, or of a newer Headwater")
    length = int.from_bytes(begin[len(_MAGIC) :], "big")
    return json.loads(read(start, length)), start + length


def _blocks(header: dict[str, Any], start: int, read: ReadRange, shift: int) -> Iterator[Block]:
    relations = [
        Relation(**{**known, "columns": tuple(RelationColumn(**column) for column in known["columns"])})
        for known in header["relations"]
    ]
    for number, size, changes in header["blocks"]:
        yield Block(relations[number], KeptContent(read, start, size, changes, shift))
        start += size + 3 * _NUMBER * changes
