"""The types of a Delta table's schema, as its log writes them, and those of the type table.

Source: Delta transaction protocol, "Schema Serialization Format". Only what a lake can hold here: no maps, no structs.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from headwater.arrow_types import arrow_type
from headwater.delta.log_entries import Action
from headwater.schema import ValueType

_LAKE_TYPES = {"integer": "int", "long": "bigint", "short": "smallint"}
_DELTA_TYPES = {lake: delta for delta, lake in _LAKE_TYPES.items()}


def fields_of(metadata: Action) -> list[Action]:
    """The columns of the table that `metadata` describes, in order."""
    found: list[Action] = json.loads(metadata.get("schemaString") or '{"fields": []}')["fields"]
    return found


def value_type(kind: Any) -> ValueType:
    """The type of the type table; its `wire` says nothing but for arrays."""
    if isinstance(kind, dict):
        element = value_type(kind["elementType"])
        return ValueType("array", f"array<{element.lake}>", element=element)
    return ValueType("", _LAKE_TYPES.get(kind, kind))


def delta_type(value: ValueType) -> Any:
    """What a schema says of a column of this type."""
    if value.element is not None and value.lake.startswith("array<"):
        return {"type": "array", "elementType": delta_type(value.element), "containsNull": True}
    return _DELTA_TYPES.get(value.lake, value.lake)


def stored_schema(metadata: Action) -> pa.Schema:
    """All columns of the table, those included that no source has any more. ValueError for a type of somebody else's
    column that is not known here."""
    return pa.schema([pa.field(field["name"], arrow_type(value_type(field["type"]))) for field in fields_of(metadata)])
