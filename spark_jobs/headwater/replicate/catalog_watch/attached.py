"""Partitions that were attached, moved or renamed, seen in the catalog: the log tells of one by its first change, which
may never come, and of one that is another table's by now it tells nothing.

Whether they brought rows is judged by the same marks as there (`headwater.replicate.tables.owners`), so it does not
matter who is first. That one brought none can be seen here alone, as long as nothing was written to it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from headwater.errors import Transient
from headwater.lake.registry import TableRecord
from headwater.names import TableName
from headwater.replicate.catalog_watch.facts import CatalogFacts
from headwater.schema import Leaf
from headwater.source.catalog.partitions import look_at_attached
from headwater.source.connection import Connection


class Moved(NamedTuple):
    """The relation belongs to the table `former`, for the registry, and to the table `to` for the catalog."""

    relation_id: int
    former: str
    to: str


class Attached:
    """One thread at a time looks, another one may `take`."""

    def __init__(self) -> None:
        self._judged: set[tuple[int, int]] = set()  # partitions that brought nothing, and who attached them
        self._waiting: set[str] = set()  # tables out of step that have unknown partitions
        self._found: dict[str, list[Leaf]] = {}
        self._empty: list[tuple[TableRecord, Leaf, int]] = []
        self._renamed: dict[str, dict[int, TableName]] = {}
        self._moved: list[Moved] = []
        self._lock = threading.Lock()

    def take(self) -> dict[str, list[Leaf]]:
        """By table the partitions with rows that were found since the last call."""
        with self._lock:
            found, self._found = self._found, {}
        return found

    def take_empty(self) -> list[tuple[TableRecord, Leaf, int]]:
        """The partitions that were seen empty since the last call: of which table, as it was then, and behind which
        LSN (`headwater.source.catalog.partitions.Looked`)."""
        with self._lock:
            empty, self._empty = self._empty, []
        return empty

    def take_renamed(self) -> dict[str, dict[int, TableName]]:
        """By table the names of partitions that have other ones since they were registered, by relation id."""
        with self._lock:
            renamed, self._renamed = self._renamed, {}
        return renamed

    def take_moved(self) -> list[Moved]:
        """What the last look found to be another table's by now."""
        with self._lock:
            moved, self._moved = self._moved, []
        return moved

    def is_due(self, tables: Mapping[str, TableRecord]) -> bool:
        """Whether a table that could not be judged is in step by now."""
        return any(name in tables and _is_in_step(tables[name]) for name in self._waiting)

    def look(self, connection: Connection, tables: Mapping[str, TableRecord], facts: CatalogFacts) -> bool:
        """Whether all could be judged."""
        known = {leaf.relation_id for record in tables.values() for leaf in record.schema.leaves}
        self._waiting = set()
        is_judged = not self._note_moved(tables, facts)
        for name, record in tables.items():
            self._note_names(record, facts)
            root = facts.relations.get(record.schema.relation_id)
            unknown = [h.relation_id for h in facts.holders(root) if h.relation_id not in known] if root else []
            if unknown and not _is_in_step(record):
                self._waiting.add(name)
            elif unknown:
                is_judged &= self._judge(connection, record, unknown)
        return is_judged

    def _note_moved(self, tables: Mapping[str, TableRecord], facts: CatalogFacts) -> bool:
        """Relations that one table is registered with and that lie below another one now, and tables that do so
        themselves. Whether some of these can change hands now: then the next look judges what they brought there."""
        roots = {r.schema.relation_id: name for name, r in tables.items() if r.state != "removed"}
        inner = {i for root in roots for i in facts.below.get(root, ())}
        owners = {i: name for root, name in roots.items() if root not in inner for i in facts.below.get(root, ())}
        moved = []
        for name, record in tables.items():
            root, state = record.schema.relation_id, record.state
            ids = [leaf.relation_id for leaf in record.schema.leaves if owners.get(leaf.relation_id, name) != name]
            if root in owners and state != "removed":
                self._waiting.add(name)  # whatever puts it in step again, it is not a table of its own
                if record.is_followed and root not in ids:
                    ids.insert(0, root)  # all of it, and not this or that partition
            moved += [Moved(i, name, owners[i]) for i in ids if state != "loading"]
            self._waiting |= {name} if ids and state == "loading" else set()
        held = {one.to for one in moved if tables[one.to].state in ("loading", "catching up")}
        self._waiting |= held
        with self._lock:
            self._moved = moved
        return any(one.to not in held for one in moved)

    def _note_names(self, record: TableRecord, facts: CatalogFacts) -> None:
        """Of partitions, not of what was one: whatever takes its name has taken its place."""
        below = set(facts.below.get(record.schema.relation_id, ()))
        renamed = {}
        for leaf in record.schema.leaves:
            now = facts.relations.get(leaf.relation_id) if leaf.relation_id in below else None
            if now is not None and now.name != TableName(leaf.schema, leaf.name):
                renamed[leaf.relation_id] = now.name
        if renamed and record.state != "loading":
            with self._lock:
                self._renamed[record.name] = renamed

    def _judge(self, connection: Connection, record: TableRecord, unknown: list[int]) -> bool:
        try:
            seen = look_at_attached(connection, unknown, self._judged)
        except Transient:
            if connection.closed:
                raise
            return False
        with self._lock:
            self._empty += [(record, leaf, seen.lsn) for leaf in seen.empty]
            if seen.brought:
                self._found[record.name] = seen.brought
        return True


def _is_in_step(record: TableRecord) -> bool:
    """Or but for other partitions. What is kept for a table that catches up is applied as if none were missing."""
    return record.state == "active" or bool(record.unread)
