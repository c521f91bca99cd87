"""The headers of messages that came together: their bytes are joined, and numpy reads operations, relation ids and
positions at fixed offsets. Of long messages only the beginning is joined; tuples stay bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.log.blocks import Bytes, Int64, Message
from headwater.log.messages import XLOG_HEADER, unexpected
from headwater.log.values.wire import gather

_DATA: Final = ord("w")
UNKNOWN, CHANGE, TRUNCATE, BEGIN, COMMIT, MESSAGE, IGNORED, TURN = range(8)
KINDS = np.full(256, UNKNOWN, dtype=np.uint8)
KINDS[list(b"IUD")] = CHANGE
KINDS[list(b"OY")] = IGNORED  # Origin and Type: nothing here depends on them
KINDS[list(b"T")] = TRUNCATE
KINDS[list(b"B")] = BEGIN
KINDS[list(b"C")] = COMMIT
KINDS[list(b"M")] = MESSAGE
KINDS[list(b"RSEcA")] = TURN

# Sizes behind the header of a CopyData message.
BEGIN_SIZE: Final = 1 + 8 + 8 + 4
COMMIT_SIZE: Final = 1 + 1 + 8 + 8 + 8
CHANGE_SIZE: Final = 1 + 4 + 1 + 2
XID: Final = 4
_HEAD: Final = XLOG_HEADER + COMMIT_SIZE
"""No field that is read here lies behind this."""
_LONG: Final = 512
"""Bytes of an average message from which on copying the heads alone is cheaper."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Of `messages`. `starts`: of the operations, in `joined`; `lengths`: of the whole messages."""

    messages: Sequence[Message]
    joined: Bytes
    starts: Int64
    lengths: Int64
    kinds: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Headers:
        """CopyData 'w' messages, their own headers included; at least one."""
        lengths = np.fromiter(map(len, messages), dtype=np.int64, count=len(messages))
        if lengths.min() <= XLOG_HEADER:
            raise unexpected(messages[int(np.argmin(lengths))], "a message without content")
        joined, starts = _heads(messages, lengths)
        foreign = joined[starts - XLOG_HEADER] != _DATA
        if foreign.any():
            raise unexpected(messages[int(np.argmax(foreign))], "a message of the connection that is no log data")
        return cls(messages, joined, starts, lengths, KINDS[joined[starts]])

    def __len__(self) -> int:
        return len(self.messages)

    def part(self, begin: int, end: int) -> Headers:
        return Headers(
            self.messages[begin:end],
            self.joined,
            self.starts[begin:end],
            self.lengths[begin:end],
            self.kinds[begin:end],
        )

    def field(self, rows: Int64, offset: int, dtype: str) -> Int64:
        """The numbers `offset` bytes behind the operations of `rows`, whose lengths have been checked."""
        return gather(self.joined, self.starts[rows] + offset, dtype).astype(np.int64)

    def picked(self, rows: Int64) -> Sequence[Message]:
        """The messages `rows`, which are ascending."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return self.messages[first : last + 1]
        return list(itemgetter(*rows.tolist())(self.messages))

    def need(self, rows: Int64, size: int, *, exactly: bool) -> None:
        lengths = self.lengths[rows] - XLOG_HEADER
        wrong = lengths != size if exactly else lengths < size
        if wrong.any():
            row = int(np.argmax(wrong))
            raise unexpected(self.messages[rows[row]], f"a message of {lengths[row]} bytes instead of {size}")


def _heads(messages: Sequence[Message], lengths: Int64) -> tuple[Bytes, Int64]:
    """What is looked at, in one buffer, and where the operations stand: of long messages only the beginning."""
    if int(lengths.sum()) > _LONG * len(messages):
        messages, lengths = [message[:_HEAD] for message in messages], np.minimum(lengths, _HEAD)
    return np.frombuffer(b"".join(messages), dtype=np.uint8), np.cumsum(lengths) - lengths + XLOG_HEADER
