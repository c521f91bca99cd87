"""What a driver does for a reload in a table's lane: replace a part of a table by what was read of it, brought forward
by what was kept meanwhile.

Between two shares of the table, so it stands still meanwhile, exactly where its lane has got to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from headwater.apply.columns import columns_counter
from headwater.apply.made_ready import reload_counter
from headwater.apply.plan import Plan
from headwater.apply.replacement import Read, part_of, row_files, rows_read, size_read, under_keys
from headwater.apply.waiting_files import are_listed, waiting_files
from headwater.columns.shape import has_shape
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.layout import layout_of
from headwater.delta.metadata import becoming
from headwater.errors import KeepsChanging, Refused, TableError
from headwater.failpoints import reach
from headwater.lake.ledger import TableVersion
from headwater.lake.registry import TableRecord, now_text
from headwater.lake.reload_records import Keeping, Reload
from headwater.log.net.on_disk import PartsOnDisk, on_disk
from headwater.log.spill import SpillStore
from headwater.net_changes import NetChanges
from headwater.pipeline_file.where_text import parse
from headwater.replicate.batches.lanes import Result
from headwater.replicate.beside.kept_since import KeptSince
from headwater.replicate.beside.preparing import Preparations, ReloadPreparation
from headwater.replicate.tables.tables import Tables
from headwater.schema import TableSchema

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Merging:
    """A reload whose rows have been read. `position`: every table holds at least all up to there; `spill`:
    for what does not fit into memory; `preparations`: what was made ready of reloads beside the lanes."""

    tables: Tables
    root: str
    reload: Reload
    position: int
    spill: SpillStore
    still_alive: Callable[[], None]
    preparations: Preparations
    written_anew: bool = False
    """Behind `merge`: the rows that were read lie in other files of the table by now."""

    def merge(self, answer: Keeping) -> tuple[Result, Keeping]:
        """Let the rows that were read, brought forward by what was kept, take the place of the part; what is to be
        said about it, as `answer`. Nothing of either is removed here: until that is said, another driver may have to do
        it again."""
        reload, lifts = self.reload, False

        def work() -> None:
            nonlocal answer, lifts
            answer = self._merged(answer)
            lifts = answer.state == "done" and self.tables.joining.put_right(reload.table, reload.leaves)

        result = replace(self.tables.attempt(reload.table, work, key=reload.name), new_rows=True, lifts=lifts)
        if result.error is not None:
            answer = answer.ended("failed", now_text(), result.error.message)
        return result, answer

    def _merged(self, answer: Keeping) -> Keeping:
        reload, name, tables = self.reload, self.reload.table, self.tables
        try:
            if reload.suspended:
                tables.meet_unfollowed(name)
            else:
                # A driver before this one may have died over a change of columns.
                tables.columns.finish(name, self.still_alive)
            record = tables.records[name]
            has_its_shape = reload.shape is not None and has_shape(record.schema, reload.shape)
            if has_its_shape or (self._has_files and self._is_done(record)):
                gone: int | None = 0  # the driver before this one has done it, and died before it said so
            elif self._has_changed(record):
                return answer.ended("failed", now_text(), "the table's columns changed meanwhile")
            else:
                gone = self._put(record)
            storage.sync(self.root)  # before anybody is told, and what it was made of is removed
            reach("replicate.after_part_commit", name)
        except (TableError, Refused) as error:
            return answer.ended("failed", now_text(), error.message)
        stands = tables.states.versions.get(name)
        if gone is None or stands is None:
            return answer.ended("failed", now_text(), "the table cannot be written any more")
        log.info("%s: %s was %s: %s rows for %s", name, reload.shown, reload.done, reload.rows, gone)
        return replace(answer.ended("done", now_text()), version=stands.version, lsn=stands.applied_lsn, replaced=gone)

    def _has_changed(self, record: TableRecord) -> bool:
        """Whether the table has other columns than the rows that were read, or than the shape that was made of it
        before: the first schema is that of its load, whose capture point may lie above the position of rows in the
        lake."""
        shape = self.reload.shape
        if shape is not None and shape.definition != record.schema.definition:
            return True
        return len(record.schemas) > 1 and record.schemas[-1][0] > self.reload.capture_lsn

    def _put(self, record: TableRecord) -> int | None:
        """Let the rows that were read, brought forward, stand in the table; how many stood there. None: it cannot be
        written any more. Refused when what was read is not there."""
        reload = self.reload
        if (prepared := self.preparations.take(reload)) is not None:
            try:
                return self._put_prepared(record, prepared)
            except _LaneAlone as alone:
                self.preparations.slowly(reload, alone.why)
            except Exception as error:
                # The last changes may be half in; and the commit may be there, and name what was made for it.
                self.preparations.let_go(reload)
                self.preparations.again(reload, error)
                raise
        if size_read(self.root, reload.name)[0] != reload.rows:
            raise Refused("the rows that were read are gone from the lake", code="reload_failed", where=record.name)
        # Partitions may have come meanwhile.
        schema = reload.shape.with_leaves(record.schema.leaves) if reload.shape is not None else record.schema
        content = partial(self._content, record, schema)
        if reload.shape is not None:
            gone: int | None = self.tables.reshaping.rebuild(record, schema, content, self.still_alive)
        else:
            done = self.tables.commits.commit(record, partial(self._plan, record, content), self.still_alive)
            gone = (done[1].gone or 0) if done is not None else None
        self.written_anew = gone is not None
        return gone

    def _put_prepared(self, record: TableRecord, prepared: ReloadPreparation) -> int | None:
        """What is left to be done of what was made ready: the last changes, and the commit."""
        reload, shape = self.reload, self.reload.shape
        if not self.tables.has_room_for(record.name, prepared.made_ready):
            raise KeepsChanging.during(1, record.name)  # it was read anew since this was made ready
        reach("replicate.before_rebuild" if shape is not None else "replicate.before_ready_commit", record.name)

        is_done = False

        def planned(version: TableVersion) -> Plan | None:
            nonlocal is_done
            try:
                prepared.bring_forward(max(self.position, version.applied_lsn))
            except TableError as error:
                raise _LaneAlone(error) from error
            content = prepared.made_ready.as_changes(reload.leaves)
            plan = self._plan(record, lambda _: content, version)
            counters = dict(plan.counters)
            if is_done := self.tables.has_counted(record.name, counters):
                return None  # an attempt before this one, whose answer was lost
            if shape is not None:
                counters[columns_counter(plan.app_id)] = len(record.schemas) + 1
            return replace(plan, becomes=prepared.schema(record) if shape is not None else None, counters=counters)

        done = self.tables.commits.commit(record, planned, self.still_alive)
        if done is None and not is_done:
            return None
        if done is not None:
            storage.sync(self.root)  # a power cut that takes the commit leaves all that it is made of again
            prepared.made_ready.discard_left_over()
        if shape is not None:
            reach("replicate.after_rebuild", record.name)
            self.tables.reshaping.has_shape(record, prepared.schema(record))
        return (done[1].gone or 0) if done is not None else 0

    def _is_done(self, record: TableRecord) -> bool:
        """Whether the table holds what was made ready of this reload."""
        stands = self.tables.states.versions.get(record.name)
        if stands is None:
            return False
        snapshot = read_snapshot(self.tables.folder(record.name), stands.version)
        return reload_counter(record.app_id(self.tables.pipeline), self.reload.name) in snapshot.transactions

    def _plan(self, record: TableRecord, content: Callable[[int], NetChanges], version: TableVersion) -> Plan:
        # No commit ends within a record: one byte further the table holds nothing else, and Delta takes it for new.
        to_lsn = version.applied_lsn + 1
        # A row of the part that is stored in another one as well must have been put there by mistake.
        lenient = replace(record, on_divergence="repair")
        because = f"{'reload' if self.reload.shape is None else 'rebuild'} of {self.reload.shown}"
        plan = self.tables.planner.plan(lenient, content(version.applied_lsn), version, to_lsn, because)
        return replace(plan, counters={reload_counter(plan.app_id, self.reload.name): 1}) if self._has_files else plan

    @property
    def _has_files(self) -> bool:
        return are_listed(self.root, self.reload.name)

    def _content(self, record: TableRecord, schema: TableSchema, applied_lsn: int) -> NetChanges:
        """What is to stand in the part, in the columns of `schema`: the rows that were read, brought forward by what
        the table holds at its applied position."""
        reload, keep = self.reload, partial(on_disk, store=self.spill)
        # Anew for each version of the table: a driver before this one may still wake up and commit what it has kept.
        # Nobody follows a suspended table: it holds nothing of what came since.
        since = None
        if not reload.suspended:
            kept = KeptSince(self.tables.keeper, reload, self.spill)
            since = kept.net(record, schema, max(self.position, applied_lsn))
        if reload.keys:
            return under_keys(schema, self.root, reload.name, since, keep)
        where = parse(reload.where, schema) if reload.where else None
        scratch = PartsOnDisk(self.spill).write_parquet
        return part_of(schema, self._rows(record, schema), reload.leaves, where, since, scratch, keep)

    def _rows(self, record: TableRecord, schema: TableSchema) -> Read:
        waiting = waiting_files(self.root, self.reload.name)
        if waiting is None:
            return partial(rows_read, schema, row_files(self.root, self.reload.name))
        snapshot = read_snapshot(waiting.folder)
        metadata = becoming(snapshot, schema) if self.reload.shape is not None else snapshot.metadata
        return partial(waiting.batches, schema, layout_of(metadata))


class _LaneAlone(Exception):
    """What was made ready cannot be brought forward, and nothing was committed."""

    def __init__(self, why: TableError) -> None:
        self.why = why
