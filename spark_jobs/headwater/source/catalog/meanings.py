"""What the values of a column's type look like as text, where the source's catalog decides that and not the value: the
labels of enums, the attributes of composite types, also within arrays, domains, ranges and other composite types.

ALTER TYPE changes the text of rows that are stored already, and writes none of them into the log. A meaning is one
such fact, by a key that stays: an enum's label by its oid, a composite type's attributes by the type's relation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from headwater.source.connection import Connection

_FIRST_OF_USERS: Final = 16384
"""The types below it come with the server."""

MEANINGS: Final = """
with recursive made_of(root, type) as (
    select t, t from unnest(%(types)s::oid[]) t
    union
    select m.root, part.oid from made_of m join pg_catalog.pg_type t on t.oid = m.type cross join lateral (
        select t.typbasetype union all select t.typelem
        union all select r.rngsubtype from pg_catalog.pg_range r where t.oid in (r.rngtypid, r.rngmultitypid)
        union all select a.atttypid from pg_catalog.pg_attribute a
                  where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) part(oid)
    where part.oid >= 16384)
select m.root::bigint as root, 'label ' || e.oid as key, e.enumlabel::text as value
from made_of m join pg_catalog.pg_enum e on e.enumtypid = m.type
union all
select m.root::bigint, 'attributes ' || t.typrelid,
       (select coalesce(string_agg(a.attnum || ' ' || a.atttypid, ', ' order by a.attnum), '')
        from pg_catalog.pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped)
from made_of m join pg_catalog.pg_type t on t.oid = m.type where t.typrelid <> 0
"""


def of_users(types: Iterable[int]) -> list[int]:
    """Those of these types that can have a meaning, in order."""
    return sorted({oid for oid in types if oid >= _FIRST_OF_USERS})


def read_meanings(connection: Connection, types: Iterable[int]) -> dict[int, dict[str, str]]:
    """By type oid the meanings of what it is made of; those without any are left out."""
    found: dict[int, dict[str, str]] = defaultdict(dict)
    if asked := of_users(types):
        for root, key, value in connection.execute(MEANINGS, {"types": asked}):
            found[int(root)][key] = value
    return dict(found)


def other_meanings(known: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """How values of before look now, for people; new labels change none."""
    return [
        f"the label {value!r} is {now[key]!r} now"
        if key.startswith("label")
        else "a composite type has other attributes"
        for key, value in sorted(known.items())
        if key in now and now[key] != value
    ]
