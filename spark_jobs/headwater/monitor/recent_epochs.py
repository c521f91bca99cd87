"""The newest rows of a ledger, followed by somebody who looks again and again: what the pages draw.

The first look reads the last rows, every later one only what came since. From the rows follow the versions of all
tables at the newest epoch, so that nothing else has to be asked. Its log is read with our own reader: a query engine
takes a second for two hundred files of a row each. Of older rows only the latencies are read, once. Without Spark. Not
thread-safe.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.delta import storage
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.lake.ledger import COMPLETE_EVERY, TableVersion
from headwater.lake.paths import ledger_path
from headwater.monitor import latency_history
from headwater.monitor.latency_history import READ, LatencyHistory

KEPT = 3 * COMPLETE_EVERY
"""Epochs that are kept: at one a second five minutes, and never without a row that names every table."""

_ROUNDED = timedelta(milliseconds=1)
"""Statistics of moments are kept in milliseconds."""
_RATE_SECONDS = 60.0
_COLUMNS = [*READ, "source_time", "from_lsn", "to_lsn", "complete", "tables"]


@dataclass(frozen=True, slots=True)
class RecentEpoch:
    """One epoch as its row tells it. `tables`: those that it touched; `stages`: seconds by stage of its latency, the
    time from the commits at the source to the row. `lag`: how far the lake was behind before it, in seconds."""

    epoch: int
    generation: int
    from_lsn: int
    to_lsn: int
    source_time: datetime | None
    applied_at: datetime
    tables: Mapping[str, TableVersion]
    stages: Mapping[str, float]
    lag: float | None

    @property
    def latency(self) -> float | None:
        """Seconds from the mean commit at the source to the row; None for an epoch without changes."""
        return round(sum(self.stages.values()), 6) if self.tables and self.stages else None

    @property
    def changes(self) -> int:
        return sum(version.rows for version in self.tables.values())


class RecentEpochs:
    """The newest epochs of the lake under `root`, oldest first, and the newest version of every table."""

    def __init__(self, root: str, kept: int = KEPT, before: RecentEpochs | None = None) -> None:
        """`before`: what was known of the same lake so far. Its older rows are not read again, unless the lake was made
        anew since."""
        self._folder = ledger_path(root)
        self._snapshot: Snapshot | None = None
        self.epochs: deque[RecentEpoch] = deque(maxlen=kept)
        self.versions: dict[str, TableVersion] = {}
        self.latencies = LatencyHistory()
        self._before = before if before is not None and before.epochs else None

    @property
    def newest(self) -> RecentEpoch | None:
        return self.epochs[-1] if self.epochs else None

    def with_latency(self, count: int) -> list[RecentEpoch]:
        """The newest `count` of those that changed something, oldest first."""
        return [epoch for epoch in self.epochs if epoch.latency is not None][-count:]

    def changes_per_second(self, now: datetime) -> float | None:
        """Of the last minute; None before the first epoch."""
        if not self.epochs:
            return None
        lately = [epoch for epoch in self.epochs if (now - epoch.applied_at).total_seconds() <= _RATE_SECONDS]
        if not lately:
            return 0.0
        # The rows that are kept may span less than a minute.
        all_kept = len(lately) == self.epochs.maxlen
        span = max(1.0, (now - lately[0].applied_at).total_seconds()) if all_kept else _RATE_SECONDS
        return round(sum(epoch.changes for epoch in lately) / span, 1)

    def refresh(self) -> None:
        """Take in what was published since the last look."""
        snapshot, self._snapshot = self._snapshot, None  # should it fail half way, the next look begins anew
        if snapshot is None:
            try:
                snapshot = read_snapshot(self._folder)
            except FileNotFoundError:
                return  # nobody has replicated yet
        elif not snapshot.advance():
            self._snapshot = snapshot
            return
        if not self._follow(snapshot):
            self.epochs.clear()
            self.latencies = LatencyHistory()
            snapshot = read_snapshot(self._folder)
            self._follow(snapshot)
        self._snapshot = snapshot

    def _follow(self, snapshot: Snapshot) -> bool:
        """False when the rows follow others than those that are known, which a power cut took."""
        spans = {file.name: (file, _newest_in(file)) for file in snapshot.files.values()}
        if not self.epochs:
            self._read_latencies([file for file, _ in spans.values()])
            self._before = None
        newest = max((last for _, last in spans.values() if last is not None), default=0)
        after = max(self.epochs[-1].epoch if self.epochs else 0, newest - (self.epochs.maxlen or KEPT))
        rows = [row for file, last in spans.values() if last is None or last > after for row in self._read(file, after)]
        rows.sort(key=lambda row: int(row["epoch"]))
        known = self.newest
        if known is not None and rows and rows[0]["epoch"] == known.epoch + 1 and rows[0]["from_lsn"] != known.to_lsn:
            return False
        for row in rows:
            self._take(row)
        return True

    def _read_latencies(self, files: list[DataFile]) -> None:
        now = datetime.now(UTC)
        since = now - latency_history.KEPT
        if self._before is not None and self._goes_on(files):
            self.latencies = self._before.latencies
            self.latencies.forget(now)  # a scrape asks for none of them
            since = max(since, self._before.epochs[-1].applied_at)
        for file in files:
            last = _maxima(file).get("applied_at")
            if last is None or datetime.fromisoformat(last) >= since - _ROUNDED:
                with storage.parquet_file(file.in_folder(self._folder)) as opened:
                    for batch in opened.iter_batches(columns=READ, use_threads=False):
                        self.latencies.take_rows(pa.Table.from_batches([batch]))

    def _goes_on(self, files: list[DataFile]) -> bool:
        """Whether the newest row that was known before is still there: else this is another lake, or a power cut took
        it."""
        assert self._before is not None
        known = self._before.epochs[-1]
        at = known.applied_at
        for file in files:
            lowest, highest = _minima(file).get("applied_at"), _maxima(file).get("applied_at")
            if lowest is None or highest is None:
                continue
            if datetime.fromisoformat(lowest) - _ROUNDED <= at <= datetime.fromisoformat(highest) + _ROUNDED:
                rows = self._read(file, known.epoch - 1)
                if any(row["epoch"] == known.epoch and row["applied_at"] == at for row in rows):
                    return True
        return False

    def _read(self, file: DataFile, after: int) -> list[dict[str, Any]]:
        with storage.parquet_file(file.in_folder(self._folder)) as opened:
            found = opened.read(_COLUMNS, use_threads=False)  # most files hold one row
        if found.num_rows > 1:
            found = found.filter(pc.greater(found["epoch"], after))
        rows: list[dict[str, Any]] = found.to_pylist(maps_as_pydicts="strict")
        return rows

    def _take(self, row: dict[str, Any]) -> None:
        tables = {name: TableVersion(**value) for name, value in (row["tables"] or {}).items()}
        self.versions = tables if row["complete"] else {**self.versions, **tables}
        epoch = RecentEpoch(
            row["epoch"],
            row["generation"],
            row["from_lsn"],
            row["to_lsn"],
            row["source_time"],
            row["applied_at"],
            {name: version for name, version in tables.items() if version.touched},
            dict(row["stages"] or {}),
            row.get("lag_seconds"),  # an older Headwater has none
        )
        self.epochs.append(epoch)
        self.latencies.take(epoch.applied_at, epoch.generation, epoch.latency, epoch.lag)


def _newest_in(file: DataFile) -> int | None:
    """The highest epoch in a file of the ledger, by its statistics; 0 in one of generations only, None: not known."""
    if file.stats is None:
        return None
    statistics = json.loads(file.stats)
    if (last := _maxima(file).get("epoch")) is not None:
        return int(last)
    return 0 if statistics.get("nullCount", {}).get("epoch") == file.rows else None


def _maxima(file: DataFile) -> dict[str, Any]:
    """The highest values in the file that its statistics tell, moments as text."""
    return dict(json.loads(file.stats).get("maxValues", {})) if file.stats is not None else {}


def _minima(file: DataFile) -> dict[str, Any]:
    return dict(json.loads(file.stats).get("minValues", {})) if file.stats is not None else {}
