"""From a batch to Delta commits: each table's share is netted, planned and committed, in that table's lane.

This is the border at which a table fails alone: a TableError suspends that table, with reason and remedy in the
registry, and the others go on. What may pass is tried again first (`headwater.replicate.batches.retries`). Here, too,
is known where each table stands; what the next ledger row says of it is `headwater.replicate.tables.next_row`'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from pyspark.sql import SparkSession

from headwater.apply.applier import Applier, overwriting_named
from headwater.apply.direct import Fence
from headwater.apply.plan import Applied, Plan, PlanAgain
from headwater.apply.staged.files import StagedFilesGone
from headwater.apply.warm_tables import WarmTables
from headwater.columns.changes import refuse_difference
from headwater.delta import entries, storage
from headwater.delta.foreign_terms import foreign_terms, why_unwritable
from headwater.delta.log_entries import log_entry
from headwater.delta.tables import current, foreign_data, is_ours, own_history, replaced_below
from headwater.errors import Diverged, ForeignWrite, KeepsChanging, SchemaChanged, TableError
from headwater.failpoints import reach
from headwater.lake.cuts import HISTORY, history_name, table_of
from headwater.lake.history import history_record
from headwater.lake.ledger import Ledger, TableVersion
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry, State, TableRecord
from headwater.lake.reload_records import Keeping
from headwater.log.blocks import Int64, Relation, Transactions
from headwater.maintain.caretaker import Caretaker
from headwater.net_changes import NetChanges
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.replicate.batches.batch import Batch, Share
from headwater.replicate.batches.lanes import Result
from headwater.replicate.batches.retries import Retries, TryAgain, reason_of
from headwater.replicate.preapply.decide import Staging
from headwater.replicate.preapply.process import StagingTarget
from headwater.replicate.tables.columns import Evolving
from headwater.replicate.tables.histories import Histories
from headwater.replicate.tables.keeper import Keeper
from headwater.replicate.tables.next_row import NextRow
from headwater.replicate.tables.planning import Planner
from headwater.replicate.tables.relations import (
    Relations,
    attached_leaves,
    attached_message,
    awaiting,
    new_leaf,
    with_leaf,
)
from headwater.schema import Leaf, TableSchema
from headwater.source.connection import Session

log = logging.getLogger(__name__)

_TRIES = 5
_never = threading.Event()

_Look = Callable[[str, str, tuple[int, int] | None], tuple[int, int] | None]


class Tables:
    """The pipeline's tables while one driver runs."""

    def __init__(
        self, pipeline: Pipeline, registry: Registry, session: Session, ledger: Ledger, *, binary: bool
    ) -> None:
        """`binary`: whether the log sends values in their binary form."""
        self._pipeline = pipeline
        self._binary = binary
        self._registry = registry
        self._session = session
        self._ledger = ledger
        self._root = pipeline.lake_path()
        self._records = dict(registry.tables)
        self._entering = threading.Lock()
        self._relations = Relations(self._records)
        self.histories = Histories(pipeline.name, self._root, ledger)
        self._versions: dict[str, TableVersion] = {}  # where each table stands
        self._before: dict[str, dict[str, TableVersion]] = {}  # where it stood before what is under way on it
        self._doubtful: set[str] = set()  # tables of which what is known may be halfway through
        self.next_row = NextRow(self._owner)
        self.retries = Retries(self._root, pipeline.replicate.retry_seconds)
        self._staging: Staging | None = None
        self.answers: dict[str, Keeping] = {}
        """What this driver has answered to reloads that are not done."""
        self.catching_up: set[str] = set()
        """Loaded tables that do not hold yet what was kept for them, as far as the main thread knows."""
        self.files_seen: Mapping[int, int] = MappingProxyType({})
        """By relation the newest files that the catalog showed under the columns that are registered."""
        self._rejoining: set[str] = set()  # tables that were put right by what no row knows of yet

    @property
    def records(self) -> dict[str, TableRecord]:
        """The tables as this driver goes by them. Any write of any thread may read the registry again, and with it what
        other jobs have entered; that counts when it is followed (`see`), or a batch would leave out a table of which
        the next row still says that it is in step."""
        return self._records

    def see(self, record: TableRecord) -> None:
        """What another job has entered counts from now on."""
        with self._entering:  # or a lane's word, since `record` was read, would be undone
            self._records[record.name] = self._registry.tables.get(record.name, record)

    def see_details(self, name: str) -> None:
        """The same, unless its state is news that is yet to be followed."""
        with self._entering:
            known, now = self._records.get(name), self._registry.tables.get(name)
            if known is not None and now is not None and known.phase == now.phase:
                self._records[name] = now

    def owners(self, relation_ids: Iterable[int]) -> set[str]:
        return self._relations.owners(relation_ids)

    def resume(
        self,
        spark: Callable[[], SparkSession],
        warm: WarmTables | None = None,
        stopped: Callable[[float], bool] = _never.wait,
        damaged: Mapping[str, str] = MappingProxyType({}),
    ) -> bool:
        """Read every table's version and applied position; whoever else wrote to a table suspends it. `spark` gives
        a session to the tables that need one; `warm`: what was read of them before. `stopped` waits for so many
        seconds; False when it says so: then nothing was begun. `damaged`: tables and histories that are, and why."""
        warm = warm or WarmTables()
        self._records.update(self._registry.tables)
        for name, why in damaged.items():
            if self.is_replicated(table_of(name)):
                remedy = f"headwater load PIPELINE.yaml --table {table_of(name)} --again"
                self._suspend(table_of(name), ForeignWrite(f"a file is damaged: {why}", where=name, remedy=remedy))
        before = self._ledger.newest.tables if self._ledger.newest else {}
        states = ("active", "catching up", "suspended")
        present = [name for name, record in self.records.items() if record.state in states]
        for name in present:
            for path in self._folders(name).values():
                entries.forget(path)
        if not self._in_rounds(
            {name: partial(self._find, self.records[name], before.get(name), warm) for name in present}, stopped
        ):
            return False
        fence = Fence(self._ledger.generation_app, self._ledger.generation)
        self._applier = Applier(spark, fence, warm.take_states())
        self._evolving = Evolving(self._pipeline, self, fence, binary=self._binary)
        self.planner = Planner(self._pipeline.name, self._root, self._applier, self._staging)
        self.keeper = Keeper(self._root, self._ledger.generation)
        keep_cuts = self._pipeline.lake.keep_cuts
        self._caretaker = Caretaker(self._root, self._ledger.generation, keep_cuts, self.records.values())
        records = [record for record in self.records.values() if record.name in self._versions]
        if self._in_rounds({r.name: partial(self._resume_history, r, before) for r in records}, stopped):
            return True
        self.close()
        return False

    def _find(self, record: TableRecord, known: TableVersion | None, warm: WarmTables) -> None:
        self._read_version(record, known, warm.current)
        news = known is None or known.state != self.records[record.name].state
        self.next_row.found(self.standing(record.name), news=news)

    def _in_rounds(self, works: Mapping[str, Callable[[], None]], stopped: Callable[[float], bool]) -> bool:
        """Each table's work while there are no lanes. Those that fail are tried again together, so that it shows
        whether it is all of them; the others wait until that is over. Whether it was not stopped."""
        left = dict(works)
        while left:
            again: dict[str, float] = {}
            for name, work in left.items():
                try:
                    self.attempt(name, work, anew=False)
                except TryAgain as later:
                    again[name] = later.seconds
            left = {name: left[name] for name in again}
            if left and stopped(max(again.values())):
                return False
        return True

    def use(self, staging: Staging) -> None:
        """What was staged of a large transaction is used at its commit."""
        self._staging = staging

    def stageable(self, relation: Relation) -> StagingTarget | None:
        """The table that changes of an open transaction may be staged for."""
        name = self._relations.owner(relation.relation_id)
        record = self.records[name] if name is not None else None
        if record is None or record.state != "active" or record.schema.soft_delete or record.schema.history:
            return None
        try:
            refuse_difference(record, relation)
        except SchemaChanged:
            return None
        return StagingTarget(record.name, table_path(self._root, record.path), record.schema)

    def _resume_history(self, record: TableRecord, before: Mapping[str, TableVersion]) -> None:
        if not (record.schemas and record.schema.history):
            return
        try:
            self.histories.resume(self._applier, record)
            name = history_name(record.name)
            known = before.get(name)
            news = known is None or known.state != record.state
            self.next_row.found({name: self.histories.versions[name]}, news=news)
            if known is not None and record.is_followed:
                self.histories.refuse_damage(record, known)
        except TableError as error:
            if record.is_followed:
                self._suspend(record.name, error)

    def standing(self, name: str) -> dict[str, TableVersion]:
        """Where the table and its history stand, by their names in ledger rows."""
        known = {name: self._versions.get(name), history_name(name): self.histories.versions.get(history_name(name))}
        return {each: version for each, version in known.items() if version is not None}

    def _owner(self, name: str) -> TableRecord:
        """The table's record, also by the name of its history."""
        return self.records[table_of(name)]

    def applied(self, xids: Int64) -> None:
        """Every table holds these transactions: what was staged of them is not needed any more."""
        if self._staging is not None:
            self._staging.release(xids)

    def tidy(self, names: Iterable[str]) -> None:
        """A row was published: the caretaker learns what has more versions now."""
        owners = ((name, self._owner(name)) for name in names)
        self._caretaker.written(record if record.name == name else history_record(record) for name, record in owners)

    def keep_up(self, name: str) -> Result:
        """In the table's lane, behind the ledger: files and checkpoints. Rows stay what they are, so the new version
        goes into the next row that names the table."""
        record = self.records[name]
        if not self.is_replicated(name):  # a suspended table stays as it is
            return Result()
        if name in self._doubtful:
            return Result()
        before = self.standing(name)
        try:
            self._keep_up(record)
        except TableError as error:
            self._suspend(name, error)
            return Result(self.moved_since(name, before), error)
        except Exception as error:
            self.retries.refuse_outage(error)
            log.warning("%s: its upkeep failed, and comes again behind a later commit: %s", name, reason_of(error))
            self._doubtful.add(name)
        return Result(self.moved_since(name, before))

    def next_upkeep(self, is_idle: Callable[[str], bool]) -> str | None:
        """The table, among those whose lanes are idle, that is to have a turn for its upkeep though nothing came."""
        if not self._applier.upkeep_waits:
            return None
        owners: dict[str, str] = {}
        for name in list(self.records):
            unsettled = name in self._doubtful or name in self.catching_up
            if self.is_replicated(name) and not unsettled and is_idle(name):
                path = self.records[name].path
                owners |= {table_path(self._root, each): name for each in (path, path + HISTORY)}
        chosen = self._applier.next_upkeep(owners)
        return owners[chosen] if chosen is not None else None

    def _keep_up(self, record: TableRecord) -> None:
        version = self._versions[record.name]
        with overwriting_named(record.name):
            now = self._applier.keep_up(table_path(self._root, record.path), record.schema, version.version)
            if now != version.version:
                self._versions[record.name] = replace(version, version=now, rows=0, touched=False)
            self.histories.keep_up(record.name)

    def moved_since(self, name: str, before: Mapping[str, TableVersion]) -> dict[str, TableVersion]:
        now = self.standing(name)
        return {each: v for each, v in now.items() if each not in before or v.version != before[each].version}

    def stands_at(self, name: str) -> TableVersion | None:
        """Where the table stands; None: it has yet to be read."""
        return self._versions.get(name)

    def adopt(self, record: TableRecord) -> None:
        """The changes of the table belong to it from now on."""
        self._relations.adopt(record.name, record)

    def meet(self, record: TableRecord) -> None:
        """In its lane: a load has committed the table while this driver runs."""
        self._read_version(record, None)
        self._resume_history(record, {})

    def look_again(self, record: TableRecord) -> None:
        """Somebody else has committed to the table, of which we thought to know where it stands."""
        self._ledger.check_fence()
        self._registry.refresh()  # what it was asked to make of the table
        self._read_version(record, self._versions[record.name])
        self._evolving.look_again(self.records[record.name])

    def has_news(self, name: str) -> bool:
        """Whether the logs of the table or its history are not as this driver knows them: an entry is there that is not
        ours, in the place of one of ours, or missing; or they cannot be looked at. It costs some looks at names."""
        standing = self.standing(name)
        try:
            return any(
                entries.replaced(path) is not None
                or storage.token(log_entry(path, standing[own].version)) is None
                or storage.token(log_entry(path, standing[own].version + 1)) is not None
                for own, path in self._folders(name).items()
                if own in standing
            )
        except OSError:
            return True  # this table's trouble, as its lane will find

    def look_at_others(self, name: str) -> Result:
        """In its lane: what somebody else has done to a table that nobody writes here. It is suspended, or goes on from
        there."""
        if not self.is_replicated(name) or not self.has_news(name):
            return Result()
        record, before = self.records[name], self.standing(name)
        try:
            self.look_again(record)
            if self.is_replicated(name) and record.schema.history:
                self.histories.look_again(record)
        except TableError as error:
            self._suspend(name, error)
        except Exception as error:
            self.retries.refuse_outage(error)
            log.warning("%s: what others have done to it cannot be read: %s", name, reason_of(error))
        now = self.records[name]
        error_found = None if self.is_replicated(name) else ForeignWrite(now.reason, where=name, remedy=now.remedy)
        return Result(self.moved_since(name, before), error_found)

    def refuse_replaced(self, names: Iterable[str]) -> bool:
        """Before a row names them, by their names in ledger rows: suspend the tables of which another program has
        overwritten a commit that was ours. Whether there are any."""
        found = False
        for name in {table_of(name) for name in names}:
            if not self.is_replicated(name):
                continue
            try:
                with overwriting_named(name):
                    for path in self._folders(name).values():
                        entries.refuse_replaced(path)
            except ForeignWrite as error:
                self._suspend(name, error)
                self._read_version(self.records[name], None)
                self.next_row.note(self.standing(name))
                found = True
            except OSError as error:
                log.warning("%s: its log cannot be looked at: %s", name, reason_of(error))  # its next commit will tell
        return found

    def _folders(self, name: str) -> dict[str, str]:
        """Of the table and its history, by their names in ledger rows."""
        record = self.records[name]
        folders = {name: table_path(self._root, record.path)}
        if record.schemas and record.schema.history:
            folders[history_name(name)] = table_path(self._root, record.path + HISTORY)
        return folders

    def moved_to(self, name: str, version: int) -> None:
        """The table stands at another version, with the same rows of the log."""
        self._versions[name] = replace(self._versions[name], version=version)

    def finish_columns(self, name: str, still_alive: Callable[[], None]) -> None:
        """In its lane: a driver before this one may have died over a change of columns."""
        self._evolving.finish(name, still_alive)

    def rebuild(
        self,
        record: TableRecord,
        schema: TableSchema,
        content: Callable[[int], NetChanges],
        still_alive: Callable[[], None],
    ) -> int | None:
        """In its lane: the table has `content`, which is asked for at its applied position, in the columns of `schema`,
        and nothing else from now on; how many rows it had before. None: it cannot be written any more."""
        return self._evolving.rebuild(record, schema, content, still_alive)

    def shapes_asked(self, record: TableRecord) -> list[TableSchema]:
        """What rebuilds were to make of the table since its load, the last one first; those that are over, too."""
        reloads = sorted(self._registry.reloads.values(), key=lambda reload: reload.since, reverse=True)
        mine = (record.name, record.incarnation)
        return [r.shape for r in reloads if r.shape is not None and (r.table, r.incarnation) == mine]

    def change(self, name: str, how: Callable[[TableRecord], TableRecord | None]) -> None:
        """What the registry says of the table; None: nothing else than before."""
        self._ledger.check_fence()
        self._enter(name, how)
        self._relations.adopt(name, self.records[name])

    def remember(self, name: str, meanings: tuple[tuple[str, str], ...] = ()) -> None:
        """What the next driver is to compare the catalog with: `files_seen`, and `meanings`, if there are new ones."""

        def how(record: TableRecord) -> TableRecord | None:
            lsn, schema = record.schemas[-1]
            leaves = tuple(
                replace(leaf, seen=self.files_seen.get(leaf.relation_id, leaf.seen)) for leaf in schema.leaves
            )
            known = tuple(sorted(dict((*meanings, *schema.meanings)).items()))
            if not record.is_followed or (leaves, known) == (schema.leaves, schema.meanings):
                return None
            return replace(
                record, schemas=(*record.schemas[:-1], (lsn, replace(schema, leaves=leaves, meanings=known)))
            )

        if how(self.records[name]) is not None:
            self.change(name, how)

    def forget(self, name: str) -> None:
        """In its lane: the table is being loaded; what was known of it counts no more."""
        self._versions.pop(name, None)
        self._before.pop(name, None)
        self._doubtful.discard(name)
        self.retries.passed(name)
        self._caretaker.leave(name)
        for path in self._folders(name).values():
            entries.forget(path)
        self._applier.forget(table_path(self._root, self.records[name].path))

    def meet_leaves(self, name: str, leaves: Iterable[Leaf]) -> None:
        """These partitions belong to the table from now on, whatever brought them."""
        known = {leaf.relation_id for leaf in self.records[name].schema.leaves}
        for leaf in leaves:
            if leaf.relation_id not in known:
                self._adopt(name, leaf)

    def adopt_leaves(self, name: str, share: Share) -> None:
        """In its lane: partitions that came while the table was loaded."""
        known = {leaf.relation_id for leaf in self.records[name].schema.leaves}
        for relation in {block.relation for block in share.blocks if block.relation.relation_id not in known}:
            found = self._session.ask(partial(new_leaf, relation=relation))
            if found is None:
                continue
            _, leaf, created = found
            if not created:
                raise _attached(name, leaf)
            self._adopt(name, leaf)

    def put_right(self, name: str, leaves: Collection[int]) -> bool:
        """In its lane: these partitions hold the rows of the source. Whether the table, which was suspended for want of
        them, may join the cuts again (`rejoins`)."""
        left = [leaf for leaf in self.records[name].unread if leaf not in leaves]
        if len(left) == len(self.records[name].unread):
            return False
        self._rejoining |= {name} if not left else set()  # not before the row that says of these rows

        def how(record: TableRecord) -> TableRecord:
            known = [leaf for leaf in record.schema.leaves if leaf.relation_id in left]
            return awaiting(record, known) if left else record.entered("catching up")

        self.change(name, how)
        self.state_changed(name)
        return not left

    def rejoins(self, name: str) -> None:
        """The next row knows of what has put the table right."""
        self._rejoining.discard(name)
        self.state_changed(name)

    def refuse_unfit(self, name: str) -> None:
        """In its lane: where a suspended table stands, whatever rows others have written. ForeignWrite where what is
        written next would not fit."""
        record = self.records[name]
        path, app_id = table_path(self._root, record.path), record.app_id(self._pipeline.name)
        entries.forget(path)
        self._applier.forget(path)
        problem = why_unwritable(path, app_id, appended_to=record.schema.insert_only)
        stands = current(path, app_id)
        if problem or stands is None:
            remedy = f"headwater load PIPELINE.yaml --table {name} --again"
            raise ForeignWrite(problem or "its Delta table is gone", where=name, remedy=remedy)
        self._versions[name] = TableVersion(*stands, record.state, incarnation=record.incarnation)

    def close(self) -> None:
        """End what `resume` has begun."""
        self._caretaker.close()
        self._applier.close()

    def join_cuts(self, lsn: int) -> None:
        """Tables whose capture point the position has reached, and that hold all that was kept for them, become
        active: from this row on they are in cuts."""
        waiting = [record for record in list(self.records.values()) if record.state == "catching up"]
        for record in waiting:
            unsettled = record.name in self.catching_up or record.name in self._rejoining
            if unsettled or not self.next_row.is_settled(record.name):
                continue
            if record.capture is not None and record.capture.lsn <= lsn:
                self._ledger.check_fence()
                self._enter_state(record.name, "active")

    def suspend(self, name: str, error: TableError) -> bool:
        """What was noticed outside the log suspends a table as well; False when it was not replicated any more."""
        if not self.is_replicated(name):
            return False
        self._suspend(name, error)
        return True

    def apply(self, name: str, share: Share, transactions: Transactions, still_alive: Callable[[], None]) -> Result:
        """In the table's lane: keep its share for whoever asked for that, and commit it. Raises what is not the
        table's own failure."""
        unread = self.records[name].unread
        try:
            self.keeper.keep(name, share, transactions, unread)
        except OSError as error:
            self._ledger.check_fence()  # a driver that has taken over removes what nobody waits for any more
            self.retries.refuse_outage(error)
            raise
        if not self.is_replicated(name) or self.keeper.holds_back(name):
            return Result()
        if unread:  # what they hold is to come by their reload
            share = share.without(unread)
            if not (share.blocks or share.truncates):
                return Result()
        return self.attempt(name, partial(self.apply_share, name, share, transactions, still_alive))

    def attempt(self, name: str, work: Callable[[], None], *, key: str = "", anew: bool = True) -> Result:
        """`work` on one table, in its lane; what came of it, earlier attempts included. A TableError suspends it at
        once, before the next share is taken. TryAgain while what went wrong may pass; raises what is not the table's
        own failure. `key`: what else is done on the table than following the log: when that goes on failing it is given
        up, and the table stays as it is. `anew`: `work` itself does not read where the table stands."""
        before = self._before.setdefault(name, self.standing(name))
        error: TableError | None = None
        try:
            if anew and name in self._versions and (self.retries.is_trying(key or name) or name in self._doubtful):
                self._read_anew(name)
                self._doubtful.discard(name)
            work()
        except TableError as failed:
            error = failed
        except Exception as failed:
            if self.is_replicated(name) or key:
                replicated = [each for each in list(self.records) if self.is_replicated(each)]
                error = self.retries.failed(name, failed, replicated, key)
                if key:
                    self._doubtful.add(name)
            else:
                self.retries.refuse_outage(failed)
                log.warning("%s: %s", name, reason_of(failed))  # nobody waits for it
        if error is not None and not key:
            self.suspend(name, error)
        if self.retries.passed(key or name):
            self._touch(self.moved_since(name, before))
        del self._before[name]
        return Result(self.moved_since(name, before), error)

    def _touch(self, moved: Mapping[str, TableVersion]) -> None:
        """An attempt that failed may have committed: what was found of it by reading counts as our own doing."""
        for name, version in moved.items():
            owner = self._versions if name in self._versions else self.histories.versions
            owner[name] = replace(version, touched=True)

    def _read_anew(self, name: str) -> None:
        """In its lane, behind a failure: it may have come after the commit, and halfway through what is known of the
        table."""
        record = self.records[name]
        if not self.is_replicated(name):
            return  # who works on it all the same has it read
        self._applier.forget(table_path(self._root, record.path))
        self.look_again(record)
        if not self.is_replicated(name):
            now = self.records[name]
            raise ForeignWrite(now.reason, where=name, remedy=now.remedy)
        if record.schema.history:
            self._applier.forget(table_path(self._root, history_record(record).path))
            self.histories.resume(self._applier, record)

    def shares(self, batch: Batch) -> dict[str, Share]:
        """The batch by table: only tables that are replicated now, or whose changes are kept."""
        shares: dict[str, Share] = {}
        for chunk in batch.chunks:
            for block in chunk.blocks:
                name = self._table_for(block.relation)
                if name is not None and self._is_wanted(name):
                    shares.setdefault(name, Share()).blocks.append(block)
            for truncate in chunk.truncates:
                for name in {self._relations.owner(i) for i in truncate.relation_ids} - {None}:
                    if name is not None and self._is_wanted(name):
                        shares.setdefault(name, Share()).truncates.append(truncate)
        return shares

    def is_replicated(self, name: str) -> bool:
        return self.records[name].is_followed

    def _is_wanted(self, name: str) -> bool:
        return self.is_replicated(name) or self.keeper.keeps(name)

    def _table_for(self, relation: Relation) -> str | None:
        name = self._relations.owner(relation.relation_id)
        if name is not None:
            return name
        again = self._relations.owner_by_name(relation)
        if again is not None:
            self._relations.disown(relation.relation_id)
            if self.is_replicated(again):
                refused = SchemaChanged(
                    "the table was dropped and created again at the source",
                    where=again,
                    remedy=f"headwater load PIPELINE.yaml --table {again} --again",
                )
                self._suspend(again, refused)
            return None
        return self._adopt_leaf(relation)

    def _adopt_leaf(self, relation: Relation) -> str | None:
        root, leaf, created = self._session.ask(partial(new_leaf, relation=relation)) or (0, None, True)
        name = self._relations.owner(root)
        if name is None or leaf is None or not (created or self._awaits(name, leaf)):
            self._relations.disown(relation.relation_id)
            return None
        if not created:
            return name
        if self.records[name].state == "loading":
            self._relations.own(relation.relation_id, name)  # the record is the load's: it is entered behind it
        else:
            self._adopt(name, leaf)
        return name

    def _adopt(self, name: str, leaf: Leaf) -> None:
        self.change(name, lambda record: with_leaf(record, leaf))
        log.info("%s: new partition %s.%s", name, leaf.schema, leaf.name)

    def _awaits(self, name: str, leaf: Leaf) -> bool:
        """`leaf` was attached: suspend the table. Whether the rest of it is followed until its attached partitions are
        reloaded, all that it has by now; of some tables no part can be."""
        record = self.records[name]
        if not record.is_followed:
            return False
        came = self._session.ask(partial(attached_leaves, record=record))
        kept = record.schema.soft_delete or record.schema.history
        if kept or leaf.relation_id not in [other.relation_id for other in came]:
            self._suspend(name, _attached(name, leaf))
            return False
        leaves = [*(known for known in record.schema.leaves if known.relation_id in record.unread), *came]
        self.change(name, lambda now: awaiting(now, leaves) if now.is_followed else None)
        log.error("%s: suspended: %s", name, self.records[name].reason)
        self.state_changed(name)
        return self.is_replicated(name)

    def apply_share(self, name: str, share: Share, transactions: Transactions, still_alive: Callable[[], None]) -> None:
        """Net, plan and commit until the commit is ours, or until nothing of the share is left to do."""
        # Before any row is decoded.
        share = self._evolving.as_now(name, share, transactions, still_alive)
        record, to_lsn = self.records[name], int(transactions.end_lsn[-1])
        if record.schema.history:
            self.histories.append(
                record, partial(self.planner.history_rows, record, share, transactions), to_lsn, still_alive
            )

        def plan(version: TableVersion) -> Plan | None:
            changes = self.planner.net(record, share, transactions, version)
            if changes is None or (changes.is_empty and not self.planner.lacks_mark(record, version)):
                return None
            return self.planner.plan(record, changes, version, to_lsn)

        def staged_files_gone() -> None:
            if self._staging is not None:
                self._staging.give_up(int(transactions.xid[0]), name)

        done = self.commit(record, plan, still_alive, staged_files_gone)
        if done is not None:
            self._judge(record, *done)
        path, version = table_path(self._root, record.path), self._versions[name].version
        # Before this share is in a row.
        self._evolving.refuse_other_values(name, transactions, partial(self._applier.found, record, path, version))

    def commit(
        self,
        record: TableRecord,
        planned: Callable[[TableVersion], Plan | None],
        still_alive: Callable[[], None],
        staged_files_gone: Callable[[], None] = lambda: None,
    ) -> tuple[Plan, Applied] | None:
        """Plan and commit until the commit is ours; None: there was nothing to do (any more)."""
        name = record.name
        for _ in range(_TRIES):
            version = self._versions[name]
            plan = planned(version)
            if plan is None:
                return None
            still_alive()
            reach("replicate.before_table_commit", name)
            try:
                applied = self._applier.commit(plan)
            except StagedFilesGone:
                staged_files_gone()
                continue
            except PlanAgain:
                self.look_again(record)
                if self.records[name].state == "suspended":
                    return None
                self._evolving.finish(name, still_alive)
                if len(self.records[name].schemas) != len(record.schemas):
                    raise KeepsChanging.during(1, name) from None  # planned in the shape of before: all of it again
                continue
            reach("replicate.after_table_commit", name)
            # The commit exists: the table stands at it, whatever is thought of it.
            path = applied.apply_path or plan.apply_path
            rows = plan.changes.changes
            self._versions[name] = TableVersion(
                applied.version, plan.to_lsn, record.state, rows, path, True, record.incarnation
            )
            return plan, applied
        raise KeepsChanging.during(_TRIES, name)

    def _judge(self, record: TableRecord, plan: Plan, applied: Applied) -> None:
        if applied.noted:
            log.info("%s: accepted commits of others that only rearrange files: %s", record.name, applied.noted)
        if not applied.divergence:
            return
        rows = f"{applied.divergence} rows of the log contradict the lake up to {format_lsn(plan.to_lsn)}"
        message = f"{rows}: {applied.example}"
        if record.on_divergence != "suspend":
            log.warning("%s: diverged (%s): %s", record.name, record.on_divergence, message)
            reason = f"diverged ({record.on_divergence}): {message}"
            self._enter(record.name, lambda now: replace(now, reason=reason))
            return
        raise Diverged(message, where=record.name, remedy=f"headwater load PIPELINE.yaml --table {record.name} --again")

    def _read_version(self, record: TableRecord, known: TableVersion | None, look: _Look = current) -> None:
        """Where the table stands now; what others have done to it suspends it, unless all is still as the log says it
        and what is written next fits."""
        path, app_id = table_path(self._root, record.path), record.app_id(self._pipeline.name)
        replaced: ForeignWrite | None = None
        try:
            with overwriting_named(record.name):
                entries.refuse_replaced(path)
        except ForeignWrite as error:
            replaced = error
        found = look(path, app_id, (known.version, known.applied_lsn) if known is not None else None)
        if found is None:
            self._suspend_foreign(record, "the Delta table is gone from the lake")
            return
        version, applied_lsn = found
        stands, problem = TableVersion(version, applied_lsn, record.state, incarnation=record.incarnation), ""
        if record.is_followed and replaced is None:
            entries.meet(path, version)  # before it is read: what takes its place from now on is noticed
            # Should it not be readable now, where the table stood is still what the next look begins with.
            problem = self._what_others_did(record, known, version, applied_lsn)
        self._versions[record.name] = stands
        if problem:
            self._suspend_foreign(record, problem)
        elif record.is_followed and replaced is not None:
            self._suspend(record.name, replaced)

    def _what_others_did(self, record: TableRecord, known: TableVersion | None, version: int, applied_lsn: int) -> str:
        """Why the table, which stands at this version and position, must not be written on; empty if it may."""
        path, app_id = table_path(self._root, record.path), record.app_id(self._pipeline.name)
        # Known since this load: what the ledger says of the one before lies below the capture point.
        if known is not None and known.applied_lsn >= record.start_lsn > 0 and applied_lsn < known.applied_lsn:
            fell = f"from {format_lsn(known.applied_lsn)} to {format_lsn(applied_lsn)}"
            return f"its applied position fell back {fell}: commits are lost"
        commits = own_history(path, version, app_id, known.version if known is not None else None)
        problem = (
            foreign_data(commits, app_id)
            or replaced_below(path, commits, version)
            or foreign_terms(path, commits, app_id, appended_to=record.schema.insert_only)
        )
        others = [commit for commit in commits if not is_ours(commit, app_id)]
        if others and not problem:
            accepted = ", ".join(commit.described for commit in others)
            log.info("%s: accepted what others did to its files and settings: %s", record.name, accepted)
        return problem

    def _suspend_foreign(self, record: TableRecord, problem: str) -> None:
        remedy = f"headwater load PIPELINE.yaml --table {record.name} --again"
        self._suspend(record.name, ForeignWrite(problem, where=record.name, remedy=remedy))

    def _suspend(self, name: str, error: TableError) -> None:
        self._ledger.check_fence()  # what a fenced driver believes of a table is of no interest any more
        log.error("%s: suspended: %s", name, error)
        self._enter_state(name, "suspended", error.message, error.remedy)

    def _enter_state(self, name: str, state: State, reason: str = "", remedy: str = "") -> None:
        """The table's state, unless a load has taken it over since."""

        def entered(record: TableRecord) -> TableRecord | None:
            ours = record.state in ("active", "catching up", "suspended")
            return record.entered(state, reason, remedy) if ours else None

        self._enter(name, entered)
        self.state_changed(name)

    def _enter(self, name: str, how: Callable[[TableRecord], TableRecord | None]) -> None:
        """In the registry, and in what this driver goes by. Where another job has entered another state meanwhile,
        which is yet to be followed, in the latter alone: the table is that job's by now."""
        with self._entering:
            known, ours, overtaken = self._records[name], None, False

            def unless_overtaken(now: TableRecord) -> TableRecord | None:
                nonlocal ours, overtaken
                overtaken = now.phase != known.phase
                ours = how(known if overtaken else now)
                return None if overtaken else ours

            self._registry.change(name, unless_overtaken)
            if ours is not None:
                self._records[name] = ours

    def state_changed(self, name: str) -> None:
        """The next row says it."""
        self.next_row.state_changed(self.standing(name))


def _attached(name: str, leaf: Leaf) -> SchemaChanged:
    remedy = f"headwater load PIPELINE.yaml --table {name} --again"
    return SchemaChanged(attached_message([leaf]), where=name, remedy=remedy)
