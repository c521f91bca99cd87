"""Which table a relation of the log belongs to, by its id. What becomes of an unknown one is decided in
`headwater.replicate.tables.owners`.

Whether it still has the columns that the registry knows is `headwater.columns.changes`' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headwater.lake.registry import TableRecord
from headwater.log.blocks import Relation
from headwater.schema import Leaf


class RelationIds:
    """The relations of `tables`, which changes below us."""

    def __init__(self, tables: Mapping[str, TableRecord]) -> None:
        self._tables = tables
        self._owner: dict[int, str] = {}
        self._foreign: set[int] = set()
        self._former_names: set[tuple[int, str, str]] = set()
        for record in tables.values():
            self.adopt(record)

    def adopt(self, record: TableRecord, before: TableRecord | None = None) -> None:
        """The changes of the table belong to it from now on. `before`: the record as it was; what it had then and is
        another table's by now stays that one's."""
        if record.schemas and record.state != "removed":
            had = (
                {leaf.relation_id for leaf in before.schema.leaves} if before is not None and before.schemas else set()
            )
            for leaf in record.schema.leaves:
                if leaf.relation_id not in had or leaf.relation_id not in self._owner:
                    self.own(leaf.relation_id, record.name)
            if record.schema.partitioned:  # else it is its own leaf, or that of another table by now
                self.own(record.schema.relation_id, record.name)

    def own(self, relation_id: int, name: str) -> None:
        """The relation belongs to the table from now on."""
        self._owner[relation_id] = name
        self._foreign.discard(relation_id)

    def leave(self, relation_id: int) -> None:
        """The relation belongs to nobody, as far as is known."""
        self._owner.pop(relation_id, None)

    def renamed(self, leaf: Leaf) -> None:
        """The relation has another name than `leaf` by now; changes that the log holds may still say that one."""
        self._former_names.add((leaf.relation_id, leaf.schema, leaf.name))

    def was_named(self, relation: Relation) -> bool:
        """Whether the relation had this name while this driver ran."""
        return (relation.relation_id, relation.schema, relation.name) in self._former_names

    def owner(self, relation_id: int) -> str | None:
        """The table that the relation belongs to; None: none of ours, or not known yet."""
        return self._owner.get(relation_id)

    def owners(self, relation_ids: Iterable[int]) -> set[str]:
        """The tables that changes of these relations may belong to: of a relation not met before, any of ours."""
        found: set[str] = set()
        for relation_id in relation_ids:
            owner = self._owner.get(relation_id)
            if owner is not None:
                found.add(owner)
            elif relation_id not in self._foreign:
                return set(self._tables)
        return found

    def disown(self, relation_id: int) -> None:
        """The relation was looked up, and is none of ours: the publication holds more than this pipeline."""
        self._foreign.add(relation_id)

    def named_as(self, relation: Relation | Leaf) -> list[tuple[str, Leaf]]:
        """The relations of ours that have the name of another one, as far as is known, each with its table: one that
        was dropped or renamed."""
        return [
            (name, leaf)
            for name, record in list(self._tables.items())
            if record.schemas
            for leaf in record.schema.leaves
            if (leaf.schema, leaf.name) == (relation.schema, relation.name) and leaf.relation_id != relation.relation_id
        ]
