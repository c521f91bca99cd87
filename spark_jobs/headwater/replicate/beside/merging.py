"""What a driver does for loads and reloads in a table's lane: bring a loaded table up with what was kept for it, and
replace a part of a table by what a reload has read.

Between two shares of the table, so it stands still meanwhile, exactly where its lane has got to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

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
from headwater.schema import TableSchema

if TYPE_CHECKING:
    from headwater.replicate.tables.tables import Tables

log = logging.getLogger(__name__)

_TURN_SECONDS = 3.0
"""How long a table's own changes wait behind those that were kept for it."""


def catch_up(tables: Tables, root: str, name: str, keeping: str, still_alive: Callable[[], None]) -> Result:
    """Apply what is kept for the loaded table under `keeping`, as much as a turn allows. When nothing is left the table
    is held back no more."""
    record, keeper = tables.records[name], tables.keeper
    if keeping not in keeper.names(name):  # a load has taken the table since
        return Result()
    is_left = False

    def work() -> None:
        nonlocal is_left
        if tables.stands_at(name) is None:
            tables.meet(record)
        if not tables.is_replicated(name):
            return
        began = time.monotonic()
        changes, done = keeper.changes(keeping, name), []
        for kept in changes.shares():
            share = Share(list(kept.share.blocks), list(kept.share.truncates))
            tables.adopt_leaves(name, share)
            tables.apply_share(name, share, kept.share.transactions, still_alive)
            done.append(kept)
            reach("replicate.after_kept_share", name)
            if time.monotonic() - began > _TURN_SECONDS:
                is_left = True
                break
        storage.sync(root)  # the slot has moved past what was kept: it goes when the table holds it for good
        for kept in done:
            changes.remove(kept)

    result = replace(tables.attempt(name, work), new_rows=True)
    if is_left:
        return result
    keeper.end(keeping, name)
    if result.error is None:
        log.info("%s: it holds all that was committed while it was loaded", name)
    return result


def merge_part(
    tables: Tables, root: str, reload: Reload, position: int, spill: SpillStore, still_alive: Callable[[], None]
) -> tuple[Result, Keeping]:
    """Let the rows that were read, brought forward by what was kept, take the place of the part; what is to be said
    about it. Nothing of either is removed here: until that is said, another driver may have to do it again. `position`:
    up to there at least this driver has brought every table."""
    answer, lifts = tables.answers[reload.name], False

    def work() -> None:
        nonlocal answer, lifts
        answer = _merged(tables, root, reload, position, answer, spill, still_alive)
        lifts = answer.state == "done" and tables.put_right(reload.table, reload.leaves)

    result = replace(tables.attempt(reload.table, work, key=reload.name), new_rows=True, lifts=lifts)
    if result.error is not None:
        answer = answer.ended("failed", now_text(), result.error.message)
    return result, answer


def _merged(
    tables: Tables,
    root: str,
    reload: Reload,
    position: int,
    answer: Keeping,
    spill: SpillStore,
    still_alive: Callable[[], None],
) -> Keeping:
    name = reload.table
    try:
        if reload.suspended:
            tables.refuse_unfit(name)
        else:
            tables.finish_columns(name, still_alive)
        record = tables.records[name]
        if reload.shape is not None and has_shape(record.schema, reload.shape):
            gone: int | None = 0  # the driver before this one has done it, and died before it said so
        elif _has_changed(record, reload):
            return answer.ended("failed", now_text(), "the table's columns changed meanwhile")
        else:
            gone = _put(tables, root, reload, position, record, spill, still_alive)
        storage.sync(root)  # before anybody is told, and what it was made of is removed
        reach("replicate.after_part_commit", name)
    except (TableError, Refused) as error:
        return answer.ended("failed", now_text(), error.message)
    stands = tables.stands_at(name)
    if gone is None or stands is None:
        return answer.ended("failed", now_text(), "the table cannot be written any more")
    log.info("%s: %s was %s: %s rows for %s", name, reload.shown, reload.done, reload.rows, gone)
    return replace(answer.ended("done", now_text()), version=stands.version, lsn=stands.applied_lsn, replaced=gone)


def _has_changed(record: TableRecord, reload: Reload) -> bool:
    """Whether the table has other columns than the rows that were read, or than the shape that was made of it before:
    the first schema is that of its load, whose capture point may lie above the position of rows in the lake."""
    if reload.shape is not None and reload.shape.definition != record.schema.definition:
        return True
    return len(record.schemas) > 1 and record.schemas[-1][0] > reload.capture_lsn


def _put(
    tables: Tables,
    root: str,
    reload: Reload,
    position: int,
    record: TableRecord,
    spill: SpillStore,
    still_alive: Callable[[], None],
) -> int | None:
    """Let the rows that were read, brought forward, stand in the table; how many stood there. None: it cannot be
    written any more. Refused when what was read is not there."""
    if sum(rows for rows, _ in rows_in(row_files(root, reload.name))) != reload.rows:
        raise Refused("the rows that were read are gone from the lake", code="reload_failed", where=record.name)
    # Partitions may have come meanwhile.
    schema = reload.shape.with_leaves(record.schema.leaves) if reload.shape is not None else record.schema

    def content(applied_lsn: int) -> NetChanges:
        if reload.suspended:  # the table holds nothing of what came since
            return _part(schema, root, reload, None, spill)
        # Anew for each version of the table: a driver before this one may still wake up and commit what it has kept.
        since = _since(record, schema, tables, reload, max(position, applied_lsn), spill)
        return _part(schema, root, reload, since, spill)

    if reload.shape is not None:
        return tables.rebuild(record, schema, content, still_alive)
    done = tables.commit(record, partial(_plan, tables, record, content, reload), still_alive)
    return (done[1].gone or 0) if done is not None else None


def _plan(
    tables: Tables,
    record: TableRecord,
    content: Callable[[int], NetChanges],
    reload: Reload,
    version: TableVersion,
) -> Plan:
    # No commit ends within a record: one byte further the table holds nothing else, and Delta takes it for new.
    to_lsn = version.applied_lsn + 1
    # A row of the part that is stored in another one as well must have been put there by mistake.
    lenient = replace(record, on_divergence="repair")
    return tables.planner.plan(lenient, content(version.applied_lsn), version, to_lsn, f"reload of {reload.shown}")


def _part(schema: TableSchema, root: str, reload: Reload, since: NetChanges | None, spill: SpillStore) -> NetChanges:
    """What is to stand in the part: the rows that were read, brought forward by `since`."""
    keep = partial(on_disk, store=spill)
    if reload.keys:
        return under_keys(schema, root, reload.name, since, keep)
    where = parse(reload.where, schema) if reload.where else None
    files = row_files(root, reload.name)
    return part_of(schema, files, reload.leaves, where, since, PartsOnDisk(spill).write_parquet, keep)


def _since(
    record: TableRecord, schema: TableSchema, tables: Tables, reload: Reload, up_to: int, spill: SpillStore
) -> NetChanges | None:
    """The net effect on the part of what was committed after the rows were read, in the columns of `schema`. What an
    earlier driver has kept above `up_to` the table does not hold, and the log brings it again: here as well it would
    come twice."""
    blocks, truncates, transactions = [], [], []
    for kept in tables.keeper.changes(reload.name, reload.table).shares(up_to):
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
    return net_effect(part, blocks, truncates, describe, spill)


def _not_read(record: TableRecord, reload: Reload, transactions: Transactions) -> Rows:
    """Which of the transactions the rows that were read do not hold."""
    if not reload.snapshot:
        return transactions_that_count(record, transactions, reload.capture_lsn)
    return ~visible_in(reload.snapshot, transactions, np.ones(len(transactions), dtype=np.bool_))
