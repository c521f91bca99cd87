"""What a person wants to know of the source's tables before choosing some: how large they are, what tells their rows
apart, what the lake holds otherwise than the source, and why one cannot be replicated. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from headwater.names import TableName, quote_ident
from headwater.schema import SERVER_TEXT, Column
from headwater.source.catalog.catalog import Catalog, Judged
from headwater.source.catalog.identity import identity_index
from headwater.source.catalog.relations import FOREIGN, ORDINARY, PARTITIONED, Listed, list_relations
from headwater.source.catalog.types import can_be_bad
from headwater.source.connection import Connection, errors_named
from headwater.source.problems import Problem

RIGHTS: Final = frozenset({"no_usage", "no_select", "row_security"})
"""Problems of a role, not of a table."""
_TEXT_OF_ITS_OWN: Final = "text"

_SIZES: Final = """
select c.oid::bigint, pg_catalog.pg_table_size(c.oid), c.reltuples::float8
from pg_catalog.pg_class c where c.oid = any(%s)
"""
_TYPES: Final = """
select a.attrelid::bigint, a.attnum, pg_catalog.format_type(a.atttypid, a.atttypmod)
from pg_catalog.pg_attribute a where a.attrelid = any(%s) and a.attnum > 0
"""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A table. `bytes` without indexes; `rows` as the server estimates them, None: it never counted.

    `identity`: what an old row carries in the log. `as_text`: columns that are text in the lake and not at the source,
    each with the reason; `may_not_fit`: columns whose type has values that the lake's has not. `obstacles`: why it
    cannot be replicated; empty: it can. `notes`: what is worth knowing.
    """

    name: TableName
    bytes: int
    rows: int | None
    identity: str
    key: tuple[str, ...]
    as_text: dict[str, str]
    may_not_fit: tuple[str, ...]
    obstacles: tuple[Problem, ...]
    notes: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """With the first obstacle's reason and remedy, where there is one."""
        first = self.obstacles[0] if self.obstacles else None
        return {
            "bytes": self.bytes,
            "rows": self.rows,
            "identity": self.identity,
            "key": list(self.key),
            "as_text": self.as_text,
            "may_not_fit": list(self.may_not_fit),
            "notes": [str(note) for note in self.notes],
            "reason": first.message if first is not None else "",
            "remedy": first.remedy if first is not None else "",
        }


@errors_named("source")
def candidates(connection: Connection) -> tuple[Listed, ...]:
    """What somebody could mean to replicate: tables of every user, without partitions of others among them."""
    kinds = (ORDINARY, PARTITIONED, FOREIGN)
    listed = (one for one in list_relations(connection) if one.kind in kinds and one.persistence != "t")
    return tuple(sorted((one for one in listed if one.parent is None), key=lambda one: one.name))


@errors_named("source")
def survey(connection: Connection, listed: Iterable[Listed], catalog: Catalog) -> tuple[Surveyed, ...]:
    """The tables `listed`, in order, as `catalog`, which was asked for all of them, has judged them."""
    judged = {one.relation.name: one for one in catalog.judged}
    ids = sorted({i for one in judged.values() for i in _relations(one)} | {one.relation_id for one in listed})
    sizes = {oid: (size, rows) for oid, size, rows in connection.execute(_SIZES, [ids])}
    types = {(oid, attnum): name for oid, attnum, name in connection.execute(_TYPES, [ids])}
    found = []
    for one in listed:
        table = judged.get(one.name)
        problems = table.problems if table is not None else [p for p in catalog.problems if p.where == str(one.name)]
        holders = [r.relation_id for r in table.holders] if table is not None else [one.relation_id]
        counts = [sizes[i][1] for i in holders if i in sizes]
        columns = table.columns if table is not None else ()
        found.append(
            Surveyed(
                name=one.name,
                bytes=sum(sizes[i][0] for i in holders if i in sizes),
                rows=None if any(count < 0 for count in counts) else round(sum(counts)),
                identity=_identity(table) if table is not None else "none",
                key=table.key if table is not None else (),
                as_text={
                    c.name: why for c in columns if (why := _why_text(c, types.get((one.relation_id, c.attnum), "")))
                },
                may_not_fit=tuple(c.name for c in columns if can_be_bad(c.value)),
                obstacles=tuple(p for p in problems if p.is_error and p.code not in RIGHTS),
                notes=tuple(p for p in problems if not p.is_error),
            )
        )
    return tuple(found)


def _relations(table: Judged) -> list[int]:
    return [table.relation.relation_id, *(holder.relation_id for holder in table.holders)]


def _identity(table: Judged) -> str:
    relation = table.holders[0] if table.holders else table.relation
    if relation.replica_identity == "f":
        return "full"
    index = identity_index(relation)
    if index is None:
        return "none"
    columns = ", ".join(map(quote_ident, index.columns))
    return f"primary key ({columns})" if index.primary else f"index {quote_ident(index.name)} ({columns})"


def _why_text(column: Column, type_name: str) -> str:
    """Why a column that is no text at the source is text in the lake; empty: it is not."""
    value = column.value
    if value.lake != "string" or value.wire == _TEXT_OF_ITS_OWN:
        return ""
    if value.wire == "numeric":
        return f"{type_name}: more digits than a decimal has, or no bound; types: decimal(p,s), where every value fits"
    if value.wire == SERVER_TEXT:
        return f"{type_name}: a type without a known binary form, because of which the whole log comes as text"
    return f"{type_name}: in PostgreSQL's own text form"
