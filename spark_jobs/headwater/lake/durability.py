"""Which of the published epochs would survive a power cut of the lake's host.

Readers may see an epoch as soon as its row is in the ledger; the source may forget it only when that row, and all that
it stands on, is on disk (docs/decisions/0046). A thread of its own syncs the lake about once a second while there is
something new, and tells the source the position of the newest row that was there before the sync began. Nobody who
publishes waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from headwater.delta import storage
from headwater.errors import Transient

PERIOD = 1.0
"""Seconds from the beginning of one sync to that of the next, if nobody hurries."""


def sync_lake(root: str) -> None:
    """`storage.sync`; Transient when the disk does not take what was written: the kernel says so once."""
    try:
        storage.sync(root)
    except OSError as error:
        raise Transient(
            f"what was written to the lake does not reach its disk ({error.strerror or error}); nothing of it was "
            "confirmed to the source",
            code="lake_unavailable",
            where=root,
            remedy="repair the disk, run replicate again, then headwater verify PIPELINE.yaml --repair",
        ) from error


class Durability:
    """Of the rows of one driver. `confirm` is told each durable position, in order; by the thread, or by `settle`."""

    def __init__(self, root: str, confirm: Callable[[int], None]) -> None:
        self._root, self._confirm = root, confirm
        self._changed = threading.Condition()
        self._syncing = threading.Lock()
        self._published = 0
        self._confirmed = 0
        self._hurried = self._closing = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="headwater-durability", daemon=True)

    def start(self, lsn: int) -> None:
        """Everything up to `lsn` is durable: the lake was synced behind it."""
        self._published = self._confirmed = lsn
        self._thread.start()

    @property
    def position(self) -> int:
        """Every commit up to there is in the lake, and survives."""
        return self._confirmed

    def published(self, lsn: int) -> None:
        """A row at `lsn` is in the ledger."""
        with self._changed:
            self._published = max(self._published, lsn)
            self._changed.notify_all()

    def hurry(self) -> None:
        """The server waits for a confirmation: at once, and also where there is nothing new."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Return when everything that was published is durable, and confirmed."""
        with self._syncing:  # one that is under way has yet to confirm
            is_behind = self._published > self._confirmed
        if is_behind:
            self._sync()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)  # a lake that hangs must not keep a driver from ending

    def _run(self) -> None:
        began = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._hurried or self._published > self._confirmed)
                pause = began + PERIOD - time.monotonic()
                if pause > 0:
                    self._changed.wait_for(lambda: self._closing or self._hurried, timeout=pause)
                if self._closing:
                    return
                self._hurried = False
            began = time.monotonic()
            try:
                self._sync()
            except Exception as error:  # raised by the driver, which looks
                self.failure = error
                return

    def _sync(self) -> None:
        with self._syncing:
            published = self._published
            if published > self._confirmed:
                sync_lake(self._root)
                self._confirmed = published
            self._confirm(published)
