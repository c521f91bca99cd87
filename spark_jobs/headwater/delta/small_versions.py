"""The rows of a version of a Delta table, read by this process: of tables so small that Spark takes longer to start."""

from __future__ import annotations

from functools import partial
from typing import Final

import pyarrow as pa
from pyroaring import BitMap

from headwater.delta import storage
from headwater.delta.data_files import live_batches
from headwater.delta.deletion_vectors import read_vector
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.layout import layout_of, obstacle

SMALL_BYTES: Final = 64 << 20
_READER_FEATURES: Final = frozenset({"columnMapping", "deletionVectors", "timestampNtz", "vacuumProtocolCheck"})
"""What is heeded here; a table with others is read by Spark."""


class TableUnreadable(Exception):
    """The table is damaged: a file is missing, or is not what it should be."""


def snapshot_at(place: str, version: int) -> Snapshot:
    """`read_snapshot`, with TableUnreadable where it has an error."""
    try:
        return read_snapshot(place, version)
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise TableUnreadable(f"its Delta table cannot be read: {error}") from error


def is_small(snapshot: Snapshot) -> bool:
    """Whether `rows_by_file` gives its rows, and that sooner than Spark would start."""
    readable = _READER_FEATURES.issuperset(snapshot.protocol.get("readerFeatures") or ())
    return readable and not obstacle(snapshot.metadata) and sum(f.size for f in snapshot.files.values()) < SMALL_BYTES


def rows_by_file(snapshot: Snapshot, schema: pa.Schema) -> list[tuple[str, pa.Table]]:
    """The columns of `schema` of all rows, by the name of the file that they lie in. TableUnreadable."""
    files = list(snapshot.files.values())
    try:
        read = storage.side_by_side(snapshot.folder, [partial(_live_rows, snapshot, file, schema) for file in files])
    except (FileNotFoundError, ValueError) as error:
        raise TableUnreadable(f"its Delta table cannot be read: {error}") from error
    return [(file.name, rows) for file, rows in zip(files, read, strict=True)]


def _live_rows(snapshot: Snapshot, file: DataFile, schema: pa.Schema) -> pa.Table:
    gone = read_vector(snapshot.folder, file.vector) if file.vector else BitMap()
    parts = live_batches(snapshot.folder, file, gone, schema, layout_of(snapshot.metadata))
    return pa.concat_tables([schema.empty_table(), *parts])
