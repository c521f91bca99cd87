"""Compaction besides what a driver does to the tables that it writes directly: few files, few deleted rows in them.

While no driver runs, a directly written table is rewritten and committed as its driver would do it
(`headwater.apply.small_files`): should one start meanwhile, whoever links the next version first has it, and the other
looks again. Tables that Spark writes are left to Delta's OPTIMIZE, under Delta's own conflict check; in a driver in the
table's own turn, since an OPTIMIZE that competes with a writer of every second keeps losing. Neither changes a row
(`dataChange` false).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import Fence, obstacle
from headwater.apply.live_table import LiveTable
from headwater.apply.small_files import Group, Rewritten, Source, Upkeep, as_read, choose, rewrite
from headwater.delta import storage
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.log_entries import Action
from headwater.delta.new_files import discard
from headwater.delta.storage import hadoop_place
from headwater.schema import TableSchema
from headwater.spark.session import SparkOnDemand, for_thread, require_exclusive

log = logging.getLogger(__name__)

ENOUGH = 2
_ENOUGH_BESIDE = 16
_LOOK_EVERY = 8
_REST = 19.0
_SMALL = 64 << 20
_TARGET = 256 << 20
_TRIES = 3
_AT_MOST = 8 << 30
"""Bytes of one commit: so much is lost where a driver starts meanwhile, and commits first."""
_SIZES = {
    # Delta would take every file below a gigabyte: a table of that size would be written anew each time.
    "spark.databricks.delta.optimize.minFileSize": str(_SMALL),
    "spark.databricks.delta.optimize.maxFileSize": str(_TARGET),
}


def compact_directly(folder: str, schema: TableSchema, generation_app: str, tasks: FileTasks) -> bool:
    """Rewrite a directly written table's small files and deleted rows, by `tasks`; whether anything was committed."""
    state = LiveTable(folder, schema)
    # No driver's generation is raised or taken back by this: the mark stays as it was found.
    fence = Fence(generation_app, state.snapshot.transactions.get(generation_app, 0))
    changed = False
    with contextlib.closing(Upkeep(fence)) as upkeep:
        while groups := _all_groups(state.snapshot.files.values()):
            size = sum(file.size for group in groups for file in group.files)
            work = _Rewrite(folder, schema, state.snapshot.metadata)
            made = tasks.map(work, as_read(state, groups), size, lambda one: discard(folder, one.files))
            storage.wrote(*(file.in_folder(folder) for one in made for file in one.files))  # by whichever process
            if not upkeep.commit(folder, state, made):
                break
            changed = True
    return changed


def _all_groups(files: Iterable[DataFile]) -> list[Group]:
    """All that is to be rewritten now, as far as one commit goes. No file is in two of them."""
    found: list[Group] = []
    left = {file.name: file for file in files}
    while sum(file.size for group in found for file in group.files) < _AT_MOST and (
        groups := choose(left.values(), ENOUGH)
    ):
        found += groups
        for group in groups:
            for file in group.files:
                del left[file.name]
    return found


@dataclass(frozen=True)
class _Rewrite:
    folder: str
    schema: TableSchema
    metadata: Action

    def __call__(self, group: tuple[list[Source], str]) -> Rewritten:
        made = rewrite(self.folder, self.schema, self.metadata, *group, lambda: None)
        return replace(made, added=[(file, None) for file, _ in made.added])  # nobody looks for keys here


def worth_optimizing(files: Iterable[DataFile], enough: int) -> bool:
    """Whether some partition has `enough` small files, or some file is mostly deleted rows."""
    small: Counter[tuple[tuple[str, str | None], ...]] = Counter()
    for file in files:
        if file.rows and file.deleted * 2 > file.rows:
            return True
        small[tuple(sorted(file.partition_values.items()))] += file.size < _SMALL
    return max(small.values(), default=0) >= enough


def optimize(spark: SparkSession, snapshot: Snapshot, enough: int = ENOUGH) -> bool:
    """Delta's OPTIMIZE, if it is worth it; whether it ran. A lost race is tried again; the last one raises."""
    if not worth_optimizing(snapshot.files.values(), enough):
        return False
    require_exclusive(spark, snapshot.folder)
    session = for_thread(spark)
    for name, value in _SIZES.items():
        session.conf.set(name, value)
    for left in reversed(range(_TRIES)):
        try:
            DeltaTable.forPath(session, hadoop_place(snapshot.folder)).optimize().executeCompaction()
            return True
        except Exception as error:
            if not left or ("DELTA_CONCURRENT" not in str(error) and "Concurrent" not in type(error).__name__):
                raise
    return False


class TurnsOfSpark:
    """OPTIMIZE of the tables that Spark writes, between two of their batches: one at a time, and of each table only as
    often as leaves it a twentieth of the time."""

    def __init__(self, spark: SparkOnDemand) -> None:
        self._spark = spark
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headwater-optimize")
        self._running: dict[str, Future[None]] = {}
        self._commits: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def after_commit(self, folder: str) -> None:
        """Behind the ledger: begin what is due."""
        self._commits[folder] += 1
        due = self._commits[folder] % _LOOK_EVERY == 0 and time.monotonic() >= self._not_before.get(folder, 0.0)
        if due and folder not in self._running:
            self._running[folder] = self._pool.submit(self._optimize, folder)

    def finish(self, folder: str) -> None:
        """In the writer's turn: the table is its alone when this returns. What has not begun does not begin."""
        running = self._running.pop(folder, None)
        if running is None or running.cancel():
            return
        error = running.exception()
        if error is not None:
            log.warning("%s: its files could not be rearranged: %s", folder, error)

    def _optimize(self, folder: str) -> None:
        began = time.monotonic()
        snapshot = read_snapshot(folder)
        if obstacle(snapshot):
            optimize(self._spark(), snapshot, _ENOUGH_BESIDE)
        self._not_before[folder] = time.monotonic() + _REST * (time.monotonic() - began)
