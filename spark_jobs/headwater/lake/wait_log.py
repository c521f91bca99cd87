"""The log of waits: who waited for what, how long, and how it ended. A line each, in a file a day.

It answers whether the lake has been fresh enough for those who need it, and is nothing that anybody waits for: a line
that cannot be written is let go.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from os.path import join
from typing import Any

from headwater.lake import storage
from headwater.lake.paths import waits_path

log = logging.getLogger(__name__)

KEPT_DAYS = 30
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
class Waits:
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
    line = json.dumps({**asdict(waited), "tables": list(waited.tables)}) + "\n"
    try:
        storage.make_folder(waits_path(root))
        storage.append(join(waits_path(root), waited.at[:10] + _SUFFIX), line.encode())
    except OSError as error:
        log.info("a wait is not in the lake's log of waits: %s", error)


def waits_since(root: str, moment: datetime) -> list[Waits]:
    """The waits that ended at or after `moment`, those that took longest first."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Waited]] = {}
    for waited in _read(root, moment):
        groups.setdefault((waited.who, waited.requirement, waited.tables), []).append(waited)
    found = [_summed_up(*key, group) for key, group in groups.items()]
    return sorted(found, key=lambda waits: (-(waits.p95 or 0.0), waits.who))


def remove_old(root: str, now: datetime | None = None) -> None:
    """Remove the days that nobody asks for any more."""
    oldest = f"{(now or datetime.now(UTC)) - timedelta(days=KEPT_DAYS):%Y-%m-%d}"
    for name in _days(root):
        if name < oldest:
            storage.delete(join(waits_path(root), name))


def _summed_up(who: str, requirement: str, tables: tuple[str, ...], group: Sequence[Waited]) -> Waits:
    newest = max(group, key=lambda waited: waited.at)
    seconds = sorted(waited.seconds for waited in group if waited.outcome == "satisfied")
    return Waits(
        who,
        requirement,
        tables,
        len(group),
        len(seconds),
        _percentile(seconds, 0.5),
        _percentile(seconds, 0.95),
        _percentile(seconds, 1.0),
        newest.outcome,
        newest.at,
    )


def _percentile(ascending: Sequence[float], share: float) -> float | None:
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else None


def _read(root: str, moment: datetime) -> Iterable[Waited]:
    first = moment.astimezone(UTC)
    for name in _days(root):
        if name < f"{first:%Y-%m-%d}":
            continue
        for line in storage.read_text(join(waits_path(root), name)).splitlines():
            try:
                values = json.loads(line)
                waited = Waited(**{**values, "tables": tuple(values["tables"])})
            except (ValueError, TypeError, KeyError):
                continue  # half a line, of a process that was killed
            if datetime.fromisoformat(waited.at) >= first:
                yield waited


def _days(root: str) -> list[str]:
    folder = waits_path(root)
    return sorted(name for name in storage.names(folder) if name.endswith(_SUFFIX)) if storage.is_folder(folder) else []
