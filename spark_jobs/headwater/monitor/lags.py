"""How far the lake is behind its source, in bytes of the log and in seconds: the same for `status` and for the pages.

Seconds are measured with samples (the source's clock beside its log) and never with two clocks: an idle source that
has been read to its end has no lag. Without an answer of the source no lag is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from headwater.lake.health import LATE_SECONDS
from headwater.lake.look import IN_STEP, Look, complete_until, samples_of
from headwater.waiting.source_state import SourceState

Lag = tuple[int | None, float | None]


class Lags:
    """The lags that one look at the lake and one answer of the source give; each as (bytes, seconds)."""

    def __init__(self, look: Look, source: SourceState | None, samples: Sequence[tuple[datetime, int]] = ()) -> None:
        """`samples` of the source's clock and log, besides those of driver and answer."""
        self._look = look
        self._source = source
        self._samples = [*samples, *([source.sample] if source is not None else [])]
        self._same_log = source is not None and look.log is not None and source.is_of(look.log)

    def of_position(self, lsn: int | None) -> Lag:
        """Of what is complete up to `lsn`."""
        file, source = self._look.file, self._source
        if source is None or file is None or lsn is None or not self._same_log:
            return None, None
        complete = complete_until(file, lsn, self._samples)
        return max(0, source.position.lsn - lsn), _seconds_between(complete, source.now())

    def least_seconds(self, name: str, applied: int | None) -> float | None:
        """At least so many seconds the table is behind."""
        _, seconds = self.of_position(self._held(name, applied))
        return seconds if seconds is not None else self._least()

    def of_table(self, name: str, applied: int | None, allowed: float | None) -> Lag:
        """`applied`: the LSN that the table's last commit carries; `allowed`: by the pipeline file. A table that has
        left the file, to which nothing more comes, has no lag."""
        table = self._look.tables.get(name)
        if table is None or table.state == "removed":
            return None, None
        return self._told(self._held(name, applied), allowed)

    def of_pipeline(self) -> Lag:
        """As far behind as the last of its tables in step: what was read and not published is no use."""
        look = self._look
        read = look.file.read_position if look.file is not None else None
        covered = [look.covered(name) for name, table in look.tables.items() if table.state == IN_STEP]
        return self._told(min(covered, default=read), None)

    def _told(self, lsn: int | None, allowed: float | None) -> Lag:
        """`of_position`. Where no sample tells the time, what it is at least, if that is too much already: else it may
        be late, or not."""
        behind, seconds = self.of_position(lsn)
        least = self._least() if seconds is None and lsn is not None else None
        if least is not None and least > (allowed if allowed is not None else LATE_SECONDS):
            return behind, least
        return behind, seconds

    def _held(self, name: str, applied: int | None) -> int | None:
        """Only a table in step has everything up to what has been read; any other has what its last commit says."""
        table = self._look.tables.get(name)
        covered = self._look.covered(name) if table is not None and table.state == IN_STEP else None
        return covered if covered is not None else applied

    def _least(self) -> float | None:
        """Where no sample lies below what the lake holds, it has been behind since the first one above: a lake that
        nobody fills must not be taken for one that keeps up. The same goes for a lake of another log than the source
        has (another timeline, another server): it has been behind since the driver's newest sample."""
        if self._source is None or self._look.file is None:
            return None
        of_driver = samples_of(self._look.file)
        since = max(of_driver) if of_driver and not self._same_log else min([*of_driver, *self._samples])
        return _seconds_between(since[0], self._source.now())


def _seconds_between(complete: datetime | None, now: datetime) -> float | None:
    return max(0.0, round((now - complete).total_seconds(), 3)) if complete is not None else None
