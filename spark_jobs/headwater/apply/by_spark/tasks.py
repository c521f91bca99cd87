"""Work on the files of a large table, each by a task of its own: as many at a time as the cluster has cores. What is
small is done in this process, one file after the other, and so is all of it where no Spark can be had."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from headwater.errors import HeadwaterError
from headwater.lake.executors import LakeAccess, share_engine
from headwater.spark.session import SparkOnDemand

log = logging.getLogger(__name__)

LARGE_BYTES: Final = 256 << 20
"""From here on Spark's tasks do it: what one thread does in some seconds, which Spark takes to start."""

Item = TypeVar("Item")
Made = TypeVar("Made")


class FileTasks:
    """On tables below `root`. From any thread."""

    def __init__(self, spark: SparkOnDemand, root: str) -> None:
        self._spark, self.root = spark, root

    def map(
        self, work: Callable[[Item], Made], items: Sequence[Item], size: int, undo: Callable[[Made], None]
    ) -> list[Made]:
        """What `work` makes of each item, in their order; `size`: of all of them, in bytes. What it raises for one is
        raised here, once all that was made of others is undone. `work` and the items are pickled, and must not need
        more of this process than they hold."""
        made = self._by_spark(work, items) if size >= LARGE_BYTES and len(items) > 1 else None
        return _all_or_none(made if made is not None else map(_Caught(work), items), undo)

    def by_tasks_alone(self, work: Callable[[Item], Made], items: Sequence[Item]) -> list[Made] | None:
        """As `map`, and never in this process: None where Spark fails, or the work on one of the items does."""
        made = self._by_spark(work, items)
        failed = next((one.error for one in made or () if isinstance(one, _Failed)), None)
        if failed is not None:
            log.warning("%d files are worked on by one thread, since a task failed: %s", len(items), failed)
        return made if failed is None else None

    def _by_spark(self, work: Callable[[Item], Made], items: Sequence[Item]) -> list[Any] | None:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            spark = self._spark()
            share_engine(spark)
            log.info("%d files are worked on by Spark", len(items))
            tasks = spark.sparkContext.parallelize(list(items), len(items))
            found: list[Any] = tasks.map(_InTask(work, LakeAccess.to(self.root))).collect()
        except (PySparkException, Py4JError, HeadwaterError, OSError) as error:
            said = str(error).split("\n", 1)[0]
            log.warning("%d files are worked on by one thread, since Spark failed: %s", len(items), said)
            return None
        return found


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
