"""Which rows of a table a person means: by the names of its partitions, or by a predicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import Refused
from headwater.lake.registry import TableRecord
from headwater.names import TableName
from headwater.pipeline_file.where_text import parse
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.relations import descendants
from headwater.source.catalog.where_sql import refuse_columns
from headwater.source.connection import Connection, errors_named


@dataclass(frozen=True, slots=True)
class ReloadScope:
    """`leaves`: relation ids of the partitions that hold the rows; empty: the whole table, or all rows of `where`.
    `names`: theirs, in SQL.

    `unknown`: partitions among them that the lake has not met yet: attached, or not written to since they were made.
    """

    leaves: tuple[int, ...]
    names: tuple[str, ...]
    shown: str
    unknown: tuple[Leaf, ...] = ()
    where: str = ""

    @property
    def whole(self) -> bool:
        return not self.leaves and not self.where


def rows_where(connection: Connection, now: TableSchema, where: str) -> ReloadScope:
    """The rows of the predicate that `where` writes; Refused for one that is none, or names other columns than those of
    key and partitions. `now`: the table at the source."""
    refuse_columns(connection, now, parse(where, now))
    return ReloadScope((), (), f"{TableName(now.schema, now.name)} where {where}", where=where)


def part_named(
    connection: Connection, record: TableRecord, leaves_now: Sequence[Leaf], partitions: Sequence[TableName]
) -> ReloadScope:
    """The leaves of `partitions`, each a leaf or a subtree of the table; none: the whole table. `leaves_now`: those at
    the source. Refused for what is no partition of it now."""
    schema = record.schema
    met = {leaf.relation_id for leaf in schema.leaves}
    if not partitions:
        return ReloadScope((), (), record.name, tuple(leaf for leaf in leaves_now if leaf.relation_id not in met))
    if not schema.partitioned:
        raise Refused(
            f"{record.name} is not partitioned",
            code="not_partitioned",
            where=record.name,
            remedy=f"headwater reload PIPELINE.yaml --table {record.name} reloads all of it",
        )
    ids = _relation_ids(connection, partitions)
    below = descendants(connection, [schema.relation_id, *ids.values()])
    known = {leaf.relation_id: str(TableName(leaf.schema, leaf.name)) for leaf in leaves_now}
    chosen: set[int] = set()
    for name in partitions:
        found = ids.get(name)
        if found is None or found not in below.get(schema.relation_id, ()):
            raise Refused(
                f"{name} is no partition of {record.name}" + ("" if found is None else " (any more)"),
                code="no_partition",
                where=record.name,
                remedy=f"name one of its partitions: {', '.join(sorted(known.values())[:8]) or 'it has none'}; the "
                f"rows of a detached one go with headwater reload PIPELINE.yaml --table {record.name}",
            )
        chosen |= {found, *below.get(found, ())} & set(known)
    names = tuple(sorted(known[leaf] for leaf in chosen))
    unknown = tuple(leaf for leaf in leaves_now if leaf.relation_id in chosen - met)
    return ReloadScope(tuple(sorted(chosen)), names, f"{record.name} ({', '.join(map(str, partitions))})", unknown)


@errors_named("source")
def _relation_ids(connection: Connection, names: Sequence[TableName]) -> dict[TableName, int]:
    rows = connection.execute(
        "select w.schema, w.name, c.oid::bigint from unnest(%s::text[], %s::text[]) w(schema, name) "
        "join pg_catalog.pg_namespace n on n.nspname = w.schema "
        "join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name",
        [[name.schema for name in names], [name.name for name in names]],
    )
    return {TableName(schema, name): int(oid) for schema, name, oid in rows}
