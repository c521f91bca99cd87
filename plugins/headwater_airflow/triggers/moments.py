"""The watcher behind `headwater_airflow.assets.fresh`: an event when the lake holds all that the source had committed
before a moment of a cron expression.

Whether it does is judged by the driver's samples of the source's clock and log, in the lake: the source is asked
nothing, and the clocks of lake and triggerer prove nothing. Moments that pass together make one event, for the last.
The moment of the last event is kept in the asset's store, so a triggerer that restarts leaves none out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from airflow.triggers.base import BaseEventTrigger, TriggerEvent
from croniter import CroniterError, croniter

from headwater_airflow.triggers.movement import MovementTrigger, keep_sure, pinned
from headwater_airflow.triggers.threads import in_thread

if TYPE_CHECKING:
    from headwater.waiting.movements import Sight

_TOLD = "headwater_moment"
_SET_BACK = timedelta(minutes=1)
"""A source's clock that is so far behind the last moment was wrong when that was told. How far the lake is behind says
nothing of that: a driver that begins again reads again what was read before. Less is the pace at which drivers look at
the clock, and two clocks differ where a watcher begins."""


class MomentTrigger(BaseEventTrigger):
    """An event for each moment of `cron` in `timezone`, once `tables` (none: all) of the pipeline file `pipeline` hold
    everything before it: `{"cut", "moment"}`. The cut is pinned for `keep_seconds`. `asset`: as of a
    `MovementTrigger`."""

    def __init__(
        self,
        *,
        pipeline: str,
        tables: Sequence[str],
        cron: str,
        timezone: str,
        keep_seconds: float,
        asset: str = "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pipeline = pipeline
        self.tables = list(tables)
        self.cron = cron
        self.timezone = timezone
        self.keep_seconds = keep_seconds
        self.asset = asset

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "headwater_airflow.triggers.moments.MomentTrigger",
            {
                "pipeline": self.pipeline,
                "tables": self.tables,
                "cron": self.cron,
                "timezone": self.timezone,
                "keep_seconds": self.keep_seconds,
                "asset": self.asset,
            },
        )

    @cached_property
    def _zone(self) -> ZoneInfo:
        """Not made by the constructor: an exception there would end the whole triggerer."""
        return ZoneInfo(self.timezone)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in self.filter_shared_stream(self.open_shared_stream(self.serialize()[1])):
            yield event

    def shared_stream_key(self) -> Hashable:
        return ("headwater", self.pipeline)  # as of a MovementTrigger: one look serves both

    @classmethod
    def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Sight]:
        return MovementTrigger.open_shared_stream(kwargs)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Sight]) -> AsyncIterator[TriggerEvent]:
        from headwater.errors import HeadwaterError

        told, said = await self._told(), ""
        unsure: deque[tuple[float, Any]] = deque()
        async for sight in shared_stream:
            await keep_sure(self.asset_state_store, _TOLD, unsure)
            tables = sight.tables(self.tables)
            why_not = sight.why_not(tables)
            complete = None if why_not else sight.complete_until(tables)
            due, payload = told, None
            try:
                if complete is not None:
                    due = self._last_before(complete)
                    if (clock := sight.source_clock) is not None and told - clock > _SET_BACK:
                        self.log.warning(
                            "pipeline %s: the source's clock was set back: the last moment, %s, has yet to come",
                            sight.pipeline,
                            told.isoformat(),
                        )
                        told = due
                        unsure.clear()
                        unsure.append((time.monotonic(), told.isoformat()))
                if due > told:
                    cut = await in_thread(self.pipeline, pinned, sight, tables, self.tables, self.keep_seconds)
                    payload = {"cut": cut, "moment": due.astimezone(self._zone).isoformat()}
            except CroniterError as error:
                why_not = f"no moment of {self.cron!r} is known: {error}"
            except ZoneInfoNotFoundError:
                why_not = f"the triggerer knows no time zone {self.timezone!r}: install the package tzdata there"
            except (HeadwaterError, OSError) as error:
                why_not = str(error)
            if why_not and why_not != said:
                self.log.warning("pipeline %s: no event as long as it is so: %s", sight.pipeline, why_not)
            said = why_not
            if payload is None:
                continue
            yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
            told = due
            unsure.append((time.monotonic(), told.isoformat()))

    def _last_before(self, moment: datetime) -> datetime:
        """In UTC. At a named hour the zone's clock decides: an hour that it shows twice has its moments in the first of
        them, one that it leaves out as much later. Every so many minutes is so by any clock."""
        here = moment.astimezone(self._zone).replace(tzinfo=None)
        before = croniter(self.cron, here)
        named: datetime = before.get_prev(datetime)
        since: timedelta = here - named
        # Hours further back may have had another clock: on a day of the week, say, that is over.
        if croniter.expand(self.cron)[0][1] == ["*"] and since <= timedelta(hours=1):
            return moment.astimezone(UTC) - since
        while True:
            found = named.replace(tzinfo=self._zone).astimezone(UTC)
            if found < moment:
                return found
            named = before.get_prev(datetime)

    async def _told(self) -> datetime:
        """The moment of the last event; of a watcher that never told any, when it began."""
        found = await self.asset_state_store.aget(_TOLD) if self.asset_state_store is not None else None
        if isinstance(found, str):
            return datetime.fromisoformat(found)
        now = datetime.now(UTC)
        if self.asset_state_store is not None:
            await self.asset_state_store.aset(_TOLD, now.isoformat())
        return now
