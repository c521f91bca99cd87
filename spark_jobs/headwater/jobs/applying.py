"""From a batch to Delta commits: each table's share is netted, planned and committed, tables in parallel.

This is the border at which a table fails alone: a TableError suspends that table, with reason and remedy in the
registry, and the others go on. Here, too, is kept what the ledger will say: versions, applied positions, states.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import numpy as np
from pyspark.sql import SparkSession

from headwater.changes import NetChanges
from headwater.config import Pipeline
from headwater.errors import Diverged, ForeignWrite, SchemaChanged, TableError, Transient
from headwater.failpoints import reach
from headwater.jobs.relations import Relations, new_leaf, refuse_difference, with_leaf
from headwater.jobs.stager_process import Target
from headwater.jobs.staging import Staging
from headwater.lake.apply import Applier
from headwater.lake.ledger import Ledger, TableVersion
from headwater.lake.paths import table_path
from headwater.lake.plan import Applied, Plan, PlanAgain, choose
from headwater.lake.positional import Fence
from headwater.lake.registry import Registry, TableRecord
from headwater.lake.staging import StagedFilesGone
from headwater.lake.tables import current, foreign_data, own_history
from headwater.log.blocks import Block, Chunk, Relation, Transactions, Truncate
from headwater.log.net_effect import net_effect
from headwater.position import format_lsn
from headwater.source.connection import Connection
from headwater.source.snapshots import VisibilitySnapshot

log = logging.getLogger(__name__)

_THREADS = 4
_TRIES = 5
_EPOCH_2000 = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Batch:
    """Consecutive chunks that are applied together."""

    chunks: list[Chunk] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return sum(chunk.changes for chunk in self.chunks)

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    @property
    def demand(self) -> bool:
        return any(chunk.demand for chunk in self.chunks)

    @property
    def transaction_count(self) -> int:
        return sum(len(chunk.transactions) for chunk in self.chunks)

    @property
    def read_position(self) -> int:
        return self.chunks[-1].read_position

    @property
    def source_time(self) -> datetime | None:
        """The newest commit time in the batch, by the source's clock."""
        times = [int(c.transactions.commit_time[-1]) for c in self.chunks if len(c.transactions)]
        return _EPOCH_2000 + timedelta(microseconds=max(times)) if times else None

    def transactions(self) -> Transactions:
        return Transactions.joined([chunk.transactions for chunk in self.chunks])


@dataclass(slots=True)
class _Share:
    blocks: list[Block] = field(default_factory=list)
    truncates: list[Truncate] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`touched`: tables with a new commit; `changed_states`: tables whose state is another than before the batch."""

    touched: dict[str, TableVersion]
    changed_states: frozenset[str]


class Tables:
    """The pipeline's tables while one driver runs."""

    def __init__(self, pipeline: Pipeline, registry: Registry, connection: Connection, ledger: Ledger) -> None:
        self._pipeline = pipeline
        self._registry = registry
        self._connection = connection
        self._ledger = ledger
        self._root = pipeline.lake_path()
        self._relations = Relations(registry.tables)
        self._versions: dict[str, TableVersion] = {}
        self._unwritten: set[str] = set()
        self._changed: set[str] = set()
        self._lock = threading.Lock()
        self._staging: Staging | None = None
        self.silence_limit = _silence_limit(connection)

    @property
    def records(self) -> dict[str, TableRecord]:
        return self._registry.tables

    def owners(self, relation_ids: Iterable[int]) -> set[str]:
        return self._relations.owners(relation_ids)

    def resume(self, spark: Callable[[], SparkSession]) -> None:
        """Read every table's version and applied position; whoever else wrote to a table suspends it. `spark` gives
        a session to the tables that need one."""
        self._applier = Applier(spark, Fence(self._ledger.generation_app, self._ledger.generation))
        before = self._ledger.newest.tables if self._ledger.newest else {}
        for name, record in list(self.records.items()):
            if record.state not in ("active", "catching up", "suspended"):
                continue
            known = before.get(name)
            self._read_version(record, known)
            if known is None or known.state != self.records[name].state:
                self._unwritten.add(name)

    def use(self, staging: Staging) -> None:
        """What was staged of a large transaction is used at its commit."""
        self._staging = staging

    def stageable(self, relation: Relation) -> Target | None:
        """The table that changes of an open transaction may be staged for."""
        name = self._relations.owner(relation.relation_id)
        record = self.records[name] if name is not None else None
        if record is None or record.state != "active":
            return None
        try:
            refuse_difference(record, relation)
        except SchemaChanged:
            return None
        return Target(record.name, table_path(self._root, record.path), record.schema)

    def keep_up(self, names: Iterable[str]) -> None:
        """Behind the ledger: files and checkpoints of tables that were just written. Rows stay what they are, so the
        new version goes into the next row that names the table."""
        for name in filter(self._is_replicated, names):  # a suspended table stays as it is
            version = self._versions[name]
            record = self.records[name]
            now = self._applier.keep_up(table_path(self._root, record.path), record.schema, version.version)
            if now != version.version:
                self._versions[name] = replace(version, version=now)

    def close(self) -> None:
        """End what `resume` has begun."""
        self._applier.close()

    def versions(self) -> dict[str, TableVersion]:
        """Every table as the next ledger row has it."""
        return dict(self._versions)

    def touched_since_row(self) -> dict[str, TableVersion]:
        return {name: self._versions[name] for name in self._unwritten if name in self._versions}

    def row_written(self) -> None:
        self._unwritten.clear()
        self._versions = {name: replace(v, touched=False, rows=0) for name, v in self._versions.items()}

    def withholding(self, lsn: int) -> bool:
        """Whether a row at `lsn` must wait: some table in step already holds changes above it."""
        return any(self._is_ahead(name, version, lsn) for name, version in self._versions.items())

    def _is_ahead(self, name: str, version: TableVersion, lsn: int) -> bool:
        record = self.records[name]
        # A driver that died between "active" and its ledger row leaves a table whose load lies above the ledger.
        loaded_ahead = record.state == "active" and record.capture is not None and record.capture.lsn > lsn
        return loaded_ahead or (record.state in ("active", "catching up") and version.applied_lsn > lsn)

    def join_cuts(self, lsn: int) -> None:
        """Tables whose capture point the position has reached become active: from this row on they are in cuts."""
        for record in list(self.records.values()):
            if record.state == "catching up" and record.capture is not None and record.capture.lsn <= lsn:
                self._ledger.check_fence()
                self._enter(record.entered("active"))

    def suspend(self, name: str, error: TableError) -> bool:
        """What was noticed outside the log suspends a table as well; False when it was not replicated any more."""
        if not self._is_replicated(name):
            return False
        self._suspend(name, error)
        return True

    def apply(self, batch: Batch, still_alive: Callable[[], None]) -> Outcome:
        """Commit the batch's share of every table. Raises what is not one table's own failure."""
        self._changed.clear()
        transactions = batch.transactions()
        shares = self._shares(batch)
        touched: dict[str, TableVersion] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="headwater-apply") as pool:
            running = {
                name: pool.submit(self._apply_share, name, share, transactions, still_alive)
                for name, share in shares.items()
            }
        for name, future in running.items():
            try:
                version = future.result()
            except TableError as error:
                self._suspend(name, error)
                continue
            if version is not None:
                touched[name] = self._versions[name] = version
                self._unwritten.add(name)
        if self._staging is not None:
            self._staging.release(transactions.xid)
        return Outcome(touched, frozenset(self._changed))

    def _shares(self, batch: Batch) -> dict[str, _Share]:
        """The batch by table: only tables that are replicated now."""
        shares: dict[str, _Share] = {}
        for chunk in batch.chunks:
            for block in chunk.blocks:
                name = self._table_for(block.relation)
                if name is not None and self._is_replicated(name):
                    shares.setdefault(name, _Share()).blocks.append(block)
            for truncate in chunk.truncates:
                for name in {self._relations.owner(i) for i in truncate.relation_ids} - {None}:
                    if name is not None and self._is_replicated(name):
                        shares.setdefault(name, _Share()).truncates.append(truncate)
        for name in list(shares):
            try:
                for relation in {block.relation for block in shares[name].blocks}:
                    refuse_difference(self.records[name], relation)
            except SchemaChanged as error:
                self._suspend(name, error)
                del shares[name]
        return shares

    def _is_replicated(self, name: str) -> bool:
        return self.records[name].state in ("active", "catching up")

    def _table_for(self, relation: Relation) -> str | None:
        name = self._relations.owner(relation.relation_id)
        if name is not None:
            return name
        again = self._relations.owner_by_name(relation)
        if again is not None:
            self._relations.disown(relation.relation_id)
            if self._is_replicated(again):
                refused = SchemaChanged(
                    "the table was dropped and created again at the source",
                    where=again,
                    remedy=f"headwater load PIPELINE.yaml --table {again} --again",
                )
                self._suspend(again, refused)
            return None
        return self._adopt_leaf(relation)

    def _adopt_leaf(self, relation: Relation) -> str | None:
        try:
            found = new_leaf(self._connection, relation)
        except SchemaChanged as error:
            self._relations.disown(relation.relation_id)
            parent = self._parent_of(relation)
            if parent is not None and self._is_replicated(parent):
                self._suspend(parent, error)
            return None
        root, leaf = found if found is not None else (0, None)
        name = self._relations.owner(root)
        if name is None or leaf is None:
            self._relations.disown(relation.relation_id)
            return None
        self._registry.write(with_leaf(self.records[name], leaf))
        self._relations.adopt(name, self.records[name])
        log.info("%s: new partition %s.%s", name, leaf.schema, leaf.name)
        return name

    def _parent_of(self, relation: Relation) -> str | None:
        row = self._connection.execute(
            "select pg_partition_root(%s::oid)::oid::bigint", [relation.relation_id]
        ).fetchone()
        return self._relations.owner(int(row[0])) if row and row[0] is not None else None

    def _apply_share(
        self, name: str, share: _Share, transactions: Transactions, still_alive: Callable[[], None]
    ) -> TableVersion | None:
        """Net, plan and commit until the commit is ours; None when nothing of the share was left to do."""
        record = self.records[name]
        for _ in range(_TRIES):
            version = self._versions[name]
            changes = self._net(record, share, transactions, version)
            if changes is None or (changes.is_empty and not self._lacks_mark(record, version)):
                return None
            plan = self._plan(record, changes, version, int(transactions.end_lsn[-1]))
            still_alive()
            reach("replicate.before_table_commit")
            try:
                applied = self._applier.apply(plan)
            except StagedFilesGone:
                if self._staging is not None:
                    self._staging.give_up(int(transactions.xid[0]), name)
                continue
            except PlanAgain:
                self._ledger.check_fence()
                self._read_version(record, version)
                if self.records[name].state == "suspended":
                    return None
                continue
            reach("replicate.after_table_commit")
            self._judge(record, plan, applied)
            return TableVersion(applied.version, plan.to_lsn, record.state, changes.changes, plan.apply_path, True)
        raise Transient(f"{name} changed under each of {_TRIES} attempts to commit", where=name, remedy="run it again")

    def _net(
        self, record: TableRecord, share: _Share, transactions: Transactions, version: TableVersion
    ) -> NetChanges | None:
        counts = self._transactions_that_count(record, transactions, version.applied_lsn)
        if not counts.any():
            return None
        staged = self._staged(record, share, transactions, version)
        if staged is not None:
            return staged

        def describe(sequence: int) -> str:
            index = int(transactions.index_of(np.array([sequence]))[0])
            return f"transaction {transactions.xid[index]} at {format_lsn(int(transactions.end_lsn[index]))}"

        blocks = [(block, counts[transactions.index_of(block.sequence)]) for block in share.blocks]
        truncates = [t for t in share.truncates if counts[transactions.index_of(np.array([t.sequence]))[0]]]
        return net_effect(record.schema, blocks, truncates, describe)

    def _staged(
        self, record: TableRecord, share: _Share, transactions: Transactions, version: TableVersion
    ) -> NetChanges | None:
        """What was done of the one large transaction while it was open."""
        if self._staging is None or len(transactions) != 1 or share.truncates:
            return None
        if self._applier.why_by_engine(record, table_path(self._root, record.path), version.version):
            return None
        rows = self._staging.collect(int(transactions.xid[0]), record.name, record.schema, share.blocks)
        return rows.as_changes(record.schema) if rows is not None else None

    def _transactions_that_count(
        self, record: TableRecord, transactions: Transactions, applied_lsn: int
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Above the applied position, and, while the load hands over, not visible in its snapshot."""
        counts = transactions.end_lsn > applied_lsn
        capture = record.capture
        if capture is not None:
            snapshot = VisibilitySnapshot.parse(capture.snapshot)
            handing_over = (
                counts if capture.handover_end is None else counts & (transactions.end_lsn <= capture.handover_end)
            )
            if handing_over.any():
                visible = np.zeros(len(transactions), dtype=np.bool_)
                visible[handing_over] = snapshot.visible_mask([int(x) for x in transactions.xid[handing_over]])
                counts = counts & ~visible
        return counts

    def _lacks_mark(self, record: TableRecord, version: TableVersion) -> bool:
        """A batch that comes to nothing passes its positions all the same: a stopped driver that wakes up with the
        first half of it must find the table taken."""
        return self._applier.lacks_mark(record, table_path(self._root, record.path), version.version)

    def _plan(self, record: TableRecord, changes: NetChanges, version: TableVersion, to_lsn: int) -> Plan:
        path = table_path(self._root, record.path)
        by_engine = self._applier.why_by_engine(record, path, version.version)
        apply_path, because = choose(changes, insert_only=record.schema.insert_only, by_engine=by_engine)
        return Plan(
            record=record,
            path=path,
            app_id=record.app_id(self._pipeline.name),
            version=version.version,
            to_lsn=to_lsn,
            changes=changes,
            apply_path=apply_path,
            because=because,
            by_engine=by_engine,
        )

    def _judge(self, record: TableRecord, plan: Plan, applied: Applied) -> None:
        if applied.noted:
            log.info("%s: accepted commits of others that only rearrange files: %s", record.name, applied.noted)
        if not applied.divergence:
            return
        rows = f"{applied.divergence} rows of the log contradict the lake up to {format_lsn(plan.to_lsn)}"
        message = f"{rows}: {applied.example}"
        if record.on_divergence != "suspend":
            log.warning("%s: diverged (%s): %s", record.name, record.on_divergence, message)
            with self._lock:
                self._registry.write(replace(record, reason=f"diverged ({record.on_divergence}): {message}"))
            return
        # The commit exists: the table stands at it, and stays there.
        self._versions[record.name] = TableVersion(
            applied.version, plan.to_lsn, "suspended", plan.changes.changes, plan.apply_path, True
        )
        raise Diverged(message, where=record.name, remedy=f"headwater load PIPELINE.yaml --table {record.name} --again")

    def _read_version(self, record: TableRecord, known: TableVersion | None) -> None:
        """Where the table stands now; a data commit that is not ours suspends it."""
        path, app_id = table_path(self._root, record.path), record.app_id(self._pipeline.name)
        found = current(path, app_id)
        if found is None:
            self._suspend(
                record.name,
                ForeignWrite(
                    "the Delta table is gone from the lake",
                    where=record.name,
                    remedy=f"headwater load PIPELINE.yaml --table {record.name} --again",
                ),
            )
            return
        version, applied_lsn = found
        self._versions[record.name] = TableVersion(version, applied_lsn, record.state)
        if record.state == "suspended":
            return
        # Known since this load: what the ledger says of the one before lies below the capture point.
        if known is not None and known.applied_lsn >= record.start_lsn > 0:
            self._refuse_fallen_back(record, applied_lsn, known.applied_lsn)
        if self.records[record.name].state == "suspended":
            return
        problem = foreign_data(own_history(path, version, app_id, known.version if known is not None else None), app_id)
        if problem:
            self._suspend(
                record.name,
                ForeignWrite(
                    problem,
                    where=record.name,
                    remedy=f"headwater load PIPELINE.yaml --table {record.name} --again",
                ),
            )

    def _refuse_fallen_back(self, record: TableRecord, found: int, known: int) -> None:
        if found < known:
            lost = f"its applied position fell back from {format_lsn(known)} to {format_lsn(found)}: commits are lost"
            remedy = f"headwater load PIPELINE.yaml --table {record.name} --again"
            self._suspend(record.name, ForeignWrite(lost, where=record.name, remedy=remedy))

    def _suspend(self, name: str, error: TableError) -> None:
        self._ledger.check_fence()  # what a fenced driver believes of a table is of no interest any more
        log.error("%s: suspended: %s", name, error)
        self._enter(self.records[name].entered("suspended", error.message, error.remedy))

    def _enter(self, record: TableRecord) -> None:
        name = record.name
        with self._lock:  # tables are applied in parallel, and the registry has one writer
            self._registry.write(record)
            if name in self._versions:
                self._versions[name] = replace(self._versions[name], state=record.state)
            self._unwritten.add(name)
            self._changed.add(name)


def _silence_limit(connection: Connection) -> float:
    """Half of wal_sender_timeout, after which the server may give the slot to somebody else; 30 s if it is off."""
    row = connection.execute("select setting::int from pg_settings where name = 'wal_sender_timeout'").fetchone()
    milliseconds = int(row[0]) if row else 0
    return milliseconds / 2000 if milliseconds else 30.0
