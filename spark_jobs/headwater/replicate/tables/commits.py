"""A table's lane commits: net, plan and commit until the commit is ours, or until nothing is left to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from headwater.apply.applier import Applier
from headwater.apply.plan import Applied, Plan, PlanAgain, diverged
from headwater.apply.staged.files import StagedFilesGone
from headwater.errors import KeepsChanging
from headwater.failpoints import reach
from headwater.lake.ledger import TableVersion
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Transactions
from headwater.replicate.batches.batch import Share
from headwater.replicate.preapply.decide import Staging
from headwater.replicate.tables.columns import Evolving
from headwater.replicate.tables.foreign_writes import ForeignWrites
from headwater.replicate.tables.histories import Histories
from headwater.replicate.tables.planning import Planner
from headwater.replicate.tables.states import TableStates

log = logging.getLogger(__name__)

_TRIES = 5


class TableCommits:
    """From any lane; each table in its own. `staging`: what was done of large transactions while they were open."""

    def __init__(
        self,
        states: TableStates,
        foreign: ForeignWrites,
        histories: Histories,
        applier: Applier,
        columns: Evolving,
        planner: Planner,
        staging: Staging | None,
    ) -> None:
        self._states, self._versions, self._foreign, self._histories = states, states.versions, foreign, histories
        self._applier, self._columns, self._planner, self._staging = applier, columns, planner, staging

    def commit_share(
        self, name: str, share: Share, transactions: Transactions, still_alive: Callable[[], None]
    ) -> None:
        """What of the share the table does not hold yet, in its history and then in itself."""
        # Before any row is decoded.
        share = self._columns.as_now(name, share, transactions, still_alive)
        record, to_lsn = self._states.records[name], int(transactions.end_lsn[-1])
        if record.schema.history:
            self._histories.append(
                record, partial(self._planner.history_rows, record, share, transactions), to_lsn, still_alive
            )

        def plan(version: TableVersion) -> Plan | None:
            changes = self._planner.net(record, share, transactions, version)
            if changes is None or (changes.is_empty and not self._planner.lacks_mark(record, version)):
                return None
            planned = self._planner.plan(record, changes, version, to_lsn)
            return replace(planned, refuses_divergence=record.on_divergence == "suspend")

        def staged_files_gone() -> None:
            if self._staging is not None:
                self._staging.give_up(int(transactions.xid[0]), name)

        done = self.commit(record, plan, still_alive, staged_files_gone)
        if done is not None:
            self._judge(record, *done)
        folder, version = self._states.folder(record), self._versions[name].version
        # Before this share is in a row.
        self._columns.refuse_other_values(name, transactions, partial(self._applier.found, record, folder, version))

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
            plan = planned(self._versions[name])
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
                if self._may_plan_again(record, still_alive):
                    continue
                return None
            reach("replicate.after_table_commit", name)
            # The commit exists: the table stands at it, whatever is thought of it.
            path = applied.apply_path or plan.apply_path
            rows = plan.changes.changes
            self._versions[name] = TableVersion(
                applied.version, plan.to_lsn, record.state, rows, path, True, record.incarnation
            )
            return plan, applied
        raise KeepsChanging.during(_TRIES, name)

    def _may_plan_again(self, record: TableRecord, still_alive: Callable[[], None]) -> bool:
        """Another commit came first. KeepsChanging where the table has another shape now: all has to be planned anew,
        not the commit alone."""
        name = record.name
        self._foreign.look_again(record)
        if not self._states.is_followed(name):
            return False
        self._columns.finish(name, still_alive)
        if len(self._states.records[name].schemas) != len(record.schemas):
            raise KeepsChanging.during(1, name) from None  # planned in the shape of before: all of it again
        return True

    def _judge(self, record: TableRecord, plan: Plan, applied: Applied) -> None:
        """Say what of the log contradicted the lake. Where that suspends the table it was not committed."""
        if applied.noted:
            log.info("%s: accepted commits of others that only rearrange files: %s", record.name, applied.noted)
        if not applied.divergence:
            return
        message = diverged(plan, applied.divergence, applied.example).message
        log.warning("%s: diverged (%s): %s", record.name, record.on_divergence, message)
        self._states.remark(record.name, f"diverged ({record.on_divergence}): {message}")
