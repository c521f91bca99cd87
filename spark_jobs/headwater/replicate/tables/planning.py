"""From a table's share of a batch to the plan of its commit: which transactions count, their net effect, and the way
that it takes to Delta. Nothing is changed here.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pyarrow as pa

from headwater.apply.applier import Applier
from headwater.apply.plan import Plan, choose
from headwater.lake.ledger import TableVersion
from headwater.lake.paths import table_path
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Rows, Transactions
from headwater.log.net.history_rows import every_change
from headwater.log.net.net_effect import net_effect
from headwater.log.net.soft_delete import marked
from headwater.net_changes import NetChanges
from headwater.position import format_lsn
from headwater.replicate.batches.batch import Share
from headwater.replicate.preapply.decide import Staging
from headwater.source.snapshots import VisibilitySnapshot


class Planner:
    """Plans for the tables below `root`; safe from several threads.

    `staging`: what was done of large transactions while they were open.
    """

    def __init__(self, pipeline: str, root: str, applier: Applier, staging: Staging | None) -> None:
        self._pipeline, self._root, self._applier, self._staging = pipeline, root, applier, staging

    def net(
        self, record: TableRecord, share: Share, transactions: Transactions, version: TableVersion
    ) -> NetChanges | None:
        """What the share does to the table at `version`; None: the table holds all of it."""
        counts = transactions_that_count(record, transactions, version.applied_lsn)
        if not counts.any():
            return None
        staged = self._staged(record, share, transactions, version)
        if staged is not None:
            return staged
        blocks, truncates = share.that_count(transactions, counts)
        describe = partial(describe_change, transactions)
        if record.schema.soft_delete:
            marks = partial(marked, record.schema, transactions=transactions)
            return net_effect(record.schema, blocks, truncates, describe, finish=marks)
        return net_effect(record.schema, blocks, truncates, describe)

    def history_rows(
        self, record: TableRecord, share: Share, transactions: Transactions, own: TableRecord, applied_lsn: int
    ) -> pa.Table | None:
        """Every change of the share above the history's applied position `applied_lsn`, for its table `own`."""
        counts = transactions_that_count(record, transactions, applied_lsn)
        if not counts.any():
            return None
        blocks, truncates = share.that_count(transactions, counts)
        describe = partial(describe_change, transactions)
        return every_change(record.schema, own.schema, record.incarnation, blocks, truncates, transactions, describe)

    def _staged(
        self, record: TableRecord, share: Share, transactions: Transactions, version: TableVersion
    ) -> NetChanges | None:
        """What was done of the one large transaction while it was open."""
        if self._staging is None or len(transactions) != 1 or share.truncates:
            return None
        if self._applier.why_by_engine(record, table_path(self._root, record.path), version.version):
            return None
        rows = self._staging.collect(int(transactions.xid[0]), record.name, record.schema, share.blocks)
        return rows.as_changes(record.schema) if rows is not None else None

    def lacks_mark(self, record: TableRecord, version: TableVersion) -> bool:
        """A batch that comes to nothing passes its positions all the same: a stopped driver that wakes up with the
        first half of it must find the table taken."""
        return self._applier.lacks_mark(record, table_path(self._root, record.path), version.version)

    def plan(
        self, record: TableRecord, changes: NetChanges, version: TableVersion, to_lsn: int, because: str = ""
    ) -> Plan:
        """The way of `changes`; `because`: the reason, where it is not in them."""
        path = table_path(self._root, record.path)
        by_engine = self._applier.why_by_engine(record, path, version.version)
        apply_path, found = choose(changes, record.schema, by_engine)
        return Plan(
            record=record,
            path=path,
            app_id=record.app_id(self._pipeline),
            version=version.version,
            to_lsn=to_lsn,
            changes=changes,
            apply_path=apply_path,
            because=because or found,
            by_engine=by_engine,
        )


def transactions_that_count(record: TableRecord, transactions: Transactions, applied_lsn: int) -> Rows:
    """Above the applied position, and, while the load hands over, not visible in its snapshot."""
    end_lsn, capture = transactions.end_lsn, record.capture
    handover_end = 0 if capture is None else math.inf if capture.handover_end is None else capture.handover_end
    if len(end_lsn) and end_lsn[0] > max(applied_lsn, handover_end):  # always, but behind a load or a crash
        return np.ones(len(end_lsn), dtype=np.bool_)
    counts: Rows = end_lsn > applied_lsn
    if capture is not None:
        handing_over = counts & (end_lsn <= handover_end)
        counts = counts & ~(handing_over & visible_in(capture.snapshot, transactions, handing_over))
    return counts


def visible_in(snapshot: str, transactions: Transactions, asked: Rows) -> Rows:
    """Which of the transactions `asked` for are visible in the snapshot."""
    visible = np.zeros(len(transactions), dtype=np.bool_)
    if asked.any():
        seen = VisibilitySnapshot.parse(snapshot).visible_mask([int(xid) for xid in transactions.xid[asked]])
        visible[asked] = seen
    return visible


def describe_change(transactions: Transactions, sequence: int) -> str:
    """Which transaction the change is of, for messages."""
    index = int(transactions.index_of(np.array([sequence]))[0])
    return f"transaction {transactions.xid[index]} at {format_lsn(int(transactions.end_lsn[index]))}"
