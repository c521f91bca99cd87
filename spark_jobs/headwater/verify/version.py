"""Which version of a lake table `verify` compares: the first one that holds everything up to a capture point.

Waits for it as `wait` does. Where no driver runs there is one more way: if the slot has nothing to deliver between
the newest epoch and the capture point, that epoch is the source's state at the capture point, too. Only looked at,
never consumed. Otherwise the lake is merely late, and what is late must not be reported as different: Transient.

Commits of others stand above every epoch's version until a driver meets them, and whoever reads the table without
a cut sees them already: they are compared, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg

from headwater.delta.tables import commits_after, current
from headwater.errors import Transient
from headwater.lake.cuts import Pin, pin_cut, release_pin, take_cut
from headwater.lake.freshness import Outcome
from headwater.lake.ledger import Epoch, read_epoch
from headwater.lake.looks import often
from headwater.lake.paths import table_path
from headwater.lake.reader import LakeReader
from headwater.lake.registry import Registry, TableRecord
from headwater.lake.requirements import Target
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position, format_lsn, parse_lsn
from headwater.source.connection import Connection
from headwater.source.publication.publication import inserts_name
from headwater.source.slot import read_slot
from headwater.waiting.lookout import Lookout
from headwater.waiting.request import WaitRequest, deadline_in
from headwater.waiting.waiter import Waiter

_PEEK_CHANGES = 100_000


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: `timeout` for a driver that runs, `without_driver` for one to appear."""

    timeout: float = 120.0
    without_driver: float = 15.0


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version of a table's Delta table, and the epoch it belongs to (None: the table is not in step)."""

    path: str
    version: int
    epoch: int | None


class Versions:
    """Of the tables that one command compares."""

    def __init__(self, pipeline: Pipeline, registry: Registry, connection: Connection, patience: Patience) -> None:
        self._pipeline, self._registry, self._connection = pipeline, registry, connection
        self._patience = patience
        self._lake = LakeReader(pipeline.lake_path(), pipeline.name)  # with many tables to read it anew costs the most

    @contextlib.contextmanager
    def holding(self, name: str, at: Position) -> Iterator[StoredVersion | None]:
        """The version of table `name` that holds every commit up to `at`, kept from clean-up inside the block.

        A suspended table is taken as it stands: nothing will move it. None: there is nothing to compare (see its
        state). Transient when the lake does not get there in time.
        """
        registry = self._registry
        registry.refresh()
        if registry.tables[name].state == "suspended":
            yield self._as_it_stands(registry.tables[name])
            return
        pin = self._wait(name, at)
        if pin is None:
            registry.refresh()
            suspended = registry.tables[name].state == "suspended"
            yield self._as_it_stands(registry.tables[name]) if suspended else None
            return
        try:
            table = pin.cut["tables"][name]
            record = registry.tables[name]
            path = table_path(self._pipeline.lake_path(), record.path)
            foreign = [
                commit.version
                for commit in commits_after(path, table["version"])
                if commit.data and record.app_id(self._pipeline.name) not in commit.transactions
            ]
            yield StoredVersion(path, max([table["version"], *foreign]), pin.cut["epoch"])
        finally:
            release_pin(self._pipeline.lake_path(), pin.id)

    def _as_it_stands(self, record: TableRecord) -> StoredVersion | None:
        path = table_path(self._pipeline.lake_path(), record.path)
        found = current(path, record.app_id(self._pipeline.name))
        return StoredVersion(path, found[0], None) if found is not None else None

    def _wait(self, name: str, at: Position) -> Pin | None:
        """The pinned cut of table `name` that holds `at`; None when its state forbids waiting."""
        pipeline, patience = self._pipeline, self._patience
        owner = f"verify {socket.gethostname()}:{os.getpid()}"
        request = WaitRequest(
            wanted=Target(at.lsn, at.timeline, at.system_id),
            deadline=deadline_in(patience.timeout),
            keep=_keep(pipeline),
            owner=owner,
            tables=(TableName.parse(name),),
        )
        lookout = Lookout(pipeline, self._lake)
        waiter = Waiter(pipeline, request, lookout)
        alive = time.monotonic()
        next_question = 0.0
        looked_at = -1
        while (result := waiter.look()) is None:
            now = time.monotonic()
            if now >= next_question:
                next_question = now + 0.5
                slot = read_slot(self._connection, pipeline.source.slot)
                if slot is not None and slot.active:
                    alive = now
                else:
                    epoch = read_epoch(pipeline.lake_path())
                    if epoch is not None and epoch.epoch != looked_at:
                        looked_at = epoch.epoch
                        if self._nothing_between(name, epoch, at):
                            return self._pin(name, epoch, at, owner)
                    if now - alive >= patience.without_driver:
                        raise _late(pipeline, name, at, "no replicate is running", Outcome.NOT_RUNNING)
            time.sleep(often(pipeline.lake_path()).wait[0])
            lookout.refresh()
        if result.pin is not None:
            return result.pin
        if result.outcome in (Outcome.SUSPENDED, Outcome.LOADING):
            return None
        if result.outcome in (Outcome.TIMED_OUT, Outcome.NOT_RUNNING):
            raise _late(pipeline, name, at, result.verdict.reason, result.outcome)
        raise result.error()

    def _nothing_between(self, name: str, epoch: Epoch, at: Position) -> bool:
        """Whether the log holds no change of the pipeline's tables above `epoch` and up to `at`."""
        version = epoch.tables.get(name)
        if version is None or version.state != "active" or not epoch.position.same_log(at):
            return False
        source = self._pipeline.source
        try:
            row = self._connection.execute(
                """
                select count(*), max(case when get_byte(data, 0) = 67
                             then '0/0'::pg_lsn + ('x' || encode(substr(data, 11, 8), 'hex'))::bit(64)::bigint end)
                  from pg_logical_slot_peek_binary_changes(%s, %s, %s, 'proto_version', '1', 'publication_names', %s)
                """,
                [
                    source.slot,
                    format_lsn(at.lsn),
                    _PEEK_CHANGES,
                    f'"{source.publication}","{inserts_name(source.publication)}"',
                ],
            ).fetchone()
        except psycopg.errors.ObjectInUse:
            return False  # a driver has just come
        assert row is not None
        count, last = row
        # What the newest epoch already holds may lie in the slot still: a driver that was killed did not confirm it.
        return int(count) < _PEEK_CHANGES and (last is None or parse_lsn(last) <= epoch.position.lsn)

    def _pin(self, name: str, epoch: Epoch, at: Position, owner: str) -> Pin:
        root = self._pipeline.lake_path()
        seen = self._lake.look()
        cut = take_cut(root, self._pipeline.name, seen, epoch, [name], max(at.lsn, epoch.position.lsn))
        return pin_cut(root, cut, owner, datetime.now(UTC) + timedelta(seconds=_keep(self._pipeline)))


def _keep(pipeline: Pipeline) -> float:
    """Seconds of the pin, which is given back as soon as the version has been read: that may come after the source's
    rows, and these take as long as a snapshot lasts."""
    return pipeline.load.max_snapshot_age + 3600.0


def _late(pipeline: Pipeline, name: str, at: Position, reason: str, outcome: Outcome) -> Transient:
    return Transient(
        f"the lake does not hold the source's state at {format_lsn(at.lsn)} yet: {reason}",
        code=str(outcome),
        where=f"pipeline {pipeline.name}, table {name}",
        remedy="headwater replicate PIPELINE.yaml --until now, then verify again; or verify while replicate runs",
    )
