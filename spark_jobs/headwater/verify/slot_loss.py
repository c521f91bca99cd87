"""`headwater replicate` where `source.on_slot_loss` is `repair`: a driver that meets a slot that cannot deliver what
follows the ledger makes a new one, has the tables compared and repaired, and goes on.

The repair is that of `headwater verify --repair`: a driver runs beside it, so that the new slot is read, and every
table that is compared follows the log at once. Killed, or stopped between two tables, the next driver goes on with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from functools import partial
from typing import Any, Final

from headwater.errors import LostLease, SlotGap
from headwater.gate import lease
from headwater.gate.recovery import mended_registry
from headwater.lake.ledger import Ledger
from headwater.lake.registry import Registry
from headwater.load.driver_answers import is_running
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.replicate import replicate
from headwater.replicate.run import Totals, report
from headwater.replicate.takeover.new_source import waits_behind_gap
from headwater.source.connection import connect
from headwater.verify.verify import verify

log = logging.getLogger(__name__)

_LOST: Final = ("slot_gap", "wal_ceiling")
_PAUSE_SECONDS: Final = 1.0


def replicate_through_losses(
    pipeline: Pipeline,
    until: str | None,
    max_seconds: float | None,
    stop: threading.Event,
    take_over: bool = False,
    overtime: float = 0.0,
) -> dict[str, Any]:
    """`replicate`, which repairs what a lost slot has cost as often as it is lost, if the pipeline file wants that.
    A repair is no part of `max_seconds`."""
    work = partial(replicate, pipeline, until, max_seconds, stop, take_over, overtime=overtime)
    if pipeline.source.on_slot_loss != "repair":
        return work()
    repaired = _repair_what_waits(pipeline, stop)
    while True:
        try:
            return work()
        except SlotGap as gap:
            if gap.code not in _LOST or stop.is_set():
                raise
            log.error("%s; a new slot is made, and every table is compared (source.on_slot_loss: repair)", gap)
            _repair(pipeline, (), stop)
            repaired = True
        except LostLease as busy:
            # A successor has taken over from the driver beside the repair.
            if not repaired or busy.code != "already_running" or until is not None:
                raise
            registry = Registry.open(pipeline.lake_path(), pipeline.name)
            assert registry is not None, "a table was repaired"
            ledger, word = Ledger(pipeline.lake_path(), pipeline.name), "signal" if max_seconds is None else "seconds"
            return report(Totals(), ledger, registry.tables, word, handed_over=True)


def _repair_what_waits(pipeline: Pipeline, stop: threading.Event) -> bool:
    """What a driver before this one has left, unless somebody is at it: whether there was something to do."""
    registry = mended_registry(pipeline)
    if registry is None or registry.pipeline is None or registry.pipeline.paused:
        return False
    waiting = [
        name
        for name, record in registry.tables.items()
        if waits_behind_gap(record) and pipeline.entry_for(TableName.parse(name)) is not None
    ]
    if not waiting:
        return False
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater replicate")) as connection:
        if is_running(connection, pipeline) or lease.is_held(connection, registry, lease.LOAD):
            return False
    log.warning("%s: not compared yet since the slot was lost", ", ".join(waiting))
    _repair(pipeline, [TableName.parse(name) for name in waiting], stop)
    return True


def _repair(pipeline: Pipeline, tables: list[TableName] | tuple[()], stop: threading.Event) -> None:
    try:
        found = verify(pipeline, tables, repair=True, stop=stop)["tables"]
    except LostLease as busy:
        log.warning("%s: the repair is left to it", busy)
        stop.wait(_PAUSE_SECONDS)
        return
    for name, table in found.items():
        log.warning("%s: %d rows repaired since the slot was lost; it is %s", name, table["repaired"], table["state"])
