"""`headwater maintain`: few files, recent checkpoints, and nothing that no cut needs any more.

Runs beside anything. While a driver runs it leaves compaction to that driver, which can commit between two of its own
batches and so never loses a race; checkpoints and clean-up commit nothing. Without a driver it compacts as well, under
a lease that a load respects: a load reads its target when it begins to write, and would lose to a rewritten file at
its end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from headwater.apply.by_spark.optimize import ENOUGH, compact_directly, optimize, worth_optimizing
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import obstacle
from headwater.apply.small_files import choose
from headwater.apply.waiting_files import all_waiting
from headwater.delta import log_files, storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import log_path
from headwater.delta.small_tables import write_checkpoint
from headwater.errors import LostLease, Refused, SourceChanged, Transient
from headwater.gate import lease
from headwater.gate.recovery import ledger_is_whole, mended_lake, mended_registry
from headwater.lake import wait_log
from headwater.lake.cuts import history_name, remove_expired
from headwater.lake.history import history_record, stored_record
from headwater.lake.horizon import RecentHorizons
from headwater.lake.ledger import generation_app, generation_began, read_generation
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry, TableRecord
from headwater.lake_root import is_remote
from headwater.maintain.cleanup import ORPHAN_SECONDS, clean
from headwater.maintain.control_tables import KeptTable, keep_ledger, keep_registry, keep_validations
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, connect, identify
from headwater.source.slot import read_slot
from headwater.spark.session import job_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_KEPT_STATES = ("active", "catching up", "suspended")
_CHECKPOINT_EVERY = 10
_TRIES = 3


def maintain(
    pipeline: Pipeline, tables: Sequence[TableName] = (), progress: Callable[[str], None] = log.info
) -> dict[str, Any]:
    """Maintain `tables` (none: all that are loaded) and the lake's own. The JSON of the reference's "maintain"."""
    started = time.monotonic()
    root, conninfo = pipeline.lake_path(), pipeline.conninfo()
    registry = mended_registry(pipeline)
    if registry is None or registry.pipeline is None:
        raise Refused(
            "nothing was ever loaded into this lake",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    with contextlib.closing(connect(conninfo, application_name="headwater maintain")) as connection:
        _refuse_other_source(connection, registry.pipeline.system_id)
        if mended_lake(connection, pipeline, registry) is None and not ledger_is_whole(root):
            raise _not_mended(pipeline)
        with lease.hold(conninfo, registry, lease.MAINTAIN):
            horizons = RecentHorizons(root, pipeline.lake.keep_cuts)
            pins = remove_expired(root, pins=horizons.pins)
            wait_log.remove_old(root)
            job = _Maintenance(pipeline, registry, connection, horizons)
            names = [str(table) for table in tables] or sorted(registry.tables)
            works = [partial(_with_history, job, name, registry.tables.get(name), progress) for name in names]
            results = {part: result for done in storage.side_by_side(root, works) for part, result in done.items()}
            control = {
                "ledger": _control(keep_ledger(root, Event())),
                "registry": _control(keep_registry(root, Event())),
                "validations": _control(keep_validations(root, Event())),
            }
    seconds = round(time.monotonic() - started, 3)
    return {"driver": job.saw_driver, "tables": results, **control, "expired_pins": pins, "seconds": seconds}


def _with_history(
    job: _Maintenance, name: str, record: TableRecord | None, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    done = {name: job.table(record)}
    if record is not None and record.schemas and record.schema.history:
        done[history_name(name)] = job.table(record, history=True)
    for part, result in done.items():
        progress(f"{part}: {_said(result)}")
    return done


class _Maintenance:
    """One run over the tables of a lake, of which several may be in hand at once."""

    def __init__(
        self, pipeline: Pipeline, registry: Registry, connection: Connection, horizons: RecentHorizons
    ) -> None:
        self._pipeline, self._registry, self._connection, self._horizons = pipeline, registry, connection, horizons
        self._root = pipeline.lake_path()
        self._compacts = Lock()
        self.saw_driver = self._driver_lives()

    def table(self, record: TableRecord | None, *, history: bool = False) -> dict[str, Any]:
        """What was done to one table, or to its `history`; what went wrong with it is its own, and the others go on."""
        if record is None or record.state not in _KEPT_STATES:
            return _result(skipped=f"it is {record.state if record is not None else 'new'}")
        folder = table_path(self._root, history_record(record).path if history else record.path)
        for left in reversed(range(_TRIES)):
            try:
                if not storage.is_folder(log_path(folder)):
                    return _result(skipped="its Delta table is gone from the lake")
                return self._maintain(stored_record(record, read_snapshot(folder)) if history else record, folder)
            except log_files.UnknownLog as unknown:
                return _result(skipped=str(unknown))
            except FileNotFoundError as gone:  # a running driver cleans up, too, and was faster
                if not left:
                    return _result(error=str(gone))
            except (Refused, Transient):
                raise
            except Exception as error:
                return _result(error=f"{type(error).__name__}: {error}")
        raise AssertionError("the last attempt returns")

    def _maintain(self, record: TableRecord, folder: str) -> dict[str, Any]:
        before = len(read_snapshot(folder).files)
        compacted, left = self._compact(record, folder)
        checkpoint = _checkpoint(folder)
        found = log_files.look(folder)
        result = {
            "files_before": before,
            "files_after": len(read_snapshot(folder).files),
            "compacted": compacted,
            "not_compacted": left,
            "checkpoint": checkpoint,
            "version": found.newest,
        }
        horizon = self._horizons.read().of(record.name, found)
        if horizon is None:
            return _result(**result, skipped="no epoch holds it yet: run replicate first")
        cleaned = clean(
            folder,
            found,
            horizon.version,
            log_from=horizon.log_from,
            orphans_before=self._orphans_before(),
            waiting=partial(all_waiting, self._root),
            stop=Event(),
        )
        return _result(
            **result,
            horizon=horizon.version,
            kept_for=horizon.because,
            files_removed=cleaned.files,
            orphans_removed=cleaned.orphans,
            bytes_removed=cleaned.bytes,
            log_entries_removed=cleaned.log_files,
        )

    def _compact(self, record: TableRecord, folder: str) -> tuple[bool, str]:
        """Whether the table was compacted, or why it was left."""
        if record.state == "suspended":
            return False, "a suspended table stays as it is"
        if self._driver_lives():
            return False, "left to the driver that is running"
        snapshot = read_snapshot(folder)
        direct = not obstacle(snapshot)
        files = list(snapshot.files.values())
        if not (choose(files, ENOUGH) if direct else worth_optimizing(files, ENOUGH)):
            return False, ""
        if not direct and is_remote(folder):
            return False, "only Spark could do it, and Spark does not commit to an object store here"
        try:
            with self._compacts, self._no_load():
                if direct:
                    tasks = FileTasks(self._spark, self._root)
                    return compact_directly(folder, record.schema, generation_app(self._pipeline.name), tasks), ""
                return optimize(self._spark(), snapshot), ""
        except LostLease as lost:
            return False, lost.message

    def _spark(self) -> SparkSession:
        return job_session(self._pipeline.name, "maintain", self._root)

    @contextlib.contextmanager
    def _no_load(self) -> Iterator[None]:
        """No load begins inside the block, and none runs; LostLease if one does."""
        with lease.hold(self._pipeline.conninfo(), self._registry, lease.COMPACTION):
            lease.refuse_if_held(self._connection, self._registry, lease.LOAD)
            yield

    def _driver_lives(self) -> bool:
        slot = read_slot(self._connection, self._pipeline.source.slot)
        return slot is not None and slot.active

    def _orphans_before(self) -> float | None:
        """Files that a running load, or the newest driver, may yet commit are no orphans."""
        try:
            lease.refuse_if_held(self._connection, self._registry, lease.LOAD)
        except LostLease:
            return None
        newest = datetime.now(UTC).timestamp() - ORPHAN_SECONDS
        if not self._driver_lives():
            return newest
        began = generation_began(self._root, read_generation(self._root, self._pipeline.name))
        return min(newest, began.timestamp()) if began is not None else None


def _refuse_other_source(connection: Connection, system_id: str) -> None:
    """Whether a driver or a load lives is asked at the source: another server does not know."""
    found = identify(connection).system_id
    if found != system_id:
        raise SourceChanged(
            f"the lake was built from system {system_id}, this source is system {found}",
            where="source.connection",
            remedy="connect to the server the lake was built from",
        )


def _not_mended(pipeline: Pipeline) -> Transient:
    """What a power cut has left torn would stay for good below a checkpoint."""
    return Transient(
        "the ledger holds what a power cut has left, and the slot does not yet tell what of it was on disk",
        code="lake_unavailable",
        where=f"replication slot {pipeline.source.slot}",
        remedy="run headwater replicate PIPELINE.yaml, then maintain again",
    )


def _checkpoint(folder: str) -> int | None:
    """The newest checkpoint, made now if the log has gone on by some entries since; None: there is none."""
    found = log_files.look(folder)
    newest = max(found.checkpoints, default=None)
    if found.newest - (newest if newest is not None else -1) >= _CHECKPOINT_EVERY:
        return write_checkpoint(folder)
    return newest


def _control(kept: KeptTable | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    return {
        "files_before": kept.files_before,
        "files_after": kept.files_after,
        "files_removed": kept.cleaned.files,
        "bytes_removed": kept.cleaned.bytes,
        "log_entries_removed": kept.cleaned.log_files,
        "checkpoint": kept.checkpoint,
    }


def _result(**found: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "files_before": None,
        "files_after": None,
        "compacted": False,
        "not_compacted": "",
        "files_removed": 0,
        "orphans_removed": 0,
        "bytes_removed": 0,
        "log_entries_removed": 0,
        "checkpoint": None,
        "version": None,
        "horizon": None,
        "kept_for": "",
        "skipped": "",
        "error": "",
    }
    return {**nothing, **found}


def _said(result: dict[str, Any]) -> str:
    if result["error"] or result["skipped"]:
        return str(result["error"] or result["skipped"])
    return (
        f"{result['files_before']} -> {result['files_after']} files; removed {result['files_removed']} files "
        f"({result['bytes_removed']} bytes) and {result['log_entries_removed']} of the log"
    )
