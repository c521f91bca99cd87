"""Where a reading of the log connection ends. The connection is a stand-in: a real server pauses when it likes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headwater.source.stream import LogStream

HEADER = b"w" + bytes(24)
ROWS = 50


class Backlog:
    """Transactions of `ROWS` inserts, without end and without a pause."""

    def __init__(self, rows: int = ROWS) -> None:
        self._messages = self._all(rows)

    def _all(self, rows: int) -> Iterator[bytes]:
        while True:
            yield HEADER + b"B"
            for _ in range(rows):
                yield HEADER + b"I" + bytes(74)
            yield HEADER + b"C"

    def get_copy_data(self, _: int) -> tuple[int, bytes]:
        message = next(self._messages)
        return len(message), message


def read(backlog: Backlog, size: int) -> list[bytes | memoryview]:
    stream = object.__new__(LogStream)
    stream._connection = backlog  # type: ignore[assignment]
    messages: list[bytes | memoryview] = []
    stream.receive(messages, size)
    return messages


@pytest.mark.parametrize("size", [10_000, 5_777, 10_000_000])
def test_it_ends_between_two_transactions(size: int) -> None:
    backlog = Backlog()
    for _ in range(3):
        messages = read(backlog, size)
        assert bytes(messages[0])[25:] == b"B"
        assert bytes(messages[-1])[25:] == b"C"
        assert sum(map(len, messages)) < 2 * size


def test_one_that_is_too_large_for_that_is_cut() -> None:
    size = 10_000
    read_bytes = sum(map(len, read(Backlog(rows=1_000_000), size)))
    assert 2 * size <= read_bytes < 2 * size + 100
