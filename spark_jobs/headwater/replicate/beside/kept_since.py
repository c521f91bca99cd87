"""What a reload's rows do not hold: the changes of its part that were committed after they were read, as they are kept,
and their net effect."""

from __future__ import annotations

from functools import partial

import numpy as np

from headwater.lake.registry import TableRecord
from headwater.lake.reload_records import Reload
from headwater.log.blocks import Rows, Transactions
from headwater.log.net.net_effect import net_effect
from headwater.log.spill import SpillStore
from headwater.net_changes import NetChanges
from headwater.replicate.batches.batch import Share
from headwater.replicate.tables.keeper import Keeper, Seen
from headwater.replicate.tables.planning import describe_change, transactions_that_count, visible_in
from headwater.schema import TableSchema


class KeptSince:
    """Gives every change once. `spill`: for what does not fit into memory."""

    def __init__(self, keeper: Keeper, reload: Reload, spill: SpillStore) -> None:
        self._keeper, self._reload, self._spill = keeper, reload, spill
        self._seen = Seen()

    def net(
        self, record: TableRecord, schema: TableSchema, up_to: int, applied: int | None = None
    ) -> NetChanges | None:
        """The net effect of what has been kept since the last call, in the columns of `schema`; None: nothing. What an
        earlier driver has kept above `up_to` the table does not hold, and the log brings it again: here as well it
        would come twice. `applied`: as of `KeptChanges.shares`."""
        reload, blocks, truncates, transactions = self._reload, [], [], []
        for kept in self._keeper.changes(reload.name, reload.table).shares(up_to, self._seen, applied):
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
        return net_effect(part, blocks, truncates, describe, self._spill)


def _not_read(record: TableRecord, reload: Reload, transactions: Transactions) -> Rows:
    """Which of the transactions the rows that were read do not hold."""
    if not reload.snapshot:
        return transactions_that_count(record, transactions, reload.capture_lsn)
    return ~visible_in(reload.snapshot, transactions, np.ones(len(transactions), dtype=np.bool_))
