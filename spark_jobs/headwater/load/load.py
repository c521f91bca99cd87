"""`headwater load`: the initial load of tables, each by itself (`headwater.load.one_table`).

Order at the source: publications, then the slot, then tables join the publication, then transactions older than
that are waited out, and only then are capture points taken; every rule there was found by losing rows
(docs/architecture.md, "Load and hand-over"). Killed, the next run loads anew what was not done, and skips the rest.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headwater.columns.hidden import refuse_two_keys
from headwater.columns.log_format import may_be_binary
from headwater.errors import DamagedLake, LostLease, Refused, SlotGap, Transient
from headwater.failpoints import reach
from headwater.gate import lease
from headwater.gate.check import check, require_ok
from headwater.gate.drivers import await_return, may_live
from headwater.gate.recovery import begin_anew, mended_registry
from headwater.gate.renamed import drop_former, refuse_while_read, renamed_problems, taken
from headwater.gate.same_source import history_of, require_same_source
from headwater.gate.wal_ceiling import REMEDY, ceiling_problem
from headwater.lake.cuts import HISTORY
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import table_path
from headwater.lake.registry import PipelineRecord, Registry, TableRecord
from headwater.load.connections import connections_for
from headwater.load.copy import Copy, copy_whole
from headwater.load.driver_answers import await_keeping, is_running
from headwater.load.handover import finish_handovers
from headwater.load.one_table import TableLoad, begin, table_result
from headwater.load.progress import LoadProgress, Report, Show
from headwater.load.source_rows import extents
from headwater.load.turns import SideBySide, Turns
from headwater.load.units import BYTES_PER_PLAIN_UNIT, LOCK_SECONDS
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.pipeline_file.quantities import size_text
from headwater.source.catalog.catalog import CatalogTable, read_catalog
from headwater.source.catalog.standing import Registered, read_standings
from headwater.source.connection import Connection, connect, identify
from headwater.source.problems import refuse_errors
from headwater.source.publication.parts import PublishedPart
from headwater.source.publication.publication import (
    add_tables,
    ensure_publications,
    inserts_name,
    published_tables,
    remove_table,
)
from headwater.source.slot import SlotState, create_slot, drop_slot, gap_behind, read_slot
from headwater.source.snapshots import wait_for_old_transactions as wait_out
from headwater.spark.session import JobSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

# Since then a change of the publication reaches transactions that were open when it was made: the server tells them of
# it while it decodes (PostgreSQL's release notes of May 2025).
_SAFE_MINORS = {15: 150013, 16: 160009, 17: 170005}
_LOOK_SECONDS = 1.0
_LOADED = ("active", "catching up")


def load(
    pipeline: Pipeline,
    tables: Sequence[TableName] = (),
    again: bool = False,
    progress: Report = log.info,
    copy: Copy | None = None,
    show: Show | None = None,
) -> dict[str, Any]:
    """Load `tables` (none: all) that are not loaded yet; `again`: also those that are. The JSON of interface "load",
    and `skipped`, the names of those that were loaded already.

    Later on, where all are asked for that are not loaded, what cannot be replicated is left out: suspended, with the
    reason. `copy`: how, instead of reading everything anew. `show`: is told about once a second how far it is.
    """
    started = time.monotonic()
    report = check(pipeline)
    conninfo, root = pipeline.conninfo(), pipeline.lake_path()
    # A first load refuses as a whole; later on a table that cannot be replicated keeps none of the others, unless they
    # are all to be loaded again.
    is_first = not report.is_loaded
    left_out = {} if tables or again or is_first else report.faulty()
    sound = [table.name for table in report.catalog.tables if str(table.name) not in left_out]
    require_ok(report, None if is_first or (again and not tables) else tables or sound)
    chosen = [report.catalog.table(name) for name in tables or sound]
    with contextlib.closing(connect(conninfo, application_name="headwater load")) as connection:
        existing = _opened(connection, pipeline, None if tables or not again else chosen)
        if existing is not None and existing.pipeline is not None:
            now = require_same_source(connection, pipeline, existing.pipeline, read_epoch(root))
            if renamed := renamed_problems(pipeline, existing.pipeline):
                if tables or not again:
                    refuse_errors(renamed)
                refuse_while_read(connection, existing.pipeline, now)
        # Creating the registry is the first change, and it is ours: source and lake were looked at before.
        registry = existing or Registry.create(root, pipeline.name)
        with lease.hold(conninfo, registry, lease.LOAD) as held:
            # Rewritten files would be a conflict at the end of a load that has begun to write.
            lease.refuse_if_held(connection, registry, lease.COMPACTION)
            await_return(connection, pipeline)  # what a driver cannot follow is asked where it is seen
            with lease.hold(conninfo, registry, lease.SET_UP):
                wanted = [t for t in chosen if again or not _is_loaded(registry, t.name)]
                refuse_two_keys(pipeline, registry.tables.values(), (table.schema for table in wanted))
                _retire(pipeline, registry)
                if is_running(connection, pipeline):
                    _refuse_beside(connection, pipeline, registry, wanted)
                _announce_hidden(connection, pipeline, registry, wanted)
                memberships, confirmed_lsn = _prepare_source(connection, pipeline, registry, wanted, report.parts)
                if any(table.entry.where for table in wanted):
                    wanted = _as_published(connection, pipeline, wanted)
            loading = {t.name for t in wanted}
            skipped = [str(t.name) for t in chosen if t.name not in loading]
            results = {name: table_result(registry.tables[name]) for name in skipped}
            if wanted:
                sizes = _sizes(pipeline, wanted)
                with LoadProgress(pipeline, held.session, "load", sizes, progress, show) as shown:
                    spark = JobSpark(pipeline.name, "load", root)
                    # It takes seconds, or is refused: nothing has begun, and no snapshot is held.
                    session = _spark_for(sizes, spark, progress)
                    one = TableLoad(
                        pipeline,
                        registry,
                        shown,
                        progress,
                        copy or copy_whole,
                        Turns(connections_for(pipeline, connection, session)),
                        confirmed_lsn,
                    )
                    # Small ones are done soon, and let the large ones have all connections.
                    wanted.sort(key=lambda table: one.connections(str(table.name)))
                    results |= _side_by_side(spark, one, wanted, memberships)
            if not is_running(connection, pipeline):  # which does it, too
                finish_handovers(connection, registry)
    results = {str(table.name): results[str(table.name)] for table in chosen}
    for name, reason in left_out.items():
        progress(f"{name}: left out: {reason}")
        known = registry.tables.get(name) or TableRecord(name, "", "new")
        results[name] = {**table_result(known), "state": "suspended", "reason": reason}
    return {"tables": results, "skipped": skipped, "seconds": round(time.monotonic() - started, 3)}


def _spark_for(sizes: Mapping[str, int], spark: JobSpark, progress: Report) -> SparkSession | None:
    """Started, where a table is too large for this process alone."""
    largest = max(sizes, key=lambda name: sizes[name])
    if sizes[largest] < BYTES_PER_PLAIN_UNIT:
        return None
    progress(f"starting Spark, since {largest} has {size_text(sizes[largest])}")
    return spark.start()


def _opened(connection: Connection, pipeline: Pipeline, anew: Sequence[CatalogTable] | None) -> Registry | None:
    """The registry, behind what a power cut has left half done; None: nothing was ever loaded. `anew`: the tables,
    where all are loaded again: then damage is set aside, which else is an error."""
    root = pipeline.lake_path()
    try:
        return mended_registry(pipeline, connection)
    except DamagedLake as damage:
        if anew is None:
            raise
        folders = [table_path(root, table.name.path) for table in anew]
        slot = read_slot(connection, pipeline.source.slot)
        lives = slot is not None and (slot.active or may_live(root, slot))
        if lives or not begin_anew(root, [*folders, *(folder + HISTORY for folder in folders)]):
            raise LostLease(
                f"{damage.message}, and a replicate is running",
                code="already_running",
                where=f"pipeline {pipeline.name}",
                remedy="stop replicate, or pause its DAG; then load again",
            ) from damage
        log.warning("%s: all tables are loaded again", damage)
        return mended_registry(pipeline)


def _side_by_side(
    spark: JobSpark, one: TableLoad, tables: Sequence[CatalogTable], memberships: Mapping[TableName, int]
) -> dict[str, dict[str, Any]]:
    """Load `tables`, in this order; their results. What is raised for one ends it when those beside it are done."""

    def work(mine: Iterator[CatalogTable]) -> Iterator[tuple[str, dict[str, Any]]]:
        session = spark.for_thread()
        conninfo = one.pipeline.conninfo()
        mine_alone = connect(conninfo, application_name="headwater load table", lock_timeout=LOCK_SECONDS)
        with contextlib.closing(mine_alone) as own:
            for table in mine:
                yield str(table.name), one.run(session, own, table, memberships[table.name])

    return dict(SideBySide(tables, work).run(one.turns.count))


def _sizes(pipeline: Pipeline, tables: Sequence[CatalogTable]) -> dict[str, int]:
    """Bytes of each table at the source; 0 of one that somebody has locked: it is to hold up no other."""
    sizes = {}
    looking = connect(pipeline.conninfo(), application_name="headwater load", lock_timeout=_LOOK_SECONDS)
    with contextlib.closing(looking) as connection:
        for table in tables:
            try:
                found = extents(connection, [leaf.relation_id for leaf in table.schema.leaves])
            except Transient as error:
                if error.code != "lock_timeout":
                    raise
                found = {}
            sizes[str(table.name)] = sum(extent.bytes for extent in found.values())
    return sizes


def _as_published(connection: Connection, pipeline: Pipeline, tables: Sequence[CatalogTable]) -> list[CatalogTable]:
    """The tables with their row filters in the words of the server: what the log is filtered by, rows are read by."""
    catalog = read_catalog(connection, pipeline)
    return [catalog.table(table.name) for table in tables]


def _is_loaded(registry: Registry, name: TableName) -> bool:
    record = registry.tables.get(str(name))
    return record is not None and (record.state in _LOADED or record.state == "suspended")


def _retire(pipeline: Pipeline, registry: Registry) -> None:
    """Tables that have left the pipeline file are removed: the lake keeps their rows, nobody waits for them."""
    for name, record in list(registry.tables.items()):
        if record.state != "removed" and pipeline.entry_for(TableName.parse(name)) is None:
            registry.write(record.entered("removed", "it is not in the pipeline file any more"))


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


def _announce_hidden(
    connection: Connection, pipeline: Pipeline, registry: Registry, wanted: Sequence[CatalogTable]
) -> None:
    """Whoever reads the log knows what it has to hide of a table before the table is published: else the first values
    of it could lie in a file of what was spilled."""
    hiding = [table for table in wanted if table.schema.hides]
    members = _members(connection, pipeline) if hiding and is_running(connection, pipeline) else set[TableName]()
    for table in hiding:
        known = registry.tables.get(str(table.name))
        schema = known.schema if known is not None and known.schemas and known.state != "removed" else None
        if schema is not None and schema.relation_id != table.schema.relation_id:
            schema = None  # made again: the relation is unknown
        if schema is None and table.name in members:
            raise LostLease(
                f"{table.name} is published already, and the running replicate does not know what to hide of it: "
                "it leaves out its values, also those of open transactions",
                code="already_running",
                where=f"pipeline {pipeline.name}",
                remedy="stop replicate, or pause its DAG, then load again; or let the load publish the table",
            )
        if schema is not None and schema.columns == table.schema.columns:
            continue
        record = begin(pipeline, registry, table, membership=0)
        await_keeping(connection, pipeline, registry, record)


def _members(connection: Connection, pipeline: Pipeline) -> set[TableName]:
    """The tables that are published for the pipeline."""
    publication = pipeline.source.publication
    return {name for each in (publication, inserts_name(publication)) for name in published_tables(connection, each)}


def _prepare_source(
    connection: Connection,
    pipeline: Pipeline,
    registry: Registry,
    wanted: Sequence[CatalogTable],
    parts: Mapping[TableName, PublishedPart],
) -> tuple[dict[TableName, int], int | None]:
    """Publications, slot, members, and the end of every transaction older than a membership; those memberships, and
    up to where the slot was confirmed before that end. `parts`: what of each table is to be published."""
    source = pipeline.source
    slot, known = read_slot(connection, source.slot), registry.pipeline
    if slot is not None and known is not None and known.slot != source.slot:
        raise taken(source.slot)
    made_publication = ensure_publications(connection, source.publication, pipeline=pipeline.name, wanted=parts)
    loaded = {name: record for name, record in registry.tables.items() if record.state in _LOADED}
    others = sorted(set(loaded) - {str(table.name) for table in wanted})
    gap = _gap(slot, registry, pipeline)
    if gap and others:
        raise SlotGap(
            f"{gap}, and with it the changes of {', '.join(others)}",
            where=f"replication slot {source.slot}",
            remedy=REMEDY,
        )
    # Where every table is loaded anew nobody needs what a slot past its ceiling keeps.
    beyond = ceiling_problem(slot, source.wal_ceiling) if slot is not None and not (slot.active or others) else None
    gap = gap or (beyond.message if beyond is not None and known is not None else "")
    # Before 18 a slot cannot be read that is older than its publication.
    is_older = known is not None and known.publication != source.publication
    if slot is not None and (slot.loss or slot.confirmed_lsn is None or beyond or is_older):
        drop_slot(connection, source.slot)
        slot = None
    is_new = slot is None
    made_slot = is_new or (known is not None and known.made_slot)
    slot = slot or create_slot(connection, source.slot, source.failover, pipeline.load.wait_for_old_transactions)
    if known is None or gap:
        now = identify(connection)
        assert slot.confirmed_lsn is not None
        if known is not None:
            drop_former(connection, pipeline, known, now)
        registry.write(
            PipelineRecord(
                system_id=now.system_id,
                timeline=now.timeline,
                slot=source.slot,
                publication=source.publication,
                start_lsn=slot.confirmed_lsn,
                made_slot=made_slot,
                made_publication=made_publication or (known is not None and known.made_publication),
                history=history_of(pipeline, now),
                paused=known.paused if known is not None else "",
            ),
            # In the same commit: once the pipeline starts behind the gap, no table may be taken for whole.
            *(record.entered("loading", gap) for record in loaded.values() if gap),
        )
    _register(registry, wanted)
    try:
        barrier, members = _publish(connection, source.publication, wanted, parts)
    except Refused:
        # Nothing can be loaded before that is put right, and nobody would read it.
        if is_new and not any(record.holds_rows for record in registry.tables.values()):
            drop_slot(connection, source.slot)
        raise
    reach("load.after_publication")
    # Read before the wait, which is for every transaction that has an id when it begins: it is these memberships
    # that the log tells everything of. A later one is noticed by whoever compares, also where there is none now (0).
    memberships = {found.registered.name: found.membership or 0 for found in read_standings(connection, members)}
    if barrier:
        wait_out(connection, barrier, pipeline.load.wait_for_old_transactions, where=f"pipeline {pipeline.name}")
    return memberships, slot.confirmed_lsn


def _publish(
    connection: Connection,
    publication: str,
    tables: Sequence[CatalogTable],
    parts: Mapping[TableName, PublishedPart],
) -> tuple[int, list[Registered]]:
    """The tables join `publication`, or its companion for inserts. As `add_tables` gives it, 0 for none; and what the
    log tells of from now on."""
    barrier, members = 0, []
    both = (publication, inserts_name(publication))
    for insert_only, (one, other) in enumerate((both, (both[1], both[0]))):
        joining = [t for t in tables if t.schema.insert_only == bool(insert_only)]
        if joining:
            names = [t.name for t in joining]
            for name in published_tables(connection, other).intersection(names):
                remove_table(connection, other, name)  # it was insert-only before, or is from now on
            barrier = max(barrier, add_tables(connection, one, names, parts=parts))
            members += [Registered(t.name, t.schema.relation_id, one) for t in joining]
    return barrier, members


def _register(registry: Registry, tables: Sequence[CatalogTable]) -> None:
    """What is published is known before: a driver looks after the keys of those that it knows, also when this load ends
    before their turn comes. Without its key a published table cannot be updated at the source."""
    new = []
    for table in tables:
        known = registry.tables.get(str(table.name))
        is_unknown = known is None or known.state in ("new", "removed")
        if is_unknown and not (known and known.schemas and known.schema.relation_id == table.schema.relation_id):
            before = known or TableRecord(str(table.name), table.name.path, "new")
            record = replace(before.entered("new", "it has not been loaded"), schemas=((0, table.schema),))
            new.append(replace(record, membership=None, capture=None))
    if new:
        registry.write(*new)


def _gap(slot: SlotState | None, registry: Registry, pipeline: Pipeline) -> str:
    """Why the slot cannot deliver what follows the lake's position; empty when it can, or nothing was loaded yet."""
    known = registry.pipeline
    if known is None:
        return ""
    if renamed := renamed_problems(pipeline, known):
        return "; ".join(problem.message for problem in renamed)
    newest = read_epoch(pipeline.lake_path())
    return gap_behind(slot, max(known.start_lsn, newest.position.lsn if newest else 0))
