"""Where the latency of an epoch went, and how busy each stage was lately: for the ledger, the position file, `status`.

The stages of one epoch follow each other without a gap, from the mean commit at the source to the row: what the
table that was ready last spent, and the waiting before and behind it. So their sum is the latency. Busy shares are
counted apart, over all tables: seconds in the stage against the seconds that its threads had.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from headwater.lake.freshness import LOG_RATE
from headwater.replicate.batches.batch import Arrivals
from headwater.replicate.batches.open_epochs import OpenEpoch

READER: Final = ("receive", "frame", "ship")
LANE: Final = ("decode", "net", "plan", "write", "commit")
LATENCY: Final = ("send", "frame", "queue", "wait", *LANE, "other", "publish")
"""In the order of the way. `send`: commit to receipt; `queue`: until the batch is sealed; `wait`: for a thread or for
the table's earlier batches; `other`: in the lane, outside its named stages; `publish`: for the slowest table of the
epochs before, the ledger row and the position file."""

_WINDOW: Final = 10.0


class BusyShares:
    """Seconds and bytes by stage over the last ten seconds. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, float] = {}
        self._lanes: dict[str, float] = {}  # when each ended a piece of work last
        self._in_lanes = 0.0  # seconds of all of them
        self._marks: deque[tuple[float, float, dict[str, float], dict[str, float]]] = deque()
        self._mark()

    def add(self, stages: Mapping[str, float], size: int = 0, *, lane: str = "", took: float = 0.0) -> None:
        """A piece of work spent `stages` and passed `size` bytes of the log. `lane`: the table's, if it was done in
        one, and took so many seconds there."""
        with self._lock:
            if lane:
                self._lanes[lane] = time.monotonic()
                if stages:  # an errand that went through none may take minutes, and would make all stages look idle
                    self._in_lanes += took
            for name, seconds in stages.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
                self._bytes[name] = self._bytes.get(name, 0.0) + size

    def rates(self, side_by_side: int) -> dict[str, float]:
        """`<stage>_busy` (share of the time of its threads) and `<stage>_bytes_per_second` (of the log, while busy).
        A stage has one thread; one of lanes has as many as worked at the same time, and no less than one for each
        lane up to `side_by_side`."""
        with self._lock:
            then, in_lanes, seconds, sizes = self._marks[0]
            wall = max(time.monotonic() - then, 1e-9)
            self._lanes = {lane: at for lane, at in self._lanes.items() if at >= then}
            threads = max(1, min(side_by_side, len(self._lanes)), (self._in_lanes - in_lanes) / wall)
            rates: dict[str, float] = {}
            for name, total in self._seconds.items():
                spent = total - seconds.get(name, 0.0)
                passed = self._bytes[name] - sizes.get(name, 0.0)
                rates[f"{name}_busy"] = round(min(1.0, spent / wall / (threads if name in LANE else 1)), 3)
                if spent > 0 and passed > 0:
                    rates[f"{name}_bytes_per_second"] = round(passed / spent, 1)
            if time.monotonic() - self._marks[-1][0] >= 1.0:
                self._mark()
            return rates

    def _mark(self) -> None:
        now = time.monotonic()
        self._marks.append((now, self._in_lanes, dict(self._seconds), dict(self._bytes)))
        while len(self._marks) > 1 and now - self._marks[1][0] >= _WINDOW:
            self._marks.popleft()


def latency(epoch: OpenEpoch, published: float, clock_offset: float) -> dict[str, float]:
    """Seconds by stage of an epoch whose row was written at `published`.

    `clock_offset`: the source's clock (seconds since 1970) less ours (monotonic).
    """
    arrivals = epoch.arrivals
    done = epoch.last
    began = done.began if done is not None else epoch.begun
    ended = done.ended if done is not None else epoch.begun
    stages = {name: done.stages.get(name, 0.0) for name in LANE} if done is not None else {}
    times = {
        "frame": arrivals.shipped - arrivals.received,
        "queue": epoch.begun - arrivals.shipped,
        "wait": began - epoch.begun,
        **stages,
        "other": ended - began - sum(stages.values()),
        "publish": published - ended,
    }
    if arrivals.committed is not None:
        times["send"] = arrivals.received + clock_offset - arrivals.committed
    return {name: round(max(0.0, times[name]), 6) for name in LATENCY if name in times}


class RowTimes:
    """Where the time of an epoch goes while its row is written; begins now. `stages`: as `latency`, empty for a row
    that publishes no change: that of an idle log, which has no epoch, or of an epoch whose transactions changed no
    table (its row says a state). `lag`: how far the lake is behind just before the row, in seconds: the age of the
    `oldest` commit that it publishes (by the source's clock, in seconds since 1970); None: it publishes none."""

    def __init__(self, epoch: OpenEpoch | None, clock_offset: float, oldest: float | None) -> None:
        self.epoch = epoch
        self._began = time.monotonic()
        self.stages = latency(epoch, self._began, clock_offset) if epoch is not None and epoch.touched else {}
        # Stages are no less than nothing each, so that together they may be a little more than there was.
        behind = max(sum(self.stages.values()), self._began + clock_offset - oldest) if oldest is not None else None
        self.lag = round(behind, 6) if behind is not None else None

    def written(self, now: float) -> None:
        """Its row, at `now`: what that took belongs to `publish`, which the row itself cannot say."""
        if self.stages:
            self.stages["publish"] += now - self._began


class ApplyRate:
    """How fast the published position moves through the source's log, over the last ten seconds in which there was
    something to apply: of a driver that is behind that is all of its time, what lies between two batches included."""

    def __init__(self, now: float) -> None:
        """`now`, here and below: monotonic."""
        self._last = now
        self._moves: deque[tuple[int, float]] = deque()

    def published(self, arrivals: Arrivals, distance: int, now: float, clock_offset: float) -> None:
        """A row moved the position by `distance` bytes of log. `clock_offset`: as of `latency`."""
        there = arrivals.received
        if arrivals.committed is not None:
            there = min(there, arrivals.committed - clock_offset)
        seconds = max(now - max(self._last, there), 1e-3)
        self._last = now
        self._moves.append((distance, seconds))
        while sum(spent for _, spent in self._moves) - self._moves[0][1] >= _WINDOW:
            self._moves.popleft()

    def rates(self) -> dict[str, float]:
        moves = list(self._moves)
        if not moves:
            return {}
        return {LOG_RATE: round(sum(distance for distance, _ in moves) / sum(seconds for _, seconds in moves), 1)}
