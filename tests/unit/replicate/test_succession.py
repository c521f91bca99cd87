"""When a running driver ends for a successor, and when it goes on for one: decided by what it saw last."""

from __future__ import annotations

import time

import pytest

from headwater.replicate.takeover.succession import PATIENCE_SECONDS, SuccessorWatch

NOBODY, ANNOUNCED, WARM = frozenset[int](), frozenset({1}), frozenset({1, 2})
LATER, JUST_NOW, LONG_AGO = 60.0, -1.0, -PATIENCE_SECONDS - 1
HOUR = 3600.0


@pytest.mark.parametrize(
    ("seen", "target", "left", "reason"),
    [
        (NOBODY, None, None, None),
        (NOBODY, None, LATER, None),
        (NOBODY, None, JUST_NOW, "seconds"),
        (NOBODY, 7, JUST_NOW, "seconds"),
        (ANNOUNCED, None, LATER, None),
        (ANNOUNCED, None, JUST_NOW, None),
        (ANNOUNCED, None, LONG_AGO, "seconds"),
        (ANNOUNCED, 7, JUST_NOW, "seconds"),
        (WARM, None, LATER, "seconds"),
        (WARM, None, JUST_NOW, "seconds"),
        (WARM, None, None, "signal"),
        (WARM, 7, LATER, None),
        (WARM, 7, None, None),
    ],
)
def test_a_driver_ends_for_a_warm_successor_and_goes_on_for_one_that_is_coming(
    seen: frozenset[int], target: int | None, left: float | None, reason: str | None
) -> None:
    watch = SuccessorWatch("slot")
    watch._held = seen
    deadline = None if left is None else time.monotonic() + left
    assert watch.why_stop(target, deadline) == reason
    assert watch.handed_over == (seen == WARM and target is None)


@pytest.mark.parametrize(
    ("seen", "target", "left", "reason"),
    [
        (NOBODY, None, LONG_AGO, None),
        (NOBODY, None, -HOUR - 1, "seconds"),
        (NOBODY, 7, JUST_NOW, "seconds"),
        (ANNOUNCED, None, LONG_AGO, None),
        (ANNOUNCED, None, -HOUR - 1, None),
        (ANNOUNCED, None, -HOUR - PATIENCE_SECONDS - 1, "seconds"),
        (WARM, None, LONG_AGO, "seconds"),
    ],
)
def test_a_driver_with_overtime_goes_on_for_so_long_until_somebody_takes_over(
    seen: frozenset[int], target: int | None, left: float, reason: str | None
) -> None:
    watch = SuccessorWatch("slot", overtime=HOUR)
    watch._held = seen
    assert watch.why_stop(target, time.monotonic() + left) == reason


def test_a_successor_that_cannot_be_seen_any_more_ends_nobody() -> None:
    watch = SuccessorWatch("slot")
    watch._held = WARM
    deadline = time.monotonic() + LATER
    assert watch.why_stop(None, deadline) == "seconds"
    watch.look_away()
    assert watch.why_stop(None, deadline) is None
    assert not watch.handed_over
