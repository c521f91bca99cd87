"""A table's content anew in another shape, in one commit upon the old one: partitioned or clustered by other columns,
of other types.

The folder stays the same, so cuts of before, which name versions, are read as before; a reader of the newest version
sees the old shape or the new one and nothing in between. The commit leaves the applied position as it is and counts the
table's schemas under the appId that changes of columns count them under (`headwater.apply.columns`): who comes back
after a crash knows whether it is done. What is large is made ready beside and committed as a plan is
(`headwater.apply.made_ready`), and counts them, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa

from headwater.apply.columns import columns_counter, schemas_counted
from headwater.apply.direct import Fence, obstacle
from headwater.arrow_types import lake_schema
from headwater.delta import clustering, delta_log
from headwater.delta.commit_notes import note
from headwater.delta.delta_log import Snapshot, read_snapshot
from headwater.delta.delta_types import delta_type, fields_of
from headwater.delta.layout import layout_of
from headwater.delta.log_entries import Action
from headwater.delta.metadata import becoming, columns_change
from headwater.delta.new_files import discard, write_rows
from headwater.delta.small_tables import LostRace
from headwater.errors import ForeignWrite, Refused
from headwater.schema import TableSchema


def why_not(folder: str, version: int | None = None) -> str:
    """Why the table in `folder` cannot be rebuilt; empty if it can."""
    return obstacle(read_snapshot(folder, version))


def shape_ahead(
    folder: str, version: int, name: str, app_id: str, schemas: int, shapes: Iterable[TableSchema]
) -> TableSchema | None:
    """Which of `shapes` the table is in, if that is a later one than the `schemas` that the registry knows of it; None:
    it is not. ForeignWrite when it is in none of them."""
    snapshot = read_snapshot(folder, version)
    if schemas_counted(snapshot, app_id) <= schemas:
        return None
    for shape in shapes:
        if _is_in(snapshot, shape):
            return shape
    raise ForeignWrite(
        "it was rebuilt, and nobody knows any more into which shape",
        where=name,
        remedy=f"headwater load PIPELINE.yaml --table {name} --again",
    )


def _is_in(snapshot: Snapshot, shape: TableSchema) -> bool:
    types = {field["name"]: field["type"] for field in fields_of(snapshot.metadata)}
    return (
        list(snapshot.metadata["partitionColumns"]) == list(shape.partition_by)
        and clustering.clustered_by(snapshot) == tuple(map(layout_of(snapshot.metadata).in_files, shape.cluster_by))
        and types.keys() == set(lake_schema(shape).names)
        and all(types[column.name] == delta_type(column.value) for column in shape.columns)
    )


def rebuild(
    folder: str,
    version: int,
    name: str,
    app_id: str,
    schema: TableSchema,
    rows: Iterable[pa.Table],
    number: int,
    fence: Fence,
) -> tuple[int, int]:
    """Let `rows`, in the columns of `schema`, take the place of all there are in `version`; `number`: of this schema
    among the table's. The version afterwards, and how many rows were there before.

    LostRace when another commit came first, Fenced by a newer driver. Refused when the table is not written directly.
    """
    snapshot = read_snapshot(folder, version)
    fence.refuse_newer(snapshot, name)
    if why := obstacle(snapshot):
        raise Refused(
            f"it cannot be rebuilt: {why}",
            code="not_rebuildable",
            where=name,
            remedy=f"headwater load PIPELINE.yaml --table {name} --again",
        )
    layout, run = layout_of(becoming(snapshot, schema)), clustering.new_run() if schema.cluster_by else ""
    written = [one.file for one in write_rows(folder, lake_schema(schema), rows, layout, run)]
    gone = list(snapshot.files.values())
    metrics = {"numRemovedFiles": len(gone), "numAddedFiles": len(written)}
    # As an overwrite: what the table held before does not matter to whoever asks where its rows come from.
    said = {
        "mode": "Overwrite",
        "partitionBy": json.dumps(list(schema.partition_by)),
        "because": "the table was rebuilt",
    }
    info = delta_log.commit_info("REBUILD", said, metrics, version)
    info["commitInfo"]["userMetadata"] = note(version)
    actions: list[Action] = [
        info,
        delta_log.transaction(app_id, snapshot.transactions.get(app_id, 0)),
        delta_log.transaction(columns_counter(app_id), number),
        delta_log.transaction(fence.app_id, fence.generation),
        *columns_change(snapshot, schema),
        *(delta_log.remove(file) for file in gone),
        *(delta_log.add(file) for file in written),
    ]
    try:
        delta_log.commit(folder, version + 1, actions)
    except LostRace:  # behind any other error the commit may be there, and name them
        discard(folder, written)
        raise
    return version + 1, sum((file.rows or 0) - file.deleted for file in gone)
