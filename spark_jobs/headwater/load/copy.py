"""The rows of one table, from the source at a capture point into the lake, in one commit: written here and now where it
is small, stretch by stretch where it is large, and by Spark where the lake's table has rules that only Delta knows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.apply import whole_table
from headwater.columns.hidden import key_of
from headwater.delta import tables as lake_tables
from headwater.delta.delta_log import read_snapshot
from headwater.delta.partition_values import NameTooLong, too_long
from headwater.delta.small_tables import LostRace
from headwater.delta.storage import hadoop_place
from headwater.errors import Transient
from headwater.failpoints import reach
from headwater.lake.executors import LakeAccess, lacking, refuse_engine, share_engine
from headwater.lake.registry import TableRecord
from headwater.load.ordering import TableFiles
from headwater.load.progress import LoadProgress
from headwater.load.source_rows import extents, rows_at
from headwater.load.stretch_notes import StretchNote, StretchNotes
from headwater.load.stretches import StretchWriter, cut_stretches, deal, like, units_together
from headwater.load.units import (
    BAD_VALUE,
    BYTES_PER_PLAIN_UNIT,
    CHANGED,
    LOCK_SECONDS,
    Extent,
    TableChanged,
    UnfitValue,
    Unit,
    UnitReader,
    bad_value,
    cut_units,
    why_changed,
)
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, errors_named
from headwater.source.renewal import newest
from headwater.source.snapshots import CapturePoint
from headwater.spark.session import SparkOnDemand

log = logging.getLogger(__name__)


_NOTHING = Extent(0, 0)


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """What a load copies to where: the table `record` at `capture`, whose leaves have these `signatures`, to `path`.
    The commit carries `confirmed_lsn`: the slot will send everything past it again, nothing is skipped by position.
    `connections`: so many may read."""

    pipeline: Pipeline
    connection: Connection
    record: TableRecord
    capture: CapturePoint
    signatures: dict[int, Any]
    path: str
    confirmed_lsn: int
    progress: LoadProgress
    connections: int


Copy = Callable[[SparkOnDemand, CopyTarget], tuple[int, int]]
"""Makes the table's content that of the capture point, in one commit; its rows, and bytes written."""


class NotAtThisCapturePoint(Exception):
    """The table cannot be loaded at this capture point, for the reason given; it may be at another one."""


def copy_whole(spark: SparkOnDemand, target: CopyTarget) -> tuple[int, int]:
    """Read all units and commit them as the table's whole content. Returns (rows, bytes)."""
    record, schema = target.record, target.record.schema
    try:
        found = extents(target.connection, [leaf.relation_id for leaf in schema.leaves])
    except Transient as error:
        if error.code == "lock_timeout":
            raise NotAtThisCapturePoint(f"it was locked for {LOCK_SECONDS:g} s") from error
        raise
    units = [unit for leaf in schema.leaves for unit in cut_units(leaf, found.get(leaf.relation_id, _NOTHING))]
    is_small = len(units) == len(schema.leaves) and _size(target, found) < BYTES_PER_PLAIN_UNIT
    try:
        if whole_table.is_written_here(target.path, schema):
            whole_table.create(target.path, schema, target.pipeline.lake.keep_cuts)
            return _copy_small(target, units) if is_small else _copy_by_stretches(spark(), target, units, found)
        return _copy_by_engine(spark(), target, units)
    except LostRace as lost:
        raise NotAtThisCapturePoint("another program has written to it in the lake meanwhile") from lost
    except (PySparkException, Py4JJavaError, TableChanged, UnfitValue, NameTooLong) as error:
        raise named_error(error, record) from error


def _size(target: CopyTarget, found: Mapping[int, Extent]) -> int:
    """In bytes at the source; as they are now where the table was locked when all were asked for."""
    return target.progress.size_of(target.record.name) or sum(extent.bytes for extent in found.values())


def _reader(target: CopyTarget, writes_to: LakeAccess | None = None) -> UnitReader:
    schema = target.record.schema.without_marks()
    key = key_of(target.pipeline, schema)
    return UnitReader(
        newest(target.pipeline.conninfo()),
        target.capture.snapshot_id,
        schema,
        target.signatures,
        writes_to,
        hash_key=key,
    )


def _copy_small(target: CopyTarget, units: list[Unit]) -> tuple[int, int]:
    record = target.record
    target.progress.reading(record.name, target.capture.snapshot_id, len(units))
    reach("load.before_commit", record.name)
    # Closed at once, whatever happens: it has a transaction open at the source.
    with errors_named(record.name), contextlib.closing(_reader(target).rows_of(units)) as rows:
        app_id = record.app_id(target.pipeline.name)
        written = whole_table.overwrite(target.path, record.schema, rows, app_id, target.confirmed_lsn)
    reach("load.after_commit", record.name)
    return written


def _copy_by_stretches(
    spark: SparkSession, target: CopyTarget, units: list[Unit], sizes: Mapping[int, Extent]
) -> tuple[int, int]:
    pipeline, record, capture = target.pipeline, target.record, target.capture
    root = pipeline.lake_path()
    snapshot = read_snapshot(target.path)
    notes = StretchNotes(root, pipeline.name, record)
    most = units_together(len(units), target.connections)
    earlier = notes.earlier(snapshot)
    stretches = [
        stretch
        for leaf in record.schema.leaves
        for stretch in cut_stretches(
            leaf,
            sizes.get(leaf.relation_id, _NOTHING),
            [note for note in earlier if note.relation_id == leaf.relation_id],
            most,
        )
    ]
    target.progress.reading(record.name, capture.snapshot_id, sum(len(stretch.units) for stretch in stretches))
    share_engine(spark)
    lake = LakeAccess.to(root)
    reader = _reader(target, writes_to=lake)
    layout = whole_table.layout_for(snapshot, record.schema)
    alike = like(reader, record.schema, layout, capture)
    writer = StretchWriter(reader, notes, layout, alike, capture.snapshot.xmin, capture.snapshot.xmax)
    hands = max(1, min(target.connections, len(stretches)))
    dealt = [(text,) for text in deal(stretches, hands)]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(dealt, hands), "stretch string")
    reach("load.before_commit", record.name)
    found = frame.mapInArrow(writer, "note string, kept boolean").collect()
    written = [StretchNote.from_json(row["note"]) for row in found]
    kept = [note.rows for note, row in zip(written, found, strict=True) if row["kept"]]
    if kept:
        log.info("%s: %s rows of an earlier attempt are still those of the source", record.name, sum(kept))
    files = [file for note in written for file in note.files]
    reach("load.after_stretches", record.name)
    loose = [file for file in files if record.schema.cluster_by or (layout.partition_by and not file.partition_values)]
    if loose:
        rows = sum(file.rows or 0 for file in loose)
        order = "partition_by" if layout.partition_by else "cluster_by"
        log.info("%s: %d rows are brought into the order of %s", record.name, rows, order)
        try:
            laid_out = TableFiles(target.path, record.schema, layout, lake).lay_out(spark, loose)
        except Transient:
            notes.forget(snapshot, ())  # the next attempt would begin with the same files
            raise
        files = [*(file for file in files if file not in loose), *laid_out]
        reach("load.after_ordering", record.name)
    done = whole_table.put_files(snapshot, record.schema, files, record.app_id(pipeline.name), target.confirmed_lsn)
    reach("load.after_commit", record.name)
    notes.forget(snapshot, files)
    return done


def _copy_by_engine(spark: SparkSession, target: CopyTarget, units: list[Unit]) -> tuple[int, int]:
    pipeline, record, path, snapshot = target.pipeline, target.record, target.path, target.capture.snapshot_id
    schema, connection = record.schema, target.connection
    refuse_engine(path, record.name, "its log or its columns' names have rules that are not known here")
    rows = schema.without_marks()
    target.progress.reading(record.name, snapshot, len(units))
    lake, read_by = LakeAccess.to(pipeline.lake_path()), target.connections
    frame = rows_at(spark, pipeline, connection, rows, snapshot, target.signatures, units, read_by, lake)
    if schema.soft_delete:
        frame = frame.selectExpr("*", *lake_tables.LIVING)
    lake_tables.create(spark, path, schema, pipeline.lake.keep_cuts)
    lake_tables.cluster(path, ())  # an overwrite by Spark gives columns other names in files
    reach("load.before_commit", record.name)
    writer = frame.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer = writer.option("partitionOverwriteMode", "static")
    if schema.partition_by:
        writer = writer.partitionBy(*schema.partition_by)
    writer = writer.option("txnAppId", record.app_id(pipeline.name)).option("txnVersion", target.confirmed_lsn)
    writer.save(hadoop_place(path))
    reach("load.after_commit", record.name)
    found = lake_tables.current(path, record.app_id(pipeline.name))
    assert found is not None
    if schema.cluster_by:
        lake_tables.cluster(path, schema.cluster_by, record.app_id(pipeline.name))
        DeltaTable.forPath(spark, hadoop_place(path)).optimize().executeCompaction()
    commit = lake_tables.read_commit(path, found[0])
    metrics = commit.metrics if commit else {}
    return int(metrics.get("numOutputRows", 0)), int(metrics.get("numOutputBytes", 0))


def named_error(error: Exception, record: TableRecord) -> Exception:
    """What a failure over a table's units means; by Spark it comes as text."""
    text = str(error)
    if CHANGED in text:
        return NotAtThisCapturePoint(why_changed(text))
    if BAD_VALUE in text:
        return bad_value(text, record.name, record.schema)
    return too_long(text, record.name) or lacking(text) or error
