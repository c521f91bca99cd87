"""What a driver does for a reload in a table's lane: replace a part of a table by what was read of it, brought forward
by what was kept meanwhile.

Between two shares of the table, so it stands still meanwhile, exactly where its lane has got to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from headwater.apply.plan import Plan
from headwater.apply.replacement import part_of, row_files, rows_in, under_keys
from headwater.columns.shape import has_shape
from headwater.delta import storage
from headwater.errors import Refused, TableError
from headwater.failpoints import reach
from headwater.lake.ledger import TableVersion
from headwater.lake.registry import TableRecord, now_text
from headwater.lake.reload_records import Keeping, Reload
from headwater.log.blocks import Rows, Transactions
from headwater.log.net.net_effect import net_effect
from headwater.log.net.on_disk import PartsOnDisk, on_disk
from headwater.log.spill import SpillStore
from headwater.net_changes import NetChanges
from headwater.pipeline_file.where_text import parse
from headwater.replicate.batches.batch import Share
from headwater.replicate.batches.lanes import Result
from headwater.replicate.tables.planning import describe_change, transactions_that_count, visible_in
from headwater.replicate.tables.tables import Tables
from headwater.schema import TableSchema

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Merging:
    """A reload whose rows have been read. `position`: every table holds at least all up to there; `spill`:
    for what does not fit into memory."""

    tables: Tables
    root: str
    reload: Reload
    position: int
    spill: SpillStore
    still_alive: Callable[[], None]

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
            if reload.shape is not None and has_shape(record.schema, reload.shape):
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
        if sum(rows for rows, _ in rows_in(row_files(self.root, reload.name))) != reload.rows:
            raise Refused("the rows that were read are gone from the lake", code="reload_failed", where=record.name)
        # Partitions may have come meanwhile.
        schema = reload.shape.with_leaves(record.schema.leaves) if reload.shape is not None else record.schema
        content = partial(self._content, record, schema)
        if reload.shape is not None:
            return self.tables.reshaping.rebuild(record, schema, content, self.still_alive)
        done = self.tables.commits.commit(record, partial(self._plan, record, content), self.still_alive)
        return (done[1].gone or 0) if done is not None else None

    def _plan(self, record: TableRecord, content: Callable[[int], NetChanges], version: TableVersion) -> Plan:
        # No commit ends within a record: one byte further the table holds nothing else, and Delta takes it for new.
        to_lsn = version.applied_lsn + 1
        # A row of the part that is stored in another one as well must have been put there by mistake.
        lenient, because = replace(record, on_divergence="repair"), f"reload of {self.reload.shown}"
        return self.tables.planner.plan(lenient, content(version.applied_lsn), version, to_lsn, because)

    def _content(self, record: TableRecord, schema: TableSchema, applied_lsn: int) -> NetChanges:
        """What is to stand in the part, in the columns of `schema`: the rows that were read, brought forward by what
        the table holds at its applied position."""
        reload, keep = self.reload, partial(on_disk, store=self.spill)
        # Anew for each version of the table: a driver before this one may still wake up and commit what it has kept.
        # Nobody follows a suspended table: it holds nothing of what came since.
        since = self._since(record, schema, max(self.position, applied_lsn)) if not reload.suspended else None
        if reload.keys:
            return under_keys(schema, self.root, reload.name, since, keep)
        where = parse(reload.where, schema) if reload.where else None
        files = row_files(self.root, reload.name)
        return part_of(schema, files, reload.leaves, where, since, PartsOnDisk(self.spill).write_parquet, keep)

    def _since(self, record: TableRecord, schema: TableSchema, up_to: int) -> NetChanges | None:
        """The net effect on the part of what was committed after the rows were read, in the columns of `schema`. What
        an earlier driver has kept above `up_to` the table does not hold, and the log brings it again: here as well it
        would come twice."""
        reload, blocks, truncates, transactions = self.reload, [], [], []
        for kept in self.tables.keeper.changes(reload.name, reload.table).shares(up_to):
            known = kept.share.transactions
            counts = kept.counts & _not_read(record, reload, known)
            some, cuts = Share(list(kept.share.blocks), list(kept.share.truncates)).that_count(known, counts)
            blocks += some
            truncates += cuts
            transactions.append(known)
        if not transactions:
            return None
        part = schema
        if reload.leaves:
            part = schema.with_leaves(tuple(leaf for leaf in schema.leaves if leaf.relation_id in reload.leaves))
        describe = partial(describe_change, Transactions.joined(transactions))
        return net_effect(part, blocks, truncates, describe, self.spill)


def _not_read(record: TableRecord, reload: Reload, transactions: Transactions) -> Rows:
    """Which of the transactions the rows that were read do not hold."""
    if not reload.snapshot:
        return transactions_that_count(record, transactions, reload.capture_lsn)
    return ~visible_in(reload.snapshot, transactions, np.ones(len(transactions), dtype=np.bool_))
