"""Partitions at the source: which leaves one has that somebody names (itself, or those below it), and which came with
rows of their own. pg_class and pg_inherits are open to every role.

An attached table brings rows that the log never carried, and so does one below a tree that was attached. ATTACH
PARTITION writes all columns of what it attaches once more, beside its entry in pg_inherits; CREATE TABLE ... PARTITION
OF does not. Where it follows a CREATE TABLE in one transaction, the rows from in between tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg
from psycopg import sql

from headwater.names import TableName
from headwater.position import parse_lsn
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
_NEWEST: Final = f"(select i.xmin::text::bigint from {_ATTACHED} order by {DISTANCE.format('i.xmin')} limit 1)"
_LEAF: Final = f"""
c.oid::bigint, n.nspname, c.relname, coalesce(pg_relation_filenode(c.oid), 0)::bigint, c.relreplident,
later.were, a.xmin::text, together.command, {_NEWEST}
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
_FILE: Final = f"""
select pg_relation_size(c.oid), c.relfilenode = c.oid, c.xmin::text,
    case when c.xmax::text = '0' then c.cmin::text::bigint else 4294967295 end,
    case when {_READABLE.format("c", "n")} then format('only %%I.%%I where true', n.nspname, c.relname)
    when {_READABLE.format("r", "rn")} and pg_get_partition_constraintdef(c.oid) !~ 'satisfies_hash_partition|NOT [(]'
    then format('%%I.%%I where tableoid = %%s and %%s', rn.nspname, r.relname, c.oid,
                pg_get_partition_constraintdef(c.oid)) end
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_class r on r.oid = pg_partition_root(c.oid)
join pg_catalog.pg_namespace rn on rn.oid = r.relnamespace
where c.oid = %s
"""
"""A partition's file: its bytes, whether it is the first, who has changed its entry last, and where its rows can be
read, as SQL behind FROM; NULL: nowhere. By default nobody may read a new partition but through its root, whose bounds
lead to it alone, unless it is one of a hash or the rest."""
_BROUGHT: Final = "xmin = {xid}::text::xid and (cmin::text::bigint < {command} or xmax::text <> '0')"
"""A row that the transaction wrote before that command. One that somebody has locked or tried to delete tells no
command."""
_BEFORE: Final = f"({DISTANCE.format('xmin')} > {DISTANCE.format('{xid}::text::xid')} or {_BROUGHT})"
_FIRST_BLOCKS: Final = "ctid < '(1024,0)'"
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
    relation; None: it is no partition. The leaf's link is that of now, whatever it brought."""
    with errors_named("source"):
        row = connection.execute(
            f"select pg_partition_root(c.oid)::oid::bigint, {_LEAF} and c.oid = %s", [relation_id]
        ).fetchone()
        if row is None:
            return None
        came = _Came.of(row[1:])
        return int(row[0]), replace(came.leaf, link=came.link or 0), not came.brought_rows(connection)


@errors_named("source")
def attached_names(connection: Connection, root: int, relation_ids: Sequence[int]) -> dict[int, TableName]:
    """Those of the relations that the partitioned table `root` has as partitions now, at any level, with their names of
    now."""
    rows = connection.execute(
        "select c.oid::bigint, n.nspname::text, c.relname::text from pg_catalog.pg_class c "
        "join pg_catalog.pg_namespace n on n.oid = c.relnamespace "
        "where c.oid = any(%s) and c.relispartition and pg_partition_root(c.oid) = %s::oid",
        [list(relation_ids), root],
    )
    return {relation_id: TableName(schema, name) for relation_id, schema, name in rows}


@errors_named("source")
def was_partition(connection: Connection, relation_id: int) -> bool:
    """Of a relation that is in the log, and no partition as far as the catalog shows: whether it must have been one all
    the same, as no publication has it by itself; or it is not there at all."""
    published = """
    select from pg_catalog.pg_class c where c.oid = %s and (
        exists (select from pg_catalog.pg_publication p where p.puballtables)
        or exists (select from pg_catalog.pg_publication_rel r where r.prrelid = c.oid)
        or exists (select from pg_catalog.pg_publication_namespace n where n.pnnspid = c.relnamespace))
    """
    return connection.execute(published, [relation_id]).rowcount == 0


def attached_leaves(connection: Connection, root: int, known: Sequence[int], brought: int) -> list[Leaf]:
    """The partitions that the partitioned table `root` has now, beside those `known`, and that brought rows; of
    `brought` that is known. When they take longer than one may, the others are judged by where such rows would be."""
    deadline = time.monotonic() + _READ_SECONDS
    found = []
    with errors_named("source"):
        rows = connection.execute(
            f"select {_LEAF} and c.relkind = 'r' and c.oid <> all(%s) "
            "and c.oid in (select relid from pg_catalog.pg_partition_tree(%s::oid))",
            [list(known), root],
        ).fetchall()
        for came in map(_Came.of, rows):
            is_patient = time.monotonic() < deadline
            if came.leaf.relation_id == brought or came.brought_rows(connection, is_patient=is_patient):
                found.append(came.leaf)
    return sorted(found, key=_by_name)


def attached(connection: Connection, relation_ids: Sequence[int], may_be: Callable[[int, int], bool]) -> dict[int, int]:
    """Those of the partitions that were tables with rows before, or stand below a tree that was attached, with the
    transaction (32 bits) that did so last. `may_be`: of a relation and that transaction, whether it is of interest: the
    rows of others are not looked at."""
    found: dict[int, int] = {}
    with errors_named("source"):
        rows = connection.execute(f"select {_LEAF} and c.oid = any(%s)", [list(relation_ids)]).fetchall()
        for came in map(_Came.of, rows):
            relation, link = came.leaf.relation_id, came.link
            if link is not None and may_be(relation, link) and came.brought_rows(connection):
                found[relation] = link
    return found


@dataclass(frozen=True, slots=True)
class Looked:
    """What was seen of attached partitions that nobody knows. `brought`: they brought rows. `empty`: they are attached,
    and have no file content at all, behind the position `lsn` of the log: no row that they brought can be left, and
    whatever a transaction that ends above it does to them, it does to a partition.

    ATTACH PARTITION locks the table against everybody. So what another transaction changes there is either all before
    it, and committed below it in the log, or all behind it.
    """

    brought: list[Leaf]
    empty: list[Leaf]
    lsn: int


def look_at_attached(connection: Connection, relation_ids: Sequence[int], judged: set[tuple[int, int]]) -> Looked:
    """Of the partitions those that brought rows, and those that are empty now. `judged`: which have brought none, each
    with the transaction that attached it; they are not looked at again. Transient while one is locked.

    Read are first blocks alone: rows that were brought and are not there any more, the log has told of.
    """
    brought, empty = [], []
    with errors_named("source"):
        rows = connection.execute(f"select {_LEAF} and c.oid = any(%s)", [list(relation_ids)]).fetchall()
        # Behind the query that shows the ATTACH, and before any size: a row that is not seen there is committed above.
        lsn = _insert_position(connection)
        for came in map(_Came.of, rows):
            relation, link = came.leaf.relation_id, came.link
            if link is None or (relation, link) in judged:
                continue
            if is_empty := _is_empty(connection, relation):
                empty.append(replace(came.leaf, link=link))
            if is_empty is not False or not came.brought_rows(connection, is_patient=False):
                judged.add((relation, link))
            else:
                brought.append(came.leaf)
    return Looked(sorted(brought, key=_by_name), sorted(empty, key=_by_name), lsn)


def _by_name(leaf: Leaf) -> tuple[str, str]:
    return leaf.schema, leaf.name


def _insert_position(connection: Connection) -> int:
    row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def _is_empty(connection: Connection, relation_id: int) -> bool | None:
    """Whether its file is; None: nothing tells what it holds, since it is gone or its changes are not in the log."""
    with connection.transaction():
        connection.execute("set local lock_timeout = '1s'")
        row = connection.execute(
            "select pg_relation_size(oid) = 0, relpersistence = 'p' from pg_catalog.pg_class where oid = %s",
            [relation_id],
        ).fetchone()
    if row is None or row[0] is None:
        return None
    is_empty, is_logged = row
    return None if is_empty and not is_logged else bool(is_empty)


@dataclass(frozen=True, slots=True)
class _Came:
    """A row of `_LEAF`. `later`: whether the leaf was attached behind the transaction `xid` that made it; `command`:
    which of that transaction's did so last, None: none. `link`: the transaction that attached it last, if one did."""

    leaf: Leaf
    later: bool
    xid: str
    command: int | None
    link: int | None

    @staticmethod
    def of(row: Sequence[Any]) -> _Came:
        relation_id, schema, name, filenode, identity, *rest = row
        identity = identity.decode() if isinstance(identity, bytes) else identity
        return _Came(Leaf(int(relation_id), schema, name, int(filenode), identity), *rest)

    def brought_rows(self, connection: Connection, *, is_patient: bool = True) -> bool:
        """Whether it was a table with rows, or a row is left of those that its transaction wrote before the ATTACH.
        pg_partman makes each partition in one transaction, and empty: such a one needs no reload. True where that
        cannot be told, as while somebody has locked it: who asks has more to do than to wait.

        Such rows lie first in the file. A partition that is not read in time, or at all (`is_patient`), is judged by
        its first 8 MiB.
        """
        if self.later or self.command is None:
            return self.later
        try:
            if self._has_row(connection, self.command, _FIRST_BLOCKS):
                return True
            with contextlib.suppress(psycopg.errors.QueryCanceled):
                return is_patient and self._has_row(connection, self.command, "true")
        except _CANNOT_TELL:
            return True
        return False

    def _has_row(self, connection: Connection, command: int, where: str) -> bool:
        with connection.transaction():
            connection.execute(f"set local lock_timeout = '1s'; set local statement_timeout = '{_READ_SECONDS}s'")
            file = connection.execute(_FILE, [self.leaf.relation_id]).fetchone()
            if file is None:
                return True
            size, is_first, changed_by, change, rows = file
            if not size:
                return False
            if rows is None:
                return True
            # A rewrite writes rows as its own, in the command that changes the entry; those that came behind it, or
            # behind a TRUNCATE, are of a later one.
            kind, numbers = (_BROUGHT, (self.xid, command)) if is_first else (_BEFORE, (changed_by, change + 1))
            condition = sql.SQL(kind).format(xid=sql.Literal(numbers[0]), command=sql.Literal(numbers[1]))
            row = connection.execute(
                sql.SQL("select exists (select from {} and {} and {})").format(sql.SQL(rows), condition, sql.SQL(where))
            ).fetchone()
        assert row is not None
        return bool(row[0])
