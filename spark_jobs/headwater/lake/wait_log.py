"""The log of waits: who waited for what, how long, and how it ended. A line each, in a file a day.

It answers whether the lake has been fresh enough for those who need it, and is nothing that anybody waits for: a line
that cannot be written is let go.
"""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from os.path import join
from typing import Any

from headwater.delta import storage
from headwater.lake.paths import waits_path

log = logging.getLogger(__name__)

KEPT_DAYS = 30
SATISFIED = "satisfied"
_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Waited:
    """One wait. `at`: when it ended, ISO 8601; `requirement`: as it was asked for; `tables` in order of their names."""

    at: str
    who: str
    requirement: str
    tables: tuple[str, ...]
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitsOfOne:
    """The waits of one asker for the same thing. Seconds are those of the waits that were satisfied, None without one:
    half of them were at most `p50` long, and so on. `last`: how the newest one ended."""

    who: str
    requirement: str
    tables: tuple[str, ...]
    runs: int
    satisfied: int
    p50: float | None
    p95: float | None
    longest: float | None
    last: str
    last_at: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tables": list(self.tables)}


def record(root: str, waited: Waited) -> None:
    text = json.dumps({**asdict(waited), "tables": list(waited.tables)})
    try:
        storage.make_shared_folder(waits_path(root))
        # On a line of its own also behind half of one, which a process may leave that is killed.
        storage.append(join(waits_path(root), waited.at[:10] + _SUFFIX), f"\n{text}\n".encode())
    except OSError as error:
        log.info("a wait is not in the lake's log of waits: %s", error)


def waits_since(root: str, moment: datetime) -> list[WaitsOfOne]:
    """The waits that ended at or after `moment`, those that took longest first."""
    return WaitLog(root).since(moment)


def remove_old(root: str, now: datetime | None = None) -> None:
    """Remove the days that nobody asks for any more."""
    oldest = f"{(now or datetime.now(UTC)) - timedelta(days=KEPT_DAYS):%Y-%m-%d}"
    for name in _days(root):
        if name < oldest:
            storage.delete(join(waits_path(root), name))
            storage.delete_folder(join(waits_path(root), name))  # in a store


class WaitLog:
    """A reader that goes on where it was: a thousand sensors write a line each, each time. One thread at a time."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._read: dict[str, _Day] = {}

    def since(self, moment: datetime) -> list[WaitsOfOne]:
        """See `waits_since`."""
        first = moment.astimezone(UTC)
        days = [name for name in _days(self._root) if name >= f"{first:%Y-%m-%d}"]
        self._read = {name: self._read.get(name) or _Day() for name in days}
        groups: dict[_Key, list[_Group]] = {}
        for name, day in self._read.items():
            day.follow(join(waits_path(self._root), name))
            for key, group in day.groups.items():
                groups.setdefault(key, []).append(group)
        found = [_summed_up(key, days_of_it, first.timestamp()) for key, days_of_it in groups.items()]
        return sorted((one for one in found if one is not None), key=lambda one: (-(one.p95 or 0.0), one.who))


_Key = tuple[str, str, tuple[str, ...]]


@dataclass(slots=True)
class _Group:
    """Waits of one asker for the same thing in one day: of each its end and its seconds, negative if not satisfied."""

    ends: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    last: tuple[str, str] = "", ""
    """End and outcome of the newest one."""


@dataclass(slots=True)
class _Day:
    """What has been read of one file, up to `known` (`headwater.delta.storage.lines`)."""

    known: Any = None
    groups: dict[_Key, _Group] = field(default_factory=dict)

    def follow(self, file: str) -> None:
        data, self.known = storage.lines(file, self.known)
        for line in data.splitlines():
            try:
                values = json.loads(line)
                waited = Waited(**{**values, "tables": tuple(values["tables"])})
                end = datetime.fromisoformat(waited.at).timestamp()
            except (ValueError, TypeError, KeyError):
                continue  # a blank line, or half of one
            group = self.groups.setdefault((waited.who, waited.requirement, waited.tables), _Group())
            group.ends.append(end)
            group.seconds.append(waited.seconds if waited.outcome == SATISFIED else -1.0)
            group.last = max(group.last, (waited.at, waited.outcome))


def _summed_up(key: _Key, groups: Sequence[_Group], first: float) -> WaitsOfOne | None:
    """None when none of them ended at or after `first`."""
    taken = [s for group in groups for end, s in zip(group.ends, group.seconds, strict=True) if end >= first]
    if not taken:
        return None
    seconds = sorted(one for one in taken if one >= 0.0)
    at, outcome = max(group.last for group in groups)
    p50, p95, longest = (_percentile(seconds, share) for share in (0.5, 0.95, 1.0))
    return WaitsOfOne(*key, len(taken), len(seconds), p50, p95, longest, outcome, at)


def _percentile(ascending: Sequence[float], share: float) -> float | None:
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else None


def _days(root: str) -> list[str]:
    return sorted(name for name in storage.names(waits_path(root)) if name.endswith(_SUFFIX))
