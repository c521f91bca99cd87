"""What the chart of the last days is drawn from: longest latencies, gaps, and drivers that began behind a pause."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from fixtures.lakes import HandLake, position_at
from headwater.lake.ledger import _SCHEMA
from headwater.monitor.latency_history import READ, LatencyHistory
from headwater.monitor.recent_epochs import RecentEpochs

NOW = datetime(2026, 3, 7, 12, 0, 30, tzinfo=UTC)
ROWS = pa.schema([_SCHEMA.field(name) for name in READ])


def row(
    ago: timedelta, latency: float | None, generation: int, lag: float | None = None
) -> tuple[datetime, int, float | None, float | None]:
    return NOW - ago, generation, latency, lag


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


EPOCHS = [
    row(timedelta(days=8), 900.0, 1),
    row(timedelta(days=3), 30.0, 2),
    row(minutes(200), 4.0, 3),
    row(minutes(40), 0.3, 3, 0.5),
    row(minutes(39.9), 0.5, 3, 0.75),
    row(minutes(39), None, 3),
    row(minutes(38.5), 0.1, 4, 0.25),  # a successor that took over
    row(minutes(20), 17.0, 5, 300.0),  # somebody started it again: the oldest commit had waited for five minutes
    row(minutes(19.9), 9.0, 5, 200.0),
]


def by_rows() -> LatencyHistory:
    """As the ledger's files are read: nothing in order, and a file twice."""
    rows = [
        {
            "epoch": number,
            "generation": generation,
            "applied_at": at,
            "stages": [("write", latency / 2), ("commit", latency / 2)] if latency is not None else [],
            "lag_seconds": lag,
        }
        for number, (at, generation, latency, lag) in enumerate(EPOCHS)
    ]
    # A generation's own row, of its beginning, is none of its epochs.
    rows.append({"epoch": None, "generation": 5, "applied_at": NOW - minutes(36)})
    history = LatencyHistory()
    for part in (rows[4:], rows[:5], [], rows[2:3]):
        history.take_rows(pa.Table.from_pylist(part, schema=ROWS))
    return history


def by_epochs() -> LatencyHistory:
    history = LatencyHistory()
    for epoch in EPOCHS:
        history.take(*epoch)
    return history


def test_rows_and_epochs_say_the_same() -> None:
    assert by_rows().to_json(NOW) == by_epochs().to_json(NOW)


def test_each_range_has_the_longest_of_its_stretches_and_gaps() -> None:
    ranges = by_rows().to_json(NOW)["ranges"]
    assert {name: (len(one["longest"]), one["step"]) for name, one in ranges.items()} == {
        "1 h": (60, 60),
        "6 h": (72, 300),
        "24 h": (96, 900),
        "7 d": (84, 7200),
    }
    hour = ranges["1 h"]
    known = {hour["begins"] + index * 60: one for index, one in enumerate(hour["longest"]) if one is not None}
    first = int((NOW - minutes(40)).timestamp()) // 60 * 60
    assert known == {first: 0.5, first + 120: 0.1, first + 20 * 60: 17.0}
    assert max(filter(None, ranges["6 h"]["longest"])) == 17.0
    assert sorted(filter(None, ranges["7 d"]["longest"])) == [4.0, 17.0, 30.0]  # nothing of eight days ago
    for one in ranges.values():
        assert one["begins"] + len(one["longest"]) * one["step"] > NOW.timestamp()


def test_each_range_tells_how_far_the_lake_was_behind_also_while_nothing_was_published() -> None:
    lag = 90.0  # of now: what was committed since is not there yet
    ranges = by_rows().to_json(NOW, lag)["ranges"]
    hour = ranges["1 h"]
    known = {
        round((hour["begins"] + index * 60 + 60 - NOW.timestamp()) / 60, 1): one
        for index, one in enumerate(hour["behind"])
        if one is not None
    }
    # By the end of each minute, counted from now; now is the middle of one.
    outage = {-24.5: 30.0, -23.5: 90.0, -22.5: 150.0, -21.5: 210.0, -20.5: 270.0, -19.5: 300.0}
    assert known == {-39.5: 0.75, -38.5: 0.25, -37.5: 0.25, **outage, -0.5: 60.0, 0.5: 90.0}
    assert max(filter(None, ranges["7 d"]["behind"])) == 300.0
    assert by_rows().to_json(NOW)["ranges"]["1 h"]["behind"][-1] is None


def test_rows_of_an_older_headwater_tell_no_lag() -> None:
    history = LatencyHistory()
    at = NOW - minutes(5)
    values = {"epoch": 1, "generation": 1, "applied_at": at, "stages": [("write", 2.0)]}
    history.take_rows(pa.Table.from_pylist([values], schema=ROWS).drop_columns("lag_seconds"))
    hour = history.to_json(NOW)["ranges"]["1 h"]
    assert (max(filter(None, hour["longest"])), set(hour["behind"])) == (2.0, {None})


def test_a_driver_that_began_behind_a_pause_is_told_and_a_hand_over_is_not() -> None:
    starts = by_rows().to_json(NOW)["starts"]
    assert [round((NOW.timestamp() - at) / 60, 1) for at, _ in starts] == [200.0, 20.0]
    assert round(starts[-1][1] / 60, 1) == 18.5


def test_whoever_looks_anew_keeps_the_history_of_the_same_lake_alone(tmp_path: Path) -> None:
    lake = HandLake(tmp_path / "lake", position_at(), ["public.a"])
    lake.publish(0x2000, "public.a")
    first = RecentEpochs(lake.root)
    first.refresh()
    first.latencies.take(datetime.now(UTC) - timedelta(hours=3), 1, 77.0, None)  # no row of the lake's says so
    lake.publish(0x3000, "public.a")
    again = RecentEpochs(lake.root, before=first)
    again.refresh()
    assert again.latencies is first.latencies
    assert [epoch.epoch for epoch in again.epochs] == [1, 2]
    other = HandLake(tmp_path / "other", position_at(), ["public.a"])
    other.publish(0x2000, "public.a")
    another = RecentEpochs(other.root, before=first)
    another.refresh()
    assert 77.0 not in another.latencies.to_json(datetime.now(UTC))["ranges"]["6 h"]["longest"]


def test_what_is_older_than_is_shown_is_forgotten_also_if_nobody_opens_the_page(tmp_path: Path) -> None:
    lake = HandLake(tmp_path / "lake", position_at(), ["public.a"])
    lake.publish(0x2000, "public.a")
    first, now = RecentEpochs(lake.root), datetime.now(UTC).replace(second=30)  # a lag may reach back into a minute
    first.refresh()
    for days in (9, 8, 1):
        first.latencies.take(now - timedelta(days=days), 10 - days, 5.0, 5.0)
    again = RecentEpochs(lake.root, before=first)
    again.refresh()
    kept = again.latencies
    assert [len(kept._longest), len(kept._behind)] == [1, 1]
    assert sorted(kept._seen) == [1, 9]
