"""A table's columns become others, in one commit: added, renamed; a dropped one stays and is NULL from then on.

Columns without a value in older rows cost one entry in the log. Where older rows change (a default, another name, a
wider type) every data file is written anew, those of a large table by Spark's tasks. So it is read as before by every
reader: no column mapping is switched on behind anybody's back. The commit carries the applied position, which it leaves
as it is, and counts the table's schemas under an appId of its own, so that who comes back after a crash knows whether
it is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import Fence, obstacle
from headwater.apply.live_files import deleted_rows
from headwater.delta import delta_log, storage
from headwater.delta.clustering import run_of
from headwater.delta.commit_notes import note
from headwater.delta.data_files import live_batches, write_batches
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.delta_types import delta_type, fields_of, stored_schema
from headwater.delta.layout import layout_of
from headwater.delta.log_entries import Action
from headwater.delta.metadata import with_features
from headwater.delta.new_files import discard
from headwater.delta.small_tables import LostRace
from headwater.delta.tables import NEEDS_MAPPING, STATISTICS, properties
from headwater.errors import SchemaChanged
from headwater.schema import Column, TableSchema


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """What changes. `schema`: the table's afterwards. `fill`: by added column the one value of older rows, as an Arrow
    array of length 1; absent: NULL. `widened`: columns, under their names of afterwards, with another type. `number`:
    of this schema among the table's, from 2 on; 0: it needs none, since what is done is seen in the columns.
    """

    schema: TableSchema
    added: tuple[Column, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    fill: Mapping[str, pa.Array] = field(default_factory=dict)
    widened: tuple[Column, ...] = ()
    number: int = 0


def columns_counter(app_id: str) -> str:
    """The appId that counts the schemas a table has had since its load, from 2 on."""
    return f"{app_id}/columns"


def schemas_counted(snapshot: Snapshot, app_id: str) -> int:
    """How many of its schemas the table had followed when it was last changed: one that changes nothing in the lake is
    not counted."""
    return snapshot.transactions.get(columns_counter(app_id), 1)


def require_possible(folder: str, version: int, name: str, to: ColumnChange) -> None:
    """SchemaChanged when the table cannot become that."""
    _refuse(read_snapshot(folder, version), name, to)


def evolve(folder: str, version: int, name: str, app_id: str, to: ColumnChange, fence: Fence, tasks: FileTasks) -> int:
    """Commit the change upon `version`; the version afterwards (the same where it is done already). `tasks` write the
    files anew.

    LostRace when another commit came first. SchemaChanged when the table cannot become that; Fenced by a newer driver.
    """
    snapshot = read_snapshot(folder, version)
    if not (to.added or to.renamed or to.widened) or (to.number and schemas_counted(snapshot, app_id) >= to.number):
        return version
    fence.refuse_newer(snapshot, name)
    _refuse(snapshot, name, to)
    metadata = _metadata(snapshot, to)
    removed = list(snapshot.files.values()) if to.renamed or to.fill or to.widened else []
    living = [file for file in removed if (file.rows is None) or file.rows > file.deleted]
    size = sum(file.size for file in living)
    rewrite = _Rewrite(replace(snapshot, files={}, transactions={}), metadata, to)
    added = tasks.map(rewrite, living, size, lambda file: discard(folder, [file]))
    storage.wrote(*(file.in_folder(folder) for file in added))  # by whichever process
    protocol = with_features(snapshot, metadata)
    metrics = {"numRemovedFiles": len(removed), "numAddedFiles": len(added)}
    said = {
        "columns": json.dumps([*(c.name for c in (*to.added, *to.widened)), *to.renamed.values()]),
        "because": "columns have changed at the source",
    }
    info = delta_log.commit_info("CHANGE COLUMNS", said, metrics, version)
    info["commitInfo"]["userMetadata"] = note(version)
    actions: list[Action] = [
        info,
        delta_log.transaction(app_id, snapshot.transactions.get(app_id, 0)),
        *([delta_log.transaction(columns_counter(app_id), to.number)] if to.number else []),
        delta_log.transaction(fence.app_id, fence.generation),
        *([{"protocol": protocol}] if protocol else []),
        {"metaData": metadata},
        *(delta_log.remove(file) for file in removed),
        *(delta_log.add(file) for file in added),
    ]
    try:
        delta_log.commit(folder, version + 1, actions)
    except LostRace:  # behind any other error the commit may be there, and name them
        discard(folder, added)
        raise
    return version + 1


def _refuse(snapshot: Snapshot, name: str, to: ColumnChange) -> None:
    why = obstacle(snapshot)
    if not why and layout_of(snapshot.metadata).physical:
        why = "it has column mapping"
    odd = [column for column in (*(c.name for c in to.added), *to.renamed.values()) if set(column) & NEEDS_MAPPING]
    if not why and odd:
        why = f"the name {odd[0]!r} needs column mapping"
    # Delta does not tell names apart by case. A dropped column is still there, with the values of its time.
    stay = {field["name"].lower() for field in fields_of(snapshot.metadata)} - {old.lower() for old in to.renamed}
    again = [column for column in (*(c.name for c in to.added), *to.renamed.values()) if column.lower() in stay]
    if not why and again:
        why = f"it still holds a dropped column {again[0]}"
    if why:
        raise SchemaChanged(
            f"its columns changed at the source, and the table in the lake cannot follow: {why}",
            where=name,
            remedy=f"headwater load PIPELINE.yaml --table {name} --again",
        )


def _metadata(snapshot: Snapshot, to: ColumnChange) -> Action:
    fields = [{**field, "name": to.renamed.get(field["name"], field["name"])} for field in fields_of(snapshot.metadata)]
    wider = {column.name: delta_type(column.value) for column in to.widened}
    fields = [{**field, "type": wider.get(field["name"], field["type"])} for field in fields]
    fields += [
        {"name": column.name, "type": delta_type(column.value), "nullable": True, "metadata": {}} for column in to.added
    ]
    configuration = dict(snapshot.configuration)
    if STATISTICS in configuration:
        configuration[STATISTICS] = properties(to.schema, 0).get(STATISTICS, configuration[STATISTICS])
    schema = json.dumps({"type": "struct", "fields": fields}, separators=(",", ":"))
    return {**snapshot.metadata, "schemaString": schema, "configuration": configuration}


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """Writes the rows of a file that are there anew, with the columns of `metadata`."""

    snapshot: Snapshot
    metadata: Action
    to: ColumnChange

    def __call__(self, file: DataFile) -> DataFile:
        layout, after = layout_of(self.metadata), stored_schema(self.metadata)
        return write_batches(
            self.snapshot.folder, after, self._batches(file, after), layout, beside=file, run=run_of(file.name)
        )

    def _batches(self, file: DataFile, after: pa.Schema) -> Iterator[pa.Table]:
        snapshot, to = self.snapshot, self.to
        layout, before = layout_of(snapshot.metadata), stored_schema(snapshot.metadata)
        for rows in live_batches(snapshot.folder, file, deleted_rows(snapshot, file), before, layout):
            columns = dict(zip((to.renamed.get(n, n) for n in rows.column_names), rows.columns, strict=True))
            for column in to.added:
                kind = after.field(column.name).type
                value = to.fill.get(column.name)
                filled = pa.nulls(rows.num_rows, kind)
                if value is not None:
                    filled = value.cast(kind).take(pa.array([0] * rows.num_rows, pa.int64()))
                columns[column.name] = filled
            yield pa.table([columns[column.name].cast(column.type) for column in after], schema=after)
