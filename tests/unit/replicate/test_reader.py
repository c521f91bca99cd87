"""What the reader tells a server, and the driver's end of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.errors import HeadwaterError, Refused, SourceChanged, SourceUnreachable
from headwater.log.framing import Framer
from headwater.log.hiding import Hiding
from headwater.replicate.reader import handle, process
from headwater.replicate.reader.handle import LogReader
from headwater.replicate.reader.process import Ended, LogProgress, ReaderOptions
from headwater.source.stream import ConnectionLost, Keepalive, LogSource

SLOT, LEDGER, AHEAD = 500, 1000, 5000


class Stream:
    """A server that sends nothing, whose slot stands below the ledger: a driver was killed before its sync."""

    walsender = 1
    confirmed: list[int]
    stands_at: int | None
    asks = False

    def __init__(self, conninfo: str) -> None:
        pass

    def identify(self, slot: str) -> LogSource:
        return LogSource("7", 2, 10_000, self.stands_at)

    def start(self, *_: object, **__: object) -> None:
        pass

    def confirm(self, lsn: int, *, ask: bool = False) -> None:
        self.confirmed.append(lsn)

    def receive(self, messages: list[bytes], size: int) -> Keepalive:
        return Keepalive(AHEAD, self.asks)

    def wait_readable(self, seconds: float, *_: int) -> None:
        time.sleep(min(seconds, 0.01))

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, int]], Any]:
    """A reader of the log of a system and timeline, in this process, and the driver's ends of its pipes."""
    monkeypatch.setattr(process, "LogStream", Stream)
    monkeypatch.setattr(Stream, "confirmed", [], raising=False)
    monkeypatch.setattr(Stream, "stands_at", SLOT, raising=False)
    monkeypatch.setattr(process, "FEEDBACK_SECONDS", 0.02)

    ends: list[Connection] = []  # or they would be closed

    def begin(log_of: tuple[str, int]) -> tuple[Any, Connection]:
        end, reader_data = multiprocessing.Pipe()
        ends.append(end)
        reader_control, control = multiprocessing.Pipe(duplex=False)
        options = ReaderOptions("", "slot", ("p",), LEDGER, 180000, 1 << 20, hiding=None, log_of=log_of)
        return process._Reader(options, str(tmp_path), reader_data, reader_control), control

    return begin


def test_what_the_driver_before_has_published_is_confirmed_when_the_new_one_has_it_on_disk(reading: Any) -> None:
    reader, control = reading(("7", 2))
    thread = threading.Thread(target=reader.run, daemon=True)
    thread.start()
    _until(lambda: len(Stream.confirmed) >= 3)
    assert set(Stream.confirmed) == {SLOT}, "no more than the server has, and no less: an older one would go back"
    control.send(("confirm", LEDGER))
    _until(lambda: Stream.confirmed[-1] == LEDGER)
    control.send(("stop", None))
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("log_of", [("8", 2), ("7", 1)])
def test_a_log_that_is_not_the_one_which_the_driver_has_looked_at_is_not_read(
    reading: Any, log_of: tuple[str, int]
) -> None:
    reader, _ = reading(log_of)
    with pytest.raises(SourceChanged, match="the log connection leads to system 7 timeline 2 now"):
        reader.run()


@pytest.mark.parametrize(("stands_at", "code"), [(LEDGER + 1, "already_running"), (None, "slot_gap")])
def test_a_slot_that_another_driver_has_moved_while_this_one_started_is_no_gap(
    reading: Any, stands_at: int | None, code: str
) -> None:
    """Of two that start together, both find the slot free and at the ledger's position."""
    Stream.stands_at = stands_at
    reader, _ = reading(("7", 2))
    with pytest.raises(HeadwaterError) as refused:
        reader.run()
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("stops", "asks", "dropped"),
    [(False, False, False), (None, True, False), (True, False, True), (False, True, True)],
    ids=["the server is full", "a short wal_sender_timeout", "it says that it stops", "it asks, and takes no session"],
)
def test_a_log_connection_is_dropped_only_for_a_server_that_stops(
    reading: Any, monkeypatch: pytest.MonkeyPatch, stops: bool | None, asks: bool, dropped: bool
) -> None:
    monkeypatch.setattr(process, "SHUTDOWN_PATIENCE", 0.0)
    monkeypatch.setattr(Stream, "asks", asks)
    reader, control = reading(("7", 2))
    reader._heard = reader._driver_heard = reader._fed_back = reader._told = reader._looked = time.monotonic()
    control.send(("hide", (1, Hiding())))
    control.send(("read on", 0))
    if stops is not None:
        control.send(("no session", stops))
    with pytest.raises(ConnectionLost, match="waits to shut down") if dropped else contextlib.nullcontext():
        for _ in range(5):
            reader._round(Stream(""))


@pytest.mark.parametrize(
    ("code", "positions"),
    [("log_unreadable", [7, 7]), ("log_unreadable", [7, 8, 8]), ("source_unreachable", [7])],
)
def test_what_the_server_cannot_read_again_at_the_same_position_is_refused(
    reading: Any, monkeypatch: pytest.MonkeyPatch, code: str, positions: list[int]
) -> None:
    monkeypatch.setattr(process, "_LONGEST_BACKOFF", 0.0)
    monkeypatch.setattr(process, "_CONNINFO_SECONDS", 0.0)
    reader, control = reading(("7", 2))
    control.send(("hide", (1, Hiding())))
    failed: list[int] = []

    def fail(*_: object) -> None:
        reader._may_read += 1
        failed.append(positions[len(failed)])
        raise SourceUnreachable("could not open relation", code=code)

    monkeypatch.setattr(Stream, "receive", fail)
    monkeypatch.setattr(Framer, "last_commit", property(lambda _: failed[-1] if failed else 0))
    with pytest.raises(Refused if code == "log_unreadable" else SourceUnreachable, match="open relation") as ended:
        reader.run()
    assert ended.value.code == code
    assert failed == positions


def test_what_the_driver_cannot_take_in_ends_it_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not, after a silence, with one about a server that answered all the time."""
    items = iter([LogProgress(1, 0.0), Ended(None)])
    monkeypatch.setattr(handle, "ChunkReceiver", lambda data: SimpleNamespace(receive=lambda: next(items)))
    reader: Any = object.__new__(LogReader)
    reader._child, reader._changed, reader._ended = SimpleNamespace(data=None), threading.Condition(), None

    def full(item: object) -> None:
        raise OSError(28, "No space left on device")

    reader._arrived = full
    reader._receive()
    assert isinstance(reader._ended.error, HeadwaterError)
    assert "could not be taken in: OSError: No space left on device" in reader._ended.error.message


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)
