"""Open epochs: batches that were sealed and are not published yet, and what may be published of them.

Tables run ahead of each other, the ledger does not: a row appears when every table holds its position, in order. Where
shares of several batches were applied as one, the table never stood at the positions in between, so there is no row
at these: they become part of the later one. Pure bookkeeping; positions are LSNs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np

from headwater.lake.ledger import TableVersion
from headwater.log.blocks import Int64
from headwater.replicate.batches.batch import Arrivals, Batch
from headwater.replicate.batches.lanes import Done


@dataclass(slots=True)
class OpenEpoch:
    """A sealed batch. `missing`: tables whose share is not applied yet; `exact`: whether a row may stand at `lsn`."""

    number: int
    lsn: int
    size: int
    changes: int
    transactions: int
    source_time: datetime | None
    demand: bool
    arrivals: Arrivals
    xids: Int64
    begun: float
    missing: set[str]
    exact: bool = True
    touched: dict[str, TableVersion] = field(default_factory=dict)
    last: Done | None = None
    """The share that was applied last: the epoch waited for it."""

    @classmethod
    def of(cls, number: int, batch: Batch, tables: Iterable[str], begun: float) -> OpenEpoch:
        return cls(
            number,
            batch.read_position,
            batch.size,
            batch.changes,
            batch.transaction_count,
            batch.source_time,
            batch.demand,
            batch.arrivals,
            batch.transactions().xid,
            begun,
            set(tables),
        )


class OpenEpochs:
    """In order; `begin` adds one, `resolve` tells what a lane has done, `publishable` takes what may be published."""

    def __init__(self) -> None:
        self._open: deque[OpenEpoch] = deque()
        self._next = 1

    def __len__(self) -> int:
        return len(self._open)

    @property
    def size(self) -> int:
        """Bytes of the log in batches that are not published."""
        return sum(epoch.size for epoch in self._open)

    @property
    def changes(self) -> int:
        return sum(epoch.changes for epoch in self._open)

    def begin(self, batch: Batch, tables: Iterable[str], now: float) -> OpenEpoch:
        epoch = OpenEpoch.of(self._next, batch, tables, now)
        self._next += 1
        self._open.append(epoch)
        return epoch

    def resolve(self, done: Done) -> None:
        """The shares of `done` are applied; its version belongs to the newest of their batches."""
        if not done.numbers:
            return
        first, last = done.numbers[0], done.numbers[-1]
        for epoch in self._open:
            if epoch.number in done.numbers:
                epoch.missing.discard(done.name)
                if epoch.last is None or done.ended >= epoch.last.ended:
                    epoch.last = done
            if first <= epoch.number < last and not done.result.skipped:
                epoch.exact = False  # also where nothing is left of them: a row came and went in between
            if epoch.number == last:
                epoch.touched.update(done.result.versions)

    def publishable(self) -> OpenEpoch | None:
        """Everything up to the furthest position at which every table stands, as one epoch; None: nothing yet."""
        count = 0
        for index, epoch in enumerate(self._open):
            if epoch.missing:
                break
            if epoch.exact:
                count = index + 1
        if not count:
            return None
        taken = [self._open.popleft() for _ in range(count)]
        for epoch in reversed(taken[:-1]):  # the newest first: of a table the newest version stays
            _join(epoch, taken[-1])
        return taken[-1]


def _join(earlier: OpenEpoch, later: OpenEpoch) -> None:
    """What `earlier` did becomes part of `later`."""
    for name, version in earlier.touched.items():
        newer = later.touched.get(name)
        later.touched[name] = version if newer is None else replace(newer, rows=newer.rows + version.rows)
    later.size += earlier.size
    later.changes += earlier.changes
    later.transactions += earlier.transactions
    later.source_time = max((t for t in (earlier.source_time, later.source_time) if t is not None), default=None)
    later.demand = later.demand or earlier.demand
    later.arrivals += earlier.arrivals
    later.xids = np.concatenate([earlier.xids, later.xids])
    later.begun = min(later.begun, earlier.begun)
