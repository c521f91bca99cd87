"""The wait of a sensor that no worker has begun (`start_from_trigger`): requirement and settings instead of a target.

The first look is taken here, and pins the target. It is kept as an XCom of the try, with the deadline: a triggerer that
restarts, or another one that takes over, resumes the same wait.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.triggers.base import TriggerEvent

from headwater_airflow.sensors.freshness import needs_no_worker, owner_of, who_of
from headwater_airflow.sensors.settings import INTERVAL_END, Settings, for_run
from headwater_airflow.triggers.freshness import FreshnessTrigger

_KEPT = "headwater_wait"
_ANSWER_SECONDS = 60.0


class SensorTrigger(FreshnessTrigger):
    """A FreshnessSensor's arguments, durations in seconds. `templates`: those named `pipeline`, `tables`, `require` and
    `partitions`, rendered when the wait begins. `plain`: nothing of the sensor's own class has to run in a worker."""

    def __init__(
        self,
        *,
        templates: dict[str, Any],
        max_wait: float,
        on_timeout: str,
        ignore_suspended: bool,
        keep_cut: float,
        validated: bool,
        plain: bool,
    ) -> None:
        super().__init__(
            pipeline="",
            tables=[],
            target=None,
            deadline="",
            keep_seconds=keep_cut,
            owner="",
            ignore_suspended=ignore_suspended,
        )
        self.templates = templates
        self.max_wait = max_wait
        self.on_timeout = on_timeout
        self.plain = plain
        self.validated = validated

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "headwater_airflow.triggers.first_look.SensorTrigger",
            {
                "templates": self.templates,
                "max_wait": self.max_wait,
                "on_timeout": self.on_timeout,
                "ignore_suspended": self.ignore_suspended,
                "keep_cut": self.keep_seconds,
                "validated": self.validated,
                "plain": self.plain,
            },
        )

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
        from airflow.sdk.execution_time.xcom import XCom

        from headwater.errors import Transient
        from headwater.lake.freshness import parse_requirement
        from headwater.names import TableName
        from headwater.pipeline_file.pipeline import load_pipeline
        from headwater.waiting.partitions import parse_partitions
        from headwater.waiting.wait import parse_table

        one: Any = self.task_instance
        context = one.get_template_context()
        # In a thread: templates may ask the API server, by way of this thread's event loop.
        rendering = asyncio.to_thread(self.render_template, self.templates, context, self.get_template_env())
        try:
            asked = await asyncio.wait_for(rendering, _ANSWER_SECONDS)
        except TimeoutError:
            raise Transient(f"its templates were not rendered within {_ANSWER_SECONDS:g} s: {self.templates}") from None
        settings = for_run(self._settings(asked), context, one.task_id)
        self.tables = self._asked = [str(parse_table(name)) for name in settings.tables or ()]
        self.partitions = settings.partitions
        parse_partitions(self.partitions, [TableName.parse(name) for name in self.tables])  # a mistake is told at once
        self.ignore_suspended, self.validated = settings.ignore_suspended, settings.validated
        self.keep_seconds = settings.keep_cut.total_seconds()
        self.give_up_early = settings.on_timeout == "fallback"
        self.owner, self.who = owner_of(context), who_of(context)
        self.ends_task = self.plain and needs_no_worker(one.task)
        self.pipeline = os.path.abspath(asked["pipeline"])
        kept: Any = None
        try:
            kept = await XCom.aget_one(key=_KEPT, **self._place)
        except Exception as error:  # then the wait begins anew, which is late and not wrong
            self.log.warning("whether another triggerer has begun the wait is not known: %s", error)
        if not (isinstance(kept, dict) and kept.get("try_number") == one.try_number):
            now = datetime.now(UTC)
            kept = {"began": now.isoformat(), "deadline": (now + settings.max_wait).isoformat()}
            await self._forget_earlier()
        self.began, self.deadline, self.target = kept["began"], kept["deadline"], kept.get("target")
        # A target says nothing of tables that a pattern has brought in since.
        self.tables = kept.get("waited_for") or self.tables
        self.wanted = parse_requirement(settings.require)
        self.requirement = INTERVAL_END if asked["require"] == INTERVAL_END else str(self.wanted)
        pipeline = await asyncio.to_thread(load_pipeline, self.pipeline)
        self.conn_id = pipeline.source.airflow_connection

    async def _forget_earlier(self) -> None:
        """The cut of an earlier run of the task that was cleared: a worker's start would have removed it."""
        from airflow.sdk.execution_time.xcom import XCom

        try:
            await asyncio.wait_for(asyncio.to_thread(XCom.delete, key="return_value", **self._place), _ANSWER_SECONDS)
        except Exception as error:
            self.log.warning("the XCom of an earlier run could not be removed: %s", error)

    def _settings(self, asked: dict[str, Any]) -> Settings:
        return Settings(
            asked["tables"],
            asked["require"],
            timedelta(seconds=self.max_wait),
            self.on_timeout,
            self.ignore_suspended,
            timedelta(seconds=self.keep_seconds),
            self.validated,
            asked.get("partitions"),  # a wait that an older version began has none
        )

    async def _looked(self) -> None:
        """The first look has pinned the target, or there was another one: it is kept as it is from now on."""
        from airflow.sdk.execution_time.xcom import XCom

        one: Any = self.task_instance
        pinned = self.pinned
        if pinned is None or pinned == self.target:
            return
        self.target = pinned
        kept = {
            "try_number": one.try_number,
            "began": self.began,
            "deadline": self.deadline,
            "target": pinned,
            "waited_for": list(self.waited_for or self.tables),
            # For the pipeline's page: nothing is rendered where no worker has begun.
            "pipeline": self.pipeline,
            "tables": self._asked,
            "require": self.requirement,
        }
        try:
            await XCom.aset(_KEPT, kept, **self._place)
        except Exception as error:  # a restart would begin the wait anew, which is late and not wrong
            self.log.warning("the target of the wait could not be kept: %s", error)
