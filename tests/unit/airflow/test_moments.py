"""Which moment of a cron expression came last, over the nights on which clocks are put forward and back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

pytest.importorskip("airflow")
from headwater_airflow.triggers.moments import MomentTrigger


@pytest.mark.parametrize(
    ("cron", "moment", "last"),
    [
        ("0 6 * * *", "2026-11-23T05:00:00", "2026-11-22T05:00"),
        ("0 6 * * *", "2026-11-23T05:00:01", "2026-11-23T05:00"),
        # 02:30 is shown twice, and comes once.
        ("30 2 * * *", "2026-10-25T00:45", "2026-10-25T00:30"),
        ("30 2 * * *", "2026-10-25T01:45", "2026-10-25T00:30"),
        ("30 * * * *", "2026-10-25T01:05", "2026-10-25T00:30"),
        ("30 * * * *", "2026-10-25T01:35", "2026-10-25T01:30"),
        # 02:30 is not shown at all, and comes when it would have been.
        ("30 2 * * *", "2026-03-29T01:10", "2026-03-28T01:30"),
        ("30 2 * * *", "2026-03-29T01:31", "2026-03-29T01:30"),
        ("*/20 * * * *", "2026-03-29T01:10", "2026-03-29T01:00"),
        # The clocks were put back since the last of them.
        ("0 * * * 6", "2026-10-25T09:00", "2026-10-24T21:00"),
    ],
)
def test_a_moment_of_a_named_hour_comes_once_and_every_so_many_minutes_are_so_by_any_clock(
    cron: str, moment: str, last: str
) -> None:
    trigger = MomentTrigger(pipeline="x.yaml", tables=[], cron=cron, timezone="Europe/Berlin", keep_seconds=1.0)
    found = trigger._last_before(datetime.fromisoformat(moment).replace(tzinfo=UTC))
    assert found == datetime.fromisoformat(last).replace(tzinfo=UTC)
