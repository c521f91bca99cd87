"""`headwater reload`: replace a table, or a part of it, by what the source holds, while replication goes on.

The rows are read at a capture point, few of them into a folder beside the table, many into files of the table that wait
for their commit; the driver keeps the changes of the part meanwhile,
and lets both together take the part's place between two of its own commits. Readers see the old version until that
commit is published. Where no driver runs, one runs here until then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.apply.direct import obstacle
from headwater.apply.replacement import size_read
from headwater.delta.delta_log import read_snapshot
from headwater.delta.layout import layout_of
from headwater.delta.metadata import becoming
from headwater.errors import Refused, Transient
from headwater.failpoints import reach
from headwater.gate import lease
from headwater.gate.recovery import mended_registry
from headwater.gate.same_source import require_same_source
from headwater.lake.executors import LakeAccess
from headwater.lake.paths import reloaded_path, table_path
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.lake.reload_records import Reload
from headwater.load.copy import NotAtThisCapturePoint, named_error
from headwater.load.load import load
from headwater.load.ordering import TableFiles
from headwater.load.progress import LoadProgress, Report, Show
from headwater.load.source_rows import few_rows_at, rows_at, schema_now, units_of, units_where
from headwater.load.units import BYTES_PER_PLAIN_UNIT, TableChanged, UnfitValue, Unit
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.pipeline_file.where_text import parse
from headwater.position import format_lsn
from headwater.predicate import Predicate
from headwater.reload.replacing import (
    Replacing,
    driver_beside,
    finish_what_was_read,
    refuse_kept,
    refuse_state,
    refuse_unfit,
)
from headwater.reload.row_folder import ReloadFiles, put_few_rows, put_rows
from headwater.reload.which_rows import ReloadScope, part_named, rows_where
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.catalog import Signature, signature
from headwater.source.connection import Connection, connect
from headwater.source.samples import emit_marker
from headwater.source.snapshots import capture_point
from headwater.spark.session import job_session

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 3
_LOOK_SECONDS: Final = 0.5
_FOLLOW_SECONDS: Final = 15.0
"""So long a reload waits for the lake to follow columns that changed under it."""


def reload(
    pipeline: Pipeline,
    table: TableName,
    partitions: Sequence[TableName] = (),
    where: str = "",
    progress: Report = log.info,
    show: Show | None = None,
) -> dict[str, Any]:
    """Reload `partitions` of `table`, or the rows of the predicate `where` (neither: the whole table). The JSON of
    interface "reload". `show` as of a load.

    Refused for what is not replicated, LostLease beside another reload of the same rows, Transient when the source or
    the driver goes away: then nothing was changed.
    """
    started = time.monotonic()
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater reload")) as connection:
        registry = open_registry(pipeline, connection, table)
        finish_what_was_read(pipeline, connection, registry, str(table), progress)
        record = registry.tables[str(table)]
        refuse_kept(record)
        unfinished = record.state == "loading" and not lease.is_held(connection, registry, lease.LOAD)
        if (record.state == "suspended" or unfinished) and not partitions and not where:
            # What it missed since then is nowhere but at the source: loading it anew hands over to the log exactly.
            what = "a load of it was not finished" if unfinished else f"it is suspended ({record.reason})"
            progress(f"{table}: {what}: it is loaded again")
            result = load(pipeline, [table], again=True, progress=progress, show=show)
            return {**result, "seconds": round(time.monotonic() - started, 3)}
        if record.state == "suspended":
            refuse_unfit(pipeline, record)
        else:
            refuse_state(record)
        now = schema_now(connection, pipeline, record)
        part = rows_where(connection, now, where) if where else part_named(connection, record, now.leaves, partitions)
        with driver_beside(connection, pipeline, progress), contextlib.ExitStack() as shown:
            replacing = Replacing(
                pipeline, connection, registry, record, part.shown, part.leaves, part.unknown, where=part.where
            )
            done = replacing.run(ReadPart(pipeline, connection, registry, record, part, progress, show, shown).read)
        registry.refresh()
    done |= {"state": registry.tables[str(table)].state, "partitions": list(part.names)}
    return {"tables": {str(table): done}, "seconds": round(time.monotonic() - started, 3)}


def open_registry(pipeline: Pipeline, connection: Connection, table: TableName) -> Registry:
    """The lake's registry, where `table` is loaded from this source; else Refused."""
    registry = mended_registry(pipeline, connection)
    record = registry.tables.get(str(table)) if registry is not None else None
    if registry is None or registry.pipeline is None or record is None or record.state in ("new", "removed"):
        raise Refused(
            f"{table} is not loaded",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy=f"headwater load PIPELINE.yaml --table {table}",
        )
    require_same_source(connection, pipeline, registry.pipeline)
    return registry


@dataclass(slots=True)
class ReadPart:
    """Reads one part of one table at a capture point; in the columns of `shape`, if it is given."""

    pipeline: Pipeline
    connection: Connection
    registry: Registry
    record: TableRecord
    part: ReloadScope
    progress: Report
    show: Show | None
    until_published: contextlib.ExitStack
    """So long it is shown how far it is."""
    shape: TableSchema | None = None

    def read(self, asked: Reload) -> Reload:
        """Read the part at a capture point."""
        _, size = self._units(self._leaves_now())
        sizes = {asked.table: size}
        shown = self.until_published.enter_context(
            LoadProgress(self.pipeline, asked.session, "reload", sizes, self.progress, self.show)
        )
        spark = None
        if size >= BYTES_PER_PLAIN_UNIT:  # it takes seconds to start, and no snapshot is held yet
            spark = job_session(self.pipeline.name, "reload", self.pipeline.lake_path())
        read = self._read(asked, shown, spark)
        shown.ended(asked.table, "merging", read.rows)
        return read

    def _read(self, asked: Reload, shown: LoadProgress, spark: SparkSession | None) -> Reload:
        why = ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._attempt(asked, shown, spark)
            except NotAtThisCapturePoint as changed:
                why = str(changed)
                self.progress(f"{asked.table}: {changed}; reading it again ({attempt} of {_ATTEMPTS})")
                self._follow()
                if self.shape is not None and self.shape.definition != self.record.schema.definition:
                    break  # what it is to be was made of the columns of before
        raise Transient(
            f"each of {_ATTEMPTS} attempts to read it failed, the last one because {why}",
            where=asked.table,
            remedy="reload it again when nothing alters or locks it any more; nothing was changed",
        )

    def _attempt(self, asked: Reload, shown: LoadProgress, spark: SparkSession | None) -> Reload:
        root, schema = self.pipeline.lake_path(), self.shape or self.record.schema
        with capture_point(self.pipeline.conninfo(), self.pipeline.load.max_snapshot_age) as capture:
            emit_marker(self.connection)  # what is seen must outlive a crash of the server
            # The partitions of now are all that the snapshot can have seen; younger ones are empty to it.
            leaves = self._leaves_now()
            chosen, ids = schema.with_leaves(leaves), [leaf.relation_id for leaf in leaves]
            signatures = signature(self.connection, ids)
            reach("reload.after_capture")
            self.progress(f"{asked.table}: reading {asked.shown} at {format_lsn(capture.position.lsn)}")
            units, _ = self._units(leaves)
            shown.reading(asked.table, capture.snapshot_id, len(units), None if self.part.whole else asked.shown)
            try:
                self._put(asked.name, chosen, capture.snapshot_id, signatures, units, spark)
            except (PySparkException, Py4JJavaError, TableChanged, UnfitValue) as error:
                raise named_error(error, replace(self.record, schemas=((0, schema),))) from error
            if signature(self.connection, ids) != signatures:
                raise NotAtThisCapturePoint("it was rewritten, truncated or altered")
        rows, _ = size_read(root, asked.name)
        self.progress(f"{asked.table}: {rows} rows of {asked.shown} read")
        return replace(
            asked,
            state="read",
            since=now_text(),
            snapshot=str(capture.snapshot),
            capture_lsn=capture.position.lsn,
            rows=rows,
        )

    def _put(
        self,
        name: str,
        schema: TableSchema,
        snapshot_id: str,
        signatures: dict[int, Signature],
        units: list[Unit],
        spark: SparkSession | None,
    ) -> None:
        """The rows of the units, for the reload `name`, by `spark`; without one they are few, and come through this
        process."""
        root = self.pipeline.lake_path()
        folder = reloaded_path(root, name)
        where = self._where
        if spark is None:
            cluster_by = schema.cluster_by if self.part.whole else ()
            with few_rows_at(self.pipeline, schema, snapshot_id, signatures, units, where) as rows:
                put_few_rows(rows, folder, cluster_by)
            return
        lake, table = LakeAccess.to(root), table_path(root, self.record.path)
        frame = rows_at(
            spark,
            self.pipeline,
            self.connection,
            schema,
            snapshot_id,
            signatures,
            units,
            writes_to=lake,
            where=where,
        )
        snapshot = read_snapshot(table)
        if obstacle(snapshot):
            put_rows(frame, folder, lake)  # Spark is to write them
            return
        metadata = becoming(snapshot, schema) if self.shape is not None else snapshot.metadata
        files = TableFiles(table, schema, layout_of(metadata), lake)
        ReloadFiles(root, name, files).put(frame)

    def _follow(self) -> None:
        """Until the lake has the columns of the source: refused when it does not follow in time."""
        deadline = time.monotonic() + _FOLLOW_SECONDS
        while True:
            self.registry.refresh()
            self.record = self.registry.tables[self.record.name]
            try:
                schema_now(self.connection, self.pipeline, self.record)
            except Refused:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
            else:
                return

    @property
    def _where(self) -> Predicate | None:
        return parse(self.part.where, self.record.schema) if self.part.where else None

    def _units(self, leaves: Sequence[Leaf]) -> tuple[list[Unit], int]:
        """The rows to read, and about how many bytes they are."""
        if (where := self._where) is not None:
            return units_where(self.connection, leaves, where)
        return units_of(self.connection, leaves)

    def _leaves_now(self) -> tuple[Leaf, ...]:
        leaves = schema_now(self.connection, self.pipeline, self.record).leaves
        wanted, unread = self.part.leaves, self.record.unread
        return tuple(
            leaf for leaf in leaves if (leaf.relation_id in wanted if wanted else leaf.relation_id not in unread)
        )
