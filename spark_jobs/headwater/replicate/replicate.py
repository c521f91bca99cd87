"""`headwater replicate`: the way of the data, from the log to the published position.

Order at start: what a power cut has left half done goes, the slot is taken (another replicate means exit 1), then the
generation is raised (the fence), then tables are read. Order in the loop: every table of a batch commits, then the
ledger row, then the position file. The slot is confirmed when that row is on disk: the source is the retry log.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from headwater.columns.hidden import hiding
from headwater.columns.log_format import may_be_binary, refuse_late_text
from headwater.errors import Refused
from headwater.failpoints import reach
from headwater.gate import lease
from headwater.gate.check import APPLICATION_NAME
from headwater.gate.recovery import mend_lake, mended_registry
from headwater.gate.wal_ceiling import CeilingWatch, giving_up
from headwater.lake.durability import Durability, sync_lake
from headwater.lake.ledger import Ledger
from headwater.load.handover import Handovers
from headwater.log.large import STAGE_FROM
from headwater.log.spill import SpillStore
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position, parse_lsn
from headwater.replicate.beside.following import Following
from headwater.replicate.catalog_watch import CatalogWatch
from headwater.replicate.loop import Driver, Totals, report
from headwater.replicate.pausing import await_resumption
from headwater.replicate.preapply.decide import Staging
from headwater.replicate.publisher import Publisher
from headwater.replicate.reader.handle import LogReader, ReaderOptions
from headwater.replicate.tables.tables import Tables
from headwater.replicate.takeover.continuity import continuity, follow
from headwater.replicate.takeover.new_source import same_or_followed
from headwater.replicate.takeover.succession import SuccessorWatch
from headwater.replicate.takeover.warm_up import Turn, taking_over
from headwater.source.connection import Connection, Session, connect
from headwater.source.problems import refuse_errors
from headwater.source.publication.publication import inserts_name
from headwater.source.samples import emit_marker, take_sample
from headwater.source.settings import server_problems
from headwater.spark.session import job_session

log = logging.getLogger(__name__)


def replicate(
    pipeline: Pipeline,
    until: str | None,
    max_seconds: float | None,
    stop: threading.Event,
    take_over: bool = False,
    *,
    stage_from: int = STAGE_FROM,
) -> dict[str, Any]:
    """Replicate until `until` ("now", an LSN), `max_seconds`, or `stop`. The JSON of interface "replicate".

    `take_over`: make everything ready beside a driver that runs, and have it hand over; `max_seconds` bounds the wait
    for that, and counts anew from then on. `stage_from`: bytes of an open transaction from which on it is worked on
    before its commit, 0: never; nothing but time depends on it.
    """
    deadline = _deadline(max_seconds)
    conninfo, root = pipeline.conninfo(), pipeline.lake_path()
    registry = mended_registry(pipeline)
    if registry is None or registry.pipeline is None or not any(r.holds_rows for r in registry.tables.values()):
        raise Refused(
            "no table is loaded",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    session = functools.cache(partial(job_session, pipeline.name, "replicate"))
    with (
        contextlib.closing(connect(conninfo, application_name="headwater replicate")) as connection,
        ExitStack() as held,
    ):
        damaged = mend_lake(connection, pipeline, registry)
        ledger = Ledger(root, pipeline.name)
        source = same_or_followed(connection, pipeline, registry, ledger)
        position = Position(source.system_id, source.timeline, 0)
        ended = await_resumption(registry, until, deadline, stop)
        if ended is not None:
            return report(Totals(), ledger, registry.tables, ended)
        held.enter_context(giving_up(pipeline))
        turn = Turn()
        if take_over:
            # A successor that would be refused must not end a driver that works.
            refuse_errors(server_problems(connection, pipeline.source.slot, [APPLICATION_NAME]))
            turn = held.enter_context(taking_over(pipeline, registry, ledger, session, stop, deadline))
            if turn.ended is not None:
                return report(Totals(), ledger, registry.tables, turn.ended)
            deadline = _deadline(max_seconds)
        start = continuity(connection, pipeline, registry.pipeline, ledger)
        # Settings change under a running pipeline: as a synchronous standby we would hold up the source's commits.
        refuse_errors(server_problems(connection, pipeline.source.slot, [APPLICATION_NAME]))
        options = ReaderOptions(
            conninfo,
            pipeline.source.slot,
            (pipeline.source.publication, inserts_name(pipeline.source.publication)),
            start,
            source.version,
            pipeline.replicate.memory,
            pipeline.replicate.spill,
            binary=may_be_binary(registry.tables),
            announce_from=stage_from,
            hiding=None,
        )
        asking = held.enter_context(contextlib.closing(Session(pipeline.conninfo, connection, "headwater replicate")))
        tables = Tables(pipeline, registry, asking, ledger, binary=options.binary)
        watch = CatalogWatch(pipeline, lambda: registry.tables)
        tables.files_seen = watch.files_seen
        successor = SuccessorWatch(pipeline.source.slot)
        load_works = partial(lease.is_held, registry=registry, name=lease.LOAD)
        publisher = Publisher(
            root, conninfo, position, tables.owners, watch, successor, CeilingWatch(pipeline, load_works)
        )
        preapply = Staging(root, pipeline.replicate.spill, tables.stageable)
        with (
            LogReader(options, publisher.arrived, pipeline.conninfo, turn.reader, preapply.announced) as reader,
            contextlib.closing(preapply),
        ):
            turn.begins()
            # Reads the registry again: what a load or a reload asks for is known before the first batch.
            lease.refuse_if_held(connection, registry, lease.SET_UP)
            refuse_late_text(registry.tables, binary=options.binary)

            def hide() -> None:
                reader.hide(hiding(pipeline, registry.tables.values()))

            hide()
            ledger.begin_generation(position.at(start))
            # No generation is given twice, and what earlier drivers have published is durable from here on.
            sync_lake(root)
            durability = Durability(root, partial(_confirm, reader))
            durability.start(ledger.newest.position.lsn if ledger.newest is not None else 0)
            held.callback(durability.close)
            follow(connection, pipeline, ledger, registry, position, start)
            registry.upgrade()  # a driver of an older Headwater, which would end now, is out already
            reach("replicate.after_generation")
            preapply.begin(ledger.generation, reader.spill_folder, lambda: _is_behind(pipeline, reader))
            tables.use(preapply)
            handovers = Handovers(asking, registry)
            handovers.finish()
            following = partial(
                Following,
                root,
                registry,
                tables,
                asking,
                ledger.generation,
                SpillStore(reader.spill_folder, pipeline.replicate.spill),
                hide,
            )
            driver = Driver(
                pipeline,
                ledger,
                tables,
                publisher,
                reader,
                position,
                watch,
                handovers,
                successor,
                following,
                asking.ask,
                durability,
            )
            # Reading every table's history takes its time: not for a run that is to end.
            if stop.is_set():
                return driver.report("signal")
            if not tables.resume(session, turn.tables, stop.wait, damaged):
                return driver.report("signal")
            # What fell silent while no driver ran is known before anything is said to be in step again.
            watch.look(connection)
            # To be ready took its time: a short slice may be over before the sampler looks for the first time.
            successor.look(connection)
            sample = take_sample(connection)  # before the target: who has reached that holds all it speaks of
            target = _target(connection, until, position)
            with (
                contextlib.closing(tables),
                publisher.running(
                    ledger, reader, driver.rates, tables.retries.shown, lambda: durability.position, sample
                ),
            ):
                reason = driver.run(target, deadline, stop)
                reach("replicate.before_release")
                reader.release()  # whoever comes next need not wait for us to tidy up
    return driver.report(reason)


def _confirm(reader: LogReader, lsn: int) -> None:
    reach("replicate.before_confirm")
    reader.confirm(lsn)
    reach("replicate.after_confirm")


def _deadline(max_seconds: float | None) -> float | None:
    return time.monotonic() + max_seconds if max_seconds is not None else None


def _is_behind(pipeline: Pipeline, reader: LogReader) -> bool:
    """Whether more waits than a batch takes."""
    waiting, limits = reader.waiting(), pipeline.replicate
    changes, size = sum(chunk.changes for chunk in waiting), sum(chunk.size for chunk in waiting)
    return changes > limits.max_rows or size > limits.max_bytes


def _target(connection: Connection, until: str | None, position: Position) -> int | None:
    if until is None:
        return None
    # The marker is written after the slot was taken: the log will certainly pass it.
    marker = emit_marker(connection)
    return marker if until == "now" else parse_lsn(until)
