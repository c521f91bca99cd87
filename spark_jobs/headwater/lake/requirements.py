"""What a wait is for: a requirement as a person writes it, and the target that it becomes once it is pinned.

Times are aware datetimes of the source's clock, positions are LSNs of one log. Standard library only.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from headwater.errors import Refused
from headwater.pipeline_file.quantities import parse_duration
from headwater.position import Position, format_lsn, parse_lsn

_DATE = re.compile(r"\d{4}-\d\d-\d\d[T ]")


@dataclass(frozen=True, slots=True)
class Now:
    """Every transaction committed at the source before the question was asked."""

    def __str__(self) -> str:
        return "now"


@dataclass(frozen=True, slots=True)
class AtPosition:
    """A position; without timeline and system id (an LSN that a person typed) that of the source's log as it is."""

    lsn: int
    timeline: int | None = None
    system_id: str | None = None

    def __str__(self) -> str:
        return "a position"


@dataclass(frozen=True, slots=True)
class MaxStaleness:
    """Everything committed up to `seconds` ago, by the source's clock; judged anew at each look."""

    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:g}s"


@dataclass(frozen=True, slots=True)
class Since:
    """Everything committed before `moment`, by the source's clock; a moment still to come is waited for.

    Committed is what others could see by then: the source stamps a commit microseconds before that.
    """

    moment: datetime

    def __str__(self) -> str:
        return "a moment"


@dataclass(frozen=True, slots=True)
class AsConfigured:
    """What the pipeline file says: each table's `freshness`; `now` for tables without one."""

    def __str__(self) -> str:
        return "default"


Requirement = Now | AtPosition | MaxStaleness | Since | AsConfigured
"""As text: what a person would call it, the same for each run of a task."""
_REQUIREMENTS = (Now, AtPosition, MaxStaleness, Since, AsConfigured)


def parse_requirement(value: object) -> Requirement:
    """What `--require` and the sensor's `require` say: `now`, `16/B374D848`, `30s`, a timedelta, a Position, a moment
    with its time zone (`2026-03-01T00:00:00Z`, a datetime), or `default`.

    A position may also come as the mapping that XCom carries, or as the text into which a template renders that.
    Refused when it is none of these.
    """
    if isinstance(value, _REQUIREMENTS):
        return value
    if isinstance(value, Position):
        return AtPosition(value.lsn, value.timeline, value.system_id)
    if isinstance(value, timedelta):
        value = value.total_seconds()
    try:
        if isinstance(value, datetime):
            return _since(value)
        if isinstance(value, str) and value.strip().startswith("{"):
            value = _mapping_of(value)
        if isinstance(value, Mapping):
            return parse_requirement(Position.from_json(dict(value)))
        if isinstance(value, str):
            return _parse_text(value.strip())
        if isinstance(value, int | float) and not isinstance(value, bool):
            return MaxStaleness(parse_duration(value))
    except (ValueError, KeyError, TypeError, SyntaxError, OverflowError):
        pass
    raise Refused(
        f"{value!r} is no freshness requirement",
        code="bad_requirement",
        where="require",
        remedy="give `now`, a log position such as 16/B374D848, a duration such as 30s, a moment with its time zone"
        " such as 2026-03-01T00:00:00Z, or `default` for what the pipeline file says",
    )


def _parse_text(text: str) -> Requirement:
    if text.lower() == "now":
        return Now()
    if text.lower() == "default":
        return AsConfigured()
    if _DATE.match(text):
        return _since(datetime.fromisoformat(text))
    return AtPosition(parse_lsn(text)) if "/" in text else MaxStaleness(parse_duration(text))


def _since(moment: datetime) -> Since:
    if moment.tzinfo is None:
        raise ValueError("a moment without its time zone")
    # Airflow's moments are a subclass (pendulum), whose differences do not calculate as those of datetime do.
    return Since(datetime.fromisoformat(moment.astimezone(UTC).isoformat()))


def _mapping_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text.strip())  # Jinja renders a dict as Python writes it


@dataclass(frozen=True, slots=True)
class WantedParts:
    """Partitions of a table that are waited for. `names`: as they were asked for; `leaves`: those that hold rows, and
    their relation ids. `reloads`: of these partitions, that were open when the wait began: what they bring is wanted.
    """

    names: tuple[str, ...]
    leaves: Mapping[str, int]
    reloads: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"names": list(self.names), "leaves": dict(self.leaves), "reloads": list(self.reloads)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WantedParts:
        return cls(tuple(value["names"]), dict(value["leaves"]), tuple(value["reloads"]))


@dataclass(frozen=True, slots=True)
class Target:
    """A requirement once it is pinned: `lsn` in the log (`system_id`, `timeline`), or `max_staleness`, or `since`,
    which becomes an `lsn` as soon as a sample at or after that moment is known (`resolved`). `now`: the source could
    not be asked for the `lsn` yet; whatever it answers from then on is one (`pinned`).

    `by_table`: tables with a greatest staleness of their own, in seconds; the others go by the rest.
    `validated`: tables of which only what has passed a validation counts. `parts`: tables of which only some partitions
    are wanted.
    """

    lsn: int | None = None
    timeline: int | None = None
    system_id: str | None = None
    max_staleness: float | None = None
    since: datetime | None = None
    by_table: Mapping[str, float] = field(default_factory=dict)
    validated: tuple[str, ...] = ()
    parts: Mapping[str, WantedParts] = field(default_factory=dict)
    now: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values, so that a deferred wait resumes with the same target in another process."""
        return {
            "lsn": format_lsn(self.lsn) if self.lsn is not None else None,
            "timeline": self.timeline,
            "system_id": self.system_id,
            "max_staleness": self.max_staleness,
            **({"since": self.since.isoformat()} if self.since is not None else {}),
            **({"by_table": dict(self.by_table)} if self.by_table else {}),
            **({"validated": list(self.validated)} if self.validated else {}),
            **({"parts": {name: parts.to_json() for name, parts in self.parts.items()}} if self.parts else {}),
            **({"now": True} if self.now else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Target:
        lsn, since = value["lsn"], value.get("since")
        return cls(
            parse_lsn(lsn) if lsn is not None else None,
            value["timeline"],
            value["system_id"],
            value["max_staleness"],
            datetime.fromisoformat(since) if since is not None else None,
            dict(value.get("by_table", {})),
            tuple(value.get("validated", ())),
            {name: WantedParts.from_json(parts) for name, parts in value.get("parts", {}).items()},
            bool(value.get("now", False)),
        )

    @property
    def log(self) -> tuple[str, int] | None:
        return (self.system_id, self.timeline) if self.system_id is not None and self.timeline is not None else None

    @property
    def open(self) -> bool:
        """A moment of which nobody knows yet where in the log it lies."""
        return self.since is not None and self.lsn is None

    def resolved(self, samples: Iterable[tuple[datetime, int]], log: tuple[str, int] | None) -> Target:
        """With the position of its moment, if one of `samples` (of `log`) was taken at or after it: the lowest, since
        what was committed before the moment ends at or below every one of them."""
        since = self.since
        if since is None or self.lsn is not None or log is None:
            return self
        found = [lsn for time, lsn in samples if time >= since]
        return replace(self, lsn=min(found), system_id=log[0], timeline=log[1]) if found else self

    def pinned(self, now: Position) -> Target:
        """With the position `now`, if it waits for one."""
        return (
            replace(self, lsn=now.lsn, timeline=now.timeline, system_id=now.system_id, now=False) if self.now else self
        )

    def staleness(self, name: str) -> float | None:
        """The greatest staleness of table `name`; None when it goes by the position."""
        return self.by_table.get(name, self.max_staleness)

    def __str__(self) -> str:
        parts = [f"{', '.join(parts.names)} of {name}" for name, parts in sorted(self.parts.items())]
        return ", ".join([self._shown(), *parts, *(["validated"] if self.validated else [])])

    def _shown(self) -> str:
        if self.since is not None:
            moment = self.since.isoformat().replace("+00:00", "Z")
            return moment if self.lsn is None else f"{format_lsn(self.lsn)} ({moment})"
        limits = [f"{seconds:g}s for {name}" for name, seconds in sorted(self.by_table.items())]
        if self.now:
            limits.insert(0, "now")
        elif self.lsn is not None:
            limits.insert(0, format_lsn(self.lsn))
        elif self.max_staleness is not None:
            limits.insert(0, f"{self.max_staleness:g}s")
        return ", ".join(limits)
