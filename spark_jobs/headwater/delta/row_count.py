"""How many rows a Delta table has at a version, from its log alone: no data file is opened.

Files say in their statistics how many rows were written, deletion vectors how many of these are gone. delta-rs'
own count leaves the vectors out. Of a table with `soft_delete` the rows that live count: a file that has marked rows
is asked for its marks, one column of booleans.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from headwater.delta.data_files import live_batches
from headwater.delta.deletion_vectors import DamagedVector, read_vector
from headwater.delta.delta_log import Snapshot, read_snapshot
from headwater.schema import DELETED, DELETED_LSN


def row_count(path: str, version: int, *, soft_delete: bool = False) -> int | None:
    """Rows of the table at `path` in `version` that the source has; None when its log or its files' statistics do not
    tell."""
    try:
        snapshot = read_snapshot(path, version)
        files = snapshot.files.values()
        counts = [file.rows - file.deleted for file in files if file.rows is not None]
        marked = _marked(snapshot) if soft_delete else 0
    except (OSError, KeyError, TypeError, ValueError, DamagedVector):
        return None
    return sum(counts) - marked if len(counts) == len(files) else None


def _marked(snapshot: Snapshot) -> int:
    """Rows that are there and say that they are deleted."""
    mark, number = _stored_name(snapshot, DELETED), _stored_name(snapshot, DELETED_LSN)
    count = 0
    for file in snapshot.files.values():
        if json.loads(file.stats or "{}").get("nullCount", {}).get(number, -1) == file.rows:
            continue  # what lives has no such number
        gone = read_vector(snapshot.folder, file.vector) if file.vector else BitMap()
        for part in live_batches(snapshot.folder, file, gone, pa.schema([(mark, pa.bool_())])):
            count += int(np.count_nonzero(np.array(part[mark], dtype=np.bool_)))
    return count


def _stored_name(snapshot: Snapshot, column: str) -> str:
    """The column's name in data files: its own but under column mapping."""
    fields = json.loads(snapshot.metadata["schemaString"])["fields"]
    field = next(field for field in fields if field["name"] == column)
    return str(field["metadata"].get("delta.columnMapping.physicalName", column))
