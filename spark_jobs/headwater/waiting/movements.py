"""What a lake shows to somebody who waits for its tables to move: the newest epoch, which of the tables have moved
since a look of before, and the cut that they make now. Starts without Spark and asks the source nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headwater.lake.cuts import pin_cut, take_cut, time_text
from headwater.lake.ledger import Epoch
from headwater.lake.look import IN_STEP, NOT_YET_SHOWN, Look, complete_until, samples_of
from headwater.lake.reader import LakeReader
from headwater.pipeline_file.pipeline import Pipeline
from headwater.waiting.request import deadline_in


@dataclass(frozen=True, slots=True)
class Sight:
    """The lake of `pipeline` under `root` at its newest published epoch."""

    pipeline: str
    root: str
    look: Look
    epoch: Epoch

    def tables(self, wanted: Sequence[str]) -> list[str]:
        """`wanted`; none: every table of the pipeline."""
        return sorted(wanted or (name for name, table in self.look.tables.items() if table.state != "removed"))

    def why_not(self, tables: Sequence[str]) -> str:
        """Which of `tables` the epoch does not show as the source had it, and why; empty when it shows all."""
        for name in tables:
            table = self.look.tables.get(name)
            if table is None:
                return f"{name} is not loaded"
            if table.state != IN_STEP:
                return f"{name} is {table.state}" + (f": {table.reason}" if table.reason else "")
            if not self.epoch.shows(name):
                return f"{name}: {NOT_YET_SHOWN}"
        return ""

    def positions(self, tables: Sequence[str]) -> dict[str, int]:
        """Up to which LSN each holds its changes. Rearranged files are no movement: that stays as it is."""
        return {name: self.epoch.tables[name].applied_lsn for name in tables}

    def moved(self, tables: Sequence[str], since: Mapping[str, int]) -> list[str]:
        """Those whose position is another one than in `since`."""
        return [name for name, lsn in self.positions(tables).items() if since.get(name) != lsn]

    def complete_until(self, tables: Sequence[str]) -> datetime | None:
        """The moment, by the source's clock, before which nothing of `tables` is missing; None: no sample tells."""
        file = self.look.file
        return complete_until(file, self._covered(tables)) if file is not None else None

    @property
    def source_clock(self) -> datetime | None:
        """As a driver has read it last; None: no sample tells."""
        samples = samples_of(self.look.file) if self.look.file is not None else []
        return samples[-1][0] if samples else None

    def pinned(self, tables: Sequence[str], owner: str, keep_seconds: float) -> dict[str, Any]:
        """The cut of `tables`, kept for `keep_seconds`. Refused, code `cannot_pin`, when the lake cannot be written."""
        cut = take_cut(self.root, self.pipeline, self.look, self.epoch, tables, self._covered(tables))
        pin = pin_cut(self.root, cut, owner, deadline_in(keep_seconds))
        return {**cut, "pin": {"id": pin.id, "expiry": time_text(pin.expiry)}}

    def _covered(self, tables: Sequence[str]) -> int:
        """Up to where the newest epoch holds every commit on all of `tables`."""
        return min(map(self.look.covered, tables), default=self.epoch.position.lsn)


class Movements:
    """Looks at one lake again and again. Not thread-safe."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._root = pipeline.name, pipeline.lake_path()
        self._reader = LakeReader(self._root, pipeline.name)

    def look(self) -> Sight | None:
        """One look; None when nothing was ever published. Refused when the root belongs to another pipeline."""
        look = self._reader.look()
        if look.file is None or look.file.epoch == 0:
            return None
        return Sight(self._pipeline, self._root, look, self._reader.epoch(look.file.epoch))
