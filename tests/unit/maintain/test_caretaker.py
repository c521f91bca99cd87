"""Beside a driver, and unasked: what no cut needs any more goes, by itself, and a failure is nobody else's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event

import pytest

from fixtures.hand_tables import HandTable, ids_at
from fixtures.lakes import HandLake, position_at
from fixtures.waiting import until
from headwater.delta import storage
from headwater.lake import looks
from headwater.lake.cuts import pin_cut, release_pin
from headwater.lake.registry import TableRecord
from headwater.maintain import caretaker
from headwater.maintain.caretaker import Caretaker
from headwater.names import TableName

A, B = "public.a", "public.b"


class Lake:
    """Tables `a` and `b`, replicated by hand, and a caretaker that begins at once."""

    def __init__(self, root: Path) -> None:
        self.hand = HandLake(root, position_at(lsn=100), [A, B])
        self.tables = {name: HandTable(root / "public" / name[-1]) for name in (A, B)}

    def batch(self, name: str = A) -> None:
        table = self.tables[name]
        for file in sorted(path.name for path in table.folder.glob("*.parquet") if path.name in table.live):
            table.commit(whole=file)
        table.commit(table.write(4))
        self.hand.versions[name] = self.hand.versions[name].__class__(table.version - 1, 0, "active")
        self.hand.publish(self.hand.position.lsn + 10, name)

    def start(self, keep_cuts: float = 0.01) -> Caretaker:
        care = Caretaker(self.hand.root, 1, keep_cuts, self.hand.registry.tables.values(), first=0)
        care.written([])
        return care

    def files(self, name: str = A) -> int:
        return len(list(self.tables[name].folder.glob("*.parquet")))


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setattr(caretaker, "_REST", 0.01)
    monkeypatch.setattr(caretaker, "_SHARE", 0.9)
    monkeypatch.setattr(looks, "_ON_DISK", replace(looks._ON_DISK, commits=1, upkeep=0.05, horizon=0.0))
    return Lake(tmp_path / "lake")


def test_tables_are_cleaned_up_while_they_are_written(lake: Lake) -> None:
    for name in (A, B):
        for _ in range(4):
            lake.batch(name)
    care = lake.start()
    try:
        until(lambda: (lake.files(A), lake.files(B)) == (1, 1), "one file each is left")
        for _ in range(3):
            lake.batch()
            care.written([lake.hand.registry.record(A)])
        until(lambda: lake.files(A) == 1, "one file is left again")
    finally:
        care.close()
    for table in lake.tables.values():
        assert ids_at(table.folder) == table.contents[-1]


def test_a_pin_is_respected_and_its_end_noticed(lake: Lake) -> None:
    lake.batch()
    table = lake.tables[A]
    pinned = table.version
    cut = {"tables": {A: {"path": table.folder.as_uri(), "version": pinned}}}
    pin = pin_cut(lake.hand.root, cut, "a test", datetime.now(UTC) + timedelta(hours=1))
    for _ in range(4):
        lake.batch()
    care = lake.start()
    try:
        lake.tables[B].commit(lake.tables[B].write(1))
        until(lambda: care.done[A] > 2, "it has looked at the table several times")
        assert ids_at(table.folder, pinned) == table.contents[pinned]
        release_pin(lake.hand.root, pin.id)
        until(lambda: lake.files() == 1, "what the pin kept is gone")
        pin_cut(lake.hand.root, cut, "long ago", datetime.now(UTC) - timedelta(hours=1))
        until(lambda: not list((Path(lake.hand.root) / "_headwater" / "pins").iterdir()), "expired pins are gone, too")
    finally:
        care.close()


def test_a_table_whose_clean_up_fails_is_named_once_and_holds_up_no_other(
    lake: Lake, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        lake.batch(B)
    (lake.tables[A].folder / "_delta_log" / f"{0:020d}.json").unlink()
    with caplog.at_level(logging.WARNING, "headwater.maintain.caretaker"):
        care = lake.start()
        try:
            until(lambda: lake.files(B) == 1 and care.done[A] > 2, "the other table is clean, and this one tried again")
        finally:
            care.close()
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [A]


def test_it_ends_when_it_is_told_to(lake: Lake) -> None:
    care = lake.start()
    care.close()
    done = care.done.total()  # how far it got by then the machine decides
    for _ in range(3):
        lake.batch()
        care.written([lake.hand.registry.record(A)])
    assert lake.files() == 3
    assert care.done.total() == done
    assert not any(thread.name == "headwater-caretaker" for thread in threading.enumerate())


def test_it_ends_while_there_are_many_pins_to_read(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.batch()
    cut = {"tables": {A: {"version": 0}}}
    for _ in range(200):
        pin_cut(lake.hand.root, cut, "a test", datetime.now(UTC) + timedelta(hours=1))
    reads, begun, ends = 0, Event(), Event()
    read_text = storage.read_text

    def held(place: str) -> str:
        nonlocal reads
        if Path(place).parent.name == "pins":
            reads += 1
            begun.set()
            assert ends.wait(30)
        return read_text(place)

    monkeypatch.setattr(storage, "read_text", held)
    care = lake.start()
    assert begun.wait(30)
    closing = threading.Thread(target=care.close)
    closing.start()
    assert care._end_piece.wait(30)
    ends.set()
    closing.join()
    assert reads < 100
    assert ids_at(lake.tables[A].folder, 0) == lake.tables[A].contents[0]


def test_a_table_that_another_job_takes_over_is_left_at_once(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(30):
        lake.batch()
    removing, delete = Event(), storage.delete_files

    def slowly(folder: str, paths: Sequence[str]) -> None:
        if paths[0].endswith(".parquet"):
            removing.set()
            time.sleep(0.02)
        delete(folder, paths)

    monkeypatch.setattr(storage, "delete_files", slowly)
    care = lake.start()
    try:
        assert removing.wait(30)
        care.leave(A)
        left = lake.files()
        assert left > 1, "it does not end what it has begun"
        time.sleep(0.1)
        assert lake.files() == left
    finally:
        care.close()


def test_drivers_that_end_before_all_tables_had_a_turn_reach_every_table_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "_REST", 0.001)
    monkeypatch.setattr(caretaker, "_SHARE", 0.9)
    tables = [loading(f"public.t{number:02}") for number in range(40)]
    reached: set[str] = set()
    for generation in range(7, 14):
        care = Caretaker(str(tmp_path), generation, 1.0, tables, first=0)
        care.written([])
        until(lambda care=care: care.done.total() >= 14, "a quarter of the tables had a turn")  # type: ignore[misc]
        care.close()
        reached.update(care.done)
    assert {record.name for record in tables} <= reached


def test_a_table_with_many_commits_goes_before_others_that_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "_REST", 0.001)
    goes_on = Event()
    monkeypatch.setattr(caretaker, "keep_ledger", lambda root, stop: goes_on.wait(30))
    tables = [loading(f"public.t{number:02}") for number in range(40)]
    care = Caretaker(str(tmp_path), 0, 1.0, tables, first=0)
    try:
        care.written([])
        until(lambda: care.done.total() == 1, "the first turn, of the ledger, has begun")
        for _ in range(3):
            care.written([tables[30]])
        care.written([tables[20]])
        goes_on.set()
        until(lambda: care.done.total() >= 5, "the next ones had theirs")
    finally:
        care.close()
    assert list(care.done)[:5] == ["the ledger", tables[30].name, "pins", tables[20].name, "the registry"]


def loading(name: str) -> TableRecord:
    """Of which nothing is to be removed: its turn takes no time."""
    return TableRecord(name, TableName.parse(name).path, "loading")
