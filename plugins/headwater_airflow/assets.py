"""DAGs that run when tables of a lake have moved: assets for `schedule`, and the cut that their events carry.

    orders = moved("/etc/headwater/shop.yaml", ["public.orders"], at_most_every="5m")

    with DAG("revenue", schedule=[orders]):

        @task
        def cut(triggering_asset_events=None):
            return cut_of(triggering_asset_events)

An event says that there is something new, with the exact versions to read; a sensor says that there is everything that
a task needs. A DAG that is paused gets no events and none are made up for: the next one carries the newest cut, which
holds everything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import Asset, AssetWatcher

from headwater_airflow.sensors.settings import duration
from headwater_airflow.triggers.lateness import LatenessTrigger
from headwater_airflow.triggers.movement import MovementTrigger


def moved(
    pipeline: str | os.PathLike[str],
    tables: Sequence[str] | None = None,
    *,
    at_most_every: float | str | timedelta = 60,
    keep_cut: float | str | timedelta = timedelta(hours=24),
    name: str = "",
) -> Asset:
    """The asset "`tables` (None: all) of the pipeline in the file `pipeline` have moved". Its events come when one of
    them has, and all of them are in step; at most one every `at_most_every`. `keep_cut`: for how long the versions of
    an event's cut are kept. `name`: the asset's; else pipeline, tables and period make it.
    """
    from headwater.config import load_pipeline
    from headwater.names import TableName

    known = load_pipeline(pipeline)
    wanted = sorted(str(TableName.parse(table)) for table in tables or ())
    period, keep = duration(at_most_every, "at_most_every"), duration(keep_cut, "keep_cut")
    told = name or f"{known.name}: {', '.join(wanted) or 'all tables'} (every {period.total_seconds():g} s)"
    trigger = MovementTrigger(
        pipeline=os.path.abspath(pipeline),
        tables=wanted,
        at_most_every=period.total_seconds(),
        keep_seconds=keep.total_seconds(),
    )
    # An asset has one watcher: a name for each reader's own period, and the same for readers of the same.
    return Asset(name=told, uri=f"x-headwater://{told}", watchers=[AssetWatcher(name=told, trigger=trigger)])


def late(
    pipeline: str | os.PathLike[str],
    tables: Sequence[str] | None = None,
    *,
    remind_every: float | str | timedelta = 0,
    name: str = "",
) -> Asset:
    """The asset "one of `tables` (None: all) is further behind than `freshness` in the pipeline file allows": an alarm
    before a sensor fails. An event says which (`late_of`), once for each table until it is in time again, and again
    every `remind_every` as long as one is late (0: never). `name`: the asset's; else pipeline and tables make it.

    ValueError when the file allows none of them any staleness: then nothing could ever be late.
    """
    from headwater.config import load_pipeline
    from headwater.names import TableName

    known = load_pipeline(pipeline)
    wanted = sorted(str(TableName.parse(table)) for table in tables or ())
    limits = [known.freshness_of(TableName.parse(table)) for table in wanted]
    limits = limits or [known.defaults.freshness, *(entry.freshness for entry in known.tables)]
    if all(limit is None for limit in limits):
        of = ", ".join(wanted) or "a table"
        raise ValueError(f"{known.file} says nowhere how stale {of} may be: set `freshness` there")
    told = name or f"{known.name}: {', '.join(wanted) or 'a table'} late"
    period = duration(remind_every, "remind_every").total_seconds()
    trigger = LatenessTrigger(pipeline=os.path.abspath(pipeline), tables=wanted, remind_every=period)
    return Asset(name=told, uri=f"x-headwater://{told}", watchers=[AssetWatcher(name=told, trigger=trigger)])


def late_of(events: Mapping[Any, Sequence[Any]] | None) -> dict[str, dict[str, Any]]:
    """The late tables that a run's `triggering_asset_events` tell of, by name: `lag_seconds`, `freshness_seconds`,
    `state`, `reason`, `remedy`. The newest event counts; empty for a run without one."""
    found = [
        (event.timestamp, payload["late"])
        for told in (events or {}).values()
        for event in told
        if isinstance(payload := (event.extra or {}).get("payload"), dict) and "late" in payload
    ]
    return dict(max(found, key=lambda one: one[0])[1]) if found else {}


def cut_of(events: Mapping[Any, Sequence[Any]] | None, asset: Asset | None = None) -> dict[str, Any]:
    """The newest cut among a run's `triggering_asset_events`; of `asset`, where the run waited for several.

    ValueError when there is none: the run was triggered by hand, for example.
    """
    found = [
        (event.timestamp, payload["cut"])
        for source in ([asset] if asset is not None else list(events or ()))
        for event in (events or {})[source]
        if isinstance(payload := (event.extra or {}).get("payload"), dict) and "cut" in payload
    ]
    if not found:
        raise ValueError(
            "no event of this run carries a cut: no asset of headwater_airflow.assets has triggered it. Take one with "
            "a FreshnessSensor or headwater_airflow.freshness.wait instead"
        )
    newest: dict[str, Any] = max(found, key=lambda one: one[0])[1]
    return newest
