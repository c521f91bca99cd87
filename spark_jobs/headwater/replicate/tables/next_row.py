"""What the next ledger row says of every table and every history: version, applied position, state.

Two versions are known of each: where it stands (its lane's, in `headwater.replicate.tables.versions`, which may
run ahead), and what the next row says of it. Here is the second, and what must be so before a row may be written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from headwater.lake.ledger import TableVersion
from headwater.lake.registry import TableRecord


class NextRow:
    """`owner` gives the table's record by its own name or by that of its history. Safe from several threads."""

    def __init__(self, owner: Callable[[str], TableRecord]) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._versions: dict[str, TableVersion] = {}
        self._unwritten: set[str] = set()
        # With thousands of tables of which few change, a row must not cost a look at each: these may be ahead of it.
        self._perhaps_ahead: set[str] = set()
        self._to_come: dict[str, TableVersion] = {}

    def found(self, standing: Mapping[str, TableVersion], *, news: bool) -> None:
        """Where these stand as the driver begins; `news`: the ledger does not say so yet."""
        with self._lock:
            self._versions.update(standing)
            self._perhaps_ahead.update(standing)
            if news:
                self._unwritten.update(standing)

    def note(self, touched: Mapping[str, TableVersion]) -> None:
        """The next row has these versions."""
        with self._lock:
            self._versions.update(touched)
            self._unwritten.update(touched)
            self._perhaps_ahead.update(touched)

    def rearranged(self, versions: Mapping[str, TableVersion]) -> None:
        """The same rows in other versions: they are the row's, unless the table has gone on."""
        with self._lock:
            for name, version in versions.items():
                for known in (self._versions, self._to_come):
                    if name in known and known[name].applied_lsn == version.applied_lsn:
                        # What was applied, and no row says yet, is still to be said.
                        known[name] = replace(known[name], version=version.version)

    def to_come(self, versions: Mapping[str, TableVersion]) -> None:
        """What was done beside the batches: the first row at or above their applied positions has these versions."""
        with self._lock:
            self._to_come.update(versions)

    def adopt(self, lsn: int) -> None:
        """The next row stands at `lsn`: what was to come by then has come, unless the table has gone on since."""
        with self._lock:
            for name, version in list(self._to_come.items()):
                if version.applied_lsn > lsn:
                    continue
                del self._to_come[name]
                known = self._versions.get(name)
                if known is None or known.age < version.age:
                    self._versions[name] = version
                    self._unwritten.add(name)
                    self._perhaps_ahead.add(name)

    def is_settled(self, name: str) -> bool:
        """Whether the row says of the table what was done beside the batches."""
        with self._lock:
            return name not in self._to_come

    def waits_for(self, lsn: int) -> bool:
        """Whether a row at `lsn` has something to say."""
        with self._lock:
            come = any(version.applied_lsn <= lsn for version in self._to_come.values())
            return come or any(name in self._versions for name in self._unwritten)

    def forget(self, name: str) -> None:
        """The table is no part of the pipeline any more."""
        with self._lock:
            for known in (self._versions, self._to_come):
                known.pop(name, None)
            self._unwritten.discard(name)
            self._perhaps_ahead.discard(name)

    def state_changed(self, names: Iterable[str]) -> None:
        """The next row says it, whether or not they have new versions."""
        with self._lock:
            self._unwritten.update(names)

    def versions(self) -> dict[str, TableVersion]:
        """Of every table."""
        with self._lock:
            return {name: self._with_state(name) for name in self._versions}

    def touched(self) -> dict[str, TableVersion]:
        """What the last row did not say."""
        with self._lock:
            return {name: self._with_state(name) for name in self._unwritten if name in self._versions}

    def written(self, written: Mapping[str, TableVersion]) -> None:
        """A row is in the ledger that has these versions."""
        with self._lock:
            for name, version in written.items():
                self._versions[name] = replace(self._versions[name], touched=False, rows=0)
                if self._owner(name).state == version.state:  # else it was suspended while the row was written
                    self._unwritten.discard(name)
            self._perhaps_ahead.clear()  # or the row would have been withheld

    def must_wait(self, lsn: int) -> bool:
        """Whether a row at `lsn` must wait: some table in step already holds changes above it."""
        return any(self._is_ahead(name, self._versions[name], lsn) for name in self._perhaps_ahead)

    def _is_ahead(self, name: str, version: TableVersion, lsn: int) -> bool:
        record = self._owner(name)
        # A driver that died between "active" and its ledger row leaves a table whose load lies above the ledger.
        loaded_ahead = record.state == "active" and record.capture is not None and record.capture.lsn > lsn
        return loaded_ahead or (record.is_followed and version.applied_lsn > lsn)

    def _with_state(self, name: str) -> TableVersion:
        version, state = self._versions[name], self._owner(name).state
        return version if version.state == state else replace(version, state=state)
