"""Which table a relation of the log belongs to.

Whether it still has the columns that the registry knows is `headwater.columns.changes`' business.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from headwater.lake.registry import TableRecord, now_text
from headwater.log.blocks import Relation
from headwater.names import TableName
from headwater.schema import Leaf
from headwater.source.connection import Connection, errors_named

_LINKED_LATER: Final = """
exists (select from pg_catalog.pg_partition_ancestors(c.oid) up (relid)
        join pg_catalog.pg_inherits i on i.inhrelid = up.relid where age(i.xmin) < age(a.xmin))
"""
_LEAF: Final = f"""
c.oid::bigint, n.nspname, c.relname, coalesce(pg_relation_filenode(c.oid), 0)::bigint, c.relreplident,
not {_LINKED_LATER} as created_as_partition
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = 'tableoid' and a.attnum < 0
where c.relispartition
"""


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


def new_leaf(connection: Connection, relation: Relation) -> tuple[int, Leaf, bool] | None:
    """(root's relation id, leaf, whether it was created as a partition) of the unknown `relation`.

    An attached table brings rows that the log never carried, and so does one below a tree that was attached: it is told
    apart by a pg_inherits entry that is younger than the relation. None: the relation is no partition.
    """
    with errors_named("source"):
        row = connection.execute(
            f"select pg_partition_root(c.oid)::oid::bigint, {_LEAF} and c.oid = %s", [relation.relation_id]
        ).fetchone()
    return (int(row[0]), *_leaf(*row[1:])) if row is not None else None


def attached_leaves(connection: Connection, record: TableRecord) -> list[Leaf]:
    """The partitions of the table, as it is now at the source, that the lake has not met and that brought rows."""
    known = [leaf.relation_id for leaf in record.schema.leaves]
    with errors_named("source"):
        rows = connection.execute(
            f"select {_LEAF} and c.relkind = 'r' and c.oid <> all(%s) "
            "and c.oid in (select relid from pg_catalog.pg_partition_tree(%s::oid))",
            [known, record.schema.relation_id],
        ).fetchall()
    return [leaf for leaf, created in (_leaf(*row) for row in rows) if not created]


def attached_message(leaves: Sequence[Leaf]) -> str:
    """Why a table with these partitions is not in step."""
    names = ", ".join(str(TableName(leaf.schema, leaf.name)) for leaf in leaves)
    what, whose = ("partition {} was", "it") if len(leaves) == 1 else ("partitions {} were", "they")
    return f"the {what.format(names)} attached: the log does not carry the rows {whose} brought"


def awaiting(record: TableRecord, leaves: Sequence[Leaf]) -> TableRecord:
    """The table suspended until its attached partitions `leaves` are reloaded, and followed meanwhile."""
    known = {leaf.relation_id for leaf in record.schema.leaves}
    for leaf in leaves:
        if leaf.relation_id not in known:
            record = with_leaf(record, leaf)
    named = " ".join(f"--partition {shlex.quote(str(TableName(leaf.schema, leaf.name)))}" for leaf in leaves)
    remedy = f"headwater reload PIPELINE.yaml --table {shlex.quote(record.name)} {named}"
    since = record.since if record.unread else now_text()
    reason = f"{attached_message(leaves)}; the other partitions are followed"
    suspended = record.entered("suspended", reason, remedy)
    return replace(suspended, since=since, unread=tuple(leaf.relation_id for leaf in leaves))


def _leaf(
    relation_id: int, schema: str, name: str, filenode: int, identity: str | bytes, created: bool
) -> tuple[Leaf, bool]:
    identity = identity.decode() if isinstance(identity, bytes) else identity
    return Leaf(int(relation_id), schema, name, int(filenode), identity), created


def attached(connection: Connection, relation_ids: Sequence[int]) -> dict[int, int]:
    """Those of the partitions that were tables before, or stand below a tree that was attached, with the transaction
    (32 bits) that did so last."""
    with errors_named("source"):
        rows = connection.execute(
            f"""
            select c.oid::bigint, (
                select i.xmin::text::bigint from pg_catalog.pg_partition_ancestors(c.oid) up (relid)
                join pg_catalog.pg_inherits i on i.inhrelid = up.relid order by age(i.xmin) limit 1)
            from pg_catalog.pg_class c
            join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = 'tableoid' and a.attnum < 0
            where c.oid = any(%s) and c.relispartition and {_LINKED_LATER}
            """,
            [list(relation_ids)],
        ).fetchall()
    return {int(relation): int(xid) for relation, xid in rows}


def with_leaf(record: TableRecord, leaf: Leaf) -> TableRecord:
    lsn, schema = record.schemas[-1]
    return replace(record, schemas=(*record.schemas[:-1], (lsn, schema.with_leaves((*schema.leaves, leaf)))))
