"""`headwater replicate`: the way of the data, from the log to the confirmed position.

Chunks of whole transactions become a batch; each table's share of it is netted, planned and committed in that table's
lane (`headwater.replicate.tables`). When every table holds the batch: the ledger row, then the position file, and when
that row is on disk the source is told: the source is the retry log. Successive batches overlap, each table at its own
speed; this order does not change. What is made ready before, and in which order: `headwater.replicate.start`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from headwater.errors import Fenced
from headwater.failpoints import reach
from headwater.log.large import STAGE_FROM
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.batches.open_epochs import OpenEpoch
from headwater.replicate.batches.stage_times import RowTimes
from headwater.replicate.ending import idle_row_is_due, leave, leave_open, outages, why_stop
from headwater.replicate.others import look_behind, obey
from headwater.replicate.run import PATIENCE, Run, Wish
from headwater.replicate.start import start

log = logging.getLogger(__name__)


def replicate(
    pipeline: Pipeline,
    until: str | None,
    max_seconds: float | None,
    stop: threading.Event,
    take_over: bool = False,
    *,
    overtime: float = 0.0,
    stage_from: int = STAGE_FROM,
) -> dict[str, Any]:
    """Replicate until `until` ("now", an LSN), `max_seconds`, or `stop`. The JSON of interface "replicate".

    `take_over`: make everything ready beside a driver that runs, and have it hand over; `max_seconds` bounds the wait
    for that, and counts anew from then on. `overtime`: seconds that it goes on longer while nobody takes over.
    `stage_from`: bytes of an open transaction from which on it is worked on before its commit, 0: never.
    """
    with start(pipeline, Wish(until, max_seconds, stop, take_over, overtime, stage_from)) as run:
        if not isinstance(run, Run):
            return run  # its report: it was over before it began
        reason = _drive(run)
        reach("replicate.before_release")
        run.reader.release()  # whoever comes next need not wait for us to tidy up
    return run.report(reason)


def _drive(run: Run) -> str:
    """Batches until there is a reason to stop, which is returned."""
    try:
        with outages(run):
            run.following.begin(run.processed)
            with run.lanes:
                run.following.start(run.lanes, lambda: run.processed)
                run.publisher.states(run.tables.records)
                return _loop(run)
    except Fenced as fenced:
        log.warning("%s", fenced)
        return "fenced"


def _loop(run: Run) -> str:
    while True:
        obey(run)
        _publish(run)
        run.minutes.say(run)
        if (reason := why_stop(run)) is not None and not run.open_epochs:
            _rest(run, force=True)
            return leave(run, reason)
        if reason is not None and run.lanes.only_resting:
            return leave_open(run, reason)
        if reason is not None:
            run.lanes.wait(PATIENCE)  # only what has begun is brought to its end
            continue
        run.await_log()
        run.handovers.finish_if_due()
        if (batch := run.sealing.next_batch()) is not None:
            look_behind(run, batch)
            shares = run.tables.shares.of(batch)
            epoch = run.open_epochs.begin(batch, shares, time.monotonic())
            # In its table's lane each share is netted, planned, and committed together with its position.
            run.lanes.submit(epoch.number, shares, batch.transactions())
        elif not run.open_epochs:
            _rest(run, force=run.reader.reply_wanted)
            run.keep_up_idle()


def _publish(run: Run) -> None:
    """What the lanes have done; a row of what every table holds."""
    for done in run.lanes.take_done():
        run.note(done)
    epoch = run.open_epochs.publishable()
    if epoch is None:
        return
    reach("replicate.after_all_tables")
    run.passed(epoch)
    if run.tables.next_row.waits_for(epoch.lsn):
        _publish_row(run, epoch.lsn, epoch)
        return
    run.publisher.passed(epoch.lsn)
    if not run.open_epochs:
        _rest(run, force=False)
    if epoch.demand:
        run.publisher.write()  # somebody waits for exactly this position


def _publish_row(run: Run, lsn: int, epoch: OpenEpoch | None) -> None:
    """`epoch`: what the row is of; None: of an idle log."""
    tables, next_row = run.tables, run.tables.next_row
    next_row.adopt(lsn)
    if next_row.must_wait(lsn):
        return
    tables.joining.join_cuts(lsn)
    reach("replicate.before_ledger")
    times = RowTimes(epoch, run.sampler.clock_offset, run.oldest)
    if tables.foreign.suspend_replaced(next_row.touched()):
        run.publisher.states(tables.records)
    written = next_row.touched()
    row = run.ledger.publish(  # 1. the truth
        run.log_of.at(lsn),
        written,
        all_tables=next_row.versions(),
        source_time=epoch.source_time if epoch is not None else None,
        sample=run.publisher.last_sample,
        stages=times.stages,
        lag=times.lag,
    )
    next_row.written(written)
    reach("replicate.after_ledger")
    run.published(row, times)
    run.publisher.published(row, tables.records, is_idle=epoch is None and not written)  # 2. what pollers read
    reach("replicate.after_position_file")
    run.durability.published(lsn)  # 3. the source is told, as soon as all that is on disk
    run.keep_up(written)  # behind it: files and checkpoints


def _rest(run: Run, *, force: bool) -> None:
    """Nothing is to be applied: ledger and slot follow a log that moved all the same."""
    if idle_row_is_due(run, force=force):
        _publish_row(run, run.processed, None)
    elif force:
        run.durability.hurry()  # a server that shuts down waits for what the ledger holds
