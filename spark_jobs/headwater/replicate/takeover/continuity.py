"""Whether the log of this source goes on where the lake stands, and taking a timeline that does for the lake's own."""

from __future__ import annotations

from dataclasses import replace

from headwater.errors import LostLease, SlotGap, Transient
from headwater.gate.same_source import history_of
from headwater.gate.wal_ceiling import REMEDY
from headwater.lake.durability import sync_lake
from headwater.lake.ledger import Ledger
from headwater.lake.registry import PipelineRecord, Registry
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position, format_lsn
from headwater.replicate.takeover.new_source import same_or_followed, take_tables
from headwater.source.connection import Connection, identify
from headwater.source.slot import gap_behind, read_slot


def continuity(connection: Connection, pipeline: Pipeline, known: PipelineRecord, ledger: Ledger) -> int:
    """Where to go on: the ledger's position; SlotGap when the slot cannot deliver what follows it."""
    where = f"replication slot {pipeline.source.slot}"
    slot = read_slot(connection, pipeline.source.slot)
    # A driver may have ended just now: it has confirmed nothing that a look behind the slot's does not find.
    ledger.refresh()
    start = _reached(known, ledger)
    gap = gap_behind(slot, start)
    if slot is None or slot.loss:
        raise SlotGap(gap, where=where, remedy=REMEDY)
    if slot.plugin != "pgoutput" or slot.database != connection.info.dbname:
        raise SlotGap(
            f"the slot belongs to plugin {slot.plugin} and database {slot.database}",
            code="foreign_slot",
            where=where,
            remedy="name another slot in source.slot",
        )
    if slot.active:
        raise LostLease(
            f"the slot is in use by server process {slot.active_pid}: another replicate is running",
            code="already_running",
            where=where,
            remedy="stop the other one, or wait until it ends",
        )
    if gap:
        raise SlotGap(gap, where=where, remedy=REMEDY)
    return start


def _reached(known: PipelineRecord, ledger: Ledger) -> int:
    return max(known.start_lsn, ledger.newest.position.lsn if ledger.newest is not None else 0)


def follow(
    connection: Connection, pipeline: Pipeline, ledger: Ledger, registry: Registry, position: Position, start: int
) -> None:
    """Take a timeline that was found to go on where the lake stands for the lake's own. The ledger first: a driver that
    is killed in between finds the same again."""
    known = registry.pipeline
    assert known is not None
    moves = known.timeline != position.timeline
    if moves:
        # A driver of the old source may have worked until now: from here on none does, and what was found counts only
        # if it still holds.
        take_tables(pipeline, registry, ledger)
        same_or_followed(connection, pipeline, registry, ledger)
        reached = _reached(known, ledger)
        if reached != start:
            raise Transient(
                f"the lake went on to {format_lsn(reached)} while this driver started at {format_lsn(start)}",
                where="source.connection",
                remedy="run replicate again",
            )
    newest = ledger.newest
    if newest is not None and not newest.position.same_log(position):
        at = position.at(newest.position.lsn)
        ledger.publish(at, {}, all_tables=newest.tables, source_time=None, sample=None, stages={})
    history = history_of(pipeline, identify(connection))
    if moves or history != known.history:
        # A table that is suspended may stand past the switch: as another incarnation it has no position.
        silent = [r for r in registry.tables.values() if r.state == "suspended" and not r.is_followed] if moves else []
        later = [replace(record, incarnation=record.incarnation + 1) for record in silent]
        sync_lake(pipeline.lake_path())  # before the registry says so: a power cut must not leave the old ledger alone
        registry.write(replace(registry.pipeline or known, timeline=position.timeline, history=history), *later)
