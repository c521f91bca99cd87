"""What a freshness sensor may be told: by its arguments, and over them by the conf of the DAG run.

In the conf, under `headwater`: for every sensor of the run, and under `tasks` by task id for a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.sdk import Context

INTERVAL_END = "data_interval_end"
ON_TIMEOUT = ("fail", "skip", "continue", "fallback")
_TASKS = "tasks"


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


def for_run(settings: Settings, context: Context, task_id: str) -> Settings:
    """`settings`, the DAG run's conf over them, and the moment that `data_interval_end` stands for. ValueError for what
    cannot work in this run."""
    try:
        settings = overridden(settings, context, task_id)
    except ValueError as error:
        raise ValueError(f"the DAG run's conf: {error}") from None
    if settings.require != INTERVAL_END:
        return settings
    end = context.get("data_interval_end")
    if end is None:
        raise ValueError(
            f"require={INTERVAL_END!r}, and this DAG run has no data interval. What to do: trigger it with a "
            'logical date, or with the conf {"headwater": {"require": "now"}}'
        )
    return replace(settings, require=end)


def overridden(settings: Settings, context: Context, task_id: str) -> Settings:
    """`settings` with what the DAG run's conf says, the part for this task over the one for all."""
    run = context.get("dag_run")
    conf = (getattr(run, "conf", None) or {}).get("headwater")
    if conf is None:
        return settings
    where = "headwater"
    for_all = dict(_mapping(conf, where))
    tasks = _mapping(for_all.pop(_TASKS, {}), f"{where}.{_TASKS}")
    for_task = _mapping(tasks.get(task_id, {}), f"{where}.{_TASKS}.{task_id}")
    known = {field.name for field in fields(Settings)}
    changes: dict[str, Any] = {}
    for part, place in ((for_all, where), (for_task, f"{where}.{_TASKS}.{task_id}")):
        if unknown := sorted(set(part) - known):
            raise ValueError(f"{place}.{unknown[0]} is unknown; possible: {', '.join(sorted(known))}")
        changes.update(part)
    for name in ("max_wait", "keep_cut"):
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


def duration(value: float | str | timedelta, name: str) -> timedelta:
    """A duration that a person wrote for `name`."""
    from headwater.pipeline_file.quantities import parse_duration

    if isinstance(value, timedelta):
        return value
    try:
        return timedelta(seconds=parse_duration(value))
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}={value!r}: expected an object")
    return value
