"""The waiting of a deferred FreshnessSensor: one event, whose payload is how the wait ended.

The arguments are the trigger's whole state: the pipeline file, the pinned target, the deadline as a moment. So a
triggerer that restarts, or another one that takes over, resumes the same wait. Secrets are not among them: the
pipeline file and the source's connection are read where the trigger runs. Every look happens in a thread; outages
of source, store and Airflow's own connection service are waited out, up to the deadline, which is enforced here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError
from airflow.triggers.base import BaseTrigger, TriggerEvent

from headwater_airflow.hooks.source import async_connection_environment

if TYPE_CHECKING:
    from headwater.jobs.wait import Waiter

_OUTAGE_SECONDS = 2.0
_QUESTION_SECONDS, _WORD_SECONDS = 1.0, 30.0


class FreshnessTrigger(BaseTrigger):
    """Waits for `target` (`Target.to_json()`) on `tables`, until `deadline` (ISO 8601).

    The event's payload is the wait's JSON with `exit_status` beside it; a refusal is `{"error": ..., "exit_status"}`.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        tables: list[str],
        target: dict[str, Any],
        deadline: str,
        keep_seconds: float,
        owner: str,
        conn_id: str | None = None,
        ignore_suspended: bool = False,
        give_up_early: bool = False,
        look_seconds: float = 0.25,
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
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from headwater.errors import HeadwaterError, Refused, Transient

        waiter: Waiter | None = None
        said, blocker = "", ""
        next_question = next_word = 0.0
        while True:
            try:
                if waiter is None:
                    environ = await async_connection_environment(self.conn_id) if self.conn_id else {}
                    waiter = await asyncio.to_thread(self._waiter, environ)
                result = await asyncio.to_thread(waiter.look)
            except Transient as error:
                outage: HeadwaterError = error
            except HeadwaterError as error:
                yield _event(error.to_json(), error.exit_status)
                return
            except AirflowNotFoundException as error:
                gone = Refused(
                    str(error), code="no_connection", where="source.connection", remedy="create the connection"
                )
                yield _event(gone.to_json(), gone.exit_status)
                return
            except AirflowRuntimeError as error:  # the API server, which is asked for the connection
                outage = Transient(str(error))
            except OSError as error:  # the lake's store, or the pipeline file on it
                outage = Transient(f"{type(error).__name__}: {error.strerror or error}")
            else:
                if result is not None:
                    yield _event(result.to_json(), result.exit_status)
                    return
                said = ""
                if (now := time.monotonic()) >= next_question:
                    next_question = now + _QUESTION_SECONDS
                    progress = waiter.progress
                    # Positions move with every look; what holds the wait up seldom changes.
                    held = progress.blocker.partition(";")[0] if progress is not None else ""
                    if progress is not None and (now >= next_word or held != blocker):
                        blocker, next_word = held, now + _WORD_SECONDS
                        self.log.info("pipeline %s, %s", self.pipeline, progress)
                await asyncio.sleep(min(self.look_seconds, max(self._remaining(), 0.01)))
                continue
            if self._remaining() <= 0:
                yield _event(outage.to_json(), outage.exit_status)
                return
            if str(outage) != said:
                said = str(outage)
                self.log.warning("pipeline %s, looking again in %s s: %s", self.pipeline, _OUTAGE_SECONDS, said)
            await asyncio.sleep(min(_OUTAGE_SECONDS, max(self._remaining(), 0.01)))

    def _remaining(self) -> float:
        return (datetime.fromisoformat(self.deadline) - datetime.now(UTC)).total_seconds()

    def _waiter(self, environ: dict[str, str]) -> Waiter:
        from headwater.config import load_pipeline
        from headwater.jobs.wait import Waiter
        from headwater.lake.freshness import Target
        from headwater.names import TableName

        return Waiter(
            load_pipeline(self.pipeline, {**os.environ, **environ}),
            Target.from_json(self.target),
            timeout=max(0.0, self._remaining()),
            keep=self.keep_seconds,
            owner=self.owner,
            tables=[TableName.parse(name) for name in self.tables],
            ignore_suspended=self.ignore_suspended,
            give_up_early=self.give_up_early,
        )


def _event(result: dict[str, Any], exit_status: int) -> TriggerEvent:
    return TriggerEvent({**result, "exit_status": exit_status})  # type: ignore[no-untyped-call]
