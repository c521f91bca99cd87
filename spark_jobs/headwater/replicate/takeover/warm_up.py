"""What a driver makes ready while another one still holds the slot: reader process, ledger, tables, a JVM if need be.

In a thread of its own, so that a slot that comes free, or a wish to stop, is noticed at once. Nothing is written that
anybody else reads, and nothing that was read is trusted: when the slot is ours the start goes its usual way, and finds
most of its answers here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.warm_tables import WarmTables
from headwater.lake.ledger import Ledger
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.reader.child import ReaderProcess
from headwater.replicate.takeover.succession import Successor, await_slot
from headwater.spark.session import SparkOnDemand

log = logging.getLogger(__name__)

_PERIOD = 0.5


@dataclass(slots=True)
class Turn:
    """How a driver comes to its slot. `ended`: the wait for it ended without it, by one of the interface's words;
    `reader`, `tables`: what is ready. As it stands: a driver that did not wait, and has nothing."""

    ended: str | None = None
    reader: ReaderProcess | None = None
    tables: WarmTables | None = None
    begins: Callable[[], None] = lambda: None
    """The slot is ours: from now on another successor may announce itself."""
    claim: int | None = None
    """The server process of what `begins` gives up."""


@contextlib.contextmanager
def taking_over(
    pipeline: Pipeline,
    registry: Registry,
    ledger: Ledger,
    engine: SparkOnDemand,
    stop: threading.Event,
    deadline: float | None,
) -> Iterator[Turn]:
    """Wait for the slot beside the driver that has it, and make everything ready meanwhile. `engine` starts a session.

    LostLease when another successor waits. `registry` and `ledger` are read anew when the slot is free.
    """
    with Successor(pipeline.conninfo(), pipeline.source.slot) as successor:
        warm_up = _WarmUp(pipeline, registry, ledger, engine)
        try:
            ended = await_slot(successor, warm_up, stop, deadline)
            if ended is None:
                warm_up.finish()
                registry.refresh()
                ledger.refresh()
            reader = warm_up.reader if warm_up.reader.is_alive else None
            yield Turn(ended, reader, warm_up.tables, successor.close, successor.claim)
        finally:
            warm_up.discard()


class _WarmUp:
    """Begins at once. `finish` ends the thread, after which registry, ledger and tables are the caller's."""

    def __init__(self, pipeline: Pipeline, registry: Registry, ledger: Ledger, engine: SparkOnDemand) -> None:
        self._pipeline, self._registry, self._ledger, self._engine = pipeline, registry, ledger, engine
        self._root = pipeline.lake_path()
        self._stop = threading.Event()
        self._warm = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-warm-up", daemon=True)
        self._hot: set[str] = set()
        self.tables = WarmTables(FileTasks(engine, self._root, self._stop.is_set))
        self.reader = ReaderProcess()
        self._thread.start()

    @property
    def is_warm(self) -> bool:
        return self._warm.is_set() and self.reader.is_awake

    def finish(self) -> None:
        """Returns after the table that is being read just now by this process; what tasks read is given up."""
        self._stop.set()
        self._thread.join()

    def discard(self) -> None:
        """Ends what nobody has made use of. The thread is not waited for long: it only reads."""
        self._stop.set()
        self._thread.join(timeout=2)
        self.reader.discard()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._hot = self._ledger.touched_lately()
        self._round()
        self._warm.set()
        while not self._stop.wait(_PERIOD):
            self._round()

    def _round(self) -> None:
        """Once over all tables, those that changed lately with everything that the next batch will ask of them."""
        try:
            self._registry.refresh()
            self._hot |= self._ledger.refresh()
        except Exception as error:
            log.debug("registry and ledger could not be read ahead: %s", error)
        for name, record in list(self._registry.tables.items()):
            if self._stop.is_set():
                return
            if record.state not in ("active", "catching up", "suspended"):
                continue
            path, app_id = table_path(self._root, record.path), record.app_id(self._pipeline.name)
            try:
                if name not in self._hot or record.state == "suspended":
                    self.tables.note(path, app_id)
                elif self.tables.follow(record, path, app_id):
                    self._engine()
            except Exception as error:
                # What is wrong with a table is judged, and said, by whoever writes it.
                log.debug("%s could not be read ahead: %s", name, error)
