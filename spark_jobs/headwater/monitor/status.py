"""What `headwater status` shows: each table's state and lag, the slot, the stages. Needs no Spark, and changes nothing
(but that it gives up a slot past its ceiling, `headwater.gate.wal_ceiling`).

It works with the source down, from the lake alone: what only the source can tell is then null, and `reason` says
why.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from headwater.errors import Transient
from headwater.gate.lease import LOAD
from headwater.lake.health import Facts, SlotRoom, health
from headwater.lake.load_files import shown_loads
from headwater.lake.look import Look, ReportedState
from headwater.lake.looks import often
from headwater.lake.paths import table_path, table_uri
from headwater.lake.position_file import PositionFile
from headwater.lake.reader import LakeReader
from headwater.lake.registry import Registry
from headwater.lake_root import is_remote
from headwater.monitor.lags import Lags
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.source.catalog.standing import Registered
from headwater.source.connection import connect
from headwater.source.reading_now import jobs_there
from headwater.source.slot import wal_bound
from headwater.waiting.source_state import (
    STATEMENT_SECONDS,
    SourceState,
    as_the_source_stands,
    followed,
    read_source_state,
)
from headwater.waiting.speed import speed

_LATELY = 30.0
_FILE_SECONDS = 1.2  # on a disk a living driver replaces its position file at least once a second


def status(pipeline: Pipeline) -> dict[str, Any]:
    """The interface's status object."""
    lake = LakeReader(pipeline.lake_path(), pipeline.name)
    look = lake.look()
    tables = followed(lake.registry(), pipeline.source.publication)
    source, bound, listed, jobs, unreachable = _ask(pipeline, tables)
    source = source.asked_behind(look) if source is not None else None
    look = as_the_source_stands(look, source, lambda: tables)
    running = is_running(source, lake, look)
    file = look.file
    newest = file.read_position if file is not None else None
    lags = Lags(look, source)
    lag_bytes, lag_seconds = lags.of_pipeline()
    shown = tables_of(pipeline, lake, look, listed, lags, running)
    moving = speed(file.rates if file is not None else {}, lag_bytes, lag_seconds, running=running)
    return {
        "pipeline": pipeline.name,
        "health": health(
            Facts(
                look=look,
                tables=shown,
                file=shlex.quote(pipeline.file),
                running=running,
                now=datetime.now(UTC),
                outage=unreachable,
                load_lives=load_lives(lake.registry(), jobs) if source is not None else None,
                room=room_of(source, bound),
                eta_seconds=moving["eta_seconds"],
                named=named_of(pipeline),
            )
        ).to_json(),
        "running": running,
        "paused": _paused(lake),
        "generation": file.generation if file is not None else None,
        "epoch": file.epoch if file is not None and file.epoch else None,
        "position": file.position.to_json() if file is not None else None,
        "durable_position": durable_json(file),
        "read_position": format_lsn(newest) if newest is not None else None,
        "lag_bytes": lag_bytes,
        "lag_seconds": lag_seconds,
        "tables": shown,
        "slot": slot_of(pipeline, source, unreachable),
        "loads": shown_loads(pipeline.lake_path(), jobs),
        **moving,
    }


def named_of(pipeline: Pipeline) -> set[str]:
    """The tables that the file names, and not only by a pattern."""
    return {str(entry.name) for entry in pipeline.tables if isinstance(entry.name, TableName)}


def durable_json(file: PositionFile | None) -> dict[str, Any] | None:
    """Up to where a power cut of the lake's host would leave the lake; None: nobody has said so."""
    return file.durable_position.to_json() if file is not None and file.durable_position is not None else None


def room_of(source: SourceState | None, bound: int | None) -> SlotRoom:
    return SlotRoom(source.slot.retained_wal_bytes, bound) if source is not None and source.slot else SlotRoom()


def _ask(
    pipeline: Pipeline, tables: list[Registered]
) -> tuple[SourceState | None, int | None, set[str], frozenset[str], str]:
    """The source's answers, the bytes of log that it keeps for the slot at most, the tables that the pipeline's entries
    match there now, the sessions of loads and reloads, and why there are none."""
    from headwater.source.catalog.matching import match_entries
    from headwater.source.catalog.relations import list_relations

    try:
        session = connect(pipeline.conninfo(), application_name="headwater status", statement_timeout=STATEMENT_SECONDS)
        with closing(session) as connection:
            state = read_source_state(connection, pipeline, tables)
            matched, _ = match_entries(pipeline.tables, list_relations(connection))
            bounds = (wal_bound(connection), pipeline.source.wal_ceiling)
            bound = min((size for size in bounds if size is not None), default=None)
            return state, bound, {str(relation.name) for relation, _ in matched}, jobs_there(connection), ""
    except Transient as error:
        return None, None, set(), frozenset(), f"the source does not answer: {error.message}"


def load_lives(registry: Registry | None, jobs: Collection[str]) -> bool:
    """Whether a load of the pipeline runs. `jobs`: the sessions of loads that there are at the source."""
    lease = registry.leases.get(LOAD) if registry is not None else None
    return lease is not None and lease.session in jobs


def is_running(source: SourceState | None, lake: LakeReader, look: Look) -> bool:
    """Whether a driver lives: by the slot, or by its position file where the source does not answer, or where nobody
    reads the slot just now: a driver may be connecting again."""
    if source is None:
        return _file_moves(lake, look)
    if source.slot is not None and source.slot.active:
        return True
    # On a disk only, where that takes a second; and only where it may: an old file is not watched. Whether it is old
    # decides nothing but that, since clocks differ.
    written = look.file.written_at if look.file is not None else ""
    lately = bool(written) and (datetime.now(UTC) - datetime.fromisoformat(written)).total_seconds() < _LATELY
    return lately and not is_remote(lake.root) and _file_moves(lake, look)


def _file_moves(lake: LakeReader, look: Look) -> bool:
    """Whether a driver lives, as far as the lake alone can tell."""
    if look.file is None or look.file.ended:
        return False
    pace = often(lake.root)
    deadline = time.monotonic() + max(_FILE_SECONDS, pace.file + 1)
    while time.monotonic() < deadline:
        time.sleep(pace.wait[0])
        if lake.file() != look.file:
            return True
    return False


def tables_of(
    pipeline: Pipeline, lake: LakeReader, look: Look, listed: set[str], lags: Lags, running: bool
) -> dict[str, dict[str, Any]]:
    """The tables as `status` shows them. `listed`: those that the entries of the file match at the source now."""
    from headwater.delta.row_count import row_count

    versions = lake.epoch(look.file.epoch).tables if look.file is not None and look.file.epoch else {}
    root = pipeline.lake_path()
    registry = lake.registry()
    soft = (
        {n for n, r in registry.tables.items() if r.schemas and r.schema.soft_delete} if registry is not None else set()
    )
    shown: dict[str, dict[str, Any]] = {}
    for name in sorted(named_of(pipeline) | listed | set(look.tables)):
        table = look.tables.get(name, ReportedState("new", "it has not been loaded"))
        version = versions.get(name)
        relative = table.path or TableName.parse(name).path
        wanted = pipeline.freshness_of(TableName.parse(name))
        applied = version.applied_lsn if version is not None else None
        lag_bytes, lag_seconds = lags.of_table(name, applied, wanted)
        shown[name] = {
            "state": table.state,
            "reason": table.reason,
            "since": table.since or None,
            "remedy": remedy_of(table, pipeline, running=running),
            "retrying": look.retrying(name),
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


def remedy_of(table: ReportedState, pipeline: Pipeline, *, running: bool) -> str:
    """The command that takes a table further, as it can be typed here; empty: nothing has to be done."""
    remedy = table.remedy
    if not remedy and table.state == "new":
        remedy = "headwater load PIPELINE.yaml"
    if not remedy and table.state == "catching up" and not running:
        remedy = "headwater replicate PIPELINE.yaml"
    return pipeline.with_file(remedy)


def slot_of(pipeline: Pipeline, source: SourceState | None, unreachable: str) -> dict[str, Any]:
    """The slot as `status` shows it; `unreachable`: why the source did not answer."""
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
