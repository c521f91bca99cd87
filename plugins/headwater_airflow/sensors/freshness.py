"""FreshnessSensor: a task that succeeds once the lake holds what its run needs, and hands on the exact versions.

The first look is taken in the task: when the lake is fresh already, nothing is deferred. Otherwise the target is
pinned and the waiting goes on in the triggerer (`triggers.freshness`), without a worker slot. A retry of the task
takes a new target; a restart of the triggerer does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from headwater_airflow.hooks.source import connection_environment

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headwater.config import Pipeline
    from headwater.jobs.wait import Waiter

# A trigger enforces the deadline itself: Airflow's own, looked at every 15 s, is only for a triggerer that is gone.
_GRACE = timedelta(minutes=2)
_SKIPPED_ON_TIMEOUT = frozenset({"timed_out", "not_running"})


class FreshnessSensor(BaseSensorOperator):
    """Waits until `tables` of the pipeline (None: all) meet `require`; returns the pinned cut.

    `pipeline`: path of the pipeline file. `require`: "now", a position (`16/B374D848`, or what
    `headwater.commit_position` gave, also by XCom), or a greatest staleness ("30s", a timedelta).
    `max_wait`: seconds, "5m" or a timedelta; past it the task fails, or is skipped with `on_timeout="skip"`.
    A table that is suspended or loading ends the wait at once; `ignore_suspended` leaves suspended ones out.
    `keep_cut`: for how long the versions of the cut are kept.
    """

    template_fields: Sequence[str] = ("pipeline", "tables", "require")
    ui_color = "#d8ecf3"

    def __init__(
        self,
        *,
        pipeline: str,
        tables: Sequence[str] | None = None,
        require: Any = "now",
        max_wait: float | str | timedelta = 300,
        on_timeout: Literal["fail", "skip"] = "fail",
        ignore_suspended: bool = False,
        keep_cut: float | str | timedelta = timedelta(hours=24),
        **arguments: Any,
    ) -> None:
        if on_timeout not in ("fail", "skip"):
            raise ValueError(f"on_timeout={on_timeout!r}: expected fail or skip")
        wait = _duration(max_wait, "max_wait")
        super().__init__(timeout=wait, **arguments)
        self.pipeline = pipeline
        self.tables = list(tables) if tables is not None else None
        self.require = require
        self.max_wait = wait
        self.on_timeout = on_timeout
        self.ignore_suspended = ignore_suspended
        self.keep_cut = _duration(keep_cut, "keep_cut")

    def execute(self, context: Context) -> dict[str, Any]:
        from headwater.errors import HeadwaterError

        deadline = datetime.now(UTC) + self.max_wait_duration
        try:
            conn_id, pipeline = self._pipeline()
            waiter = self._waiter(pipeline, self._owner(context))
            result = waiter.look()
        except HeadwaterError as error:
            raise _failure({**error.to_json(), "exit_status": error.exit_status}) from None
        if result is not None:
            return self._ended({**result.to_json(), "exit_status": result.exit_status})
        return self._defer(waiter, conn_id, deadline, self._owner(context))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Back in a worker: `event` is the trigger's payload."""
        return self._ended(event)

    @property
    def max_wait_duration(self) -> timedelta:
        assert self.max_wait is not None
        return self.max_wait

    def _pipeline(self) -> tuple[str | None, Pipeline]:
        """The id of the source's Airflow connection, if the pipeline file names one, and the pipeline."""
        from headwater.config import load_pipeline

        pipeline = load_pipeline(self.pipeline)
        conn_id = pipeline.source.airflow_connection
        if conn_id is None:
            return None, pipeline
        return conn_id, load_pipeline(self.pipeline, {**os.environ, **connection_environment(conn_id)})

    def _waiter(self, pipeline: Pipeline, owner: str) -> Waiter:
        from headwater.jobs.wait import Waiter, parse_table
        from headwater.lake.freshness import parse_requirement

        return Waiter(
            pipeline,
            parse_requirement(self.require),
            timeout=self.max_wait_duration.total_seconds(),
            keep=self.keep_cut.total_seconds(),
            owner=owner,
            tables=[parse_table(name) for name in self.tables] if self.tables is not None else None,
            ignore_suspended=self.ignore_suspended,
        )

    def _defer(self, waiter: Waiter, conn_id: str | None, deadline: datetime, owner: str) -> NoReturn:
        from headwater_airflow.triggers.freshness import FreshnessTrigger

        assert waiter.target is not None
        self.log.info("not fresh yet, waiting for %s: %s", waiter.target, waiter.waiting.reason)
        self.defer(
            trigger=FreshnessTrigger(
                pipeline=os.path.abspath(self.pipeline),
                tables=list(waiter.tables or ()),
                target=waiter.target.to_json(),
                deadline=deadline.isoformat(),
                keep_seconds=self.keep_cut.total_seconds(),
                owner=owner,
                conn_id=conn_id,
                ignore_suspended=self.ignore_suspended,
            ),
            method_name="execute_complete",
            timeout=self.max_wait_duration + _GRACE,
        )

    def _owner(self, context: Context) -> str:
        instance = context["ti"]
        return f"{instance.dag_id} {instance.run_id} {instance.task_id} {instance.map_index}"

    def _ended(self, event: dict[str, Any]) -> dict[str, Any]:
        """The cut, or the exception that fits how the wait ended."""
        outcome = event.get("outcome")
        if outcome == "satisfied":
            self.log.info(
                "fresh: epoch %s at %s, waited %s s", event["epoch"], event["position"]["lsn"], event["waited_seconds"]
            )
            return {name: value for name, value in event.items() if name != "exit_status"}
        if self.on_timeout == "skip" and outcome in _SKIPPED_ON_TIMEOUT:
            raise AirflowSkipException(_sentence(event))
        raise _failure(event)


def _failure(event: dict[str, Any]) -> AirflowException:
    """Refusals and suspended tables need a person; anything else, a retry may cure with a new target."""
    from headwater.errors import EXIT_REFUSED, EXIT_SUSPENDED

    final = event["exit_status"] in (EXIT_REFUSED, EXIT_SUSPENDED)
    return (AirflowFailException if final else AirflowException)(_sentence(event))


def _sentence(event: dict[str, Any]) -> str:
    error = event.get("error", {})
    reason, remedy = event.get("reason") or error.get("message", ""), event.get("remedy") or error.get("remedy", "")
    text = f"{event.get('outcome') or error.get('code', 'failed')}: {reason}"
    return f"{text}. What to do: {remedy}" if remedy else text


def _duration(value: float | str | timedelta, name: str) -> timedelta:
    from headwater.quantities import parse_duration

    if isinstance(value, timedelta):
        return value
    try:
        return timedelta(seconds=parse_duration(value))
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None
