"""Committing a plan: one Delta commit per table, carrying rows and applied position together.

Written directly where the table allows it (`headwater.apply.direct`), else by Spark (`headwater.apply.by_spark.merge`).
There every worker thread has a session of its own, because the `txn` entry of a commit is a session setting, and a
commit that is not exactly the planned version + 1 is a lost race: usually nothing was committed and the caller plans
again from what is there now.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os.path import join
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.apply import direct
from headwater.apply.by_spark import merge
from headwater.apply.by_spark.optimize import TurnsOfSpark
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import Fence
from headwater.apply.live_table import Base, Keep, LiveTable
from headwater.apply.made_ready import MadeReady
from headwater.apply.plan import Applied, Plan, PlanAgain
from headwater.apply.small_files import Upkeep
from headwater.arrow_types import key_schema
from headwater.delta import delta_log, entries, storage
from headwater.delta.commit_notes import USER_METADATA, note
from headwater.delta.deletion_vectors import DamagedVector
from headwater.delta.entries import EntryReplaced
from headwater.delta.index.codes import encode
from headwater.delta.index.index import NOWHERE
from headwater.delta.log_entries import TornEntry, note_written
from headwater.delta.partition_values import NameTooLong, too_long
from headwater.delta.tables import commits_after, described
from headwater.delta.whole import lost_file
from headwater.errors import Fenced, ForeignWrite, TableError
from headwater.lake.paths import registry_path, staged_path
from headwater.lake.registry import TableRecord
from headwater.lake_root import is_remote
from headwater.schema import TableSchema
from headwater.spark.session import SparkOnDemand, for_thread, require_exclusive
from headwater.spark.stores import no_commit
from headwater.stage_clock import stage

Int64 = npt.NDArray[np.int64]

_APP = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
_LAST_COMMIT = "spark.databricks.delta.lastCommitVersionInSession"


class Applier:
    """Commits plans; safe from several threads, each table in one at a time. `spark` is asked for a session when, and
    if, a table needs one."""

    def __init__(
        self,
        spark: SparkOnDemand,
        fence: Fence,
        states: Mapping[str, LiveTable] = MappingProxyType({}),
        tasks: FileTasks | None = None,
    ) -> None:
        """`states`: by path, tables that were read before; ours from now on. `tasks` read the keys of large tables."""
        self._spark = spark
        self._fence = fence
        self._states = dict(states)
        self._tasks = tasks
        self._upkeep = Upkeep(fence)
        self._turns = TurnsOfSpark(spark)
        # One thread merges and saves the indexes of all tables: none of them waits for another's.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="headwater-index")
        self._starting = threading.Lock()
        self._local = threading.local()

    def why_by_engine(self, record: TableRecord, path: str, version: int) -> str:
        """Why the table at `path` must be written by Spark in `version`; empty when it need not."""
        with damage_named(record, path):
            return direct.obstacle(self._state(path, record, version).snapshot)

    def lacks_mark(self, record: TableRecord, path: str, version: int) -> bool:
        """Whether an older driver could still commit to the directly written table: it has not seen our generation."""
        if self.why_by_engine(record, path, version):
            return False
        seen = self._states[path].snapshot.transactions.get(self._fence.app_id, 0)
        return seen < self._fence.generation

    def found(
        self, record: TableRecord, path: str, version: int, keys: pa.Table, wanted: pa.Schema
    ) -> tuple[npt.NDArray[np.bool_], Iterator[tuple[Int64, pa.Table]]]:
        """Which of `keys` have a row in the table at `path`, and the columns `wanted` of these rows, in parts: the
        numbers of their keys, and the rows."""
        with damage_named(record, path):
            state = self._state(path, record, version)
            places = state.find(encode(record.schema, keys))
        there = places != NOWHERE
        numbers = np.flatnonzero(there)
        return there, ((numbers[here], rows) for here, rows in state.rows_at(places[there], wanted))

    def base(self, record: TableRecord, path: str, version: int, files: int, *, part: bool) -> Base | None:
        """What about so many `files` are made ready by for the table at `path`, or for a `part` of it; None: it is
        written by Spark."""
        if self.why_by_engine(record, path, version):
            return None
        with damage_named(record, path):
            return self._states[path].base(files, part=part)

    def has_counted(self, path: str, counters: Iterable[str]) -> bool:
        """Whether a commit that counts one of these appIds is in the log of the table at `path`, as far as that was
        read."""
        state = self._states.get(path)
        return state is not None and not state.snapshot.transactions.keys().isdisjoint(counters)

    def has_room_for(self, path: str, ready: MadeReady) -> bool:
        """Whether what was made ready is still what the table at `path` can take without reading its keys again."""
        state = self._states.get(path)
        return state is None or ready.rows.fits_into(state)

    def commit(self, plan: Plan) -> Applied:
        """Commit `plan`. PlanAgain when another commit came first; ForeignWrite (or Fenced, if it was a newer driver's)
        when one slipped in between."""
        if plan.by_engine or plan.apply_path == "merge":
            return self._by_engine(plan)
        with damage_named(plan.record, plan.path):
            return direct.commit(self._state(plan.path, plan.record, plan.version), plan, self._fence)

    def keep_up(self, path: str, schema: TableSchema, version: int) -> int:
        """Behind the ledger: what the table at `version` needs besides its changes. Returns its version afterwards."""
        state = self._states.get(path)
        if state is None or state.version != version:
            self._upkeep.leave(path)
            self._turns.after_commit(path)  # it was not written directly
            return version
        self._upkeep.after_commit(path, state, schema)
        state.save_index()
        return state.version

    @property
    def upkeep_waits(self) -> bool:
        """Whether some table has not had all of its upkeep."""
        return self._upkeep.waits

    def next_upkeep(self, paths: Collection[str]) -> str | None:
        """Of these tables, to which nothing is written just now, the one that `keep_up` is to be called for."""
        return self._upkeep.next_idle(paths)

    def forget(self, path: str) -> None:
        """Somebody else is going to write the table at `path` anew: nothing that is known of it will hold any more."""
        self._turns.finish(path)
        self._upkeep.leave(path)
        state = self._states.pop(path, None)
        if state is not None:
            state.close()

    def close(self) -> None:
        """End what still runs beside the writer; large indexes are kept for the next start."""
        self._upkeep.close()
        self._turns.close()
        for state in self._states.values():
            state.save_index(at_once=True)
        for state in self._states.values():
            state.close()
        self._beside.shutdown(wait=True)

    def _state(self, path: str, record: TableRecord, version: int) -> LiveTable:
        state = self._states.get(path)
        if state is None or state.version > version or state.keys != key_schema(record.schema):
            if state is not None:
                state.close()
            state = self._states[path] = LiveTable(path, record.schema)
        state.keep(Keep(record.incarnation, self._fence.generation), self._beside, self._tasks)
        state.advance(version)
        return state

    @stage("write")  # planning and commit among it: the engine does not tell them apart
    def _by_engine(self, plan: Plan) -> Applied:
        if said := no_commit(plan.path, plan.record.name, plan.because):
            raise TableError(**said)
        self._turns.finish(plan.path)
        with overwriting_named(plan.record.name):
            entries.refuse_replaced(plan.path)
        if commits_after(plan.path, plan.version) or plan.changes.staged is not None:
            raise PlanAgain  # staged files are for the direct paths only
        spark = self._session()
        require_exclusive(spark, plan.path)
        paths = {"append": merge.append, "replace": merge.replace, "merge": merge.merge}
        shared = join(staged_path(plan.path.removesuffix(plan.record.path)), str(self._fence.generation))
        with _transaction(spark, plan):
            try:
                divergence, example = paths[plan.apply_path](spark, plan, shared)
            except (PySparkException, Py4JJavaError) as error:
                if "DELTA_CONCURRENT" in str(error) or "Concurrent" in type(error).__name__:
                    raise PlanAgain from error
                raise _constraint_broken(plan.record.name, str(error)) or error from error
            version = spark.conf.get(_LAST_COMMIT, "")
        if not version:
            # Delta saw our position in the table already: a late commit of a fenced predecessor.
            raise PlanAgain
        own, last = _own_version(plan, int(version)), int(version)
        entries.meet(plan.path, own)
        note_written(plan.path, own)
        noted = _note_others(plan, own, last)
        return Applied(own, divergence, example, noted)

    def _session(self) -> SparkSession:
        session: SparkSession | None = getattr(self._local, "session", None)
        if session is None:
            with self._starting:  # several tables may ask at once, and there is one JVM
                session = self._local.session = for_thread(self._spark())
            # The source of a MERGE is an Arrow table of ours: the same at every reading, so no copy need be kept of it.
            session.conf.set("spark.databricks.delta.merge.materializeSource", "none")
            # Whatever the table says: its OPTIMIZE has turns of its own, and would be the session's last commit.
            session.conf.set("spark.databricks.delta.autoCompact.enabled", "false")
        return session


@contextmanager
def overwriting_named(table: str) -> Iterator[None]:
    """An entry of the table's log that somebody has overwritten is this table's trouble alone."""
    try:
        yield
    except EntryReplaced as error:
        commit = described(error.version, delta_log.read_commit_info(error.folder, error.version))
        raise _replaced(table, commit) from error


@contextmanager
def damage_named(record: TableRecord, folder: str) -> Iterator[None]:
    """A file that the table's log names and that is gone or damaged, or an entry of it that somebody has overwritten,
    is this table's trouble alone. `folder`: where the table lies, for errors that do not say what is wrong."""
    table = record.name
    try:
        with overwriting_named(table):
            yield
    except (FileNotFoundError, DamagedVector, TornEntry) as error:
        if is_remote(folder) and isinstance(error, FileNotFoundError):
            _refuse_outage(folder.removesuffix(f"/{record.path}"), folder)
        raise _damaged(table, str(error)) from error
    except (OSError, pa.ArrowException) as error:
        if is_remote(folder) and isinstance(error, OSError) and error.errno is not None:
            raise  # of the store, and not of what a file holds, and so it may pass
        why = _lost(folder)
        if not why:
            raise
        raise _damaged(table, why) from error
    except NameTooLong as error:
        raise too_long(str(error), table) or error from error


_CONSTRAINT = re.compile(r"\[DELTA_VIOLATE_CONSTRAINT\w*\] CHECK constraint (.*?) violated by row")


def _constraint_broken(table: str, text: str) -> ForeignWrite | None:
    """What it means that Delta refuses a row: without the row's values, which the text goes on with. None: something
    else."""
    found = _CONSTRAINT.search(text)
    if found is None:
        return None
    return ForeignWrite(
        f"another program gave the lake's table the constraint {found[1]}, which a row of the source does not meet",
        where=table,
        remedy=f"drop the constraint, then headwater load PIPELINE.yaml --table {table} --again",
    )


def _replaced(table: str, commit: str) -> ForeignWrite:
    return ForeignWrite(
        f"{commit} was written by another program over the commit that was there",
        where=table,
        remedy=f"headwater load PIPELINE.yaml --table {table} --again",
    )


def _refuse_outage(root: str, folder: str) -> None:
    """OSError unless a file of the table in `folder` is missing where the rest of the lake is seen: what stands before
    a store also says "not found" when the store is away, and another store has nothing of the lake."""
    if not storage.is_folder(registry_path(root)):
        raise OSError(errno.EIO, "the store does not show the lake", root)
    if not _lost(folder):
        raise OSError(errno.EIO, "the store did not find a file that is there", folder)


def _lost(folder: str) -> str:
    try:
        return lost_file(folder)
    except (FileNotFoundError, TornEntry) as error:
        return str(error)


def _damaged(table: str, why: str) -> ForeignWrite:
    return ForeignWrite(
        f"a file of the table is missing or damaged: {why}",
        where=table,
        remedy=f"headwater load PIPELINE.yaml --table {table} --again",
    )


@contextmanager
def _transaction(spark: SparkSession, plan: Plan) -> Iterator[None]:
    spark.conf.set(_APP, plan.app_id)
    spark.conf.set(_VERSION, str(plan.to_lsn))
    spark.conf.set(USER_METADATA, note(plan.version, plan.because))
    spark.conf.unset(_LAST_COMMIT)
    try:
        yield
    finally:
        spark.conf.unset(_APP)
        spark.conf.unset(_VERSION)
        spark.conf.unset(USER_METADATA)


def _own_version(plan: Plan, last: int) -> int:
    """The version of our commit, where `last` is the session's last one: Delta may have compacted files behind it."""
    found = [commit for commit in commits_after(plan.path, plan.version) if commit.version <= last]
    own = [commit.version for commit in found if commit.transactions.get(plan.app_id) == plan.to_lsn]
    return own[-1] if own else last


def _note_others(plan: Plan, version: int, last: int) -> str:
    """What others did between the planned version and ours, and up to `last` behind it. Delta itself refuses to
    commit over a commit of our appId that came after its own look at the table; between our look and Delta's there is a
    moment left."""
    found = commits_after(plan.path, plan.version)
    between = [commit for commit in found if commit.version < version]
    for commit in between:
        if commit.data and plan.app_id in commit.transactions:
            raise Fenced(
                f"version {commit.version} was committed by another driver while version {version} was being written",
                where=plan.record.name,
                remedy="nothing: the newer driver goes on",
            )
        if commit.data:
            raise ForeignWrite(
                f"version {commit.version} ({commit.operation}) was committed by another program while version "
                f"{version} was being written",
                where=plan.record.name,
                remedy=f"headwater load PIPELINE.yaml --table {plan.record.name} --again",
            )
    for commit in found:
        if commit.version == version and commit.transactions.get(plan.app_id) != plan.to_lsn:
            raise _replaced(plan.record.name, commit.described)
    others = [*between, *(commit for commit in found if version < commit.version <= last and not commit.data)]
    return ", ".join(f"{commit.operation} at version {commit.version}" for commit in others)
