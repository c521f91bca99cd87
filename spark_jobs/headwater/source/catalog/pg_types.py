"""Reads rows of pg_type, with the types they are made of, as `types.PgType`; what they become is `types`' subject."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headwater.source.catalog.types import PgType
from headwater.source.connection import Connection

# Elements of arrays and bases of domains, to any depth. Only true arrays (typcategory A) are followed by element.
_TYPES = """
with recursive needed(oid) as (
    select unnest(%s::oid[])
    union
    select made_of.oid from needed join pg_catalog.pg_type t on t.oid = needed.oid
    cross join lateral (values (case when t.typcategory = 'A' then t.typelem end), (t.typbasetype)) as made_of(oid)
    where made_of.oid <> 0)
select t.oid, t.typname::text, n.nspname::text, t.typtype::text, t.typcategory::text,
       t.typelem, t.typbasetype, t.typtypmod
from needed join pg_catalog.pg_type t on t.oid = needed.oid join pg_catalog.pg_namespace n on n.oid = t.typnamespace
"""


def read_types(connection: Connection, oids: Iterable[int]) -> dict[int, PgType]:
    """The types `oids`, each with element and base filled in; `typmod` is -1: it belongs to a column."""
    rows = {row[0]: row for row in connection.execute(_TYPES, [sorted(set(oids))])}
    return {oid: _build(rows, oid) for oid in rows}


def _build(rows: dict[int, tuple[Any, ...]], oid: int) -> PgType:
    _, name, schema, kind, category, element, base, domain_typmod = rows[oid]
    return PgType(
        oid=oid,
        name=name,
        schema=schema,
        kind=kind,
        category=category,
        element_oid=element,
        base_oid=base,
        element=_build(rows, element) if category == "A" and element in rows else None,
        base=replace(_build(rows, base), typmod=domain_typmod) if base in rows else None,
    )
