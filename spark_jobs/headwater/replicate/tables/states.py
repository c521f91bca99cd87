"""The state of each table: as this driver goes by it, in the registry, and in the next ledger row.

What one driver knows of its tables begins here: their records, their relations, where they stand. Who reads a state
asks `is_followed`; who changes one does it here, so that it is entered everywhere, or nowhere when a newer driver or
another job has the table by now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from headwater.errors import TableError
from headwater.lake.cuts import table_of
from headwater.lake.ledger import Ledger
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry, TableRecord
from headwater.replicate.tables.next_row import NextRow
from headwater.replicate.tables.relation_ids import RelationIds
from headwater.replicate.tables.versions import TableVersions

log = logging.getLogger(__name__)

Change = Callable[[TableRecord], TableRecord | None]
"""What becomes of a record; None: it stays as it is."""


class TableStates:
    """From any thread."""

    def __init__(self, root: str, registry: Registry, ledger: Ledger) -> None:
        self._root, self._registry, self._ledger = root, registry, ledger
        self._records = dict(registry.tables)
        self._entering = threading.Lock()
        self.relations = RelationIds(self._records)
        self.versions = TableVersions()
        self.next_row = NextRow(self.owner)

    @property
    def records(self) -> dict[str, TableRecord]:
        """The tables as this driver goes by them. Any write of any thread may read the registry again, and with it what
        other jobs have entered; that counts when it is followed (`see`), or a batch would leave out a table of which
        the next row still says that it is in step."""
        return self._records

    def owner(self, name: str) -> TableRecord:
        """The table's record, also by the name of its history."""
        return self._records[table_of(name)]

    def folder(self, record: TableRecord) -> str:
        """Of the lake's table."""
        return table_path(self._root, record.path)

    def is_followed(self, name: str) -> bool:
        """Whether this driver applies the table's changes."""
        return self._records[name].is_followed

    def followed(self) -> list[str]:
        return [name for name in list(self._records) if self.is_followed(name)]

    def see_all(self) -> None:
        """Before there are lanes: what the registry said when it was read last counts from now on."""
        self._records.update(self._registry.tables)

    def see(self, record: TableRecord) -> None:
        """What another job has entered counts from now on."""
        with self._entering:  # or a lane's word, since `record` was read, would be undone
            self._records[record.name] = self._registry.tables.get(record.name, record)

    def see_details(self, name: str) -> bool:
        """The same, unless its state is news that is yet to be followed; whether there is another reason for it."""
        with self._entering:
            known, now = self._records.get(name), self._registry.tables.get(name)
            if known is None or now is None or known.phase != now.phase:
                return False
            self._records[name] = now
            return known.reason != now.reason

    def check_fence(self) -> None:
        """Fenced when another driver has taken over: before anything that a driver does by what it believes."""
        self._ledger.check_fence()

    def read_again(self) -> None:
        """What others have entered into the registry; each counts when it is seen."""
        self.check_fence()
        self._registry.refresh()

    def suspend(self, name: str, error: TableError, how: Change | None = None, *, again: bool = False) -> bool:
        """The one way into the state "suspended", whoever asks; False: the table was not followed any more, and keeps
        its reason. `how`: what becomes of a table of which a part is followed all the same. `again`: one that is
        suspended already gets this reason, beside which no other counts."""
        if not again and not self.is_followed(name):
            return False
        self.check_fence()  # what a fenced driver believes of a table is of no interest any more
        log.error("%s: suspended: %s", name, error)

        def suspended(record: TableRecord) -> TableRecord | None:
            if record.state not in ("active", "catching up", "suspended"):
                return None  # a load has taken it over since
            return how(record) if how is not None else record.entered("suspended", error.message, error.remedy)

        self._enter([name], suspended)
        self.changed(name)
        return True

    def activate(self, names: Sequence[str]) -> None:
        """The tables, which were catching up, are in the cuts from the next row on."""
        self.change_each(names, lambda record: record.entered("active") if record.state == "catching up" else None)
        for name in names:
            self.changed(name)

    def remark(self, name: str, reason: str) -> None:
        """Something is to be known of the table, whose state stays what it is."""
        self._enter([name], lambda record: replace(record, reason=reason))

    def change(self, name: str, how: Change) -> None:
        """What else the registry says of the table."""
        self.change_each([name], how)

    def change_each(self, names: Sequence[str], how: Change) -> None:
        """The same of several tables, at once."""
        if names:
            self.check_fence()
            self._enter(names, how)

    def changed(self, name: str) -> None:
        """The next row says the table's state."""
        self.next_row.state_changed(self.versions.of(name))

    def _enter(self, names: Sequence[str], how: Change) -> None:
        """In the registry, and in what this driver goes by. Where another job has entered another state meanwhile,
        which is yet to be followed, in the latter alone: the table is that job's by now."""
        with self._entering:
            known = {name: self._records[name] for name in names}
            ours: dict[str, TableRecord | None] = {}

            def unless_overtaken(now: TableRecord) -> TableRecord | None:
                before = known[now.name]
                overtaken = now.phase != before.phase
                ours[now.name] = how(before if overtaken else now)
                return None if overtaken else ours[now.name]

            self._registry.change_each(names, unless_overtaken)
            self._records.update({name: record for name, record in ours.items() if record is not None})
            for name in names:
                self.relations.adopt(self._records[name], known[name])  # partitions may have come
