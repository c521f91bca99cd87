"""Whose turn it is when a driver looks at tables that nobody writes: each within a time, a few at every look.

Hundreds of looks at once would hold up the driver's main thread where the lake's files answer slowly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable


class Rounds:
    """`period`: seconds within which each has had its turn; what is found then takes its own time until everybody sees
    it. `clock` is monotonic."""

    def __init__(self, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period, self._clock = period, clock
        self._left: deque[str] = deque()
        self._count = 0
        self._began = self._clock()

    def due(self, names: Callable[[], Iterable[str]]) -> list[str]:
        """Those whose turn has come since the last call. `names`: all that there are, asked when a round begins."""
        passed = self._clock() - self._began
        taken: list[str] = []
        while self._left and (self._count - len(self._left)) * self._period <= passed * self._count:
            taken.append(self._left.popleft())
        if not self._left and passed >= self._period:
            self._left.extend(names())
            self._count, self._began = len(self._left), self._clock()
        return taken
