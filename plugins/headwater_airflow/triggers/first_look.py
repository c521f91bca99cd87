"""The wait of a sensor that no worker has begun (`start_from_trigger`): requirement and settings instead of a target.

The first look is taken here, and pins the target. It is kept as an XCom of the try, with the deadline: a triggerer that
restarts, or another one that takes over, resumes the same wait.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import TriggerEvent

from headwater_airflow.sensors.freshness import needs_no_worker
from headwater_airflow.sensors.settings import Settings, for_run, request_of
from headwater_airflow.triggers.freshness import ANSWER_SECONDS, WaitTrigger

if TYPE_CHECKING:
    from headwater.waiting.waiter import Waiter

_KEPT = "headwater_wait"


class SensorTrigger(WaitTrigger):
    """`templates`: those of a FreshnessSensor's arguments that are named `pipeline`, `tables`, `require` and
    `partitions`, rendered when the wait begins. `plain`: nothing of the sensor's own class has to run in a worker.
    `settings`: its other arguments (`Settings.untemplated`), also as an older version gave them."""

    def __init__(self, *, templates: dict[str, Any], plain: bool, **settings: Any) -> None:
        super().__init__()
        self.templates = templates
        self.plain = plain
        self.settings = settings
        self._asked_for: list[str] = []

    def serialize(self) -> tuple[str, dict[str, Any]]:
        arguments = {"templates": self.templates, "plain": self.plain, **self.settings}
        return "headwater_airflow.triggers.first_look.SensorTrigger", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from headwater.errors import HeadwaterError, Refused

        try:
            await self._begin()
        except (HeadwaterError, ValueError) as found:
            mistaken = isinstance(found, ValueError)
            error = Refused(str(found), code="bad_argument", where="the sensor") if mistaken else found
            assert isinstance(error, HeadwaterError)
            yield TriggerEvent({**error.to_json(), "exit_status": error.exit_status})  # type: ignore[no-untyped-call]
            return
        async for event in super().run():
            yield event

    async def _begin(self) -> None:
        """What the run says of the wait, and how far it had got in another triggerer. ValueError for a conf that cannot
        work."""
        one: Any = self.task_instance
        context = one.get_template_context()
        asked = await self._rendered(context)
        settings = for_run(Settings.rendered(self.settings, asked), context, one.task_id)
        request = request_of(settings, context)
        self._asked_for = list(map(str, request.tables))
        self.ends_task = self.plain and needs_no_worker(one.task)
        self.pipeline = os.path.abspath(asked["pipeline"])
        kept = await self._kept()
        if kept is not None:
            # Its target says nothing of tables that a pattern has brought in since.
            self.request = request.resumed({**kept, "tables": kept.get("waited_for") or self._asked_for})
        else:
            self.request = request
            await self._forget_earlier()

    async def _rendered(self, context: Any) -> dict[str, Any]:
        from headwater.errors import Transient

        # In a thread: templates may ask the API server, by way of this thread's event loop.
        rendering = asyncio.to_thread(self.render_template, self.templates, context, self.get_template_env())
        try:
            asked: dict[str, Any] = await asyncio.wait_for(rendering, ANSWER_SECONDS)
        except TimeoutError:
            raise Transient(f"its templates were not rendered within {ANSWER_SECONDS:g} s: {self.templates}") from None
        return asked

    async def _kept(self) -> Mapping[str, Any] | None:
        """What another triggerer has kept of this try's wait."""
        from airflow.sdk.execution_time.xcom import XCom

        one: Any = self.task_instance
        kept: Any = None
        try:
            kept = await XCom.aget_one(key=_KEPT, **self._place)
        except Exception as error:  # then the wait begins anew, which is late and not wrong
            self.log.warning("whether another triggerer has begun the wait is not known: %s", error)
        return kept if isinstance(kept, dict) and kept.get("try_number") == one.try_number else None

    async def _forget_earlier(self) -> None:
        """The cut of an earlier run of the task that was cleared: a worker's start would have removed it."""
        from airflow.sdk.execution_time.xcom import XCom

        try:
            if await self._is_waiting():
                deleting = asyncio.to_thread(XCom.delete, key="return_value", **self._place)
                await asyncio.wait_for(deleting, ANSWER_SECONDS)
        except Exception as error:
            self.log.warning("the XCom of an earlier run could not be removed: %s", error)

    async def _looked(self, waiter: Waiter) -> None:
        """The first look has pinned the target, or there was another one: it is kept as it is from now on."""
        from airflow.sdk.execution_time.xcom import XCom

        if waiter.target is None or waiter.target == self.request.wanted:
            return
        one: Any = self.task_instance
        self.request = self.request.pinned(waiter.target, waiter.tables)
        pinned = self.request.to_json()
        kept = {
            "try_number": one.try_number,
            "began": pinned["began"],
            "deadline": pinned["deadline"],
            "target": pinned["target"],
            "waited_for": pinned["tables"],
            # For the pipeline's page: nothing is rendered where no worker has begun.
            "pipeline": self.pipeline,
            "tables": self._asked_for,
            "require": self.request.called,
        }
        try:
            await XCom.aset(_KEPT, kept, **self._place)
        except Exception as error:  # a restart would begin the wait anew, which is late and not wrong
            self.log.warning("the target of the wait could not be kept: %s", error)
