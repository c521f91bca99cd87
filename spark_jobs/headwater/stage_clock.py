"""Where the time goes: the seconds that a piece of work spends in each stage of the data's way.

A worker opens `measured`, and whatever it calls marks its part with `stage`. Stages may nest: the inner one stops the
clock of the outer. Without `measured` a mark costs a look-up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_local = threading.local()


@dataclass(slots=True)
class _Clock:
    spent: dict[str, float] = field(default_factory=dict)
    current: str = ""
    since: float = 0.0

    def turn(self, name: str) -> str:
        """From now on the time is `name`'s; returns whose it was."""
        now = time.monotonic()
        before = self.current
        if before:
            self.spent[before] = self.spent.get(before, 0.0) + now - self.since
        self.current, self.since = name, now
        return before


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Seconds by stage of what this thread does inside; complete at the end."""
    outer = getattr(_local, "clock", None)
    clock = _local.clock = _Clock()
    try:
        yield clock.spent
    finally:
        clock.turn("")
        _local.clock = outer


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What this thread does inside belongs to stage `name`."""
    clock: _Clock | None = getattr(_local, "clock", None)
    if clock is None:
        yield
        return
    before = clock.turn(name)
    try:
        yield
    finally:
        clock.turn(before)
