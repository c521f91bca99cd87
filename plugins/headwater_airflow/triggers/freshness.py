"""The waiting of a deferred FreshnessSensor: one event, whose payload is how the wait ended.

The arguments are the trigger's whole state: the pipeline file, the pinned target, the deadline as a moment. So a
triggerer that restarts, or another one that takes over, resumes the same wait. Secrets are not among them: the
pipeline file and the source's connection are read where the trigger runs. All waits of a pipeline look together
(`waits`); outages of source, store and Airflow's own connection service are waited out, up to the deadline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from headwater_airflow.sensors.freshness import fresh
from headwater_airflow.triggers import waits
from headwater_airflow.triggers.waits import End, Wait
from headwater_airflow.wait_stats import count_wait

if TYPE_CHECKING:
    from headwater.lake.freshness import Requirement
    from headwater.pipeline_file.pipeline import Pipeline
    from headwater.waiting.lookout import SharedLookout
    from headwater.waiting.waiter import Waiter


class FreshnessTrigger(BaseTrigger):
    """Waits for `target` (`Target.to_json()`) on `tables`, until `deadline` (ISO 8601).

    The event's payload is the wait's JSON with `exit_status` beside it; a refusal is `{"error": ..., "exit_status"}`.
    `ends_task`: a wait that is satisfied ends the task here, with the cut as its XCom, and no worker is asked for.
    `who`, `requirement`, `began`: for the log of waits, the last one by the worker's clock. `partitions`: as long as
    the target does not say which these are.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        tables: list[str],
        target: dict[str, Any] | None,
        deadline: str,
        keep_seconds: float,
        owner: str,
        conn_id: str | None = None,
        ignore_suspended: bool = False,
        give_up_early: bool = False,
        look_seconds: float = 0.25,
        ends_task: bool = False,
        who: str = "",
        requirement: str = "",
        began: str | None = None,
        partitions: Mapping[str, str | Sequence[str]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pipeline = pipeline
        self.tables = tables
        self.target = target
        self.deadline = deadline
        self.keep_seconds = keep_seconds
        self.owner = owner
        self.conn_id = conn_id
        self.ignore_suspended = ignore_suspended
        self.give_up_early = give_up_early
        self.look_seconds = look_seconds
        self.ends_task = ends_task
        self.who = who
        self.requirement = requirement
        self.began = began
        # Where no target is known yet: what it is to be taken from.
        self.wanted: Requirement | None = None
        self.validated = False
        self.partitions = partitions
        self._current: Waiter | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "headwater_airflow.triggers.freshness.FreshnessTrigger",
            {
                "pipeline": self.pipeline,
                "tables": self.tables,
                "target": self.target,
                "deadline": self.deadline,
                "keep_seconds": self.keep_seconds,
                "owner": self.owner,
                "conn_id": self.conn_id,
                "ignore_suspended": self.ignore_suspended,
                "give_up_early": self.give_up_early,
                "look_seconds": self.look_seconds,
                "ends_task": self.ends_task,
                "who": self.who,
                "requirement": self.requirement,
                "began": self.began,
                "partitions": self.partitions,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        wait = Wait(self._waiter, self._remaining, self.look_seconds)
        async for told in waits.told(self.pipeline, self.conn_id, wait):
            if isinstance(told, End) and told.exit_status == 0 and await self._has_handed_on(told.result):
                yield TaskSuccessEvent()
            elif isinstance(told, End):
                yield TriggerEvent({**told.result, "exit_status": told.exit_status})  # type: ignore[no-untyped-call]
            elif told.trouble:
                self.log.warning("pipeline %s, waiting on: %s", self.pipeline, told.text)
            else:
                self.log.info("pipeline %s, %s", self.pipeline, told.text)
                await self._looked()

    async def _looked(self) -> None:
        """The wait goes on after a look."""

    @property
    def pinned(self) -> dict[str, Any] | None:
        """The target as of the last look; None before it was taken."""
        known = self._current.target if self._current is not None else None
        return known.to_json() if known is not None else None

    @property
    def waited_for(self) -> tuple[str, ...]:
        """The tables as of the last look; none before it was taken."""
        return (self._current.tables if self._current is not None else None) or ()

    @property
    def _place(self) -> dict[str, Any]:
        """Of the task's XComs."""
        one: Any = self.task_instance
        return {"dag_id": one.dag_id, "task_id": one.task_id, "run_id": one.run_id, "map_index": one.map_index}

    async def _has_handed_on(self, cut: dict[str, Any]) -> bool:
        """Whether the task's XCom is `cut` now, so that it needs no worker any more.

        As a worker would have stored it: an XCom that goes with the event is encoded once more, and comes as text.
        """
        from airflow.sdk.execution_time.xcom import XCom

        if not self.ends_task or self.task_instance is None:
            return False
        try:
            await XCom.aset("return_value", cut, **self._place)
        except Exception as error:  # a wait that was satisfied is not to fail by the way it is told
            self.log.warning("the cut is handed on by a worker: %s", error)
            return False
        self.log.info("%s", fresh(cut))
        count_wait(self.pipeline, cut, in_trigger=True)
        return True

    def _remaining(self) -> float:
        return (datetime.fromisoformat(self.deadline) - datetime.now(UTC)).total_seconds()

    def _waiter(self, pipeline: Pipeline, lookout: SharedLookout) -> Waiter:
        from headwater.lake.freshness import Target
        from headwater.names import TableName
        from headwater.waiting.partitions import parse_partitions
        from headwater.waiting.waiter import Asker, Waiter

        began = datetime.fromisoformat(self.began) if self.began is not None else None
        wanted = Target.from_json(self.target) if self.target is not None else self.wanted
        assert wanted is not None
        self._current = Waiter(
            pipeline,
            wanted,
            timeout=max(0.0, self._remaining()),
            keep=self.keep_seconds,
            owner=self.owner,
            tables=[TableName.parse(name) for name in self.tables],
            ignore_suspended=self.ignore_suspended,
            give_up_early=self.give_up_early,
            validated=self.validated and self.target is None,  # a target says by itself of which
            partitions=parse_partitions(self.partitions, None),
            lookout=lookout,
            # A trigger that was stored by an older version does not know who asks.
            asker=Asker(self.who, self.requirement, began) if self.who else None,
        )
        return self._current
