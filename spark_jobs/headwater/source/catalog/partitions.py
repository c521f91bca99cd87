"""Which leaves a partition has that somebody names: itself, or those below it. pg_class and pg_inherits are open to
every role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwater.names import TableName
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
