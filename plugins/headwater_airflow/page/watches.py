"""The pipelines of `[headwater] pipelines` as the pages see them, each watched by one `PipelineWatch`.

The same setting as the example DAGs have (`dags/headwater_pipelines.py`). A file that changes is read again; a faulty
one is reported and leaves the others. Gathering runs in threads of its own, a few for each pipeline: a lake that does
not answer, or whose keys are not to be had, keeps its own card empty, and neither the page nor the server's own
threads.
"""

from __future__ import annotations

import glob
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from headwater.errors import HeadwaterError, Transient
from headwater.pipeline_file.pipeline import Pipeline
from headwater.terminal.scrub import Scrubber
from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.pipeline_files import read_pipelines

if TYPE_CHECKING:
    from headwater.monitor.overview import PipelineWatch

GATHER_SECONDS = 0.6
"""How long a page waits for the pipelines that have to be gathered anew; the others come with its next refresh."""
_FILES_SECONDS = 1.0
_THREADS = 3
"""For each pipeline."""

_Stamp = tuple[tuple[str, int, int], ...]

log = logging.getLogger(__name__)


class _Watched:
    """A pipeline and who watches it, from the first question on. Before that the keys of its lake are fetched, which
    may take long or fail: that is for the threads that ask."""

    def __init__(self, pipeline: Pipeline, conninfo: Callable[[], str]) -> None:
        self.pipeline = pipeline
        self._conninfo = conninfo
        self._lock = threading.Lock()
        self._watch: PipelineWatch | None = None

    def ask(self, question: Callable[[PipelineWatch], Any]) -> Any:
        from headwater.monitor.overview import PipelineWatch

        with self._lock:
            if self._watch is None:
                self._watch = PipelineWatch(self.pipeline, self._conninfo)
            watch = self._watch
        return question(watch)


class Watches:
    """All pipelines of the folder. From any thread."""

    def __init__(self, folder: Callable[[], str | None] = pipelines_folder) -> None:
        self._folder = folder
        self.scrubber = Scrubber()
        """Knows the passwords of all connections that were used."""
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._looked_at = float("-inf")
        self._watched: dict[str, _Watched] = {}
        self._faults: list[HeadwaterError] = []
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._running: dict[tuple[str, str], Future[Any]] = {}

    @property
    def folder(self) -> str | None:
        return self._folder()

    def pipelines(self) -> list[Pipeline]:
        self._refresh()
        return [watched.pipeline for watched in self._watched.values()]

    def faults(self) -> list[HeadwaterError]:
        """What is wrong with the files that cannot be used."""
        self._refresh()
        return self._faults

    def gather(
        self, what: str, names: Iterable[str], ask: Callable[[PipelineWatch], Any], seconds: float
    ) -> dict[str, Any]:
        """`ask` of each pipeline of `names`, within `seconds`: its answer, the HeadwaterError in its place, or None for
        not yet. A question (`what`) that still runs is not asked twice."""
        with self._lock:
            asked = {name: self._ask(what, name, ask) for name in names if name in self._watched}
        wait(asked.values(), seconds)
        with self._lock:
            for key in [key for key, future in self._running.items() if future.done()]:
                del self._running[key]
        return {name: _answer(name, future) for name, future in asked.items()}

    def _ask(self, what: str, name: str, ask: Callable[[PipelineWatch], Any]) -> Future[Any]:
        running = self._running.get((what, name))
        if running is None or running.done():
            if name not in self._threads:
                self._threads[name] = ThreadPoolExecutor(_THREADS, thread_name_prefix="headwater pages")
            running = self._running[what, name] = self._threads[name].submit(self._watched[name].ask, ask)
        return running

    def _learned(self, conninfo: Callable[[], str]) -> Callable[[], str]:
        def learn() -> str:
            text = conninfo()
            self.scrubber.learn(text)
            return text

        return learn

    def _refresh(self) -> None:
        """Read files that are new or have changed; a folder is looked at once a second at most."""
        with self._lock:
            if time.monotonic() - self._looked_at < _FILES_SECONDS:
                return
            folder = self._folder()
            pattern = os.path.join(folder, "*.yaml") if folder else ""
            stamp = _stamp(pattern)
            if stamp != self._stamp:
                pipelines, self._faults = read_pipelines(pattern) if pattern else ([], [])
                kept = self._watched
                self._watched = {
                    one.name: kept[one.name]
                    if one.name in kept and kept[one.name].pipeline == one and kept[one.name].pipeline.file == one.file
                    else _Watched(one, self._learned(_connection_of(one)))
                    for one in pipelines
                }
                # What may pass is looked for again: the file need not change for that.
                self._stamp = None if any(isinstance(fault, Transient) for fault in self._faults) else stamp
            self._looked_at = time.monotonic()


def _stamp(pattern: str) -> _Stamp:
    found = []
    for file in sorted(glob.glob(pattern)):
        try:
            state = os.stat(file)
        except OSError:
            continue  # gone between the two
        found.append((file, state.st_mtime_ns, state.st_size))
    return tuple(found)


def _connection_of(pipeline: Pipeline) -> Callable[[], str]:
    """How the source's connection string (secret) is found in the API server, anew for every visit."""
    conn_id = pipeline.source.airflow_connection
    if conn_id is None:
        return pipeline.conninfo

    def from_airflow() -> str:
        from airflow.models.connection import Connection
        from airflow.sdk.exceptions import AirflowNotFoundException

        from headwater_airflow.hooks.source import libpq_uri

        try:
            return libpq_uri(Connection.get_connection_from_secrets(conn_id))
        except AirflowNotFoundException:
            raise Transient(f"there is no Airflow connection {conn_id}", where=pipeline.file) from None

    return from_airflow


def _answer(name: str, future: Future[Any]) -> Any:
    if not future.done():
        return None
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, HeadwaterError):
        return error
    if not isinstance(error, OSError):
        log.error("pipeline %s cannot be shown", name, exc_info=error)
    reason = error.strerror if isinstance(error, OSError) else None
    return Transient(
        f"the lake cannot be read ({reason or type(error).__name__})",
        where=f"pipeline {name}",
        remedy="see the API server's log, and whether it reaches lake.root with the right to read",
    )
