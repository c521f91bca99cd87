"""Every table has its turn within a time, a few at every look."""

from __future__ import annotations

import itertools

from headwater.replicate.rounds import Rounds

PERIOD = 5.0


def test_each_has_its_turn_within_the_time_and_never_all_at_once() -> None:
    now = 0.0
    rounds = Rounds(PERIOD, lambda: now)
    names = [f"t{number}" for number in range(500)]
    turns: dict[str, list[float]] = {name: [] for name in names}
    while now < 10 * PERIOD:
        taken = rounds.due(lambda: names)
        assert len(taken) <= 500 * 0.2 / PERIOD + 1
        for name in taken:
            turns[name].append(now)
        now += 0.2
    for at in turns.values():
        assert at[0] <= 2 * PERIOD
        assert all(later - earlier <= PERIOD + 0.5 for earlier, later in itertools.pairwise(at))


def test_a_driver_that_was_busy_makes_up_for_it() -> None:
    now = 0.0
    rounds = Rounds(PERIOD, lambda: now)
    now = PERIOD
    assert rounds.due(lambda: ["a", "b", "c"]) == []
    now = 3 * PERIOD
    assert rounds.due(lambda: ["a", "b", "c"]) == ["a", "b", "c"]


def test_what_comes_meanwhile_is_in_the_next_round() -> None:
    now = PERIOD
    rounds = Rounds(PERIOD, lambda: now)
    now = 2 * PERIOD
    assert rounds.due(list) == []
    now = 3 * PERIOD
    assert rounds.due(lambda: ["a"]) == []
    now = 4 * PERIOD
    assert rounds.due(lambda: ["a", "b"]) == ["a"]
