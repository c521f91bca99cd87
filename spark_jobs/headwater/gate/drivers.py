"""Whether a driver lives. While its connection has dropped and it makes another one, the source does not show it.

On a disk the lake does: a driver shares a lock of it from its start to its end. A store has no locks; there a driver
may live that has not said of itself that it has ended, as long as its slot was read a short while ago, which servers
tell since 17.
"""

from __future__ import annotations

import contextlib
import logging
import os.path
import time
from collections.abc import Iterator
from typing import Final

from headwater.delta import storage
from headwater.lake.paths import control_path
from headwater.lake.position_file import read_position_file
from headwater.lake_root import is_remote
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection
from headwater.source.slot import SlotState, read_slot
from headwater.source.stream import RECONNECT_SECONDS

log = logging.getLogger(__name__)

_SEEN_AGAIN_WITHIN: Final = RECONNECT_SECONDS + 10.0
_LOOK_SECONDS: Final = 0.5


def drivers_lock(root: str) -> str:
    return os.path.join(control_path(root), "drivers.lock")


def recovery_lock(root: str) -> str:
    return os.path.join(control_path(root), "recovery.lock")


def not_mended(root: str) -> contextlib.AbstractContextManager[None]:
    """For a driver, before it reads what it goes on from: while the block runs nobody mends. What a job took for lost
    while a driver writes would be what that one has just published."""
    return storage.shared(drivers_lock(root))


@contextlib.contextmanager
def without_driver(root: str) -> Iterator[bool]:
    """Whether no driver lives on this lake; then none begins inside the block. In a store: always."""
    # One who starts may mend: it must not take a look of ours for a driver.
    with storage.exclusive(recovery_lock(root)), storage.exclusive_at_once(drivers_lock(root)) as no_driver:
        yield no_driver


def may_live(root: str, slot: SlotState) -> bool:
    """Whether a driver may live that does not read `slot` just now."""
    if not is_remote(root):
        try:
            with without_driver(root) as no_driver:
                return not no_driver
        except OSError:
            pass  # who may only read the lake cannot have its locks
    if not _was_read_lately(slot):
        return False
    file = read_position_file(root)
    return file is not None and not file.ended


def is_gone(connection: Connection, root: str, slot: SlotState) -> bool:
    """Whether nobody will read `slot` again who has read it last, as far as can be known. Of an older server, with
    the lake in a store, it takes as long as a driver would try."""
    if slot.active:
        return False
    if slot.idle_seconds is not None and not _was_read_lately(slot):
        return True  # one that waits while the pipeline is paused, or stands still, has had its time
    if not may_live(root, slot):
        return True
    if slot.idle_seconds is not None:
        return False  # whoever looks next knows
    deadline = time.monotonic() + _SEEN_AGAIN_WITHIN
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        now = read_slot(connection, slot.name)
        if now is None or now.active:
            return False
    return True


def await_return(connection: Connection, pipeline: Pipeline) -> bool:
    """Whether a driver reads the slot; one whose connection has dropped is waited for."""
    root = pipeline.lake_path()
    began = time.monotonic()
    is_said = False
    while (slot := read_slot(connection, pipeline.source.slot)) is not None and not slot.is_read:
        may_return = _was_read_lately(slot) and may_live(root, slot)
        if not may_return or time.monotonic() - began >= RECONNECT_SECONDS:
            return False
        if not is_said:
            is_said = True
            log.info(
                "replicate starts, or connects to the source again: it is waited for, %d s at most", RECONNECT_SECONDS
            )
        time.sleep(_LOOK_SECONDS)
    return slot is not None


def _was_read_lately(slot: SlotState) -> bool:
    return slot.idle_seconds is None or slot.idle_seconds < _SEEN_AGAIN_WITHIN
