"""`<root>/_headwater/position.json`: what pollers read instead of the ledger, replaced whole by one writer.

A cache: every claim in it entered only after its ledger commit, so an old file is late, never false. Readers that
have seen (generation, read position) ignore a file with a lower pair. Without Arrow at import: triggers import this.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from headwater.delta import storage
from headwater.lake.paths import position_file_path
from headwater.position import Position, format_lsn, parse_lsn


@dataclass(frozen=True, slots=True)
class PositionFile:
    """The file's content.

    `position`: of the newest published epoch. `durable_position`: of the newest one that would survive a power cut of
    the lake's host; None: the driver is of an older Headwater.
    `read_position`: LSN on the same timeline; every commit up to it has been read from the log. `pending`: per table
    the first commit LSN that no published epoch covers.
    `states`: tables not in step, {"state", "reason", "since"}. `retrying`: tables that fail and are being tried again,
    {"since", "attempts", "reason"}. `samples`: (source clock ISO 8601, LSN), oldest first. `ended`: the driver has
    ended in order, and publishes nothing any more.
    """

    generation: int
    epoch: int
    position: Position
    read_position: int
    written_at: str
    pending: dict[str, int] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    samples: tuple[tuple[str, int], ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    retrying: dict[str, dict[str, Any]] = field(default_factory=dict)
    durable_position: Position | None = None
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "epoch": self.epoch,
            "position": self.position.to_json(),
            "durable_position": self.durable_position.to_json() if self.durable_position is not None else None,
            "read_position": format_lsn(self.read_position),
            "written_at": self.written_at,
            "pending": {name: format_lsn(lsn) for name, lsn in self.pending.items()},
            "states": self.states,
            "samples": [[time, format_lsn(lsn)] for time, lsn in self.samples],
            "rates": self.rates,
            "retrying": self.retrying,
            "ended": self.ended,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PositionFile:
        return cls(
            generation=value["generation"],
            epoch=value["epoch"],
            position=Position.from_json(value["position"]),
            read_position=parse_lsn(value["read_position"]),
            written_at=value["written_at"],
            pending={name: parse_lsn(lsn) for name, lsn in value["pending"].items()},
            states=value["states"],
            samples=tuple((time, parse_lsn(lsn)) for time, lsn in value["samples"]),
            rates=value["rates"],
            # A driver of an older Headwater does not say these.
            retrying=value.get("retrying", {}),
            durable_position=Position.from_json(durable) if (durable := value.get("durable_position")) else None,
            ended=value.get("ended", False),
        )


def read_position_file(root: str) -> PositionFile | None:
    """The file under `root`; None when no driver has published yet, or when it is damaged: it is a cache of the ledger,
    and the next driver writes it anew."""
    try:
        return PositionFile.from_json(json.loads(storage.read_text(position_file_path(root))))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def write_position_file(root: str, content: PositionFile) -> None:
    """Replace the file atomically: a reader sees the old text or the new one, whole."""
    storage.replace(position_file_path(root), json.dumps(content.to_json()).encode())
