"""What the catalog tells of a table's columns besides what they are now: those that are gone, and the values that rows
have which were written before a column was added.

A column that is added with a constant default costs the server no rewriting: the value of the rows that are there is
noted once (`attmissingval`) and never appears in the log. Source: PostgreSQL documentation, "pg_attribute".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, LiteralString, cast

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
    """`dropped`: attnums of the table. `missing`: by relation and column, as `headwater.schema.Column` has it."""

    dropped: frozenset[int]
    missing: dict[tuple[int, str], str]


@errors_named("source")
def read_column_facts(
    connection: Connection, relation_id: int, leaves: Iterable[int], columns: Collection[Column]
) -> ColumnFacts:
    """Of the table `relation_id` and the relations `leaves` that hold its rows. `columns`: those that may have been
    added."""
    dropped = frozenset(row[0] for row in connection.execute(_DROPPED, [relation_id]))
    by_name = {column.name: column for column in columns}
    noted = connection.execute(_NOTED, [sorted(leaves), sorted(by_name)]).fetchall()
    missing = {
        (relation, name): _copied(connection, by_name[name], cast(LiteralString, type_name), text)
        for relation, name, type_name, text in noted
    }
    return ColumnFacts(dropped, missing)


def _copied(connection: Connection, column: Column, type_name: LiteralString, text: str) -> str:
    """The noted value as the server would copy it from a row. `text`: of an array with this one element."""
    value = sql.SQL("(({})::text[])[1]::{}").format(sql.Literal(text), sql.SQL(type_name))
    if column.value.wire == SERVER_TEXT:
        value = sql.SQL("pg_catalog.format('%s', {})").format(value)
    with connection.cursor().copy(sql.SQL("copy (select {}) to stdout (format binary)").format(value)) as copy:
        message = b"".join(bytes(part) for part in copy)
    extension = int.from_bytes(message[_HEADER : _HEADER + 4], "big")
    return message[_HEADER + 4 + extension : -2].hex()
