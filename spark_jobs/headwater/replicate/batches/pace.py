"""When the next batch begins: as early as the lake can take it and its commits are worth, `max_seconds` at latest, and
not before `min_seconds`.

Each batch costs a commit and a file per table it touches, and a ledger row. So the interval follows what batches cost
lately (smoothed): few tables give short batches and fresh tables, many tables long ones.
"""

from __future__ import annotations

from typing import Final

COMMITS_PER_SECOND: Final = 10.0
"""What a pipeline may cost in Delta commits, ledger rows among them, as long as `max_seconds` allows it."""
_WEIGHT: Final = 0.3
"""Of the newest batch: after ten batches less than 3 % of what was before is left."""
_GREATEST_SHARE: Final = 0.5
"""Of the time in which the lake may be busy before batches grow instead."""


class Pace:
    """Seconds throughout. `shortest`, `longest`: the pipeline's `replicate.min_seconds` and `max_seconds`; the former
    holds where it is the greater one."""

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest, self._longest = shortest, max(shortest, longest)
        self._commits: float | None = None
        self._apply = 0.0

    def applied(self, seconds: float, tables: int) -> None:
        """A batch took `seconds` from its beginning to its row and touched `tables`."""
        if self._commits is None:
            self._commits, self._apply = tables + 1.0, seconds
        self._commits += _WEIGHT * (tables + 1 - self._commits)
        self._apply += _WEIGHT * (seconds - self._apply)

    @property
    def interval(self) -> float:
        """Between the beginnings of two batches."""
        if self._commits is None:
            return self._longest
        wanted = max(self._commits / COMMITS_PER_SECOND, self._apply / _GREATEST_SHARE, self._shortest)
        return min(wanted, self._longest)
