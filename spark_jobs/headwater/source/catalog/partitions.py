"""Partitions at the source: which leaves one has that somebody names (itself, or those below it), and which came with
rows of their own. pg_class and pg_inherits are open to every role.

An attached table brings rows that the log never carried, and so does one below a tree that was attached: it is told
apart by a pg_inherits entry that is younger than the relation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headwater.names import TableName
from headwater.schema import Leaf
from headwater.source.connection import Connection, errors_named


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A leaf or a subtree, by name, of the partitioned table with the id `root`."""

    root: int
    name: TableName


Leaves = Mapping[NamedPart, Mapping[TableName, int]]
"""By part the leaves and their relation ids; without any what is no part of the table, or holds no rows."""

_LEAVES = """
select w.place, n.nspname::text, c.relname::text, c.oid::bigint
from unnest(%s::oid[], %s::text[], %s::text[]) with ordinality w(root, schema, name, place)
join pg_catalog.pg_namespace pn on pn.nspname = w.schema
join pg_catalog.pg_class p on p.relnamespace = pn.oid and p.relname = w.name
cross join lateral pg_catalog.pg_partition_tree(w.root::regclass) inside
cross join lateral pg_catalog.pg_partition_tree(p.oid) below
join pg_catalog.pg_class c on c.oid = below.relid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where inside.relid = p.oid and inside.level > 0 and below.isleaf
"""

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


@errors_named("source")
def read_leaves(connection: Connection, parts: Iterable[NamedPart]) -> Leaves:
    """One query for all of them; none when there is nothing to ask for."""
    asked = list(parts)
    found: dict[NamedPart, dict[TableName, int]] = {part: {} for part in asked}
    if asked:
        names = [part.name for part in asked]
        arguments = [[part.root for part in asked], [name.schema for name in names], [name.name for name in names]]
        for place, schema, name, number in connection.execute(_LEAVES, arguments):
            found[asked[place - 1]][TableName(schema, name)] = number
    return found


def new_leaf(connection: Connection, relation_id: int) -> tuple[int, Leaf, bool] | None:
    """(root's relation id, leaf, whether it was created as a partition) of an unknown relation; None: it is no
    partition."""
    with errors_named("source"):
        row = connection.execute(
            f"select pg_partition_root(c.oid)::oid::bigint, {_LEAF} and c.oid = %s", [relation_id]
        ).fetchone()
    return (int(row[0]), *_leaf(*row[1:])) if row is not None else None


def attached_leaves(connection: Connection, root: int, known: Sequence[int]) -> list[Leaf]:
    """The partitions that the partitioned table `root` has now, beside those `known`, and that brought rows."""
    with errors_named("source"):
        rows = connection.execute(
            f"select {_LEAF} and c.relkind = 'r' and c.oid <> all(%s) "
            "and c.oid in (select relid from pg_catalog.pg_partition_tree(%s::oid))",
            [list(known), root],
        ).fetchall()
    return [leaf for leaf, created in (_leaf(*row) for row in rows) if not created]


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


def _leaf(
    relation_id: int, schema: str, name: str, filenode: int, identity: str | bytes, created: bool
) -> tuple[Leaf, bool]:
    identity = identity.decode() if isinstance(identity, bytes) else identity
    return Leaf(int(relation_id), schema, name, int(filenode), identity), created
