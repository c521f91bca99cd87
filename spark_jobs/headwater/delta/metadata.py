"""What a table's log says of its columns: their names, types and partitioning, the properties that follow, and the
protocol's features that a reader or writer of them needs.

Source: Delta protocol, "Change Metadata", "Column Mapping", "Protocol Evolution".
"""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

from headwater.delta import clustering, delta_log
from headwater.delta.delta_log import Snapshot
from headwater.delta.delta_types import delta_type, fields_of
from headwater.delta.layout import layout_of
from headwater.delta.log_entries import Action
from headwater.delta.tables import NEEDS_MAPPING, STATISTICS, properties
from headwater.schema import DELETED, DELETED_AT, DELETED_LSN, PARTITION_COLUMN, TableSchema

_MODE: Final = "delta.columnMapping.mode"
_LAST_ID: Final = "delta.columnMapping.maxColumnId"
_ID, _PHYSICAL, _COMMENT = "delta.columnMapping.id", "delta.columnMapping.physicalName", "comment"
_NONE: Final[Action] = {}


def new_metadata(schema: TableSchema, keep_cuts: float) -> Action:
    """Of a table that is yet to be made. `keep_cuts`: seconds that old versions are kept."""
    begun = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "configuration": properties(schema, keep_cuts),
        "createdTime": delta_log.now_milliseconds(),
    }
    return _with_columns(begun, schema)


def becoming(snapshot: Snapshot, schema: TableSchema) -> Action:
    """Of the table once it has the columns of `schema` and no others; the metadata that it has where they are the same.

    A column that stays keeps its name in files, and what somebody has written beside it. Asked twice of one version,
    the answer is the same: files may be written long before the commit that says how to read them.
    """
    before = snapshot.metadata
    changed = _with_columns(before, schema)
    configuration = changed["configuration"]
    if fields_of(before) != fields_of(changed) and STATISTICS in configuration:
        chosen = properties(schema, 0).get(STATISTICS)
        configuration = {name: value for name, value in configuration.items() if name != STATISTICS}
        changed["configuration"] = {**configuration, **({STATISTICS: chosen} if chosen else {})}
    same = all(changed[name] == before.get(name) for name in ("partitionColumns", "configuration"))
    return before if same and fields_of(before) == fields_of(changed) else changed


def features(metadata: Action) -> list[str]:
    """The features that a table with these columns needs, of readers and writers."""
    needed = ["timestampNtz"] if any("timestamp_ntz" in str(column["type"]) for column in fields_of(metadata)) else []
    return [*needed, *(["columnMapping"] if _is_mapped(metadata["configuration"]) else [])]


def with_features(snapshot: Snapshot, metadata: Action) -> Action | None:
    """The protocol that the table needs to become that; None: the one that it has is enough."""
    missing = set(features(metadata)) - snapshot.features
    if not missing:
        return None
    protocol = dict(snapshot.protocol)
    for kind in ("readerFeatures", "writerFeatures"):
        protocol[kind] = sorted({*(protocol.get(kind) or ()), *missing})
    return protocol


def columns_change(snapshot: Snapshot, schema: TableSchema) -> list[Action]:
    """The actions after which the table has the columns, partitioning and clustering of `schema`; none where it has."""
    metadata = becoming(snapshot, schema)
    protocol = with_features(snapshot, metadata)
    clustered = clustering.change(snapshot, schema.cluster_by, layout_of(metadata), protocol)
    if protocol is not None and not any("protocol" in action for action in clustered):
        clustered = [{"protocol": protocol}, *clustered]
    return [*([{"metaData": metadata}] if metadata is not snapshot.metadata else []), *clustered]


def _with_columns(before: Action, schema: TableSchema) -> Action:
    known = {column["name"]: column for column in fields_of(before)}
    configuration = dict(before["configuration"])
    fields: list[Action] = []
    for name, kind in _columns(schema):
        old = known.get(name, _NONE)
        said = old.get("metadata") or {}
        kept = {_COMMENT: said[_COMMENT]} if _COMMENT in said else {}
        if old.get("type") == kind:
            kept |= {key: said[key] for key in (_ID, _PHYSICAL) if key in said}
        fields.append({"name": name, "type": kind, "nullable": True, "metadata": kept})
    if _is_mapped(configuration) or any(set(column["name"]) & NEEDS_MAPPING for column in fields):
        configuration[_MODE] = "name"
        last = int(configuration.get(_LAST_ID, 0))
        for column in fields:
            if _PHYSICAL in column["metadata"]:
                continue
            last += 1
            physical = uuid.uuid5(uuid.NAMESPACE_OID, f"{before['id']}/{last}")
            column["metadata"] |= {_ID: last, _PHYSICAL: f"col-{physical}"}
        configuration[_LAST_ID] = str(last)
    return {
        **before,
        "schemaString": json.dumps({"type": "struct", "fields": fields}, separators=(",", ":")),
        "partitionColumns": list(schema.partition_by),
        "configuration": configuration,
    }


def _is_mapped(configuration: dict[str, str]) -> bool:
    return configuration.get(_MODE, "none") != "none"


def _columns(schema: TableSchema) -> list[tuple[str, Any]]:
    columns = [(column.name, delta_type(column.value)) for column in schema.columns]
    if schema.partitioned:
        columns.append((PARTITION_COLUMN, "long"))
    if schema.soft_delete:
        columns += [(DELETED, "boolean"), (DELETED_LSN, "long"), (DELETED_AT, "timestamp")]
    return columns
