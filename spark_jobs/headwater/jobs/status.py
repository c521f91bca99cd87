"""What `headwater status` shows: each table's state and lag, the slot, the stages. Changes nothing, needs no Spark.

It works with the source down, from the lake alone: what only the source can tell is then null, and `reason` says
why. Lags are measured with samples (the source's clock beside its log) and never with two clocks: an idle source
that has been read to its end has no lag.
"""

from __future__ import annotations

import time
from contextlib import closing
from datetime import datetime
from typing import Any

from headwater.config import Pipeline
from headwater.errors import Transient
from headwater.jobs.source_state import (
    STATEMENT_SECONDS,
    SourceState,
    as_the_source_stands,
    followed,
    read_source_state,
)
from headwater.jobs.speed import speed
from headwater.lake import freshness
from headwater.lake.freshness import Look, TableState
from headwater.lake.paths import table_path, table_uri
from headwater.lake.status import LakeReader
from headwater.names import TableName
from headwater.position import format_lsn
from headwater.source.connection import connect
from headwater.source.standing import Registered

_FILE_SECONDS = 1.2  # a living driver replaces its position file at least once a second


def status(pipeline: Pipeline) -> dict[str, Any]:
    """The interface's status object."""
    lake = LakeReader(pipeline.lake_path(), pipeline.name)
    look = lake.look()
    tables = followed(lake.registry(), pipeline.source.publication)
    source, listed, unreachable = _ask(pipeline, tables)
    look = as_the_source_stands(look, source, lambda: tables)
    running = source.slot is not None and source.slot.active if source is not None else _file_moves(lake, look)
    file = look.file
    samples = [source.sample] if source is not None else []
    newest = file.read_position if file is not None else None
    same_log = source is not None and look.log == (source.position.system_id, source.position.timeline)

    def lag(lsn: int | None) -> tuple[int | None, float | None]:
        if source is None or file is None or lsn is None or not same_log:
            return None, None
        complete = freshness.complete_until(file, lsn, samples)
        return max(0, source.position.lsn - lsn), _seconds_between(complete, source.now())

    # The pipeline is as far behind as the last of its tables in step: what was read and not published is no use.
    covered = [look.covered(name) for name, table in look.tables.items() if table.state == freshness.IN_STEP]
    lag_bytes, lag_seconds = lag(min((lsn for lsn in covered if lsn is not None), default=newest))
    return {
        "pipeline": pipeline.name,
        "running": running,
        "paused": _paused(lake),
        "generation": file.generation if file is not None else None,
        "epoch": file.epoch if file is not None and file.epoch else None,
        "position": file.position.to_json() if file is not None else None,
        "read_position": format_lsn(newest) if newest is not None else None,
        "lag_bytes": lag_bytes,
        "lag_seconds": lag_seconds,
        "tables": _tables(pipeline, lake, look, listed, lag, running),
        "slot": _slot(pipeline, source, unreachable),
        **speed(file.rates if file is not None else {}, lag_bytes, lag_seconds, running=running),
    }


def _ask(pipeline: Pipeline, tables: list[Registered]) -> tuple[SourceState | None, set[str], str]:
    """The source's answers, the tables that the pipeline's entries match there now, and why there are none."""
    from headwater.source.matching import match_entries
    from headwater.source.relations import list_relations

    try:
        session = connect(pipeline.conninfo(), application_name="headwater status", statement_timeout=STATEMENT_SECONDS)
        with closing(session) as connection:
            state = read_source_state(connection, pipeline.source.slot, tables)
            matched, _ = match_entries(pipeline.tables, list_relations(connection))
            return state, {str(relation.name) for relation, _ in matched}, ""
    except Transient as error:
        return None, set(), f"the source does not answer: {error.message}"


def _file_moves(lake: LakeReader, look: Look) -> bool:
    """Whether a driver lives, as far as the lake alone can tell."""
    if look.file is None:
        return False
    deadline = time.monotonic() + _FILE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if lake.file() != look.file:
            return True
    return False


def _tables(
    pipeline: Pipeline, lake: LakeReader, look: Look, listed: set[str], lag: Any, running: bool
) -> dict[str, dict[str, Any]]:
    from headwater.lake.row_count import row_count

    named = {str(entry.name) for entry in pipeline.tables if isinstance(entry.name, TableName)}
    versions = lake.epoch(look.file.epoch).tables if look.file is not None and look.file.epoch else {}
    root = pipeline.lake_path()
    registry = lake.registry()
    soft = (
        {n for n, r in registry.tables.items() if r.schemas and r.schema.soft_delete} if registry is not None else set()
    )
    shown: dict[str, dict[str, Any]] = {}
    for name in sorted(named | listed | set(look.tables)):
        table = look.tables.get(name, TableState("new", "it has not been loaded"))
        version = versions.get(name)
        relative = table.path or TableName.parse(name).path
        # Only a table in step has everything up to what has been read; any other has what its last commit says.
        covered = look.covered(name) if table.state == freshness.IN_STEP else None
        reached = covered if covered is not None else (version.applied_lsn if version is not None else None)
        lag_bytes, lag_seconds = lag(reached)
        wanted = pipeline.freshness_of(TableName.parse(name))
        shown[name] = {
            "state": table.state,
            "reason": table.reason,
            "since": table.since or None,
            "remedy": table.remedy or _remedy(table.state, pipeline.file, running),
            "applied_lsn": format_lsn(version.applied_lsn) if version is not None else None,
            "version": version.version if version is not None else None,
            "rows": row_count(table_path(root, relative), version.version, soft_delete=name in soft)
            if version is not None
            else None,
            "lag_bytes": lag_bytes,
            "lag_seconds": lag_seconds,
            "freshness_seconds": wanted,
            "late": lag_seconds > wanted if lag_seconds is not None and wanted is not None else None,
            "path": table_uri(root, relative),
        }
    return shown


def _paused(lake: LakeReader) -> str | None:
    """Since when nobody may replicate."""
    registry = lake.registry()
    return (registry.pipeline.paused or None) if registry is not None and registry.pipeline is not None else None


def _remedy(state: str, file: str, running: bool) -> str:
    if state == "new":
        return f"headwater load {file}"
    return f"headwater replicate {file}" if state == "catching up" and not running else ""


def _slot(pipeline: Pipeline, source: SourceState | None, unreachable: str) -> dict[str, Any]:
    slot = source.slot if source is not None else None
    shown: dict[str, Any] = {
        "name": pipeline.source.slot,
        "active": slot.active if slot is not None else None,
        "confirmed_lsn": format_lsn(slot.confirmed_lsn)
        if slot is not None and slot.confirmed_lsn is not None
        else None,
        "retained_wal_bytes": slot.retained_wal_bytes if slot is not None else None,
        "wal_status": slot.wal_status if slot is not None else None,
    }
    if slot is None:
        shown["reason"] = unreachable or "there is no such slot at the source"
    elif slot.invalidation_reason:
        shown["reason"] = f"the slot can never be read again: {slot.invalidation_reason}"
    return shown


def _seconds_between(complete: datetime | None, now: datetime) -> float | None:
    return max(0.0, round((now - complete).total_seconds(), 3)) if complete is not None else None
