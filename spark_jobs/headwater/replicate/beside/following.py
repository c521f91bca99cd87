"""How a running driver follows what other jobs write into the registry: loads, reloads, tables that come and go.

Once a second, in the main thread: the registry is read again, and what is new in it goes to the lanes of the tables,
as errands. What was agreed outlives this driver: the next one keeps on what this one kept, from its first batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from os.path import join
from typing import Final

from headwater.apply.replacement import remove_rows
from headwater.delta import storage
from headwater.errors import Refused
from headwater.failpoints import reach
from headwater.gate import lease
from headwater.lake.paths import kept_path, reloaded_path
from headwater.lake.registry import Lease, Registry, TableRecord, now_text
from headwater.lake.reload_records import Keeping, Reload, load_name
from headwater.log.spill import SpillStore
from headwater.replicate.batches.lanes import Lanes, Result
from headwater.replicate.beside.merging import catch_up, merge_part
from headwater.replicate.tables.tables import Tables
from headwater.source.connection import Session

log = logging.getLogger(__name__)

_PERIOD: Final = 1.0
_LOOK_FOR_JOBS: Final = 5.0


class Following:
    """`generation`: the driver's; `still_alive` raises when it may not commit any more. `hide` has the reader hide what
    the registry says."""

    def __init__(
        self,
        root: str,
        registry: Registry,
        tables: Tables,
        session: Session,
        generation: int,
        spill: SpillStore,
        hide: Callable[[], None],
        still_alive: Callable[[], None],
    ) -> None:
        self._root, self._registry, self._tables, self._session = root, registry, tables, session
        self._generation, self._spill, self._hide, self._still_alive = generation, spill, hide, still_alive
        self._states = {name: record.phase for name, record in registry.tables.items()}
        self._busy: set[str] = set()  # errands that are on their way, by the name of what they are for
        self._looked = self._looked_for_jobs = time.monotonic()

    def begin(self, position: int) -> None:
        """Before the first batch: what earlier drivers have kept is kept on, what jobs ask for is begun."""
        for record in list(self._registry.tables.values()):
            known = self._tables.records.get(record.name)
            self._tables.see(record)
            # Since the tables were looked at, which takes its time: what was found of one is of before its load.
            news = known is None or known.phase != record.phase
            if news:
                self._tables.state_changed(record.name)
            if self._is_loaded_here(record) or (news and record.state == "catching up"):
                if news:
                    self._tables.forget(record.name)
                self._tables.adopt(record)
                self._tables.keeper.begin(load_name(record), record.name, holds_back=True)
                if record.state == "catching up":
                    self._tables.catching_up.add(record.name)
                else:
                    self._answer_load(record, position)
        for reload in self._open_reloads():
            if self._why_not(reload) is None:
                self._keep_for(reload, position)
        self._sweep()

    def start(self, lanes: Lanes, position: Callable[[], int]) -> None:
        """From now on there are lanes. `position`: up to where every table holds all."""
        self._lanes, self._position = lanes, position
        for name in self._tables.catching_up:
            self._catch_up(name, load_name(self._tables.records[name]))

    def follow_if_due(self) -> bool:
        """Read the registry again, once a second; True when a table's state has changed."""
        now = time.monotonic()
        if now - self._looked < _PERIOD:
            return False
        self._looked = now
        self._registry.refresh()
        changed = False
        for record in list(self._registry.tables.values()):
            if self._is_news(record):
                self._follow_table(record)
                changed = True
            else:
                self._tables.see_details(record.name)
        for reload in self._open_reloads():
            self._follow_reload(reload)
        for reload in list(self._registry.reloads.values()):
            if reload.state == "given up" and reload.name in self._tables.answers and reload.name not in self._busy:
                self._fail(reload, "its job has failed")
        if now - self._looked_for_jobs > _LOOK_FOR_JOBS:
            self._looked_for_jobs = now
            self._give_up_for_the_dead()
        return changed

    @property
    def paused(self) -> bool:
        """Whether somebody has paused the pipeline."""
        return self._registry.pipeline is not None and bool(self._registry.pipeline.paused)

    def settled(self, name: str, result: Result) -> None:
        """An errand on the table is done, and the main thread knows what came of it."""
        if result.lifts:
            self._tables.rejoins(name)
        if name not in self._tables.catching_up:
            return
        record = self._tables.records[name]
        keeping = load_name(record)
        if record.state == "loading":  # again: what is kept now is for that load, until it has committed
            self._tables.catching_up.discard(name)
            return
        if keeping in self._tables.keeper.names(name):
            self._catch_up(name, keeping)
            return
        self._tables.catching_up.discard(name)
        self._tables.state_changed(name)  # the next row has it in the cuts, if it has reached its capture point
        answer = self._registry.kept.get(keeping)
        if answer is not None and answer.state == "keeping":
            self._registry.write(answer.ended("done", now_text()))

    def _sweep(self) -> None:
        """What was kept or read for nobody that is left."""
        wanted = {load_name(r) for r in self._registry.tables.values() if r.state in ("loading", "catching up")}
        wanted |= {reload.name for reload in self._open_reloads()}
        # What has ended since this driver began to keep for it is ended as everything is that ends while it runs.
        wanted |= self._tables.keeper.all_names()
        for answer in list(self._registry.kept.values()):
            if answer.state == "keeping" and answer.name not in wanted:
                self._registry.write(answer.ended("failed", now_text(), "whoever asked for it is gone"))
        for folder in (kept_path(self._root, ""), reloaded_path(self._root, "")):
            for name in set(storage.names(folder)) - wanted:
                storage.delete_folder(join(folder, name))

    def _is_news(self, record: TableRecord) -> bool:
        if self._states.get(record.name) == record.phase:
            return False
        self._states[record.name] = record.phase
        return True

    def _follow_table(self, record: TableRecord) -> None:
        name, keeping = record.name, load_name(record)
        if record.state == "loading" and keeping not in self._tables.keeper.names(name):
            log.info("%s: it is being loaded: its changes are kept", name)
            if name not in self._tables.records:
                self._tables.see(record)
            self._tables.adopt(record)
            self._lanes.behind(name, partial(self._keep_for_load, record))
            return
        self._tables.see(record)
        if record.state == "catching up" and keeping in self._tables.keeper.names(name):
            self._tables.catching_up.add(name)
            self._catch_up(name, keeping)
        elif record.state in ("suspended", "removed") and not record.is_followed:
            self._lanes.behind(name, partial(self._forget_kept, name))
            if record.state == "removed":
                self._tables.next_row.forget(name)
        self._tables.state_changed(name)

    def _keep_for_load(self, record: TableRecord) -> Result:
        """From the next share on the table's changes are kept and not applied: the row that is without one says so."""
        self._tables.see(record)
        self._tables.state_changed(record.name)
        self._tables.forget(record.name)
        for older in self._tables.keeper.names(record.name):
            self._tables.keeper.end(older, record.name)
        self._tables.keeper.begin(load_name(record), record.name, holds_back=True)
        self._answer_load(record, self._position())
        return Result()

    def _answer_load(self, record: TableRecord, position: int) -> None:
        """The load goes on when it is answered: by then the reader hides what it has to."""
        try:
            self._hide()
        except Refused as refused:
            log.warning("%s: its load is not answered: %s", record.name, refused)
            return
        self._answer(load_name(record), record.name, position)

    def _forget_kept(self, name: str) -> Result:
        for keeping in self._tables.keeper.names(name):
            self._tables.keeper.end(keeping, name)
        return Result()

    def _catch_up(self, name: str, keeping: str) -> None:
        self._lanes.behind(name, partial(catch_up, self._tables, self._root, name, keeping, self._still_alive))

    def _open_reloads(self) -> Iterator[Reload]:
        """Those that wait for this driver."""
        for reload in list(self._registry.reloads.values()):
            answer = self._registry.kept.get(reload.name)
            if reload.state != "given up" and (answer is None or answer.state == "keeping"):
                yield reload

    def _follow_reload(self, reload: Reload) -> None:
        if reload.name in self._busy:
            return
        why_not = self._why_not(reload)
        if why_not is not None:
            self._fail(reload, why_not)
        elif self._tables.keeper.holds_back(reload.table):
            return  # until its lane stands where everybody else does
        elif reload.name not in self._tables.keeper.names(reload.table):
            self._busy.add(reload.name)
            self._lanes.behind(reload.table, partial(self._begin_reload, reload))
        elif reload.state == "read" and self._position() >= reload.capture_lsn:
            self._busy.add(reload.name)
            self._lanes.behind(reload.table, partial(self._merge, reload))

    def _why_not(self, reload: Reload) -> str | None:
        record = self._registry.tables.get(reload.table)
        if record is None or record.incarnation != reload.incarnation:
            return "the table was loaded anew"
        as_asked = record.state == "suspended" and reload.suspended == record.since
        if as_asked or (self._tables.is_replicated(reload.table) and not reload.suspended):
            return None
        return f"the table is {record.state}: {record.reason}"

    def _begin_reload(self, reload: Reload) -> Result:
        self._keep_for(reload, self._position())
        self._busy.discard(reload.name)
        return Result()

    def _keep_for(self, reload: Reload, position: int) -> None:
        self._tables.meet_leaves(reload.table, reload.unknown)
        self._tables.keeper.begin(reload.name, reload.table, reload.leaves)
        known = self._registry.kept.get(reload.name)
        # What an earlier driver has kept counts from where that one began.
        self._tables.answers[reload.name] = known or self._answer(reload.name, reload.table, position)

    def _answer(self, name: str, table: str, position: int) -> Keeping:
        answer = Keeping(name, table, "keeping", self._generation, position, now_text())
        self._registry.write(answer)
        return answer

    def _is_loaded_here(self, record: TableRecord) -> bool:
        """Whether a load needs what is kept for it, or has needed it. One that a driver has given up would miss what
        came since."""
        answer = self._registry.kept.get(load_name(record))
        if record.state == "loading":
            return answer is None or answer.state != "failed"
        return record.state == "catching up" and answer is not None

    def _merge(self, reload: Reload) -> Result:
        reach("replicate.before_part", reload.table)
        position = self._position()
        result, answer = merge_part(self._tables, self._root, reload, position, self._spill, self._still_alive)
        self._registry.write(answer)
        reach("replicate.after_part_answer", reload.table)
        self._end_keeping(reload)
        self._tables.answers.pop(reload.name, None)
        self._busy.discard(reload.name)
        return result

    def _fail(self, reload: Reload, reason: str) -> None:
        log.warning("%s: the reload of %s is given up: %s", reload.table, reload.shown, reason)
        answer = self._tables.answers.pop(reload.name, None) or Keeping(
            reload.name, reload.table, "keeping", self._generation, 0, now_text()
        )
        self._registry.write(answer.ended("failed", now_text(), reason))
        self._lanes.behind(reload.table, partial(self._end_keeping, reload))

    def _end_keeping(self, reload: Reload) -> Result:
        self._tables.keeper.end(reload.name, reload.table)
        remove_rows(self._root, reload.name)
        return Result()

    def _give_up_for_the_dead(self) -> None:
        """A job that died before it had read everything will never say so; a reload that has is finished without it."""
        load = self._registry.leases.get(lease.LOAD)
        if self._loading_kept() and not (load is not None and self._lives(load.session)):
            # What it committed after the registry was read here, it committed before it was gone: one that is through
            # needs what was kept, and so does the next one.
            self._registry.refresh()
            for record in self._loading_kept():
                self._give_up_load(record, (load, _released(load)))
        for reload in self._open_reloads():
            if reload.state == "asked" and reload.name not in self._busy and not self._lives(reload.session):
                self._registry.refresh()
                if self._registry.reloads.get(reload.name) == reload:
                    self._fail(reload, "the job that asked for it is gone")

    def _give_up_load(self, record: TableRecord, leases: tuple[Lease | None, ...]) -> None:
        """Nothing more is kept for it, and the registry says so before anything is removed: a load that goes on though
        its session was cut must not end as if all were there. `leases`: that was found to be nobody's any more."""
        name = load_name(record)

        def failed(answer: Keeping | None) -> Keeping | None:
            now = self._registry.tables.get(record.name)
            if now is None or now.phase != record.phase or self._registry.leases.get(lease.LOAD) not in leases:
                return None
            known = answer or Keeping(name, record.name, "keeping", self._generation, 0, now_text())
            return known.ended("failed", now_text(), "the load of it is gone")

        if self._registry.change_keeping(name, failed):
            log.warning("%s: the load of it is gone: its changes are not kept any more", record.name)
            self._lanes.behind(record.name, partial(self._forget_kept, record.name))

    def _loading_kept(self) -> list[TableRecord]:
        loading = [r for r in self._registry.tables.values() if r.state == "loading"]
        return [r for r in loading if load_name(r) in self._tables.keeper.names(r.name)]

    def _lives(self, session: str) -> bool:
        return self._session.ask(partial(lease.is_alive, session=session))


def _released(held: Lease | None) -> Lease | None:
    return replace(held, session="") if held is not None else None
