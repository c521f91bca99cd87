"""Which files rewrites of tables have made whose values the log does not carry, until what came of them is registered.

The log tells that DDL has written a relation anew, and not with which values. One look at the catalog later it is known
which files these are; a TRUNCATE makes others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headwater.lake.registry import TableRecord
from headwater.replicate.catalog_watch.facts import CatalogFacts


class Rewrites:
    """One thread at a time."""

    def __init__(self) -> None:
        self._told: set[int] = set()  # relations that DDL has written anew, as the log has said since the last look
        self._marked: dict[int, int] = {}  # by relation the files that such DDL made
        self._newest: dict[int, int] = {}  # the highest attnum of each table at the last look
        self._for_generated: dict[int, int] = {}  # by relation the files that came with a generated column

    @property
    def marked(self) -> Collection[int]:
        """Relations whose values the log did not carry."""
        return self._marked.keys()

    def told(self, relations: Collection[int]) -> None:
        """The log has said that DDL wrote these anew."""
        self._told |= set(relations)

    def suspects(self, tables: Mapping[str, TableRecord]) -> list[TableRecord]:
        """Tables that DDL has written anew: judged again when the registry knows more of them."""
        suspects = self._told | set(self._marked)
        return [r for r in tables.values() if any(leaf.relation_id in suspects for leaf in r.schema.leaves)]

    def note_generated(self, tables: Mapping[str, TableRecord], facts: CatalogFacts) -> None:
        """Which files were made for a generated column, which may never come with the log: they hold the values that
        the table had. A later rewrite makes others."""
        for record in tables.values():
            root = facts.relations.get(record.schema.relation_id)
            if root is None:
                continue
            newest = self._newest.get(root.relation_id, record.schema.last_attnum)
            self._newest[root.relation_id] = max((a.attnum for a in root.attributes), default=0)
            if any(a.generated == "s" and a.attnum > newest for a in root.attributes):
                holders = (facts.relations.get(leaf.relation_id) for leaf in record.schema.leaves)
                self._for_generated |= {h.relation_id: h.filenode for h in holders if h is not None}

    def mark(self, records: Mapping[str, TableRecord], facts: CatalogFacts) -> None:
        """Note which files the rewrites that the log has told of have made, and forget what is registered by now: by
        what followed, or what was compared. Later files are a TRUNCATE's, or hold the same values."""
        loading = any(record.state == "loading" for record in records.values())
        for record in records.values():
            if record.state == "loading" or not record.schemas:
                continue
            for leaf in record.schema.leaves:
                relation = facts.relations.get(leaf.relation_id)
                if relation is None:
                    continue
                files = relation.filenode
                if leaf.relation_id in self._told:
                    self._told.discard(leaf.relation_id)
                    if files != self._for_generated.get(leaf.relation_id):
                        self._marked[leaf.relation_id] = files
                if leaf.relfilenode in (files, self._marked.get(leaf.relation_id)):
                    self._marked.pop(leaf.relation_id, None)
        if not loading:
            self._told.clear()  # relations that are no tables of ours
        # Else: a load that ends now may have looked before the rewrite, and its record says with which files.
