"""The log of waits: lines of many writers, summed up by who waited for what."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headwater.lake.cuts import time_text
from headwater.lake.paths import waits_path
from headwater.lake.wait_log import KEPT_DAYS, Waited, WaitLog, record, remove_old, waits_since

NOW = datetime.now(UTC)


def waited(seconds: float, outcome: str = "satisfied", who: str = "dag.fresh", days: float = 0.0) -> Waited:
    return Waited(time_text(NOW - timedelta(days=days)), who, "now", ("public.a",), outcome, seconds)


def test_waits_are_summed_up_by_who_and_what_and_only_the_satisfied_ones_are_measured(tmp_path: Path) -> None:
    root = str(tmp_path)
    for seconds in range(1, 101):
        record(root, waited(float(seconds), days=1 - seconds / 1000))
    record(root, waited(300.0, "timed_out"))
    record(root, waited(0.1, who="dag.other"))
    record(root, waited(999.0, days=3))
    fresh, other = waits_since(root, NOW - timedelta(days=2))
    assert (fresh.who, fresh.requirement, fresh.tables) == ("dag.fresh", "now", ("public.a",))
    assert (fresh.runs, fresh.satisfied, fresh.p50, fresh.p95, fresh.longest) == (101, 100, 50.0, 95.0, 100.0)
    assert (fresh.last, fresh.last_at) == ("timed_out", time_text(NOW))
    assert (other.who, other.p50) == ("dag.other", 0.1)


def test_a_wait_that_never_ended_well_has_no_times(tmp_path: Path) -> None:
    record(str(tmp_path), waited(60.0, "not_running"))
    (found,) = waits_since(str(tmp_path), NOW - timedelta(hours=1))
    assert (found.satisfied, found.p50, found.longest, found.last) == (0, None, None, "not_running")


def test_lines_of_many_writers_do_not_mix_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    root = str(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: record(root, waited(float(number), who=f"dag.{number % 8}")), range(400)))
    (day,) = Path(waits_path(root)).iterdir()
    with day.open("a") as file:
        file.write('{"at": "2026-')
    reader = WaitLog(root)
    assert [found.runs for found in reader.since(NOW - timedelta(hours=1))] == [50] * 8
    record(root, waited(1.0, who="dag.0"))
    with day.open("a") as file:
        file.write('[1]\n{"at": "soon", "who": "x"}\n')
    expected = [50] * 7 + [51]
    assert sorted(found.runs for found in reader.since(NOW - timedelta(hours=1))) == expected, "it reads on"
    assert sorted(found.runs for found in waits_since(root, NOW - timedelta(hours=1))) == expected


def test_who_may_write_to_the_lake_may_add_to_the_log_whatever_the_umask_of_who_began_it(tmp_path: Path) -> None:
    control = Path(waits_path(str(tmp_path))).parent
    control.mkdir()
    control.chmod(0o2775)
    before = os.umask(0o077)
    try:
        record(str(tmp_path), waited(1.0))
        control.chmod(0o2750)
        record(str(tmp_path), waited(2.0, days=1))
    finally:
        os.umask(before)
    folder = Path(waits_path(str(tmp_path)))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2775
    assert {stat.S_IMODE(day.stat().st_mode) for day in folder.iterdir()} == {0o664}


def test_old_days_go_and_young_ones_stay(tmp_path: Path) -> None:
    root = str(tmp_path)
    for days in (0, KEPT_DAYS - 1, KEPT_DAYS + 2):
        record(root, waited(1.0, days=days))
    remove_old(root, NOW)
    assert sum(found.runs for found in waits_since(root, NOW - timedelta(days=2 * KEPT_DAYS))) == 2


def test_a_lake_that_cannot_be_written_keeps_no_wait_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "_headwater").write_text("a file in the folder's place")
    record(str(tmp_path), waited(1.0))
    assert "not in the lake's log of waits" in caplog.text
