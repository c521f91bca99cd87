"""The slot and the publication that a lake goes by, where the pipeline file names others by now.

For the former slot the source would keep its log for good, and by the former publication a table that loses its key
could not be updated any more, with nobody looking. So nobody goes on before a switch (`headwater verify --repair`,
`headwater load --again`), which makes the new ones and takes the former away.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headwater.errors import LostLease, SlotGap
from headwater.names import quote_ident
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, ServerIdentity
from headwater.source.problems import Problem, error
from headwater.source.publication.publication import drop_publications, inserts_name, read_publication
from headwater.source.slot import PLUGIN, drop_slot, read_slot

if TYPE_CHECKING:
    from headwater.lake.registry import PipelineRecord

log = logging.getLogger(__name__)


def renamed_problems(pipeline: Pipeline, known: PipelineRecord) -> list[Problem]:
    """What the lake knows under another name than the file gives it."""
    source = pipeline.source
    names = (("slot", known.slot, source.slot), ("publication", known.publication, source.publication))
    return [
        error(
            "source_renamed",
            f"source.{what}",
            f"the lake goes by {what} {former}, and the pipeline file names {now}",
            f"set source.{what} back to {former}; or, to change to {now}, headwater verify PIPELINE.yaml --repair "
            "compares all tables and writes what differs, and headwater load PIPELINE.yaml --again loads them again",
        )
        for what, former, now in names
        if former != now
    ]


def taken(slot: str) -> SlotGap:
    """The error of a new name that a slot has already."""
    return SlotGap(
        "a slot of this name is there already: it may be what another lake goes by",
        code="foreign_slot",
        where=f"replication slot {slot}",
        remedy="name another slot in source.slot; or, if nobody needs it, drop it there: "
        f"SELECT pg_drop_replication_slot('{slot}')",
    )


def refuse_while_read(connection: Connection, known: PipelineRecord, now: ServerIdentity) -> None:
    """Before a switch: a driver that goes by the former names has to end. LostLease while one does."""
    slot = read_slot(connection, known.slot) if known.system_id == now.system_id else None
    if slot is not None and slot.active:
        raise LostLease(
            f"the slot is in use by server process {slot.active_pid}: a replicate goes by the former names",
            code="already_running",
            where=f"replication slot {known.slot}",
            remedy="stop replicate, or pause its DAG, then run this again",
        )


def drop_former(connection: Connection, pipeline: Pipeline, known: PipelineRecord, now: ServerIdentity) -> None:
    """Take away what the lake went by until now and what Headwater made, once the new ones are there and before the
    registry forgets the former names. Of the rest a warning says how."""
    source = pipeline.source
    if known.system_id != now.system_id:
        return
    slot = read_slot(connection, known.slot) if known.slot != source.slot else None
    if slot is not None and known.made_slot and slot.plugin == PLUGIN and slot.database == connection.info.dbname:
        drop_slot(connection, slot.name)
    elif slot is not None:
        log.warning(
            "slot %s, which Headwater has not made, stays, and the source keeps its log for it. If nobody needs it: "
            "SELECT pg_drop_replication_slot('%s')",
            slot.name,
            slot.name,
        )
    if known.publication != source.publication:
        drop_publications(connection, known.publication, pipeline=pipeline.name)
        for name in (known.publication, inserts_name(known.publication)):
            if read_publication(connection, name) is not None:
                log.warning(
                    "publication %s, which is not Headwater's to drop, stays: without their keys its tables could not "
                    "be updated at the source. If nobody needs it: DROP PUBLICATION %s",
                    name,
                    quote_ident(name),
                )
