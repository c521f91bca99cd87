"""Which part of a table a publication publishes: column lists and row filters, as wanted and as they stand.

PostgreSQL documentation, "Row Filters" and "Column Lists". What is left out never leaves the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.names import TableName, quote_ident
from headwater.schema import Column
from headwater.source.catalog.identity import carried_columns
from headwater.source.catalog.relations import CatalogRelation
from headwater.source.connection import Connection
from headwater.source.problems import Problem, error


@dataclass(frozen=True, slots=True)
class Member:
    """What a publication publishes of a table: the attnums of its column list (None: it has none), and its row filter
    as the server writes it (empty: none)."""

    columns: frozenset[int] | None = None
    row_filter: str = ""


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """What is to be published of a table: `columns` (None: all of them) and the rows that `row_filter` is true for, in
    the server's words where the same is published, else in those of the pipeline file."""

    columns: tuple[Column, ...] | None = None
    row_filter: str = ""

    @property
    def clause(self) -> str:
        """What stands behind the table's name in ADD TABLE."""
        names = ", ".join(quote_ident(column.name) for column in self.columns or ())
        return f"{f' ({names})' if names else ''}{f' WHERE ({self.row_filter})' if self.row_filter else ''}"

    def is_published_by(self, member: Member) -> bool:
        """Column lists are compared by attnum: names change, and the server keeps to the columns."""
        wanted = frozenset(column.attnum for column in self.columns) if self.columns is not None else None
        return wanted == member.columns and self.row_filter == member.row_filter


def member_list(tables: Mapping[TableName, PublishedPart]) -> str:
    """The tables as CREATE and ALTER PUBLICATION name them."""
    return ", ".join(f"ONLY {table}{tables[table].clause}" for table in sorted(tables))


def part_problems(publication: str, table: TableName, member: Member, part: PublishedPart) -> list[Problem]:
    """Whether something else than `part` is published of `table`. `publication`: its quoted name."""
    if part.is_published_by(member):
        return []
    if part == PublishedPart():
        message = f"{table} has a row filter or a column list there, so the lake could not equal the table"
    else:
        filtered = f", with the row filter {member.row_filter}" if member.row_filter else ""
        columns = "a column list" if member.columns is not None else "all columns"
        message = f"{table} is published by {columns}{filtered}, which is not what the pipeline file says"
    again = f"ALTER PUBLICATION {publication} ADD TABLE ONLY {table}{part.clause}"
    remedy = f"ALTER PUBLICATION {publication} DROP TABLE ONLY {table}; {again}"
    return [error("publication_narrowed", f"publication {publication}", message, remedy)]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The columns that a member's row filter uses, and those of its column list (None: it has none)."""

    filtered_by: frozenset[str]
    listed: frozenset[str] | None

    def why_writers_would_fail(self, relation: CatalogRelation) -> str | None:
        """The old row of an UPDATE or DELETE has its identity's columns only, and all of these have to be published."""
        carried = carried_columns(relation)
        if lost := sorted(self.filtered_by - carried):
            return f"its row filter uses columns that its replica identity does not carry ({', '.join(lost)})"
        if self.listed is None:
            return None
        if relation.replica_identity == "f":
            return "it has a column list, and REPLICA IDENTITY FULL wants all columns"
        if lost := sorted(carried - self.listed):
            return f"its column list lacks columns of its replica identity ({', '.join(lost)})"
        return None


def narrowed_members(connection: Connection, publication_name: str) -> dict[int, Narrowed]:
    """The members with a row filter or a column list, by relation id."""
    rows = connection.execute(
        """
        select r.prrelid::bigint,
               array(select distinct a.attname::text
                     from regexp_matches(r.prqual::text, ':varattno ([0-9]+)', 'g') as used (attnum)
                     join pg_catalog.pg_attribute a on a.attrelid = r.prrelid and a.attnum = used.attnum[1]::int2),
               case when r.prattrs is not null then
                    array(select a.attname::text from pg_catalog.pg_attribute a
                          where a.attrelid = r.prrelid and a.attnum = any(r.prattrs::int2[])) end
        from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid
        where p.pubname = %s and (r.prqual is not null or r.prattrs is not null)
        """,
        [publication_name],
    )
    return {
        relation: Narrowed(frozenset(used), frozenset(listed) if listed is not None else None)
        for relation, used, listed in rows
    }
