"""When the source is another one than the lake was built from (a promoted standby, a restored backup, another server),
or the same one, whose slot was lost.

A ladder, and whoever refuses names the rung: go on where the log provably goes on (`why_not_followed` says why it does
not); compare, and put right what differs (`verify --repair --new-source`); load everything (`load --again
--new-source`). The last two begin with `adopt`. A lost slot is a rung of its own (`begin_behind_gap`): changes are
missing, so that all tables are compared, and what comes then is the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from headwater.apply.direct import Fence, take
from headwater.columns.hidden import refuse_two_keys
from headwater.delta import storage
from headwater.delta.tables import current
from headwater.errors import LostLease, Refused, SlotGap, SourceChanged
from headwater.failpoints import reach
from headwater.gate import lease
from headwater.gate.check import check, require_ok
from headwater.gate.drivers import without_driver
from headwater.gate.recovery import cure, cut_ledger_back, mended_registry
from headwater.gate.renamed import drop_former, refuse_while_read, renamed_problems, taken
from headwater.gate.same_source import NEW_SOURCE, described, history_of, require_same_source
from headwater.gate.wal_ceiling import BY_ITSELF
from headwater.lake.history import history_record
from headwater.lake.ledger import Epoch, Ledger, read_epoch
from headwater.lake.paths import table_path
from headwater.lake.position_file import PositionFile, write_position_file
from headwater.lake.registry import PipelineRecord, Registry, TableRecord, now_text
from headwater.lake_root import is_remote
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position, format_lsn
from headwater.source.catalog.catalog import Catalog
from headwater.source.connection import Connection, ServerIdentity, connect, identify
from headwater.source.publication.publication import ensure_publications
from headwater.source.slot import SlotState, create_slot, drop_slot, gap_behind, read_slot

log = logging.getLogger(__name__)

FOLLOW: Final = (
    "set source.on_timeline_change to follow and run replicate again: the slot is there, the lake holds nothing that "
    "this source does not have, and it goes on exactly"
)
_CHANGED: Final = "the source changed"
_LOST: Final = "changes were lost with the slot"
_REPAIR: Final = "headwater verify PIPELINE.yaml --repair"


def same_or_followed(connection: Connection, pipeline: Pipeline, registry: Registry, ledger: Ledger) -> ServerIdentity:
    """Who answered: the source of the lake, or one whose log goes on exactly where the lake stands, if the pipeline
    file wants that followed. SourceChanged else, with the rung of the ladder as the remedy."""
    known = registry.pipeline
    assert known is not None
    now = identify(connection)
    if (now.system_id, now.timeline) == (known.system_id, known.timeline):
        return require_same_source(connection, pipeline, known, ledger.newest)
    reason = why_not_followed(connection, pipeline, registry, ledger, now)
    if not reason and pipeline.source.on_timeline_change == "follow":
        log.warning("the source is on timeline %d now, and its log goes on where the lake stands", now.timeline)
        return now
    raise SourceChanged(
        f"the lake was built from {described(known)}, this source is {described(now)}"
        + (f"; it cannot be followed exactly: {reason}" if reason else ""),
        where="source.connection",
        remedy=NEW_SOURCE if reason else FOLLOW,
    )


def why_not_followed(
    connection: Connection, pipeline: Pipeline, registry: Registry, ledger: Ledger, now: ServerIdentity
) -> str:
    """Why the log of `now` is not the lake's, gone on; empty: all that the lake holds lies before the switch of
    timelines, and the slot delivers what follows it."""
    known = registry.pipeline
    assert known is not None
    if now.system_id != known.system_id:
        return "it is another system"
    # The slot before the ledger: another driver, which has just followed and ended, is seen in both.
    slot = read_slot(connection, pipeline.source.slot)
    ledger.refresh()
    newest = ledger.newest
    history = history_of(pipeline, now)
    switch = dict(history).get(known.timeline)
    if switch is None or not set(known.history) <= set(history):
        return f"its timeline does not come from timeline {known.timeline} of the lake's source"
    start = max(known.start_lsn, newest.position.lsn if newest is not None else 0)
    if start > switch:
        return f"the lake stands at {format_lsn(start)}, and timeline {known.timeline} ended at {format_lsn(switch)}"
    for record in registry.tables.values():
        if record.is_followed and (reason := _beyond(pipeline, record, switch)):
            return f"{record.name}: {reason}, and timeline {known.timeline} ended at {format_lsn(switch)}"
    for kept in registry.kept.values():
        if kept.state == "keeping":
            return f"changes of {kept.table} are kept for a load or reload that has not ended"
    return gap_behind(slot, start)


def take_tables(pipeline: Pipeline, registry: Registry, ledger: Ledger) -> None:
    """Every table carries the generation of `ledger` from now on: a driver that still works for the old source, which
    no slot of the new one keeps out, can commit to none any more. Tables that Spark writes are not kept from it. A load
    that reads the old source finds its record changed when it ends, and is none of the new one's."""
    fence = Fence(ledger.generation_app, ledger.generation)
    for record in list(registry.tables.values()):
        if record.state == "loading":
            registry.write(replace(record, incarnation=record.incarnation + 1))
        elif record.state not in ("new", "removed"):
            for one in _with_history(record):
                path = table_path(pipeline.lake_path(), one.path)
                if current(path, one.app_id(pipeline.name)) is not None:
                    take(path, fence)


def _with_history(record: TableRecord) -> tuple[TableRecord, ...]:
    return (record, history_record(record)) if record.schema.history else (record,)


def _mend_tables(root: str, registry: Registry) -> None:
    """What a power cut has left half done goes. Without a slot nothing tells what of it was durable, and every row is
    compared or loaded again. Beside a driver, which has done this at its start, nothing happens."""
    if is_remote(root):
        return
    with without_driver(root) as no_driver:
        if no_driver:
            cut_ledger_back(root)
        for record in registry.tables.values() if no_driver else ():
            if record.state != "removed" and record.schemas:
                for one in _with_history(record):
                    cure(root, table_path(root, one.path))


def _beyond(pipeline: Pipeline, record: TableRecord, switch: int) -> str:
    """How the table may hold what was committed past `switch`; empty: it does not."""
    # Until a hand-over has ended transaction ids decide what the load has seen, and a promoted server may give one of
    # them to another transaction.
    if record.capture is not None and (record.capture.handover_end is None or record.capture.handover_end > switch):
        return "its load is not handed over to the log yet"
    for one in _with_history(record):
        stands = current(table_path(pipeline.lake_path(), one.path), one.app_id(pipeline.name))
        if stands is not None and stands[1] > switch:
            return f"it stands at {format_lsn(stands[1])}"
    return ""


def adopt(pipeline: Pipeline, only: Collection[TableName] | None = None) -> None:
    """Take the server that the connection leads to for the lake's source from now on. No table is in step with it:
    all are suspended until a repair or a load brings them there, and the log is read from a new slot on.

    Refused where `check` refuses (`only`: as of `require_ok`), and where none of the lake's tables is; LostLease while
    a replicate or a load works there.
    """
    with _alone(pipeline, only) as (connection, registry, known):
        now = identify(connection)
        if _is_adopted(registry, known, now, pipeline.lake_path()):
            return  # it was killed behind this; what it has brought in step meanwhile stays
        reason = f"{_CHANGED} from {described(known)} to {described(now)}"
        _begin_anew(connection, pipeline, registry, now, reason)


def begin_behind_gap(pipeline: Pipeline) -> str:
    """Go on from a new slot where the old one cannot deliver what follows the ledger: what was lost with it; empty:
    nothing is, and nothing was done. As for another source all tables are suspended until they are compared.

    Killed in between: the slot is missing, or stands past the ledger, until the ledger goes on where it begins. Errors
    as of `adopt`, but for a table's own faults; SourceChanged for another source.
    """
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater slot")) as connection:
        registry = mended_registry(pipeline, connection)
        if registry is None or registry.pipeline is None or not _gap(connection, pipeline, registry.pipeline):
            return ""
    with _alone(pipeline, ()) as (connection, registry, known):
        now = require_same_source(connection, pipeline, known, read_epoch(pipeline.lake_path()))
        if gap := _gap(connection, pipeline, known):
            _begin_anew(connection, pipeline, registry, now, f"{_LOST}: {gap}")
        return gap


def waits_behind_gap(record: TableRecord) -> bool:
    """Whether the table has not been compared since a slot was lost; or that was not ended."""
    return _waits(record, _LOST)


def _waits(record: TableRecord, since: str) -> bool:
    return record.state in ("suspended", "loading") and record.reason.startswith(since)


def _gap(connection: Connection, pipeline: Pipeline, known: PipelineRecord) -> str:
    now = identify(connection)
    if (now.system_id, now.timeline) != (known.system_id, known.timeline):
        return ""  # another source, whose slot is another one
    if renamed := renamed_problems(pipeline, known):
        return "; ".join(problem.message for problem in renamed)
    slot = read_slot(connection, pipeline.source.slot)
    # After the slot: a driver beside confirms only what the ledger has.
    newest = read_epoch(pipeline.lake_path())
    return gap_behind(slot, max(known.start_lsn, newest.position.lsn if newest else 0))


@contextlib.contextmanager
def _alone(
    pipeline: Pipeline, only: Collection[TableName] | None
) -> Iterator[tuple[Connection, Registry, PipelineRecord]]:
    """With no load and no set-up beside the block."""
    report = check(pipeline)
    require_ok(report, only)
    conninfo, registry = pipeline.conninfo(), mended_registry(pipeline)
    if registry is None or registry.pipeline is None:
        raise Refused(
            "nothing was loaded yet",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    _refuse_other_database(pipeline, registry, report.catalog)
    if only is None:  # all are loaded next: refused only then, the old source would be left already
        schemas = [table.schema for table in report.catalog.tables]
        refuse_two_keys(pipeline, registry.tables.values(), schemas)
    with (
        contextlib.closing(connect(conninfo, application_name="headwater new slot")) as connection,
        lease.hold(conninfo, registry, lease.LOAD),
        lease.hold(conninfo, registry, lease.SET_UP),
    ):
        yield connection, registry, registry.pipeline


def _refuse_other_database(pipeline: Pipeline, registry: Registry, catalog: Catalog) -> None:
    """Refused where none of the lake's tables is. Nothing else tells a wrong connection: all databases of a server have
    one system and timeline, and any server may be the new source."""
    held = {
        name
        for name, record in registry.tables.items()
        if record.state not in ("new", "removed") and pipeline.entry_for(TableName.parse(name)) is not None
    }
    if held and held.isdisjoint(str(one.relation.name) for one in catalog.judged):
        raise Refused(
            f"no table that the lake holds is in this database ({min(held)}, for example)",
            code="table_missing",
            where="source.connection",
            remedy="let source.connection lead to the database that has the tables",
        )


def _begin_anew(
    connection: Connection, pipeline: Pipeline, registry: Registry, now: ServerIdentity, reason: str
) -> None:
    """A new slot at the source `now`, an epoch where it begins, and no table that is taken for whole before it is
    compared."""
    known, root = registry.pipeline, pipeline.lake_path()
    assert known is not None
    if renamed_problems(pipeline, known):
        refuse_while_read(connection, known, now)
    # The lake's own, or a standby's, which goes by its own system; or made here by a change that was killed.
    ours = (known.system_id, known.slot) == (now.system_id, pipeline.source.slot)
    ours = ours or any(record.reason == reason for record in registry.tables.values())
    _refuse_slot(read_slot(connection, pipeline.source.slot), connection.info.dbname, pipeline, ours=ours)
    # Before the slot: the server decodes its log with the publications of each moment.
    made = ensure_publications(connection, pipeline.source.publication, pipeline=pipeline.name)
    # Suspended before anything else: whoever goes on from a half-done change, with whichever source, trusts no row.
    # And as another incarnation: a position of the old log, which may be higher, is none that it fell back from.
    remedy = BY_ITSELF if pipeline.source.on_slot_loss == "repair" and reason.startswith(_LOST) else _REPAIR
    suspended = [
        replace(record.entered("suspended", reason, remedy), incarnation=record.incarnation + 1)
        for record in registry.tables.values()
        if record.state not in ("new", "removed")
    ]
    registry.write(*suspended)
    reach("adopt.suspended")
    _mend_tables(root, registry)  # behind a new slot a ledger that is not whole could not be told from a damaged one
    drop_slot(connection, pipeline.source.slot)
    patience = pipeline.load.wait_for_old_transactions
    slot = create_slot(connection, pipeline.source.slot, pipeline.source.failover, patience)
    assert slot.confirmed_lsn is not None
    reach("adopt.slot")
    ledger = Ledger(root, pipeline.name)
    begin = Position(now.system_id, now.timeline, slot.confirmed_lsn)
    epoch = _published(ledger, begin, _carried(root, registry, ledger.generation_app))
    take_tables(pipeline, registry, ledger)
    reach("adopt.ledger")
    storage.sync(root)  # before the registry says so
    drop_former(connection, pipeline, known, now)
    is_same = (known.system_id, known.publication) == (now.system_id, pipeline.source.publication)
    registry.write(
        replace(
            registry.pipeline or known,  # it may have been paused since
            system_id=now.system_id,
            timeline=now.timeline,
            slot=pipeline.source.slot,
            publication=pipeline.source.publication,
            start_lsn=slot.confirmed_lsn,
            made_slot=True,
            made_publication=made or (known.made_publication and is_same),
            history=history_of(pipeline, now),
        )
    )
    states = {one.name: {"state": one.state, "reason": one.reason, "since": one.since} for one in suspended}
    write_position_file(
        root,
        PositionFile(epoch.generation, epoch.epoch, epoch.position, epoch.position.lsn, now_text(), states=states),
    )
    log.warning("%s: every table is suspended until it is repaired or loaded again", reason)


def _is_adopted(registry: Registry, known: PipelineRecord, now: ServerIdentity, root: str) -> bool:
    """Whether everything of a change to this source is done but bringing the tables in step."""
    if (known.system_id, known.timeline) != (now.system_id, now.timeline):
        return False  # whatever the ledger says, which may not be whole yet
    newest = read_epoch(root)
    if newest is None:
        return False
    waiting = [r for r in registry.tables.values() if _waits(r, _CHANGED)]
    same_log = (newest.position.system_id, newest.position.timeline) == (now.system_id, now.timeline)
    return bool(waiting) and same_log and newest.position.lsn >= known.start_lsn


def _refuse_slot(slot: SlotState | None, database: str, pipeline: Pipeline, *, ours: bool) -> None:
    """Before anything is changed. `ours`: nobody else can have made it for a lake of his own."""
    where = f"replication slot {pipeline.source.slot}"
    if slot is None:
        return
    if slot.active:
        raise LostLease(
            f"the slot is in use by server process {slot.active_pid}: a replicate works with this source",
            code="already_running",
            where=where,
            remedy="stop replicate, or pause its DAG, then run this again",
        )
    if slot.plugin != "pgoutput" or slot.database != database:
        raise SlotGap(
            f"the slot belongs to plugin {slot.plugin} and database {slot.database}",
            code="foreign_slot",
            where=where,
            remedy="name another slot in source.slot",
        )

    if not ours:
        raise taken(pipeline.source.slot)


def _carried(root: str, registry: Registry, generation_app: str) -> int:
    """The newest generation that a table carries: the ledger's row of it may have been torn, and gone."""
    held = [record for record in registry.tables.values() if record.state not in ("new", "removed") and record.schemas]
    folders = [table_path(root, one.path) for record in held for one in _with_history(record)]
    return max((stands[1] for folder in folders if (stands := current(folder, generation_app))), default=0)


def _published(ledger: Ledger, position: Position, carried: int) -> Epoch:
    """The lake as it is, at `position` of the new log: the rows that follow go on from there, and a driver of the old
    source is out, as is one of the generation `carried`."""
    before = ledger.newest.tables if ledger.newest is not None else {}
    ledger.begin_generation(position, carried)
    tables = {
        name: replace(version, state="suspended", applied_lsn=0, touched=False) for name, version in before.items()
    }
    return ledger.publish(position, {}, all_tables=tables, source_time=None, sample=None, stages={})
