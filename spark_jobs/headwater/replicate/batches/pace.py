"""When the next batch begins: as early as the lake can take it and its commits are worth, and `max_seconds` at latest.

Each batch costs a commit and a file per table it touches, and a ledger row. So the interval follows what batches cost
lately (smoothed): few tables give short batches and fresh tables, many tables long ones.
"""

from __future__ import annotations

from typing import Final

COMMITS_PER_SECOND: Final = 10.0
"""What a pipeline may cost in Delta commits, ledger rows among them, as long as `max_seconds` allows it."""
_SHORTEST: Final = 0.2
_WEIGHT: Final = 0.3
"""Of the newest batch: after ten batches less than 3 % of what was before is left."""
_GREATEST_SHARE: Final = 0.5
"""Of the time in which the lake may be busy before batches grow instead."""


class Pace:
    """Seconds throughout. `longest`: the pipeline's `replicate.max_seconds`."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
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
        wanted = max(self._commits / COMMITS_PER_SECOND, self._apply / _GREATEST_SHARE, _SHORTEST)
        return min(wanted, self._longest)
