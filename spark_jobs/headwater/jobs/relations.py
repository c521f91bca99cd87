"""Which table a relation of the log belongs to, and whether it still is what the registry knows.

A Relation message carries names and types, no attnum. It must agree with the registry before any row is decoded;
whatever differs suspends the table, because a guess would put values under the wrong column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from headwater.errors import SchemaChanged
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Relation
from headwater.names import TableName
from headwater.schema import Leaf
from headwater.source.connection import Connection, errors_named


class Relations:
    """The relations of the pipeline's tables, by relation id."""

    def __init__(self, tables: dict[str, TableRecord]) -> None:
        self._tables = tables
        self._owner: dict[int, str] = {}
        self._foreign: set[int] = set()
        for name, record in tables.items():
            self.adopt(name, record)

    def adopt(self, name: str, record: TableRecord) -> None:
        if record.schemas and record.state != "removed":
            for leaf in record.schema.leaves:
                self.own(leaf.relation_id, name)
            self.own(record.schema.relation_id, name)

    def own(self, relation_id: int, name: str) -> None:
        """The relation belongs to the table from now on."""
        self._owner[relation_id] = name
        self._foreign.discard(relation_id)

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

    def owner_by_name(self, relation: Relation) -> str | None:
        """A table of ours with the name of an unknown relation: it was dropped and made again."""
        for name, record in self._tables.items():
            if record.schemas and any(
                (leaf.schema, leaf.name) == (relation.schema, relation.name) for leaf in record.schema.leaves
            ):
                return name
        return None


def refuse_difference(record: TableRecord, relation: Relation) -> None:
    """SchemaChanged unless `relation` is the registered one: same name, columns, types."""
    schema = record.schema
    again = f"headwater load PIPELINE.yaml --table {record.name} --again"

    def changed(what: str, remedy: str = again) -> SchemaChanged:
        return SchemaChanged(what, where=record.name, remedy=remedy)

    leaf = next((leaf for leaf in schema.leaves if leaf.relation_id == relation.relation_id), None)
    if leaf is None:
        raise changed("the table was dropped and created again at the source")
    if (leaf.schema, leaf.name) != (relation.schema, relation.name):
        now = TableName(relation.schema, relation.name)
        remedy = again if schema.partitioned else f"name {now} in the pipeline file, then headwater load PIPELINE.yaml"
        raise changed(f"{TableName(leaf.schema, leaf.name)} was renamed to {now} at the source", remedy)
    known = {column.name: (column.type_oid, column.typmod) for column in schema.columns}
    seen = {column.name: (column.type_oid, column.typmod) for column in relation.columns}
    added = sorted(set(seen) - set(known))
    gone = sorted(set(known) - set(seen))
    retyped = sorted(name for name in set(known) & set(seen) if known[name] != seen[name])
    differences = [
        *([f"new columns {', '.join(added)}"] if added else []),
        *([f"columns gone: {', '.join(gone)}"] if gone else []),
        *([f"other types: {', '.join(retyped)}"] if retyped else []),
    ]
    if differences:
        raise changed(f"its columns changed at the source ({'; '.join(differences)})")
    carried = {column.name for column in relation.columns if column.identity}
    if not schema.insert_only and not set(schema.key) <= carried:
        missing = ", ".join(sorted(set(schema.key) - carried))
        raise changed(f"its replica identity does not carry the key any more (missing: {missing})")


def new_leaf(connection: Connection, relation: Relation) -> tuple[int, Leaf] | None:
    """(root's relation id, leaf) when the unknown `relation` is a partition that was created as one.

    An attached table brings rows that the log never carried: it is told apart by its pg_inherits entry being younger
    than the relation itself, and SchemaChanged asks for a reload. None: the relation is no partition.
    """
    with errors_named("source"):
        row = connection.execute(
            """
            select root.oid::bigint, above.nspname, root.relname, n.nspname, c.relname,
                   coalesce(pg_relation_filenode(c.oid), 0)::bigint, c.relreplident,
                   i.xmin = a.xmin as created_as_partition
            from pg_catalog.pg_class c
            join pg_catalog.pg_namespace n on n.oid = c.relnamespace
            join pg_catalog.pg_inherits i on i.inhrelid = c.oid
            join pg_catalog.pg_class root on root.oid = pg_partition_root(c.oid)
            join pg_catalog.pg_namespace above on above.oid = root.relnamespace
            join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = 'tableoid' and a.attnum < 0
            where c.oid = %s and c.relispartition
            """,
            [relation.relation_id],
        ).fetchone()
    if row is None:
        return None
    root, root_schema, root_name, schema, name, filenode, identity, created = row
    if not created:
        raise SchemaChanged(
            f"the partition {TableName(schema, name)} was attached: the log does not carry the rows it brought",
            remedy=f"headwater load PIPELINE.yaml --table {TableName(root_schema, root_name)} --again",
        )
    identity = identity.decode() if isinstance(identity, bytes) else identity
    return int(root), Leaf(relation.relation_id, schema, name, int(filenode), identity)


def with_leaf(record: TableRecord, leaf: Leaf) -> TableRecord:
    lsn, schema = record.schemas[-1]
    return replace(record, schemas=(*record.schemas[:-1], (lsn, schema.with_leaves((*schema.leaves, leaf)))))
