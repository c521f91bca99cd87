"""Before a job works with a lake: what a power cut of its host has left half done goes (`headwater.gate.recovery`)."""

from __future__ import annotations

from headwater.gate import recovery
from headwater.lake.registry import Registry
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection
from headwater.source.slot import read_slot


def mended_registry(pipeline: Pipeline, connection: Connection | None = None) -> Registry | None:
    """The registry; None: nothing was ever loaded. `connection`: for what is going to work with the tables, too.
    DamagedLake when there is no going on."""
    recovery.mend_control_tables(pipeline.lake_path())
    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    if registry is not None and connection is not None:
        mend_lake(connection, pipeline, registry)
    return registry


def mend_lake(connection: Connection, pipeline: Pipeline, registry: Registry) -> dict[str, str]:
    """What is damaged, by the name of the table or history: why. Nothing is done, and nothing found, beside a driver,
    which has done this at its start, and without a slot, whose position tells what was durable."""
    slot = read_slot(connection, pipeline.source.slot)
    if slot is None or slot.active or slot.confirmed_lsn is None or slot.loss:
        return {}
    return recovery.mend(pipeline.lake_path(), pipeline.name, list(registry.tables.values()), slot.confirmed_lsn)
