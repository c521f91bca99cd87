"""Work on the files of a large table, each by a task of its own: as many at a time as the cluster has cores. What is
small is done in this process, one file after the other, and so is all of it where no Spark can be had."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headwater.errors import HeadwaterError
from headwater.lake.executors import LakeAccess, share_engine
from headwater.spark.session import SparkOnDemand

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

LARGE_BYTES: Final = 256 << 20
"""From here on Spark's tasks do it: what one thread does in some seconds, which Spark takes to start."""

_LOOK_EVERY: Final = 0.5
_LONGEST_WAIT: Final = 60.0
"""Seconds for a cluster to give the first core."""

Item = TypeVar("Item")
Made = TypeVar("Made")


class FileTasks:
    """On tables below `root`. From any thread."""

    def __init__(
        self,
        spark: SparkOnDemand,
        root: str,
        stopped: Callable[[], bool] = lambda: False,
        most_here: float = math.inf,
    ) -> None:
        """`stopped`: what is begun is wanted no more. `most_here`: so many bytes are worked on in this process, where
        Spark fails or has no core to give; what is larger waits for one, and raises what Spark fails with."""
        self._spark, self.root, self._stopped, self._most_here = spark, root, stopped, most_here

    def map(
        self, work: Callable[[Item], Made], items: Sequence[Item], size: int, undo: Callable[[Made], None]
    ) -> list[Made]:
        """What `work` makes of each item, in their order; `size`: of all of them, in bytes. What it raises for one is
        raised here, once all that was made of others is undone. `work` and the items are pickled, and must not need
        more of this process than they hold. InterruptedError when it is wanted no more."""
        can_wait = size > self._most_here
        made = self._by_spark(work, items, can_wait) if size >= LARGE_BYTES and (len(items) > 1 or can_wait) else None
        return _all_or_none(made if made is not None else map(_Caught(work), items), undo)

    def by_tasks_alone(self, work: Callable[[Item], Made], items: Sequence[Item]) -> list[Made] | None:
        """As `map`, and never in this process: None where Spark fails, or the work on one of the items does."""
        made = self._by_spark(work, items, False)
        failed = next((one.error for one in made or () if isinstance(one, _Failed)), None)
        if failed is not None:
            log.warning("%d files are worked on by one thread, since a task failed: %s", len(items), failed)
        return made if failed is None else None

    def _by_spark(self, work: Callable[[Item], Made], items: Sequence[Item], can_wait: bool) -> list[Any] | None:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        full = Event()
        try:
            spark = self._spark()
            share_engine(spark)
            log.info("%d files are worked on by Spark", len(items))
            with self._watched(spark.sparkContext, can_wait, full):
                tasks = spark.sparkContext.parallelize(list(items), len(items))
                found: list[Any] = tasks.map(_InTask(work, LakeAccess.to(self.root))).collect()
        except (PySparkException, Py4JError, HeadwaterError, OSError) as error:
            if self._stopped():
                raise InterruptedError from error
            if can_wait:
                raise
            said = str(error).split("\n", 1)[0]
            if full.is_set():
                said = f"the cluster had no free core for {_LONGEST_WAIT:.0f} s"
            log.warning("%d files are worked on by one thread, since Spark failed: %s", len(items), said)
            return None
        return found

    @contextlib.contextmanager
    def _watched(self, context: SparkContext, can_wait: bool, full: Event) -> Iterator[None]:
        """The jobs that this thread starts end when nobody wants them, or when no core is free for them, which `full`
        then says: a cluster does not fail for that, it lets them wait."""
        group, ended = f"headwater-{uuid.uuid4()}", Event()
        context.setJobGroup(group, "work on files of a table", interruptOnCancel=True)
        given = (context, group, can_wait, ended, full)
        watch = Thread(target=self._watch, args=given, name="headwater-tasks", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()
            context._jsc.clearJobGroup()

    def _watch(self, context: SparkContext, group: str, can_wait: bool, ended: Event, full: Event) -> None:
        began, waits = time.monotonic(), not can_wait
        while not ended.wait(_LOOK_EVERY):
            try:
                waits = waits and not _has_begun(context, group)
                if waits and time.monotonic() - began > _LONGEST_WAIT:
                    full.set()
                if full.is_set() or self._stopped():
                    context.cancelJobGroup(group)
                    return
            except Exception as error:  # Spark has gone, which the job says
                log.debug("the tasks are not watched any more: %s", error)
                return


def shared_out(items: Iterable[Item], size: Callable[[Item], int], enough: int) -> list[list[Item]]:
    """Items that follow each other together, until they have `enough` of what `size` says: what a task does."""
    shares: list[list[Item]] = []
    held = enough
    for item in items:
        if held >= enough:
            shares.append([])
            held = 0
        shares[-1].append(item)
        held += size(item)
    return shares


def _has_begun(context: SparkContext, group: str) -> bool:
    """Whether a task of the group's jobs runs or has run."""
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return any(stage is not None and stage.numActiveTasks + stage.numCompletedTasks for stage in stages)


def _all_or_none(made: Any, undo: Callable[[Made], None]) -> list[Made]:
    """What was made; the first error in it is raised, and nothing is begun behind it."""
    done: list[Made] = []
    failed: BaseException | None = None
    for one in made:
        if not isinstance(one, _Failed):
            done.append(one)
        elif failed is None:
            failed = one.error
            if not isinstance(made, list):
                break
    if failed is not None:
        for one in done:
            undo(one)
        raise failed
    return done


@dataclass(frozen=True)
class _Failed:
    error: Exception


@dataclass(frozen=True)
class _Caught:
    work: Callable[[Any], Any]

    def __call__(self, item: Any) -> Any:
        try:
            return self.work(item)
        except Exception as error:
            return _Failed(error)


@dataclass(frozen=True)
class _InTask:
    """An error of the work is its result: it comes to the driver as what it is, and no task is tried again for it."""

    work: Callable[[Any], Any]
    lake: LakeAccess

    def __call__(self, item: Any) -> Any:
        self.lake.enter()
        return _Caught(self.work)(item)
