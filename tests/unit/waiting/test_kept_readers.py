"""A reader that an earlier wait has used says what a new one would, and is let go where it cannot know."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from fixtures.lakes import HandLake
from headwater.delta.log_entries import log_entry
from headwater.lake import ledger
from headwater.lake import ledger_follower as followed_ledger
from headwater.lake.ledger import read_epoch
from headwater.lake.ledger_follower import FollowedLedger
from headwater.lake.paths import registry_path
from headwater.lake.reader import LakeReader
from headwater.position import Position
from headwater.waiting.kept_readers import borrowed

A, B = "public.a", "public.b"
START = Position("7318", 1, 100)


def old_lake(root: Path, start: Position = START) -> HandLake:
    """One whose registry was not written just now."""
    lake = HandLake(root, start, [A, B])
    age(lake)
    return lake


def age(lake: HandLake) -> None:
    entry, then = log_entry(registry_path(lake.root), 1), time.time() - 60
    os.utime(entry, (then, then))


def used(lake: HandLake) -> LakeReader:
    with borrowed(lake.root, "shop") as reader:
        look = reader.look()
        assert look.file is not None
        reader.epoch(look.file.epoch)
    return reader


def fail(lake: HandLake, given: list[LakeReader]) -> None:
    with borrowed(lake.root, "shop") as reader:
        given.append(reader)
        reader.look()
        raise ZeroDivisionError


def test_the_next_wait_goes_on_with_the_reader_and_sees_what_came_since(tmp_path: Path) -> None:
    lake = old_lake(tmp_path)
    lake.publish(110, A)
    first = used(lake)
    lake.publish(120, B)
    lake.enter(A, "suspended", "why")
    with borrowed(lake.root, "shop") as reader:
        assert reader is first
        look = reader.look()
        assert look.file == lake.file
        assert look.tables[A].reason == "why"
        assert reader.epoch(2) == read_epoch(lake.root, 2)


def test_a_lake_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    lake = old_lake(tmp_path)
    for lsn in (110, 120, 130):
        lake.publish(lsn, A)
    first = used(lake)
    shutil.rmtree(tmp_path)
    anew = HandLake(tmp_path, START, [A, B])
    anew.publish(110, B)
    with borrowed(anew.root, "shop") as reader:
        assert reader is not first
        look = reader.look()
        assert look.file == anew.file
        assert reader.epoch(1) == read_epoch(anew.root, 1)


def test_two_waits_at_once_have_a_reader_each(tmp_path: Path) -> None:
    lake = old_lake(tmp_path)
    lake.publish(110, A)
    used(lake)
    with borrowed(lake.root, "shop") as one, borrowed(lake.root, "shop") as other:
        assert one is not other


def test_the_reader_of_a_wait_that_failed_is_not_kept(tmp_path: Path) -> None:
    lake = old_lake(tmp_path)
    lake.publish(110, A)
    given: list[LakeReader] = []
    with pytest.raises(ZeroDivisionError):
        fail(lake, given)
    with borrowed(lake.root, "shop") as reader:
        assert reader is not given[0]


def test_an_epoch_of_another_driver_than_the_position_file_names_is_looked_for_in_the_ledger(tmp_path: Path) -> None:
    lake = old_lake(tmp_path)
    lake.publish(110, A)
    reader = LakeReader(lake.root, "shop")
    reader.look()
    reader.epoch(1)
    shutil.rmtree(tmp_path)
    anew = HandLake(tmp_path, START, [A, B])
    anew.publish(115, B)
    reader.file()
    assert reader.epoch(1) == read_epoch(anew.root, 1)


def test_followed_epochs_are_those_of_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "COMPLETE_EVERY", 4)
    monkeypatch.setattr(followed_ledger, "COMPLETE_EVERY", 4)
    lake = old_lake(tmp_path)
    lake.publish(101, A)
    followed = FollowedLedger(lake.root)
    for number in range(2, 12):
        lake.publish(100 + number, A if number % 3 else B)
        if number % 2:
            assert followed.epoch(number) == read_epoch(lake.root, number)
    assert followed.epoch(10) == read_epoch(lake.root, 10)
    assert FollowedLedger(lake.root).epoch(10) == read_epoch(lake.root, 10)
    assert followed.epoch(12) is None
