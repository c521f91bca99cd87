"""How long changes took from commit to visible over the last hours, as few points: the longest of every five minutes.

Filled from rows of the ledger as `headwater.monitor.recent_epochs` meets them. A stretch in which nothing was published
has no point: a driver that did not run is a gap, and no short time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

HOURS = 6
READ = ["applied_at", "source_time", "stages"]
_STRETCH = timedelta(minutes=5)


class LatencyHistory:
    """The longest latency of each stretch, in seconds."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}

    def take(self, applied_at: datetime, latency: float) -> None:
        """An epoch that was published at `applied_at`. One that is taken twice counts as one."""
        stretch = _stretch(applied_at)
        self._longest[stretch] = max(latency, self._longest.get(stretch, 0.0))

    def take_rows(self, rows: pa.Table) -> None:
        """Rows of the ledger with the columns `READ`."""
        rows = rows.filter(pc.is_valid(rows["source_time"]))  # only such an epoch has changed something
        if not rows.num_rows:
            return
        stages = rows["stages"].combine_chunks()
        sums = np.concatenate(([0.0], np.cumsum(stages.items.to_numpy(zero_copy_only=False))))
        offsets = stages.offsets.to_numpy()
        latencies = sums[offsets[1:]] - sums[offsets[:-1]]
        for at, latency in zip(rows["applied_at"].to_pylist(), latencies.tolist(), strict=True):
            self.take(at, round(latency, 6))

    def points(self, now: datetime) -> list[tuple[datetime, float | None]]:
        """Of the last hours the beginning of each stretch, oldest first, and its longest latency; None: none was
        published."""
        newest = _stretch(now)
        first = newest - int(timedelta(hours=HOURS) / _STRETCH) + 1
        self._longest = {stretch: longest for stretch, longest in self._longest.items() if stretch >= first}
        return [(_begin(stretch), self._longest.get(stretch)) for stretch in range(first, newest + 1)]


def _stretch(moment: datetime) -> int:
    return int(moment.timestamp() // _STRETCH.total_seconds())


def _begin(stretch: int) -> datetime:
    return datetime.fromtimestamp(stretch * _STRETCH.total_seconds(), UTC)
