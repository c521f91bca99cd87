"""What a driver writes to its log while all is well: a line when it begins, and one a minute."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from headwater.pipeline_file.quantities import seconds_text
from headwater.position import format_lsn

if TYPE_CHECKING:
    from headwater.replicate.run import Run

log = logging.getLogger(__name__)

_PERIOD: Final = 60.0


class Minutes:
    """Of one run; of its main thread."""

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._said_at: float | None = None
        self._before = (0, 0)

    def say(self, run: Run) -> None:
        """The first call tells that the driver begins, a later one what the last minute was, when it is over."""
        now = time.monotonic()
        if self._said_at is None:
            followed = sum(record.is_followed for record in run.tables.records.values())
            newest = run.ledger.newest
            since = f" from {format_lsn(newest.position.lsn)} on" if newest is not None else ""
            log.info("pipeline %s: replicating %d tables%s", self._pipeline, followed, since)
        elif now - self._said_at < _PERIOD:
            return
        else:
            log.info("pipeline %s: %s", self._pipeline, self._since_then(run, seconds_text(now - self._said_at)))
        self._said_at, self._before = now, (run.totals.epochs, run.totals.changes)

    def _since_then(self, run: Run, time: str) -> str:
        epochs, changes = run.totals.epochs - self._before[0], run.totals.changes - self._before[1]
        where = f"the lake holds everything up to {format_lsn(run.processed)}"
        if not changes:
            return f"no change in the last {time}; {where}"
        latency = sum(run.publisher.latencies.values())
        took = f", the newest {seconds_text(latency)} behind its commit" if latency else ""
        return f"{changes:,} changes in {epochs:,} epochs in the last {time}{took}; {where}"
