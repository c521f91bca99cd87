"""Changes on their way into blocks: collected per relation, in memory up to a point, then on disk.

A message is kept as it came. When a block is closed the messages are joined once, and numpy finds the starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from headwater.log.blocks import BLOCK_BYTES, BLOCK_CHANGES, Block, Bytes, Held, Int64, Message, Relation
from headwater.log.messages import XLOG_HEADER
from headwater.log.spill import Spilled, SpillFile, SpillStore, kept_of, spill_files

_OBJECT_BYTES: Final = 49
"""What a bytes object costs beside its bytes, with its place in a list."""
_XID: Final = 4


@dataclass(slots=True)
class _Builder:
    relation: Relation
    messages: list[Message] = field(default_factory=list)
    sequence: list[Int64] = field(default_factory=list)
    size: int = 0

    @property
    def memory(self) -> int:
        return sum(map(len, self.messages)) + len(self.messages) * _OBJECT_BYTES

    def build(self, streamed: bool) -> Block:
        lengths = np.fromiter(map(len, self.messages), dtype=np.int64, count=len(self.messages))
        ends = np.cumsum(lengths)
        starts = ends - lengths + XLOG_HEADER
        data: Bytes = np.frombuffer(bytearray().join(self.messages), dtype=np.uint8)
        if streamed:
            # An xid stands behind the operation; the operation is written over its last byte, so that all blocks
            # look alike.
            data[starts + _XID] = data[starts]
            starts += _XID
        return Block(self.relation, Held(data, starts, ends, np.concatenate(self.sequence)))


class Changes:
    """The changes of one open transaction, or of the chunk that is being collected, in blocks per relation.

    `streamed`: the messages carry an xid. `memory`: bytes held in memory, messages and closed blocks. `hide`: takes out
    of a block what must not be written anywhere, before it can be.
    """

    def __init__(self, hide: Callable[[Block], Block], *, streamed: bool) -> None:
        self._hide = hide
        self._streamed = streamed
        self._builders: dict[int, _Builder] = {}
        self._closed: list[Block] = []
        self._file: SpillFile | None = None
        self.memory = 0
        self.size = 0

    def add(self, relation: Relation, messages: Sequence[Message], sequence: Int64, size: int) -> None:
        """Messages of one relation in order, with their numbers; `size`: their bytes together."""
        builder = self._builders.get(relation.relation_id)
        if builder is not None and builder.relation is not relation:
            self._close(builder)
            builder = None
        begin = 0
        self.size += size
        self.memory += size + len(messages) * _OBJECT_BYTES
        average = size // max(len(messages), 1) + 1
        while begin < len(messages):
            if builder is None:
                builder = self._builders[relation.relation_id] = _Builder(relation)
            room = min(BLOCK_CHANGES - len(builder.messages), max(1, (BLOCK_BYTES - builder.size) // average))
            taken = messages[begin : begin + room]
            builder.messages.extend(taken)
            builder.sequence.append(sequence[begin : begin + room])
            builder.size += average * len(taken)
            begin += room
            if len(builder.messages) >= BLOCK_CHANGES or builder.size >= BLOCK_BYTES:
                self._close(builder)
                builder = None

    def _close(self, builder: _Builder) -> None:
        del self._builders[builder.relation.relation_id]
        block = self._hide(builder.build(self._streamed))
        self._closed.append(block)
        self.memory += block.content.memory - builder.memory

    def spill(self, store: SpillStore) -> None:
        """Everything so far goes to disk."""
        for builder in list(self._builders.values()):
            self._close(builder)
        held = [block for block in self._closed if isinstance(block.content, Held)]
        if not held:
            return
        if self._file is None:
            self._file = store.new_file()
        spilled = [block for block in self._closed if not isinstance(block.content, Held)]
        self._closed = [*spilled, *store.write(self._file, held)]
        self.memory = 0

    def on_disk(self) -> list[Block]:
        """The blocks that were spilled, in order."""
        return [block for block in self._closed if isinstance(block.content, Spilled)]

    def take_over(self, blocks: Sequence[Block]) -> None:
        """Blocks of a transaction that has committed join those of the chunk."""
        self._closed.extend(blocks)
        self.size += sum(block.size for block in blocks)
        self.memory += sum(block.content.memory for block in blocks)

    def absorb(self, earlier: Changes) -> None:
        """The open part of an ordinary transaction: small ones share the builders, so that blocks stay large."""
        self.take_over(earlier._closed)
        for builder in earlier._builders.values():
            size = sum(map(len, builder.messages))
            self.add(builder.relation, builder.messages, np.concatenate(builder.sequence), size)

    def finish(self, base: int = 0, dropped: tuple[tuple[int, int], ...] = ()) -> list[Block]:
        """All blocks. `base` is added to the numbers; changes whose number lies in a range `dropped` are left out."""
        for builder in list(self._builders.values()):
            self._close(builder)
        blocks = self._closed
        if base or dropped:
            blocks = [Block(block.relation, _final(block.content, base, dropped)) for block in blocks]
        left = [block for block in blocks if block.changes]
        if self._file is not None and self._file not in spill_files(left):
            self._file.remove()  # all that was in it was rolled back
        return left

    def discard(self) -> None:
        """The transaction was rolled back: its file goes."""
        if self._file is not None:
            self._file.remove()


def _final(content: object, base: int, dropped: tuple[tuple[int, int], ...]) -> Held | Spilled:
    if isinstance(content, Spilled):
        return content.rebased(base, dropped)
    assert isinstance(content, Held)
    kept = content.part(kept_of(content.sequence, dropped)) if dropped else content
    return replace(kept, sequence=kept.sequence + base)
