"""What the PostgreSQL catalog says about relations: columns, indexes, identity, rights. Facts, no judgement.

A few set-based queries, whatever the number of tables. `identity` and `catalog` judge what is read here.
Columns are those that exist (never dropped ones), in attnum order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg.pq import TransactionStatus

from headwater.names import TableName
from headwater.source.connection import Connection

ORDINARY = "r"
PARTITIONED = "p"
FOREIGN = "f"
KINDS = {"r": "table", "p": "partitioned table", "f": "foreign table", "v": "view", "m": "materialized view"}


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column. `generated`: '' (no), 's' (stored) or 'v' (virtual). `not_null` only if validated for every row."""

    name: str
    attnum: int
    type_oid: int
    typmod: int
    not_null: bool
    generated: str


@dataclass(frozen=True, slots=True)
class Index:
    """A unique index. `columns` are the key columns, in order, without INCLUDE columns and expressions."""

    relation_id: int
    name: str
    columns: tuple[str, ...]
    primary: bool
    immediate: bool
    partial: bool
    expressions: bool
    valid: bool
    replica_identity: bool


@dataclass(frozen=True, slots=True)
class CatalogRelation:
    """One entry of pg_class. `filenode` is 0 where there is no storage, and of the same snapshot as the columns; rights
    are those of the current role.

    `last_attnum`: the highest that any column has or had. `selectable`: where the role may not SELECT from the whole
    table, the columns that it may SELECT, system columns among them.
    """

    relation_id: int
    name: TableName
    attributes: tuple[Attribute, ...]
    indexes: tuple[Index, ...]
    kind: str
    persistence: str
    owner: str
    filenode: int
    replica_identity: str
    is_partition: bool
    row_security: bool
    row_security_forced: bool
    row_security_active: bool
    may_select: bool
    selectable: tuple[str, ...]
    may_use_schema: bool
    owned: bool
    last_attnum: int

    def unreadable(self, columns: Iterable[str]) -> list[str]:
        """What the role may not read of what reading `columns` takes."""
        return [] if self.may_select else [name for name in read_with(columns) if name not in self.selectable]

    def attribute(self, name: str) -> Attribute | None:
        return next((attribute for attribute in self.attributes if attribute.name == name), None)

    @property
    def all_not_null(self) -> frozenset[str]:
        return frozenset(attribute.name for attribute in self.attributes if attribute.not_null)


def read_with(columns: Iterable[str]) -> list[str]:
    """`columns`, and the system's own that pages and single rows are read by. SELECT on these is enough: a right on
    columns may be granted for system columns, too."""
    return [*columns, "ctid", "xmin"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A relation as the list of all of them shows it; `parent` is set for partitions."""

    relation_id: int
    name: TableName
    kind: str
    persistence: str
    parent: int | None


_LIST = """
select c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       case when c.relispartition then
           (select i.inhparent from pg_catalog.pg_inherits i where i.inhrelid = c.oid) end
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'f')
  and n.nspname not in ('pg_catalog', 'information_schema') and n.nspname not like 'pg\\_toast%%'
"""

_RELATIONS = """
select c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
       pg_catalog.pg_get_userbyid(c.relowner)::text, c.relfilenode::bigint,
       c.relreplident::text, c.relispartition, c.relrowsecurity, c.relforcerowsecurity,
       c.relrowsecurity and pg_catalog.row_security_active(c.oid),
       pg_catalog.has_table_privilege(c.oid, 'SELECT'),
       case when pg_catalog.has_table_privilege(c.oid, 'SELECT') then '{}' else
           array(select a.attname::text from pg_catalog.pg_attribute a where a.attrelid = c.oid and not a.attisdropped
                 and pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')) end,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       pg_catalog.pg_has_role(c.relowner, 'USAGE'), c.relnatts::int
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = any(%s)
"""

# From 18 on attnotnull may stand for a constraint that was never validated: old rows may still hold NULL.
_ATTRIBUTES = """
select a.attrelid, a.attname::text, a.attnum, a.atttypid, a.atttypmod,
       a.attnotnull and not exists (
           select from pg_catalog.pg_constraint k where k.conrelid = a.attrelid and k.contype = 'n'
           and k.conkey = array[a.attnum] and not k.convalidated),
       a.attgenerated::text
from pg_catalog.pg_attribute a
where a.attrelid = any(%s) and a.attnum > 0 and not a.attisdropped order by a.attrelid, a.attnum
"""

# A temporal key (WITHOUT OVERLAPS) is marked unique, but its uniqueness is that of an exclusion constraint.
_INDEXES = """
select i.indrelid, i.indexrelid, x.relname::text, i.indisprimary, i.indimmediate, i.indpred is not null,
       i.indexprs is not null, i.indisvalid and i.indislive, i.indisreplident,
       array(select a.attname::text from unnest(i.indkey::int2[]) with ordinality k(attnum, place)
             join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
             where k.place <= i.indnkeyatts order by k.place)
from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid
where i.indrelid = any(%s) and i.indisunique and not i.indisexclusion order by i.indrelid, i.indexrelid
"""

# A partition that is being detached concurrently belongs to its parent no longer.
_DESCENDANTS = """
with recursive tree(root, relation) as (
    select inhparent, inhrelid from pg_catalog.pg_inherits where inhparent = any(%s) and not inhdetachpending
    union
    select t.root, i.inhrelid from tree t join pg_catalog.pg_inherits i on i.inhparent = t.relation
    where not i.inhdetachpending)
select root, relation from tree order by root, relation
"""


@contextmanager
def one_snapshot(connection: Connection) -> Iterator[None]:
    """Run several catalog queries under one snapshot; inside a transaction of the caller its own rules hold."""
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        yield
        return
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        yield


def list_relations(connection: Connection) -> tuple[Listed, ...]:
    """Everything that a table entry could name, system schemas aside."""
    return tuple(
        Listed(oid, TableName(schema, name), kind, persistence, parent)
        for oid, schema, name, kind, persistence, parent in connection.execute(_LIST.replace("%%", "%"))
    )


def read_relations(connection: Connection, relation_ids: Iterable[int]) -> dict[int, CatalogRelation]:
    """The relations among `relation_ids` that exist."""
    ids = sorted(set(relation_ids))
    attributes: defaultdict[int, list[Attribute]] = defaultdict(list)
    for relation_id, *attribute in connection.execute(_ATTRIBUTES, [ids]):
        attributes[relation_id].append(Attribute(*attribute))
    indexes: defaultdict[int, list[Index]] = defaultdict(list)
    for relation_id, oid, name, *flags, columns in connection.execute(_INDEXES, [ids]):
        indexes[relation_id].append(Index(oid, name, tuple(columns), *flags))
    return {
        oid: CatalogRelation(oid, TableName(schema, name), tuple(attributes[oid]), tuple(indexes[oid]), *rest)
        for oid, schema, name, *rest in connection.execute(_RELATIONS, [ids])
    }


def descendants(connection: Connection, relation_ids: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """All relations below each of `relation_ids`: partitions of any level, or inheritance children."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for root, relation_id in connection.execute(_DESCENDANTS, [sorted(set(relation_ids))]):
        found[root].append(relation_id)
    return {root: tuple(below) for root, below in found.items()}
