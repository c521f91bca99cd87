"""`headwater load`: the initial load of tables, each at a capture point of its own, handed over to the log exactly.

Order at the source: publications, then the slot, then tables join the publication, then transactions older than
that are waited out, and only then is a capture point taken; every rule there was found by losing rows
(docs/architecture.md, "Load and hand-over"). A table becomes readable in one Delta commit; killed before it, the
table is loaded anew by the next run, and tables that were done are skipped.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.config import Pipeline
from headwater.errors import LostLease, Refused, SlotGap, TableError
from headwater.failpoints import reach
from headwater.jobs import lease
from headwater.jobs.check import check, require_ok
from headwater.jobs.driver_answers import await_answer, is_running
from headwater.jobs.executors import lacking
from headwater.jobs.handovers import finish_handovers
from headwater.jobs.keeper import load_name
from headwater.jobs.log_format import may_be_binary
from headwater.jobs.options import on_divergence, on_schema_change
from headwater.jobs.same_source import CONNECT_THERE, require_same_source
from headwater.jobs.source_rows import rows_at
from headwater.jobs.units import BAD_VALUE, CHANGED, bad_value
from headwater.jobs.wal_ceiling import ceiling_problem
from headwater.lake import tables as lake_tables
from headwater.lake.history import history_record, mark_load, prepare
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import registry_path, table_path
from headwater.lake.registry import Capture, PipelineRecord, Registry, TableRecord, now_text
from headwater.names import TableName
from headwater.position import format_lsn
from headwater.schema import TableSchema
from headwater.session import build_session
from headwater.source.catalog import Catalog, CatalogTable, read_catalog, signature
from headwater.source.connection import Connection, connect, identify
from headwater.source.publication import (
    add_tables,
    ensure_publications,
    inserts_name,
    published_tables,
    remove_table,
)
from headwater.source.publication_parts import Part
from headwater.source.slot import SlotState, create_slot, drop_slot, loss_of, read_slot
from headwater.source.snapshots import CapturePoint, capture_point
from headwater.source.snapshots import wait_for_old_transactions as wait_out
from headwater.source.standing import Registered, read_standings

log = logging.getLogger(__name__)

_ATTEMPTS = 3
# Since then a change of the publication reaches transactions that were open when it was made: the server tells them of
# it while it decodes (PostgreSQL's release notes of May 2025).
_SAFE_MINORS = {15: 150013, 16: 160009, 17: 170005}
_LOADED = ("active", "catching up")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """What a load copies to where: the table `record` at `capture`, whose leaves have these `signatures`, to `path`.
    The commit carries `confirmed_lsn`: the slot will send everything past it again, nothing is skipped by position."""

    pipeline: Pipeline
    connection: Connection
    record: TableRecord
    capture: CapturePoint
    signatures: dict[int, Any]
    path: str
    confirmed_lsn: int


Copy = Callable[[SparkSession, Target], tuple[int, int]]
"""Makes the table's content that of the capture point, in one commit; its rows, and bytes written."""


def load(
    pipeline: Pipeline,
    tables: Sequence[TableName] = (),
    again: bool = False,
    progress: Report = log.info,
    copy: Copy | None = None,
) -> dict[str, Any]:
    """Load `tables` (none: all) that are not loaded yet; `again`: also those that are. The JSON of interface "load".

    `copy`: how, instead of reading everything anew.
    """
    started = time.monotonic()
    report = check(pipeline)
    require_ok(report)
    chosen = _choose(report.catalog, tables)
    conninfo, root = pipeline.conninfo(), pipeline.lake_path()
    with contextlib.closing(connect(conninfo, application_name="headwater load")) as connection:
        existing = Registry.open(root, pipeline.name)
        if existing is not None and existing.pipeline is not None:
            require_same_source(connection, existing.pipeline, f"{CONNECT_THERE}, or use another lake.root")
        # Creating the registry is the first change, and it is ours: source and lake were looked at before.
        registry = existing or Registry.create(root, pipeline.name)
        with lease.hold(conninfo, registry, lease.LOAD):
            # Rewritten files would be a conflict at the end of a load that has begun to write.
            lease.refuse_if_held(connection, registry, lease.COMPACTION)
            with lease.hold(conninfo, registry, lease.SET_UP):
                _retire(pipeline, registry)
                wanted = [t for t in chosen if again or not _is_loaded(registry, t.name)]
                if is_running(connection, pipeline):
                    _refuse_beside(connection, pipeline, registry, wanted)
                memberships = _prepare_source(connection, pipeline, registry, wanted, report.parts)
                if any(table.entry.where for table in wanted):
                    wanted = _as_published(connection, pipeline, wanted)
            loading = {t.name for t in wanted}
            results = {str(t.name): _skipped(registry.tables[str(t.name)]) for t in chosen if t.name not in loading}
            if wanted:
                spark = build_session(pipeline.name, app_name=f"headwater load {pipeline.name}")
                for table in wanted:
                    membership = memberships[table.name]
                    how = copy or copy_whole
                    loaded = _load_table(spark, connection, pipeline, registry, table, membership, progress, how)
                    results[str(table.name)] = loaded
            if not is_running(connection, pipeline):  # which does it, too
                finish_handovers(connection, registry)
    return {"tables": results, "seconds": round(time.monotonic() - started, 3)}


def _as_published(connection: Connection, pipeline: Pipeline, tables: Sequence[CatalogTable]) -> list[CatalogTable]:
    """The tables with their row filters in the words of the server: what the log is filtered by, rows are read by."""
    catalog = read_catalog(connection, pipeline)
    return [catalog.table(table.name) for table in tables]


def _choose(catalog: Catalog, names: Sequence[TableName]) -> list[CatalogTable]:
    return [catalog.table(name) for name in names] if names else list(catalog.tables)


def _is_loaded(registry: Registry, name: TableName) -> bool:
    record = registry.tables.get(str(name))
    return record is not None and (record.state in _LOADED or record.state == "suspended")


def _retire(pipeline: Pipeline, registry: Registry) -> None:
    """Tables that have left the pipeline file are removed: the lake keeps their rows, nobody waits for them."""
    for name, record in list(registry.tables.items()):
        if record.state != "removed" and pipeline.entry_for(TableName.parse(name)) is None:
            registry.write(record.entered("removed", "it is not in the pipeline file any more"))


def _skipped(record: TableRecord) -> dict[str, Any]:
    capture = format_lsn(record.capture.lsn) if record.capture else None
    return {"state": record.state, "rows": record.rows, "bytes": 0, "seconds": 0.0, "capture_lsn": capture}


def _refuse_beside(
    connection: Connection, pipeline: Pipeline, registry: Registry, wanted: Sequence[CatalogTable]
) -> None:
    """What a driver that runs already cannot follow."""
    texts = [str(t.name) for t in wanted if t.schema.needs_text]
    if texts and may_be_binary(registry.tables):
        raise LostLease(
            f"{', '.join(texts)}: a type there has no binary form that is known here, and the log connection of the "
            "running replicate is binary",
            code="already_running",
            where=f"pipeline {pipeline.name}",
            remedy="stop replicate, or pause its DAG; then load again",
        )
    version = connection.info.server_version
    if wanted and version < _SAFE_MINORS.get(version // 10000, 0):
        raise LostLease(
            f"this server ({version // 10000}.{version % 10000}) may leave changes of a table out of the log when it "
            "joins the publication while the log is being read; newer minor versions do not",
            code="already_running",
            where=f"pipeline {pipeline.name}",
            remedy="stop replicate, or pause its DAG, then load again; or bring the server up to date",
        )


def _prepare_source(
    connection: Connection,
    pipeline: Pipeline,
    registry: Registry,
    wanted: Sequence[CatalogTable],
    parts: Mapping[TableName, Part],
) -> dict[TableName, int]:
    """Publications, slot, members, and the end of every transaction older than a membership; those memberships.
    `parts`: what of each table of the pipeline is to be published."""
    source = pipeline.source
    made_publication = ensure_publications(connection, source.publication, pipeline=pipeline.name, wanted=parts)
    slot = read_slot(connection, source.slot)
    known = registry.pipeline
    loaded = {name: record for name, record in registry.tables.items() if record.state in _LOADED}
    others = sorted(set(loaded) - {str(table.name) for table in wanted})
    gap = _gap(slot, registry, pipeline)
    if gap and others:
        raise SlotGap(
            f"{gap}, and with it the changes of {', '.join(others)}",
            where=f"replication slot {source.slot}",
            remedy="headwater load PIPELINE.yaml --again loads all tables anew",
        )
    # Where every table is loaded anew nobody needs what a slot past its ceiling keeps.
    beyond = ceiling_problem(slot, source.wal_ceiling) if slot is not None and not (slot.active or others) else None
    gap = gap or (beyond.message if beyond is not None and known is not None else "")
    if slot is not None and (slot.loss or slot.confirmed_lsn is None or beyond):
        drop_slot(connection, source.slot)
        slot = None
    slot = slot or create_slot(connection, source.slot, source.failover)
    if known is None or gap:
        now = identify(connection)
        assert slot.confirmed_lsn is not None
        registry.write(
            PipelineRecord(
                system_id=now.system_id,
                timeline=now.timeline,
                slot=source.slot,
                publication=source.publication,
                start_lsn=slot.confirmed_lsn,
                made_slot=True,
                made_publication=made_publication or (known is not None and known.made_publication),
            ),
            # In the same commit: once the pipeline starts behind the gap, no table may be taken for whole.
            *(record.entered("loading", gap) for record in loaded.values() if gap),
        )
    barrier, members = 0, []
    both = (source.publication, inserts_name(source.publication))
    for insert_only, (publication, other) in enumerate((both, (both[1], both[0]))):
        joining = [t for t in wanted if t.schema.insert_only == bool(insert_only)]
        if joining:
            names = [t.name for t in joining]
            for name in published_tables(connection, other).intersection(names):
                remove_table(connection, other, name)  # it was insert-only before, or is from now on
            barrier = max(barrier, add_tables(connection, publication, names, parts=parts))
            members += [Registered(t.name, t.schema.relation_id, publication) for t in joining]
    reach("load.after_publication")
    # Read before the wait, which is for every transaction that has an id when it begins: it is these memberships
    # that the log tells everything of. A later one is noticed by whoever compares, also where there is none now (0).
    memberships = {found.registered.name: found.membership or 0 for found in read_standings(connection, members)}
    if barrier:
        wait_out(connection, barrier, pipeline.load.wait_for_old_transactions, where=f"pipeline {pipeline.name}")
    return memberships


def _gap(slot: SlotState | None, registry: Registry, pipeline: Pipeline) -> str:
    """Why the slot cannot deliver what follows the lake's position; empty when it can, or nothing was loaded yet."""
    known = registry.pipeline
    if known is None:
        return ""
    if slot is None or slot.loss or slot.confirmed_lsn is None:
        return loss_of(slot) or "the slot has no position"
    newest = read_epoch(pipeline.lake_path())
    start = max(known.start_lsn, newest.position.lsn if newest else 0)
    if slot.has_passed(start):
        return f"the slot was moved to {format_lsn(slot.confirmed_lsn)}, past the lake's {format_lsn(start)}"
    return ""


def _load_table(
    spark: SparkSession,
    connection: Connection,
    pipeline: Pipeline,
    registry: Registry,
    table: CatalogTable,
    membership: int,
    progress: Report,
    copy: Copy,
) -> dict[str, Any]:
    """Load one table; what cannot be loaded becomes suspended, with the reason, and the others go on."""
    started = time.monotonic()
    name = str(table.name)
    for attempt in range(1, _ATTEMPTS + 1):
        record = _begin(pipeline, registry, table, membership)
        try:
            record, size = _attempt(spark, connection, pipeline, registry, record, progress, copy)
            break
        except Changed as changed:
            progress(f"{name}: {changed}; loading it again with a new capture point ({attempt} of {_ATTEMPTS})")
            try:
                table = read_catalog(connection, pipeline).table(table.name)
            except Refused as gone:  # dropped, or not replicable any more, since the command began
                registry.write(record.entered("suspended", gone.message, gone.remedy))
                return _result(registry.tables[name], 0, started)
        except TableError as error:
            registry.write(record.entered("suspended", error.message, error.remedy))
            progress(f"{name}: suspended: {error.message}")
            return _result(registry.tables[name], 0, started)
    else:
        reason = f"it was rewritten or altered during each of {_ATTEMPTS} attempts to load it"
        remedy = f"headwater load PIPELINE.yaml --table {name} --again, when the schema rests"
        registry.write(record.entered("suspended", reason, remedy))
        return _result(registry.tables[name], 0, started)
    progress(f"{name}: {record.rows} rows in {time.monotonic() - started:.1f} s")
    return _result(record, size, started)


def _result(record: TableRecord, size: int, started: float) -> dict[str, Any]:
    return {**_skipped(record), "bytes": size, "seconds": round(time.monotonic() - started, 3)}


class Changed(Exception):
    """The table changed under its snapshot."""


def _begin(pipeline: Pipeline, registry: Registry, table: CatalogTable, membership: int) -> TableRecord:
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


def _attempt(
    spark: SparkSession,
    connection: Connection,
    pipeline: Pipeline,
    registry: Registry,
    record: TableRecord,
    progress: Report,
    copy: Copy,
) -> tuple[TableRecord, int]:
    schema = record.schema
    ids = [schema.relation_id, *(leaf.relation_id for leaf in schema.leaves)]
    confirmed_lsn = _handed_over_from(connection, pipeline, registry, record)
    with capture_point(pipeline.conninfo()) as capture:
        signatures = signature(connection, ids)
        _refuse_changed_before_capture(connection, pipeline, schema)
        reach("load.after_capture")
        progress(f"{record.name}: reading at {format_lsn(capture.position.lsn)}")
        path = table_path(pipeline.lake_path(), record.path)
        beside = table_path(pipeline.lake_path(), history_record(record).path)
        if schema.history:
            prepare(spark, beside, record)
        target = Target(pipeline, connection, record, capture, signatures, path, confirmed_lsn)
        rows, size = copy(spark, target)
        if schema.history:
            app_id = history_record(record).app_id(pipeline.name)
            mark_load(spark, beside, record, app_id, capture.position.lsn, confirmed_lsn)
        # The last unit ended some time ago: a rewrite after it is seen here, one after this in the log's Relation.
        if signature(connection, ids) != signatures:
            raise Changed("it was rewritten, truncated or altered during the load")
        record = replace(
            record.entered("catching up"),
            start_lsn=capture.position.lsn,
            rows=rows,
            capture=Capture(capture.position.lsn, str(capture.snapshot), None, record.since),
            schemas=((capture.position.lsn, schema),),
        )
    registry.write(record)
    reach("load.after_registry")
    return record, size


def _handed_over_from(connection: Connection, pipeline: Pipeline, registry: Registry, record: TableRecord) -> int:
    """A position up to which the log is not needed: every commit at or below it will be visible in the snapshot.

    The record says "loading" already. A driver that starts from now on keeps the table's changes from its first one on;
    one that runs has said that it does, and what it had passed by then is visible when the transactions of that
    moment have ended.
    """
    await_answer(connection, pipeline, registry, load_name(record), f"the load of {record.name}", absent=0.0)
    slot = read_slot(connection, pipeline.source.slot)
    if slot is None or slot.confirmed_lsn is None:
        raise SlotGap("the slot vanished while loading", where=pipeline.source.slot, remedy="run load again")
    if slot.active:
        patience = pipeline.load.wait_for_old_transactions
        wait_out(connection, 0, patience, where=f"pipeline {pipeline.name}, table {record.name}")
    return slot.confirmed_lsn


def _refuse_changed_before_capture(connection: Connection, pipeline: Pipeline, schema: TableSchema) -> None:
    """The catalog was read before the capture point: what changed in between starts the attempt over."""
    found = [t for t in read_catalog(connection, pipeline).tables if t.schema.relation_id == schema.relation_id]
    if not found or found[0].schema != schema:
        raise Changed("its definition changed")


def copy_whole(spark: SparkSession, target: Target) -> tuple[int, int]:
    """Read all units and commit them as the table's whole content. Returns (rows, bytes)."""
    pipeline, record, path = target.pipeline, target.record, target.path
    schema = record.schema
    snapshot, here = target.capture.snapshot_id, registry_path(pipeline.lake_path())
    read = schema.without_marks()
    frame = rows_at(spark, pipeline, target.connection, read, snapshot, target.signatures, writes_to=here)
    if schema.soft_delete:
        frame = frame.selectExpr("*", *lake_tables.LIVING)
    lake_tables.create(spark, path, schema, pipeline.lake.keep_cuts)
    reach("load.before_commit")
    writer = frame.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    if schema.partition_by:
        writer = writer.partitionBy(*schema.partition_by)
    try:
        (writer.option("txnAppId", record.app_id(pipeline.name)).option("txnVersion", target.confirmed_lsn).save(path))
    except (PySparkException, Py4JJavaError) as error:
        raise named_error(error, record) from error
    reach("load.after_commit")
    found = lake_tables.current(path, record.app_id(pipeline.name))
    assert found is not None
    commit = lake_tables.read_commit(path, found[0])
    metrics = commit.metrics if commit else {}
    return int(metrics.get("numOutputRows", 0)), int(metrics.get("numOutputBytes", 0))


def named_error(error: PySparkException | Py4JJavaError, record: TableRecord) -> Exception:
    """What a failure of Spark over a table's units means."""
    text = str(error)
    if CHANGED in text:
        return Changed("it was rewritten, truncated or altered during the load")
    if BAD_VALUE in text:
        return bad_value(text, record.name, record.schema)
    return lacking(text) or error
