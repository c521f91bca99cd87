"""What is read of a table at the source, in SQL: columns, rows of a predicate, and what its planner knows of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from headwater.errors import Refused
from headwater.predicate import Compared, Every, IsNull, OneOf, Predicate, Some, columns_of
from headwater.schema import SERVER_TEXT, Column, Leaf, TableSchema
from headwater.source.connection import Connection, errors_named


def condition(predicate: Predicate) -> sql.Composable:
    """The predicate over columns without a qualifier."""
    match predicate:
        case Every(parts):
            return _joined(" and ", parts)
        case Some(parts):
            return _joined(" or ", parts)
        case IsNull(column, negated):
            return sql.SQL("{} is not null" if negated else "{} is null").format(sql.Identifier(column))
        case OneOf(column, values, negated):
            listed = sql.SQL(", ").join(map(sql.Literal, values))
            return sql.SQL("{} not in ({})" if negated else "{} in ({})").format(sql.Identifier(column), listed)
        case Compared(column, operator, value):
            return sql.SQL("{} {} {}").format(sql.Identifier(column), sql.SQL(operator), sql.Literal(value))


def _joined(word: str, parts: Iterable[Predicate]) -> sql.Composed:
    return sql.SQL("({})").format(sql.SQL(word).join(map(condition, parts)))


@dataclass(frozen=True, slots=True)
class Reach:
    """What the planner makes of a look for the rows of a predicate in one relation. `nothing`: none can be of it.
    `by_index`: it does not read the whole relation. `share`: of the relation's rows, by its estimate."""

    nothing: bool
    by_index: bool
    share: float


@errors_named("source")
def reach_of(connection: Connection, leaf: Leaf, predicate: Predicate) -> Reach:
    """Of the predicate in one leaf, or in a table that is none. Of one that has gone the whole is left to be read:
    whoever does will notice."""
    table = sql.Identifier(leaf.schema, leaf.name)
    try:
        everything = _plan(connection, sql.SQL("select from only {}").format(table))
        plan = _plan(connection, sql.SQL("select from only {} where {}").format(table, condition(predicate)))
    except psycopg.errors.UndefinedTable:
        return Reach(nothing=False, by_index=False, share=1.0)
    by_index = not _is_nothing(plan) and plan["Node Type"] != "Seq Scan"
    return Reach(_is_nothing(plan), by_index, min(1.0, plan["Plan Rows"] / max(1, everything["Plan Rows"])))


@errors_named("source")
def exclude_each_other(connection: Connection, schema: TableSchema, one: Predicate, other: Predicate) -> bool:
    """Whether the planner knows that no row of the table can be of both."""
    table = sql.Identifier(schema.schema, schema.name)
    both = sql.SQL("{} and {}").format(condition(one), condition(other))
    return _is_nothing(_plan(connection, sql.SQL("select from {} where {}").format(table, both)))


def _plan(connection: Connection, query: sql.Composed) -> dict[str, Any]:
    """It knows what contradicts itself, or the bounds of a partition (but for those by hash)."""
    with connection.transaction(force_rollback=True):
        connection.execute("set local constraint_exclusion = on")
        connection.execute("set local max_parallel_workers_per_gather = 0")
        row = connection.execute(sql.SQL("explain (format json) {}").format(query)).fetchone()
    assert row is not None
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan


def _is_nothing(plan: dict[str, Any]) -> bool:
    return bool(plan["Node Type"] == "Result" and plan.get("One-Time Filter") == "false")


@errors_named("source")
def refuse_columns(connection: Connection, schema: TableSchema, predicate: Predicate) -> None:
    """Refused for columns that are neither of the key nor of a partitioning, and for text that is equal to another
    text (a nondeterministic collation): in the lake it is not."""
    relations = [schema.relation_id, *(leaf.relation_id for leaf in schema.leaves)]
    found = connection.execute(
        """
        select distinct a.attname::text from pg_catalog.pg_partitioned_table p
        join pg_catalog.pg_attribute a on a.attrelid = p.partrelid and a.attnum = any(p.partattrs)
        where p.partrelid in (select pg_catalog.pg_partition_root(r) from unnest(%(relations)s::oid[]) r union
                              select ancestor from unnest(%(relations)s::oid[]) r,
                                                   pg_catalog.pg_partition_ancestors(r) ancestor)
        """,
        {"relations": relations},
    )
    allowed = {*schema.key, *schema.partition_by, *(name for (name,) in found)}
    named = columns_of(predicate)
    where = f"--where, table {schema.schema}.{schema.name}"
    if named - allowed:
        raise Refused(
            f"{', '.join(sorted(named - allowed))}: neither of its key nor of its partitions",
            code="bad_predicate",
            where=where,
            remedy=f"name columns among {', '.join(sorted(allowed)) or 'those of a key, which it has not'}; "
            "headwater reload PIPELINE.yaml --table T reloads all of it",
        )
    rows = connection.execute(
        "select a.attname::text from pg_catalog.pg_attribute a join pg_catalog.pg_collation c on c.oid = "
        "a.attcollation where a.attrelid = %s and a.attname = any(%s) and not c.collisdeterministic",
        [schema.relation_id, sorted(named)],
    ).fetchall()
    if rows:
        raise Refused(
            f"{rows[0][0]} has a nondeterministic collation: texts that differ are equal at the source, and not in "
            "the lake",
            code="bad_predicate",
            where=where,
            remedy="name other columns",
        )


def row_filter(schema: TableSchema) -> list[sql.Composed]:
    """The condition under which rows are replicated, in the server's own words; none: all are."""
    # It comes from the server's catalog, not from a row.
    return [sql.Composed([sql.SQL("("), sql.SQL(schema.row_filter), sql.SQL(")")])] if schema.row_filter else []


def selected(column: Column) -> sql.Composable:
    """What is copied of a column: of a type whose binary form is not known here the text of its output function (a
    composite is only NULL itself if it is not distinct from NULL: one of NULLs `is null`, too)."""
    name = sql.Identifier(column.name)
    if column.value.wire != SERVER_TEXT:
        return name
    return sql.SQL("case when {0} is distinct from null then pg_catalog.format('%s', {0}) end").format(name)
