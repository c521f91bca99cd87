"""A driver's tables: what is known of them as it begins, what it works on them with, and where that ends.

What is done to a table has its own file: `headwater.replicate.tables.shares` (its share of a batch),
`headwater.replicate.tables.states` (into which state it comes), `headwater.replicate.tables.foreign_writes` (where it
stands, and what others did), `headwater.replicate.tables.upkeep` (its files).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType

from headwater.apply.applier import Applier
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import Fence
from headwater.apply.live_table import Base
from headwater.apply.made_ready import MadeReady
from headwater.apply.warm_tables import WarmTables
from headwater.delta import storage
from headwater.errors import ForeignWrite, TableError
from headwater.lake.cuts import history_name, table_of
from headwater.lake.ledger import Ledger, TableVersion
from headwater.lake.registry import Registry, TableRecord
from headwater.log.blocks import Int64
from headwater.maintain.caretaker import Caretaker
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.batches.lanes import Result
from headwater.replicate.batches.retries import Retries, TryAgain
from headwater.replicate.preapply.decide import Staging
from headwater.replicate.tables.attempts import Attempts
from headwater.replicate.tables.columns import Evolving
from headwater.replicate.tables.commits import TableCommits
from headwater.replicate.tables.foreign_writes import ForeignWrites
from headwater.replicate.tables.histories import Histories
from headwater.replicate.tables.joining import Joining
from headwater.replicate.tables.keeper import Keeper
from headwater.replicate.tables.owners import Owners
from headwater.replicate.tables.planning import Planner
from headwater.replicate.tables.reshaping import Reshaping
from headwater.replicate.tables.shares import Shares
from headwater.replicate.tables.states import TableStates
from headwater.replicate.tables.upkeep import TableUpkeep
from headwater.source.connection import Session
from headwater.spark.session import SparkOnDemand

_never = threading.Event()


class Tables:
    """The pipeline's tables while one driver runs. `shares`, `commits`, `columns`, `reshaping`, `planner`, `keeper` and
    `upkeep` are there from `resume` on."""

    shares: Shares
    commits: TableCommits
    columns: Evolving
    reshaping: Reshaping
    planner: Planner
    keeper: Keeper
    upkeep: TableUpkeep

    def __init__(
        self, pipeline: Pipeline, registry: Registry, session: Session, ledger: Ledger, *, binary: bool
    ) -> None:
        """`binary`: whether the log sends values in their binary form."""
        self._pipeline, self._registry, self._ledger, self._binary = pipeline, registry, ledger, binary
        self._root = pipeline.lake_path()
        self.states = TableStates(self._root, registry, ledger)
        self.records, self.next_row = self.states.records, self.states.next_row
        self.owners = Owners(self.states, session)
        self.joining = Joining(self.states)
        self.retries = Retries(self._root, pipeline.replicate.retry_seconds)
        self._histories = Histories(pipeline.name, self._root, ledger, self.states.versions)
        self.foreign = ForeignWrites(pipeline.name, self.states, self._histories, self.retries)
        self._attempts = Attempts(self.states, self.retries)
        self._staging: Staging | None = None
        self.files_seen: Mapping[int, int] = MappingProxyType({})
        """By relation the newest files that the catalog showed under the columns that are registered."""
        self.columns_seen: Mapping[int, int] = MappingProxyType({})
        """By relation the newest attnum of a virtual column that it showed beside them."""

    def use(self, staging: Staging) -> None:
        """What was staged of a large transaction is used at its commit."""
        self._staging = staging

    def resume(
        self,
        spark: SparkOnDemand,
        warm: WarmTables | None = None,
        stopped: Callable[[float], bool] = _never.wait,
        damaged: Mapping[str, str] = MappingProxyType({}),
    ) -> bool:
        """Read every table's version and applied position; whoever else wrote to a table suspends it. `spark` gives
        a session to the tables that need one; `warm`: what was read of them before. `stopped` waits for so many
        seconds; False when it says so: then nothing was begun. `damaged`: tables and histories that are, and why."""
        warm = warm or WarmTables()
        self.states.see_all()
        for name, why in damaged.items():
            table = table_of(name)
            remedy = f"headwater load PIPELINE.yaml --table {table} --again"
            self.states.suspend(table, ForeignWrite(f"a file is damaged: {why}", where=name, remedy=remedy))
        before = self._ledger.newest.tables if self._ledger.newest else {}
        states = ("active", "catching up", "suspended")
        present = [record for record in self.records.values() if record.state in states]
        for record in present:
            self.foreign.forget(record.name)
        if not self._in_rounds({r.name: partial(self._find, r, before.get(r.name), warm) for r in present}, stopped):
            return False
        self._equip(spark, warm)
        found = [record for record in self.records.values() if record.name in self.states.versions]
        if self._in_rounds({r.name: partial(self._resume_history, r, before) for r in found}, stopped):
            return True
        self.close()
        return False

    def _find(self, record: TableRecord, known: TableVersion | None, warm: WarmTables) -> None:
        self.foreign.read(record, known, warm.current)
        news = known is None or known.state != self.records[record.name].state
        self.next_row.found(self.states.versions.of(record.name), news=news)

    def _resume_history(self, record: TableRecord, before: Mapping[str, TableVersion]) -> None:
        if not (record.schemas and record.schema.history):
            return
        try:
            self._histories.resume(self._applier, record)
            name = history_name(record.name)
            known = before.get(name)
            news = known is None or known.state != record.state
            self.next_row.found({name: self.states.versions[name]}, news=news)
            if known is not None and record.is_followed:
                self._histories.refuse_damage(record, known)
        except TableError as error:
            self.states.suspend(record.name, error)

    def _in_rounds(self, works: Mapping[str, Callable[[], None]], stopped: Callable[[float], bool]) -> bool:
        """Each table's work while there are no lanes; in a store, where it is mostly waiting for answers, of many
        tables at once. Those that fail are tried again together, so that it shows whether it is all of them; the others
        wait until that is over. Whether it was not stopped."""
        left = dict(works)
        while left:
            rests = storage.side_by_side(self._root, [partial(self._rest, *each) for each in left.items()])
            again = {name: rest for name, rest in zip(left, rests, strict=True) if rest is not None}
            left = {name: left[name] for name in again}
            if left and stopped(max(again.values())):
                return False
        return True

    def _rest(self, name: str, work: Callable[[], None]) -> float | None:
        """An attempt; seconds until the next one, if there is to be one."""
        try:
            self._attempts.attempt(name, work)
        except TryAgain as later:
            return later.seconds
        return None

    def _equip(self, spark: SparkOnDemand, warm: WarmTables) -> None:
        """With what is worked on the tables, whose generation has begun."""
        states, foreign, histories, ledger = self.states, self.foreign, self._histories, self._ledger
        name, fence = self._pipeline.name, Fence(ledger.generation_app, ledger.generation)
        tasks = FileTasks(spark, self._root)
        self._applier = applier = Applier(spark, fence, warm.take_states(), tasks)
        self.keeper = Keeper(self._root, ledger.generation)
        self.planner = Planner(name, self._root, applier, self._staging)
        self.reshaping = Reshaping(name, states, foreign, fence, self._registry.reloads)
        self.columns = Evolving(
            self._pipeline,
            states,
            foreign,
            histories,
            self.reshaping,
            fence,
            tasks,
            self.files_seen,
            self.columns_seen,
            binary=self._binary,
        )
        self.commits = TableCommits(states, foreign, histories, applier, self.columns, self.planner, self._staging)
        self.shares = Shares(states, self.owners, self.keeper, self.commits, self.retries, self.attempt)
        caretaker = Caretaker(self._root, ledger.generation, self._pipeline.lake.keep_cuts, self.records.values())
        self.upkeep = TableUpkeep(states, self.joining, self._attempts, self.retries, histories, applier, caretaker)

    def close(self) -> None:
        """End what `resume` has begun."""
        self.upkeep.close()
        self._applier.close()

    def attempt(self, name: str, work: Callable[[], None], key: str = "") -> Result:
        """In its lane: see `headwater.replicate.tables.attempts`."""
        return self._attempts.attempt(name, work, key=key, read_anew=self._read_anew)

    def _read_anew(self, name: str) -> None:
        """In its lane, behind a failure: it may have come after the commit, and halfway through what is known of the
        table."""
        record = self.records[name]
        if not record.is_followed:
            return  # who works on it all the same has it read
        self._applier.forget(self.states.folder(record))
        self.foreign.look_again(record)
        self.foreign.refuse_lost(name)
        if record.schema.history:
            self._applier.forget(self.foreign.folders(name)[history_name(name)])
            self._histories.resume(self._applier, record)

    @property
    def pipeline(self) -> str:
        return self._pipeline.name

    def folder(self, name: str) -> str:
        """Where the table lies in the lake."""
        return self.states.folder(self.records[name])

    def base(self, name: str, files: int, *, part: bool) -> Base | None:
        """In its lane: what about so many `files` are made ready by, for a `part` of it or all; None: it is written by
        Spark."""
        version = self.states.versions[name].version
        return self._applier.base(self.records[name], self.folder(name), version, files, part=part)

    def has_counted(self, name: str, counters: Iterable[str]) -> bool:
        """In its lane, once a commit upon it was planned: whether one that counts one of these appIds is in its log."""
        return self._applier.has_counted(self.folder(name), counters)

    def has_room_for(self, name: str, ready: MadeReady) -> bool:
        """In its lane: whether what was made ready can still be taken as it is."""
        return self._applier.has_room_for(self.folder(name), ready)

    def meet(self, record: TableRecord) -> None:
        """In its lane: a load has committed the table while this driver runs."""
        self.foreign.read(record, None)
        self._resume_history(record, {})

    def meet_unfollowed(self, name: str) -> None:
        """In its lane: a suspended table is to be written all the same."""
        self._applier.forget(self.states.folder(self.records[name]))
        self.foreign.meet_unfollowed(name)

    def forget(self, name: str) -> None:
        """In its lane: the table is being loaded; what was known of it counts no more."""
        self.states.versions.pop(name, None)
        self._attempts.forget(name)
        self.upkeep.leave(name)
        self.foreign.forget(name)
        self._applier.forget(self.states.folder(self.records[name]))

    def applied(self, xids: Int64) -> None:
        """Every table holds these transactions: what was staged of them is not needed any more."""
        if self._staging is not None:
            self._staging.release(xids)
