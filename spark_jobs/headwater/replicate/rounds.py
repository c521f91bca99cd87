"""Whose turn it is when a driver looks at tables that nobody writes: each within a time, a few at every look.

Hundreds of looks at once would hold up the driver's main thread where the lake's files answer slowly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

PERIOD: Final = 5.0
"""Seconds within which each has had its turn; what is found then takes its own time until everybody sees it."""


class Rounds:
    """`clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: deque[str] = deque()
        self._count = 0
        self._began = self._clock()

    def due(self, names: Callable[[], Iterable[str]]) -> list[str]:
        """Those whose turn has come since the last call. `names`: all that there are, asked when a round begins."""
        passed = self._clock() - self._began
        taken: list[str] = []
        while self._left and (self._count - len(self._left)) * PERIOD <= passed * self._count:
            taken.append(self._left.popleft())
        if not self._left and passed >= PERIOD:
            self._left.extend(names())
            self._count, self._began = len(self._left), self._clock()
        return taken
