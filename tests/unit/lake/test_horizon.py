"""How far back each table is kept: for pins, for epochs of the last `keep_cuts`, for what is not published yet."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fixtures.hand_tables import HandTable
from fixtures.lakes import HandLake, position_at
from headwater.delta import log_files, storage
from headwater.errors import Refused
from headwater.lake import ledger, looks
from headwater.lake.cuts import PinReader, history_name, list_pins, pin_cut, release_pin, remove_expired
from headwater.lake.horizon import Horizon, Horizons, RecentHorizons

A, B = "public.a", "public.b"
KEEP = 3600.0


class Clock:
    """What the ledger takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime(2024, 5, 1, 12, tzinfo=UTC)
        clock = self

        class Time(datetime):
            @classmethod
            def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
                return clock.now

        monkeypatch.setattr(ledger, "datetime", Time)

    def after(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class Lake:
    """Table `a` with a commit and an epoch every 600 s; `b` stands still."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock = clock
        self.hand = HandLake(folder, position_at(lsn=100), [A, B])
        self.root = self.hand.root
        self.tables = {name: HandTable(folder / "public" / name[-1]) for name in (A, B)}
        self.stamp(A)
        self.stamp(B)

    def stamp(self, name: str) -> None:
        """The newest commit was made now."""
        table = self.tables[name]
        moment = self.clock.now.timestamp()
        os.utime(table.folder / "_delta_log" / f"{table.version:020d}.json", (moment, moment))

    def commits(self, count: int, *, publish: bool = True) -> None:
        for _ in range(count):
            self.clock.after(600)
            self.tables[A].commit(self.tables[A].write(1))
            self.stamp(A)
            if publish:
                self.hand.publish(self.hand.position.lsn + 10, A)

    def horizon(self, name: str = A) -> Horizon | None:
        log = log_files.look(str(self.tables[name].folder))
        return Horizons.read(self.root, KEEP, self.clock.now).of(name, log)

    def kept(self, name: str = A) -> tuple[int, str]:
        found = self.horizon(name)
        assert found is not None
        return found.version, found.because

    def published(self) -> int:
        """As far back the ledger keeps table `a`."""
        return Horizons.read(self.root, KEEP, self.clock.now).published[A]

    def pin(self, version: int, seconds: float) -> str:
        entry = {"path": self.tables[A].folder.as_uri(), "version": version}
        return pin_cut(self.root, {"tables": {A: entry}}, "a test", self.clock.now + timedelta(seconds=seconds)).id


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    return Lake(tmp_path / "lake", Clock(monkeypatch))


def test_what_was_the_newest_epoch_within_keep_cuts_is_kept(lake: Lake) -> None:
    lake.commits(10)
    # Version 4 was made exactly an hour ago, and was the newest one for ten minutes from then on.
    assert lake.kept() == (4, "lake.keep_cuts, an epoch")
    lake.clock.after(1)
    assert lake.kept() == (4, "lake.keep_cuts, an epoch")
    lake.clock.after(600)
    assert lake.kept() == (5, "lake.keep_cuts, an epoch")


def test_the_newest_epoch_is_kept_however_old_it_is(lake: Lake) -> None:
    lake.commits(5)
    lake.clock.after(9 * 86400)
    assert lake.kept() == (5, "lake.keep_cuts, an epoch")


def test_epochs_of_a_clock_that_was_ahead_hold_clean_up_no_longer_than_others(lake: Lake) -> None:
    lake.commits(2)
    lake.clock.after(365 * 86400 + 7200)
    lake.commits(2)
    lake.clock.after(-365 * 86400)
    assert lake.published() == 2, "what the newest ones of all followed"
    lake.commits(6)
    assert lake.published() == 2, "nobody knows when version 3 came, but that it was before version 5"
    lake.commits(1)
    assert lake.published() == 5
    lake.commits(1)
    assert lake.published() == 6
    lake.clock.after(30 * 86400)
    assert lake.published() == 12


def test_a_clock_that_is_set_back_now_keeps_what_was_the_newest_within_keep_cuts(lake: Lake) -> None:
    lake.commits(40)
    lake.clock.after(-5 * 3600)
    for made in range(6):
        assert lake.published() <= 40 + made - 6
        lake.commits(1)
    lake.clock.after(86400)
    assert lake.published() == 46


def test_a_clock_that_is_set_back_behind_a_pause_keeps_what_was_the_newest_within_keep_cuts(lake: Lake) -> None:
    lake.clock.after(86400)
    lake.commits(6)
    lake.clock.after(-12 * 3600)
    for made in range(7):
        assert lake.published() == 1, made
        lake.commits(1)
    assert lake.published() == 7


def test_what_no_epoch_names_yet_keeps_the_newest_epoch(lake: Lake) -> None:
    """A table runs ahead of the ledger: its next row may name any version that it has passed since."""
    lake.commits(3)
    lake.commits(4, publish=False)
    lake.clock.after(86400)
    assert lake.kept() == (3, "lake.keep_cuts, an epoch")


def test_the_log_is_kept_for_an_hour_even_if_cuts_are_not(lake: Lake) -> None:
    lake.commits(10)
    log = log_files.look(str(lake.tables[A].folder))
    found = Horizons.read(lake.root, 1.0, lake.clock.now + timedelta(seconds=10)).of(A, log)
    assert found is not None
    assert (found.version, found.log_from) == (10, 4)


def test_a_live_pin_keeps_its_version_until_it_expires(lake: Lake) -> None:
    lake.commits(2)
    pin = lake.pin(1, 86400)
    lake.commits(20)
    assert lake.kept() == (1, f"pin {pin} of a test")
    lake.clock.after(86400)
    assert lake.kept() == (22, "lake.keep_cuts, an epoch")


def test_a_pin_keeps_the_history_at_the_version_that_its_cut_names(lake: Lake) -> None:
    lake.commits(2)
    entry = {"path": "", "version": 2, "history": {"path": "", "version": 1}}
    pin = pin_cut(lake.root, {"tables": {A: entry}}, "a test", lake.clock.now + timedelta(hours=1)).id
    found = Horizons.read(lake.root, KEEP, lake.clock.now).pinned
    assert found == {A: (2, f"pin {pin} of a test"), history_name(A): (1, f"pin {pin} of a test")}


def test_an_epoch_that_names_an_older_version_keeps_it(lake: Lake) -> None:
    """A row was withheld for long: the version it names was followed by others hours before the row came."""
    lake.commits(12)
    lake.hand.versions[A] = replace(lake.hand.versions[A], version=3)
    lake.hand.publish(lake.hand.position.lsn + 10, B)
    lake.hand.ledger._first_of_generation = True  # the next row carries every table
    lake.hand.publish(lake.hand.position.lsn + 10, B)
    horizon = lake.horizon()
    assert horizon is not None
    assert horizon.version == 3


def test_a_quiet_table_is_kept_at_its_only_version(lake: Lake) -> None:
    lake.commits(10)
    assert lake.kept(B) == (0, "lake.keep_cuts, an epoch")


def test_a_table_that_no_epoch_holds_has_no_horizon(lake: Lake) -> None:
    table = HandTable(Path(lake.root) / "public" / "c")
    lake.commits(10)
    horizons = Horizons.read(lake.root, KEEP, lake.clock.now)
    assert horizons.of("public.c", log_files.look(str(table.folder))) is None


def test_a_table_that_joined_within_keep_cuts_is_kept_from_there(lake: Lake) -> None:
    lake.commits(10)
    table = HandTable(Path(lake.root) / "public" / "c")
    for _ in range(3):
        table.commit(table.write(1))
    lake.hand.versions["public.c"] = replace(lake.hand.versions[B], version=2)
    lake.hand.publish(lake.hand.position.lsn + 10, "public.c")
    horizons = Horizons.read(lake.root, KEEP, lake.clock.now)
    assert horizons.published["public.c"] == 3
    assert horizons.published[A] == 4


def test_a_pin_whose_version_is_gone_already_holds_up_nothing(lake: Lake) -> None:
    lake.commits(10)
    lake.tables[A].checkpoint()
    for version in range(8):
        (lake.tables[A].folder / "_delta_log" / f"{version:020d}.json").unlink()
    lake.pin(2, 3600)
    assert lake.kept() == (10, "older versions cannot be read any more")


def test_a_pin_that_cannot_be_read_stops_all_clean_up(lake: Lake) -> None:
    pin = lake.pin(0, 3600)
    (Path(lake.root) / "_headwater" / "pins" / f"{pin}.json").write_text("{")
    with pytest.raises(Refused) as refused:
        lake.horizon()
    assert refused.value.code == "damaged_pin"


def test_pins_that_have_expired_are_removed_and_others_stay(lake: Lake) -> None:
    lake.pin(0, 60)
    kept = lake.pin(0, 600)
    folder = Path(lake.root) / "_headwater" / "pins"
    position = folder.parent / "position.json.0a1b.tmp"
    for left in (folder / "left.tmp", position):
        left.touch()
    now = lake.clock.now + timedelta(seconds=60)
    assert remove_expired(lake.root, now) == 1
    assert [pin.id for pin in list_pins(lake.root, now)] == [kept]
    assert (folder / "left.tmp").exists(), "it may be a pin that is just being made"
    for left in (folder / "left.tmp", position):
        os.utime(left, (0, 0))
    remove_expired(lake.root, now)
    assert not position.exists()
    assert [path.stem for path in folder.iterdir()] == [kept]


def test_a_pin_counts_from_its_first_moment_on_however_rarely_the_ledger_is_read(lake: Lake) -> None:
    lake.commits(10)
    recent = RecentHorizons(lake.root, KEEP)
    before = recent.read()
    cut = {"tables": {A: {"version": 1}}}
    pin_cut(lake.root, cut, "somebody", datetime.now(UTC) + timedelta(hours=1))
    after = recent.read()
    assert (before.pinned, after.pinned[A][0]) == ({}, 1)
    assert after.published is before.published


def test_cuts_that_are_kept_for_long_are_read_seldom(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "_ON_DISK", replace(looks._ON_DISK, horizon=0.0))
    lake.commits(1)
    for keep_cuts, is_kept in ((86400.0, True), (0.0, False)):
        recent = RecentHorizons(lake.root, keep_cuts)
        assert (recent.read().published is recent.read().published) is is_kept


def test_each_pin_is_read_once_and_keeps_nothing_behind_its_end(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read_text = storage.read_text

    def counted(place: str) -> str:
        if Path(place).parent.name == "pins":
            reads.append(Path(place).stem)
        return read_text(place)

    monkeypatch.setattr(storage, "read_text", counted)
    lake.commits(10)
    now = lake.clock.now
    released, first, reader = lake.pin(1, 3600), lake.pin(2, 3600), PinReader(lake.root)

    def pinned(at: datetime) -> int:
        return Horizons.read(lake.root, KEEP, at, pins=reader).pinned[A][0]

    assert [pinned(now) for _ in range(3)] == [1, 1, 1]
    release_pin(lake.root, released)
    second = lake.pin(3, 7200)
    assert [pinned(now), pinned(now + timedelta(hours=1))] == [2, 3]
    assert remove_expired(lake.root, now + timedelta(hours=1), reader) == 1
    assert [pin.id for pin in reader.look()] == [second]
    assert sorted(reads) == sorted([released, first, second])
