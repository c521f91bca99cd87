"""The horizon of each table: the oldest version that somebody may still read. Clean-up stops there.

It is the oldest of: the versions that live pins name; those of every epoch that was the newest one at some moment of
the last `lake.keep_cuts` (whoever took a cut then and has no pin, yet); and the version that was current that long ago
(whoever reads a table plainly, and an epoch that is still to be published). From the horizon on every version stays.

All parts are read before anything is removed, and a pin that comes later names an epoch of the last `keep_cuts` or
newer: none is ever needed below a horizon that was true when it was taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from threading import Lock

from headwater.delta.log_files import LogFiles
from headwater.lake.cuts import PinReader
from headwater.lake.ledger import oldest_versions
from headwater.lake.looks import often

LOG_SECONDS = 3600.0
"""Log entries stay so long even where cuts are kept for less: a writer that was stopped for a while, and then commits
the next version of the one that it had read, must find that name taken."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """`version`, and what keeps it. `log_from`: the log itself is kept from this version on."""

    version: int
    because: str
    log_from: int


@dataclass(frozen=True, slots=True)
class Horizons:
    """What pins and ledger said at one moment, for all tables of a lake."""

    now: datetime
    since: datetime
    published: Mapping[str, int]
    pinned: Mapping[str, tuple[int, str]]

    @classmethod
    def read(
        cls,
        root: str,
        keep_cuts: float,
        now: datetime | None = None,
        before: Horizons | None = None,
        pins: PinReader | None = None,
    ) -> Horizons:
        """`keep_cuts`: seconds. `before`: what was read some time ago, of which the ledger's part still does. `pins`:
        who has read them. Refused when a pin cannot be read: it may keep anything."""
        moment = now or datetime.now(UTC)
        # Pins first: one that is made after this look has its epoch in the second.
        pinned: dict[str, tuple[int, str]] = {}
        for pin in (pins or PinReader(root)).look():
            if pin.expiry <= moment:
                continue
            for name, version in pin.versions.items():
                if name not in pinned or version < pinned[name][0]:
                    pinned[name] = version, f"pin {pin.id} of {pin.owner}"
        if before is not None:
            return replace(before, pinned=pinned)
        since = moment - timedelta(seconds=keep_cuts)
        return cls(moment, since, oldest_versions(root, since, moment), pinned)

    def of(self, name: str, log: LogFiles) -> Horizon | None:
        """The horizon of table `name`; None when no epoch holds the table yet: its history is still to be looked
        at by the driver that takes it in."""
        published = self.published.get(name)
        if published is None:
            return None
        found = [
            (published, "lake.keep_cuts, an epoch"),
            (log.current_at(self.since.timestamp()), "lake.keep_cuts, the version of that time"),
        ]
        pin = self.pinned.get(name)
        version, because = min([*found, *([pin] if pin is not None else [])], key=lambda one: one[0])
        if version < log.oldest_readable:
            version, because = log.oldest_readable, "older versions cannot be read any more"
        version = min(version, log.newest)
        return Horizon(version, because, min(version, log.current_at(self.now.timestamp() - LOG_SECONDS)))


class RecentHorizons:
    """Horizons whose ledger is read again now and then (`headwater.lake.looks`), and not before a hundredth of
    `keep_cuts` has passed, which says how much there is to read: one reading serves many tables. An old one is low: it
    takes too little, never too much. Of pins what is new is read each time, as nothing else may keep a pinned cut."""

    def __init__(self, root: str, keep_cuts: float) -> None:
        self._root, self._keep_cuts, self.pins = root, keep_cuts, PinReader(root)
        self._found: Horizons | None = None
        self._read_at = 0.0
        self._reads = Lock()

    def read(self) -> Horizons:
        with self._reads:
            before = self._found
            age = time.monotonic() - self._read_at
            if before is None or age > max(often(self._root).horizon, self._keep_cuts / 100):
                self._read_at = time.monotonic()
                self._found = Horizons.read(self._root, self._keep_cuts, pins=self.pins)
                return self._found
        return Horizons.read(self._root, self._keep_cuts, before=before, pins=self.pins)
