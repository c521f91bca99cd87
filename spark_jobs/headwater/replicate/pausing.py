"""`headwater pause` and `headwater resume`: a whole pipeline, or single tables of it.

A pause is recorded in the lake, so it holds for every driver, wherever and by whom it is started: a running one ends
cleanly within a second or two, one that is started waits. The source keeps its log meanwhile. A paused table is a
suspended one: what it misses is not kept, and its resumption loads it anew, with an exact hand-over.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from headwater.errors import Refused
from headwater.gate.recovery import mended_registry
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline

log = logging.getLogger(__name__)

_PERIOD: Final = 1.0
_SAY: Final = 60.0


def pause(pipeline: Pipeline, tables: Sequence[TableName] = ()) -> dict[str, Any]:
    """`{"paused": since, "tables": {T: {"state"}}, "done", "next"}`: the pipeline (without `tables`), or these. `done`
    says what was done, `next` what is still to do. Idempotent."""
    registry = _open(pipeline, tables)
    assert registry.pipeline is not None
    if not tables and not registry.pipeline.paused:
        registry.write(replace(registry.pipeline, paused=now_text()))

    def paused(record: TableRecord) -> TableRecord | None:
        remedy = f"headwater resume PIPELINE.yaml --table {record.name}"
        return record.entered("suspended", "it was paused by hand", remedy) if record.is_followed else None

    for table in tables:
        registry.change(str(table), paused)
    if tables:
        done = f"Paused {_named(tables)}: the changes of what is paused are not kept, and resume loads it again"
        back = "".join(f" --table {shlex.quote(str(table))}" for table in tables)
    else:
        done = f"Paused {pipeline.name}: a driver ends within seconds, and the source keeps its log until resume"
        back = ""
    return _report(registry, tables, done, pipeline.with_file(f"headwater resume PIPELINE.yaml{back}"))


def resume(
    pipeline: Pipeline, tables: Sequence[TableName] = (), progress: Callable[[str], None] = log.info
) -> dict[str, Any]:
    """As `pause`, undone. Of `tables`, those that are suspended, for whatever reason, are loaded anew, and those whose
    load was killed."""
    registry = _open(pipeline, tables)
    assert registry.pipeline is not None
    if not tables and registry.pipeline.paused:
        registry.write(replace(registry.pipeline, paused=""))
    waiting = [table for table in tables if registry.tables[str(table)].state in ("suspended", "loading")]
    if waiting:
        from headwater.load.load import load

        # LostLease beside a load that lives.
        load(pipeline, waiting, again=True, progress=progress)
        registry.refresh()
    if tables:
        done = f"Resumed {_named(tables)}"
    else:
        done = f"Resumed {pipeline.name}: a replicate that still runs goes on within a second; this command starts none"
    going = (
        "if none runs: headwater replicate PIPELINE.yaml (under Airflow trigger "
        f"{pipeline.name}.replicate; by its schedule the next run may be a whole slice away)"
    )
    return _report(registry, tables, done, pipeline.with_file(going))


def _open(pipeline: Pipeline, tables: Sequence[TableName]) -> Registry:
    registry = mended_registry(pipeline)
    missing = [str(name) for name in tables if registry is None or str(name) not in registry.tables]
    if registry is None or registry.pipeline is None or missing:
        raise Refused(
            f"not loaded: {', '.join(missing)}" if missing else "no table is loaded",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    return registry


def _named(tables: Sequence[TableName]) -> str:
    return ", ".join(map(str, tables))


def _report(registry: Registry, tables: Sequence[TableName], done: str, then: str) -> dict[str, Any]:
    assert registry.pipeline is not None
    states = {str(name): {"state": registry.tables[str(name)].state} for name in tables}
    return {"paused": registry.pipeline.paused or None, "tables": states, "done": done, "next": then}


def refuse_paused(registry: Registry, where: str) -> None:
    """Refused for who needs a driver while nobody may replicate."""
    if registry.pipeline is not None and registry.pipeline.paused:
        raise Refused(
            f"the pipeline is paused since {registry.pipeline.paused}",
            code="paused",
            where=where,
            remedy="headwater resume PIPELINE.yaml",
        )


def await_resumption(
    registry: Registry, until: str | None, deadline: float | None, stop: threading.Event
) -> str | None:
    """While the pipeline is paused: wait, without a slot and without an engine. Why it ended, in the words of
    `replicate`; None: it is not paused (any more). Refused where `until` says that somebody waits for the end."""
    said = 0.0
    while registry.pipeline is not None and registry.pipeline.paused:
        since = registry.pipeline.paused
        if until is not None:
            refuse_paused(registry, "headwater replicate --until")
        if stop.is_set():
            return "signal"
        if deadline is not None and time.monotonic() >= deadline:
            return "seconds"
        if time.monotonic() - said > _SAY:
            said = time.monotonic()
            log.info("the pipeline is paused since %s: waiting for headwater resume; the source keeps its log", since)
        stop.wait(_PERIOD)
        registry.refresh()
    return None
