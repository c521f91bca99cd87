"""`headwater rebuild`: a live table in the shape that the pipeline file gives it by now, partitioned or clustered by
other columns or with other types in the lake, built beside the old one and swapped at one epoch (Oracle Streams: copy
at a point in time, replay what changed since, switch over).

It is a reload of the whole table: the driver keeps its changes meanwhile, and lets rows and changes together take the
table's place between two of its commits. Where the lake has every value as the new shape wants it, the rows are read in
the lake, at a version that is pinned, and the source is not asked for them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.replacement import size_read
from headwater.apply.reshape import why_not
from headwater.arrow_types import lake_schema
from headwater.columns.shape import has_shape, options_for_a_rebuild, reshaped
from headwater.delta.delta_log import Snapshot
from headwater.delta.layout import layout_of
from headwater.delta.metadata import becoming
from headwater.delta.small_versions import TableUnreadable, batches, is_small, refuse_lost, snapshot_at
from headwater.delta.spark_rows import rows_of_table
from headwater.delta.tables import current, quoted, struct_type
from headwater.errors import Refused, Transient
from headwater.lake.cuts import allow_old_versions, pin_cut, release_pin
from headwater.lake.executors import LakeAccess, share_engine
from headwater.lake.paths import reloaded_path, table_path, table_uri
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.lake.reload_records import Reload
from headwater.load.ordering import TableFiles
from headwater.load.progress import Report, Show
from headwater.load.source_rows import schema_now
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.reload.reload import ReadPart, open_registry
from headwater.reload.replacing import Replacing, driver_beside, finish_what_was_read, refuse_state
from headwater.reload.row_folder import ReloadFiles, put_few_rows
from headwater.reload.stored_rows import PartitionTexts, StoredRows, in_groups
from headwater.reload.which_rows import part_named
from headwater.schema import TableSchema
from headwater.source.catalog.catalog import read_catalog
from headwater.source.connection import Connection, connect
from headwater.spark.session import job_session

log = logging.getLogger(__name__)

_KEEP: Final = timedelta(days=2)
"""So long at most the version that is read is kept from clean-up."""
_MOST_HERE: Final = 4 << 30
"""Bytes that one thread may put where Spark fails: some minutes."""


def rebuild(
    pipeline: Pipeline, table: TableName, progress: Report = log.info, show: Show | None = None
) -> dict[str, Any]:
    """Bring `table` into the shape that the pipeline file gives it. The JSON of interface "rebuild". `show` as of a
    load.

    Refused for what only a load brings about, LostLease beside a reload of the table, Transient when the source or the
    driver goes away: then nothing was changed.
    """
    started = time.monotonic()
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater rebuild")) as connection:
        registry = open_registry(pipeline, connection, table)
        finish_what_was_read(pipeline, connection, registry, str(table), progress)
        record = registry.tables[str(table)]
        refuse_state(record)
        declared = _declared(connection, pipeline, table)
        schema_now(connection, pipeline, record)  # refuses columns that the lake has yet to follow
        changed = options_for_a_rebuild(record.schema, declared)
        shape = reshaped(record.schema, declared)
        done: dict[str, Any] = {"rows": 0, "bytes": 0, "seconds": 0.0, "replaced_rows": 0, "read_from": ""}
        if not has_shape(record.schema, shape):
            _refuse(pipeline, record)
            done = _Rebuild(pipeline, connection, registry, record, shape, progress, show).run(", ".join(changed))
        else:
            progress(f"{table}: it is in the shape that the file gives it")
    done |= {"state": registry.tables[str(table)].state, "changed": changed}
    return {"tables": {str(table): done}, "seconds": round(time.monotonic() - started, 3)}


def _declared(connection: Connection, pipeline: Pipeline, table: TableName) -> TableSchema:
    """The table as the pipeline file would have it loaded now."""
    return read_catalog(connection, pipeline).table(table).schema


def _refuse(pipeline: Pipeline, record: TableRecord) -> None:
    """What cannot be done is said before anything is read."""
    if record.schema.soft_delete:
        raise Refused(
            "a table with `soft_delete` cannot be rebuilt: rows that were deleted meanwhile would have to be marked",
            code="not_rebuildable",
            where=record.name,
            remedy=f"headwater load PIPELINE.yaml --table {record.name} --again; rows that are marked as deleted go "
            "with it",
        )
    if why := why_not(table_path(pipeline.lake_path(), record.path)):
        raise Refused(
            f"it cannot be rebuilt: {why}",
            code="not_rebuildable",
            where=record.name,
            remedy=f"headwater load PIPELINE.yaml --table {record.name} --again",
        )


@dataclass(slots=True)
class _Rebuild:
    pipeline: Pipeline
    connection: Connection
    registry: Registry
    record: TableRecord
    shape: TableSchema
    progress: Report
    show: Show | None

    def run(self, shown: str) -> dict[str, Any]:
        """`shown`: what changes, for people."""
        from_lake = self._lake_has_every_value
        if self.record.schema.history and not from_lake:
            raise Refused(
                "a table with `history` takes other types by a load only: its history is to have them as well",
                code="not_rebuildable",
                where=self.record.name,
                remedy=f"headwater load PIPELINE.yaml --table {self.record.name} --again",
            )
        where = "the lake" if from_lake else "the source"
        self.progress(f"{self.record.name}: it is rebuilt from its rows in {where}, for another {shown}")
        with driver_beside(self.connection, self.pipeline, self.progress), contextlib.ExitStack() as until_published:
            replacing = Replacing(
                self.pipeline, self.connection, self.registry, self.record, self.record.name, shape=self.shape
            )
            if from_lake:
                done = replacing.run(lambda asked: self._read_lake(asked, until_published))
            else:
                leaves = schema_now(self.connection, self.pipeline, self.record).leaves
                whole = part_named(self.connection, self.record, leaves, ())
                read = ReadPart(
                    self.pipeline,
                    self.connection,
                    self.registry,
                    self.record,
                    whole,
                    self.progress,
                    self.show,
                    until_published,
                    self.shape,
                )
                done = replacing.run(read.read)
        return {**done, "read_from": "lake" if from_lake else "source"}

    @property
    def _lake_has_every_value(self) -> bool:
        """Whether the rows of the lake are those that a load in the new shape would write."""
        old = {column.attnum: (column.value, column.on_bad_value) for column in self.record.schema.columns}
        return all(old[column.attnum] == (column.value, column.on_bad_value) for column in self.shape.columns)

    def _read_lake(self, asked: Reload, until_published: contextlib.ExitStack) -> Reload:
        """All rows of the table's newest version."""
        root, record = self.pipeline.lake_path(), self.record
        path, app_id = table_path(root, record.path), record.app_id(self.pipeline.name)
        folder = reloaded_path(root, asked.name)
        with contextlib.ExitStack() as kept:
            found = current(path, app_id)
            if found is None:
                raise Transient("the Delta table is gone from the lake", code="reload_failed", where=record.name)
            version, applied_lsn = found
            kept.callback(release_pin, root, self._pin(root, version, applied_lsn))
            self.progress(f"{record.name}: reading version {version} of it, at {format_lsn(applied_lsn)}")
            try:
                snapshot = snapshot_at(path, version)
                if is_small(snapshot):
                    read = map(self._texts.fit, batches(snapshot, lake_schema(record.schema)))
                    put_few_rows(read, folder, self.shape.cluster_by)
                else:
                    self._put_into_table(snapshot, asked.name)
            except TableUnreadable as damage:
                again = f"headwater load PIPELINE.yaml --table {record.name} --again"
                raise Refused(str(damage), code="not_rebuildable", where=record.name, remedy=again) from damage
        rows, _ = size_read(root, asked.name)
        self.progress(f"{record.name}: {rows} rows read")
        return replace(asked, state="read", since=now_text(), snapshot="", capture_lsn=applied_lsn, rows=rows)

    def _put_into_table(self, snapshot: Snapshot, name: str) -> None:
        """Rows that lie together already are put file by file; all others Spark lays out."""
        root, record = self.pipeline.lake_path(), self.record
        files = list(snapshot.files.values())
        size = sum(file.size for file in files)
        counted = [file.rows - file.deleted for file in files if file.rows is not None]
        layout = layout_of(becoming(snapshot, self.shape))
        into = TableFiles(snapshot.folder, self.shape, layout, LakeAccess.to(root))
        waiting = ReloadFiles(root, name, into)
        read = StoredRows(snapshot.folder, record.schema, layout_of(snapshot.metadata), self._texts)
        if not self.shape.cluster_by and read.lie_together(files, self.shape.partition_by):
            waiting.put_by(FileTasks(self._spark, root, most_here=_MOST_HERE), read, in_groups(snapshot), size)
            return
        try:
            is_exact = len(counted) == len(files)
            waiting.put_again(self._frame(snapshot, read.texts), sum(counted), size, is_exact=is_exact)
        except (PySparkException, Py4JJavaError):
            refuse_lost(snapshot)
            raise

    def _spark(self) -> SparkSession:
        return job_session(self.pipeline.name, "rebuild", self.pipeline.lake_path())

    def _frame(self, snapshot: Snapshot, texts: PartitionTexts) -> DataFrame:
        spark = self._spark()
        share_engine(spark)
        allow_old_versions(spark)
        frame = rows_of_table(spark, snapshot.folder, snapshot.version)
        for column, becomes_null in texts.columns:
            if becomes_null:
                frame = frame.withColumn(column, functions.expr(f"nullif({quoted(column)}, '')"))
            elif frame.where(f"{quoted(column)} = ''").take(1):
                raise texts.refused(column)
        return frame.select(*map(quoted, struct_type(self.record.schema).names))

    @property
    def _texts(self) -> PartitionTexts:
        columns = [self.shape.column(name) for name in self.shape.partition_by]
        texts = [(column.name, column.on_bad_value == "null") for column in columns if column.value.lake == "string"]
        return PartitionTexts(self.record.name, tuple(texts))

    def _pin(self, root: str, version: int, applied_lsn: int) -> str:
        """The version stays until it has been read."""
        name = self.record.name
        table = {"path": table_uri(root, self.record.path), "version": version, "applied_lsn": format_lsn(applied_lsn)}
        cut = {"pipeline": self.pipeline.name, "tables": {name: {**table, "state": "in step"}}}
        return pin_cut(root, cut, "headwater rebuild", datetime.now(UTC) + _KEEP).id
