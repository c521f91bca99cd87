"""`headwater drop`: takes the slot and the publications away from the source. The lake stays.

Only what Headwater, or its script for a DBA, made: a publication says so in its comment; a slot cannot be marked, so it
goes only when it is a `pgoutput` slot of this database, and a publication of this pipeline carries the mark or the
lake's registry says that a load made it. Publications that the role does not own stay. The slot goes first: while the
marked publication is there, a drop that was cut short can be run again. A slot that stays keeps the source's log: that
is an error, with the statement that drops it.
"""

from __future__ import annotations

from typing import Any

from headwater.errors import LostLease, Refused, Transient
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, connect, errors_named, identify
from headwater.source.publication.publication import drop_publications, inserts_name, read_publication
from headwater.source.slot import PLUGIN, SlotState, drop_slot, read_slot


def drop(pipeline: Pipeline) -> dict[str, Any]:
    """`{"dropped": [...], "kept": [...]}`, e.g. "slot headwater_shop". Idempotent.

    `Transient` (code already_running), with nothing dropped, while a replicate reads the slot. Refused (slot_kept) when
    all that goes is gone and the slot has to stay.
    """
    with connect(pipeline.conninfo(), lock_timeout=30.0, statement_timeout=120.0) as connection:
        return _drop(connection, pipeline)


@errors_named("source")
def _drop(connection: Connection, pipeline: Pipeline) -> dict[str, Any]:
    name, slot_name = pipeline.source.publication, pipeline.source.slot
    publications = [p for p in (read_publication(connection, n) for n in (name, inserts_name(name))) if p is not None]
    slot = read_slot(connection, slot_name)
    marked = any(publication.made_for == pipeline.name for publication in publications)
    dropped: list[str] = []
    kept = ""
    if slot is not None:
        kept = _why_kept(connection, pipeline, slot, marked=marked)
        if not kept and slot.active:
            raise _running(slot_name)
        try:
            if not kept and drop_slot(connection, slot_name):
                dropped.append(f"slot {slot_name}")
        except LostLease as reason:
            raise _running(slot_name) from reason
        except Refused as refused:
            kept = refused.message
    dropped += [f"publication {each}" for each in drop_publications(connection, name, pipeline=pipeline.name)]
    if kept:
        gone = f"; dropped: {', '.join(dropped)}" if dropped else ""
        raise Refused(
            f"the slot stays, and with it the source's log from its position on: {kept}{gone}",
            code="slot_kept",
            where=f"slot {slot_name}",
            remedy=f"if nobody needs it, drop it as a role that may: SELECT pg_drop_replication_slot('{slot_name}')",
        )
    return {
        "dropped": dropped,
        "kept": [each for each in (f"publication {p.name}" for p in publications) if each not in dropped],
    }


def _why_kept(connection: Connection, pipeline: Pipeline, slot: SlotState, *, marked: bool) -> str:
    """Why the slot is not Headwater's to drop; empty: it is."""
    if slot.plugin != PLUGIN or slot.database != connection.info.dbname:
        return f"it belongs to plugin {slot.plugin or '(none)'} and database {slot.database or '(none)'}"
    if marked:
        return ""
    from headwater.lake.registry import Registry  # reads Delta tables: what has a mark goes without that

    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    known = registry.pipeline if registry is not None else None
    if known is None or not known.made_slot or known.slot != slot.name:
        return "no load of this pipeline is known to have made it"
    system_id = identify(connection).system_id
    return "" if known.system_id == system_id else "the load that made it was of another server"


def _running(slot_name: str) -> Transient:
    return Transient(
        "a replicate is reading it",
        code="already_running",
        where=f"slot {slot_name}",
        remedy="stop it (SIGTERM, or pause its DAG), then run drop again",
    )
