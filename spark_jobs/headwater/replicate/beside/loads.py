"""How a running driver follows loads, and tables that come and go.

A table that is being loaded is held back: its changes are kept until the load has committed, and then brought into it
in its lane. States that other jobs have entered count from here on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from headwater.delta import storage
from headwater.errors import Refused
from headwater.failpoints import reach
from headwater.gate import lease
from headwater.lake.registry import Lease, Registry, TableRecord, now_text
from headwater.lake.reload_records import Keeping, load_name
from headwater.replicate.batches.batch import Share
from headwater.replicate.batches.lanes import Lanes, Result
from headwater.replicate.beside.answers import Answers
from headwater.replicate.tables.tables import Tables

log = logging.getLogger(__name__)

_TURN_SECONDS: Final = 3.0
"""How long a table's own changes wait behind those that were kept for it."""


class LoadsFollowed:
    """`hide` has the reader hide what the registry says; `still_alive` raises when the driver may not commit any
    more."""

    def __init__(
        self,
        root: str,
        registry: Registry,
        tables: Tables,
        answers: Answers,
        hide: Callable[[], None],
        still_alive: Callable[[], None],
    ) -> None:
        self._root, self._registry, self._tables = root, registry, tables
        self._answers, self.hide, self._still_alive = answers, hide, still_alive
        self._states = {name: record.phase for name, record in registry.tables.items()}
        self._to_begin: dict[str, str] = {}  # by table the load that its lane has yet to keep for

    def begin(self, position: int) -> None:
        """Before the first batch: what earlier drivers have kept is kept on, what loads ask for is begun."""
        tables = self._tables
        for record in list(self._registry.tables.values()):
            known = tables.records.get(record.name)
            tables.states.see(record)
            # Since the tables were looked at, which takes its time: what was found of one is of before its load.
            news = known is None or known.phase != record.phase
            if news:
                tables.states.changed(record.name)
            if self._is_loaded_here(record) or (news and record.state == "catching up"):
                if news:
                    tables.forget(record.name)
                tables.owners.adopt(record)
                tables.keeper.begin(load_name(record), record.name, holds_back=True)
                if record.state == "catching up":
                    tables.joining.catching_up.add(record.name)
                else:
                    self._answer(record, position)

    def start(self, lanes: Lanes, position: Callable[[], int]) -> None:
        """From now on there are lanes. `position`: up to where every table holds all."""
        self._lanes, self._position = lanes, position
        for name in self._tables.joining.catching_up:
            self._catch_up(name, load_name(self._tables.records[name]))

    def follow(self) -> bool:
        """What the registry says now; True when a table's state has changed, or the reason for it."""
        changed = False
        for record in list(self._registry.tables.values()):
            before = self._states.get(record.name)
            if before != record.phase:
                self._states[record.name] = record.phase
                self._follow_table(record, before[0] if before is not None else 0)
                changed = True
            elif self._tables.states.see_details(record.name):
                changed = True
        return changed

    @property
    def are_begun(self) -> bool:
        """Whether the changes of all tables are kept whose loads are known."""
        return not self._to_begin

    def settled(self, name: str) -> None:
        """An errand on the table is done, and the main thread knows what came of it."""
        catching_up = self._tables.joining.catching_up
        if name not in catching_up:
            now = self._registry.tables.get(name)
            if now is not None and now.state == "catching up" and load_name(now) in self._tables.keeper.names(name):
                self._is_loaded(now)  # while its lane had not begun to keep for it
            return
        record = self._tables.records[name]
        keeping = load_name(record)
        if record.state == "loading":  # again: what is kept now is for that load, until it has committed
            catching_up.discard(name)
            return
        if keeping in self._tables.keeper.names(name):
            self._catch_up(name, keeping)
            return
        catching_up.discard(name)
        self._tables.states.changed(name)  # the next row has it in the cuts, if it has reached its capture point
        answer = self._registry.kept.get(keeping)
        if answer is not None and answer.state == "keeping":
            self._registry.write(answer.ended("done", now_text()))

    def _follow_table(self, record: TableRecord, known_load: int) -> None:
        """`known_load`: the load that counted when it was looked at before."""
        name, keeping, tables = record.name, load_name(record), self._tables
        # One that is over already has begun while this driver had no connection to the source.
        is_over = record.state == "catching up" and record.incarnation > known_load
        if self._to_begin.get(name) == keeping and record.state in ("loading", "catching up"):
            return
        if keeping not in tables.keeper.names(name) and (is_over or record.state == "loading"):
            log.info("%s: it is being loaded: its changes are kept", name)
            if not is_over:  # else its changes would be for a table that this driver has not met
                if name not in tables.records:
                    tables.states.see(record)
                tables.owners.adopt(record)
            self._to_begin[name] = keeping
            self._lanes.behind(name, partial(self._keep, record))
            return
        if record.state == "catching up" and keeping in tables.keeper.names(name):
            self._is_loaded(record)
            return
        tables.states.see(record)
        if record.state in ("suspended", "removed") and not record.is_followed:
            self._lanes.behind(name, partial(self._forget_kept, name))
            if record.state == "removed":
                tables.next_row.forget(name)
        tables.states.changed(name)

    def _is_loaded(self, record: TableRecord) -> None:
        """What was kept for it is brought into it from now on."""
        self._tables.states.see(record)
        self._tables.joining.catching_up.add(record.name)
        self._catch_up(record.name, load_name(record))
        self._tables.states.changed(record.name)

    def _keep(self, record: TableRecord) -> Result:
        """In its lane: from the next share on the table's changes are kept and not applied: the row that is without one
        says so."""
        tables = self._tables
        tables.states.see(record)
        tables.states.changed(record.name)
        tables.forget(record.name)
        for older in tables.keeper.names(record.name):
            tables.keeper.end(older, record.name)
        tables.keeper.begin(load_name(record), record.name, holds_back=True)
        tables.owners.adopt(record)
        self._answer(record, self._position())
        if self._to_begin.get(record.name) == load_name(record):
            del self._to_begin[record.name]
        return Result()

    def _answer(self, record: TableRecord, position: int) -> None:
        """The load goes on when it is answered: by then the reader hides what it has to."""
        try:
            self.hide()
        except Refused as refused:
            log.warning("%s: its load cannot go on beside this driver: %s", record.name, refused)
            self._tables.keeper.end(load_name(record), record.name)
            self._answers.refuse(load_name(record), record.name, str(refused))
            return
        self._answers.keep(load_name(record), record.name, position)

    def _forget_kept(self, name: str) -> Result:
        for keeping in self._tables.keeper.names(name):
            self._tables.keeper.end(keeping, name)
        return Result()

    def _catch_up(self, name: str, keeping: str) -> None:
        self._lanes.behind(name, partial(catch_up, self._tables, self._root, name, keeping, self._still_alive))

    def _is_loaded_here(self, record: TableRecord) -> bool:
        """Whether a load needs what is kept for it, or has needed it. One that a driver has given up would miss what
        came since."""
        answer = self._registry.kept.get(load_name(record))
        if record.state == "loading":
            return answer is None or answer.state != "failed"
        return record.state == "catching up" and answer is not None

    def give_up_for_the_dead(self) -> None:
        """A job that died before it had read everything will never say so."""
        load = self._registry.leases.get(lease.LOAD)
        if self._loading_kept() and not (load is not None and self._answers.lives(load.session)):
            # What it committed after the registry was read here, it committed before it was gone: one that is through
            # needs what was kept, and so does the next one.
            self._registry.refresh()
            for record in self._loading_kept():
                self._give_up(record, (load, _released(load)))

    def _give_up(self, record: TableRecord, leases: tuple[Lease | None, ...]) -> None:
        """Nothing more is kept for it, and the registry says so before anything is removed: a load that goes on though
        its session was cut must not end as if all were there. `leases`: that was found to be nobody's any more."""
        name = load_name(record)

        def failed(answer: Keeping | None) -> Keeping | None:
            now = self._registry.tables.get(record.name)
            if now is None or now.phase != record.phase or self._registry.leases.get(lease.LOAD) not in leases:
                return None
            known = answer or self._answers.keeping(name, record.name)
            return known.ended("failed", now_text(), "the load of it is gone")

        if self._registry.change_keeping(name, failed):
            log.warning("%s: the load of it is gone: its changes are not kept any more", record.name)
            self._lanes.behind(record.name, partial(self._forget_kept, record.name))

    def _loading_kept(self) -> list[TableRecord]:
        loading = [r for r in list(self._registry.tables.values()) if r.state == "loading"]
        return [r for r in loading if load_name(r) in self._tables.keeper.names(r.name)]


def catch_up(tables: Tables, root: str, name: str, keeping: str, still_alive: Callable[[], None]) -> Result:
    """In its lane: apply what is kept for the loaded table under `keeping`, as much as a turn allows. When nothing is
    left the table is held back no more."""
    record, keeper = tables.records[name], tables.keeper
    if keeping not in keeper.names(name):  # a load has taken the table since
        return Result()
    is_left = False

    def work() -> None:
        nonlocal is_left
        if name not in tables.states.versions:
            tables.meet(record)
        if not tables.states.is_followed(name):
            return
        began = time.monotonic()
        changes, done = keeper.changes(keeping, name), []
        for kept in changes.shares():
            share = Share(list(kept.share.blocks), list(kept.share.truncates))
            tables.owners.meet_leaves_of(name, share, kept.share.transactions)
            tables.commits.commit_share(name, share, kept.share.transactions, still_alive)
            done.append(kept)
            reach("replicate.after_kept_share", name)
            if time.monotonic() - began > _TURN_SECONDS:
                is_left = True
                break
        storage.sync(root)  # the slot has moved past what was kept: it goes when the table holds it for good
        for kept in done:
            changes.remove(kept)

    result = replace(tables.attempt(name, work), new_rows=True)
    if is_left:
        return result
    keeper.end(keeping, name)
    if result.error is None:
        log.info("%s: it holds all that was committed while it was loaded", name)
    return result


def _released(held: Lease | None) -> Lease | None:
    return replace(held, session="") if held is not None else None
