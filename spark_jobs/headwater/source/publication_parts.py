"""Which part of a table a publication publishes: column lists and row filters, as wanted and as they stand.

PostgreSQL documentation, "Row Filters" and "Column Lists". What is left out never leaves the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.names import TableName, quote_ident
from headwater.schema import Column
from headwater.source.problems import Problem, error


@dataclass(frozen=True, slots=True)
class Member:
    """What a publication publishes of a table: the attnums of its column list (None: it has none), and its row filter
    as the server writes it (empty: none)."""

    columns: frozenset[int] | None = None
    row_filter: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """What is to be published of a table: `columns` (None: all of them) and the rows that `row_filter` is true for, an
    expression as the server writes it."""

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


def member_list(tables: Mapping[TableName, Part]) -> str:
    """The tables as CREATE and ALTER PUBLICATION name them."""
    return ", ".join(f"ONLY {table}{tables[table].clause}" for table in sorted(tables))


def part_problems(publication: str, table: TableName, member: Member, part: Part) -> list[Problem]:
    """Whether something else than `part` is published of `table`. `publication`: its quoted name."""
    if part.is_published_by(member):
        return []
    if part == Part():
        message = f"{table} has a row filter or a column list there, so the lake could not equal the table"
    else:
        filtered = f", with the row filter {member.row_filter}" if member.row_filter else ""
        columns = "a column list" if member.columns is not None else "all columns"
        message = f"{table} is published by {columns}{filtered}, which is not what the pipeline file says"
    again = f"ALTER PUBLICATION {publication} ADD TABLE ONLY {table}{part.clause}"
    remedy = f"ALTER PUBLICATION {publication} DROP TABLE ONLY {table}; {again}"
    return [error("publication_narrowed", f"publication {publication}", message, remedy)]
