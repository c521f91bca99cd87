"""The watcher behind an asset of `headwater_airflow.assets`: an event each time that tables of a lake have moved.

One poll of a lake's small files serves every watcher of its pipeline in a triggerer; the source is asked nothing. The
position up to which events have told is kept in the asset's store, so a triggerer that restarts goes on there: what
moved meanwhile is told by one event. Outages are waited out and logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from headwater_airflow.hooks.store import fetch_in_triggerer
from headwater_airflow.triggers.threads import in_thread
from headwater_airflow.triggers.waits import stamp_of

if TYPE_CHECKING:
    from airflow.sdk.execution_time.context import AssetStateStoreAccessors

    from headwater.waiting.movements import Movements, Sight

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_ANEW_SECONDS = 600.0
"""Whatever is kept is read again then: a lake that was made anew has lower positions than the one before."""
_CURSOR = "headwater_positions"
SURE_SECONDS = 10.0
"""A triggerer keeps an event in memory for about a second, and loses it if it stops. Only after this time does a store
say that it was told: twice rather than never. Airflow does not tell a watcher which of its events it has stored."""


class MovementTrigger(BaseEventTrigger):
    """An event when one of `tables` (none: all) of the pipeline file `pipeline` has moved and all of them are in step,
    at most every `at_most_every` seconds: `{"cut", "moved"}`. The cut is pinned for `keep_seconds`. `asset`: the name
    of the asset that is watched. Airflow takes triggers with the same arguments for one, which has no store of its own
    if it watches two assets."""

    def __init__(
        self, *, pipeline: str, tables: Sequence[str], at_most_every: float, keep_seconds: float, asset: str = ""
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pipeline = pipeline
        self.tables = list(tables)
        self.at_most_every = at_most_every
        self.keep_seconds = keep_seconds
        self.asset = asset

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "headwater_airflow.triggers.movement.MovementTrigger",
            {
                "pipeline": self.pipeline,
                "tables": self.tables,
                "at_most_every": self.at_most_every,
                "keep_seconds": self.keep_seconds,
                "asset": self.asset,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in self.filter_shared_stream(self.open_shared_stream(self.serialize()[1])):
            yield event

    def shared_stream_key(self) -> Hashable:
        return ("headwater", self.pipeline)

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Sight]:
        """What the lake shows, about once a second; what stands in the way is said once."""
        from headwater.errors import HeadwaterError

        fetch_in_triggerer()
        file = kwargs["pipeline"]
        movements: Movements | None = None
        read_at, stamp = 0.0, None
        said = ""
        while True:
            try:
                now_there = await in_thread(file, stamp_of, file)
                if movements is None or now_there != stamp or time.monotonic() - read_at > _ANEW_SECONDS:
                    movements, read_at, stamp = await in_thread(file, _movements, file), time.monotonic(), now_there
                sight = await in_thread(file, movements.look)
            except (HeadwaterError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("pipeline file %s, looking again: %s", file, said)
            else:
                said = ""
                if sight is not None:
                    yield sight
            await asyncio.sleep(_LOOK_SECONDS)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Sight]) -> AsyncIterator[TriggerEvent]:
        from headwater.errors import HeadwaterError

        since = await self._told()
        not_before, said = 0.0, ""
        unsure: deque[tuple[float, Any]] = deque()
        async for sight in shared_stream:
            await keep_sure(self.asset_state_store, _CURSOR, unsure)
            if time.monotonic() < not_before:
                continue
            tables = sight.tables(self.tables)
            why_not = sight.why_not(tables)
            moved = sight.moved(tables, since) if not why_not else []
            payload: dict[str, Any] | None = None
            try:
                if moved:
                    cut = await in_thread(self.pipeline, pinned, sight, tables, self.tables, self.keep_seconds)
                    payload = {"cut": cut, "moved": moved}
            except (HeadwaterError, OSError) as error:
                why_not = str(error)
            if why_not and why_not != said:
                self.log.warning("pipeline %s: no event as long as it is so: %s", sight.pipeline, why_not)
            said = why_not
            if why_not or payload is None:
                continue
            yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
            since, not_before = sight.positions(tables), time.monotonic() + self.at_most_every
            unsure.append((time.monotonic(), dict(since)))

    async def _told(self) -> Mapping[str, int]:
        """Up to where the last event told; nothing when there was none."""
        told = await self.asset_state_store.aget(_CURSOR) if self.asset_state_store is not None else None
        return {name: lsn for name, lsn in told.items() if isinstance(lsn, int)} if isinstance(told, dict) else {}


async def keep_sure(store: AssetStateStoreAccessors | None, key: str, unsure: deque[tuple[float, Any]]) -> None:
    """Takes from `unsure` what was told `SURE_SECONDS` ago, each with when it was, and keeps the last of it."""
    sure = None
    while unsure and time.monotonic() - unsure[0][0] >= SURE_SECONDS:
        _, sure = unsure.popleft()
    if sure is not None and store is not None:
        await store.aset(key, sure)


def pinned(sight: Sight, tables: Sequence[str], wanted: Sequence[str], keep_seconds: float) -> dict[str, Any]:
    """The cut of `tables`, kept in the name of an asset of `wanted`. Refused when the lake cannot be written."""
    return sight.pinned(tables, f"asset event of {', '.join(wanted) or 'all tables'}", keep_seconds)


def _movements(file: str) -> Movements:
    from headwater.pipeline_file.pipeline import load_pipeline
    from headwater.waiting.movements import Movements

    return Movements(load_pipeline(file))
