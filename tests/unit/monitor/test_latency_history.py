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


def row(ago: timedelta, latency: float | None = 0.2, generation: int = 1) -> tuple[datetime, int, float | None]:
    return NOW - ago, generation, latency


def minutes(number: float) -> timedelta:
    return timedelta(minutes=number)


EPOCHS = [
    row(timedelta(days=8), 900.0, 1),
    row(timedelta(days=3), 30.0, 2),
    row(minutes(200), 4.0, 3),
    row(minutes(40), 0.3, 3),
    row(minutes(39.9), 0.5, 3),
    row(minutes(39), None, 3),
    row(minutes(38.5), 0.1, 4),  # a successor that took over
    row(minutes(20), 17.0, 5),  # somebody started it again
]


def by_rows() -> LatencyHistory:
    """As the ledger's files are read: nothing in order, and a file twice."""
    rows = [
        {
            "epoch": number,
            "generation": generation,
            "applied_at": at,
            "source_time": at if latency is not None else None,
            "stages": [("write", latency / 2), ("commit", latency / 2)] if latency is not None else None,
        }
        for number, (at, generation, latency) in enumerate(EPOCHS)
    ]
    # A generation's own row, of its beginning, is none of its epochs.
    rows.append({"epoch": None, "generation": 5, "applied_at": NOW - minutes(36), "source_time": None, "stages": None})
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


def test_a_driver_that_began_behind_a_pause_is_told_and_a_hand_over_is_not() -> None:
    starts = by_rows().to_json(NOW)["starts"]
    assert [round((NOW.timestamp() - at) / 60, 1) for at, _ in starts] == [200.0, 20.0]
    assert round(starts[-1][1] / 60, 1) == 18.5


def test_whoever_looks_anew_keeps_the_history_of_the_same_lake_alone(tmp_path: Path) -> None:
    lake = HandLake(tmp_path / "lake", position_at(), ["public.a"])
    lake.publish(0x2000, "public.a")
    first = RecentEpochs(lake.root)
    first.refresh()
    first.latencies.take(datetime.now(UTC) - timedelta(hours=3), 1, 77.0)  # no row of the lake's says so
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
