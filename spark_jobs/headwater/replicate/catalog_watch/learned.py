"""What later looks, and the next driver, compare the catalog with: meanings of types, files and columns of tables."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from headwater.lake.registry import TableRecord
from headwater.replicate.catalog_watch.facts import CatalogFacts
from headwater.source.catalog.relations import CatalogRelation


class Learned:
    """One thread at a time learns, another one may `take`."""

    def __init__(self) -> None:
        self.files_seen: dict[int, int] = {}
        """By relation the newest files under the columns that are registered."""
        self.columns_seen: dict[int, int] = {}
        """By relation the newest attnum of a virtual column, where others came after the registered ones: it holds no
        values, and so it may go again."""
        self._meanings: dict[tuple[str, int], dict[str, str]] = {}  # by name and incarnation, with those that came
        self._new: dict[str, tuple[tuple[str, str], ...]] = {}  # meanings that came since the last `take`
        self._lock = threading.Lock()

    def take(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """By table all its meanings, where some came since the last call, or such a column."""
        with self._lock:
            new, self._new = self._new, {}
        return new

    def learn(self, tables: Mapping[str, TableRecord], facts: CatalogFacts) -> None:
        """Meanings that came (a new label changes no value), virtual columns, and files that were there before any
        other column that is not registered yet."""
        for name, record in tables.items():
            root = facts.relations.get(record.schema.relation_id)
            if record.state == "loading" or root is None:
                continue
            known = self.meanings(record)
            came = facts.meanings_of(record).keys() - known.keys()
            known |= {key: value for key, value in facts.meanings_of(record).items() if key in came}
            last = _newest_known(record, root)
            has_new_columns = last > max(record.schema.last_attnum, self.columns_seen.get(root.relation_id, 0))
            if has_new_columns:
                self.columns_seen[root.relation_id] = last
            if came or has_new_columns:
                with self._lock:
                    self._new[name] = tuple(sorted(known.items()))
            now = {(a.attnum, a.type_oid, a.typmod) for a in root.attributes}
            registered = {(c.attnum, c.type_oid, c.typmod) for c in record.schema.columns}
            if root.last_attnum == last and registered <= now:
                holders = (facts.relations.get(leaf.relation_id) for leaf in record.schema.leaves)
                self.files_seen |= {holder.relation_id: holder.filenode for holder in holders if holder is not None}

    def meanings(self, record: TableRecord) -> dict[str, str]:
        """Registered ones, and those that came since."""
        known = self._meanings.setdefault((record.name, record.incarnation), {})
        known |= record.schema.meanings
        return known


def _newest_known(record: TableRecord, root: CatalogRelation) -> int:
    """Up to which attnum there is no column that the log may bring and nobody has registered. Stored generated columns
    are none of these: they come with a rewrite, and may become ordinary ones."""
    last = record.schema.last_attnum
    virtual = {attribute.attnum for attribute in root.attributes if attribute.generated == "v"}
    while last + 1 in virtual:
        last += 1
    return last
