"""What all of Headwater's Spark jobs have in common as tasks, on `SparkSubmitOperator` in client (or local) mode.

Nothing secret is an argument or a template: connections are resolved in `execute` and handed to the driver in its
environment. The job's exit status decides what Airflow does: 1 is tried again, 2 needs a person and fails at once,
4 (some tables are suspended, the others are done) and 5 (verify found differences, a validation failed) likewise,
except that replication goes on without its suspended tables. The job's JSON answer becomes the XCom.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException

from headwater.errors import EXIT_DIFFERENCES, EXIT_REFUSED, EXIT_SUSPENDED, Refused
from headwater_airflow import configuration
from headwater_airflow.operators.links import PipelinePageLink, SparkPageLink
from headwater_airflow.operators.submission import SparkSubmission, joined_conf, submission_environment

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

    from headwater.pipeline_file.pipeline import Pipeline

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

    def why_final(self, status: int | None, error: Mapping[str, Any]) -> str | None:
        """Why a retry cannot help a job that failed with this exit status and `error`; None: it may."""
        return _NO_RETRY.get(status) if status is not None else None

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
        found = (result or {}).get("error")
        error = found if isinstance(found, dict) else {}
        said = ". What to do: ".join(filter(None, [error.get("message"), error.get("remedy")])) or "see the log above"
        if (why := self.why_final(status, error)) is not None:
            raise AirflowFailException(f"{why} (exit status {status}): {said}") from None
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
