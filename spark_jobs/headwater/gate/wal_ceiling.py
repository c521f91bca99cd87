"""`source.wal_ceiling`: how much of its log the source may keep for a pipeline before the pipeline gives way.

A slot that nobody reads keeps the log until the source's disk is full, and then the source stands still. Past the
ceiling the slot is given up instead. Whoever looks at the source sees to it: a driver, `status`, a waiting sensor, the
pages. So it needs no driver; but where nothing of all this runs, only the server's own `max_slot_wal_keep_size` helps.

What happened is written into every table's record, so that all who wait learn of it at once, and why.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from headwater.errors import LostLease, SlotGap
from headwater.gate.drivers import is_gone
from headwater.pipeline_file.pipeline import Pipeline
from headwater.pipeline_file.quantities import size_text
from headwater.source.connection import Connection, connect, identify
from headwater.source.slot import PLUGIN, SlotState, drop_slot, read_slot

if TYPE_CHECKING:
    from headwater.lake.registry import TableRecord

log = logging.getLogger(__name__)

REMEDY: Final = (
    "headwater verify PIPELINE.yaml --repair makes a new slot, compares, and writes only what differs; headwater load "
    "PIPELINE.yaml --again loads all tables again instead"
)
"""Of a slot that is lost."""
BY_ITSELF: Final = "headwater replicate PIPELINE.yaml compares and repairs by itself (source.on_slot_loss: repair)"
_WARN_SHARE: Final = 0.5
_WARN_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 5.0
_WORSE: Final = 1.1
_RELEASE_SECONDS: Final = 10.0
_LOOK_PAUSE: Final = 0.1


def ceiling_problem(slot: SlotState | None, ceiling: int | None) -> SlotGap | None:
    """Why the slot has to be given up; None while it need not be."""
    kept = slot.retained_wal_bytes if slot is not None else None
    if kept is None or ceiling is None or kept <= ceiling:
        return None
    return SlotGap(
        f"the source keeps {size_text(kept)} of its log for the slot, more than source.wal_ceiling "
        f"({size_text(ceiling)}) allows: the slot is given up",
        code="wal_ceiling",
        where=f"replication slot {slot.name}" if slot is not None else "",
        remedy=REMEDY,
    )


def give_up_if_beyond(connection: Connection, pipeline: Pipeline, slot: SlotState | None) -> SlotState | None:
    """`slot` as it stands afterwards: None when it was given up. One that is being read is its reader's to give up,
    also while that connects again, and while a load works none is.

    Never raises: whoever looks came for something else. What could not be done is said in the log, and by the next
    who looks.
    """
    problem = ceiling_problem(slot, pipeline.source.wal_ceiling)
    if problem is None or slot is None or slot.active or slot.plugin != PLUGIN:
        return slot
    if slot.database != connection.info.dbname:
        return slot
    try:
        given_up = give_up(connection, pipeline, problem, partial(is_gone, connection, pipeline.lake_path(), slot))
        return None if given_up else slot
    except LostLease:
        return slot  # somebody has begun to read it, or a load works
    except Exception as error:
        log.error("%s; that failed: %s", problem.message, error)
        return slot


def give_up(
    connection: Connection, pipeline: Pipeline, problem: SlotGap, may: Callable[[], bool] = lambda: True
) -> bool:
    """Drop the slot, then suspend the tables that followed it. False, and nothing done, where the slot is not that of
    the lake, or it `may` not be, which is asked last; LostLease while somebody reads it or a load works."""
    from headwater.gate.lease import LOAD, refuse_if_held  # reads Delta tables: waiting sensors start without that
    from headwater.lake.registry import Registry

    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    known, now = registry.pipeline if registry is not None else None, identify(connection)
    if registry is None or known is None or now.in_recovery:
        return False
    if (known.slot, known.system_id, known.timeline) != (pipeline.source.slot, now.system_id, now.timeline):
        return False
    refuse_if_held(connection, registry, LOAD)
    if not may():
        return False
    if ceiling_problem(read_slot(connection, pipeline.source.slot), pipeline.source.wal_ceiling) is None:
        return False  # it has moved on since, or it is another one
    drop_slot(connection, pipeline.source.slot)
    log.error("%s. What to do: %s", problem.message, problem.remedy)

    def suspended(record: TableRecord) -> TableRecord | None:
        return record.entered("suspended", problem.message, problem.remedy) if record.is_followed else None

    for name in list(registry.tables):
        registry.change(name, suspended)
    return True


@contextlib.contextmanager
def giving_up(pipeline: Pipeline) -> Iterator[None]:
    """For a driver: when the block ends with what `ceiling_problem` says, and with it its hold of the slot, the slot
    is given up."""
    try:
        yield
    except SlotGap as problem:
        if problem.code == "wal_ceiling":
            try:
                with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater replicate")) as own:
                    _give_up_when_free(own, pipeline, problem)
            except Exception as error:  # it must not hide why the driver ends
                log.error("the slot could not be given up: %s", error)
        raise


def _give_up_when_free(connection: Connection, pipeline: Pipeline, problem: SlotGap) -> None:
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            give_up(connection, pipeline, problem)
            return
        except LostLease:  # our own walsender has not ended yet
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_PAUSE)


class CeilingWatch:
    """The running driver's eye on its slot. A driver that starts with more than the ceiling, since nobody has looked or
    a load took its time, may catch up: it ends when it falls further behind."""

    def __init__(self, pipeline: Pipeline, load_works: Callable[[Connection], bool]) -> None:
        """`load_works`: whether one does, as far as the source knows."""
        self._slot, self._ceiling = pipeline.source.slot, pipeline.source.wal_ceiling
        self._load_works = load_works
        self._least: int | None = None
        self._next_look = self._next_word = self._next_word_beside = 0.0

    def look(self, connection: Connection) -> SlotGap | None:
        """Why the driver has to end. Asks the source only where there is a ceiling and some seconds have passed."""
        now = time.monotonic()
        if self._ceiling is None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        problem = self.judge(read_slot(connection, self._slot), now)
        if problem is not None and self._load_works(connection):
            # The load needs the slot, which stays until it has ended: nobody but this driver can let go of the log.
            if now >= self._next_word_beside:
                self._next_word_beside = now + _WARN_SECONDS
                log.warning(
                    "%s when the load that works has ended, unless replicate has caught up by then", problem.message
                )
            return None
        return problem

    def judge(self, slot: SlotState | None, now: float) -> SlotGap | None:
        """The same of `slot` as it was at `now`, of a monotonic clock."""
        kept = slot.retained_wal_bytes if slot is not None else None
        if kept is None or self._ceiling is None:
            return None
        self._least = kept if self._least is None else min(self._least, kept)
        if kept > self._ceiling * _WARN_SHARE and now >= self._next_word:
            self._next_word = now + _WARN_SECONDS
            log.warning(
                "the source keeps %s of its log for the slot; past %s (source.wal_ceiling) it is given up",
                size_text(kept),
                size_text(self._ceiling),
            )
        catching_up = self._least > self._ceiling and kept <= self._least * _WORSE
        return None if catching_up else ceiling_problem(slot, self._ceiling)
