"""DAGs that run when tables of a lake have moved or are fresh: assets for `schedule`, and the cut that their events
carry.

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

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from airflow.sdk import Asset, AssetWatcher
from airflow.triggers.base import BaseEventTrigger
from croniter import CroniterError, croniter

from headwater_airflow.sensors.settings import duration
from headwater_airflow.triggers.lateness import LatenessTrigger
from headwater_airflow.triggers.moments import MomentTrigger
from headwater_airflow.triggers.movement import MovementTrigger

if TYPE_CHECKING:
    from headwater.pipeline_file.pipeline import Pipeline

_KEEP = timedelta(hours=24)
_SCHEME = "x-headwater://"
_LONGEST = 1500
"""Characters of an asset's address, in Airflow's database."""


def moved(
    pipeline: str | os.PathLike[str],
    tables: Sequence[str] | None = None,
    *,
    at_most_every: float | str | timedelta = 60,
    keep_cut: float | str | timedelta = _KEEP,
    name: str = "",
) -> Asset:
    """The asset "`tables` (None: all) of the pipeline in the file `pipeline` have moved". Its events come when one of
    them has, and all of them are in step; at most one every `at_most_every`. `keep_cut`: for how long the versions of
    an event's cut are kept. `name`: the asset's; else the other arguments make it.

    ValueError when the file has no such table.
    """
    from headwater.pipeline_file.pipeline import load_pipeline

    known = load_pipeline(pipeline)
    wanted = _wanted(known, tables)
    period, keep = duration(at_most_every, "at_most_every"), duration(keep_cut, "keep_cut")
    told = name or _named(known.name, wanted, f" (every {period.total_seconds():g} s{_kept(keep)})")
    trigger = MovementTrigger(
        pipeline=os.path.abspath(pipeline),
        tables=wanted,
        at_most_every=period.total_seconds(),
        keep_seconds=keep.total_seconds(),
        asset=told,
    )
    return _asset(told, trigger)


def fresh(
    pipeline: str | os.PathLike[str],
    cron: str,
    tables: Sequence[str] | None = None,
    *,
    timezone: str = "UTC",
    keep_cut: float | str | timedelta = _KEEP,
    name: str = "",
) -> Asset:
    """The asset "`tables` (None: all) of the pipeline in the file `pipeline` hold everything that the source had
    committed before a moment of `cron` in `timezone`", by the source's own clock. A DAG with `schedule=[fresh(...)]`
    begins as early as it may: one event for each moment, with the cut (`cut_of`), and one for several that pass while
    nothing is replicated. `keep_cut`: for how long the versions of an event's cut are kept. `name`: the asset's; else
    the other arguments make it.

    ValueError for what is no cron expression, or one that never comes, no time zone and no table of the file.
    """
    from headwater.pipeline_file.pipeline import load_pipeline

    known = load_pipeline(pipeline)
    wanted = _wanted(known, tables)
    if not croniter.is_valid(cron) or any(part.lower().startswith("r") for part in cron.split()):  # croniter's random
        raise ValueError(f"{cron!r} is no cron expression: give five fields like '0 6 * * *'")
    try:
        croniter(cron).get_prev()  # what is looked for; the last moment of a year that is named may be over
    except CroniterError:
        try:
            croniter(cron).get_next()
        except CroniterError:
            raise ValueError(f"{cron!r} never comes: give moments like '0 6 * * *'") from None
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a folder of time zones
        raise ValueError(f"{timezone!r} is no time zone: give a name like 'Europe/Berlin'") from None
    keep = duration(keep_cut, "keep_cut")
    told = name or _named(known.name, wanted, f" fresh at {cron} {timezone}{_kept(keep)}")
    trigger = MomentTrigger(
        pipeline=os.path.abspath(pipeline),
        tables=wanted,
        cron=cron,
        timezone=timezone,
        keep_seconds=keep.total_seconds(),
        asset=told,
    )
    return _asset(told, trigger)


def moment_of(events: Mapping[Any, Sequence[Any]] | None, asset: Asset | None = None) -> datetime:
    """The newest moment that the events of `fresh` among a run's `triggering_asset_events` tell of; of `asset`, where
    the run waited for several. ValueError when there is none."""
    found = [datetime.fromisoformat(payload["moment"]) for _, payload in _payloads(events, asset, "moment")]
    if not found:
        raise ValueError(
            "no event of this run tells of a moment: no asset of headwater_airflow.assets.fresh triggered it"
        )
    return max(found)


def late(
    pipeline: str | os.PathLike[str],
    tables: Sequence[str] | None = None,
    *,
    remind_every: float | str | timedelta = 0,
    name: str = "",
) -> Asset:
    """The asset "one of `tables` (None: all) is further behind than `freshness` in the pipeline file allows": an alarm
    before a sensor fails. An event says which (`late_of`), once for each table until it is in time again, and again
    every `remind_every` as long as one is late (0: never). `name`: the asset's; else the other arguments make it.

    ValueError when the file has no such table, or allows none of them any staleness: then nothing could ever be late.
    """
    from headwater.names import TableName
    from headwater.pipeline_file.pipeline import load_pipeline
    from headwater.pipeline_file.quantities import number_text

    known = load_pipeline(pipeline)
    wanted = _wanted(known, tables)
    limits = [known.freshness_of(TableName.parse(table)) for table in wanted]
    limits = limits or [known.defaults.freshness, *(entry.freshness for entry in known.tables)]
    if all(limit is None for limit in limits):
        of = ", ".join(wanted) or "a table"
        raise ValueError(f"{known.file} says nowhere how stale {of} may be: set `freshness` there")
    period = duration(remind_every, "remind_every").total_seconds()
    again = f", again every {number_text(period)} s" if period else ""
    told = name or _named(known.name, wanted, f" late{again}", of_all="a table")
    trigger = LatenessTrigger(pipeline=os.path.abspath(pipeline), tables=wanted, remind_every=period, asset=told)
    return _asset(told, trigger)


def late_of(events: Mapping[Any, Sequence[Any]] | None) -> dict[str, dict[str, Any]]:
    """The late tables that a run's `triggering_asset_events` tell of, by name: `lag_seconds`, `freshness_seconds`,
    `state`, `reason`, `remedy`. The newest event counts; empty for a run without one."""
    found = _payloads(events, None, "late")
    return dict(max(found, key=lambda one: one[0])[1]["late"]) if found else {}


def cut_of(events: Mapping[Any, Sequence[Any]] | None, asset: Asset | None = None) -> dict[str, Any]:
    """The newest cut among a run's `triggering_asset_events`; of `asset`, where the run waited for several.

    ValueError when there is none: the run was triggered by hand, for example.
    """
    found = _payloads(events, asset, "cut")
    if not found:
        raise ValueError(
            "no event of this run carries a cut: no asset of headwater_airflow.assets has triggered it. Take one with "
            "a FreshnessSensor or headwater_airflow.freshness.wait instead"
        )
    newest: dict[str, Any] = max(found, key=lambda one: one[0])[1]["cut"]
    return newest


def _wanted(pipeline: Pipeline, tables: Sequence[str] | None) -> list[str]:
    """The tables by name. ValueError for one that the pipeline does not have: its event would never come."""
    from headwater.names import TableName

    if isinstance(tables, str):  # which would be taken for its letters
        raise ValueError(f"tables={tables!r}: expected a list of names, [{tables!r}]")
    wanted = sorted(str(TableName.parse(table)) for table in tables or ())
    for name in wanted:
        if pipeline.entry_for(TableName.parse(name)) is None:
            uncovered = "neither a name nor a pattern there covers it"
            raise ValueError(f"{pipeline.file} replicates no table {name}: {uncovered}")
    return wanted


def _named(pipeline: str, tables: Sequence[str], what: str, *, of_all: str = "all tables") -> str:
    """What an asset is called. Where that is longer than Airflow takes, a digest tells which tables they are."""
    told = f"{pipeline}: {', '.join(tables) or of_all}{what}"
    if len(_address(told)) <= _LONGEST:
        return told
    digest = hashlib.sha256("\n".join(tables).encode()).hexdigest()[:16]
    return f"{pipeline}: {len(tables)} tables ({digest}){what}"


def _kept(keep: timedelta) -> str:
    """In an asset's name: readers that want their cuts kept for longer than others have an asset of their own."""
    from headwater.pipeline_file.quantities import number_text

    return f", cuts kept for {number_text(keep.total_seconds())} s" if keep != _KEEP else ""


def _asset(name: str, trigger: BaseEventTrigger) -> Asset:
    """An asset has one watcher: a name for what each reader wants to know, and the same for readers of the same."""
    return Asset(name=name, uri=_address(name), watchers=[AssetWatcher(name=name, trigger=trigger)])


def _address(name: str) -> str:
    """Of the asset `name`: the name as it is, or an asset that others have stored would be another one. What a URI
    cannot hold is encoded, where it cannot: a table's brackets would be an address of IP version 6."""
    try:
        urlsplit(_SCHEME + name)
    except ValueError:
        name = "".join(quote(one) if one in "[]" or not one.isascii() else one for one in name)
    return _SCHEME + name


def _payloads(
    events: Mapping[Any, Sequence[Any]] | None, asset: Asset | None, holding: str
) -> list[tuple[Any, dict[str, Any]]]:
    """When each event came that carries the entry `holding`, and what it carries; of `asset`, None: of all."""
    return [
        (event.timestamp, payload)
        for source in ([asset] if asset is not None else list(events or ()))
        for event in (events or {})[source]
        if isinstance(payload := (event.extra or {}).get("payload"), dict) and holding in payload
    ]
