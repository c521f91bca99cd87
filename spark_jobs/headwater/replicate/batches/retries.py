"""Which failures of one table may pass by themselves, and for how long they are tried again before it is suspended.

What cannot pass is a TableError and none of this module's business. Everything else that goes wrong while one table is
worked on is taken for its own, unless it is the driver's, the source's or the whole lake's: these end the driver, since
suspending one table after the other would cure nothing. Told apart by looking: if a file can be written beside the
ledger, and other tables do not fail as well, it is the table.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import psycopg
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from headwater import store_answers, store_options
from headwater.delta import storage
from headwater.errors import HeadwaterError, KeepsChanging, TableError, Transient
from headwater.lake.paths import probe_path
from headwater.lake.registry import now_text
from headwater.lake_root import is_remote
from headwater.log import spill

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0
_PROBE_BYTES = 1 << 20
_ATTEMPTS = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_SPACE = "No space left on device"
_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # delta-rs paints its messages
_PLACES = re.compile(r"\S*/\S*")
_ENGINE_IS_GONE = "stopped SparkContext"


class TryAgain(Exception):
    """What was begun on a table is to be done again, as a whole, in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"again in {seconds:.1f} s")
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Trying:
    """Work on `table` that fails. `since`: for people; `began`: monotonic; `attempts`: how many have failed."""

    table: str
    since: str
    began: float
    attempts: int
    reason: str


class Retries:
    """Of a driver's tables; from any of its threads. `limit`: seconds from the first failure of some work on. The work
    has a key: a table's name, or what else is done on one, so that one that succeeds does not hide another."""

    def __init__(self, root: str, limit: float) -> None:
        self._root, self._limit = root, limit
        self._lock = threading.Lock()
        self._trying: dict[str, Trying] = {}

    def shown(self) -> dict[str, dict[str, str | int]]:
        """What the position file says of tables that are being tried again."""
        with self._lock:
            tables = dict(self._trying)
        return {t.table: {"since": t.since, "attempts": t.attempts, "reason": t.reason} for t in tables.values()}

    def is_trying(self, key: str) -> bool:
        with self._lock:
            return key in self._trying

    def passed(self, key: str) -> bool:
        """It works, or it is not worked on any more; whether it had failed."""
        with self._lock:
            trying = self._trying.pop(key, None)
        if trying is not None:
            log.info("%s: no longer tried again, after %s failed attempts", trying.table, trying.attempts)
        return trying is not None

    def failed(self, name: str, error: Exception, tables: Collection[str], key: str = "") -> TableError:
        """Why the work `key` on the table is given up now (its own: why it is to be suspended); TryAgain while its time
        is not over. Raises what is not the table's own: `error`, or Transient when the lake as a whole is out.
        `tables`: all that are replicated."""
        key = key or name
        self.refuse_outage(error)
        reason = reason_of(error)
        now = time.monotonic()
        with self._lock:
            before = self._trying.get(key)
            began, attempts = (before.began, before.attempts + 1) if before else (now, 1)
            self._trying[key] = Trying(name, before.since if before else now_text(), began, attempts, reason)
            others = set(tables) - {name}
            all_fail = bool(others) and others <= self._trying.keys()
        limit = self._limit
        if limit and isinstance(error, OSError) and is_remote(self._root):
            # One attempt may take as long as requests are repeated, and the last of them may be a large one.
            limit = max(limit, _ATTEMPTS * (store_options.JOB_PATIENCE_SECONDS + store_options.UPLOAD_SECONDS))
        left = began + limit - now
        log.warning("%s: attempt %s failed: %s", name, attempts, reason)
        log.debug("%s", name, exc_info=error)
        if left > 0:
            raise TryAgain(min(_FIRST_PAUSE * 2 ** min(attempts - 1, 10), _LONGEST_PAUSE, left))
        if all_fail:
            raise outage(f"all {len(others) + 1} tables fail; {name}: {reason}", self._root) from error
        return TableError(
            f"it failed for {now - began:.0f} s, {attempts} attempt{'s' if attempts > 1 else ''}: {reason}",
            code="keeps_failing",
            where=name,
            remedy=f"put right what the reason names, then headwater verify PIPELINE.yaml --table {name} --repair",
        )

    def refuse_outage(self, error: Exception) -> None:
        """Raise what no single table is to blame for."""
        if isinstance(error, KeepsChanging):
            return
        # An engine that has died says so in many ways: only what it reports itself is an error of the work.
        engine = isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
        if engine or isinstance(error, HeadwaterError | psycopg.Error | ConnectionError | EOFError):
            raise error
        if _ENGINE_IS_GONE in str(error):
            raise error
        if (isinstance(error, OSError) and error.errno in _FULL) or _NO_SPACE in str(error):
            raise self._no_space(error) from error
        try:
            self._probe()
        except OSError as unwritable:
            raise outage(f"nothing can be written there: {reason_of(unwritable)}", self._root) from error

    def _no_space(self, error: Exception) -> Transient:
        """In the lake, or on the disk for what is too much for memory, as keys that are sorted: the one with less."""
        message, remedy = f"no space is left: {reason_of(error)}", "nothing is lost, replicate goes on from the ledger"
        by_quota = isinstance(error, OSError) and error.errno == errno.EDQUOT
        if is_remote(self._root) or (not by_quota and spill.has_less_room_than(self._root)):
            local, _ = spill.free()
            room = f"make room below {local}, or let TMPDIR name a larger disk; run replicate again: {remedy}"
            return Transient(message, code="spill_full", where="local disk", remedy=room)
        return Transient(
            message, code="lake_full", where="lake.root", remedy=f"make room there; run replicate again: {remedy}"
        )

    def _probe(self) -> None:
        place = probe_path(self._root, f"{os.getpid()}-{threading.get_ident()}")
        with store_options.impatient():
            try:
                storage.write(place, bytes(_PROBE_BYTES))
            except OSError:
                if not is_remote(self._root):  # which has a file whole or not at all
                    storage.delete(place)
                raise
            storage.delete(place)


def reason_of(error: BaseException) -> str:
    """`error` in a line. Of others' errors only what cannot quote a row's value."""
    if isinstance(error, HeadwaterError):
        return error.message
    kind = type(error).__name__
    if isinstance(error, OSError):
        # Without the path: folders of partitions are named by values.
        return f"{kind}: {error.strerror or 'no reason given'}"
    if isinstance(error, DeltaError):
        return f"{kind}: {_PLACES.sub('…', store_answers.said(' '.join(_COLOURS.sub('', str(error)).split())))}"
    condition = error.getCondition() if isinstance(error, PySparkException) else None
    return f"{kind} {condition}" if condition else f"{kind} (HEADWATER_LOG=DEBUG logs where)"


def outage(message: str, root: str) -> Transient:
    """The whole lake fails, as `message` says."""
    return Transient(
        f"the lake fails, and not one table of it: {message}",
        code="lake_unavailable",
        where=root,
        remedy="when the lake answers again, run replicate again: nothing is lost, it goes on from the ledger",
    )
