"""The histories of a driver's tables: each share of a batch is written to them before it is applied to its table.

A history is a table of its own with a version and an applied position of its own, which the ledger rows carry beside
the table's, under its name and `~history`. What lies at or below that position is never written again; a driver that
dies between the two commits leaves a history that is ahead, and no row is published until its table has followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa

from headwater.apply.applier import Applier, overwriting_named
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.columns import ColumnChange, evolve
from headwater.apply.direct import Fence
from headwater.apply.plan import Plan, PlanAgain
from headwater.delta import entries
from headwater.delta.delta_log import read_snapshot
from headwater.delta.small_tables import LostRace
from headwater.delta.tables import current
from headwater.errors import ForeignWrite, KeepsChanging
from headwater.failpoints import reach
from headwater.lake.cuts import history_name
from headwater.lake.history import history_record, holds_others, lacking, refuse_foreign, stored_record, wider
from headwater.lake.ledger import Ledger, TableVersion
from headwater.lake.paths import table_path
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.replicate.tables.versions import TableVersions

_TRIES = 5
_BECAUSE = "a history only grows"
Rows = Callable[[TableRecord, int], pa.Table | None]
"""The changes above an applied position, as rows of the history's table `record`; None when there are none."""


class Histories:
    """Of the tables with `history`. `append` may be called from several threads, for each table from one at a time."""

    def __init__(self, pipeline: str, root: str, ledger: Ledger, versions: TableVersions) -> None:
        self._pipeline, self._root, self._ledger = pipeline, root, ledger
        self._records: dict[str, TableRecord] = {}
        self.versions = versions

    def resume(self, applier: Applier, record: TableRecord) -> None:
        """Find out where the history of `record` stands. ForeignWrite when it is gone."""
        self._applier = applier
        self._read(record, table_path(self._root, history_record(record).path))

    def refuse_damage(self, record: TableRecord, known: TableVersion) -> None:
        """ForeignWrite when the history has lost commits since `known`, the ledger's, or somebody else wrote to it."""
        name = history_name(record.name)
        prefix = f"headwater/{self._pipeline}/{name}/"
        refuse_foreign(table_path(self._root, history_record(record).path), known.version, prefix, record.name)
        if known.applied_lsn >= record.start_lsn > 0 and self.versions[name].applied_lsn < known.applied_lsn:
            raise ForeignWrite(
                "the applied position of its history fell back: commits are lost",
                where=record.name,
                remedy=f"headwater load PIPELINE.yaml --table {record.name} --again",
            )

    def look_again(self, record: TableRecord) -> None:
        """ForeignWrite when somebody else has done more to the history than to rearrange its files."""
        known, path = self.versions[history_name(record.name)], table_path(self._root, history_record(record).path)
        with overwriting_named(record.name):
            entries.refuse_replaced(path)
        self._read(record, path)
        self.refuse_damage(record, known)

    def append(self, record: TableRecord, rows: Rows, to_lsn: int, still_alive: Callable[[], None]) -> None:
        """Commit the changes that the history does not hold yet."""
        name = history_name(record.name)
        for _ in range(_TRIES):
            own, version = self._records[name], self.versions[name]
            found = rows(own, version.applied_lsn)
            if found is None or not found.num_rows:
                return
            still_alive()
            try:
                applied = self._applier.commit(self._plan(own, version, found, to_lsn))
            except PlanAgain:
                self._ledger.check_fence()
                path = table_path(self._root, own.path)
                self._read(record, path)
                refuse_foreign(path, version.version, f"headwater/{self._pipeline}/{name}/", record.name)
                continue
            self.versions[name] = TableVersion(
                applied.version, to_lsn, record.state, found.num_rows, "append", True, record.incarnation
            )
            reach("replicate.after_history_commit")
            return
        raise KeepsChanging.during(_TRIES, name)

    def evolve(self, record: TableRecord, tasks: FileTasks, still_alive: Callable[[], None]) -> None:
        """The history of `record`'s table, if it has one, has each of its columns from now on."""
        name = history_name(record.name)
        if name not in self._records:
            return
        fence = Fence(self._ledger.generation_app, self._ledger.generation)
        for _ in range(_TRIES):
            own, version = self._records[name], self.versions[name]
            path = table_path(self._root, own.path)
            snapshot = read_snapshot(path, version.version)
            missing, others = lacking(record, snapshot)
            widened = wider(others, snapshot)
            if len(widened) < len(others):
                raise holds_others(record, path, others)
            to = ColumnChange(own.schema, missing, widened=widened)
            still_alive()
            try:
                now = evolve(path, version.version, record.name, own.app_id(self._pipeline), to, fence, tasks)
            except LostRace:
                self._ledger.check_fence()
                self._read(record, path)
                refuse_foreign(path, version.version, f"headwater/{self._pipeline}/{name}/", record.name)
                continue
            self.versions[name] = replace(version, version=now)
            self._records[name] = stored_record(record, read_snapshot(path, now))
            return
        raise KeepsChanging.during(_TRIES, name)

    def _plan(self, own: TableRecord, version: TableVersion, rows: pa.Table, to_lsn: int) -> Plan:
        path = table_path(self._root, own.path)
        return Plan(
            record=own,
            path=path,
            app_id=own.app_id(self._pipeline),
            version=version.version,
            to_lsn=to_lsn,
            changes=NetChanges(
                rows=rows,
                stored=np.zeros(rows.num_rows, dtype=np.bool_),
                unchanged={},
                origins=None,
                removed=rows.select([]).slice(0, 0),
                changes=rows.num_rows,
            ),
            apply_path="append",
            because=_BECAUSE,
            by_engine=self._applier.why_by_engine(own, path, version.version),
        )

    def _read(self, record: TableRecord, path: str) -> None:
        name = history_name(record.name)
        found = current(path, history_record(record).app_id(self._pipeline))
        if found is None:
            raise ForeignWrite(
                "its history is gone from the lake",
                where=record.name,
                remedy=f"headwater load PIPELINE.yaml --table {record.name} --again begins a new one",
            )
        self._records[name] = stored_record(record, read_snapshot(path, found[0]))
        self.versions[name] = TableVersion(found[0], found[1], record.state, incarnation=record.incarnation)
        entries.meet(path, found[0])

    def keep_up(self, table: str) -> None:
        """Files and checkpoints of the table's history, if it has one."""
        name = history_name(table)
        own, version = self._records.get(name), self.versions.get(name)
        if own is not None and version is not None:
            now = self._applier.keep_up(table_path(self._root, own.path), own.schema, version.version)
            if now != version.version:
                self.versions[name] = replace(version, version=now, rows=0, touched=False)
