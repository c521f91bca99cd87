"""How often a lake is looked at and written to while little happens: on a disk that costs next to nothing, in an object
store each time is a request, which takes its time and costs money. Seconds throughout."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headwater.lake_root import is_remote


@dataclass(frozen=True, slots=True)
class Often:
    """`batch`: least between the beginnings of two batches. `file`: most between two writings of the position file
    while nothing happens, which the driver thinks of once a second (0: it writes each time). `idle_tables`: within
    which each table that nobody writes is looked at. `idle_row`: least between two ledger rows of a log that touches no
    table. `horizon`: how old what is known of cuts may be to whoever cleans up, `upkeep`: between two turns of a table
    there, `control`: of the lake's own tables, `commits`: after so many a table's turn comes at once.

    First and longest between two looks: `registry`, of a driver at what jobs have written; `wait`, of who waits for a
    position or for the driver's answer."""

    batch: float
    file: float
    idle_tables: float
    idle_row: float
    horizon: float
    upkeep: float
    control: float
    commits: int
    registry: tuple[float, float]
    wait: tuple[float, float]


_ON_DISK: Final = Often(
    batch=0.2,
    file=0,
    idle_tables=5,
    idle_row=10,
    horizon=20,
    upkeep=600,
    control=120,
    commits=300,
    registry=(0.2, 0.2),
    wait=(0.05, 0.05),
)
_IN_STORE: Final = Often(
    batch=1,
    file=20,
    idle_tables=360,
    idle_row=60,
    horizon=600,
    upkeep=1800,
    control=600,
    commits=3000,
    registry=(1, 15),
    wait=(0.25, 1),
)


def often(root: str) -> Often:
    """For the lake under `root`."""
    return _IN_STORE if is_remote(root) else _ON_DISK


class Growing:
    """When the next look is due: `first` seconds after the last one, and twice as long each time, up to `longest`, as
    long as nothing is new. `clock` is monotonic."""

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._longest, self._clock = min(first, longest), longest, clock
        self.pause = self._first
        self._last = clock()

    @property
    def since(self) -> float:
        """Seconds since the last look."""
        return self._clock() - self._last

    @property
    def is_due(self) -> bool:
        return self.since >= self.pause

    def looked(self, *, new: bool) -> None:
        """Just now. `new`: something was."""
        self._last = self._clock()
        self.pause = self._first if new else min(2 * self.pause, self._longest)


__all__ = ["Growing", "Often", "often"]
