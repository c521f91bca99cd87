"""Readers of lakes that this process has used, kept for its next wait: registry and ledger are followed, not opened.

A reader is one wait's at a time, and is kept for a minute after it. What it knows is never trusted by itself: each
look reads the position file and follows the registry's log, and the ledger's row is asked for by its number. A reader
would not notice a lake that was removed and made anew under the same root: so the log entry at which its registry was
opened must still be the same file. Thread-safe.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.lake.reader import LakeReader

IDLE_SECONDS = 60.0
"""The longer nobody has asked, the more there is to follow, and opening anew is the shorter way."""
AGE_SECONDS = 600.0
"""Far less than the hour for which the upkeep leaves a log entry that was superseded."""

_Key = tuple[int, str, str]
_lock = threading.Lock()
_kept: dict[_Key, list[tuple[float, LakeReader]]] = {}


@contextmanager
def borrowed(root: str, pipeline: str) -> Iterator[LakeReader]:
    """A reader for one wait. One that fails, whatever the reason, is not kept."""
    # A child process must not go on with what its parent has opened: an engine's threads do not survive a fork.
    key = os.getpid(), root, pipeline
    reader = _take(key) or LakeReader(root, pipeline)
    yield reader
    _keep(key, reader)


def _take(key: _Key) -> LakeReader | None:
    while True:
        with _lock:
            waiting = _kept.get(key, [])
            if not waiting:
                return None
            since, reader = waiting.pop()
        if time.monotonic() - since <= IDLE_SECONDS and reader.begin_again(AGE_SECONDS):
            return reader


def _keep(key: _Key, reader: LakeReader) -> None:
    now = time.monotonic()
    with _lock:
        _kept.setdefault(key, []).append((now, reader))
        for other, waiting in list(_kept.items()):
            waiting[:] = [(since, one) for since, one in waiting if now - since <= IDLE_SECONDS]
            if not waiting or other[0] != key[0]:
                del _kept[other]
