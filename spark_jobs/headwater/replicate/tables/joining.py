"""Tables that are followed and yet in no cut: when they may join the cuts again.

A loaded table joins when it holds all that was kept for it and the position has reached its capture point; one that a
reload has put right, when a row knows of that. The main thread decides; lanes say what they have done.
"""

from __future__ import annotations

from collections.abc import Collection

from headwater.lake.registry import TableRecord
from headwater.replicate.tables.owners import awaiting
from headwater.replicate.tables.states import TableStates


class Joining:
    def __init__(self, states: TableStates) -> None:
        self._states = states
        self.catching_up: set[str] = set()
        """Loaded tables that do not hold yet what was kept for them, as far as the main thread knows."""
        self._rejoining: set[str] = set()  # tables that were put right by what no row knows of yet

    def put_right(self, name: str, leaves: Collection[int]) -> bool:
        """In its lane: these partitions hold the rows of the source. Whether the table, which was suspended for want of
        them, may join the cuts again (`rejoins`)."""
        unread = self._states.records[name].unread
        left = [leaf for leaf in unread if leaf not in leaves]
        if len(left) == len(unread):
            return False
        self._rejoining |= {name} if not left else set()  # not before the row that says of these rows

        def how(record: TableRecord) -> TableRecord | None:
            if not record.is_followed:
                return None  # it was suspended for something else since
            known = [leaf for leaf in record.schema.leaves if leaf.relation_id in left]
            return awaiting(record, known) if left else record.entered("catching up")

        self._states.change(name, how)
        self._states.changed(name)
        return not left

    def rejoins(self, name: str) -> None:
        """The next row knows of what has put the table right."""
        self._rejoining.discard(name)
        self._states.changed(name)

    def join_cuts(self, lsn: int) -> None:
        """Tables whose capture point the position has reached, and that hold all that was kept for them, become
        active: from this row on they are in cuts."""

        def may_join(record: TableRecord) -> bool:
            unsettled = record.name in self.catching_up or record.name in self._rejoining
            if record.state != "catching up" or unsettled or not self._states.next_row.is_settled(record.name):
                return False
            return record.capture is not None and record.capture.lsn <= lsn

        self._states.activate([record.name for record in list(self._states.records.values()) if may_join(record)])
