"""What later looks, and the next driver, compare the catalog with: meanings of types, and files of tables."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from headwater.lake.registry import TableRecord
from headwater.replicate.catalog_watch.facts import CatalogFacts


class Learned:
    """One thread at a time learns, another one may `take`."""

    def __init__(self) -> None:
        self.files_seen: dict[int, int] = {}
        """By relation the newest files under the columns that are registered."""
        self._meanings: dict[tuple[str, int], dict[str, str]] = {}  # by name and incarnation, with those that came
        self._new: dict[str, tuple[tuple[str, str], ...]] = {}  # meanings that came since the last `take`
        self._lock = threading.Lock()

    def take(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """By table all its meanings, where some came since the last call."""
        with self._lock:
            new, self._new = self._new, {}
        return new

    def learn(self, tables: Mapping[str, TableRecord], facts: CatalogFacts) -> None:
        """Meanings that came (a new label changes no value), and files that were there before any column that is not
        registered yet."""
        for name, record in tables.items():
            root = facts.relations.get(record.schema.relation_id)
            if record.state == "loading" or root is None:
                continue
            known = self.meanings(record)
            if came := facts.meanings_of(record).keys() - known.keys():
                known |= {key: value for key, value in facts.meanings_of(record).items() if key in came}
                with self._lock:
                    self._new[name] = tuple(sorted(known.items()))
            now = {(a.attnum, a.type_oid, a.typmod) for a in root.attributes}
            registered = {(c.attnum, c.type_oid, c.typmod) for c in record.schema.columns}
            if root.last_attnum == record.schema.last_attnum and registered <= now:
                holders = (facts.relations.get(leaf.relation_id) for leaf in record.schema.leaves)
                self.files_seen |= {holder.relation_id: holder.filenode for holder in holders if holder is not None}

    def meanings(self, record: TableRecord) -> dict[str, str]:
        """Registered ones, and those that came since."""
        known = self._meanings.setdefault((record.name, record.incarnation), {})
        known |= record.schema.meanings
        return known
