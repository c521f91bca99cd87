"""Ending hand-overs: from when on the visibility of a load's snapshot does not matter any more."""

from __future__ import annotations

import time
from dataclasses import replace

from headwater.lake.registry import Capture, Registry, TableRecord
from headwater.source.connection import Connection, Session
from headwater.source.snapshots import VisibilitySnapshot, handover_end

HANDOVER_SECONDS = 5.0


def finish_handovers(connection: Connection, registry: Registry) -> None:
    """Note where visibility stops to matter, for tables whose concurrent transactions have all ended; the others are
    asked again later."""
    ended: dict[str, tuple[Capture, Capture]] = {}
    for record in list(registry.tables.values()):
        if (asked := record.capture) is not None and asked.handover_end is None:
            end = handover_end(connection, VisibilitySnapshot.parse(asked.snapshot))
            if end is not None:
                ended[record.name] = asked, replace(asked, handover_end=end)

    def noted(record: TableRecord) -> TableRecord | None:
        asked, now = ended[record.name]
        # A load may have taken another capture point since that was asked.
        return replace(record, capture=now) if record.capture == asked else None

    registry.change_each(list(ended), noted)


class Handovers:
    """Notes where visibility stops to matter for tables whose concurrent transactions have ended by now.

    A driver may run longer than transaction ids take to wrap, and then a snapshot would seem to have seen new ones.
    """

    def __init__(self, session: Session, registry: Registry) -> None:
        self._session = session
        self._registry = registry
        self._asked = 0.0

    def finish(self) -> None:
        self._asked = time.monotonic()
        self._session.ask(lambda connection: finish_handovers(connection, self._registry))

    def finish_if_due(self) -> None:
        if time.monotonic() - self._asked >= HANDOVER_SECONDS:
            self.finish()
