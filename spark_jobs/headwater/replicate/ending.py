"""When a run is over, how it ends, and when the row of an idle log is due."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from deltalake.exceptions import DeltaError

from headwater.errors import LostLease, SlotGap
from headwater.lake.looks import often
from headwater.replicate.batches.retries import outage, reason_of
from headwater.replicate.others import remember_columns
from headwater.replicate.run import Run

log = logging.getLogger(__name__)


def why_stop(run: Run) -> str | None:
    """In the interface's words; None: go on. Raises what another thread of this driver has failed with."""
    for failure in (run.sampler.failure, run.durability.failure):
        if failure is not None:
            raise failure
    if run.stop.is_set():
        return "signal"
    if run.following.paused:
        return "paused"
    idle = run.reader.idle_position if not run.open_epochs else None
    reached = max(run.processed, idle or 0)
    behind = run.tables.joining.catching_up or run.tables.next_row.must_wait(reached)
    if run.target is not None and reached >= run.target and not behind:
        return "until"
    return run.successor.why_stop(run.target, run.deadline)


def idle_row_is_due(run: Run, *, force: bool) -> bool:
    """Nothing is to be applied: ledger and slot follow a log that moved, now and then unless forced."""
    idle = run.reader.idle_position
    if idle is not None:
        run.processed = max(run.processed, idle)
    newest = run.ledger.newest
    moved = newest is None or run.processed > newest.position.lsn
    # Tables found ahead of the ledger (after a crash) are published as soon as the log has reached them; one that
    # joins the cuts need not wait until the log of an idle source moves: two rows may say the same position.
    waiting = run.tables.next_row.waits_for(run.processed)
    due = newest is None or time.monotonic() - run.last_row >= often(run.root).idle_row
    return waiting or (moved and (force or due))


def leave(run: Run, reason: str) -> str:
    """All that was begun is published: what the next run and those who wait want to know."""
    remember_columns(run)
    run.durability.settle()
    run.publisher.end()
    return reason


def leave_open(run: Run, reason: str) -> str:
    """Nothing is lost: as after a crash the next run begins at the ledger's position."""
    log.warning("stopped (%s) while tables are tried again: %s", reason, ", ".join(run.tables.retries.shown()))
    return reason


@contextlib.contextmanager
def outages(run: Run) -> Iterator[None]:
    """What concerns the whole lake, and no table alone, ends the run as an outage. Fenced, where a successor has the
    slot, or has moved it on."""
    try:
        yield
    except (SlotGap, LostLease):
        run.ledger.check_fence()
        raise
    except ConnectionError:
        raise  # to a process of ours
    except (OSError, DeltaError) as error:
        raise outage(reason_of(error), run.root) from error
