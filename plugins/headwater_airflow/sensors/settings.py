"""What a freshness sensor may be told: by its arguments, and over them by the conf of the DAG run; and the wait that a
task asks for by it.

In the conf, under `headwater`: for every sensor of the run, and under `tasks` by task id for a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headwater.waiting.request import WaitRequest

INTERVAL_END = "data_interval_end"
ON_TIMEOUT = ("fail", "skip", "continue", "fallback")
_TASKS = "tasks"
_DURATIONS = ("max_wait", "keep_cut")
_TEMPLATED = ("tables", "require", "partitions")


@dataclass(frozen=True)
class Settings:
    """See FreshnessSensor."""

    tables: Sequence[str] | None
    require: Any
    max_wait: timedelta
    on_timeout: str
    ignore_suspended: bool
    keep_cut: timedelta
    validated: bool = False
    partitions: Mapping[str, str | Sequence[str]] | None = None

    def check(self) -> None:
        """ValueError for what cannot work, as far as that can be said before templates are rendered."""
        if self.on_timeout not in ON_TIMEOUT:
            raise ValueError(f"on_timeout={self.on_timeout!r}: expected one of {', '.join(ON_TIMEOUT)}")
        if not isinstance(self.ignore_suspended, bool):
            raise ValueError(f"ignore_suspended={self.ignore_suspended!r}: expected true or false")
        if not isinstance(self.validated, bool):
            raise ValueError(f"validated={self.validated!r}: expected true or false")
        if self.validated and self.on_timeout == "fallback":
            raise ValueError("validated and on_timeout='fallback' exclude each other: nobody has validated the source")
        partitions = self.partitions
        if isinstance(partitions, Mapping):
            named = [[names] if isinstance(names, str) else names for names in partitions.values()]
            if not all(isinstance(names, Sequence) and all(isinstance(name, str) for name in names) for names in named):
                raise ValueError(f"partitions={partitions!r}: expected the names of each table's partitions")

    def untemplated(self) -> dict[str, Any]:
        """As plain values what no template gives, durations in seconds. Airflow's database holds them."""
        plain = {name: getattr(self, name) for name in _NAMES if name not in _TEMPLATED}
        return plain | {name: plain[name].total_seconds() for name in _DURATIONS}

    @classmethod
    def rendered(cls, untemplated: Mapping[str, Any], templates: Mapping[str, Any]) -> Settings:
        """`templates`: the values of those that may be one. What an older version has stored lacks what was added
        since, or has what was given up."""
        known = {name: value for name, value in {**untemplated, **templates}.items() if name in _NAMES}
        return cls(**(known | {name: timedelta(seconds=known[name]) for name in _DURATIONS}))


_NAMES = tuple(field.name for field in fields(Settings))


def for_run(settings: Settings, context: Context, task_id: str) -> Settings:
    """`settings` with what the DAG run's conf says, the part for this task over the one for all. ValueError for what
    cannot work."""
    try:
        return _overridden(settings, context, task_id)
    except ValueError as error:
        raise ValueError(f"the DAG run's conf: {error}") from None


def request_of(settings: Settings, context: Context) -> WaitRequest:
    """The wait that the task of `context` asks for, from now on. Refused for what cannot work in this run."""
    from headwater.waiting.request import asked

    at_end = settings.require == INTERVAL_END
    request = asked(
        _interval_end(context) if at_end else settings.require,
        settings.max_wait.total_seconds(),
        settings.tables,
        settings.partitions,
        keep=settings.keep_cut.total_seconds(),
        owner=_owner_of(context),
        who=f"{context['ti'].dag_id}.{context['ti'].task_id}",
    )
    return replace(
        request,
        ignore_suspended=settings.ignore_suspended,
        give_up_early=settings.on_timeout == "fallback",
        validated=settings.validated,
        called=INTERVAL_END if at_end else request.called,
        began=request.deadline - settings.max_wait,
    )


def duration(value: float | str | timedelta, name: str) -> timedelta:
    """A duration that a person wrote for `name`."""
    from headwater.pipeline_file.quantities import parse_duration

    if isinstance(value, timedelta):
        return value
    try:
        return timedelta(seconds=parse_duration(value))
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


def _owner_of(context: Context) -> str:
    """In whose name the cut is pinned."""
    instance = context["ti"]
    return f"{instance.dag_id} {instance.run_id} {instance.task_id} {instance.map_index}"


def _interval_end(context: Context) -> datetime:
    from headwater.errors import Refused

    end = context.get("data_interval_end")
    if end is None:
        raise Refused(
            f"require={INTERVAL_END!r}, and this DAG run has no data interval",
            code="bad_argument",
            where="the sensor",
            remedy='trigger it with a logical date, or with the conf {"headwater": {"require": "now"}}',
        )
    return end


def _overridden(settings: Settings, context: Context, task_id: str) -> Settings:
    run = context.get("dag_run")
    conf = (getattr(run, "conf", None) or {}).get("headwater")
    if conf is None:
        return settings
    where = "headwater"
    for_all = dict(_mapping(conf, where))
    tasks = _mapping(for_all.pop(_TASKS, {}), f"{where}.{_TASKS}")
    for_task = _mapping(tasks.get(task_id, {}), f"{where}.{_TASKS}.{task_id}")
    changes: dict[str, Any] = {}
    for part, place in ((for_all, where), (for_task, f"{where}.{_TASKS}.{task_id}")):
        if unknown := sorted(set(part) - set(_NAMES)):
            raise ValueError(f"{place}.{unknown[0]} is unknown; possible: {', '.join(sorted(_NAMES))}")
        changes.update(part)
    for name in _DURATIONS:
        if name in changes:
            changes[name] = duration(changes[name], name)
    tables = changes.get("tables")
    if tables is not None and (isinstance(tables, str) or not isinstance(tables, Sequence)):
        raise ValueError(f"tables={tables!r}: expected a list of names")
    if changes.get("partitions") is not None:
        _mapping(changes["partitions"], "partitions")
    changed = replace(settings, **changes)
    changed.check()
    return changed


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}={value!r}: expected an object")
    return value
