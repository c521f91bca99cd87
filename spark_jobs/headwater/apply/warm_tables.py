"""Tables read ahead of their turn: what a driver may know of them before it is the one that writes.

A cache, right or absent: a table's log says at every use whether what is held is still its beginning, and the commits
since are followed. Nothing here decides whose turn it is; nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import obstacle
from headwater.apply.live_table import LiveTable
from headwater.arrow_types import key_schema
from headwater.delta import storage
from headwater.delta.deletion_vectors import DamagedVector
from headwater.delta.log_entries import log_entry
from headwater.delta.tables import current
from headwater.lake.registry import TableRecord


@dataclass(slots=True)
class _Known:
    """A table as last seen. `state`: kept where changes are expected; else only where the table stood."""

    app_id: str
    version: int
    applied_lsn: int
    state: LiveTable | None = None


class WarmTables:
    """By path; each path from one thread at a time."""

    def __init__(self, tasks: FileTasks | None = None) -> None:
        """`tasks` read the keys of large tables."""
        self._tasks = tasks
        self._known: dict[str, _Known] = {}

    def note(self, path: str, app_id: str) -> None:
        """Where the table stands: as long as it has no further commit, it need not be read again."""
        if path not in self._known and (found := current(path, app_id)) is not None:
            self._known[path] = _Known(app_id, *found)

    def follow(self, record: TableRecord, path: str, app_id: str) -> str:
        """Read the table up to its newest commit, with the places of its keys. Why an engine must write it, or ''."""
        known = self._known.pop(path, None)  # kept again only if all went well: half followed is worse than unknown
        state = known.state if known is not None and known.app_id == app_id else None
        if state is None or state.keys != key_schema(record.schema):
            state = LiveTable(path, record.schema, tasks=self._tasks)
        else:
            state.advance()
        by_engine = obstacle(state.snapshot)
        if not by_engine and record.schema.key and not record.schema.insert_only:
            state.index_keys()
        self._known[path] = _known(app_id, state)
        return by_engine

    def current(self, path: str, app_id: str, before: tuple[int, int] | None = None) -> tuple[int, int] | None:
        """As `headwater.delta.tables.current`, without reading what has been read."""
        known = self._known.pop(path, None)
        if known is None or known.app_id != app_id or not storage.exists(log_entry(path, known.version)):
            return current(path, app_id, before)
        if known.state is not None:
            try:
                known.state.advance()
            except (OSError, DamagedVector):  # who writes the table will meet it again, and say so
                return current(path, app_id, before)
            known = _known(app_id, known.state)
        elif storage.exists(log_entry(path, known.version + 1)):
            return current(path, app_id, before)
        self._known[path] = known
        return known.version, known.applied_lsn

    def take_states(self) -> dict[str, LiveTable]:
        """By path, to go on with by whoever writes the tables now; here they are forgotten."""
        states = {path: known.state for path, known in self._known.items() if known.state is not None}
        self._known.clear()
        return states


def _known(app_id: str, state: LiveTable) -> _Known:
    return _Known(app_id, state.version, state.snapshot.transactions.get(app_id, 0), state)
