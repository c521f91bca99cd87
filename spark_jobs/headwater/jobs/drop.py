"""`headwater drop`: takes the slot and the publications away from the source. The lake stays.

Only what Headwater made: a publication says so in its comment; a slot cannot be marked, so it goes only when it is
a `pgoutput` slot of this database and a publication of this pipeline carries the mark. The slot goes first: while
the marked publication is there, a drop that was cut short can be run again.
"""

from __future__ import annotations

from typing import Any

from headwater.config import Pipeline
from headwater.errors import LostLease, Transient
from headwater.source.connection import Connection, connect, errors_named
from headwater.source.publication import drop_publications, inserts_name, read_publication
from headwater.source.slot import PLUGIN, drop_slot, read_slot


def drop(pipeline: Pipeline) -> dict[str, Any]:
    """`{"dropped": [...], "kept": [...]}`, e.g. "slot headwater_shop". Idempotent.

    `Transient` (code already_running), with nothing dropped, while a replicate reads the slot.
    """
    with connect(pipeline.conninfo(), lock_timeout=30.0, statement_timeout=120.0) as connection:
        return _drop(connection, pipeline)


@errors_named("source")
def _drop(connection: Connection, pipeline: Pipeline) -> dict[str, Any]:
    name, slot_name = pipeline.source.publication, pipeline.source.slot
    publications = [p for p in (read_publication(connection, n) for n in (name, inserts_name(name))) if p is not None]
    slot = read_slot(connection, slot_name)
    ours = any(publication.made_for == pipeline.name for publication in publications)
    dropped: list[str] = []
    if slot is not None and slot.plugin == PLUGIN and slot.database == connection.info.dbname and ours:
        if slot.active:
            raise _running(slot_name)
        try:
            if drop_slot(connection, slot_name):
                dropped.append(f"slot {slot_name}")
        except LostLease as reason:
            raise _running(slot_name) from reason
    dropped += [f"publication {each}" for each in drop_publications(connection, name, pipeline=pipeline.name)]
    found = [f"slot {slot_name}"] if slot is not None else []
    found += [f"publication {publication.name}" for publication in publications]
    return {"dropped": dropped, "kept": [each for each in found if each not in dropped]}


def _running(slot_name: str) -> Transient:
    return Transient(
        "a replicate is reading it",
        code="already_running",
        where=f"slot {slot_name}",
        remedy="stop it (SIGTERM, or pause its DAG), then run drop again",
    )
