"""The waiting of a deferred FreshnessSensor: one event, whose payload is how the wait ended.

The arguments are the trigger's whole state: the pipeline file and the request, with the pinned target and the deadline
as a moment. So a triggerer that restarts, or another one that takes over, resumes the same wait. Secrets are not among
them: the pipeline file and the source's connection are read where the trigger runs. All waits of a pipeline look
together (`waits`); outages of source, store and Airflow's own connection service are waited out, up to the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from headwater_airflow.sensors.freshness import fresh
from headwater_airflow.triggers import waits
from headwater_airflow.triggers.waits import End, Wait
from headwater_airflow.wait_stats import count_wait

if TYPE_CHECKING:
    from headwater.pipeline_file.pipeline import Pipeline
    from headwater.waiting.lookout import SharedLookout
    from headwater.waiting.request import WaitRequest
    from headwater.waiting.waiter import Waiter

ANSWER_SECONDS = 300.0
"""A triggerer's first question of all makes its supervisor start an API of its own, for 10 CPU-seconds: on a busy
machine the answer has taken 110 s. What takes longer has hung."""


class WaitTrigger(BaseTrigger):
    """Waits for `request` on the pipeline file `pipeline`; `stored`: what `WaitRequest.to_json` gave, if there is one.

    The event's payload is the wait's JSON with `exit_status` beside it; a refusal is `{"error": ..., "exit_status"}`.
    `ends_task`: a wait that is satisfied ends the task here, with the cut as its XCom, and no worker is asked for.
    """

    def __init__(
        self,
        pipeline: str = "",
        stored: Mapping[str, Any] | None = None,
        look_seconds: float = 0.25,
        ends_task: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pipeline = pipeline
        self.look_seconds = look_seconds
        self.ends_task = ends_task
        self._stored = stored
        self._request: WaitRequest | None = None
        self._waiter: Waiter | None = None

    @property
    def request(self) -> WaitRequest:
        """Read when it is asked for first: an exception in a trigger's constructor would end the whole triggerer."""
        from headwater.waiting.request import WaitRequest

        if self._request is None:
            assert self._stored is not None
            self._request = WaitRequest.from_json(self._stored)
        return self._request

    @request.setter
    def request(self, request: WaitRequest) -> None:
        self._request = request

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            remaining = self.request.remaining
        except Exception as error:  # what another version has stored, or a person has written
            yield _unreadable(error)
            return
        wait = Wait(self._begun, remaining, self.look_seconds)
        async for told in waits.told(self.pipeline, wait):
            if isinstance(told, End) and told.exit_status == 0 and await self._has_handed_on(told.result):
                yield TaskSuccessEvent()
            elif isinstance(told, End):
                yield TriggerEvent({**told.result, "exit_status": told.exit_status})  # type: ignore[no-untyped-call]
            elif told.trouble:
                self.log.warning("pipeline %s, waiting on: %s", self.pipeline, told.text)
            else:
                self.log.info("pipeline %s, %s", self.pipeline, told.text)
                if self._waiter is not None:
                    await self._looked(self._waiter)

    async def _looked(self, waiter: Waiter) -> None:
        """The wait goes on after a look."""

    @property
    def _place(self) -> dict[str, Any]:
        """Of the task's XComs."""
        one: Any = self.task_instance
        return {"dag_id": one.dag_id, "task_id": one.task_id, "run_id": one.run_id, "map_index": one.map_index}

    async def _has_handed_on(self, cut: dict[str, Any]) -> bool:
        """Whether the task's XCom is `cut` now, so that it needs no worker any more.

        As a worker would have stored it: an XCom that goes with the event is encoded once more, and comes as text. Not
        where the task has ended: this triggerer hung, another one took over, and its cut has been read by others.
        """
        from airflow.sdk.execution_time.xcom import XCom

        if not self.ends_task or self.task_instance is None:
            return False
        try:
            if not await self._is_waiting():
                self.log.warning("the task no longer waits: the cut is not handed on")
                return False
            await XCom.aset("return_value", cut, **self._place)
        except Exception as error:  # a wait that was satisfied is not to fail by the way it is told
            self.log.warning("the cut is handed on by a worker: %s", error)
            return False
        self.log.info("%s", fresh(cut))
        count_wait(self.pipeline, cut, in_trigger=True)
        return True

    async def _is_waiting(self) -> bool:
        """Whether the task waits for a triggerer, by what Airflow says now."""
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        one: Any = self.task_instance
        ask = partial(RuntimeTaskInstance.get_task_states, one.dag_id, one.map_index, [one.task_id])
        states = await asyncio.wait_for(asyncio.to_thread(ask, run_ids=[one.run_id]), ANSWER_SECONDS)
        return "deferred" in states.get(one.run_id, {}).values()

    def _begun(self, pipeline: Pipeline, lookout: SharedLookout) -> Waiter:
        from headwater.waiting.waiter import Waiter

        self._waiter = Waiter(pipeline, self.request, lookout)
        return self._waiter


class FreshnessTrigger(WaitTrigger):
    """Beside the arguments of a `WaitTrigger`: what `WaitRequest.to_json` gives, also as an older version gave it."""

    def __init__(
        self,
        *,
        pipeline: str,
        look_seconds: float = 0.25,
        ends_task: bool = False,
        **request: Any,
    ) -> None:
        super().__init__(pipeline, request, look_seconds, ends_task)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        own = {
            "pipeline": self.pipeline,
            "look_seconds": self.look_seconds,
            "ends_task": self.ends_task,
        }
        return "headwater_airflow.triggers.freshness.FreshnessTrigger", own | self.request.to_json()


def _unreadable(error: Exception) -> TriggerEvent:
    from headwater.errors import Refused

    found = f"the stored wait cannot be read ({type(error).__name__}: {error})"
    refused = Refused(found, code="bad_argument", where="the sensor", remedy="clear the task: it then waits again")
    return TriggerEvent({**refused.to_json(), "exit_status": refused.exit_status})  # type: ignore[no-untyped-call]
