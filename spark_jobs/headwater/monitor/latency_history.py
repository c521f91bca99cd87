"""How long changes took from commit to readable over the last days, as few points: the longest of every stretch; and
when a new driver published behind a time without an epoch.

Filled from rows of the ledger as `headwater.monitor.recent_epochs` meets them. A stretch in which nothing was published
has no point: a driver that did not run is a gap, and no short time.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

KEPT: Final = timedelta(days=7)
READ: Final = ["epoch", "generation", "applied_at", "source_time", "stages"]
RANGES: Final = {"1 h": (3600, 60), "6 h": (21600, 300), "24 h": (86400, 900), "7 d": (604800, 7200)}
"""Of each range of time its length, and that of one of its stretches; seconds."""

_MINUTE: Final = 60
_PAUSE_SECONDS: Final = 90.0
"""Between the last row of one driver and the first of the next: longer than any hand-over."""


class LatencyHistory:
    """The longest latency of each minute, in seconds. What is taken twice counts once."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}
        self._seen: dict[int, tuple[float, float]] = {}  # by generation: its first and its last row

    def take(self, applied_at: datetime, generation: int, latency: float | None) -> None:
        """An epoch that was published at `applied_at`; `latency` None: it changed nothing."""
        at = applied_at.timestamp()
        self._take_generation(generation, at, at)
        if latency is not None:
            self._take_minute(int(at // _MINUTE), latency)

    def take_rows(self, rows: pa.Table) -> None:
        """Rows of the ledger with the columns `READ`. Of a generation its epochs count, as in `take`."""
        rows = rows.filter(pc.is_valid(rows["epoch"]))
        if not rows.num_rows:
            return
        at = _seconds(rows)
        for generation, first, last in _bounds(rows["generation"].to_numpy(), at):
            self._take_generation(int(generation), float(first), float(last))
        rows = rows.filter(pc.is_valid(rows["source_time"]))  # only such an epoch has changed something
        if not rows.num_rows:
            return
        stages = rows["stages"].combine_chunks()
        sums = np.concatenate(([0.0], np.cumsum(stages.items.to_numpy(zero_copy_only=False))))
        offsets = stages.offsets.to_numpy()
        latencies = np.round(sums[offsets[1:]] - sums[offsets[:-1]], 6)
        for minute, _, longest in _bounds((_seconds(rows) // _MINUTE).astype(np.int64), latencies):
            self._take_minute(int(minute), float(longest))

    def to_json(self, now: datetime) -> dict[str, Any]:
        """`ranges`: by name when its first stretch begins (seconds since 1970), how long one is, and the longest
        latency of each, None where nothing was published. `starts`: when a new driver published its first epoch,
        and how many seconds there had been none."""
        oldest = now.timestamp() - KEPT.total_seconds()
        self._longest = {minute: one for minute, one in self._longest.items() if (minute + 1) * _MINUTE >= oldest}
        self._seen = {generation: seen for generation, seen in self._seen.items() if seen[1] >= oldest}
        return {"ranges": {name: self._range(now, *sizes) for name, sizes in RANGES.items()}, "starts": self._starts()}

    def _range(self, now: datetime, length: int, step: int) -> dict[str, Any]:
        newest = int(now.timestamp() // step)
        first = newest - length // step + 1
        longest: list[float | None] = [None] * (newest - first + 1)
        for minute, one in self._longest.items():
            index = minute * _MINUTE // step - first
            if 0 <= index < len(longest):
                longest[index] = max(one, longest[index] or 0.0)
        return {"begins": first * step, "step": step, "longest": longest}

    def _starts(self) -> list[list[float]]:
        seen = sorted(self._seen.values())
        pauses = [(after[0], after[0] - before[1]) for before, after in pairwise(seen)]
        return [[round(at, 3), round(pause, 3)] for at, pause in pauses if pause > _PAUSE_SECONDS]

    def _take_minute(self, minute: int, latency: float) -> None:
        self._longest[minute] = max(latency, self._longest.get(minute, 0.0))

    def _take_generation(self, generation: int, first: float, last: float) -> None:
        known = self._seen.get(generation, (first, last))
        self._seen[generation] = (min(first, known[0]), max(last, known[1]))


def _seconds(rows: pa.Table) -> npt.NDArray[np.float64]:
    """When each row was written, in seconds since 1970."""
    micros = rows["applied_at"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    seconds: npt.NDArray[np.float64] = micros / 1e6
    return seconds


def _bounds(groups: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> list[tuple[int, float, float]]:
    """Of each group its least and its greatest value."""
    order = np.argsort(groups, kind="stable")
    found, starts = np.unique(groups[order], return_index=True)
    least, greatest = np.minimum.reduceat(values[order], starts), np.maximum.reduceat(values[order], starts)
    return list(zip(found.tolist(), least.tolist(), greatest.tolist(), strict=True))
