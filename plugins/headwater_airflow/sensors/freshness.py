"""FreshnessSensor: a task that succeeds once the lake holds what its run needs, and hands on the exact versions.

The first look is taken in the task: when the lake is fresh already, nothing is deferred. Otherwise the target is
pinned and the waiting goes on in the triggerer (`triggers.freshness`), without a worker slot. A retry of the task
takes a new target; a restart of the triggerer does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator, Param
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
)

from headwater.lake_root import is_remote
from headwater_airflow.hooks.source import connection_environment
from headwater_airflow.hooks.store import fetch_in_task
from headwater_airflow.sensors.settings import Settings, duration, for_run, request_of
from headwater_airflow.wait_stats import count_wait

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.triggers.base import StartTriggerArgs

    from headwater.pipeline_file.pipeline import Pipeline
    from headwater.waiting.request import WaitRequest
    from headwater.waiting.result import WaitResult
    from headwater.waiting.waiter import Waiter

# A trigger enforces the deadline itself: Airflow's own, looked at every 15 s, is only for a triggerer that is gone.
_GRACE = timedelta(minutes=2)
_STORE_SECONDS, _LOOK_SECONDS = 60.0, 2.0
_NOT_SET = type(Param().value)
_SHOWN = 3
"""Of a cut's tables so many are named in the log."""
_SKIPPED_ON_TIMEOUT = frozenset({"timed_out", "not_running", "paused", "source_unreachable", "not_validated"})


class FreshnessSensor(BaseSensorOperator):
    """Waits until `tables` of the pipeline (None: all) meet `require`; returns the pinned cut.

    `pipeline`: path of the pipeline file. `require`: "now"; a position (`16/B374D848`, or what
    `headwater.commit_position` gave, also by XCom); a greatest staleness ("30s", a timedelta); a moment with its time
    zone, up to which everything committed is wanted, or "data_interval_end" for that of the DAG run; "default": what
    `freshness` says in the pipeline file, table by table.
    `max_wait`: seconds, "5m" or a timedelta. `on_timeout`, what happens past it: "fail"; "skip"; "continue" with the
    newest cut and how stale it is; "fallback": what reads the result reads the source, and the wait ends as soon as
    it is estimated to be too long. A table that is suspended or loading ends the wait at once, and only "fallback"
    makes something of that; `ignore_suspended` leaves suspended tables out.
    `start_from_trigger`: the first look is taken in the triggerer, too, so that a wait that is satisfied takes no
    worker at all; `pipeline`, `tables` and `require` may be templates then, but no XComArg.
    `keep_cut`: for how long the versions of the cut are kept. `validated`: only a cut will do that has passed
    `headwater validate`, and it is the one returned; with require="default" the pipeline file says so, too.
    `partitions`: of a table only these are wanted, `{"public.orders": ["orders_2026_01"]}`: reloads of them that are
    under way are waited for, and the cut gives only their rows.
    A DAG run's conf goes over these, but for `pipeline`: `{"headwater": {"max_wait": "1h"}}` for every sensor of the
    run, `{"headwater": {"tasks": {"fresh": {"require": "now"}}}}` for one.
    """

    template_fields: Sequence[str] = ("pipeline", "tables", "require", "partitions")
    ui_color = "#d8ecf3"
    _is_dag_result = False

    def __init__(
        self,
        *,
        pipeline: str | os.PathLike[str],
        tables: Sequence[str] | None = None,
        require: Any = "now",
        max_wait: float | str | timedelta = 300,
        on_timeout: str = "fail",
        ignore_suspended: bool = False,
        keep_cut: float | str | timedelta = timedelta(hours=24),
        validated: bool = False,
        partitions: Mapping[str, str | Sequence[str]] | None = None,
        start_from_trigger: bool = False,
        **arguments: Any,
    ) -> None:
        wait = duration(max_wait, "max_wait")
        if (mode := arguments.get("mode", "poke")) != "poke":
            raise ValueError(f"mode={mode!r}: leave it out, the wait goes on in the triggerer and takes no worker slot")
        # Airflow's sensors have a max_wait of another kind, which they would take from default_args.
        super().__init__(timeout=wait, max_wait=None, **arguments)
        self._refuse_unmeant()
        # As it is otherwise: a task's result, say, which a worker resolves.
        self.pipeline: str = os.fspath(pipeline) if isinstance(pipeline, os.PathLike) else pipeline
        if isinstance(tables, str):  # which would be taken for its letters
            raise ValueError(f"tables={tables!r}: expected a list of names, [{tables!r}]")
        self.tables = list(tables) if isinstance(tables, Sequence) else tables
        self.require = require
        self.max_wait = wait
        self.on_timeout = on_timeout
        self.ignore_suspended = ignore_suspended
        self.keep_cut = duration(keep_cut, "keep_cut")
        self.validated = validated
        self.partitions = partitions
        self._own_settings().check()
        self.start_from_trigger = start_from_trigger
        if start_from_trigger:
            self.start_trigger_args = self._trigger_arguments()

    @property
    def returns_dag_result(self) -> bool:
        """Whether its XCom is the result of the DAG run, which only a worker stores as one."""
        return self._is_dag_result

    @returns_dag_result.setter
    def returns_dag_result(self, value: bool) -> None:
        # By `dag.add_result`, when the sensor has been made. Airflow does not store it with the DAG.
        self._is_dag_result = value
        if value and self.start_from_trigger:
            self.start_trigger_args = self._trigger_arguments()

    def _refuse_unmeant(self) -> None:
        """ValueError for what Airflow's sensors take, also from default_args, and this one would not keep to."""
        for name in ("soft_fail", "never_fail"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}: what becomes of a wait that was not satisfied, on_timeout says (of a branch, "
                    f"if_not_fresh); if the DAG's default_args set it, give this task {name}=False"
                )
        self.mode = "poke"  # default_args are for all sensors of a DAG, and mode changes nothing here

    def _trigger_arguments(self) -> StartTriggerArgs:
        """What the scheduler makes the trigger of. Its deadline is the trigger's: the run's conf may move it."""
        from airflow.triggers.base import StartTriggerArgs

        require = self.require.isoformat() if isinstance(self.require, datetime) else self.require
        if isinstance(require, timedelta):
            require = f"{require.total_seconds():f}s"
        before = self._pre_execute_hook or self.on_execute_callback  # a deferred sensor has had its worker by then
        texts = isinstance(self.tables, list | None) and all(isinstance(one, str) for one in self.tables or ())
        for name, value, is_known in (
            ("pipeline", self.pipeline, isinstance(self.pipeline, str)),
            ("tables", self.tables, texts),
            ("require", require, isinstance(require, str)),
            ("partitions", self.partitions, isinstance(self.partitions, Mapping | None)),
        ):
            if not is_known:
                raise ValueError(
                    f"start_from_trigger with {name}={value!r}: no worker is there to resolve it; give a text, or a "
                    "template of one"
                )
        asked = " ".join([self.pipeline, require, *(self.tables or ()), str(self.partitions or "")])
        if "xcom_pull" in asked and "map_indexes" not in asked:
            raise ValueError(
                "start_from_trigger: xcom_pull needs map_indexes=-1, or the index meant; a triggerer gets no answer "
                "to the question for all of them"
            )
        params: Any = self.params
        if unset := [name for name in params if isinstance(params.get_param(name).value, _NOT_SET)]:
            # Airflow builds the context of such a task where an error ends the whole triggerer, whatever the conf says.
            raise ValueError(
                f"start_from_trigger: the param {unset[0]} has no value, and this would end Airflow's triggerer; give "
                "it one (None, for example), or leave start_from_trigger out"
            )
        arguments = {
            # Under other names than the sensor's: Airflow would render them in the triggerer's event loop, and a
            # template that asks for an XCom would hold up every trigger there for ever.
            "templates": {
                "pipeline": self.pipeline,
                "tables": self.tables,
                "require": require,
                "partitions": self.partitions,
            },
            "plain": self._is_plain() and not (before or type(self).execute is not FreshnessSensor.execute),
            **self._own_settings().untemplated(),
        }
        return StartTriggerArgs(
            "headwater_airflow.triggers.first_look.SensorTrigger", "execute_complete", trigger_kwargs=arguments
        )

    def execute(self, context: Context) -> dict[str, Any]:
        from headwater.errors import HeadwaterError, Transient
        from headwater.waiting.waiter import Waiter

        try:
            settings = self._settings(context)
        except AirflowFailException:
            count_wait(self.pipeline, {})
            raise
        request: WaitRequest | None = None
        try:
            request = request_of(settings, context)
            pipeline = self._pipeline()
            waiter = Waiter(pipeline, request)
            result = _first_look(waiter, pipeline.lake_path(), request.remaining)
        except (HeadwaterError, OSError) as error:
            # An outage is for the triggerer to wait out, as a later one would be; a missing right is none.
            is_outage = isinstance(error, Transient | OSError) and not isinstance(error, PermissionError)
            unseen = request.unseen() if request is not None and is_outage and request.remaining() > 0 else None
            if unseen is not None:
                self.log.warning(
                    "Pipeline file %s: no look could be taken, the triggerer waits: %s", self.pipeline, error
                )
                self._defer(unseen, settings.max_wait)
            if isinstance(error, OSError):
                raise
            refused = {**error.to_json(), "exit_status": error.exit_status}
            count_wait(self.pipeline, refused)
            raise _failure(refused) from None
        if result is not None:
            return self.execute_complete(context, {**result.to_json(), "exit_status": result.exit_status})
        assert waiter.target is not None
        self.log.info("Not fresh yet, the triggerer waits. Pipeline %s: %s", self.pipeline, waiter.progress)
        return self._defer(request.pinned(waiter.target, waiter.tables), settings.max_wait)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """A triggerer that was away past the deadline, and so long that Airflow ended the wait itself, leaves a wait
        that has timed out, not a sensor that Airflow would not try again."""
        from headwater.errors import EXIT_NOT_FRESH

        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except AirflowSensorTimeout:
            if next_method == "execute_complete":
                raise
            reason, remedy = "no triggerer has looked at the end of the wait", "see whether Airflow's triggerer runs"
            limit = self.execution_timeout
            # Of a wait that began in the triggerer this is Airflow's only limit.
            if self.start_from_trigger and limit is not None and limit < self._settings(context).max_wait:
                reason = f"the task's execution_timeout of {limit.total_seconds():g} s is shorter than its max_wait"
                remedy = "give a longer execution_timeout, or none"
            event = {
                "outcome": "timed_out",
                "exit_status": EXIT_NOT_FRESH,
                "target": None,
                "waited_seconds": None,
                "reason": reason,
                "remedy": remedy,
                "tables": {},
            }
            return self.execute_complete(context, event)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """In a worker, at the end of the wait: `event` is the trigger's payload, or what the first look has found."""
        count_wait(self.pipeline, event)
        return self._ended(event, context)

    def _own_settings(self) -> Settings:
        return Settings(**{field.name: getattr(self, field.name) for field in fields(Settings)})

    def _settings(self, context: Context) -> Settings:
        try:
            return for_run(self._own_settings(), context, self.task_id)
        except ValueError as error:
            raise AirflowFailException(str(error)) from None

    def _pipeline(self) -> Pipeline:
        """With the source's Airflow connection, if the file names one."""
        from headwater.pipeline_file.pipeline import load_pipeline

        fetch_in_task()
        pipeline = load_pipeline(self.pipeline)
        conn_id = pipeline.source.airflow_connection
        if conn_id is None:
            return pipeline
        return load_pipeline(self.pipeline, {**os.environ, **connection_environment(conn_id)})

    def _defer(self, request: WaitRequest, max_wait: timedelta) -> NoReturn:
        from headwater_airflow.triggers.freshness import FreshnessTrigger

        self.defer(
            trigger=FreshnessTrigger(
                pipeline=os.path.abspath(self.pipeline),
                ends_task=self._ends_without_worker(),
                **request.to_json(),
            ),
            method_name="execute_complete",
            timeout=max_wait + _GRACE,
        )

    def _ends_without_worker(self) -> bool:
        return self._is_plain() and needs_no_worker(self)

    def _is_plain(self) -> bool:
        """Whether nothing runs at its end but what this class says."""
        own, plain = type(self), FreshnessSensor
        same = all(
            getattr(own, name) is getattr(plain, name) for name in ("execute_complete", "_ended", "post_execute")
        )
        return not (self._post_execute_hook or self.returns_dag_result) and same

    def _ended(self, event: dict[str, Any], context: Context) -> dict[str, Any]:
        """The cut, or what `on_timeout` makes of a wait that ended otherwise, or the exception that fits."""
        outcome = event.get("outcome")
        if outcome == "satisfied":
            self.log.info("%s", fresh(event))
            return {name: value for name, value in event.items() if name != "exit_status"}
        settings = self._settings(context)
        if settings.on_timeout == "skip" and outcome in _SKIPPED_ON_TIMEOUT:
            raise AirflowSkipException(sentence(event))
        if settings.on_timeout in ("continue", "fallback"):
            instead = self._instead(event, settings, context)
            if instead is not None:
                return instead
        # A load ends by itself. A driver may be about to follow its source to another timeline; the next try takes a
        # target of its own.
        may_pass = outcome == "loading" or (
            outcome == "timeline_changed" and not request_of(settings, context).is_at_position
        )
        raise _failure(event, may_pass=may_pass)

    def _instead(self, event: dict[str, Any], settings: Settings, context: Context) -> dict[str, Any] | None:
        """What is handed on although the wait was not satisfied; None where nothing can be."""
        from headwater.errors import HeadwaterError
        from headwater.waiting.on_timeout import instead_of_cut

        try:
            request = request_of(settings, context)
            found = instead_of_cut(self._pipeline(), event, settings.on_timeout, request)
        except HeadwaterError as error:
            self.log.error("%s", sentence(event))
            raise _failure({**error.to_json(), "exit_status": error.exit_status}) from None
        if found is not None:
            self.log.warning("%s; going on %s", sentence(event), found["instead"])
        return found


def needs_no_worker(task: Any) -> bool:
    """Whether a satisfied wait of `task`, a sensor or its serialized form, leaves nothing to do that only a worker
    does: callbacks and listeners, events of assets, the lengths that mapped tasks are made by, a deployment's own
    XCom backend, and more XComs than one."""
    from airflow.sdk.bases.xcom import BaseXCom
    from airflow.sdk.execution_time.xcom import XCom
    from airflow.sdk.listener import get_listener_manager

    mapped = task.has_dag() and next(task.iter_mapped_dependants(), None) is not None
    told = task.has_on_success_callback or get_listener_manager().has_listeners
    plain = XCom is BaseXCom and task.do_xcom_push and not task.multiple_outputs
    return bool(plain) and not (told or task.outlets or mapped)


def _first_look(waiter: Waiter, root: str, remaining: Callable[[], float]) -> WaitResult | None:
    """A store that is away may be back in a moment, though not to who is not let in; from then on the triggerer waits.
    `remaining`: seconds to the deadline."""
    until = time.monotonic() + min(_STORE_SECONDS, remaining())
    while True:
        try:
            return waiter.look()
        except OSError as error:
            if not is_remote(root) or isinstance(error, PermissionError) or time.monotonic() > until:
                raise
            time.sleep(_LOOK_SECONDS)


def _failure(event: dict[str, Any], *, may_pass: bool = False) -> AirflowException:
    """Refusals and suspended tables need a person, unless it `may_pass` by itself; anything else, a retry may cure with
    a new target."""
    from headwater.errors import EXIT_REFUSED, EXIT_SUSPENDED

    final = event["exit_status"] in (EXIT_REFUSED, EXIT_SUSPENDED) and not may_pass
    return (AirflowFailException if final else AirflowException)(sentence(event))


def fresh(event: dict[str, Any]) -> str:
    """What a wait was satisfied by, for the log."""
    names = list(event["tables"])
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    details = f"epoch {event['epoch']}, position {event['position']['lsn']}"
    return f"Fresh after {event['waited_seconds']} s: {shown} ({details})"


def sentence(event: dict[str, Any]) -> str:
    """How a wait ended, for the log."""
    error = event.get("error", {})
    reason, remedy = event.get("reason") or error.get("message", ""), event.get("remedy") or error.get("remedy", "")
    text = f"{event.get('outcome') or error.get('code', 'failed')}: {reason}"
    return f"{text}. What to do: {remedy}" if remedy else text
