"""What a running driver does because others did something: jobs that wrote into the registry, somebody who changed the
source's catalog, somebody who wrote to a table."""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import Final

from headwater.errors import HeadwaterError, SourceUnreachable, Transient
from headwater.replicate.batches.batch import Batch
from headwater.replicate.run import Run
from headwater.source.stream import RECONNECT_SECONDS

log = logging.getLogger(__name__)

_PATIENCE: Final = 0.2


def obey(run: Run) -> None:
    """At every turn of the loop; each of these looks only when its time has come."""
    try:
        _suspend_found(run)
    except SourceUnreachable as reason:  # what was found is kept, and met at the next turn
        log.debug("partitions that the catalog showed wait for the source: %s", reason)  # the reader tells of it
    _look_at_tables(run)
    again = run.reader.started_again
    if run.following.follow_if_due(again):
        run.publisher.states(run.tables.records)
    if again and run.following.may_read_on:
        run.reader.read_on(again)


def look_behind(run: Run, batch: Batch) -> None:
    """What the catalog says of DDL in the batch, before its rows are decoded.

    As often as it takes to reach the catalog, for as long as the reader would try: the batch is not applied without a
    look, and its rows come again if the driver ends here. A relation that was described once more is most often one
    that was vacuumed, and one described for the first time most often as it was: then one attempt is enough.
    """
    if (ddl := batch.ddl) is None:
        return
    look = partial(run.watch.look_behind, ddl, batch.transactions().xid.tolist())
    deadline = time.monotonic() + RECONNECT_SECONDS
    while True:
        try:
            run.source.ask(look)
            break
        except Transient as reason:
            if not ddl.is_told:
                return
            if time.monotonic() > deadline:
                raise
            log.warning("the source's catalog could not be read behind DDL, trying again: %s", reason)
            time.sleep(_PATIENCE)
    _suspend_found(run)


def remember_columns(run: Run) -> None:
    """At the end: what was there before any column that the next driver finds."""
    with contextlib.suppress(HeadwaterError):  # a source that shuts down is not waited for
        run.source.ask(run.watch.look)
    run.tables.columns.remember(dict.fromkeys(run.tables.records, ()))


def _suspend_found(run: Run) -> None:
    """Suspend what the catalog watch has found, and note what it has seen of partitions: the log itself would never say
    it."""
    run.tables.columns.remember(run.watch.learned())
    for name, names in run.watch.renamed().items():
        run.tables.owners.meet_names(name, names)
    found = [run.tables.states.suspend(name, error) for name, error in run.watch.take()]
    if any(moved := [run.tables.owners.meet_moved(*one) for one in run.watch.moved()]):
        with contextlib.suppress(HeadwaterError):  # a later look does the same
            run.source.ask(run.watch.look)  # what they brought to where they are now
    found += moved
    run.tables.owners.saw_empty(run.watch.attached_empty())
    try:
        found.append(run.tables.owners.meet_attached(run.watch.attached()))
        run.tables.owners.meet_empty(run.processed)
    finally:
        if any(found):
            run.publisher.states(run.tables.records)
            run.publisher.write()


def _look_at_tables(run: Run) -> None:
    """Another program may have written to a table whose rows nobody changes at the source: the next commit would
    notice, and there may be none for days."""
    for name in run.rounds.due(lambda: list(run.tables.records)):
        # A lane at work looks for itself.
        idle = run.tables.states.is_followed(name) and run.lanes.is_idle(name)
        if idle and run.tables.foreign.has_news(name):
            run.lanes.behind(name, partial(run.tables.foreign.look_at_others, name))
