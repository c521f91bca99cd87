"""What a wait says about itself: how far the lake is, how fast it moves, and the one thing that holds it up."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from fixtures.lakes import position_at, utc
from headwater.lake.freshness import LOG_RATE, verdict
from headwater.lake.look import Look, ReportedState
from headwater.lake.position_file import PositionFile
from headwater.lake.requirements import Target
from headwater.source.slot import SlotState
from headwater.source.snapshots import OpenTransaction
from headwater.waiting.progress import progress
from headwater.waiting.source_state import SourceState

A, B = "public.a", "public.b"
TARGET = Target(0x300, 1, "7")
SLOW = {LOG_RATE: 64.0, "write_busy": 0.9, "decode_busy": 0.3}


def look(
    *, state: str = "active", rates: dict[str, float] | None = None, pending: dict[str, int] | None = None
) -> Look:
    samples = ((utc(10).isoformat(), 0x200), (utc(20).isoformat(), 0x280))
    position = position_at(lsn=0x180)
    file = PositionFile(1, 2, position, 0x280, utc(0).isoformat(), pending or {}, samples=samples, rates=rates or {})
    return Look(file, {A: ReportedState("active"), B: ReportedState(state, "it was loaded")}, ("7", 1))


def source(*, reading: bool = True, transactions: tuple[OpenTransaction, ...] = ()) -> SourceState:
    slot = SlotState("slot", "pgoutput", "shop", reading, None, None, None, None, None, None, False, None)
    return SourceState(position_at(lsn=0x400), (utc(30), 0x400), time.monotonic(), slot, open_transactions=transactions)


def test_it_says_how_far_how_fast_and_how_long() -> None:
    shown = look(rates=SLOW, pending={A: 0x201})
    judged = verdict(TARGET, shown, [A, B])
    found = progress(TARGET, judged, shown, source())
    assert (found.table, found.position, found.gap_bytes) == (A, 0x200, 0x100)
    assert (found.bytes_per_second, found.eta_seconds) == (64.0, 4.0)
    assert found.gap_seconds == pytest.approx(20, abs=5)  # since the sample that it covers, by the source's clock
    text = str(found)
    for part in (
        "waiting for 0/300: a change of public.a at 0/201 has been read and is not published yet",
        "public.a is complete up to 0/200, 256 B of the log and 20 s behind",
        "64 B/s are applied",
        "about 4 s to go",
        "blocked by: the stage write is the busiest one",
    ):
        assert part in text
    assert found.to_json()["position"] == "0/200"


def test_without_the_source_the_gap_counts_from_the_newest_sample() -> None:
    shown = look(pending={A: 0x201})
    found = progress(TARGET, verdict(TARGET, shown, [A, B]), shown, None)
    assert found.gap_seconds == 10


def test_a_slow_table_is_named_when_the_others_are_there() -> None:
    shown = look(pending={B: 0x180})
    target = Target(0x280, 1, "7")
    assert progress(target, verdict(target, shown, [A, B]), shown, source()).blocker == (
        "public.b alone, the other tables are there"
    )
    assert progress(TARGET, verdict(TARGET, shown, [A, B]), shown, source()).blocker == ""


def test_a_table_that_catches_up_is_held_by_the_oldest_open_transactions() -> None:
    ages = (3.0, 500.0, None, 40.0)
    running = tuple(OpenTransaction(n, 100 + n, "app", "shop", age, None) for n, age in enumerate(ages))
    shown = look(state="catching up")
    judged = verdict(TARGET, shown, [A, B])
    held = progress(TARGET, judged, shown, source(transactions=running)).blocker
    assert held.startswith("public.b is catching up; transactions open at the source: process 101 ")
    assert "open for 500 s" in held
    assert held.index("process 101") < held.index("process 103") < held.index("process 100")
    assert "process 102" not in held
    # They hold nothing else up: a wait never waits for them.
    in_step = look()
    assert progress(TARGET, verdict(TARGET, in_step, [A]), in_step, source(transactions=running)).blocker == ""


def test_nobody_who_reads_and_a_source_that_is_silent_come_first() -> None:
    shown = look(rates=SLOW)
    judged = verdict(TARGET, shown, [A, B])
    stopped = progress(TARGET, judged, shown, source(reading=False))
    assert stopped.blocker == "replication is stopped, no driver since 22:13 UTC"
    catching = look(state="catching up")
    held = progress(TARGET, verdict(TARGET, catching, [A, B]), catching, source(reading=False)).blocker
    assert held == "replication is stopped, no driver since 22:13 UTC"
    # A driver that has ended left its last speed behind.
    assert (stopped.bytes_per_second, stopped.eta_seconds) == (None, None)
    silent = progress(TARGET, judged, shown, source(reading=False), "connection refused").blocker
    assert silent == "the source does not answer: connection refused"


def test_a_lake_without_an_epoch_has_no_place_to_name() -> None:
    shown = Look(None, {A: ReportedState("catching up")}, ("7", 1))
    found = progress(TARGET, verdict(TARGET, shown, [A]), shown, None)
    assert (found.table, found.position, found.gap_seconds) == (None, None, None)
    assert str(found).endswith("blocked by: public.a is catching up")


def test_the_clock_of_the_source_goes_on_between_two_questions() -> None:
    shown = look(pending={A: 0x201})
    state = source()
    assert state.now() - utc(30) < timedelta(seconds=5)
    later = progress(TARGET, verdict(TARGET, shown, [A]), shown, state).gap_seconds
    assert later is not None
    assert later >= 20
