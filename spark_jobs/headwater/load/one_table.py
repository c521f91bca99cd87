"""One table of a load: at a capture point of its own, in one commit, handed over to the log exactly.

Every rule here was found by losing rows (docs/architecture.md, "Load and hand-over"). A table that cannot be loaded is
suspended alone, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.delta import entries, storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import note_written
from headwater.errors import LostLease, Refused, SlotGap, TableError, Transient
from headwater.failpoints import reach
from headwater.gate.drivers import may_live
from headwater.gate.recovery import cure
from headwater.lake.history import history_record
from headwater.lake.ledger import read_generation
from headwater.lake.paths import table_path
from headwater.lake.registry import Capture, Registry, TableRecord, now_text
from headwater.lake.reload_records import load_name
from headwater.load.begin_history import mark_load, prepare
from headwater.load.copy import Copy, CopyTarget, NotAtThisCapturePoint
from headwater.load.driver_answers import await_keeping, is_running
from headwater.load.progress import LoadProgress, Report
from headwater.load.stretch_notes import StretchNotes
from headwater.load.turns import Turns
from headwater.load.units import (
    BYTES_PER_PLAIN_UNIT,
)
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.schema import TableSchema
from headwater.source.catalog.catalog import CatalogTable, Signature, read_catalog, signature
from headwater.source.connection import Connection
from headwater.source.samples import emit_marker
from headwater.source.slot import read_slot
from headwater.source.snapshots import CapturePoint, capture_point
from headwater.source.snapshots import wait_for_old_transactions as wait_out
from headwater.spark.session import SparkOnDemand

_ATTEMPTS = 3


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
    without_driver: dict[str, int] = field(default_factory=dict)
    """By table whose load has begun without a driver, the newest driver's generation then."""

    def connections(self, table: str) -> int:
        """How many it takes to read: one for each whole unit."""
        return max(1, min(self.turns.count, self.progress.size_of(table) // BYTES_PER_PLAIN_UNIT))

    def run(self, spark: SparkOnDemand, connection: Connection, table: CatalogTable, membership: int) -> dict[str, Any]:
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
        self, spark: SparkOnDemand, connection: Connection, table: CatalogTable, membership: int
    ) -> tuple[TableRecord, int]:
        name, why = str(table.name), ""
        attempt, most = 0, 0
        while attempt < _ATTEMPTS:
            attempt += 1
            try:
                # A table is out of step from its beginning on: not before it is its turn.
                with self.turns.take(self.connections(name)):
                    record = begin(self.pipeline, self.registry, table, membership)
                    return self._attempt(spark, connection, record)
            except (NotAtThisCapturePoint, Transient) as changed:
                if isinstance(changed, Transient) and changed.code != "lock_timeout":
                    raise
                why = str(changed)
                done = StretchNotes(self.pipeline.lake_path(), self.pipeline.name, record).count()
                if done > most:  # the next one need not read that again: a table may take longer than a snapshot lasts
                    attempt, most = 0, done
                self.report(f"{name}: {changed}; loading it again with a new capture point")
                try:
                    table = read_catalog(connection, self.pipeline, table.name).table(table.name)
                except Refused as gone:  # dropped, or not replicable any more, since the command began
                    return self._suspended(record, gone.message, gone.remedy)
            except TableError as error:
                return self._suspended(record, error.message, error.remedy)
        reason = f"{_ATTEMPTS} attempts to load it failed and came no further, the last one because {why}"
        remedy = f"headwater load PIPELINE.yaml --table {name} --again, when nothing alters or locks it any more"
        return self._suspended(record, reason, remedy)

    def _suspended(self, record: TableRecord, reason: str, remedy: str) -> tuple[TableRecord, int]:
        self._ended(record.entered("suspended", reason, remedy))
        return self.registry.tables[record.name], 0

    def _attempt(self, spark: SparkOnDemand, connection: Connection, record: TableRecord) -> tuple[TableRecord, int]:
        pipeline, schema = self.pipeline, record.schema
        ids = [schema.relation_id, *(leaf.relation_id for leaf in schema.leaves)]
        confirmed_lsn = self._handed_over_from(connection, record)
        with capture_point(pipeline.conninfo(), pipeline.load.max_snapshot_age) as capture:
            # What the snapshot sees must outlive a crash of the server, and some commits do not wait for the disk.
            emit_marker(connection)
            signatures = signature(connection, ids)
            schema = self._as_captured(capture, record.name, schema, signatures)
            record = replace(record, schemas=((0, schema),))
            reach("load.after_capture", record.name)
            self.report(f"{record.name}: reading at {format_lsn(capture.position.lsn)}")
            path = table_path(pipeline.lake_path(), record.path)
            beside = table_path(pipeline.lake_path(), history_record(record).path)
            for folder in (path, beside):
                cure(pipeline.lake_path(), folder)
                entries.forget(folder)  # what others have done to it is what a load puts right
            if schema.history:
                prepare(spark, beside, record, pipeline.lake.keep_cuts)
            target = CopyTarget(
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
                raise NotAtThisCapturePoint("it was rewritten, truncated or altered during the load")
            record = replace(
                record.entered("catching up"),
                start_lsn=capture.position.lsn,
                rows=rows,
                capture=Capture(capture.position.lsn, str(capture.snapshot), None, record.since),
                schemas=((capture.position.lsn, schema),),
            )
        for folder in (path, beside) if schema.history else (path,):
            if storage.wants_names(folder):
                note_written(folder, read_snapshot(folder).version)
        storage.sync(pipeline.lake_path())  # the table before the word that it is there: a driver goes on from it
        self._refuse_late_answer(connection, record)
        self._ended(record)
        reach("load.after_registry", record.name)
        return record, size

    def _refuse_late_answer(self, connection: Connection, record: TableRecord) -> None:
        """A driver is not seen while it connects to the source again. One that comes back reads the registry before it
        goes on with the log, but of an older one, or one that stood still for long, nobody knows what it has passed by
        before it kept the table's changes."""
        pipeline, generation = self.pipeline, self.without_driver.pop(record.name, None)
        if generation is None:
            return
        self.registry.refresh()
        answer = self.registry.kept.get(load_name(record))
        if answer is not None:
            is_late = answer.generation <= generation
        else:
            is_late = is_running(connection, pipeline) and generation == _generation(pipeline)
        if is_late:
            raise NotAtThisCapturePoint("replicate was connecting to the source again, and kept no changes yet")

    def _ended(self, record: TableRecord) -> None:
        """The record of the load, if it is still this one's: whoever has found another source has taken it away. A
        driver that has given it up, since the session of its lease was cut, has not kept what the load has not read."""
        is_ours, given_up = True, False

        def ended(now: TableRecord) -> TableRecord | None:
            nonlocal is_ours, given_up
            is_ours = now.incarnation == record.incarnation
            answer = self.registry.kept.get(load_name(record))
            given_up = record.state == "catching up" and answer is not None and answer.state == "failed"
            return record if is_ours and not given_up else None

        self.registry.change(record.name, ended)
        if is_ours and given_up:
            raise LostLease(
                "the load's session at the source was cut, and replicate took the load for dead: changes that were "
                "committed meanwhile are not kept",
                where=record.name,
                remedy="run load again",
            )
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
        has confirmed may be in the log and not visible yet. And of one whose connection has dropped: it reads the
        registry before it goes on with the log.
        """
        pipeline = self.pipeline
        generation = 0
        if not await_keeping(connection, pipeline, self.registry, record):
            self.without_driver[record.name] = generation = _generation(pipeline)
        slot = read_slot(connection, pipeline.source.slot)
        if slot is None or slot.confirmed_lsn is None:
            raise SlotGap("the slot vanished while loading", where=pipeline.source.slot, remedy="run load again")
        may_return = generation > 0 and may_live(pipeline.lake_path(), slot)
        if slot.active or may_return or slot.confirmed_lsn != self.confirmed_lsn:
            patience = pipeline.load.wait_for_old_transactions
            wait_out(connection, 0, patience, where=f"pipeline {pipeline.name}, table {record.name}")
        return slot.confirmed_lsn

    def _as_captured(
        self, capture: CapturePoint, name: str, schema: TableSchema, signatures: Mapping[int, Signature]
    ) -> TableSchema:
        """The table as the snapshot shows it. The catalog was read before the capture point: what changed in between
        starts the attempt over, but for new files, which a TRUNCATE makes: those of the snapshot hold what it sees, as
        long as they are the newest (`signatures`)."""
        catalog = read_catalog(capture.connection, self.pipeline, TableName.parse(name))
        found = next((t.schema for t in catalog.tables if t.schema.relation_id == schema.relation_id), None)
        if found is None or _without_files(found) != _without_files(schema):
            raise NotAtThisCapturePoint("its definition changed")
        newest = {relation: known.relfilenode for relation, known in signatures.items()}
        if any(newest.get(leaf.relation_id) != leaf.relfilenode for leaf in found.leaves):
            raise NotAtThisCapturePoint("it was rewritten or truncated")
        return found


def _generation(pipeline: Pipeline) -> int:
    return read_generation(pipeline.lake_path(), pipeline.name)


def _without_files(schema: TableSchema) -> TableSchema:
    return schema.with_leaves(tuple(replace(leaf, relfilenode=0) for leaf in schema.leaves))


def begin(pipeline: Pipeline, registry: Registry, table: CatalogTable, membership: int) -> TableRecord:
    """Enter "loading" under a new incarnation: nothing of an earlier attempt can be taken for this one's."""

    def loading(before: TableRecord | None) -> TableRecord:
        return TableRecord(
            name=str(table.name),
            path=table.name.path,
            state="loading",
            # What was wrong with it holds until the load has ended; it also tells one that was killed from a first one.
            reason=_unfinished(before),
            since=now_text(),
            incarnation=(before.incarnation if before else 0) + 1,
            on_divergence=pipeline.on_divergence_of(table.entry),
            on_schema_change=pipeline.on_schema_change_of(table.entry),
            schemas=((0, table.schema),),
            membership=membership,
        )

    registry.refresh()
    return registry.begin(str(table.name), loading)  # a driver may write its record at the same moment


def _unfinished(before: TableRecord | None) -> str:
    if before is None or before.state in ("new", "removed"):
        return ""
    return before.reason if before.state in ("suspended", "loading") else "it is being loaded again"


def table_result(record: TableRecord) -> dict[str, Any]:
    """The JSON of a table as it stands."""
    capture = format_lsn(record.capture.lsn) if record.capture else None
    return {"state": record.state, "rows": record.rows, "bytes": 0, "seconds": 0.0, "capture_lsn": capture}
