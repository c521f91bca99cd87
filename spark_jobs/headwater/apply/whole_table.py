"""The whole content of a table, committed without an engine: for a small one Spark takes a second for what is done here
in some milliseconds, and a pipeline may have thousands of such tables; files of a large one are written by whoever read
their rows (`headwater.load.stretches`). Only what this writer does not know the rules of is left to Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pyarrow as pa

from headwater.apply.direct import obstacle
from headwater.arrow_types import as_stored, lake_schema
from headwater.delta import clustering, delta_log, storage
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.layout import Layout, layout_of
from headwater.delta.log_entries import Action, log_path
from headwater.delta.metadata import becoming, columns_change, features, new_metadata
from headwater.delta.new_files import discard, write_rows
from headwater.delta.small_tables import LostRace
from headwater.errors import Transient
from headwater.schema import TableSchema


def is_written_here(folder: str, schema: TableSchema) -> bool:
    """Whether a table with this schema is written here: a new one, or in place of one that is."""
    if len({column.name.lower() for column in schema.columns}) < len(schema.columns):
        return False  # names that differ by case alone Delta refuses: that is Spark's to say
    try:
        snapshot = _stands(folder)
    except FileNotFoundError:
        return False  # a log that cannot be followed: for Spark to say
    return snapshot is None or not obstacle(snapshot)


def create(folder: str, schema: TableSchema, keep_cuts: float) -> None:
    """Create the empty table unless there is one. `keep_cuts`: seconds that old versions are kept. LostRace when
    somebody else does so just now."""
    if _stands(folder) is not None:
        return
    metadata = new_metadata(schema, keep_cuts)
    both = ["deletionVectors", *features(metadata)]
    clustered = [clustering.domain(schema.cluster_by, layout_of(metadata))] if schema.cluster_by else []
    more = clustering.FEATURES if clustered else ()
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": both,
        "writerFeatures": [*both, "invariants", "appendOnly", *more],
    }
    info = delta_log.commit_info("CREATE TABLE", {}, {}, None)
    storage.make_folder(log_path(folder))
    delta_log.create(folder, [info, {"metaData": metadata}, {"protocol": protocol}, *clustered])


def layout_for(snapshot: Snapshot, schema: TableSchema) -> Layout:
    """How files must be written that are to be the whole content of the table, with the columns of `schema`."""
    return layout_of(becoming(snapshot, schema))


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
    added = [written.file for written in write_rows(folder, kind, tables, layout_for(snapshot, schema), run)]
    try:
        return put_files(snapshot, schema, added, app_id, position)
    except LostRace:  # behind any other error the commit may be there, and name them
        discard(folder, added)
        raise


def put_files(
    snapshot: Snapshot, schema: TableSchema, added: Sequence[DataFile], app_id: str, position: int
) -> tuple[int, int]:
    """`overwrite`, by files that are written as `layout_for` says; they stay where they are whatever is raised.
    `snapshot`: of the table before the first of them was."""
    _refuse_gone(snapshot.folder, added)
    assert not any(file.name in snapshot.files for file in added), "one commit would remove and add the same file"
    rows, size = sum(file.rows or 0 for file in added), sum(file.size for file in added)
    metrics = {"numFiles": len(added), "numOutputRows": rows, "numOutputBytes": size}
    said = {"mode": "Overwrite", "partitionBy": json.dumps(list(schema.partition_by))}
    actions: list[Action] = [
        delta_log.commit_info("WRITE", said, metrics, snapshot.version),
        delta_log.transaction(app_id, position),
        *columns_change(snapshot, schema),
        *(delta_log.remove(file) for file in snapshot.files.values()),
        *(delta_log.add(file) for file in added),
    ]
    delta_log.commit(snapshot.folder, snapshot.version + 1, actions)
    return rows, size


def _refuse_gone(folder: str, added: Sequence[DataFile]) -> None:
    """No commit has named these files yet: a VACUUM by hand takes them for nobody's once they are older than the
    table's retention, which a load may outlast."""
    gone = [file for file in added if not storage.exists(file.in_folder(folder))]
    if gone:
        raise Transient(
            f"{len(gone)} of the {len(added)} files that the load has written are gone from the lake, as by a VACUUM "
            "of another program; nothing was committed",
            code="files_gone",
            where=folder,
            remedy="run load again, and no VACUUM beside it (headwater maintain leaves such files), or raise "
            "lake.keep_cuts above the time that the load takes",
        )


def _stands(folder: str) -> Snapshot | None:
    return read_snapshot(folder) if storage.names(log_path(folder)) else None
