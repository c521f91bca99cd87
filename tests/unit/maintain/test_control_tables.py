"""The lake's own tables stay small beside drivers that write to them, and nobody notices but by their files."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from deltalake import DeltaTable

from fixtures.lakes import HandLake, position_at
from headwater.delta import delta_log, small_tables
from headwater.delta.small_tables import LostRace, append_once
from headwater.errors import Fenced
from headwater.lake import registry
from headwater.lake.ledger import _SCHEMA as LEDGER_SCHEMA
from headwater.lake.ledger import Ledger, read_all, read_epoch, read_generation
from headwater.lake.paths import ledger_path, registry_path
from headwater.lake.reader import LakeReader
from headwater.lake.registry import Registry
from headwater.maintain.control_tables import KeptTable, keep_ledger, keep_registry

A, B = "public.a", "public.b"


@pytest.fixture
def lake(tmp_path: Path) -> HandLake:
    return HandLake(tmp_path / "lake", position_at(lsn=100), [A, B])


def kept(found: KeptTable | None) -> KeptTable:
    assert found is not None
    return found


def publish(lake: HandLake, count: int) -> None:
    for _ in range(count):
        lake.publish(lake.position.lsn + 10, A)


def files_of(folder: str) -> tuple[int, int]:
    """Data files and log entries on disk."""
    return len(list(Path(folder).glob("*.parquet"))), len(list((Path(folder) / "_delta_log").glob("*.json")))


def test_the_ledger_is_few_files_and_says_what_it_said(lake: HandLake) -> None:
    publish(lake, 130)
    folder = ledger_path(lake.root)
    before = read_all(lake.root)
    done = kept(keep_ledger(lake.root, Event(), keep=0))
    assert (done.files_before, done.files_after, done.checkpoint) == (131, 1, 132)
    assert files_of(folder) == (1, 1)
    assert done.cleaned.files == 131
    assert read_all(lake.root) == before
    assert read_epoch(lake.root, 70) == before[69]
    assert read_generation(lake.root, "shop") == 1
    publish(lake, 3)
    assert [epoch.epoch for epoch in read_all(lake.root)] == list(range(1, 134))


def test_what_was_replaced_stays_for_those_who_are_reading_it(lake: HandLake) -> None:
    publish(lake, 130)
    reader = DeltaTable(ledger_path(lake.root))
    done = kept(keep_ledger(lake.root, Event()))
    assert (done.files_after, done.cleaned.files, done.cleaned.log_files) == (1, 0, 0)
    assert all(Path(file).exists() for file in reader.file_uris())


def test_few_files_are_left_as_they_are(lake: HandLake) -> None:
    publish(lake, 20)
    done = kept(keep_ledger(lake.root, Event(), keep=0))
    assert (done.files_before, done.files_after) == (21, 21)
    assert files_of(ledger_path(lake.root)) == (21, 22)


def test_a_driver_publishes_beside_the_upkeep_of_its_ledger(lake: HandLake) -> None:
    stop, compactions = Event(), 0

    def go_on() -> None:
        # Some hundred times as often as a driver does. Without a pause the threads of one process starve each other.
        while not stop.wait(0.005):
            publish(lake, 1)

    driver = threading.Thread(target=go_on)
    driver.start()
    try:
        while compactions < 5:
            done = keep_ledger(lake.root, Event(), keep=0.2, enough=10)
            compactions += done is not None and done.files_after < done.files_before
    finally:
        stop.set()
        driver.join()
    published = lake.ledger.newest
    assert published is not None
    epochs = read_all(lake.root)
    assert [epoch.epoch for epoch in epochs] == list(range(1, published.epoch + 1))
    assert epochs[-1].tables[A].version == lake.versions[A].version
    lake.ledger.check_fence()


def test_who_publishes_faster_than_the_upkeep_can_commit_ends_no_upkeep_and_leaves_no_file(
    lake: HandLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(lake, 130)
    append, races = delta_log.append, 0

    def too_late(folder: str, version: int, actions: Iterable[dict[str, Any]], *, has_looked: bool = False) -> None:
        nonlocal races
        found = list(actions)
        if found[0]["commitInfo"]["operation"] == "OPTIMIZE":
            races += 1
            publish(lake, 1)
        append(folder, version, found, has_looked=has_looked)

    monkeypatch.setattr(delta_log, "append", too_late)
    done = kept(keep_ledger(lake.root, Event(), keep=0))
    assert races > 1
    assert (done.files_before, done.files_after) == (131, 131 + races)
    assert files_of(ledger_path(lake.root))[0] == 131 + races
    monkeypatch.setattr(delta_log, "append", append)
    assert kept(keep_ledger(lake.root, Event(), keep=0)).files_after == 1
    assert len(read_all(lake.root)) == 130 + races


def test_many_files_are_gathered_some_at_a_time(lake: HandLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_tables, "_GATHERED_AT_ONCE", 50)
    publish(lake, 130)
    before = read_all(lake.root)
    done = kept(keep_ledger(lake.root, Event(), keep=0))
    assert (done.files_before, done.files_after) == (131, 3)
    assert read_all(lake.root) == before


def test_a_fenced_driver_stays_fenced_across_the_upkeep(lake: HandLake) -> None:
    publish(lake, 120)
    successor = Ledger(lake.root, "shop")
    successor.begin_generation(lake.position)
    kept(keep_ledger(lake.root, Event(), keep=0))
    with pytest.raises(Fenced, match="generation 2"):
        publish(lake, 1)
    with pytest.raises(Fenced):
        lake.ledger.check_fence()
    assert Ledger(lake.root, "shop").begin_generation(lake.position) == 3


def test_a_reader_that_stood_still_for_long_follows_over_what_is_gone(
    lake: HandLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_COMPACT_ABOVE", 20)
    reader = LakeReader(lake.root, "shop")
    reader.look()
    for number in range(60):
        lake.enter(A, "active", f"change {number}")
    done = kept(keep_registry(lake.root, Event(), keep=0))
    assert done.cleaned.files > 40
    assert files_of(registry_path(lake.root))[1] == 1
    assert reader.look().tables[A].reason == "change 59"
    lake.enter(B, "suspended", "why")
    assert reader.look().tables[B].reason == "why"
    opened = Registry.open(lake.root, "shop")
    assert opened is not None
    assert opened.record(A).reason == "change 59"


def test_a_driver_that_looked_at_the_fence_long_ago_still_finds_it(lake: HandLake) -> None:
    lake.ledger.check_fence()
    publish(lake, 230)
    kept(keep_ledger(lake.root, Event(), keep=0))
    lake.ledger.check_fence()
    Ledger(lake.root, "shop").begin_generation(lake.position)
    with pytest.raises(Fenced):
        lake.ledger.check_fence()


def test_nothing_is_committed_over_a_log_that_was_cleaned_up_to_beyond_it(lake: HandLake) -> None:
    """The next version's name is free again there: what is written under it, no reader ever sees."""
    standing = Ledger(lake.root, "shop")
    standing.generation = 1
    publish(lake, 120)
    kept(keep_ledger(lake.root, Event(), keep=0))
    assert not list((Path(ledger_path(lake.root)) / "_delta_log").glob(f"{standing._table.version() + 1:020d}.*"))
    table = standing._table
    with pytest.raises(LostRace):
        append_once(table, [], LEDGER_SCHEMA)
