"""From change blocks to netted Arrow rows: `net_effect` over blocks of ten ordinary columns, by kind of change and key.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_decode.py

Each line: changes a second of the whole way (decode and net), and of decoding alone, block by block; beside it the
same changes replayed one by one into a dict (keys only, values untouched), the simplest thing that is right. Small
blocks are what a batch of a second brings of ten tables. CPU time of this process on one core, the best of several
rounds. Rows and blocks are those of `decode.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from decode import COLUMNS, ROWS, TYPES, make_block, seconds
from figures import figure

from headwater.log.blocks import Block, Held, Relation, RelationColumn
from headwater.log.net.net_effect import net_effect
from headwater.log.values.decode import decode_tuples
from headwater.schema import Column, Leaf, TableSchema, ValueType

BLOCKS = 20
RELATION_ID = 7


def schema(key: str) -> TableSchema:
    columns = tuple(COLUMNS)
    if key == "text":
        columns = (replace(COLUMNS[0], value=ValueType("text", "string")), *COLUMNS[1:])
    return TableSchema(RELATION_ID, "public", "t", columns, ("id",), (Leaf(RELATION_ID, "public", "t", 1),))


def relation(of: TableSchema) -> Relation:
    columns = tuple(RelationColumn(c.name, 0, -1, c.name == "id") for c in of.columns)
    return Relation(RELATION_ID, "public", "t", "d", columns)


class Changes:
    """Blocks of one kind of traffic on one table; keys are drawn from as many as there are changes."""

    def __init__(self, mix: str, key: str, rows: int = ROWS, blocks: int = BLOCKS) -> None:
        self.rows, self.count = rows, rows * blocks
        generator = np.random.default_rng(5)
        self.schema = schema(key)
        data, starts = make_block(generator)
        tail_at = 2 + 13  # behind the count and the first column, an int8
        tails = [data[at + tail_at : end].tobytes() for at, end in zip(starts, [*starts[1:], len(data)], strict=True)]
        self.blocks: list[Block] = []
        self.keys: list[tuple[int, bytes]] = []
        for block in range(blocks):
            self.blocks.append(self._block(mix, key, tails, generator, block * self.rows))

    def _block(self, mix: str, key: str, tails: list[bytes], generator: Any, first: int) -> Block:
        kinds = (
            generator.choice([0, 1, 1, 1, 2], self.rows) if mix == "20/60/20" else np.full(self.rows, mix == "updates")
        )
        drawn = generator.integers(0, self.count, self.rows)
        parts, starts, ends, size = [], [], [], 0
        for row in range(self.rows):
            number = first + row if kinds[row] == 0 else int(drawn[row])
            raw = f"{number:036d}".encode() if key == "text" else struct.pack("!q", number)
            value = b"b" + struct.pack("!i", len(raw)) + raw
            count = struct.pack("!h", len(COLUMNS))
            if kinds[row] == 2:
                body = b"D" + struct.pack("!I", RELATION_ID) + b"K" + count + value + b"n" * (len(COLUMNS) - 1)
            else:
                operation = b"U" if kinds[row] else b"I"
                body = operation + struct.pack("!I", RELATION_ID) + b"N" + count + value + tails[row]
            parts.append(body)
            self.keys.append((int(kinds[row]), raw))
            starts.append(size)
            size += len(body)
            ends.append(size)
        data = np.frombuffer(b"".join(parts), dtype=np.uint8)
        numbers = first + np.arange(self.rows)
        return Block(relation(self.schema), Held(data, np.array(starts), np.array(ends), numbers))

    def net(self) -> None:
        every = np.ones(self.rows, dtype=np.bool_)
        net_effect(self.schema, [(block, every) for block in self.blocks], [], str)

    def decode(self) -> None:
        columns: list[Column | None] = list(self.schema.columns)
        key_only = [column if column is not None and column.name == "id" else None for column in columns]
        for block in self.blocks:
            held = block.load()
            deletes = held.data[held.starts] == ord("D")
            decode_tuples(held.data, held.starts[~deletes] + 6, columns)
            decode_tuples(held.data, held.starts[deletes] + 6, key_only)

    def replay(self) -> None:
        table: dict[bytes, int] = {}
        for number, (kind, key) in enumerate(self.keys):
            if kind == 2:
                table.pop(key, None)
            else:
                table[key] = number


def repeated(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def measure(what: str, changes: Changes, tables: int = 1) -> None:
    """`tables`: as many like that one are netted one after the other."""
    count = changes.count * tables
    whole, decoding, replaying = (
        seconds(partial(repeated, step, tables)) for step in (changes.net, changes.decode, changes.replay)
    )
    replay, columns = "keys alone replayed into a dict", f"{len(TYPES)} columns"
    figure(f"net effect of {what}, {columns}", count / whole, "changes/s", replay, count / replaying)
    figure(f"decoding of {what}, {columns}", count / decoding, "changes/s", replay, count / replaying)


def main() -> None:
    for key, shown in (("bigint", "bigint"), ("text", "text of 36 bytes")):
        for mix in ("inserts", "updates", "20/60/20"):
            measure(f"{mix}, {shown} keys, blocks of 10,000", Changes(mix, key))
        small = Changes("20/60/20", key, rows=300, blocks=7)
        measure(f"20/60/20, {shown} keys, blocks of 300 of ten tables", small, tables=10)


if __name__ == "__main__":
    main()
