"""Samples of the source, its clock beside its log: those that say how far behind the published position is."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

_MOST: Final = 300
_RECENT: Final = 30
_SHORTEST: Final = 1.0


class RecentSamples:
    """(ISO 8601, LSN), oldest first, as the position file has them. About a second apart; of `before`, those of the
    driver before this one: how far behind a pipeline is after a stop, nothing else can say."""

    def __init__(self, before: Iterable[tuple[str, int]] = ()) -> None:
        self._samples = list(before)

    def as_tuple(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._samples)

    def add(self, moment: datetime, lsn: int, reached: int) -> None:
        """`reached`: the published position."""
        if self._samples and moment < datetime.fromisoformat(self._samples[-1][0]):
            self._samples.clear()  # the source's clock was set back: what it said before proves too much
        text = moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._samples.append((text, lsn))
        if len(self._samples) > _MOST:
            # The oldest one stays as long as it alone says since when the published position is behind.
            del self._samples[0 if self._samples[1][1] <= reached else 1]

    def source_rate(self) -> float | None:
        """Bytes of log that the source writes a second."""
        if len(self._samples) < 2:
            return None
        (then, first), (now, last) = self._samples[-_RECENT:][0], self._samples[-1]
        seconds = (datetime.fromisoformat(now) - datetime.fromisoformat(then)).total_seconds()
        return round((last - first) / max(seconds, _SHORTEST), 1)
