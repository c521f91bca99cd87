"""One table of a load: at a capture point of its own, in one commit, handed over to the log exactly.

Every rule here was found by losing rows (docs/architecture.md, "Load and hand-over"). A table that cannot be loaded is
suspended alone, with the reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.config import Pipeline
from headwater.errors import LostLease, Refused, SlotGap, TableError, Transient
from headwater.failpoints import reach
from headwater.jobs.driver_answers import await_answer
from headwater.jobs.executors import lacking
from headwater.jobs.hidden_columns import key_of
from headwater.jobs.keeper import load_name
from headwater.jobs.load_progress import LoadProgress, Report
from headwater.jobs.options import on_divergence, on_schema_change
from headwater.jobs.side_by_side import Turns
from headwater.jobs.source_rows import extents, rows_at, units_of
from headwater.jobs.units import (
    BAD_VALUE,
    BYTES_PER_PLAIN_UNIT,
    CHANGED,
    LOCK_SECONDS,
    TableChanged,
    UnfitValue,
    Unit,
    UnitReader,
    bad_value,
    why_changed,
)
from headwater.lake import small_table
from headwater.lake import tables as lake_tables
from headwater.lake.commits import LostRace
from headwater.lake.history import history_record, mark_load, prepare
from headwater.lake.paths import registry_path, table_path
from headwater.lake.registry import Capture, Registry, TableRecord, now_text
from headwater.names import TableName
from headwater.position import format_lsn
from headwater.schema import TableSchema
from headwater.source.catalog import CatalogTable, read_catalog, signature
from headwater.source.connection import Connection, errors_named
from headwater.source.slot import read_slot
from headwater.source.snapshots import CapturePoint, capture_point
from headwater.source.snapshots import wait_for_old_transactions as wait_out

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Target:
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


Copy = Callable[[SparkSession, Target], tuple[int, int]]
"""Makes the table's content that of the capture point, in one commit; its rows, and bytes written."""


class Changed(Exception):
    """The table cannot be loaded at this capture point, for the reason given; it may be at another one."""


@dataclass(frozen=True, slots=True)
class TableLoad:
    """What the loads of a command's tables have in common."""

    pipeline: Pipeline
    registry: Registry
    progress: LoadProgress
    report: Report
    copy: Copy
    turns: Turns
    confirmed_lsn: int | None
    """Of the slot, before the transactions ended that were open when the tables joined the publication."""

    def connections(self, table: str) -> int:
        """How many it takes to read: one for each whole unit."""
        return max(1, min(self.pipeline.load.connections, self.progress.size_of(table) // BYTES_PER_PLAIN_UNIT))

    def run(self, spark: SparkSession, connection: Connection, table: CatalogTable, membership: int) -> dict[str, Any]:
        """Load one table; what cannot be loaded becomes suspended, with the reason. The JSON of one table."""
        started = time.monotonic()
        record, size = self._load(spark, connection, table, membership)
        self.progress.ended(record.name, "done", record.rows or 0)
        if record.state == "suspended":
            self.report(f"{record.name}: suspended: {record.reason}")
        else:
            self.report(f"{record.name}: {record.rows} rows in {time.monotonic() - started:.1f} s")
        return {**table_result(record), "bytes": size, "seconds": round(time.monotonic() - started, 3)}

    def _load(
        self, spark: SparkSession, connection: Connection, table: CatalogTable, membership: int
    ) -> tuple[TableRecord, int]:
        name, why = str(table.name), ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                # A table is out of step from its beginning on: not before it is its turn.
                with self.turns.take(self.connections(name)):
                    record = begin(self.pipeline, self.registry, table, membership)
                    return self._attempt(spark, connection, record)
            except (Changed, Transient) as changed:
                if isinstance(changed, Transient) and changed.code != "lock_timeout":
                    raise
                why = str(changed)
                self.report(f"{name}: {changed}; loading it again with a new capture point ({attempt} of {_ATTEMPTS})")
                try:
                    table = read_catalog(connection, self.pipeline, table.name).table(table.name)
                except Refused as gone:  # dropped, or not replicable any more, since the command began
                    return self._suspended(record, gone.message, gone.remedy)
            except TableError as error:
                return self._suspended(record, error.message, error.remedy)
        reason = f"each of {_ATTEMPTS} attempts to load it failed, the last one because {why}"
        remedy = f"headwater load PIPELINE.yaml --table {name} --again, when nothing alters or locks it any more"
        return self._suspended(record, reason, remedy)

    def _suspended(self, record: TableRecord, reason: str, remedy: str) -> tuple[TableRecord, int]:
        self.registry.write(record.entered("suspended", reason, remedy))
        return self.registry.tables[record.name], 0

    def _attempt(self, spark: SparkSession, connection: Connection, record: TableRecord) -> tuple[TableRecord, int]:
        pipeline, schema = self.pipeline, record.schema
        ids = [schema.relation_id, *(leaf.relation_id for leaf in schema.leaves)]
        confirmed_lsn = self._handed_over_from(connection, record)
        with capture_point(pipeline.conninfo(), pipeline.load.max_snapshot_age) as capture:
            signatures = signature(connection, ids)
            self._refuse_changed_before_capture(connection, record.name, schema)
            reach("load.after_capture", record.name)
            self.report(f"{record.name}: reading at {format_lsn(capture.position.lsn)}")
            path = table_path(pipeline.lake_path(), record.path)
            beside = table_path(pipeline.lake_path(), history_record(record).path)
            if schema.history:
                prepare(spark, beside, record)
            target = Target(
                pipeline,
                connection,
                record,
                capture,
                signatures,
                path,
                confirmed_lsn,
                self.progress,
                self.connections(record.name),
            )
            rows, size = self.copy(spark, target)
            if schema.history:
                app_id = history_record(record).app_id(pipeline.name)
                mark_load(spark, beside, record, app_id, capture.position.lsn, confirmed_lsn)
            # The last unit ended some time ago: a rewrite after it is seen here, one after this by its other files.
            if signature(connection, ids) != signatures:
                raise Changed("it was rewritten, truncated or altered during the load")
            record = replace(
                record.entered("catching up"),
                start_lsn=capture.position.lsn,
                rows=rows,
                capture=Capture(capture.position.lsn, str(capture.snapshot), None, record.since),
                schemas=((capture.position.lsn, schema),),
            )
        self._ended(record)
        reach("load.after_registry", record.name)
        return record, size

    def _ended(self, record: TableRecord) -> None:
        """The record of the load, if it is still this one's: whoever has found another source has taken it away."""
        is_ours = True

        def ended(now: TableRecord) -> TableRecord | None:
            nonlocal is_ours
            is_ours = now.incarnation == record.incarnation
            return record if is_ours else None

        self.registry.change(record.name, ended)
        if not is_ours:
            raise LostLease(
                "the table is not this load's any more: another job has taken it over, or replicate follows another "
                "timeline since",
                where=record.name,
                remedy="run load again",
            )

    def _handed_over_from(self, connection: Connection, record: TableRecord) -> int:
        """A position up to which the log is not needed: every commit at or below it will be visible in the snapshot.

        The record says "loading" already. A driver that starts from now on keeps the table's changes from its first one
        on; one that runs has said that it does, and what it had passed by then is visible when the transactions of that
        moment have ended. So of one that has run since the tables joined the publication, and does not now: what it
        has confirmed may be in the log and not visible yet.
        """
        pipeline = self.pipeline
        await_answer(connection, pipeline, self.registry, load_name(record), f"the load of {record.name}", absent=0.0)
        slot = read_slot(connection, pipeline.source.slot)
        if slot is None or slot.confirmed_lsn is None:
            raise SlotGap("the slot vanished while loading", where=pipeline.source.slot, remedy="run load again")
        if slot.active or slot.confirmed_lsn != self.confirmed_lsn:
            patience = pipeline.load.wait_for_old_transactions
            wait_out(connection, 0, patience, where=f"pipeline {pipeline.name}, table {record.name}")
        return slot.confirmed_lsn

    def _refuse_changed_before_capture(self, connection: Connection, name: str, schema: TableSchema) -> None:
        """The catalog was read before the capture point: what changed in between starts the attempt over."""
        catalog = read_catalog(connection, self.pipeline, TableName.parse(name))
        found = [t for t in catalog.tables if t.schema.relation_id == schema.relation_id]
        if not found or found[0].schema != schema:
            raise Changed("its definition changed")


def begin(pipeline: Pipeline, registry: Registry, table: CatalogTable, membership: int) -> TableRecord:
    """Enter "loading" under a new incarnation: nothing of an earlier attempt can be taken for this one's."""
    name = str(table.name)
    registry.refresh()
    before = registry.tables.get(name)
    record = TableRecord(
        name=name,
        path=table.name.path,
        state="loading",
        since=now_text(),
        incarnation=(before.incarnation if before else 0) + 1,
        on_divergence=on_divergence(pipeline, table.entry),
        on_schema_change=on_schema_change(pipeline, table.entry),
        schemas=((0, table.schema),),
        membership=membership,
    )
    registry.write(record)
    return record


def table_result(record: TableRecord) -> dict[str, Any]:
    """The JSON of a table as it stands."""
    capture = format_lsn(record.capture.lsn) if record.capture else None
    return {"state": record.state, "rows": record.rows, "bytes": 0, "seconds": 0.0, "capture_lsn": capture}


def copy_whole(spark: SparkSession, target: Target) -> tuple[int, int]:
    """Read all units and commit them as the table's whole content. Returns (rows, bytes)."""
    record, schema = target.record, target.record.schema
    try:
        units = units_of(target.connection, schema.leaves)
    except Transient as error:
        if error.code == "lock_timeout":
            raise Changed(f"it was locked for {LOCK_SECONDS:g} s") from error
        raise
    target.progress.reading(record.name, target.capture.snapshot_id, len(units))
    is_small = len(units) == len(schema.leaves) and _size(target) < BYTES_PER_PLAIN_UNIT
    try:
        if is_small and small_table.is_plain(target.path, schema):
            try:
                return _copy_small(target, units)
            except LostRace as lost:
                raise Changed("somebody else has written to it in the lake meanwhile") from lost
        return _copy_by_engine(spark, target, units)
    except (PySparkException, Py4JJavaError, TableChanged, UnfitValue) as error:
        raise named_error(error, record) from error


def _size(target: Target) -> int:
    """In bytes at the source; asked again where the table was locked when all were."""
    known = target.progress.size_of(target.record.name)
    ids = [leaf.relation_id for leaf in target.record.schema.leaves]
    return known or sum(extent.bytes for extent in extents(target.connection, ids).values())


def _copy_small(target: Target, units: list[Unit]) -> tuple[int, int]:
    record, schema, path = target.record, target.record.schema, target.path
    small_table.create(path, schema, target.pipeline.lake.keep_cuts)
    reach("load.before_commit", record.name)
    reader = UnitReader(
        target.pipeline.conninfo(),
        target.capture.snapshot_id,
        schema,
        target.signatures,
        hash_key=key_of(target.pipeline, schema),
    )
    # Closed at once, whatever happens: it has a transaction open at the source.
    with errors_named(record.name), contextlib.closing(reader.rows_of(units)) as rows:
        app_id = record.app_id(target.pipeline.name)
        written = small_table.overwrite(path, schema, rows, app_id, target.confirmed_lsn)
    reach("load.after_commit", record.name)
    return written


def _copy_by_engine(spark: SparkSession, target: Target, units: list[Unit]) -> tuple[int, int]:
    pipeline, record, path, snapshot = target.pipeline, target.record, target.path, target.capture.snapshot_id
    schema, connection = record.schema, target.connection
    rows = schema.without_marks()
    here, read_by = registry_path(pipeline.lake_path()), target.connections
    frame = rows_at(spark, pipeline, connection, rows, snapshot, target.signatures, units, read_by, here)
    if schema.soft_delete:
        frame = frame.selectExpr("*", *lake_tables.LIVING)
    lake_tables.create(spark, path, schema, pipeline.lake.keep_cuts)
    reach("load.before_commit", record.name)
    writer = frame.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    if schema.partition_by:
        writer = writer.partitionBy(*schema.partition_by)
    (writer.option("txnAppId", record.app_id(pipeline.name)).option("txnVersion", target.confirmed_lsn).save(path))
    reach("load.after_commit", record.name)
    found = lake_tables.current(path, record.app_id(pipeline.name))
    assert found is not None
    commit = lake_tables.read_commit(path, found[0])
    metrics = commit.metrics if commit else {}
    return int(metrics.get("numOutputRows", 0)), int(metrics.get("numOutputBytes", 0))


def named_error(error: Exception, record: TableRecord) -> Exception:
    """What a failure over a table's units means; by Spark it comes as text."""
    text = str(error)
    if CHANGED in text:
        return Changed(why_changed(text))
    if BAD_VALUE in text:
        return bad_value(text, record.name, record.schema)
    return lacking(text) or error
