"""The content of a large reload or rebuild is made ready beside its table's lane, which goes on applying meanwhile.

In the lane a reload begins with a look at where the table stands, and ends with one commit; what lies in between, and
grows with the table (an index of the new keys, the rows that go, the changes of the meantime), is done by a thread of
its own. Changes are brought in by rounds, each of what has come during the one before, until little is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Final

from headwater.apply.direct import bring_forward
from headwater.apply.live_table import Base
from headwater.apply.made_ready import MadeReady, on_rows_of, reload_counter
from headwater.apply.plan import Plan, choose
from headwater.apply.waiting_files import WaitingFiles, are_listed, waiting_files
from headwater.errors import Refused, TableError
from headwater.failpoints import reach
from headwater.lake.registry import TableRecord
from headwater.lake.reload_records import Reload
from headwater.log.spill import SpillStore
from headwater.pipeline_file.where_text import parse
from headwater.predicate import OneOf, Predicate
from headwater.replicate.batches.retries import reason_of
from headwater.replicate.beside.kept_since import KeptSince
from headwater.replicate.tables.tables import Tables
from headwater.schema import PARTITION_COLUMN, TableSchema

log = logging.getLogger(__name__)

_FEW: Final = 20_000
"""Changes that the lane may bring in: some tenths of a second."""
_ROUNDS: Final = 50
_ATTEMPTS: Final = 10
_LONGEST_REST: Final = 60.0


class ReloadPreparation:
    """Of one reload. `run` beside the lane; the rest in it."""

    def __init__(
        self, tables: Tables, reload: Reload, waiting: WaitingFiles, spill: SpillStore, stopped: Callable[[], bool]
    ) -> None:
        self._tables, self._reload, self._waiting, self._stopped = tables, reload, waiting, stopped
        self._changes = KeptSince(tables.keeper, reload, spill)
        self._ready: MadeReady | None = None

    @property
    def made_ready(self) -> MadeReady:
        """Up to the last change that was brought in."""
        assert self._ready is not None, "it has run"
        return self._ready

    def give_up(self) -> None:
        """It is not going to be committed, and does not run (any more)."""
        if self._ready is not None:
            self._ready.give_up()

    def run(self, base: Base, position: Callable[[], int]) -> None:
        """Make it ready. `position`: up to where every table holds all. Refused when its files are gone, TableError
        where it has to be done in the lane, InterruptedError when nobody wants it any more."""
        reload, name = self._reload, self._reload.table
        if self._waiting.rows != reload.rows:
            raise Refused("rows that were read are gone from the lake", code="reload_failed", where=name)
        schema = self.schema(self._tables.records[name])
        emptied: Predicate | None = OneOf(PARTITION_COLUMN, reload.leaves) if reload.leaves else None
        if reload.where:
            emptied = parse(reload.where, schema)
        becomes = reload.shape is not None
        self._ready = MadeReady(base, schema, self._waiting, emptied, self._refuse_to_go_on, becomes=becomes)
        for _ in range(_ROUNDS):
            reach("replicate.before_round", name)
            stands = self._tables.states.versions[name]
            if self.bring_forward(max(position(), stands.applied_lsn), stands.applied_lsn) <= _FEW:
                break

    def schema(self, record: TableRecord) -> TableSchema:
        """The columns of the rows; partitions may have come since they were read."""
        shape = self._reload.shape
        return shape.with_leaves(record.schema.leaves) if shape is not None else record.schema

    def bring_forward(self, up_to: int, applied: int | None = None) -> int:
        """What has been kept since the last time; how many changes. As of `KeptSince.net`."""
        self._refuse_to_go_on()
        record, ready = self._tables.records[self._reload.table], self.made_ready
        schema = self.schema(record)
        net = self._changes.net(record, schema, up_to, applied)
        if net is None:
            return 0
        if self._reload.where and ready.emptied is not None:
            net = on_rows_of(ready.emptied, net, schema)
        apply_path, because = choose(net, schema, "")
        # A row of the part that stood there before, or did not, is no matter here: the part is as it was read.
        lenient = replace(record, on_divergence="repair", schemas=((0, schema),))
        plan = Plan(lenient, self._waiting.folder, "", ready.rows.version, 0, net, apply_path, because)
        if not net.is_empty:
            bring_forward(ready, plan)
        return net.changes

    def _refuse_to_go_on(self) -> None:
        if self._stopped():
            raise InterruptedError


class Preparations:
    """Of all reloads of a driver, one after the other; each begins and ends in its table's lane. `close` ends them."""

    def __init__(self, tables: Tables, root: str, spill: SpillStore, position: Callable[[], int]) -> None:
        self._tables, self._root, self._spill, self._position = tables, root, spill, position
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="headwater-prepare")
        self._running: dict[str, tuple[ReloadPreparation, Future[None]]] = {}
        self._unwanted: set[str] = set()
        self._failed: dict[str, int] = {}
        self._rests: dict[str, float] = {}  # until when (monotonic)
        self._slow: set[str] = set()
        self._closing = Event()

    def is_due(self, reload: Reload) -> bool:
        """Whether it is to be made ready, and is not."""
        if reload.name in self._running or reload.name in self._slow or reload.suspended:
            return False
        return are_listed(self._root, reload.name)

    def begin(self, reload: Reload) -> None:
        """In its table's lane."""
        if time.monotonic() < self._rests.get(reload.name, 0.0):
            return
        waiting, base = waiting_files(self._root, reload.name), None
        if waiting is not None:
            part = bool(reload.leaves or reload.where)
            base = self._tables.base(reload.table, len(waiting.files), part=part)
        # Written by Spark; or a driver before this one has committed it, and died before it said so.
        if waiting is None or base is None or self._is_done(reload, base):
            self._slow.add(reload.name)
            return

        def is_unwanted() -> bool:
            return self._closing.is_set() or reload.name in self._unwanted

        preparation = ReloadPreparation(self._tables, reload, waiting, self._spill, is_unwanted)
        log.info("%s: %s is made ready: %d rows", reload.table, reload.shown, waiting.rows)
        self._running[reload.name] = preparation, self._pool.submit(preparation.run, base, self._position)

    def _is_done(self, reload: Reload, base: Base) -> bool:
        app_id = self._tables.records[reload.table].app_id(self._tables.pipeline)
        return reload_counter(app_id, reload.name) in base.snapshot.transactions

    def is_running(self, reload: Reload) -> bool:
        """Whether its merge has to wait."""
        known = self._running.get(reload.name)
        if known is None:
            return False
        error = known[1].exception() if known[1].done() else None
        if isinstance(error, TableError):
            self.slowly(reload, error)
        elif error is not None and not isinstance(error, Refused):
            self.again(reload, error)
            return reload.name not in self._slow
        return not known[1].done()

    def take(self, reload: Reload) -> ReloadPreparation | None:
        """What is ready; None: the lane has to do it all. Raises Refused when it cannot be done."""
        known = self._running.get(reload.name)
        if known is None:
            return None
        known[1].result()
        return known[0]

    def slowly(self, reload: Reload, why: BaseException) -> None:
        """It cannot be made ready beside the lane, or not brought forward after all."""
        log.info("%s: %s is merged by its lane alone: %s", reload.table, reload.shown, reason_of(why))
        self._drop(reload.name)
        self._slow.add(reload.name)

    def let_go(self, reload: Reload) -> None:
        """Of what was made ready, a part of which a commit may name."""
        self._running.pop(reload.name, None)

    def again(self, reload: Reload, why: BaseException) -> None:
        """It is to be begun anew after a rest, unless that has failed too often."""
        failed = self._failed[reload.name] = self._failed.get(reload.name, 0) + 1
        if failed >= _ATTEMPTS:
            self.slowly(reload, why)
            return
        log.warning("%s: %s was not made ready, and is begun again: %s", reload.table, reload.shown, reason_of(why))
        self._drop(reload.name)
        self._rests[reload.name] = time.monotonic() + min(2.0**failed, _LONGEST_REST)

    def forget(self, name: str) -> None:
        """The reload is over; what was committed of it stays."""
        self._unwanted.add(name)
        self._running.pop(name, None)
        self._slow.discard(name)
        self._failed.pop(name, None)
        self._rests.pop(name, None)

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _drop(self, name: str) -> None:
        known = self._running.pop(name, None)
        if known is not None:
            known[0].give_up()
