"""Partitions at the source: which leaves one has that somebody names (itself, or those below it), and which came with
rows of their own. pg_class and pg_inherits are open to every role.

An attached table brings rows that the log never carried, and so does one below a tree that was attached. ATTACH
PARTITION writes all columns of what it attaches once more, beside its entry in pg_inherits; CREATE TABLE ... PARTITION
OF does not. Where it follows a CREATE TABLE in one transaction, the rows from in between tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

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

DISTANCE: Final = "mod(age({})::bigint + 4294967296, 4294967296)"
"""How many transactions ago. What is frozen keeps its xmin, and age() turns negative after 2^31."""
_ATTACHED: Final = """
pg_catalog.pg_partition_ancestors(c.oid) up (relid)
join pg_catalog.pg_inherits i on i.inhrelid = up.relid
join pg_catalog.pg_attribute u on u.attrelid = up.relid and u.attname = 'tableoid' and u.attnum < 0
where not (i.xmin = u.xmin and exists (
    select from pg_catalog.pg_attribute k where k.attrelid = up.relid and k.attnum > 0 and not k.attisdropped
    and k.xmin = i.xmin and k.cmin::text::bigint < i.cmin::text::bigint))
"""
"""Links of a leaf and of what it lies below that ATTACH PARTITION has made, or may have."""
_LEAF: Final = f"""
c.oid::bigint, n.nspname, c.relname, coalesce(pg_relation_filenode(c.oid), 0)::bigint, c.relreplident,
later.were, a.xmin::text, together.command
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = 'tableoid' and a.attnum < 0
cross join lateral (
    select count(*) > 0 as were from {_ATTACHED} and i.xmin <> a.xmin
    and (up.relid = c.oid or {DISTANCE.format("i.xmin")} < {DISTANCE.format("a.xmin")})) later
cross join lateral (
    select max(case when i.xmax::text = '0' then i.cmin::text::bigint else 4294967295 end) as command
    from {_ATTACHED} and i.xmin = a.xmin
    and (i.xmax::text <> '0' or i.cmin::text::bigint > a.cmin::text::bigint)) together
where c.relispartition
"""
"""Who has tried to delete a row, the link's too, leaves a number of its own in place of the one of the command."""
_READABLE: Final = """
(has_schema_privilege({1}.oid, 'USAGE') and has_table_privilege({0}.oid, 'SELECT') and not row_security_active({0}.oid))
"""
_ROWS_OF: Final = f"""
select case
    when {_READABLE.format("c", "n")} then format('only %%I.%%I where true', n.nspname, c.relname)
    when {_READABLE.format("r", "rn")} and pg_get_partition_constraintdef(c.oid) !~ 'satisfies_hash_partition|NOT [(]'
    then format('%%I.%%I where tableoid = %%s and %%s', rn.nspname, r.relname, c.oid,
                pg_get_partition_constraintdef(c.oid)) end
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_class r on r.oid = pg_partition_root(c.oid)
join pg_catalog.pg_namespace rn on rn.oid = r.relnamespace
where c.oid = %s and c.relfilenode = c.oid
"""
"""Where the rows of a partition can be read and show which transaction wrote them (in its first file: a rewrite writes
them as its own), as SQL behind FROM; no row, or NULL: they cannot. By default nobody may read a new partition but
through its root, whose bounds lead to it alone, unless it is one of a hash or the rest."""
_READ_SECONDS: Final = 5
_CANNOT_TELL: Final = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.UndefinedTable,
    psycopg.errors.InsufficientPrivilege,
)


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
    """(root's relation id, leaf, whether it was created as a partition, or attached without a row) of an unknown
    relation; None: it is no partition."""
    with errors_named("source"):
        row = connection.execute(
            f"select pg_partition_root(c.oid)::oid::bigint, {_LEAF} and c.oid = %s", [relation_id]
        ).fetchone()
        return (int(row[0]), *_leaf(connection, *row[1:])) if row is not None else None


def attached_leaves(connection: Connection, root: int, known: Sequence[int]) -> list[Leaf]:
    """The partitions that the partitioned table `root` has now, beside those `known`, and that brought rows."""
    with errors_named("source"):
        rows = connection.execute(
            f"select {_LEAF} and c.relkind = 'r' and c.oid <> all(%s) "
            "and c.oid in (select relid from pg_catalog.pg_partition_tree(%s::oid))",
            [list(known), root],
        ).fetchall()
        found = [leaf for leaf, created in (_leaf(connection, *row) for row in rows) if not created]
    return sorted(found, key=lambda leaf: (leaf.schema, leaf.name))


def attached(connection: Connection, relation_ids: Sequence[int], may_be: Callable[[int, int], bool]) -> dict[int, int]:
    """Those of the partitions that were tables with rows before, or stand below a tree that was attached, with the
    transaction (32 bits) that did so last. `may_be`: of a relation and that transaction, whether it is of interest: the
    rows of others are not looked at."""
    newest = f"(select i.xmin::text::bigint from {_ATTACHED} order by {DISTANCE.format('i.xmin')} limit 1)"
    found: dict[int, int] = {}
    with errors_named("source"):
        rows = connection.execute(f"select {newest}, {_LEAF} and c.oid = any(%s)", [list(relation_ids)]).fetchall()
        for xid, *row in rows:
            if xid is not None and may_be(int(row[0]), int(xid)):
                leaf, created = _leaf(connection, *row)
                if not created:
                    found[leaf.relation_id] = int(xid)
    return found


def _leaf(
    connection: Connection,
    relation_id: int,
    schema: str,
    name: str,
    filenode: int,
    identity: str | bytes,
    later: bool,
    xid: str,
    command: int | None,
) -> tuple[Leaf, bool]:
    """`later`: whether it was attached behind the transaction `xid` that made it; `command`: which of that
    transaction's did so last, None: none."""
    identity = identity.decode() if isinstance(identity, bytes) else identity
    leaf = Leaf(int(relation_id), schema, name, int(filenode), identity)
    if later or command is None:
        return leaf, not later
    return leaf, not _may_have_had_rows(connection, leaf.relation_id, xid, command)


def _may_have_had_rows(connection: Connection, relation_id: int, xid: str, command: int) -> bool:
    """Whether a row is left of those that the transaction wrote before the command. pg_partman makes each partition in
    one transaction, and empty: such a one needs no reload. True where that cannot be told, as while somebody has locked
    it: who asks has more to do than to wait. A row that somebody has locked or tried to delete tells no command."""
    try:
        with connection.transaction():
            connection.execute(f"set local lock_timeout = '1s'; set local statement_timeout = '{_READ_SECONDS}s'")
            row = connection.execute(_ROWS_OF, [relation_id]).fetchone()
            if row is None or row[0] is None:
                return True
            row = connection.execute(
                sql.SQL(
                    "select exists (select from {} and xmin = {}::text::xid "
                    "and (cmin::text::bigint < {} or xmax::text <> '0'))"
                ).format(sql.SQL(row[0]), sql.Literal(xid), sql.Literal(command))
            ).fetchone()
    except _CANNOT_TELL:
        return True
    assert row is not None
    return bool(row[0])
