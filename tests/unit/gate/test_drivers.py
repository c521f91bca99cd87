"""Whether a driver lives that the source does not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.gate import drivers
from headwater.lake.paths import control_path
from headwater.lake.position_file import PositionFile
from headwater.position import Position
from headwater.source.slot import SlotState
from headwater.source.stream import RECONNECT_SECONDS

STORE = "s3://bucket/lake"
RUNS = PositionFile(1, 1, Position("1", 1, 0), 0, "")


def slot(idle: float | None, *, active: bool = False) -> SlotState:
    return SlotState("s", "pgoutput", "d", active, None, 0, 0, 0, "reserved", None, False, False, idle)


@pytest.fixture
def root(tmp_path: Path) -> str:
    Path(control_path(str(tmp_path))).mkdir()
    return str(tmp_path)


def never(*_: Any) -> SlotState | None:
    pytest.fail("the source is asked again")


def test_on_a_disk_a_lock_tells(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "read_slot", never)
    for idle in (None, 0.0, 1000.0):
        assert not drivers.may_live(root, slot(idle))
        assert drivers.is_gone(None, root, slot(idle))  # type: ignore[arg-type]
    with drivers.not_mended(root):
        for idle in (None, 0.0, 1000.0):
            assert drivers.may_live(root, slot(idle))
        assert not drivers.is_gone(None, root, slot(0.0))  # type: ignore[arg-type]
        assert drivers.is_gone(None, root, slot(1000.0))  # type: ignore[arg-type]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[PositionFile | None]:
    """What the driver has published last, at the end of this list."""
    files: list[PositionFile | None] = [RUNS]
    monkeypatch.setattr(drivers, "read_position_file", lambda root: files[-1])
    return files


def test_in_a_store_the_server_tells_how_long_nobody_has_read_the_slot_and_the_driver_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, published: list[PositionFile | None]
) -> None:
    monkeypatch.setattr(drivers, "read_slot", never)
    assert drivers.may_live(STORE, slot(1.0))
    assert not drivers.is_gone(None, STORE, slot(1.0))  # type: ignore[arg-type]
    assert not drivers.may_live(STORE, slot(60.0))
    assert drivers.is_gone(None, STORE, slot(60.0))  # type: ignore[arg-type]
    assert not drivers.is_gone(None, STORE, slot(None, active=True))  # type: ignore[arg-type]
    for file in (None, replace(RUNS, ended=True)):
        published.append(file)
        for idle in (None, 1.0):
            assert not drivers.may_live(STORE, slot(idle))
            assert drivers.is_gone(None, STORE, slot(idle))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("looks", "gone"),
    [([slot(None), slot(None, active=True)], False), ([slot(None), None], False), ([slot(None)], True)],
)
def test_an_older_server_is_watched_for_as_long_as_a_driver_would_try(
    looks: list[SlotState | None],
    gone: bool,
    monkeypatch: pytest.MonkeyPatch,
    published: list[PositionFile | None],
) -> None:
    now, seen = [0.0], list(looks)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(drivers, "read_slot", lambda *_: seen.pop(0) if len(seen) > 1 else seen[0])
    assert drivers.is_gone(None, STORE, slot(None)) is gone  # type: ignore[arg-type]
    assert (now[0] >= RECONNECT_SECONDS) is gone


def test_who_may_only_read_the_lake_goes_by_what_the_server_says(
    root: str, monkeypatch: pytest.MonkeyPatch, published: list[PositionFile | None]
) -> None:
    def refused(*_: Any) -> Callable[[], None]:
        raise PermissionError("not yours")

    monkeypatch.setattr("headwater.delta.storage.exclusive", refused)
    assert drivers.may_live(root, slot(1.0))
    assert not drivers.may_live(root, slot(60.0))
