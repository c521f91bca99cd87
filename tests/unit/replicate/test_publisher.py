"""When the position file is written: on a disk each second, in a store where it says something new, or now and then."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.lakes import HandLake, position_at
from headwater.lake import looks
from headwater.lake.look import NOT_YET_SHOWN
from headwater.lake.position_file import PositionFile
from headwater.replicate import publisher as module
from headwater.replicate.publisher import Publisher
from headwater.source.samples import Sample

A = "public.a"


class Driver:
    """A publisher over parts that say what they are told to, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, in_store: bool) -> None:
        self.now = 0.0
        self.written: list[PositionFile] = []
        self.lake = HandLake(folder, position_at(lsn=100), [A])
        self.lake.publish(110, A)
        pace = looks._IN_STORE if in_store else looks._ON_DISK
        monkeypatch.setattr(module, "often", lambda root: pace)
        monkeypatch.setattr(module, "Growing", lambda first, most: looks.Growing(first, most, lambda: self.now))
        monkeypatch.setattr(module, "write_position_file", lambda root, content: self.written.append(content))
        self.reader = SimpleNamespace(read_position=110, busy=SimpleNamespace(rates=lambda _lanes: {}))
        self.waiting: dict[str, int] = {}
        self.trying: dict[str, Any] = {}
        parts: list[Any] = [
            self.lake.root,
            self.lake.ledger,
            self.reader,
            SimpleNamespace(since=lambda: dict(self.waiting), passed=lambda lsn: None),
            SimpleNamespace(position=110),
            SimpleNamespace(rates=dict),
            SimpleNamespace(shown=lambda: dict(self.trying)),
            Sample(datetime(2026, 1, 1, tzinfo=UTC), 110),
        ]
        self.publisher = Publisher(*parts)

    def seconds(self, count: int) -> list[float]:
        """Ticks of so many seconds; when the file was written."""
        at = []
        for _ in range(count):
            self.now += 1
            before = len(self.written)
            self.publisher.tick()
            at += [self.now] * (len(self.written) - before)
        return at


def test_on_a_disk_the_file_is_written_each_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(Driver(tmp_path, monkeypatch, in_store=False).seconds(20)) == 20


def test_in_a_store_it_is_written_ever_less_often_while_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, monkeypatch, in_store=True)
    assert driver.seconds(60) == [1, 2, 4, 8, 16, 32, 52]
    driver.trying = {A: {"since": "now", "attempts": 1, "reason": "why"}}
    assert driver.seconds(3) == [61, 62]
    assert driver.written[-1].retrying == driver.trying
    driver.waiting = {A: 120}  # a change that no epoch has yet
    assert driver.seconds(10) == list(range(64, 74))


def test_in_a_store_a_log_that_goes_on_is_told_every_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, at = Driver(tmp_path, monkeypatch, in_store=True), []
    for _ in range(60):
        driver.reader.read_position += 8
        at += driver.seconds(1)
    assert at[-8:] == [23, 28, 33, 38, 43, 48, 53, 58]


@pytest.mark.parametrize(("is_idle", "at"), [(True, [66, 86]), (False, [47, 49, 53, 61, 77])])
def test_in_a_store_a_row_of_an_idle_log_does_not_make_it_written_more_often(
    is_idle: bool, at: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, monkeypatch, in_store=True)
    driver.seconds(46)
    driver.publisher.published(driver.lake.publish(130), driver.lake.registry.tables, is_idle=is_idle)
    assert driver.written[-1].epoch == 2
    assert driver.seconds(50) == at


def test_a_write_that_hangs_keeps_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, monkeypatch, in_store=False)
    with driver.publisher._writing:
        assert driver.seconds(1) == []
        driver.publisher.sampled(Sample(datetime(2026, 1, 2, tzinfo=UTC), 111))
        driver.publisher.states(driver.lake.registry.tables)
    assert driver.seconds(1) == [2]


def test_a_table_is_in_step_by_the_file_only_when_the_newest_epoch_shows_it_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that died between the registry's "active" and the ledger's row leaves a table of which the next one may
    read nothing more."""
    driver = Driver(tmp_path, monkeypatch, in_store=False)
    lake, publisher = driver.lake, driver.publisher

    def said() -> Any:
        publisher.states(lake.registry.tables)
        publisher.write()
        return driver.written[-1].states.get(A)

    assert said() is None
    lake.versions[A] = replace(lake.versions[A], state="suspended")
    publisher.published(lake.publish(120), lake.registry.tables, is_idle=False)
    assert said() == {"state": "catching up", "reason": NOT_YET_SHOWN, "since": lake.registry.record(A).since}
    publisher.published(lake.publish(130, A), lake.registry.tables, is_idle=False)
    assert said() is None
    lake.registry.write(replace(lake.registry.record(A), start_lsn=140))  # loaded again, and active at once
    assert said()["state"] == "catching up"
