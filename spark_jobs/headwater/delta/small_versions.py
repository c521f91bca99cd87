"""The rows of a version of a Delta table, read by this process: of tables so small that Spark takes longer to start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Final

import pyarrow as pa
from pyroaring import BitMap

from headwater.delta import storage
from headwater.delta.data_files import live_batches
from headwater.delta.deletion_vectors import read_vector
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.layout import layout_of, obstacle
from headwater.delta.whole import lost_file

SMALL_BYTES: Final = 32 << 20
_SMALL_ROWS: Final = 2_000_000
"""Rows that are much alike take few bytes in a file, and many in memory."""
_READER_FEATURES: Final = frozenset({"columnMapping", "deletionVectors", "timestampNtz", "vacuumProtocolCheck"})
"""What is heeded here; a table with others is read by Spark."""


class TableUnreadable(Exception):
    """The table is damaged: a file is missing, or is not what it should be."""


def snapshot_at(place: str, version: int) -> Snapshot:
    """`read_snapshot`, with TableUnreadable for what is damaged."""
    with damage_named():
        return read_snapshot(place, version)


def refuse_lost(snapshot: Snapshot) -> None:
    """TableUnreadable where a file is missing or has another size: for what another engine could not read."""
    with damage_named():
        lost = lost_file(snapshot.folder, snapshot.version)
    if lost:
        raise TableUnreadable(f"its Delta table cannot be read: {lost}")


def is_small(snapshot: Snapshot) -> bool:
    """Whether its rows are read here, and that sooner than Spark would start."""
    files = snapshot.files.values()
    readable = _READER_FEATURES.issuperset(snapshot.protocol.get("readerFeatures") or ())
    size, rows = sum(file.size for file in files), sum(file.rows or 0 for file in files)
    return readable and not obstacle(snapshot.metadata) and size < SMALL_BYTES and rows < _SMALL_ROWS


def batches(snapshot: Snapshot, schema: pa.Schema) -> Iterator[pa.Table]:
    """The columns of `schema` of all rows, in parts. TableUnreadable."""
    with damage_named():
        for file in snapshot.files.values():
            yield from _live_batches(snapshot, file, schema)


def rows_by_file(snapshot: Snapshot, schema: pa.Schema) -> list[tuple[str, pa.Table]]:
    """The same, by the name of the file that they lie in."""
    files = list(snapshot.files.values())

    def read(file: DataFile) -> pa.Table:
        return pa.concat_tables([schema.empty_table(), *_live_batches(snapshot, file, schema)])

    with damage_named():
        found = storage.side_by_side(snapshot.folder, [partial(read, file) for file in files])
    return [(file.name, rows) for file, rows in zip(files, found, strict=True)]


def _live_batches(snapshot: Snapshot, file: DataFile, schema: pa.Schema) -> Iterator[pa.Table]:
    gone = read_vector(snapshot.folder, file.vector) if file.vector else BitMap()
    return live_batches(snapshot.folder, file, gone, schema, layout_of(snapshot.metadata))


@contextlib.contextmanager
def damage_named() -> Iterator[None]:
    """TableUnreadable for what says so of a file."""
    try:
        yield
    except (FileNotFoundError, KeyError, ValueError, pa.ArrowException) as error:
        raise TableUnreadable(f"its Delta table cannot be read: {error}") from error
    except OSError as error:
        if error.errno is not None:  # of a disk or a store, and not of what the file holds: it may pass
            raise
        raise TableUnreadable(f"its Delta table cannot be read: {error}") from error
