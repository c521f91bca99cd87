"""A pipeline's DAGs from its YAML: `<pipeline>.load`, `.replicate`, `.resume`, `.reload`, `.verify`,
`.validate` and `.maintain`.

    from headwater_airflow.dag_factory import headwater_dags
    globals().update(headwater_dags("/etc/headwater/shop.yaml"))

Parsing reads the files and nothing else: neither source nor lake is touched, no engine is imported. Secrets stay
what they are in the file: a `${VAR}` that only the workers have is an import error here, so set it for the DAG
processor too, or use `airflow: <conn_id>`.

An import error belongs to a DAG file and takes all DAGs of that file with it. So where one DAG file serves many
pipelines, it leaves faulty ones out, and a second DAG file, without DAGs, reports them (`report_faults`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG, Param

from headwater.errors import BadConfiguration
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.pipeline_file.quantities import number_text
from headwater_airflow.operators.replication import BeginReplicationOperator, ResumeOperator
from headwater_airflow.operators.spark import (
    LoadOperator,
    MaintainOperator,
    ReloadOperator,
    ReplicateOperator,
    ValidateOperator,
    VerifyOperator,
)
from headwater_airflow.pipeline_files import read_pipelines
from headwater_airflow.timetable import BackfillIntervals, OverlappingSlices

log = logging.getLogger(__name__)
_GLOB = frozenset("*?[")
_OVERTIME_SECONDS = 3600.0
"""Past the end of its slice, at least. Not for ever: a task that Airflow has forgotten must end."""
_WHICH_TABLES = "Only these tables, one a line, as SQL names them. Empty: all of them."
_SHOWN = 50
"""Of a pipeline's lines of tables so many are in its DAGs' documentation."""


def headwater_dags(
    files: str | os.PathLike[str],
    *,
    slice_seconds: float = 600,
    warm_up_seconds: float = 60,
    maintain_schedule: str | None = "@daily",
    validate_schedule: str | None = None,
    validate_incremental: bool = False,
    backfill_intervals: str = "@daily",
    spark_conn_id: str = "spark_default",
    api_conn_id: str = "headwater_api",
    spark: Mapping[str, Any] | None = None,
    default_args: Mapping[str, Any] | None = None,
    tags: tuple[str, ...] = ("headwater",),
) -> dict[str, DAG]:
    """The DAGs of one pipeline file, or of all files that a pattern matches, by their id.

    `slice_seconds`: how long one run of `.replicate` lasts before the next takes over (a deployment's new code, or a
    changed YAML, arrives with the next slice). `warm_up_seconds`: how long before its end the next run begins, makes
    everything ready and takes over without a pause: two worker slots and two drivers until then. At most half a slice;
    0: runs follow each other, with a pause in between. `maintain_schedule`: when `.maintain` runs; `validate_schedule`:
    when `.validate` does (None: when it is triggered), with `validate_incremental` only on what came since.
    `backfill_intervals`: a cron expression, in UTC, of whose intervals a backfill of `.reload` reloads one a run.
    `spark`: further arguments of SparkSubmitOperator, e.g. `conf`, `driver_memory`. A faulty file raises when it is
    named, and is left out when a pattern found it.
    """
    path = os.fspath(files)
    validation = (validate_schedule, validate_incremental)
    schedules = (slice_seconds, warm_up_seconds, maintain_schedule, *validation, backfill_intervals)
    options = (*schedules, spark_conn_id, api_conn_id, spark or {}, default_args or {}, tags)
    if not _GLOB.intersection(path):
        return _dags(load_pipeline(path), *options)
    pipelines, faults = read_pipelines(path)
    for fault in faults:
        log.error("left out: %s", fault)
    return {name: dag for pipeline in pipelines for name, dag in _dags(pipeline, *options).items()}


def report_faults(pattern: str | os.PathLike[str]) -> None:
    """Raises if a file that `pattern` matches cannot be used, with the faults of all of them."""
    _, faults = read_pipelines(os.fspath(pattern))
    if faults:
        raise BadConfiguration("\n".join(str(fault) for fault in faults))


def _dags(
    pipeline: Pipeline,
    slice_seconds: float,
    warm_up_seconds: float,
    maintain_schedule: str | None,
    validate_schedule: str | None,
    validate_incremental: bool,
    backfill_intervals: str,
    spark_conn_id: str,
    api_conn_id: str,
    spark: Mapping[str, Any],
    default_args: Mapping[str, Any],
    tags: tuple[str, ...],
) -> dict[str, DAG]:
    arguments = {**spark, "pipeline": pipeline.file, "conn_id": spark_conn_id}
    load_id, replicate_id = f"{pipeline.name}.load", f"{pipeline.name}.replicate"
    reload_id, maintain_id = f"{pipeline.name}.reload", f"{pipeline.name}.maintain"
    validate_id, verify_id = f"{pipeline.name}.validate", f"{pipeline.name}.verify"
    resume_id = f"{pipeline.name}.resume"
    common: dict[str, Any] = {"catchup": False, "tags": list(tags)}
    overlap = min(warm_up_seconds, slice_seconds / 2)
    about = _about(pipeline)
    with DAG(
        load_id,
        description=f"Loads what is not loaded yet of the pipeline {pipeline.name}",
        schedule=None,
        max_active_runs=1,
        is_paused_upon_creation=False,  # without a schedule it runs only when asked to
        default_args={"retries": 3, "retry_delay": timedelta(seconds=20), **default_args},
        params={
            "tables": _names_param("Tables", _WHICH_TABLES),
            "again": Param(
                False,
                type="boolean",
                title="Load again",
                description="Load the tables named above again, also those that are loaded or suspended.",
            ),
        },
        doc_md=_LOAD_DOC.format(file=pipeline.file, replicate=replicate_id) + about,
        **common,
    ) as load:
        loading = LoadOperator(task_id="load", **_chosen("again", lists=["tables"]), **arguments)
        begin = BeginReplicationOperator(
            task_id="begin_replication",
            replicate_dag_id=replicate_id,
            load_task_id=loading.task_id,
            api_conn_id=api_conn_id,
        )
        # A teardown runs after a failed load too. A run whose teardown failed has failed: nothing replicates. But then
        # Airflow leaves what stands before the teardown out of the run's outcome, so that a failed load needs a leaf
        # of its own to make the run fail.
        loading >> [begin.as_teardown(on_failure_fail_dagrun=True), EmptyOperator(task_id="loaded")]
    with DAG(
        replicate_id,
        description=f"Keeps the lake of the pipeline {pipeline.name} in step with its source",
        schedule=OverlappingSlices(slice_seconds - overlap) if overlap > 0 else "@continuous",
        max_active_runs=2 if overlap > 0 else 1,
        # Without a start in the past the first run's data interval is empty, the second one gets the first one's
        # date, and the scheduler skips it as "run already exists": there would be one slice and never another.
        start_date=datetime(2024, 1, 1, tzinfo=UTC),
        is_paused_upon_creation=True,  # there is nothing to replicate before the first load, which unpauses it
        # An outage is sat out by retries; only what a retry cannot help comes to a halt, with the DAG paused.
        max_consecutive_failed_dag_runs=3,
        default_args={
            "retries": 20,
            "retry_delay": timedelta(seconds=5),
            "retry_exponential_backoff": True,
            "max_retry_delay": timedelta(minutes=5),
            **default_args,
        },
        doc_md=_REPLICATE_DOC.format(file=pipeline.file, seconds=number_text(slice_seconds)) + about,
        **common,
    ) as replicate:
        ReplicateOperator(
            task_id="replicate",
            max_seconds=slice_seconds,
            take_over=overlap > 0,
            # The next run may come late: no worker is free, or slices have become longer since this one began.
            overtime=max(_OVERTIME_SECONDS, slice_seconds) if overlap > 0 else 0,
            go_on_after_pause=overlap > 0,
            **arguments,
        )
    with DAG(
        resume_id,
        description=f"Resumes the pipeline {pipeline.name} after headwater pause",
        schedule=None,
        max_active_runs=1,
        is_paused_upon_creation=False,  # it runs only when asked to
        default_args={"retries": 0, **default_args},
        doc_md=_RESUME_DOC.format(file=pipeline.file, replicate=replicate_id) + about,
        **common,
    ) as resume:
        lifting = ResumeOperator(task_id="resume", pipeline=pipeline.file)
        # The slice that ran has ended with the pause, and the next one by schedule is far. One that still runs hands
        # over, or, where slices do not overlap, comes to its end first.
        lifting >> TriggerDagRunOperator(task_id="replicate", trigger_dag_id=replicate_id)
    with DAG(
        maintain_id,
        description=f"Keeps the lake of the pipeline {pipeline.name} small and quick to read",
        schedule=maintain_schedule,
        max_active_runs=1,
        start_date=datetime(2024, 1, 1, tzinfo=UTC),
        is_paused_upon_creation=True,  # there is nothing to maintain before the first load
        default_args={"retries": 2, "retry_delay": timedelta(minutes=5), **default_args},
        doc_md=_MAINTAIN_DOC.format(file=pipeline.file, replicate=replicate_id) + about,
        **common,
    ) as maintain:
        MaintainOperator(task_id="maintain", **arguments)
    with DAG(
        reload_id,
        description=f"Reloads a table of the pipeline {pipeline.name}, or a part of one",
        schedule=BackfillIntervals(backfill_intervals),
        max_active_runs=4,  # of different parts; a second one of the same part is refused
        is_paused_upon_creation=False,  # it runs only when asked to
        params={
            "table": Param(
                None,
                type=["null", "string"],
                title="Table",
                description="The table to reload, as SQL names it: public.orders",
                section="What to reload",
            ),
            "partitions": _names_param(
                "Partitions",
                "Only these partitions, one a line, as SQL names them: orders_2026_01. Empty: the whole table. "
                "In a backfill: orders_{start:%Y_%m}",
                section="Only a part of the table (optional)",
            ),
            "where": Param(
                None,
                type=["null", "string"],
                title="Rows",
                description="Instead of partitions, only the rows of a predicate: id between 5 and 9. In a backfill: "
                "day >= '{start:%Y-%m-%d}' and day < '{end:%Y-%m-%d}'",
                section="Only a part of the table (optional)",
            ),
            "changed": Param(
                False,
                type="boolean",
                title="Find what has changed",
                description="Find by the source's catalog what may differ, compare it and repair it: in the table "
                "named above, or in all tables if none is named.",
                section="Or let Headwater find it",
            ),
        },
        default_args={"retries": 2, "retry_delay": timedelta(seconds=30), **default_args},
        doc_md=_RELOAD_DOC.format(file=pipeline.file, replicate=replicate_id) + about,
        **common,
    ) as reload:
        ReloadOperator(task_id="reload", **_chosen("table", "where", "changed", lists=["partitions"]), **arguments)
    with DAG(
        verify_id,
        description=f"Compares source and lake of the pipeline {pipeline.name}, and repairs what differs",
        schedule=None,
        max_active_runs=1,
        is_paused_upon_creation=False,  # it runs only when asked to
        params={
            "tables": _names_param("Tables", _WHICH_TABLES),
            "repair": Param(
                False,
                type="boolean",
                title="Repair",
                description="Write what differs to the lake, and lift suspensions. Without it the run fails when "
                "source and lake differ, and changes nothing.",
            ),
        },
        default_args={"retries": 0, **default_args},
        doc_md=_VERIFY_DOC.format(file=pipeline.file, replicate=replicate_id) + about,
        **common,
    ) as verify:
        VerifyOperator(task_id="verify", **_chosen("repair", lists=["tables"]), **arguments)
    with DAG(
        validate_id,
        description=f"Runs the expectation suites of the pipeline {pipeline.name} on a consistent cut",
        schedule=validate_schedule,
        max_active_runs=1,
        start_date=datetime(2024, 1, 1, tzinfo=UTC),
        is_paused_upon_creation=validate_schedule is not None,  # without a schedule it runs only when asked to
        default_args={"retries": 2, "retry_delay": timedelta(minutes=1), **default_args},
        doc_md=_VALIDATE_DOC.format(file=pipeline.file) + about,
        **common,
    ) as validate:
        ValidateOperator(task_id="validate", incremental=validate_incremental, **arguments)
    return {dag.dag_id: dag for dag in (load, replicate, resume, reload, verify, validate, maintain)}


def _chosen(*names: str, lists: Sequence[str] = ()) -> dict[str, str]:
    """Arguments of an operator that the run's form fills in; lists as JSON. Rendered as Python's own objects, every
    other template would be read as one, too: an environment variable of "4" would become a number."""
    plain = {name: f"{{{{ params.{name} or '' }}}}" for name in names}
    return plain | {name: f"{{{{ params.{name} | tojson }}}}" for name in lists}


def _names_param(title: str, description: str, **schema: Any) -> Param:
    """A field of a run's form for names, one a line, that may stay empty."""
    schema = {"type": ["null", "array"], "items": {"type": "string"}, **schema}
    return Param([], title=title, description=description, **schema)


def _about(pipeline: Pipeline) -> str:
    """What the file says, as the end of each DAG's documentation; nothing of the source's connection."""
    shown = [f"- `{entry.name}`" for entry in pipeline.tables[:_SHOWN]]
    if len(pipeline.tables) > _SHOWN:
        shown.append(f"- and {len(pipeline.tables) - _SHOWN} more lines of the file")
    return "\n\n".join(["", f"Lake: `{pipeline.lake.root}`. Tables:", "\n".join(shown)])


_LOAD_DOC = """Loads the tables of `{file}` that are not loaded yet, while `{replicate}` goes on with the others. The
first time it unpauses `{replicate}` at its end. Trigger it again after adding a table."""

_RELOAD_DOC = """Replaces a table of `{file}`, some of its partitions, or rows of it, by what the source holds, while
`{replicate}` goes on. Readers see the old rows until the new ones are published in one epoch."""

_REPLICATE_DOC = """Replicates the log of the source of `{file}`, in slices of {seconds} s of which each takes over
from the one before. Pausing this DAG stops the running slice cleanly within seconds; unpaused, it goes on."""

_RESUME_DOC = """Lifts a pause that `headwater pause` has put on the pipeline of `{file}`, and starts a run of
`{replicate}`. Pausing and unpausing `{replicate}` in Airflow needs no run of this DAG."""

_VERIFY_DOC = """Compares every row of `{file}` in source and lake, while `{replicate}` goes on. With *Repair* it writes
what differs, and lifts suspensions; without it the run fails when something differs."""

_MAINTAIN_DOC = """Compacts the tables of `{file}` if `{replicate}` does not run just then (it compacts by itself),
writes checkpoints, and removes files and log entries that no pin and no cut of `lake.keep_cuts` needs."""

_VALIDATE_DOC = """Runs the suites in `expectations/` beside `{file}`, and the basics of every table, on the newest cut.
Fails when an expectation of severity error is not met, and names rows by their key. Sensors with `validated=True` wait
for it."""
