"""How long changes took from commit to readable over the last days, and how far the lake was behind, as few points: the
longest of every stretch; and when a new driver published behind a time without an epoch.

Filled from rows of the ledger as `headwater.monitor.recent_epochs` meets them. A stretch in which nothing was published
has no latency: a driver that did not run is a gap, and no short time. How far the lake was behind meanwhile the next
row tells: it grew from the commit that had waited longest. Where nothing waited there is no point. Up to now it is what
samples of the source's clock and log say: it may count a log in which there was nothing for the lake, and nobody knows
it while the source does not answer. The next row puts it right.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.lake.registry import TOLD

KEPT: Final = TOLD
READ: Final = ["epoch", "generation", "applied_at", "stages", "lag_seconds"]
RANGES: Final = {"1 h": (3600, 60), "6 h": (21600, 300), "24 h": (86400, 900), "7 d": (604800, 7200)}
"""Of each range of time its length, and that of one of its stretches; seconds."""

_MINUTE: Final = 60
_PAUSE_SECONDS: Final = 90.0
"""Between the last row of one driver and the first of the next: longer than any hand-over."""


class LatencyHistory:
    """The longest latency and the greatest lag of each minute, in seconds. What is taken twice counts once."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}
        self._behind: dict[int, float] = {}
        self._taken_until = 0.0
        self._seen: dict[int, tuple[float, float]] = {}  # by generation: its first and its last row

    def take(self, applied_at: datetime, generation: int, latency: float | None, lag: float | None) -> None:
        """An epoch that was published at `applied_at`; `latency` None: it changed nothing. `lag`: how far the lake was
        behind before it, if that is known."""
        at = applied_at.timestamp()
        self._take_generation(generation, at, at)
        if latency is not None:
            _raise(self._longest, int(at // _MINUTE), latency)
        if lag is not None:
            _grow(self._behind, at, lag, self._taken_until)
            self._taken_until = max(self._taken_until, at)

    def take_rows(self, rows: pa.Table) -> None:
        """Rows of the ledger with the columns `READ`. Of a generation its epochs count, as in `take`."""
        rows = rows.filter(pc.is_valid(rows["epoch"]))
        if not rows.num_rows:
            return
        at = _seconds(rows)
        for generation, first, last in _bounds(rows["generation"].to_numpy(), at):
            self._take_generation(int(generation), float(first), float(last))
        rows = rows.filter(pc.is_valid(rows["stages"]))
        stages = rows["stages"].combine_chunks()
        rows = rows.filter(pa.array(np.diff(stages.offsets) > 0))  # only such an epoch has changed something
        if not rows.num_rows:
            return
        stages = rows["stages"].combine_chunks()
        sums = np.concatenate(([0.0], np.cumsum(stages.items.to_numpy(zero_copy_only=False))))
        offsets = stages.offsets.to_numpy()
        latencies = np.round(sums[offsets[1:]] - sums[offsets[:-1]], 6)
        at = _seconds(rows)
        for minute, _, longest in _bounds((at // _MINUTE).astype(np.int64), latencies):
            _raise(self._longest, int(minute), float(longest))
        if "lag_seconds" in rows.column_names:  # not in those of an older Headwater
            lags = rows["lag_seconds"].to_numpy()
            known = np.flatnonzero(~np.isnan(lags))
            self._take_lags(at[known], lags[known])

    def to_json(self, now: datetime, lag: float | None = None) -> dict[str, Any]:
        """`ranges`: by name when its first stretch begins (seconds since 1970), how long one is, the longest latency of
        each, None where nothing was published, and how far the lake was `behind` at most, None where nothing waited;
        `lag`: how far it is now. `starts`: when a new driver published its first epoch, and how many seconds there had
        been none."""
        self.forget(now)
        behind = self._behind
        if lag:
            behind = dict(behind)
            _grow(behind, now.timestamp(), lag)
        ranges = {}
        for name, (length, step) in RANGES.items():
            count = length // step
            begins = (int(now.timestamp() // step) - count + 1) * step
            longest, furthest = (_stretches(values, begins, step, count) for values in (self._longest, behind))
            ranges[name] = {"begins": begins, "step": step, "longest": longest, "behind": furthest}
        return {"ranges": ranges, "starts": self._starts()}

    def forget(self, now: datetime) -> None:
        """What is older than is shown."""
        oldest = now.timestamp() - KEPT.total_seconds()
        for values in (self._longest, self._behind):
            for minute in [minute for minute in values if (minute + 1) * _MINUTE < oldest]:
                del values[minute]
        self._seen = {generation: seen for generation, seen in self._seen.items() if seen[1] >= oldest}

    def _take_lags(self, at: npt.NDArray[np.float64], lags: npt.NDArray[np.float64]) -> None:
        """Lags just before rows that were written `at`."""
        if not len(at):
            return
        order = np.argsort(at, kind="stable")
        at, lags = at[order], lags[order]
        for minute, _, greatest in _bounds((at // _MINUTE).astype(np.int64), lags):
            _raise(self._behind, minute, greatest)
        # Few reach back beyond their minute; what was so before the row before, that row has told.
        before = np.concatenate(([0.0], at[:-1]))
        for index in np.flatnonzero((at - lags) // _MINUTE < at // _MINUTE).tolist():
            _grow(self._behind, float(at[index]), float(lags[index]), float(before[index]))

    def _starts(self) -> list[list[float]]:
        seen = sorted(self._seen.values())
        pauses = [(after[0], after[0] - before[1]) for before, after in pairwise(seen)]
        return [[round(at, 3), round(pause, 3)] for at, pause in pauses if pause > _PAUSE_SECONDS]

    def _take_generation(self, generation: int, first: float, last: float) -> None:
        known = self._seen.get(generation, (first, last))
        self._seen[generation] = (min(first, known[0]), max(last, known[1]))


def _raise(values: dict[int, float], minute: int, value: float) -> None:
    values[minute] = max(value, values.get(minute, 0.0))


def _grow(values: dict[int, float], at: float, lag: float, since: float = 0.0) -> None:
    """The lake had fallen behind by `lag` at `at`; what was so before `since` is known."""
    began = at - lag
    last = int(at // _MINUTE)
    _raise(values, last, lag)
    for minute in range(int(max(began, since, at - KEPT.total_seconds()) // _MINUTE), last):
        _raise(values, minute, (minute + 1) * _MINUTE - began)


def _stretches(values: dict[int, float], begins: int, step: int, count: int) -> list[float | None]:
    """The greatest of the values by minute in each of `count` stretches; None where there is none."""
    greatest: list[float | None] = [None] * count
    for minute, one in values.items():
        index = (minute * _MINUTE - begins) // step
        if 0 <= index < count:
            greatest[index] = round(max(one, greatest[index] or 0.0), 6)
    return greatest


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
