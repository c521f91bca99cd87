"""The whole content of a table, committed without an engine: for a small one Spark takes a second for what is done here
in some milliseconds, and a pipeline may have thousands of such tables; files of a large one are written by whoever read
their rows (`headwater.jobs.stretches`). What is plain is written here; all else Spark writes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from headwater.arrow_types import as_stored, lake_schema
from headwater.lake import clustering, delta_log, storage
from headwater.lake.commits import LostRace
from headwater.lake.delta_log import Action, DataFile, Snapshot, now_milliseconds, read_snapshot
from headwater.lake.delta_types import delta_type, fields_of
from headwater.lake.layout import PLAIN, layout_of
from headwater.lake.partitioned_write import discard, write_rows
from headwater.lake.paths import log_path
from headwater.lake.positional import obstacle
from headwater.lake.tables import NEEDS_MAPPING, properties
from headwater.schema import DELETED, DELETED_AT, DELETED_LSN, PARTITION_COLUMN, TableSchema


def is_plain(folder: str, schema: TableSchema) -> bool:
    """Whether a table with this schema is written here: new, or in place of one whose columns are just the same."""
    names = [column["name"] for column in _fields(schema)]
    mapped = any(set(name) & NEEDS_MAPPING for name in names)
    # Names that differ by case alone Delta refuses: that is Spark's to say.
    alike = len({name.lower() for name in names}) < len(names)
    if mapped or alike or schema.partition_by:
        return False
    try:
        snapshot = _stands(folder)
    except FileNotFoundError:
        return False  # a log that cannot be followed: for Spark to say
    if snapshot is None:
        return True
    same = fields_of(snapshot.metadata) == _fields(schema) and not snapshot.metadata.get("partitionColumns")
    return same and not obstacle(snapshot)


def create(folder: str, schema: TableSchema, keep_cuts: float) -> None:
    """Create the empty table unless there is one. `keep_cuts`: seconds that old versions are kept. LostRace when
    somebody else does so just now."""
    if _stands(folder) is not None:
        return
    features = ["timestampNtz"] if any("timestamp_ntz" in column.value.lake for column in schema.columns) else []
    clustered = [clustering.domain(schema.cluster_by, PLAIN)] if schema.cluster_by else []
    more = clustering.FEATURES if clustered else ()
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors", *features],
        "writerFeatures": ["deletionVectors", "invariants", "appendOnly", *features, *more],
    }
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": _fields(schema)}, separators=(",", ":")),
        "partitionColumns": [],
        "configuration": properties(schema, keep_cuts),
        "createdTime": now_milliseconds(),
    }
    info = delta_log.commit_info("CREATE TABLE", {}, {}, -1)
    storage.make_folder(log_path(folder))
    delta_log.create(folder, [info, {"metaData": metadata}, {"protocol": protocol}, *clustered])


def overwrite(
    folder: str, schema: TableSchema, batches: Iterable[pa.RecordBatch], app_id: str, position: int
) -> tuple[int, int]:
    """Make the rows of `batches` the whole content, in one commit that carries `position` under `app_id`. The rows, and
    bytes written. LostRace when another commit came first (it may be that of a later load), and what `batches` raises:
    then nothing has changed."""
    snapshot = read_snapshot(folder)
    kind = lake_schema(schema)
    tables: Iterable[pa.Table] = (as_stored(batch, kind) for batch in batches)
    run = clustering.new_run() if schema.cluster_by else ""
    if run:
        tables = clustering.ordered(tables, schema.cluster_by)
    added = [written.file for written in write_rows(folder, kind, tables, layout_of(snapshot.metadata), run)]
    try:
        return put_files(snapshot, schema, added, app_id, position)
    except LostRace:  # behind any other error the commit may be there, and name them
        discard(folder, added)
        raise


def put_files(
    snapshot: Snapshot, schema: TableSchema, added: Sequence[DataFile], app_id: str, position: int
) -> tuple[int, int]:
    """`overwrite`, by files that are written; they stay where they are whatever is raised. `snapshot`: of the table
    before the first of them was."""
    rows, size = sum(file.rows or 0 for file in added), sum(file.size for file in added)
    metrics = {"numFiles": len(added), "numOutputRows": rows, "numOutputBytes": size}
    actions: list[Action] = [
        delta_log.commit_info("WRITE", {"mode": "Overwrite", "partitionBy": "[]"}, metrics, snapshot.version),
        delta_log.transaction(app_id, position),
        *clustering.change(snapshot, schema.cluster_by, layout_of(snapshot.metadata)),
        *(delta_log.remove(file) for file in snapshot.files.values()),
        *(delta_log.add(file) for file in added),
    ]
    delta_log.commit(snapshot.folder, snapshot.version + 1, actions)
    return rows, size


def _fields(schema: TableSchema) -> list[dict[str, Any]]:
    kinds = [(column.name, delta_type(column.value)) for column in schema.columns]
    if schema.partitioned:
        kinds.append((PARTITION_COLUMN, "long"))
    if schema.soft_delete:
        kinds += [(DELETED, "boolean"), (DELETED_LSN, "long"), (DELETED_AT, "timestamp")]
    return [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds]


def _stands(folder: str) -> Snapshot | None:
    return read_snapshot(folder) if storage.names(log_path(folder)) else None
