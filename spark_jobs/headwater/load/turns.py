"""Several tables of a load at once: who may read at the source, and the threads that load them.

Of `load.connections` a small table takes one, a large one as many as it has units for. They are given out in order, and
small tables go first: each of them is done soon, and the large ones then have all connections.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Turns:
    """`count` connections, given out in the order in which they are asked for. From any thread."""

    def __init__(self, count: int) -> None:
        self.count = self._free = count
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold so many inside the block, not more than there are."""
        mine = object()
        with self._changed:
            self._waiting.append(mine)
            self._changed.wait_for(lambda: self._waiting[0] is mine and self._free >= count)
            self._waiting.popleft()
            self._free -= count
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


class SideBySide(Generic[_Item, _Result]):
    """Works on items in threads: in order, each taken by the first thread that is free."""

    def __init__(self, items: Iterable[_Item], work: Callable[[Iterator[_Item]], Iterable[_Result]]) -> None:
        """`work` is called once in each thread, with an iterator over the items that are its."""
        self._items = deque(items)
        self._work = work
        self._results: list[_Result] = []
        self._failures: list[BaseException] = []
        self._ending = False

    def run(self, threads: int) -> list[_Result]:
        """All results, in no order. After a failure, which is raised here, no further item is begun, and those that are
        under way come to their end. Daemons: a signal ends the command at once, whatever they wait for."""
        count = min(threads, len(self._items))
        workers = [threading.Thread(target=self._serve, name=f"table-{n}", daemon=True) for n in range(count)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            self._ending = True
        if self._failures:
            raise self._failures[0]
        return self._results

    def _serve(self) -> None:
        try:
            for result in self._work(self._mine()):
                self._results.append(result)
        except BaseException as error:
            self._failures.append(error)
            self._ending = True

    def _mine(self) -> Iterator[_Item]:
        while not self._ending:
            try:
                item = self._items.popleft()
            except IndexError:
                return
            yield item
