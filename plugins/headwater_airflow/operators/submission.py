"""One `spark-submit` in client mode: who runs, what it answered, how it is stopped.

What the provider's hook leaves open: a Spark driver in Python is a child of the JVM, so a signal to
`spark-submit` alone tears Spark away under the driver; and Airflow kills a task's whole process group. So the
driver gets a session of its own, a stop goes to the Python driver (it ends cleanly, the JVM follows), and a
driver whose task is gone ends itself (`headwater.spark.parent_watch`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

_EXTENSIONS = "spark.sql.extensions"
# What a JVM says of itself before anything runs in it.
_OF_THE_JVM = ("NOTE: Picked up", "Picked up", "WARNING: Using incubator modules")
# What headwater.session says when a job begins with Spark; one that needs none says nothing.
_APPLICATION = re.compile(r"Spark application (\S+)(?:, its UI at (\S+))?$")


@dataclass(frozen=True, slots=True)
class SparkApplication:
    """The Spark application of a job; `ui`: where its own UI is while it runs, if it has one."""

    id: str
    ui: str | None


class SparkSubmission(SparkSubmitHook):  # type: ignore[misc]  # the provider is not typed
    """A hook for one submission. `result` is the JSON object that the job printed, if it printed one;
    `spark_application` is known as soon as it has one."""

    _env_vars: dict[str, Any] | None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.result: dict[str, Any] | None = None
        self.spark_application: SparkApplication | None = None
        self.when_it_runs: Callable[[], None] = lambda: None
        """Called when `spark_application` is known."""
        self._application = ""
        self._is_folded = False
        self._stop = threading.Event()

    @property
    def master(self) -> str:
        return str(self._connection["master"])

    @property
    def deploy_mode(self) -> str:
        return str(self._connection["deploy_mode"] or "client")

    @property
    def exit_status(self) -> int | None:
        """Of the driver: spark-submit hands it on. None before the end; 143 after a SIGTERM that nobody handled."""
        process = self._submit_sp
        if process is None or process.poll() is None:
            return None
        status = int(process.returncode)
        return 128 - status if status < 0 else status

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def _build_spark_common_args(self) -> list[str]:
        """In client mode the driver is a child of spark-submit, whose environment is enough. For YARN and Kubernetes
        the provider would make arguments of it, and these are for everybody to see."""
        self._env, self._env_vars = self._env_vars, None
        return list(super()._build_spark_common_args())

    def submit(self, application: str = "", **arguments: Any) -> str | None:
        self._application = application
        # Airflow's UI folds a group: the command is a screen long.
        self.log.info("::group::spark-submit")
        self._is_folded = True
        try:
            driver_id: str | None = super().submit(application, start_new_session=True, **arguments)
            return driver_id
        finally:
            self._unfold()

    def stop(self) -> None:
        """Asks the driver to stop cleanly and returns at once. Called from a signal handler: no lock, no waiting."""
        self._stop.set()
        process = self._submit_sp
        if process is None or process.poll() is not None:
            return
        # Before the driver has started there is nothing to stop cleanly: the JVM alone is ended.
        for pid in _drivers(process.pid, self._application) or [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def on_kill(self) -> None:
        self.log.info("asking the Spark driver to stop")
        self.stop()

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        if self.stop_requested:
            self.stop()  # the request came before there was a process
        super()._process_spark_submit_log(self._with_result(itr))

    def _with_result(self, lines: Iterator[Any]) -> Iterator[Any]:
        for line in lines:
            if not line.startswith(_OF_THE_JVM):
                self._unfold()
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    self.result = json.loads(line)
            elif (found := _APPLICATION.search(line)) is not None:
                self.spark_application = SparkApplication(found[1], found[2])
                self.when_it_runs()
            yield line

    def _unfold(self) -> None:
        if self._is_folded:
            self._is_folded = False
            self.log.info("::endgroup::")


def joined_conf(ours: Mapping[str, str], theirs: Mapping[str, Any], jars: str | None) -> dict[str, Any]:
    """`--conf` for a job: `theirs` wins, except that jars and extensions of both are loaded; `jars`: more of theirs."""
    conf = {**ours, **theirs}
    conf["spark.jars"] = ",".join(filter(None, [ours["spark.jars"], theirs.get("spark.jars"), jars]))
    extensions = [*ours[_EXTENSIONS].split(","), *theirs.get(_EXTENSIONS, "").split(",")]
    conf[_EXTENSIONS] = ",".join(dict.fromkeys(filter(None, extensions)))
    return conf


def submission_environment() -> dict[str, str]:
    """The environment in which `spark-submit` finds this Python, its own Spark, and the engine."""
    import headwater
    from headwater.spark.session import submit_environment

    engine = str(Path(headwater.__file__).resolve().parents[1])
    modules = [engine, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**submit_environment(), "PYTHONPATH": os.pathsep.join(modules)}


def _drivers(jvm: int, application: str) -> list[int]:
    """The Python driver below the JVM (one, or none yet), read from /proc: the JVM does not tell.

    Not its other children: Spark's Python workers must outlive the driver's last batch.
    """
    with contextlib.suppress(OSError):
        children = [
            int(pid)
            for thread in Path(f"/proc/{jvm}/task").iterdir()
            for pid in (thread / "children").read_text().split()
        ]
        return [pid for pid in children if _runs(pid, application)]
    return []


def _runs(pid: int, application: str) -> bool:
    with contextlib.suppress(OSError):
        return os.fsencode(application) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
