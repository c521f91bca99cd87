"""`where` of a table beside what is published of it, and what stands against publishing it.

The server writes an expression as it has understood it: `region in ('eu')` becomes `(region = 'eu'::text)`. Whether a
published filter is the wanted one is asked of its planner, for which both have to be the same condition; that takes no
right but SELECT. The columns that a filter names are those of a constraint of a temporary table, and whether the server
publishes it is asked by a publication, each in a transaction that is rolled back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

import psycopg
from psycopg import errors as pg

from headwater.names import TableName, quote_ident
from headwater.source.catalog.catalog import CatalogTable
from headwater.source.catalog.identity import carried_columns
from headwater.source.connection import Connection, errors_named
from headwater.source.problems import Problem, error
from headwater.source.publication.lock import LOCK_TIMEOUT_MS
from headwater.source.publication.parts import PublishedPart

_SCRATCH: Final = "headwater_row_filter"
_USED: Final = f"""
select a.attname::text
from pg_catalog.pg_constraint c join pg_catalog.pg_attribute a on a.attrelid = c.conrelid and a.attnum = any(c.conkey)
where c.conrelid = 'pg_temp.{_SCRATCH}'::regclass and c.conname = 'wanted'
"""


@errors_named("source")
def wanted_parts(
    connection: Connection, tables: Iterable[CatalogTable]
) -> tuple[dict[TableName, PublishedPart], list[Problem]]:
    """What of each table is to be published, and what is wrong with their row filters."""
    parts: dict[TableName, PublishedPart] = {}
    problems: list[Problem] = []
    for table in tables:
        columns = table.schema.columns if table.schema.excluded else None
        if not table.entry.where:
            parts[table.name] = PublishedPart(columns)
            continue
        try:
            wanted, published = table.entry.where, table.schema.row_filter
            same = published and _plan(connection, table, wanted) == _plan(connection, table, published)
            used = _columns_of(connection, table)
            if not same:
                _try_to_publish(connection, table)
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as reason:
            message = f"where is no condition that can be published: {reason.diag.message_primary}"
            problems.append(error("bad_row_filter", str(table.name), message, "correct it in the pipeline file"))
            continue
        parts[table.name] = PublishedPart(columns, published if same else wanted)
        problems += _unknown_at_updates(table, used)
    return parts, problems


def _plan(connection: Connection, table: CatalogTable, condition: str) -> str:
    """What the planner makes of a look at the whole table under `condition`."""
    with connection.transaction(force_rollback=True):
        connection.execute("set transaction read only")
        for scan in ("indexscan", "indexonlyscan", "bitmapscan", "tidscan"):
            connection.execute(f"set local enable_{scan} = off")
        rows = connection.execute(f"explain (costs off) select from only {table.name} where ({condition})").fetchall()
    return "\n".join(line for (line,) in rows)


def _columns_of(connection: Connection, table: CatalogTable) -> list[str]:
    """The columns that the table's filter names."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(f"create temporary table {_SCRATCH} (like {table.name})")
            connection.execute(f"alter table pg_temp.{_SCRATCH} add constraint wanted check ({table.entry.where})")
            return [name for (name,) in connection.execute(_USED)]
    except pg.InsufficientPrivilege:  # no temporary tables for this role: the server judges when it publishes
        _plan(connection, table, table.entry.where)
        return []


def _try_to_publish(connection: Connection, table: CatalogTable) -> None:
    """What the server says of a publication of the table by its filter, which is never there. Nothing where the role
    may not make one, or the table is locked: then it says so when the table is published."""
    with (
        contextlib.suppress(pg.InsufficientPrivilege, pg.LockNotAvailable),
        connection.transaction(force_rollback=True),
    ):
        connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
        connection.execute(f"create publication {_SCRATCH} for table only {table.name} where ({table.entry.where})")


def _unknown_at_updates(table: CatalogTable, used: Iterable[str]) -> list[Problem]:
    """The old row of an UPDATE or DELETE has the columns of its identity only: its writers would fail."""
    if table.schema.insert_only:
        return []
    problems = []
    for holder in table.holders:
        if lost := sorted(set(used) - carried_columns(holder)):
            names = ", ".join(map(quote_ident, lost))
            message = f"where names {names}, which its replica identity does not carry: the source's UPDATE would fail"
            remedy = "name columns of its identity only, or ALTER TABLE ... REPLICA IDENTITY FULL"
            problems.append(error("bad_row_filter", str(table.name), message, remedy))
    return problems
