"""`headwater drop`: takes the slot and the publications away from the source. The lake stays.

Only what Headwater, or its script for a DBA, made: a publication says so in its comment; a slot cannot be marked, so it
goes only when it is a `pgoutput` slot of this database, the lake does not go by another one, and a publication of this
pipeline carries the mark or the lake's registry says that a load made it. What the lake goes by goes, too, where the
pipeline file has other names by now. Publications that the role does not own stay. Slots go first: while the marked
publication is there, a drop that was cut short can be run again. A slot that stays keeps the source's log: that is an
error, with the statement that drops it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from headwater.errors import HeadwaterError, LostLease, Refused, Transient
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, connect, errors_named, identify
from headwater.source.publication.publication import (
    Publication,
    drop_publications,
    inserts_name,
    read_publication,
)
from headwater.source.slot import PLUGIN, SlotState, drop_slot, read_slot

if TYPE_CHECKING:
    from headwater.lake.registry import PipelineRecord

log = logging.getLogger(__name__)


def drop(pipeline: Pipeline) -> dict[str, Any]:
    """`{"dropped": [...], "kept": [...]}`, e.g. "slot headwater_shop". Idempotent.

    `Transient` (code already_running), with nothing dropped, while a replicate reads the slot. Refused (slot_kept) when
    all that goes is gone and a slot has to stay.
    """
    with connect(pipeline.conninfo(), lock_timeout=30.0, statement_timeout=120.0) as connection:
        return _drop(connection, pipeline)


@errors_named("source")
def _drop(connection: Connection, pipeline: Pipeline) -> dict[str, Any]:
    source = pipeline.source
    publications = _publications(connection, source.publication)
    known = _known(connection, pipeline, may_be_unread=_is_marked(publications, pipeline))
    slots, names = [source.slot], [source.publication]
    if known is not None and known.slot != source.slot:
        slots.append(known.slot)
    if known is not None and known.publication != source.publication:
        names.append(known.publication)
        publications += _publications(connection, known.publication)
    marked = _is_marked(publications, pipeline)
    found = [slot for slot in (read_slot(connection, each) for each in slots) if slot is not None]
    kept = {slot.name: why for slot in found if (why := _why_kept(connection, slot, known, marked=marked))}
    going = [slot for slot in found if slot.name not in kept]
    for slot in going:
        if slot.active:
            raise _running(slot.name)
    dropped: list[str] = []
    for slot in going:
        try:
            if drop_slot(connection, slot.name):
                dropped.append(f"slot {slot.name}")
        except LostLease as reason:
            raise _running(slot.name) from reason
        except Refused as refused:
            kept[slot.name] = refused.message
    for name in names:
        dropped += [f"publication {each}" for each in drop_publications(connection, name, pipeline=pipeline.name)]
    if kept:
        gone = f"; dropped: {', '.join(dropped)}" if dropped else ""
        statements = "; ".join(f"SELECT pg_drop_replication_slot('{name}')" for name in kept)
        raise Refused(
            f"the slot stays, and with it the source's log from its position on: {'; '.join(kept.values())}{gone}",
            code="slot_kept",
            where=f"slot {', '.join(kept)}",
            remedy=f"if nobody needs it, drop it as a role that may: {statements}",
        )
    return {
        "dropped": dropped,
        "kept": [each for each in (f"publication {p.name}" for p in publications) if each not in dropped],
    }


def _publications(connection: Connection, name: str) -> list[Publication]:
    return [p for p in (read_publication(connection, each) for each in (name, inserts_name(name))) if p is not None]


def _is_marked(publications: list[Publication], pipeline: Pipeline) -> bool:
    return any(publication.made_for == pipeline.name for publication in publications)


def _known(connection: Connection, pipeline: Pipeline, *, may_be_unread: bool) -> PipelineRecord | None:
    """What the lake goes by at this server, as far as it was loaded. `may_be_unread`: where the lake cannot be read,
    what the file names goes without that."""
    from headwater.lake.registry import Registry  # reads Delta tables

    try:
        registry = Registry.open(pipeline.lake_path(), pipeline.name)
    except (HeadwaterError, OSError) as error:
        if not may_be_unread:
            raise
        log.warning("only what the pipeline file names is dropped, since the lake cannot be read: %s", error)
        return None
    known = registry.pipeline if registry is not None else None
    return known if known is not None and known.system_id == identify(connection).system_id else None


def _why_kept(connection: Connection, slot: SlotState, known: PipelineRecord | None, *, marked: bool) -> str:
    """Why the slot is not Headwater's to drop; empty: it is."""
    if slot.plugin != PLUGIN or slot.database != connection.info.dbname:
        return f"it belongs to plugin {slot.plugin or '(none)'} and database {slot.database or '(none)'}"
    if known is not None and known.slot != slot.name:
        return f"the lake goes by slot {known.slot}"
    if marked or (known is not None and known.made_slot):
        return ""
    return "no load of this pipeline is known to have made it"


def _running(slot_name: str) -> Transient:
    return Transient(
        "a replicate is reading it",
        code="already_running",
        where=f"slot {slot_name}",
        remedy="stop it (SIGTERM, or pause its DAG), then run drop again",
    )
