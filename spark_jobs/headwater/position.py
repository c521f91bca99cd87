"""Positions in the source's write-ahead log.

An LSN is a byte position in one server's WAL: 64 bit, an `int` in this code, printed as `16/B374D848`
(PostgreSQL documentation, section "pg_lsn Type"). LSNs of two timelines or two servers overlap, so
wherever a position leaves one connection it travels as a `Position` and is compared only as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_LSN = re.compile(r"\A([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")


def parse_lsn(text: str) -> int:
    """The LSN that `text` prints, e.g. `16/B374D848`; ValueError when it is none."""
    match = _LSN.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a log position (LSN); one looks like 16/B374D848")
    return (int(match[1], 16) << 32) | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """`lsn` in PostgreSQL's own form."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the log of one server on one timeline. `system_id` is a string: it exceeds 2**53."""

    system_id: str
    timeline: int
    lsn: int

    def same_log(self, other: Position) -> bool:
        """Whether the two LSNs may be compared at all."""
        return self.system_id == other.system_id and self.timeline == other.timeline

    def at(self, lsn: int) -> Position:
        return Position(self.system_id, self.timeline, lsn)

    def to_json(self) -> dict[str, Any]:
        return {"lsn": format_lsn(self.lsn), "timeline": self.timeline, "system_id": self.system_id}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Position:
        return cls(str(value["system_id"]), int(value["timeline"]), parse_lsn(value["lsn"]))

    def __str__(self) -> str:
        return f"{format_lsn(self.lsn)} (timeline {self.timeline})"
