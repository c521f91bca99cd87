"""From a pipeline file to a driver that may write: what is made ready, and why in this order.

1. What a power cut has left half done goes, before anything of the lake is read. While the source shows a driver that
   does not work on this lake, nothing tells what was durable: then it goes as soon as the slot is free.
2. A source that is another one, or unfit, is refused before anything is changed.
3. The slot is taken: another `replicate` that has it means exit 1. From here on only one driver is at work.
4. The generation is raised, which is the fence: whoever thought to be the driver before commits nothing any more.
5. The lake is synced: what earlier drivers have published is durable, and no generation is given twice.
6. Only then the tables are read: nobody else changes them now.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headwater.columns.hidden import hiding
from headwater.columns.log_format import may_be_binary, refuse_late_text
from headwater.errors import Refused
from headwater.failpoints import reach
from headwater.gate import lease
from headwater.gate.check import APPLICATION_NAME
from headwater.gate.drivers import not_mended
from headwater.gate.recovery import await_lost_driver, mended_lake, mended_registry
from headwater.gate.renamed import renamed_problems
from headwater.gate.wal_ceiling import CeilingWatch, giving_up
from headwater.lake.durability import Durability, sync_lake
from headwater.lake.ledger import Ledger
from headwater.lake.looks import often
from headwater.lake.registry import Registry
from headwater.load.handover import Handovers
from headwater.log.spill import SpillStore
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position, parse_lsn
from headwater.replicate.batches.lanes import Lanes, lanes_for
from headwater.replicate.batches.open_epochs import OpenEpochs
from headwater.replicate.batches.pace import Pace
from headwater.replicate.batches.stage_times import ApplyRate
from headwater.replicate.beside.answers import Answers
from headwater.replicate.beside.following import Following
from headwater.replicate.catalog_watch.watch import CatalogWatch
from headwater.replicate.minutes import Minutes
from headwater.replicate.pausing import await_resumption
from headwater.replicate.pending import Pending
from headwater.replicate.preapply.decide import Staging
from headwater.replicate.publisher import Publisher
from headwater.replicate.reader.handle import LogReader, ReaderOptions
from headwater.replicate.reader.silence import Silence, silence_limit
from headwater.replicate.rounds import Rounds
from headwater.replicate.run import Run, Totals, Wish, report
from headwater.replicate.sampler import Sampler, sample_with_offset
from headwater.replicate.sealing import Sealing
from headwater.replicate.tables.tables import Tables
from headwater.replicate.takeover.continuity import continuity, follow
from headwater.replicate.takeover.new_source import same_or_followed
from headwater.replicate.takeover.succession import SuccessorWatch
from headwater.replicate.takeover.warm_up import Turn, taking_over
from headwater.source.connection import Connection, Session, connect
from headwater.source.problems import refuse_errors
from headwater.source.publication.publication import inserts_name
from headwater.source.samples import emit_marker
from headwater.source.settings import server_problems
from headwater.spark.session import JobSpark, SparkOnDemand

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is known when the slot may be taken. `damaged`: tables and histories that are, and why, None: the lake is
    not mended; `turn`: how this driver came to the slot; `spark`: a session, for whoever needs one."""

    pipeline: Pipeline
    wish: Wish
    deadline: float | None
    connection: Connection
    registry: Registry
    ledger: Ledger
    server_version: int
    log_of: Position
    damaged: Mapping[str, str] | None
    turn: Turn
    spark: SparkOnDemand

    @property
    def root(self) -> str:
        return self.pipeline.lake_path()

    def over(self, reason: str) -> dict[str, Any]:
        """The report of a run that has done nothing."""
        return report(Totals(), self.ledger, self.registry.tables, reason)


@contextlib.contextmanager
def start(pipeline: Pipeline, wish: Wish) -> Iterator[Run | dict[str, Any]]:
    """The run, inside the block; or the report of one that was over before it began: paused all the time, not its turn
    in time, stopped while it got ready."""
    deadline, registry = wish.deadline(), _loaded(pipeline)
    spark = JobSpark(pipeline.name, "replicate", pipeline.lake_path()).start
    # Before it is a driver: what it would hold then, others may need while nobody replicates.
    ended = await_resumption(registry, wish.until, deadline, wish.stop)
    if ended is not None:
        yield report(Totals(), Ledger(pipeline.lake_path(), pipeline.name), registry.tables, ended)
        return
    with ExitStack() as held:
        connection = connect(pipeline.conninfo(), application_name="headwater replicate")
        held.callback(connection.close)
        if wish.take_over:
            await_lost_driver(connection, pipeline, wish.stop)
        damaged = mended_lake(connection, pipeline, registry)
        if damaged is not None:  # who holds that lock tells others that the lake is mended
            held.enter_context(not_mended(pipeline.lake_path()))
        ledger = Ledger(pipeline.lake_path(), pipeline.name)
        source = same_or_followed(connection, pipeline, registry, ledger)
        assert registry.pipeline is not None
        refuse_errors(renamed_problems(pipeline, registry.pipeline))
        log_of = Position(source.system_id, source.timeline, 0)
        opened = _Opened(
            pipeline, wish, deadline, connection, registry, ledger, source.version, log_of, damaged, Turn(), spark
        )
        held.enter_context(giving_up(pipeline))
        if wish.take_over:
            # A successor that would be refused must not end a driver that works.
            _refuse_unfit(opened)
            turn = held.enter_context(taking_over(pipeline, registry, ledger, spark, wish.stop, deadline))
            opened, ended = replace(opened, turn=turn, deadline=wish.deadline()), turn.ended
        if ended is not None:
            yield opened.over(ended)
        else:
            yield held.enter_context(_driving(_mended(opened, held)))


def _mended(opened: _Opened, held: ExitStack) -> _Opened:
    """Behind what could not be mended before the slot was free; until then nobody was told anything."""
    if opened.damaged is not None:
        return opened
    pipeline, registry = opened.pipeline, opened.registry
    assert registry.pipeline is not None
    while (damaged := mended_lake(opened.connection, pipeline, registry)) is None:
        continuity(opened.connection, pipeline, registry.pipeline, opened.ledger)  # who has the slot, or how it is lost
        time.sleep(_LOOK_SECONDS)  # free only since we looked
    held.enter_context(not_mended(opened.root))
    # What was read ahead may be of versions that are gone.
    turn = replace(opened.turn, tables=None)
    return replace(opened, damaged=damaged, ledger=Ledger(opened.root, pipeline.name), turn=turn)


@contextlib.contextmanager
def _driving(opened: _Opened) -> Iterator[Run | dict[str, Any]]:
    """From taking the slot on."""
    pipeline, registry, ledger, root = opened.pipeline, opened.registry, opened.ledger, opened.root
    known = registry.pipeline
    assert known is not None  # or the start was refused
    begin = continuity(opened.connection, pipeline, known, ledger)
    # Settings may have changed since the load: as a synchronous standby this driver would hold up the source's commits.
    _refuse_unfit(opened)
    options = _reader_options(opened, begin)
    with (
        contextlib.closing(Session(pipeline.conninfo, opened.connection, "headwater replicate")) as source,
        ExitStack() as behind,
    ):
        tables = Tables(pipeline, registry, source, ledger, binary=options.binary)
        watch = CatalogWatch(pipeline, lambda: registry.tables)
        tables.files_seen, tables.columns_seen = watch.files_seen, watch.columns_seen
        pending = Pending(tables.owners.of)
        preapply = Staging(root, pipeline.replicate.spill, tables.owners.stageable)
        tables.use(preapply)
        with (
            LogReader(options, pending.arrived, pipeline.conninfo, opened.turn.reader, preapply.announced) as reader,
            contextlib.closing(preapply),
        ):
            hide = partial(_hide, reader, pipeline, registry)
            _fence(opened, begin, hide, binary=options.binary)
            reader.confirm(begin)  # only now: what the driver before this one has published may not have been on disk
            durability = Durability(root, partial(_confirm, reader))
            durability.start(ledger.newest.position.lsn if ledger.newest is not None else 0)
            behind.callback(durability.close)  # once the slot is free: a lake that hangs does not keep it
            follow(opened.connection, pipeline, ledger, registry, opened.log_of, begin)
            registry.upgrade()  # a driver of an older Headwater, which would end now, is out already
            reach("replicate.after_generation")
            preapply.begin(ledger.generation, reader.spill_folder, partial(_is_behind, reader, pipeline))
            handovers = Handovers(source, registry)
            handovers.finish()
            limit = source.ask(silence_limit)
            silence = Silence(reader, source, pipeline.source.slot, limit, opened.wish.stop)
            spill = SpillStore(reader.spill_folder, pipeline.replicate.spill)
            answers = Answers(registry, source, ledger.generation, ledger.check_fence)
            following = Following(root, registry, tables, answers, spill, hide, silence.refuse)
            # Reading every table's history takes its time: not for a run that is to end.
            stop = opened.wish.stop
            if stop.is_set() or not tables.resume(opened.spark, opened.turn.tables, stop.wait, opened.damaged or {}):
                yield opened.over("signal")
                return
            successor = SuccessorWatch(pipeline.source.slot, opened.wish.overtime, opened.turn.claim)
            # What fell silent while no driver ran is known before anything is said to be in step again.
            watch.look(opened.connection)
            # To be ready took its time: a short slice may be over before the sampler looks for the first time.
            successor.look(opened.connection)
            # Before the target: who has reached that holds all it speaks of.
            sample, clock_offset = sample_with_offset(opened.connection)
            target = _target(opened)
            lanes = Lanes(partial(tables.shares.apply, still_alive=silence.refuse), reader.wake, *lanes_for(root))
            open_epochs, speed = OpenEpochs(), ApplyRate(time.monotonic())
            publisher = Publisher(root, ledger, reader, pending, durability, speed, tables.retries, sample)
            ceiling = CeilingWatch(pipeline, partial(lease.is_held, registry=registry, name=lease.LOAD))
            sampler = Sampler(
                pipeline, opened.log_of, reader, pending, publisher, watch, successor, ceiling, clock_offset
            )
            run = Run(
                root=root,
                log_of=opened.log_of,
                reader=reader,
                silence=silence,
                tables=tables,
                lanes=lanes,
                open_epochs=open_epochs,
                sealing=Sealing(pipeline.replicate, reader, lanes, open_epochs, _pace(pipeline)),
                ledger=ledger,
                publisher=publisher,
                sampler=sampler,
                durability=durability,
                source=source,
                watch=watch,
                following=following,
                handovers=handovers,
                successor=successor,
                speed=speed,
                minutes=Minutes(pipeline.name),
                rounds=Rounds(often(root).idle_tables),
                target=target,
                deadline=opened.deadline,
                stop=stop,
                processed=ledger.newest.position.lsn if ledger.newest else 0,
            )
            with contextlib.closing(tables), contextlib.closing(following), sampler.running():
                yield run


def _pace(pipeline: Pipeline) -> Pace:
    limits = pipeline.replicate
    bearable = min(often(pipeline.lake_path()).batch, limits.max_seconds)
    return Pace(bearable if limits.min_seconds is None else limits.min_seconds, limits.max_seconds)


def _loaded(pipeline: Pipeline) -> Registry:
    registry = mended_registry(pipeline)
    if registry is None or registry.pipeline is None or not any(r.holds_rows for r in registry.tables.values()):
        raise Refused(
            "no table is loaded",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    return registry


def _refuse_unfit(opened: _Opened) -> None:
    refuse_errors(server_problems(opened.connection, opened.pipeline.source.slot, [APPLICATION_NAME]))


def _reader_options(opened: _Opened, begin: int) -> ReaderOptions:
    source, limits = opened.pipeline.source, opened.pipeline.replicate
    return ReaderOptions(
        opened.pipeline.conninfo(),
        source.slot,
        (source.publication, inserts_name(source.publication)),
        begin,
        opened.server_version,
        limits.memory,
        limits.spill,
        binary=may_be_binary(opened.registry.tables),
        announce_from=opened.wish.stage_from,
        hiding=None,
        log_of=(opened.log_of.system_id, opened.log_of.timeline),
    )


def _fence(opened: _Opened, begin: int, hide: Callable[[], None], *, binary: bool) -> None:
    """The slot is ours: nobody else writes from now on, and what is there is on disk."""
    opened.turn.begins()
    # Reads the registry again: what a load or a reload asks for is known before the first batch.
    lease.refuse_if_held(opened.connection, opened.registry, lease.SET_UP)
    refuse_late_text(opened.registry.tables, binary=binary)
    hide()
    opened.ledger.begin_generation(opened.log_of.at(begin))
    # And once more: what was asked for before this generation began, and is not seen here, no older driver answers.
    if opened.registry.refresh():
        refuse_late_text(opened.registry.tables, binary=binary)
        hide()
    # No generation is given twice, and what earlier drivers have published is durable from here on.
    sync_lake(opened.root)


def _confirm(reader: LogReader, lsn: int) -> None:
    reach("replicate.before_confirm")
    reader.confirm(lsn)
    reach("replicate.after_confirm")


def _hide(reader: LogReader, pipeline: Pipeline, registry: Registry) -> None:
    reader.hide(hiding(pipeline, list(registry.tables.values())))


def _is_behind(reader: LogReader, pipeline: Pipeline) -> bool:
    """Whether more waits than a batch takes."""
    (changes, size), limits = reader.backlog(), pipeline.replicate
    return changes > limits.max_rows or size > limits.max_bytes


def _target(opened: _Opened) -> int | None:
    until = opened.wish.until
    if until is None:
        return None
    # The marker is written after the slot was taken: the log will certainly pass it.
    marker = emit_marker(opened.connection)
    return marker if until == "now" else parse_lsn(until)
