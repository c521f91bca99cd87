"""How a running driver follows reloads: it keeps the changes of the part while its rows are read, and then lets these,
brought forward by what was kept, take the place of the part."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from headwater.apply.replacement import remove_rows
from headwater.apply.waiting_files import discard_waiting
from headwater.errors import TableError
from headwater.failpoints import reach
from headwater.lake.registry import Registry, now_text
from headwater.lake.reload_records import Keeping, Reload
from headwater.log.spill import SpillStore
from headwater.replicate.batches.lanes import Lanes, Result
from headwater.replicate.beside.answers import Answers
from headwater.replicate.beside.merging import Merging
from headwater.replicate.beside.preparing import Preparations
from headwater.replicate.tables.tables import Tables

log = logging.getLogger(__name__)


class ReloadsFollowed:
    """`spill`: for what does not fit into memory; `still_alive` raises when the driver may not commit any more."""

    def __init__(
        self,
        root: str,
        registry: Registry,
        tables: Tables,
        answers: Answers,
        spill: SpillStore,
        still_alive: Callable[[], None],
    ) -> None:
        self._root, self._registry, self._tables, self._answers = root, registry, tables, answers
        self._spill, self._still_alive = spill, still_alive
        self._given: dict[str, Keeping] = {}  # answers to reloads that are not done
        self._preparations = Preparations(tables, root, spill, lambda: self._position())
        self._busy: set[str] = set()  # errands that are on their way, by the name of what they are for

    def begin(self, position: int) -> None:
        """Before the first batch: what earlier drivers have kept is kept on, what jobs ask for is begun."""
        for reload in self._answers.open_reloads():
            # One that nobody has answered waits for a table that has yet to catch up: what its lane applies until then
            # is not in what its job would read.
            waits = reload.name not in self._registry.kept and self._tables.keeper.holds_back(reload.table)
            if self._why_not(reload) is None and not waits:
                self._keep(reload, position)

    def start(self, lanes: Lanes, position: Callable[[], int]) -> None:
        """From now on there are lanes. `position`: up to where every table holds all."""
        self._lanes, self._position = lanes, position

    def follow(self) -> None:
        """What the registry says now."""
        for reload in self._answers.open_reloads():
            self._follow(reload)
        for reload in list(self._registry.reloads.values()):
            if reload.state == "given up" and reload.name in self._given and reload.name not in self._busy:
                self._fail(reload, "its job has failed")
        for name in list(self._given):  # lanes add to it
            answer, ended = self._registry.kept.get(name), self._registry.reloads.get(name)
            is_over = answer is not None and answer.state != "keeping" and name not in self._busy
            if is_over and ended is not None:
                # A driver before this one had merged it, and was late to say so.
                self._given.pop(name, None)
                self._preparations.forget(name)
                self._lanes.behind(ended.table, partial(self._end_keeping, ended, discard=False))

    def _follow(self, reload: Reload) -> None:
        if reload.name in self._busy:
            return
        keeper, why_not = self._tables.keeper, self._why_not(reload)
        if why_not is not None:
            self._fail(reload, why_not)
        elif keeper.holds_back(reload.table):
            return  # until its lane stands where everybody else does
        elif reload.name not in keeper.names(reload.table):
            self._busy.add(reload.name)
            self._lanes.behind(reload.table, partial(self._begin, reload))
        elif reload.state == "read" and self._position() >= reload.capture_lsn:
            if self._preparations.is_due(reload):
                self._busy.add(reload.name)
                self._lanes.behind(reload.table, partial(self._prepare, reload))
            elif not self._preparations.is_running(reload):
                self._busy.add(reload.name)
                self._lanes.behind(reload.table, partial(self._merge, reload))

    def _why_not(self, reload: Reload) -> str | None:
        record = self._registry.tables.get(reload.table)
        if record is None or record.incarnation != reload.incarnation:
            return "the table was loaded again"
        as_asked = record.state == "suspended" and reload.suspended == record.since
        if as_asked or (self._tables.states.is_followed(reload.table) and not reload.suspended):
            return None
        return f"the table is {record.state}: {record.reason}"

    def _begin(self, reload: Reload) -> Result:
        """In its lane."""
        self._keep(reload, self._position())
        self._busy.discard(reload.name)
        return Result()

    def _keep(self, reload: Reload, position: int) -> None:
        self._tables.owners.meet_leaves(reload.table, reload.unknown)
        self._tables.keeper.begin(reload.name, reload.table, reload.leaves)
        known = self._registry.kept.get(reload.name)
        # What an earlier driver has kept counts from where that one began.
        self._given[reload.name] = known or self._answers.keep(reload.name, reload.table, position)

    def _prepare(self, reload: Reload) -> Result:
        """In its lane: what is large of it is made ready beside."""
        try:
            self._preparations.begin(reload)
        except TableError as error:
            self._preparations.slowly(reload, error)
        except Exception as error:
            self._preparations.again(reload, error)
        self._busy.discard(reload.name)
        return Result()

    def _merge(self, reload: Reload) -> Result:
        """In its lane."""
        reach("replicate.before_part", reload.table)
        if self._preparations.is_due(reload):  # what was ready could not be used
            self._tables.retries.passed(reload.name)  # it is not tried again, but begun anew
            self._busy.discard(reload.name)
            return Result()
        merging = Merging(
            self._tables,
            self._root,
            reload,
            self._position(),
            self._spill,
            self._still_alive,
            self._preparations,
        )
        result, answer = merging.merge(self._given[reload.name])
        self._registry.write(answer)
        reach("replicate.after_part_answer", reload.table)
        self._preparations.forget(reload.name)
        self._end_keeping(reload, discard=merging.written_anew)
        self._given.pop(reload.name, None)
        self._busy.discard(reload.name)
        return result

    def _fail(self, reload: Reload, reason: str) -> None:
        log.warning("%s: the reload of %s is given up: %s", reload.table, reload.shown, reason)
        answer = self._given.pop(reload.name, None) or self._answers.keeping(reload.name, reload.table)
        self._registry.write(answer.ended("failed", now_text(), reason))
        self._preparations.forget(reload.name)
        # Of one that was read a driver before this one may have named the files.
        self._lanes.behind(reload.table, partial(self._end_keeping, reload, discard=reload.state == "asked"))

    def _end_keeping(self, reload: Reload, *, discard: bool) -> Result:
        """`discard`: no commit names the files of its rows."""
        self._tables.keeper.end(reload.name, reload.table)
        if discard:
            discard_waiting(self._root, reload.name)
        remove_rows(self._root, reload.name)
        return Result()

    def close(self) -> None:
        """End what runs beside the lanes."""
        self._preparations.close()

    def give_up_for_the_dead(self) -> None:
        """A job that died before it had read everything will never say so; a reload that has is finished without it."""
        for reload in self._answers.open_reloads():
            if reload.state == "asked" and reload.name not in self._busy and not self._answers.lives(reload.session):
                self._registry.refresh()
                if self._registry.reloads.get(reload.name) == reload:
                    self._fail(reload, "the job that asked for it is gone")
