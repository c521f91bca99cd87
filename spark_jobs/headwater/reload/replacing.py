"""What a job that replaces rows of a table does with the driver beside it: asks it to keep their changes, reads at a
capture point, hands over, and waits until what came of it is published. What is read, and how, is the caller's matter.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from headwater.apply.replacement import remove_rows, row_files, size_read
from headwater.apply.waiting_files import discard_waiting, waiting_files
from headwater.delta import storage
from headwater.delta.foreign_terms import why_unwritable
from headwater.errors import HeadwaterError, LostLease, Refused, Transient
from headwater.failpoints import reach
from headwater.gate.drivers import await_return
from headwater.gate.lease import is_alive
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.lake.reload_records import Keeping, Reload, is_open
from headwater.load.driver_answers import await_answer, is_running
from headwater.load.progress import Report
from headwater.pipeline_file.pipeline import Pipeline
from headwater.pipeline_file.where_text import parse
from headwater.position import format_lsn
from headwater.replicate.pausing import refuse_paused
from headwater.replicate.replicate import replicate
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.where_sql import exclude_each_other, reach_of
from headwater.source.connection import Connection, connect
from headwater.source.samples import emit_marker
from headwater.source.snapshots import wait_for_old_transactions as wait_out

log = logging.getLogger(__name__)

_MERGE_SECONDS: Final = 3600.0
_SILENT_SECONDS = 20.0
"""Without a driver, after which one of our own takes its place: less than a job waits for an answer in vain."""
_AGAIN_SECONDS = 3.0
"""The same where ours could not run, as while a load sets the source up."""
_LOOK_SECONDS = 1.0
_ROWS_A_SECOND: Final = 10_000
"""That a driver brings at the very least, should other reloads wait before this one."""


def refuse_state(record: TableRecord) -> None:
    """Refused when rows of the table cannot be replaced as it stands."""
    name = record.name
    if record.state not in ("active", "catching up"):
        raise Refused(
            f"the table is {record.state}: {record.reason or 'another job works on it'}",
            code="not_in_step",
            where=name,
            remedy=record.remedy
            or f"wait until it is loaded; if no load runs, headwater load PIPELINE.yaml --table {name} ends it",
        )


def refuse_unfit(pipeline: Pipeline, record: TableRecord) -> None:
    """Refused when no part of a suspended table can be put right."""
    path, app_id = table_path(pipeline.lake_path(), record.path), record.app_id(pipeline.name)
    problem = why_unwritable(path, app_id, appended_to=record.schema.insert_only)
    if problem:
        raise Refused(
            f"the table is suspended ({record.reason}), and no part of it can be reloaded: {problem}",
            code="not_in_step",
            where=record.name,
            remedy=f"headwater load PIPELINE.yaml --table {record.name} --again",
        )


def refuse_kept(record: TableRecord) -> None:
    """Refused, in whatever state, for a table that keeps deleted rows or every change."""
    kept = (
        ("soft_delete", record.schema.soft_delete, "rows that are marked as deleted go with it"),
        ("history", record.schema.history, "its history stays as it was, and marks the load"),
    )
    for option, given, lost in kept:
        if given:
            raise Refused(
                f"a table with `{option}` cannot be reloaded, in part or as a whole: what the reload changes is in no "
                "transaction of the source",
                code="not_reloadable",
                where=record.name,
                remedy=f"headwater load PIPELINE.yaml --table {record.name} --again; {lost}",
            )


@contextlib.contextmanager
def driver_beside(connection: Connection, pipeline: Pipeline, progress: Report) -> Iterator[None]:
    """A driver beside the block: the one that runs, or one of our own; of two that start together, either. Where the
    other one ends first, as that of a job does with its job, ours takes its place."""
    if not (is_lent := await_return(connection, pipeline)):
        registry = Registry.open(pipeline.lake_path(), pipeline.name)
        if registry is not None:
            refuse_paused(registry, "headwater replicate")
        progress("no replicate runs: one runs here until this is published")
    stop, begun, ended = threading.Event(), threading.Event(), threading.Event()
    failures: list[BaseException] = []
    stands_in = is_lent
    """Another job's driver may come back: if ours cannot run just now, a block that has begun goes on."""

    def run() -> None:
        nonlocal stands_in
        try:
            if stands_in:
                _await_silence(pipeline, stop, _SILENT_SECONDS)
            while not stop.is_set():
                silence = _SILENT_SECONDS
                try:
                    replicate(pipeline, None, None, stop)
                except Transient as failed:
                    if failed.code != "already_running":
                        if not (stands_in and begun.is_set()):
                            raise
                        log.warning("no driver runs, and none can run here yet: %s", failed)
                        silence = _AGAIN_SECONDS
                stands_in = True
                _await_silence(pipeline, stop, silence)
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="headwater-replicate")
    thread.start()
    try:
        while not is_lent and not ended.is_set() and not is_running(connection, pipeline):
            ended.wait(0.1)
        if failures:
            raise failures[0]
        begun.set()
        yield
    except Exception as error:
        if failures and error is not failures[0]:  # that nobody answered is its consequence
            raise failures[0] from error
        raise
    finally:
        stop.set()
        thread.join()
    if failures and not stands_in:  # else the other one has come back, and done what was asked for
        raise failures[0]


def _await_silence(pipeline: Pipeline, stop: threading.Event, seconds: float) -> None:
    """Until nobody has read the slot for so long, or `stop`: a slice of Airflow's has its time to follow another."""
    silent = 0.0
    while silent < seconds and not stop.is_set():
        try:
            with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater driver beside")) as own:
                while silent < seconds and not stop.wait(_LOOK_SECONDS):
                    silent = 0.0 if is_running(own, pipeline) else silent + _LOOK_SECONDS
        except Transient as error:
            log.warning("whether replicate runs cannot be asked: %s", error)
            stop.wait(_LOOK_SECONDS)


def finish_what_was_read(
    pipeline: Pipeline, connection: Connection, registry: Registry, table: str, progress: Report
) -> None:
    """Whoever is to replace rows of `table` goes on from reloads of it whose rows were read, and whose job was lost
    then (a kill, a power cut): the driver still finishes those, and what is asked for now is not refused for them."""
    for read in list(registry.reloads.values()):
        is_read = read.state == "read" and is_open(read, registry.kept.get(read.name))
        if read.table != table or not is_read or is_alive(connection, read.session):
            continue
        progress(f"{table}: replicate finishes the reload of {read.shown}, whose job is gone")
        with driver_beside(connection, pipeline, progress):
            try:
                Replacing(pipeline, connection, registry, registry.tables[table], read.shown).merged(read)
            except Transient:
                answer = registry.kept.get(read.name)
                if answer is None or answer.state != "failed":
                    raise
                # Given up: nothing of it is left to wait for.


@dataclass(slots=True)
class Replacing:
    """One replacement of rows of the table `record`: of its partitions `leaves` (empty: anywhere), or under certain
    `keys`, or of the predicate `where`. `shown`: how a person names these rows. `unknown`: partitions that the lake
    has not met yet. `shape`: what the table is to be afterwards."""

    pipeline: Pipeline
    connection: Connection
    registry: Registry
    record: TableRecord
    shown: str
    leaves: tuple[int, ...] = ()
    unknown: tuple[Leaf, ...] = ()
    keys: bool = False
    where: str = ""
    shape: TableSchema | None = None

    def run(self, read: Callable[[Reload], Reload]) -> dict[str, Any]:
        """`read` puts the rows where the reload's record says, and gives it back as "read". The JSON of one table."""
        started = time.monotonic()
        name = secrets.token_hex(8)
        session = f"headwater reload {name}"
        root = self.pipeline.lake_path()
        is_read = False
        # Its life is the job's: the driver gives a reload up whose job is gone.
        with contextlib.closing(connect(self.pipeline.conninfo(), application_name=session)):
            asked = self._ask(name, session)
            try:
                self._answer(asked, lambda answer: True, seconds=60.0)
                reach("reload.after_answer")
                patience = self.pipeline.load.wait_for_old_transactions
                # What the driver had passed when it began to keep must be visible.
                wait_out(self.connection, 0, patience, where=f"pipeline {self.pipeline.name}, table {asked.table}")
                done = read(asked)
                _, size = size_read(root, name)
                reach("reload.after_read")
                waiting = waiting_files(root, name)
                storage.wrote(*(waiting.places if waiting is not None else row_files(root, name)))
                storage.sync(root)  # the driver goes by these rows from the moment that the registry names them
                is_read = True
                self.registry.write(done)
                reach("reload.after_handover")
            except BaseException as error:
                refusal = None if isinstance(error, HeadwaterError) else self._refusal(asked)
                self._give_up(asked)
                if not is_read:  # else the driver may know of it, and be about to name them
                    discard_waiting(root, name)
                remove_rows(root, name)
                if isinstance(error, Exception) and refusal is not None:
                    raise refusal from error  # the driver has removed what was being written
                raise
            # From here on it is the driver's: it may be at it already.
            emit_marker(self.connection)  # an idle log moves on, to where all that was read has been applied
            merged = self.merged(done)
        return {
            "rows": done.rows,
            "bytes": size,
            "seconds": round(time.monotonic() - started, 3),
            "capture_lsn": format_lsn(done.capture_lsn),
            "replaced_rows": merged.replaced,
        }

    def _ask(self, name: str, session: str) -> Reload:
        record = self.record
        reload = Reload(
            name,
            record.name,
            record.incarnation,
            self.leaves,
            self.shown,
            session,
            "asked",
            now_text(),
            keys=self.keys,
            unknown=self.unknown,
            where=self.where,
            shape=self.shape,
            suspended="" if record.is_followed else record.since,
        )

        def alone() -> Reload:
            self._refuse_another(reload)
            return reload

        self.registry.add(alone)
        return reload

    def _refuse_another(self, mine: Reload) -> None:
        self.registry.refresh()
        for other in self.registry.reloads.values():
            other_is_open = is_open(other, self.registry.kept.get(other.name))
            if not other_is_open or not self._overlap(mine, other):
                continue
            # One that was killed over its reading is given up by the driver, if one runs long enough.
            if other.state == "asked" and not is_alive(self.connection, other.session):
                continue
            raise LostLease(
                f"{other.shown} is being reloaded since {other.since}",
                code="reload_running",
                where=mine.table,
                remedy="wait until that reload is done; reloads of other rows of the table may run beside it",
            )

    def _overlap(self, mine: Reload, other: Reload) -> bool:
        """Whether both may be of one row. Of predicates the source's planner knows when they contradict each other, or
        the bounds of a partition."""
        if not mine.overlaps(other):
            return False
        schema, ids = self.record.schema, {*mine.leaves, *other.leaves}
        wheres = [parse(reload.where, schema) for reload in (mine, other) if reload.where]
        if len(wheres) == 2:
            return not exclude_each_other(self.connection, schema, *wheres)
        if not (wheres and ids):
            return True
        known = {leaf.relation_id: leaf for leaf in (*schema.leaves, *mine.unknown, *other.unknown)}
        return not all(i in known and reach_of(self.connection, known[i], wheres[0]).nothing for i in ids)

    def _give_up(self, asked: Reload) -> None:
        with contextlib.suppress(HeadwaterError):
            self.registry.write(replace(asked, state="given up", since=now_text()))

    def _answer(
        self,
        asked: Reload,
        wanted: Callable[[Keeping], bool],
        *,
        seconds: float,
        mark: bool = False,
        done: bool = False,
    ) -> Keeping:
        """The driver's word on the reload; Transient when that is a refusal, or none comes. `done`: the rows stand in
        the lake already."""

        def marked() -> None:
            if mark:
                emit_marker(self.connection)  # an idle log moves on, and the open batch is sealed

        found = await_answer(
            self.connection,
            self.pipeline,
            self.registry,
            asked.name,
            f"the reload of {asked.shown}",
            lambda answer: answer.state == "failed" or wanted(answer),
            seconds=seconds,
            meanwhile=marked,
        )
        if found is None or found.state == "failed":
            raise _failed(asked, found.reason if found is not None else "replicate has ended", done=done)
        return found

    def _refusal(self, asked: Reload) -> HeadwaterError | None:
        """The driver's, if it has given the reload up meanwhile."""
        try:
            self.registry.refresh()
        except Exception:  # what is being raised already says more
            return None
        answer = self.registry.kept.get(asked.name)
        return _failed(asked, answer.reason) if answer is not None and answer.state == "failed" else None

    def merged(self, read: Reload) -> Keeping:
        """What the driver has made of it, as soon as that is published."""
        patience = _MERGE_SECONDS + read.rows / _ROWS_A_SECOND
        merged = self._answer(read, lambda answer: answer.state == "done", seconds=patience, mark=True)
        root = self.pipeline.lake_path()

        def published(answer: Keeping) -> bool:
            newest = read_epoch(root)
            known = newest.tables.get(read.table) if newest is not None else None
            return known is not None and answer.version is not None and known.version >= answer.version

        self._answer(read, published, seconds=_MERGE_SECONDS, mark=True, done=True)
        return merged


def _failed(asked: Reload, reason: str, *, done: bool = False) -> Transient:
    what = f"was {asked.done} and is not published yet" if done else f"was not {asked.done}"
    again = "see headwater status PIPELINE.yaml; run it again when replicate runs and the table is active"
    return Transient(
        f"{asked.shown} {what}: {reason}",
        code="reload_failed",
        where=asked.table,
        remedy="start replicate: its first epoch publishes it" if done else again,
    )
