"""What the catalog tells of a table's columns besides what they are now: those that are gone, and the values that rows
have which were written before a column was added.

A column that is added with a constant default costs the server no rewriting: the value of the rows that are there is
noted once (`attmissingval`) and never appears in the log. Source: PostgreSQL documentation, "pg_attribute".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, LiteralString, cast

import psycopg
from psycopg import sql

from headwater.schema import SERVER_TEXT, Column
from headwater.source.connection import Connection, errors_named

_HEADER: Final = len(b"PGCOPY\n\xff\r\n\0") + 4

_DROPPED = """
select a.attnum from pg_catalog.pg_attribute a where a.attrelid = %s and a.attnum > 0 and a.attisdropped
"""

_NOTED = """
select a.attrelid::bigint, a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attmissingval::text
from pg_catalog.pg_attribute a
where a.attrelid = any(%s) and a.attname = any(%s) and not a.attisdropped and a.atthasmissing
"""


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """`dropped`: attnums of the table. `missing`: by relation and column, as `headwater.schema.Column` has it.
    `unreadable`: columns with a noted value that the server does not take back."""

    dropped: frozenset[int]
    missing: dict[tuple[int, str], str]
    unreadable: frozenset[str] = frozenset()


@errors_named("source")
def read_column_facts(
    connection: Connection, relation_id: int, leaves: Iterable[int], columns: Collection[Column]
) -> ColumnFacts:
    """Of the table `relation_id` and the relations `leaves` that hold its rows. `columns`: those that may have been
    added."""
    dropped = frozenset(row[0] for row in connection.execute(_DROPPED, [relation_id]))
    by_name = {column.name: column for column in columns}
    noted = connection.execute(_NOTED, [sorted(leaves), sorted(by_name)]).fetchall()
    missing: dict[tuple[int, str], str] = {}
    unreadable = set()
    for relation, name, type_name, text in noted:
        try:
            missing[relation, name] = _copied(connection, by_name[name], cast(LiteralString, type_name), text)
        except (psycopg.DataError, psycopg.IntegrityError):
            # A domain that was narrowed since, for one. The message would show the value.
            unreadable.add(name)
    return ColumnFacts(dropped, missing, frozenset(unreadable))


def _copied(connection: Connection, column: Column, type_name: LiteralString, text: str) -> str:
    """The noted value as the server would copy it from a row. `text`: of an array with this one element."""
    value = sql.SQL("{}::{}").format(sql.Literal(_only_element(text)), sql.SQL(type_name))
    if column.value.wire == SERVER_TEXT:
        value = sql.SQL("pg_catalog.format('%s', {})").format(value)
    with (
        connection.transaction(),
        connection.cursor().copy(sql.SQL("copy (select {}) to stdout (format binary)").format(value)) as copy,
    ):
        message = b"".join(bytes(part) for part in copy)
    extension = int.from_bytes(message[_HEADER : _HEADER + 4], "big")
    return message[_HEADER + 4 + extension : -2].hex()


def _only_element(text: str) -> str:
    """The text of an array's one element, whatever delimiter its type has."""
    element = text[1:-1]
    if not element.startswith('"'):
        return element
    return re.sub(r"\\(.)", r"\1", element[1:-1], flags=re.DOTALL)
