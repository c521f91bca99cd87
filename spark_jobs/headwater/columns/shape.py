"""What the pipeline file says of a loaded table by now, and which of it a rebuild can bring about."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headwater.errors import Refused
from headwater.names import TableName, quote_ident
from headwater.schema import TableSchema, ValueType

HOLD_FROM_A_LOAD_ON: Final = {
    "soft_delete": "soft_delete",
    "history": "history",
    "columns.exclude": "excluded",
    "columns.hash or its key": "hashed",
    "columns.mask": "masked",
    "where": "where",
}
"""Options of a table that hold from its next load on, and that no rebuild goes on without: their fields of
`TableSchema`."""
_LAYOUT: Final = ("partition_by", "cluster_by")


def options_for_a_load(registered: TableSchema, declared: TableSchema) -> list[str]:
    """The options that are others in the file than the table was loaded with, and that only a load brings about."""
    return [
        option
        for option, field in HOLD_FROM_A_LOAD_ON.items()
        if getattr(registered, field) != getattr(declared, field)
    ]


def ways_to_find_rows(registered: TableSchema, declared: TableSchema) -> list[str]:
    """Further options that are others than when the table was loaded, and hold from its next load on. A rebuild leaves
    them as they are."""
    if registered.insert_only != declared.insert_only:
        return ["insert_only"]
    return ["key"] if _key(registered) != _key(declared) else []


def _key(schema: TableSchema) -> frozenset[int]:
    """By attnum: a column of it may have been renamed since."""
    return frozenset(column.attnum for column in schema.columns if column.name in schema.key)


def options_for_a_rebuild(registered: TableSchema, declared: TableSchema) -> list[str]:
    """Those that a rebuild brings about as well."""
    found = [option for option in _LAYOUT if getattr(registered, option) != getattr(declared, option)]
    known = {column.attnum: column for column in registered.columns}
    for column in declared.columns:
        old = known.get(column.attnum)
        # A column that has changed at the source is the log's to tell.
        if old is None or (old.type_oid, old.typmod) != (column.type_oid, column.typmod):
            continue
        if not _are_same(old.value, column.value) or old.on_bad_value != column.on_bad_value:
            found.append(f"types or on_bad_value of {quote_ident(column.name)}")
    return found


def _are_same(old: ValueType, now: ValueType) -> bool:
    """Also where an older registry calls a cidr inet, as it does in a domain: a rebuild would change nothing."""
    if old.element is not None and now.element is not None:
        return _are_same(old.element, now.element) and old == replace(now, element=old.element)
    is_cidr = (old.wire, now.wire) == ("inet", "cidr")
    return old == (replace(now, wire="inet") if is_cidr else now)


def is_rebuildable(registered: TableSchema, declared: TableSchema) -> bool:
    """Whether a rebuild may bring about what differs. Whether the lake's table can be written without Spark is not
    asked."""
    others = options_for_a_load(registered, declared)
    retyped = any(option not in _LAYOUT for option in options_for_a_rebuild(registered, declared))
    return not others and not registered.soft_delete and not (registered.history and retyped)


def reshaped(registered: TableSchema, declared: TableSchema) -> TableSchema:
    """The table as it is registered, in the shape that is declared: partitioned or clustered by other columns, of other
    types in the lake.

    Refused where something else differs, too, that only a load brings about.
    """
    name = str(TableName(registered.schema, registered.name))
    if others := options_for_a_load(registered, declared):
        raise Refused(
            f"{', '.join(others)}: another than when the table was loaded, which a rebuild does not bring about",
            code="not_rebuildable",
            where=name,
            remedy=f"headwater load PIPELINE.yaml --table {name} --again, which brings about all of it",
        )
    now = {column.attnum: column for column in declared.columns}
    columns = tuple(
        replace(old, value=now[old.attnum].value, on_bad_value=now[old.attnum].on_bad_value, narrower=())
        if old.value != now[old.attnum].value
        else replace(old, on_bad_value=now[old.attnum].on_bad_value)
        for old in registered.columns
    )
    return replace(registered, columns=columns, **{option: getattr(declared, option) for option in _LAYOUT})


def has_shape(schema: TableSchema, shape: TableSchema) -> bool:
    """Whether `schema` is in that shape already."""
    of = {column.attnum: (column.value, column.on_bad_value) for column in shape.columns}
    return all(getattr(schema, option) == getattr(shape, option) for option in _LAYOUT) and all(
        of.get(column.attnum) == (column.value, column.on_bad_value) for column in schema.columns
    )
