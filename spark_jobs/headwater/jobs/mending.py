"""Before a job works with a lake: what a power cut of its host has left half done goes (`headwater.lake.recovery`)."""

from __future__ import annotations

from headwater.config import Pipeline
from headwater.lake import recovery
from headwater.lake.registry import Registry
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
    """What is damaged, by the name of the table or history: why. Nothing is done, and nothing found, beside a driver:
    it has done this at its start."""
    slot = read_slot(connection, pipeline.source.slot)
    if slot is not None and slot.active:
        return {}
    root = pipeline.lake_path()
    return recovery.mend(root, list(registry.tables.values()), slot.confirmed_lsn if slot is not None else None)
