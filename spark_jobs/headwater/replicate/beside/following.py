"""How a running driver follows what other jobs write into the registry: loads, reloads, pauses.

Several times a second, or less often where a look costs money, in the main thread: the registry is read again, and
what is new in it goes to the lanes of the tables, as errands. What was agreed outlives this driver: the next one keeps
on what this one kept, from its first batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from os.path import join
from typing import Final

from headwater.delta import storage
from headwater.errors import Refused
from headwater.lake.looks import Growing, often
from headwater.lake.paths import kept_path, reloaded_path
from headwater.lake.registry import Registry, now_text
from headwater.lake.reload_records import load_name
from headwater.log.spill import SpillStore
from headwater.replicate.batches.lanes import Lanes, Result
from headwater.replicate.beside.answers import Answers
from headwater.replicate.beside.loads import LoadsFollowed
from headwater.replicate.beside.reloads import ReloadsFollowed
from headwater.replicate.tables.tables import Tables

log = logging.getLogger(__name__)

_LOOK_FOR_JOBS: Final = 5.0


class Following:
    """`still_alive` raises when the driver may not commit any more. `hide` has the reader hide what the registry
    says."""

    def __init__(
        self,
        root: str,
        registry: Registry,
        tables: Tables,
        answers: Answers,
        spill: SpillStore,
        hide: Callable[[], None],
        still_alive: Callable[[], None],
    ) -> None:
        self._root, self._registry, self._tables = root, registry, tables
        self._answers = answers
        self._loads = LoadsFollowed(root, registry, tables, self._answers, hide, still_alive)
        self._reloads = ReloadsFollowed(root, registry, tables, self._answers, spill, still_alive)
        self._looks = Growing(*often(root).registry)
        self._looked_for_jobs = time.monotonic()
        self._started_again = 0

    def begin(self, position: int) -> None:
        """Before the first batch: what earlier drivers have kept is kept on, what jobs ask for is begun."""
        self._loads.begin(position)
        self._reloads.begin(position)
        self._sweep()

    def start(self, lanes: Lanes, position: Callable[[], int]) -> None:
        """From now on there are lanes. `position`: up to where every table holds all."""
        self._reloads.start(lanes, position)
        self._loads.start(lanes, position)

    def follow_if_due(self, started_again: int = 0) -> bool:
        """Read the registry again, if it is time; True when a table's state has changed. `started_again`: so many times
        the reader has made another connection, and behind each one it is time."""
        is_anew = started_again > self._started_again
        if not (is_anew or self._looks.is_due):
            return False
        self._started_again = max(self._started_again, started_again)
        self._looks.looked(new=self._registry.refresh())
        changed = self._loads.follow()
        self._reloads.follow()
        if is_anew:
            self._hide_more()
        if time.monotonic() - self._looked_for_jobs > _LOOK_FOR_JOBS:
            self._looked_for_jobs = time.monotonic()
            self._loads.give_up_for_the_dead()
            self._reloads.give_up_for_the_dead()
        return changed

    @property
    def may_read_on(self) -> bool:
        """Whether everything is kept that the loads need which were known at the last look."""
        return self._loads.are_begun

    def _hide_more(self) -> None:
        """Before the first value of a table that was published while there was no connection."""
        try:
            self._loads.hide()
        except Refused as refused:
            if not self._loads.are_begun:
                raise  # values of such a table would be spilled
            log.warning("a load is not answered, since this driver cannot hide what is to be hidden: %s", refused)

    @property
    def paused(self) -> bool:
        """Whether somebody has paused the pipeline."""
        return self._registry.pipeline is not None and bool(self._registry.pipeline.paused)

    def settled(self, name: str, result: Result) -> None:
        """An errand on the table is done, and the main thread knows what came of it."""
        if result.lifts:
            self._tables.joining.rejoins(name)
        self._loads.settled(name)

    def close(self) -> None:
        """End what runs beside the lanes."""
        self._reloads.close()

    def _sweep(self) -> None:
        """What was kept or read for nobody that is left."""
        wanted = {load_name(r) for r in list(self._registry.tables.values()) if r.state in ("loading", "catching up")}
        wanted |= {reload.name for reload in self._answers.open_reloads()}
        # What has ended since this driver began to keep for it is ended as everything is that ends while it runs.
        wanted |= self._tables.keeper.all_names()
        for answer in list(self._registry.kept.values()):
            if answer.state == "keeping" and answer.name not in wanted:
                self._registry.write(answer.ended("failed", now_text(), "whoever asked for it is gone"))
        for folder in (kept_path(self._root, ""), reloaded_path(self._root, "")):
            for name in set(storage.names(folder)) - wanted:
                storage.delete_folder(join(folder, name))
