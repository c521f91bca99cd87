"""`headwater reload`: replace a table, or some of its partitions, by what the source holds, while replication goes on.

The rows are read at a capture point into a folder beside the table; the driver keeps the changes of the part meanwhile,
and lets both together take the part's place between two of its own commits. Readers see the old version until that
commit is published. Where no driver runs, one runs here until then.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.errors import PySparkException

from headwater.config import Pipeline
from headwater.errors import HeadwaterError, LostLease, Refused, SourceChanged, Transient
from headwater.failpoints import reach
from headwater.jobs.driver_answers import await_answer, is_running
from headwater.jobs.load import load
from headwater.jobs.partitions_named import Part, part_named
from headwater.jobs.replicate import replicate
from headwater.jobs.source_rows import rows_at
from headwater.jobs.units import BAD_VALUE, CHANGED, bad_value
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import reloaded_path
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.lake.reload_records import Keeping, Reload
from headwater.lake.reloaded import remove_rows, row_files, rows_in
from headwater.names import TableName
from headwater.position import format_lsn
from headwater.session import build_session
from headwater.source.catalog import read_catalog, signature
from headwater.source.connection import Connection, connect, identify
from headwater.source.samples import emit_marker
from headwater.source.snapshots import capture_point
from headwater.source.snapshots import wait_for_old_transactions as wait_out

log = logging.getLogger(__name__)

_MERGE_SECONDS: Final = 3600.0
_ATTEMPTS: Final = 3
Report = Callable[[str], None]


def reload(
    pipeline: Pipeline, table: TableName, partitions: Sequence[TableName] = (), progress: Report = log.info
) -> dict[str, Any]:
    """Reload `partitions` of `table` (none: the whole table). The JSON of interface "reload".

    Refused for what is not replicated, LostLease beside another reload of the same rows, Transient when the source or
    the driver goes away: then nothing was changed.
    """
    started = time.monotonic()
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater reload")) as connection:
        registry = _open(pipeline, connection, table)
        record = registry.tables[str(table)]
        part = part_named(connection, pipeline, record, partitions)
        if record.state == "suspended" and part.whole:
            # What it missed since then is nowhere but at the source: loading it anew hands over to the log exactly.
            progress(f"{table}: it is suspended ({record.reason}): it is loaded anew")
            result = load(pipeline, [table], again=True, progress=progress)
            return {**result, "seconds": round(time.monotonic() - started, 3)}
        _refuse_state(record)
        with _driver(connection, pipeline, progress):
            done = _Reload(pipeline, connection, registry, record, part, progress).run()
    return {"tables": {str(table): {**done, "state": registry.tables[str(table)].state}}, "seconds": _since(started)}


def _since(started: float) -> float:
    return round(time.monotonic() - started, 3)


def _open(pipeline: Pipeline, connection: Connection, table: TableName) -> Registry:
    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    record = registry.tables.get(str(table)) if registry is not None else None
    if registry is None or registry.pipeline is None or record is None or record.state in ("new", "removed"):
        raise Refused(
            f"{table} is not loaded",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy=f"headwater load PIPELINE.yaml --table {table}",
        )
    known, now = registry.pipeline, identify(connection)
    if (known.system_id, known.timeline) != (now.system_id, now.timeline):
        raise SourceChanged(
            f"the lake was built from system {known.system_id} timeline {known.timeline}, this source is system "
            f"{now.system_id} timeline {now.timeline}",
            where="source.connection",
            remedy="connect to the server the lake was built from",
        )
    return registry


def _refuse_state(record: TableRecord) -> None:
    name = record.name
    if record.state not in ("active", "catching up"):
        raise Refused(
            f"the table is {record.state}: {record.reason or 'another job works on it'}",
            code="not_in_step",
            where=name,
            remedy=record.remedy
            or f"wait until it is loaded; headwater reload PIPELINE.yaml --table {name} reloads all",
        )
    for option, given in (("soft_delete", record.schema.soft_delete), ("history", record.schema.history)):
        if given:
            raise Refused(
                f"a table with `{option}` cannot be reloaded in part or in place: what the reload changes is in no "
                "transaction of the source",
                code="not_reloadable",
                where=name,
                remedy=f"headwater load PIPELINE.yaml --table {name} --again",
            )


@contextlib.contextmanager
def _driver(connection: Connection, pipeline: Pipeline, progress: Report) -> Iterator[None]:
    """A driver beside the block: the one that runs, or one of our own."""
    if is_running(connection, pipeline):
        yield
        return
    progress("no replicate runs: one runs here until the reload is published")
    stop, ended = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            replicate(pipeline, None, None, stop)
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="headwater-replicate")
    thread.start()
    try:
        while not ended.is_set() and not is_running(connection, pipeline):
            ended.wait(0.1)
        if failures:
            raise failures[0]
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


@dataclass(slots=True)
class _Reload:
    """One reload of one part."""

    pipeline: Pipeline
    connection: Connection
    registry: Registry
    record: TableRecord
    part: Part
    progress: Report

    def run(self) -> dict[str, Any]:
        started = time.monotonic()
        name = secrets.token_hex(8)
        session = f"headwater reload {name}"
        root = self.pipeline.lake_path()
        # Its life is the job's: the driver gives a reload up whose job is gone.
        with contextlib.closing(connect(self.pipeline.conninfo(), application_name=session)):
            asked = self._ask(name, session)
            try:
                self._answer(asked, "it", lambda answer: True, seconds=60.0)
                reach("reload.after_answer")
                read = self._read(asked)
                size = sum(found for _, found in rows_in(row_files(root, name)))
                self.registry.write(read)
                emit_marker(self.connection)  # an idle log moves on, to where all that was read has been applied
                reach("reload.after_read")
            except BaseException:
                self._give_up(asked)
                remove_rows(root, name)
                raise
            done = self._merged(read)
        return {
            "rows": read.rows,
            "bytes": size,
            "seconds": _since(started),
            "capture_lsn": format_lsn(read.capture_lsn),
            "replaced_rows": done.replaced,
            "partitions": self.part.names,
        }

    def _ask(self, name: str, session: str) -> Reload:
        record = self.record
        reload = Reload(
            name, record.name, record.incarnation, self.part.leaves, self.part.shown, session, "asked", now_text()
        )
        self._refuse_another(reload)
        self.registry.write(reload)
        # Of two that ask at once each sees the other now: the one with the lesser name goes on.
        self._refuse_another(reload)
        return reload

    def _refuse_another(self, mine: Reload) -> None:
        self.registry.refresh()
        for other in self.registry.reloads.values():
            answer = self.registry.kept.get(other.name)
            is_open = other.state != "given up" and (answer is None or answer.state == "keeping")
            if other.name == mine.name or not is_open or not mine.overlaps(other):
                continue
            if mine.name in self.registry.reloads:
                if mine.name < other.name and other.state == "asked":
                    continue
                self._give_up(mine)
            raise LostLease(
                f"{other.shown} is being reloaded since {other.since}",
                code="reload_running",
                where=mine.table,
                remedy="wait until that reload is done; reloads of other partitions may run beside it",
            )

    def _give_up(self, asked: Reload) -> None:
        with contextlib.suppress(HeadwaterError):
            self.registry.write(replace(asked, state="given up", since=now_text()))

    def _answer(
        self, asked: Reload, what: str, wanted: Callable[[Keeping], bool], *, seconds: float, mark: bool = False
    ) -> Keeping:
        """The driver's word on the reload; Refused or Transient when that is a refusal, or none comes."""

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
            reason = found.reason if found is not None else "replicate has ended"
            raise Transient(
                f"{asked.shown} was not reloaded: {reason}",
                code="reload_failed",
                where=asked.table,
                remedy="see headwater status PIPELINE.yaml, then run the reload again: nothing was changed",
            )
        return found

    def _read(self, asked: Reload) -> Reload:
        """Read the part at a capture point into the folder of its own."""
        patience = self.pipeline.load.wait_for_old_transactions
        # What the driver had passed when it began to keep must be visible.
        wait_out(self.connection, 0, patience, where=f"pipeline {self.pipeline.name}, table {asked.table}")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._attempt(asked)
            except _Changed as changed:
                self.progress(f"{asked.table}: {changed}; reading it again ({attempt} of {_ATTEMPTS})")
        raise Transient(
            f"the table was rewritten or altered during each of {_ATTEMPTS} attempts to read it",
            where=asked.table,
            remedy="reload it again when the schema rests; nothing was changed",
        )

    def _attempt(self, asked: Reload) -> Reload:
        root, schema = self.pipeline.lake_path(), self.record.schema
        leaves = tuple(leaf for leaf in schema.leaves if self.part.whole or leaf.relation_id in self.part.leaves)
        chosen = schema.with_leaves(leaves)
        ids = [schema.relation_id, *(leaf.relation_id for leaf in leaves)]
        spark = build_session(self.pipeline.name, app_name=f"headwater reload {self.pipeline.name}")
        folder = reloaded_path(root, asked.name)
        with capture_point(self.pipeline.conninfo()) as capture:
            signatures = signature(self.connection, ids)
            self._refuse_changed()
            reach("reload.after_capture")
            self.progress(f"{asked.table}: reading {asked.shown} at {format_lsn(capture.position.lsn)}")
            frame = rows_at(spark, self.pipeline, self.connection, chosen, capture.snapshot_id, signatures)
            try:
                frame.write.mode("overwrite").option("compression", "snappy").parquet(folder)
            except PySparkException as error:
                if CHANGED in str(error):
                    raise _Changed("it was rewritten, truncated or altered") from error
                if BAD_VALUE in str(error):
                    raise bad_value(str(error), asked.table, schema) from error
                raise
            if signature(self.connection, ids) != signatures:
                raise _Changed("it was rewritten, truncated or altered")
        rows = sum(count for count, _ in rows_in(row_files(root, asked.name)))
        self.progress(f"{asked.table}: {rows} rows of {asked.shown} read")
        return replace(
            asked,
            state="read",
            since=now_text(),
            snapshot=str(capture.snapshot),
            capture_lsn=capture.position.lsn,
            rows=rows,
        )

    def _refuse_changed(self) -> None:
        """The registry's schema must still be the source's: else columns of one would be read as those of the other."""
        found = [t for t in read_catalog(self.connection, self.pipeline).tables if str(t.name) == self.record.name]
        if not found or found[0].schema.columns != self.record.schema.columns:
            raise Refused(
                "its columns changed at the source",
                code="schema_changed",
                where=self.record.name,
                remedy=f"headwater load PIPELINE.yaml --table {self.record.name} --again",
            )

    def _merged(self, read: Reload) -> Keeping:
        """What the driver has made of it, as soon as that is published."""
        done = self._answer(read, "the merge", lambda answer: answer.state == "done", seconds=_MERGE_SECONDS, mark=True)
        root = self.pipeline.lake_path()

        def published(answer: Keeping) -> bool:
            newest = read_epoch(root)
            known = newest.tables.get(read.table) if newest is not None else None
            return known is not None and answer.version is not None and known.version >= answer.version

        self._answer(read, "the publication", published, seconds=_MERGE_SECONDS, mark=True)
        return done


class _Changed(Exception):
    """The table changed under its snapshot."""
