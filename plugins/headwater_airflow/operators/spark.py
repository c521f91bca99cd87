"""Headwater's Spark jobs as operators: one for each job, and one for a job of one's own on a cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException

from headwater.errors import EXIT_SUSPENDED
from headwater.pipeline_file.quantities import number_text
from headwater_airflow import lineage
from headwater_airflow.operators.on_cut import SparkOnCutOperator, cut_file, on_cut
from headwater_airflow.operators.spark_job import HeadwaterSparkOperator
from headwater_airflow.operators.watch import stop_when_paused

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from headwater_airflow.operators.submission import SparkSubmission

__all__ = [
    "HeadwaterSparkOperator",
    "LoadOperator",
    "MaintainOperator",
    "RebuildOperator",
    "ReloadOperator",
    "ReplicateOperator",
    "SparkOnCutOperator",
    "ValidateOperator",
    "VerifyOperator",
    "entry_script",
]

_BOUND = re.compile(r"\{(start|end)(?::([^{}]*))?\}")


class LoadOperator(HeadwaterSparkOperator):
    """Loads the tables that are not loaded yet (all, or `tables`); takes up where an earlier try ended. `again`: loads
    `tables` again that are loaded; so does each retry, all of them. Both may be templates, as those of
    `ReloadOperator`."""

    template_fields: Sequence[str] = (*HeadwaterSparkOperator.template_fields, "tables", "again")

    def __init__(
        self, *, pipeline: str, tables: Sequence[str] | str | None = (), again: bool | str = False, **arguments: Any
    ) -> None:
        super().__init__(pipeline=pipeline, application=entry_script("load"), **arguments)
        self.tables = tables
        self.again = again

    def execute(self, context: Context) -> dict[str, Any] | None:
        again = ["--again"] if _is_true(self.again) else []
        if again and not self.named_tables():
            raise AirflowFailException("again: name the tables that are to be loaded again")
        self.application_args = [self.pipeline, "--json", *_table_arguments(self.named_tables()), *again]
        return super().execute(context)

    def in_words(self) -> str:
        if _is_true(self.again):
            return f"loads {_of(self.named_tables())} again"
        return f"loads {_of(self.named_tables())}, as far as they are not loaded yet"

    def named_tables(self) -> list[str]:
        return _names(self.tables)

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.copied(self.pipeline, self.named_tables())


class ReloadOperator(HeadwaterSparkOperator):
    """Replaces `table`, or some `partitions` of it, or its rows of the predicate `where`, by what the source holds,
    while replication goes on. `changed`: instead, find what may differ by the source's catalog (in `table`, or in all
    of them), compare, and repair.

    In a backfill each run reloads what lies in its data interval: `{start}` and `{end}` in partitions and predicate are
    its bounds, in UTC, with a format of strftime if wanted (`orders_{start:%Y_%m}`).

    All may be templates. For `partitions` one gives a name, nothing for the whole table, or a list as JSON
    (`{{ params.partitions | tojson }}`); for `changed`, `true` or `false`.
    """

    template_fields: Sequence[str] = (
        *HeadwaterSparkOperator.template_fields,
        "table",
        "partitions",
        "where",
        "changed",
    )

    def __init__(
        self,
        *,
        pipeline: str,
        table: str | None = "",
        partitions: Sequence[str] | str | None = (),
        where: str | None = "",
        changed: bool | str = False,
        **arguments: Any,
    ) -> None:
        super().__init__(pipeline=pipeline, application=entry_script("reload"), **arguments)
        self.table = table
        self.partitions = partitions
        self.where = where
        self.changed = changed
        self._parts: list[str] = []

    def execute(self, context: Context) -> dict[str, Any] | None:
        *names, predicate = _in_interval([*_names(self.partitions), self.where or ""], context)
        parts = [part for name in names for part in ("--partition", name)]
        table = ["--table", self.table] if self.table else []
        where = [f"--where={predicate}"] if predicate else []
        changed = ["--changed"] if _is_true(self.changed) else []
        self.application_args = [self.pipeline, "--json", *table, *parts, *where, *changed]
        self._parts = [*names, *([f"the rows where {predicate}"] if predicate else [])]
        return super().execute(context)

    def in_words(self) -> str:
        of = _of(self.named_tables())
        if _is_true(self.changed):
            return f"compares what may have changed in {of} unnoticed, and repairs it"
        return f"reloads {', '.join(self._parts)} of {of}" if self._parts else f"reloads {of}"

    def named_tables(self) -> list[str]:
        return [self.table] if self.table else []

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.copied(self.pipeline, self.named_tables())


class RebuildOperator(HeadwaterSparkOperator):
    """Brings `table` into the shape that the pipeline file gives it by now (`partition_by`, `cluster_by`, `types`);
    readers and replication go on meanwhile. Does nothing where the table has it."""

    template_fields: Sequence[str] = (*HeadwaterSparkOperator.template_fields, "table")

    def __init__(self, *, pipeline: str, table: str, **arguments: Any) -> None:
        super().__init__(pipeline=pipeline, application=entry_script("rebuild"), **arguments)
        self.table = table

    def execute(self, context: Context) -> dict[str, Any] | None:
        self.application_args = [self.pipeline, "--json", "--table", self.table]
        return super().execute(context)

    def in_words(self) -> str:
        return f"brings {self.table} into the shape that the pipeline file gives it"

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:
        # Only the job knows where it reads: the lake, or for other types the source.
        tables = (self.answer() or {}).get("tables", {})
        where = {table["read_from"] for table in tables.values()}
        if "source" in where:
            return lineage.copied(self.pipeline, list(tables))
        return lineage.rewritten(self.pipeline, list(tables)) if "lake" in where else None


class ReplicateOperator(HeadwaterSparkOperator):
    """Replicates for `max_seconds` (until stopped: None). Suspended tables are no failure: the others go on.

    When somebody pauses the DAG, the slice that is running stops cleanly within seconds and succeeds
    (`stop_when_paused`): a paused DAG that went on replicating would be no pause. With `go_on_after_pause` the task is
    put back instead, and goes on as soon as the DAG is unpaused, where the schedule would not start a new run at once.
    `take_over`: ask a driver that runs to hand over as soon as this one is ready, instead of failing. `overtime`:
    seconds that this one goes on past `max_seconds` while nobody comes to take over.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        max_seconds: float | None = 600,
        stop_when_paused: bool = True,
        go_on_after_pause: bool = False,
        take_over: bool = False,
        overtime: float = 0,
        **arguments: Any,
    ) -> None:
        limit = [] if max_seconds is None else ["--max-seconds", number_text(max_seconds)]
        longer = ["--overtime", number_text(overtime)] if overtime else []
        super().__init__(
            pipeline=pipeline,
            application=entry_script("replicate"),
            application_args=[pipeline, "--json", *limit, *longer, *(["--take-over"] if take_over else [])],
            **arguments,
        )
        self.max_seconds = max_seconds
        self.stop_when_paused = stop_when_paused
        self.go_on_after_pause = go_on_after_pause
        # OpenLineage's listener takes only such tasks for put back, and would tell each time that the same run starts.
        self.reschedule = go_on_after_pause

    def execute(self, context: Context) -> dict[str, Any] | None:
        if not self.stop_when_paused:
            return super().execute(context)
        with stop_when_paused(context, self.on_kill) as was_paused:
            result = super().execute(context)
        if was_paused.is_set() and self.go_on_after_pause:
            context["ti"].xcom_push(key="return_value", value=result)
            self.log.info("the slice has stopped; it goes on when the DAG is unpaused")
            raise AirflowRescheduleException(datetime.now(UTC))  # type: ignore[no-untyped-call]
        return result

    def in_words(self) -> str:
        limit = self.max_seconds
        return f"replicates {'until it is stopped' if limit is None else f'for {number_text(limit)} s'}"

    def finished_with(self, status: int, submission: SparkSubmission) -> bool:
        # 143: the stop came while the driver was still starting.
        return status == EXIT_SUSPENDED or (submission.stop_requested and status == 143)

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.copied(self.pipeline, self.named_tables())


class MaintainOperator(HeadwaterSparkOperator):
    """Compacts, writes checkpoints and removes what no cut needs any more (all tables, or `tables`)."""

    def __init__(self, *, pipeline: str, tables: Sequence[str] = (), **arguments: Any) -> None:
        super().__init__(
            pipeline=pipeline,
            application=entry_script("maintain"),
            application_args=[pipeline, "--json", *_table_arguments(tables)],
            **arguments,
        )

    def in_words(self) -> str:
        return f"compacts {_of(self.named_tables())}, and removes what no cut needs"


class VerifyOperator(HeadwaterSparkOperator):
    """Compares source and lake; fails when they differ, with the differing keys in the XCom `result`. `repair`: puts
    right what differs, which lifts suspensions, and succeeds if all of it is. Both may be templates, as those of
    `ReloadOperator`."""

    template_fields: Sequence[str] = (*HeadwaterSparkOperator.template_fields, "tables", "repair")

    def __init__(
        self, *, pipeline: str, tables: Sequence[str] | str | None = (), repair: bool | str = False, **arguments: Any
    ) -> None:
        super().__init__(pipeline=pipeline, application=entry_script("verify"), **arguments)
        self.tables = tables
        self.repair = repair

    def execute(self, context: Context) -> dict[str, Any] | None:
        repair = ["--repair"] if _is_true(self.repair) else []
        self.application_args = [self.pipeline, "--json", *_table_arguments(self.named_tables()), *repair]
        return super().execute(context)

    def in_words(self) -> str:
        compares = f"compares {_of(self.named_tables())} with the source"
        return f"{compares}, and repairs what differs" if _is_true(self.repair) else compares

    def named_tables(self) -> list[str]:
        return _names(self.tables)

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.compared(self.pipeline, self.named_tables())


class ValidateOperator(HeadwaterSparkOperator):
    """Runs the suites of the tables (all, or `tables`) on a cut; fails where an expectation of severity error does.

    `cut`: what a FreshnessSensor returned (`sensor.output`); None: the newest one. `incremental`: look only at rows
    that came since the last validation, where that says the same. `pages`: the folder for the HTML pages (None: in the
    lake). The result is the XCom; of a failed one, `result`, with the keys of rows.
    """

    template_fields: Sequence[str] = (*HeadwaterSparkOperator.template_fields, "cut")

    def __init__(
        self,
        *,
        pipeline: str,
        tables: Sequence[str] = (),
        cut: Any = None,
        incremental: bool = False,
        pages: str | None = None,
        **arguments: Any,
    ) -> None:
        options = [*(["--incremental"] if incremental else []), *([] if pages is None else ["--pages", pages])]
        super().__init__(
            pipeline=pipeline,
            application=entry_script("validate"),
            application_args=[pipeline, "--json", *_table_arguments(tables), *options],
            **arguments,
        )
        self.cut = cut

    def execute(self, context: Context) -> dict[str, Any] | None:
        if self.cut is None:
            return super().execute(context)
        with cut_file(self.cut) as file:
            self.application_args = [*(self.application_args or ()), "--cut", file]
            return super().execute(context)

    def in_words(self) -> str:
        return f"validates {_of(self.named_tables())} {on_cut(self.cut)}"

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.validated(self.pipeline, self.named_tables(), self.answer())


def _in_interval(texts: Sequence[str], context: Context) -> list[str]:
    """The texts with the bounds of the data interval in them, where the run is one of a backfill."""
    run = context.get("dag_run")
    if run is None or run.run_type != "backfill":
        return list(texts)
    bounds = {"start": context["data_interval_start"], "end": context["data_interval_end"]}
    if not any(_BOUND.search(text) for text in texts):
        raise AirflowFailException(
            "each run of a backfill would reload the same: name what lies in its interval in the backfill's conf, "
            'as {"table": "public.orders", "where": "day >= \'{start:%Y-%m-%d}\' and day < \'{end:%Y-%m-%d}\'"} '
            'or {"partitions": ["orders_{start:%Y_%m}"]}'
        )

    def bound(found: re.Match[str]) -> str:
        moment = bounds[found[1]]
        assert moment is not None, "each run of a backfill has an interval"
        moment = moment.astimezone(UTC)
        return str(moment.strftime(found[2]) if found[2] else moment.isoformat())

    return [_BOUND.sub(bound, text) for text in texts]


def _names(value: Sequence[str] | str | None) -> list[str]:
    """Of an argument that a template may have filled in: with a list as JSON, one name, or nothing."""
    if isinstance(value, str) and (value == "null" or (value.startswith("[") and value.endswith("]"))):
        value = json.loads(value)
    names = [value] if isinstance(value, str) else list(value or ())
    return [name for name in names if name]


def _is_true(value: bool | str) -> bool:
    """Of a truth that a template may have filled in."""
    return str(value).lower() == "true"


def _of(tables: Sequence[str]) -> str:
    return ", ".join(tables) or "all tables"


def _table_arguments(tables: Sequence[str]) -> list[str]:
    return [part for table in tables for part in ("--table", table)]


def entry_script(job: str) -> str:
    """The `application` of one of Headwater's jobs: in the checkout, or inside the installed package."""
    import headwater

    package = Path(headwater.__file__).resolve().parent
    beside = package.parent / f"headwater_{job}.py"
    return str(beside if beside.exists() else package / "entry_scripts" / f"headwater_{job}.py")
