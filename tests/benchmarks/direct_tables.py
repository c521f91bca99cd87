"""Delta tables made without Spark, as a load would have made them: for set-ups of many tables, and of large ones."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from headwater.arrow_types import lake_schema
from headwater.delta import delta_log
from headwater.delta.data_files import write_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.delta_types import delta_type
from headwater.delta.log_entries import Action
from headwater.schema import TableSchema

_FEATURES = ["deletionVectors"]


def make_table(folder: Path, schema: TableSchema, files: Iterable[pa.Table], *more: Action) -> list[DataFile]:
    """A table whose first commit adds a file for each of `files`, and `more` actions."""
    log = folder / "_delta_log"
    log.mkdir(parents=True)
    written = [write_batches(str(folder), lake_schema(schema), [rows]) for rows in files]
    fields = [{"name": c.name, "type": delta_type(c.value), "nullable": True, "metadata": {}} for c in schema.columns]
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {"delta.enableDeletionVectors": "true", "delta.checkpointInterval": "100"},
        "createdTime": 0,
    }
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": _FEATURES, "writerFeatures": _FEATURES}
    actions = [
        delta_log.commit_info("WRITE", {"mode": "Overwrite"}, {"numOutputRows": sum(f.rows or 0 for f in written)}, -1),
        {"protocol": protocol},
        {"metaData": metadata},
        *map(delta_log.add, written),
        *more,
    ]
    lines = "\n".join(json.dumps(action) for action in actions)
    (log / f"{0:020d}.json").write_text(lines + "\n")
    return written
