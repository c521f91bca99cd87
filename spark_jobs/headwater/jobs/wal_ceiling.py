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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from headwater.config import Pipeline
from headwater.errors import HeadwaterError, LostLease, SlotGap
from headwater.source.connection import Connection, connect
from headwater.source.slot import PLUGIN, SlotState, drop_slot, read_slot

if TYPE_CHECKING:
    from headwater.lake.registry import TableRecord

log = logging.getLogger(__name__)

REMEDY: Final = "headwater load PIPELINE.yaml --again loads all tables anew, with a new slot"
_WARN_SHARE: Final = 0.5
_WARN_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 5.0
_RELEASE_SECONDS: Final = 10.0
_LOOK_PAUSE: Final = 0.1
_FOLLOWED: Final = ("active", "catching up")


def ceiling_problem(slot: SlotState | None, ceiling: int | None) -> SlotGap | None:
    """Why the slot has to be given up; None while it need not be."""
    kept = slot.retained_wal_bytes if slot is not None else None
    if kept is None or ceiling is None or kept <= ceiling:
        return None
    return SlotGap(
        f"the source keeps {_size(kept)} of its log for the slot, more than source.wal_ceiling ({_size(ceiling)}) "
        "allows: the slot is given up",
        code="wal_ceiling",
        where=f"replication slot {slot.name}" if slot is not None else "",
        remedy=REMEDY,
    )


def give_up_if_beyond(connection: Connection, pipeline: Pipeline, slot: SlotState | None) -> SlotState | None:
    """`slot` as it stands afterwards: None when it was given up. One that is being read is its reader's to give up.

    Never raises: whoever looks came for something else. A slot that could not be dropped is said in the log, and by
    the next who looks.
    """
    problem = ceiling_problem(slot, pipeline.source.wal_ceiling)
    if problem is None or slot is None or slot.active or slot.plugin != PLUGIN:
        return slot
    if slot.database != connection.info.dbname:
        return slot
    try:
        give_up(connection, pipeline, problem)
    except LostLease:
        return slot  # somebody has begun to read it
    except HeadwaterError as error:
        log.error("%s, and that failed: %s", problem.message, error.message)
        return slot
    return None


def give_up(connection: Connection, pipeline: Pipeline, problem: SlotGap) -> None:
    """Drop the slot, then suspend the tables that followed it. LostLease while somebody reads it."""
    from headwater.lake.registry import Registry  # reads Delta tables: waiting sensors start without that

    drop_slot(connection, pipeline.source.slot)
    log.error("%s. What to do: %s", problem.message, problem.remedy)
    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    if registry is None:
        return

    def suspended(record: TableRecord) -> TableRecord | None:
        return record.entered("suspended", problem.message, problem.remedy) if record.state in _FOLLOWED else None

    for name in list(registry.tables):
        registry.change(name, suspended)


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
            except HeadwaterError as error:
                log.error("the slot could not be given up: %s", error.message)
        raise


def _give_up_when_free(connection: Connection, pipeline: Pipeline, problem: SlotGap) -> None:
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        try:
            return give_up(connection, pipeline, problem)
        except LostLease:  # our own walsender has not ended yet
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_PAUSE)


class CeilingWatch:
    """The running driver's eye on its slot."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._slot, self._ceiling = pipeline.source.slot, pipeline.source.wal_ceiling
        self._next_look = self._next_word = 0.0

    def look(self, connection: Connection) -> SlotGap | None:
        """Why the driver has to end. Asks the source only where there is a ceiling and some seconds have passed."""
        now = time.monotonic()
        if self._ceiling is None or now < self._next_look:
            return None
        self._next_look = now + _LOOK_SECONDS
        slot = read_slot(connection, self._slot)
        kept = slot.retained_wal_bytes if slot is not None else None
        if kept is not None and kept > self._ceiling * _WARN_SHARE and now >= self._next_word:
            self._next_word = now + _WARN_SECONDS
            log.warning(
                "the source keeps %s of its log for the slot; past %s (source.wal_ceiling) it is given up",
                _size(kept),
                _size(self._ceiling),
            )
        return ceiling_problem(slot, self._ceiling)


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
