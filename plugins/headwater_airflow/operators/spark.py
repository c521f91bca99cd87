"""Headwater's Spark jobs as operators, all on `SparkSubmitOperator` in client (or local) mode.

Nothing secret is an argument or a template: connections are resolved in `execute` and handed to the driver in its
environment. The job's exit status decides what Airflow does: 1 is tried again, 2 needs a person and fails at once,
4 (some tables are suspended, the others are done) and 5 (verify found differences, a validation failed) likewise,
except that replication goes on without its suspended tables. The job's JSON answer becomes the XCom.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowNotFoundException,
    AirflowRescheduleException,
)

from headwater.errors import EXIT_DIFFERENCES, EXIT_REFUSED, EXIT_SUSPENDED, Refused
from headwater_airflow import configuration, lineage
from headwater_airflow.operators.links import PipelinePageLink, SparkPageLink
from headwater_airflow.operators.submission import SparkSubmission, joined_conf, submission_environment
from headwater_airflow.operators.watch import stop_when_paused

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from headwater.pipeline_file.pipeline import Pipeline

_BOUND = re.compile(r"\{(start|end)(?::([^{}]*))?\}")
_NO_RETRY = {
    EXIT_REFUSED: "the job was refused and a retry cannot help",
    EXIT_SUSPENDED: "some tables are suspended; the others are done",
    EXIT_DIFFERENCES: "lake and source differ, or a validation failed",
}


class HeadwaterSparkOperator(SparkSubmitOperator):  # type: ignore[misc]  # the provider is not typed
    """A Spark job of the pipeline whose file is at `pipeline`.

    `conf` and the other arguments of SparkSubmitOperator add to what Headwater's session needs; jars and extensions of
    Spark join Headwater's.
    """

    application_args: list[Any] | None
    conf: dict[str, Any] | None
    _hook: SparkSubmission | None = None
    _context: Context
    _connection_environment: Mapping[str, str] = MappingProxyType({})

    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "pipeline")
    operator_extra_links = (PipelinePageLink(), SparkPageLink())

    def __init__(self, *, pipeline: str, application: str, **arguments: Any) -> None:
        super().__init__(application=application, durable=False, **arguments)
        # It would put the key of OpenLineage's transport on a command line.
        self._openlineage_inject_transport_info = False
        self.pipeline = pipeline

    def execute(self, context: Context) -> dict[str, Any] | None:
        self._hook = None
        self._context = context
        try:
            self.log.info("Pipeline %s: %s", self.pipeline_name(), self.in_words())
            self._show_links()
            with self._connection():
                super().execute(context)
        except Refused as refused:
            raise AirflowFailException(str(refused)) from None
        except AirflowException:
            if self._hook is None:
                raise  # nothing was submitted
            return self._ended(self._hook, context)
        return self.answer()

    def on_kill(self) -> None:
        if self._hook is not None:
            self._hook.on_kill()

    def pipeline_name(self) -> str:
        return self._loaded().name

    def in_words(self) -> str:
        """What the task does, for the first line of its log."""
        return f"runs {os.path.basename(self.application)}"

    def spark_page(self) -> str | None:
        """Where Spark shows what the job does or did: its own UI while it runs, the history server that Airflow's
        configuration names. None: nowhere."""
        application = self._hook.spark_application if self._hook is not None else None
        if self._hook is None or application is None:
            return None
        if self._hook.exit_status is None and application.ui is not None:
            return application.ui
        history = configuration.spark_history_server()
        return f"{history}/history/{application.id}/" if history is not None else None

    def environment(self) -> dict[str, str]:
        """What the driver gets beside the task's own environment (from which `${VAR}` in the file is taken)."""
        from headwater.spark.parent_watch import parent_environment

        return {**submission_environment(), **parent_environment(), **self._connection_environment}

    def spark_conf(self) -> dict[str, str]:
        """What `spark-submit --conf` gets beside `conf`."""
        from headwater.lake_root import place_of
        from headwater.spark.session import job_conf

        return job_conf(place_of(self._loaded().lake.root))

    def finished_with(self, status: int, submission: SparkSubmission) -> bool:
        """Whether this exit status other than 0 still is a success of the task."""
        return False

    def answer(self) -> dict[str, Any] | None:
        """The job's JSON; None before its end, or if it ended without one."""
        return self._hook.result if self._hook is not None else None

    def named_tables(self) -> list[str]:
        """The tables that the job is asked for; none: all. Taken from its arguments, since they may be templates."""
        arguments = [str(argument) for argument in self.application_args or ()]
        return [value for option, value in pairwise(arguments) if option == "--table"]

    def get_openlineage_facets_on_start(self) -> OperatorLineage | None:
        """What the job reads and writes, for Airflow's OpenLineage provider. None: there is nothing to tell."""
        return None

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:
        """The same when it has ended, in whatever way: tables that came with it are known by then."""
        return self.get_openlineage_facets_on_start()

    def _show_links(self) -> None:
        # By itself Airflow shows links of what has ended, and a slice runs for long.
        for link in self.operator_extra_links:
            if (address := link.get_link(self)) is not None:
                self._context["ti"].xcom_push(key=link.xcom_key, value=address)

    def _ended(self, submission: SparkSubmission, context: Context) -> dict[str, Any] | None:
        status, result = submission.exit_status, submission.result
        if status is not None and self.finished_with(status, submission):
            self.log.warning("the job ended with status %s, which is no failure of this task", status)
            return result
        if result is not None:
            context["ti"].xcom_push(key="result", value=result)
        error = (result or {}).get("error") or {}
        said = ". What to do: ".join(filter(None, [error.get("message"), error.get("remedy")])) or "see the log above"
        if status in _NO_RETRY:
            raise AirflowFailException(f"{_NO_RETRY[status]} (exit status {status}): {said}") from None
        raise AirflowException(f"the job failed (exit status {status}): {said}") from None

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        """The Airflow connections of source and lake, if they have any, go to the driver. It may ask for the source's
        anew meanwhile."""
        from headwater_airflow.hooks.source import connection_environment
        from headwater_airflow.hooks.store import store_environment
        from headwater_airflow.operators.renewal import answering

        conn_id, of_lake = self._connections()
        with contextlib.ExitStack() as lasting:
            anew = lasting.enter_context(answering(conn_id)) if conn_id is not None else {}
            known = connection_environment(conn_id) if conn_id is not None else {}
            self._connection_environment = {**known, **(store_environment(of_lake) if of_lake else {}), **anew}
            try:
                yield
            finally:
                # What listeners are told of a task that has ended is made of its attributes.
                self._connection_environment = {}

    def _connections(self) -> tuple[str | None, str]:
        """The ids of those of source and lake; None and nothing where there is none."""
        pipeline = self._loaded()
        return pipeline.source.airflow_connection, pipeline.lake.airflow

    def _loaded(self) -> Pipeline:
        from headwater.pipeline_file.pipeline import load_pipeline

        return load_pipeline(self.pipeline)

    def _get_hook(self) -> SparkSubmission:
        # Asked for by the base class once `conf` is complete: OpenLineage may have added the task as the job's parent.
        self._require_spark_connection()
        self.conf = joined_conf(self.spark_conf(), self.conf or {}, self.jars)
        try:
            submission = self._submission()
        except (RuntimeError, NameError):  # as the provider says it, or stumbles over it
            raise AirflowFailException(
                f"the Spark connection {self._conn_id!r} means Kubernetes, for which Airflow's Spark provider wants "
                "apache-airflow-providers-cncf-kubernetes beside it: install that where tasks run"
            ) from None
        if submission.deploy_mode != "client":
            raise AirflowFailException(
                f"the Spark connection {self._conn_id!r} means {submission.master} in mode {submission.deploy_mode}. "
                "Headwater's drivers run beside their task (client mode): elsewhere the source's password would have "
                "to be on a command line"
            )
        submission.when_it_runs = self._show_links
        return submission

    def _submission(self) -> SparkSubmission:
        return SparkSubmission(
            conf=self.conf,
            conn_id=self._conn_id,
            files=self.files,
            py_files=self.py_files,
            archives=self._archives,
            driver_class_path=self.driver_class_path,
            jars=None,  # in `conf` with ours, of which as an argument they would take the place
            packages=self.packages,
            exclude_packages=self.exclude_packages,
            repositories=self._repositories,
            total_executor_cores=self._total_executor_cores,
            executor_cores=self._executor_cores,
            executor_memory=self._executor_memory,
            driver_memory=self._driver_memory,
            keytab=self.keytab,
            principal=self.principal,
            use_krb5ccache=self._use_krb5ccache,
            proxy_user=self.proxy_user,
            name=f"{self.dag_id}.{self.task_id}",
            num_executors=self._num_executors,
            status_poll_interval=self._status_poll_interval,
            application_args=[str(argument) for argument in self.application_args or ()],
            env_vars={**(self.env_vars or {}), **self.environment()},
            verbose=self._verbose,
            spark_binary=self._spark_binary,
            properties_file=self.properties_file,
            yarn_queue=self._yarn_queue,
            deploy_mode=self._deploy_mode,
            post_submit_commands=self.post_submit_commands,
        )

    def _require_spark_connection(self) -> None:
        # The provider takes a missing connection for YARN, which fails much later and says something else.
        from airflow.sdk import BaseHook

        try:
            BaseHook.get_connection(self._conn_id)
        except AirflowNotFoundException:
            raise AirflowFailException(
                f"there is no Spark connection {self._conn_id!r}. Create it, for example with AIRFLOW_CONN_"
                f'{self._conn_id.upper()}=\'{{"conn_type": "spark", "host": "local[2]", '
                '"extra": {"deploy-mode": "client"}}\''
            ) from None


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
        limit = [] if max_seconds is None else ["--max-seconds", f"{max_seconds:g}"]
        longer = ["--overtime", f"{overtime:g}"] if overtime else []
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
        return f"replicates {'until it is stopped' if self.max_seconds is None else f'for {self.max_seconds:g} s'}"

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
        return f"validates {_of(self.named_tables())} " + ("on the newest cut" if self.cut is None else _on(self.cut))

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.validated(self.pipeline, self.named_tables(), self.answer())


class SparkOnCutOperator(HeadwaterSparkOperator):
    """A Spark job of your own that reads one consistent cut.

    `cut` is what a FreshnessSensor returned (`sensor.output`), also one that fell back to the source. The job gets
    the path of a file with the cut as its first argument (a cut of many tables is longer than an argument may be),
    then `application_args`:

        cut = json.loads(Path(sys.argv[1]).read_text())
        orders = headwater.read(spark, cut)["public.orders"]

    Of Headwater's settings the job gets what reads Delta tables (`headwater.session.submit_conf`), and nothing else. It
    runs in the task's Python, with Headwater in its path, unless `conf` names another (`spark.pyspark.driver.python`),
    in which Headwater must be installed.
    """

    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "cut")

    def __init__(self, *, application: str, cut: Any, **arguments: Any) -> None:
        super().__init__(pipeline="", application=application, **arguments)
        self.cut = cut

    def execute(self, context: Context) -> dict[str, Any] | None:
        with cut_file(self.cut) as file:
            self.application_args = [file, *(self.application_args or ())]
            return super().execute(context)

    def in_words(self) -> str:
        return f"{super().in_words()} {_on(self.cut)}"

    def spark_conf(self) -> dict[str, str]:
        from headwater.spark.session import submit_conf

        # A cut that fell back to the source names no places.
        return submit_conf(next((table["path"] for table in self.cut["tables"].values() if table["path"]), ""))

    def environment(self) -> dict[str, str]:
        found = super().environment()
        if (self.conf or {}).get("spark.pyspark.driver.python"):
            # Another Python than the task's has modules of its own, and this one's might go before them.
            found.pop("PYTHONPATH")
        return found

    def pipeline_name(self) -> str:
        return str(self.cut["pipeline"])

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.read_cut(self.cut)

    def _connections(self) -> tuple[str | None, str]:
        # Most cuts are read from the lake only, as the job enters it; one that fell back, at the source.
        if "fallback" not in self.cut:
            return None, ""
        self.pipeline = self.cut["fallback"]["pipeline_file"]
        return super()._connections()


@contextlib.contextmanager
def cut_file(cut: Any) -> Iterator[str]:
    """The path of a file with `cut`, while the block lasts: a cut of many tables is longer than an argument may be."""
    if not isinstance(cut, dict) or "tables" not in cut:
        raise AirflowFailException("there is no cut to read: hand over the output of a FreshnessSensor")
    with tempfile.TemporaryDirectory(prefix="headwater_cut_") as folder:
        file = Path(folder) / "cut.json"
        file.write_text(json.dumps(cut), encoding="utf-8")
        yield os.fspath(file)


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


def _on(cut: Mapping[str, Any]) -> str:
    if "fallback" in cut:
        return "on what the source holds"
    # One that somebody has put together needs no more than tables.
    return f"on the cut of epoch {cut['epoch']}" if "epoch" in cut else "on a cut"


def _table_arguments(tables: Sequence[str]) -> list[str]:
    return [part for table in tables for part in ("--table", table)]


def entry_script(job: str) -> str:
    """The `application` of one of Headwater's jobs: in the checkout, or inside the installed package."""
    import headwater

    package = Path(headwater.__file__).resolve().parent
    beside = package.parent / f"headwater_{job}.py"
    return str(beside if beside.exists() else package / "entry_scripts" / f"headwater_{job}.py")
