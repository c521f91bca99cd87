"""Where a reading of the log connection ends. The connection is a stand-in: a real server pauses when it likes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg import pq

from headwater.errors import Refused, SourceUnreachable
from headwater.source.stream import ConnectionLost, LogStream

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


@pytest.mark.parametrize(("state", "is_lost"), [("25P04", True), ("57P01", True), ("08006", True), ("XX000", False)])
def test_what_a_new_connection_would_not_meet_again_is_a_lost_connection(state: str, is_lost: bool) -> None:
    result = SimpleNamespace(get_error_message=lambda: "it ended", error_field=lambda _: state.encode())
    stand_in: Any = SimpleNamespace(get_copy_data=lambda _: (-2, b""), get_result=lambda: result)
    stream = object.__new__(LogStream)
    stream._connection, stream._binary = stand_in, True
    with pytest.raises(SourceUnreachable) as ended:
        stream.receive([], 1)
    assert isinstance(ended.value, ConnectionLost) == is_lost


@pytest.mark.parametrize(
    ("state", "told", "code"),
    [
        ("42704", 'publication "shop_inserts" does not exist', "publication_missing"),
        ("22P02", 'invalid input syntax for type integer: "a secret"', "row_filter_failed"),
    ],
)
def test_what_no_connection_will_read_past_is_refused_with_its_place(state: str, told: str, code: str) -> None:
    """`tests/integration/source/test_unreadable_logs.py` has a server say it."""
    said = {"SQLSTATE": state, "CONTEXT": "slot ..., associated LSN 0/1F2A3B8", "MESSAGE_PRIMARY": told}
    result = SimpleNamespace(get_error_message=lambda: told, error_field=lambda of: said[of.name].encode())
    stand_in: Any = SimpleNamespace(get_copy_data=lambda _: (-2, b""), get_result=lambda: result)
    stream = object.__new__(LogStream)
    stream._connection, stream._binary = stand_in, True
    with pytest.raises(Refused, match="in the log at 0/1F2A3B8") as refused:
        stream.receive([], 1)
    assert refused.value.code == code
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("state", "told"), [("54000", "out of memory"), ("XX000", "invalid memory alloc request size 1090519103")]
)
def test_a_row_that_is_too_large_as_text_is_refused_with_its_place(state: str, told: str) -> None:
    """`tests/integration/log/test_large_values.py` has a server say it."""
    said = {pq.DiagnosticField.SQLSTATE: state, pq.DiagnosticField.CONTEXT: "slot ..., associated LSN 0/1F2A3B8"}
    result = SimpleNamespace(get_error_message=lambda: f"ERROR:  {told}", error_field=lambda of: said[of].encode())
    stand_in: Any = SimpleNamespace(get_copy_data=lambda _: (-2, b""), get_result=lambda: result)
    stream = object.__new__(LogStream)
    stream._connection, stream._binary = stand_in, False
    with pytest.raises(Refused, match="a row in the log at 0/1F2A3B8 is larger") as refused:
        stream.receive([], 1)
    assert refused.value.code == "row_too_large"
    stream._binary = True
    with pytest.raises(SourceUnreachable):
        stream.receive([], 1)
