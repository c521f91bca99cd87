"""What one look at the lake shows, as values: the tables as registry and position file together show them, up to where
each of them is complete, and up to which moment of the source.

Times are aware datetimes of the source's clock, positions are LSNs of one log (`Look.log`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headwater.lake.position_file import PositionFile

IN_STEP = "active"
NOT_YET_SHOWN = "no published epoch shows it in step yet"


@dataclass(frozen=True, slots=True)
class ReportedState:
    """A table as registry and position file together show it. `path` is relative to the lake's root."""

    state: str
    reason: str = ""
    remedy: str = ""
    since: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the lake showed. `log`: (system id, timeline) of its LSNs; None when there is no lake yet.

    `paused`: since when nobody may replicate; empty: anybody may.
    """

    file: PositionFile | None
    tables: Mapping[str, ReportedState]
    log: tuple[str, int] | None = None
    paused: str = ""

    def retrying(self, name: str) -> dict[str, Any] | None:
        """Since when table `name` fails and is tried again, how often it has failed, and why; None: it does not."""
        return self.file.retrying.get(name) if self.file is not None else None

    def covered(self, name: str) -> int:
        """The highest LSN up to which the newest published epoch holds every commit on table `name`."""
        if self.file is None or self.file.epoch == 0:
            return 0
        # `pending` is a commit that may *not* be there: one below it is the last place that is known complete,
        # unless the epoch itself, which holds everything up to its position, reaches further.
        pending = self.file.pending.get(name)
        known = self.file.read_position if pending is None else min(self.file.read_position, pending - 1)
        return max(known, self.file.position.lsn)


def complete_until(file: PositionFile, lsn: int, samples: Sequence[tuple[datetime, int]] = ()) -> datetime | None:
    """The latest moment, by the source's clock, before which every commit ends at or below `lsn`; None: unknown.

    A sample that is later than one of a higher LSN was taken before the clock was set back, and says nothing.
    """
    known = sorted([*samples_of(file), *samples], key=lambda sample: (sample[1], sample[0]), reverse=True)
    lowest = datetime.max.replace(tzinfo=UTC)
    for time, at in known:
        if at <= lsn and time <= lowest:
            return time
        lowest = min(lowest, time)
    return None


def samples_of(file: PositionFile) -> list[tuple[datetime, int]]:
    """The driver's samples, oldest first."""
    return [(datetime.fromisoformat(time), lsn) for time, lsn in file.samples]
