"""An attempt at work on one table, in its lane: the border at which a table fails alone.

A TableError suspends that table, with reason and remedy in the registry, and the others go on. What may pass is tried
again first (`headwater.replicate.batches.retries`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from headwater.errors import TableError
from headwater.lake.ledger import TableVersion
from headwater.replicate.batches.lanes import Result
from headwater.replicate.batches.retries import Retries, reason_of
from headwater.replicate.tables.states import TableStates

log = logging.getLogger(__name__)


class Attempts:
    """From any lane; each table in its own."""

    def __init__(self, states: TableStates, retries: Retries) -> None:
        self._states, self._versions, self._retries = states, states.versions, retries
        self._before: dict[str, dict[str, TableVersion]] = {}  # where it stood before what is under way on it
        self._doubtful: set[str] = set()  # tables of which what is known may be halfway through

    def attempt(
        self, name: str, work: Callable[[], None], *, key: str = "", read_anew: Callable[[str], None] | None = None
    ) -> Result:
        """`work` on one table; what came of it, earlier attempts included. A TableError suspends it at once, before the
        next share is taken. TryAgain while what went wrong may pass; raises what is not the table's own failure. `key`:
        what else is done on the table than following the log: when that goes on failing it is given up, and the table
        stays as it is. `read_anew`: reads where the table stands, behind a failure, before `work` is begun again; None:
        `work` does so itself."""
        before = self._before.setdefault(name, self._versions.of(name))
        error: TableError | None = None
        try:
            failed_before = self._retries.is_trying(key or name) or name in self._doubtful
            if read_anew is not None and name in self._versions and failed_before:
                read_anew(name)
                self._doubtful.discard(name)
            work()
        except TableError as failed:
            error = failed
        except Exception as failed:
            error = self._failed(name, failed, key)
        if error is not None and not key:
            self._states.suspend(name, error)
        if self._retries.passed(key or name):
            self._touch(self._versions.moved_since(name, before))
        del self._before[name]
        return Result(self._versions.moved_since(name, before), error)

    def _failed(self, name: str, failed: Exception, key: str) -> TableError | None:
        """Why the work is given up; None: nobody waits for it."""
        if not (self._states.is_followed(name) or key):
            self._retries.refuse_outage(failed)
            log.warning("%s: %s", name, reason_of(failed))
            return None
        if key:
            self._doubtful.add(name)  # before it is raised that it is tried again: a share may come in between
        return self._retries.failed(name, failed, self._states.followed(), key)

    def _touch(self, moved: Mapping[str, TableVersion]) -> None:
        """An attempt that failed may have committed: what was found of it by reading counts as our own doing."""
        for name, version in moved.items():
            self._versions[name] = replace(version, touched=True)

    def doubt(self, name: str) -> None:
        """What is known of the table may be halfway through: the next attempt reads it anew."""
        self._doubtful.add(name)

    def is_doubtful(self, name: str) -> bool:
        return name in self._doubtful

    def forget(self, name: str) -> None:
        """The table is being loaded; what was known of it counts no more."""
        self._before.pop(name, None)
        self._doubtful.discard(name)
        self._retries.passed(name)
