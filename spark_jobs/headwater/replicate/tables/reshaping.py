"""Commits that change the lake's table itself, and not its rows by the log: columns that follow their source, and
rebuilds, which replace all that a table is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from headwater.apply.applier import damage_named
from headwater.apply.direct import Fence
from headwater.apply.reshape import rebuild, shape_ahead
from headwater.delta import storage
from headwater.delta.small_tables import LostRace
from headwater.errors import KeepsChanging
from headwater.failpoints import reach
from headwater.lake.registry import TableRecord
from headwater.lake.reload_records import Reload
from headwater.net_changes import NetChanges
from headwater.replicate.tables.foreign_writes import ForeignWrites
from headwater.replicate.tables.states import TableStates
from headwater.schema import TableSchema

log = logging.getLogger(__name__)

_TRIES = 5


class Reshaping:
    """From any lane; each table in its own. `reloads`: the registry's, by name."""

    def __init__(
        self, pipeline: str, states: TableStates, foreign: ForeignWrites, fence: Fence, reloads: Mapping[str, Reload]
    ) -> None:
        self._pipeline, self._states, self._versions = pipeline, states, states.versions
        self._foreign, self._fence, self._reloads = foreign, fence, reloads

    def rebuild(
        self,
        record: TableRecord,
        schema: TableSchema,
        content: Callable[[int], NetChanges],
        still_alive: Callable[[], None],
    ) -> int:
        """The table has `content`, which is asked for at its applied position, in the columns of `schema`, and nothing
        else from now on; how many rows it had before.

        Lake, registry, in this order: only the lake's commit says when it is so, and what a driver has committed before
        it died is found there."""
        app_id, number = record.app_id(self._pipeline), len(record.schemas) + 1
        gone = 0

        def rebuilt(path: str, version: int) -> int:
            nonlocal gone
            rows = (part.rows for part in content(self._versions[record.name].applied_lsn).in_parts())
            after, gone = rebuild(path, version, record.name, app_id, schema, rows, number, self._fence)
            return after

        reach("replicate.before_rebuild", record.name)
        with damage_named(record, self._states.folder(record)):
            self.commit(record, rebuilt, still_alive)
        reach("replicate.after_rebuild", record.name)
        self.has_shape(record, schema)
        return gone

    def learn(self, record: TableRecord) -> None:
        """What another driver has rebuilt, and died before it said so."""
        stands, shapes = self._versions.get(record.name), self._shapes_asked(record)
        if not shapes or stands is None:
            return
        path, app_id = self._states.folder(record), record.app_id(self._pipeline)
        with damage_named(record, path):
            shape = shape_ahead(path, stands.version, record.name, app_id, len(record.schemas), shapes)
        if shape is not None:
            self.has_shape(record, shape)

    def _shapes_asked(self, record: TableRecord) -> list[TableSchema]:
        """What rebuilds were to make of the table since its load, the last one first; those that are over, too."""
        reloads = sorted(self._reloads.values(), key=lambda reload: reload.since, reverse=True)
        mine = (record.name, record.incarnation)
        return [r.shape for r in reloads if r.shape is not None and (r.table, r.incarnation) == mine]

    def has_shape(self, record: TableRecord, schema: TableSchema) -> None:
        """The lake's table is in a shape that the registry has yet to learn."""
        applied_lsn = self._versions[record.name].applied_lsn

        def learned(old: TableRecord) -> TableRecord | None:
            if (old.incarnation, len(old.schemas)) != (record.incarnation, len(record.schemas)):
                return None
            now = schema.with_leaves(old.schema.leaves)
            return replace(old, schemas=(*old.schemas, (applied_lsn, now)))

        storage.sync(self._states.folder(record))  # a power cut must not leave the registry alone with the shape
        self._states.change(record.name, learned)
        log.info("%s: it is in its new shape", record.name)

    def commit(self, record: TableRecord, how: Callable[[str, int], int], still_alive: Callable[[], None]) -> None:
        """`how` commits to the table in a folder, upon a version; the version afterwards."""
        for _ in range(_TRIES):
            version = self._versions[record.name].version
            still_alive()
            try:
                now = how(self._states.folder(record), version)
            except LostRace:
                self._foreign.look_again(record)
                self._foreign.refuse_lost(record.name)
                continue
            self._versions.moved_to(record.name, now)
            return
        raise KeepsChanging.during(_TRIES, record.name)
