"""The watcher behind `headwater_airflow.assets.late`: an event when a table has become later than its pipeline allows.

One look every few seconds serves every watcher of a pipeline in a triggerer. Which tables were surely told of is kept
in the asset's store, for a triggerer that restarts; a table that is in time again may be late anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Hashable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from headwater_airflow.hooks.source import async_connection_environment
from headwater_airflow.hooks.store import fetch_in_triggerer
from headwater_airflow.triggers import movement
from headwater_airflow.triggers.threads import in_thread

if TYPE_CHECKING:
    from headwater.monitor.lateness import Late, Lateness

log = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
_TOLD = "headwater_late"


class LatenessTrigger(BaseEventTrigger):
    """An event when one of `tables` (none: all) of the pipeline file `pipeline` has become late, and again every
    `remind_every` seconds (0: never) as long as one is: `{"pipeline", "late", "new"}`. `asset`: as of
    a `MovementTrigger`."""

    def __init__(self, *, pipeline: str, tables: Sequence[str], remind_every: float, asset: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pipeline = pipeline
        self.tables = list(tables)
        self.remind_every = remind_every
        self.asset = asset

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "headwater_airflow.triggers.lateness.LatenessTrigger",
            {
                "pipeline": self.pipeline,
                "tables": self.tables,
                "remind_every": self.remind_every,
                "asset": self.asset,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in self.filter_shared_stream(self.open_shared_stream(self.serialize()[1])):
            yield event

    def shared_stream_key(self) -> Hashable:
        return ("headwater late", self.pipeline)

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Late]:
        """The late tables, again and again; what stands in the way of knowing is said once."""
        from headwater.monitor.lateness import Lateness

        lateness, said = Lateness(), ""
        while True:
            try:
                found = await _look(kwargs["pipeline"], lateness)
            except Exception as error:  # an outage of source, lake or Airflow's own API: nothing is known
                if str(error) != said:
                    said = str(error)
                    log.warning("pipeline file %s: whether tables are late is not known: %s", kwargs["pipeline"], said)
            else:
                said = ""
                yield found
            await asyncio.sleep(_LOOK_SECONDS)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Late]) -> AsyncIterator[TriggerEvent]:
        kept = told = await self._told()
        async for every in shared_stream:
            late = {name: every[name] for name in every if not self.tables or name in self.tables}
            now = datetime.now(UTC).timestamp()
            new = sorted(set(late) - set(told))
            due = bool(self.remind_every and late) and now - max(told.values(), default=now) >= self.remind_every
            if new or due:
                payload = {"pipeline": os.path.basename(self.pipeline), "late": late, "new": new}
                yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
            told = {name: now if new or due else told[name] for name in late}
            sure = {name: at for name, at in told.items() if now - at >= movement.SURE_SECONDS}
            # Until then the event before counts; a table that is in time again goes at once.
            sure |= {name: at for name, at in kept.items() if name in told and name not in sure}
            if sure != kept:
                kept = sure
                if self.asset_state_store is not None:
                    await self.asset_state_store.aset(_TOLD, dict(kept))

    async def _told(self) -> dict[str, float]:
        """The late tables that were told of, and when last."""
        found = await self.asset_state_store.aget(_TOLD) if self.asset_state_store is not None else None
        return {name: at for name, at in found.items() if isinstance(at, float)} if isinstance(found, dict) else {}


async def _look(path: str, lateness: Lateness) -> Late:
    """With the credentials of this moment."""
    from headwater.pipeline_file.pipeline import load_pipeline

    fetch_in_triggerer()
    pipeline = await in_thread(path, load_pipeline, path)
    conn_id = pipeline.source.airflow_connection
    if conn_id is not None:
        environ = {**os.environ, **await async_connection_environment(conn_id)}
        pipeline = await in_thread(path, load_pipeline, path, environ)
    return await in_thread(path, lateness.look, pipeline)
