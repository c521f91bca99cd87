"""What a running driver removes by itself: files and log entries that no cut needs any more, and expired pins.

One thread, one piece at a time, and after each a rest of nineteen times what it took: a twentieth of one core at most,
whatever the lake holds. It asks nothing of the driver but which tables were written, and the driver never waits for it.
What it may remove it learns from the lake alone (`headwater.lake.horizon`), so it does no harm in a driver that was
fenced either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from headwater.apply.waiting_files import all_waiting
from headwater.delta import log_files
from headwater.lake import wait_log
from headwater.lake.cuts import remove_expired
from headwater.lake.horizon import RecentHorizons
from headwater.lake.ledger import generation_began
from headwater.lake.looks import often
from headwater.lake.paths import table_path
from headwater.lake.registry import TableRecord
from headwater.maintain.cleanup import ORPHAN_SECONDS, Cleaned, clean
from headwater.maintain.control_tables import keep_ledger, keep_registry, keep_validations

log = logging.getLogger(__name__)

_SHARE = 0.05
_REST = 1.0
_SAME_SECONDS = 3600.0
_GOLDEN = 0.618034


@dataclass(slots=True)
class _Task:
    """A piece of work. `next`: due at this moment of the monotonic clock, and after it `every` so many seconds;
    `commits`: since it was done last."""

    name: str
    work: Callable[[], bool]
    next: float
    every: float
    commits: int = 0


class Caretaker:
    """Cleans up beside the driver of `generation` until `close`. `keep_cuts`: seconds."""

    def __init__(
        self, root: str, generation: int, keep_cuts: float, tables: Iterable[TableRecord], *, first: float = 30.0
    ) -> None:
        """`first`: seconds until it begins, so that a short run does nothing but its own work."""
        self._root, self._generation = root, generation
        self._began: datetime | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._piece = ""
        self._end_piece = threading.Event()
        self._idle = threading.Condition(self._lock)
        self._records: dict[str, TableRecord] = {}
        self.done: Counter[str] = Counter()
        begin, self._often = time.monotonic() + first, often(root)
        self._tasks = {
            "ledger": _Task("the ledger", lambda: self._control(keep_ledger), begin, self._often.control),
            "pins": _Task("pins", self._pins, begin, self._often.upkeep),
            "registry": _Task("the registry", lambda: self._control(keep_registry), begin, self._often.upkeep),
            "validations": _Task("validations", lambda: self._control(keep_validations), begin, self._often.upkeep),
        }
        # A slice may end before all had a turn. By the golden section every generation begins far from where those
        # before it began: a few of them reach every table.
        records = list(tables)
        first_turn = int(generation * _GOLDEN % 1 * len(records))
        self._seen([*records[first_turn:], *records[:first_turn]], begin)
        self._failed: set[str] = set()
        self._last: dict[str, tuple[int, float]] = {}
        self._horizons = RecentHorizons(root, keep_cuts)
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """It ends within a moment; what it was about to remove the next driver will."""
        self._stop.set()
        self._end_piece.set()
        if self._thread is not None:
            self._thread.join()

    def written(self, records: Iterable[TableRecord]) -> None:
        """A row was published: these tables have one more commit each. The first one begins the work."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headwater-caretaker", daemon=True)
            self._thread.start()
        now = time.monotonic()
        with self._lock:
            for record in records:
                self._seen([record], now + self._often.upkeep)
                task = self._tasks[_key(record.name)]
                task.commits += 1
                task.next = min(task.next, now if task.commits >= self._often.commits else now + self._often.upkeep)

    def leave(self, name: str) -> None:
        """Another job writes the table: files that no commit names yet may be old before that ends. Behind this nothing
        of it is removed: a piece of work that is under way at it ends first, early."""
        with self._idle:
            self._tasks.pop(_key(name), None)
            self._records.pop(name, None)
            if self._piece == name:
                self._end_piece.set()
                self._idle.wait_for(lambda: self._piece != name)

    def _seen(self, records: Iterable[TableRecord], due: float) -> None:
        for record in records:
            self._records[record.name] = record
            name = record.name
            if _key(name) not in self._tasks:
                self._tasks[_key(name)] = _Task(name, lambda name=name: self._table(name), due, self._often.upkeep)  # type: ignore[misc]

    def _run(self) -> None:
        pause = _REST
        while not self._stop.wait(pause):
            task = self._due()
            if task is None:
                pause = _REST
                continue
            began = time.monotonic()
            more = self._do(task)
            ended = time.monotonic()
            pause = max(_REST, (ended - began) * (1 / _SHARE - 1))
            with self._lock:
                # A table with nothing to wait for is looked at when it is written again.
                task.next = ended + task.every if more or task.commits else float("inf")

    def _due(self) -> _Task | None:
        """Every other turn is that of the table with the most commits, the rest go by when they were due: neither can
        keep the other from ever having its turn."""
        now, by_commits = time.monotonic(), self.done.total() % 2
        with self._lock:
            due = [task for task in self._tasks.values() if task.next <= now]
            if not due:
                return None
            task = min(due, key=lambda task: (-task.commits if by_commits else 0, task.next))
            task.commits = 0
            self._piece = task.name
            if not self._stop.is_set():
                self._end_piece.clear()
            return task

    def _do(self, task: _Task) -> bool:
        """Whether there will be more to do without another commit. `done` counts what was tried, by name."""
        self.done[task.name] += 1
        try:
            more = task.work()
            self._failed.discard(task.name)
        except Exception as error:  # what is not cleaned up costs room, and nothing else
            if task.name not in self._failed:
                log.warning("%s: not cleaned up: %s", task.name, error)
            self._failed.add(task.name)
            return True
        finally:
            with self._idle:
                self._piece = ""
                self._idle.notify_all()
        return more

    def _table(self, name: str) -> bool:
        record = self._records.get(name)
        if record is None:
            return False
        if record.state not in ("active", "catching up", "suspended"):
            return False
        folder = table_path(self._root, record.path)
        found = log_files.look(folder)
        if not self._pins_are_read():
            return True
        horizon = self._horizons.read().of(name, found)
        if horizon is None:
            return True
        last = self._last.get(name)
        if last is not None and last[0] == horizon.version and time.monotonic() < last[1] + _SAME_SECONDS:
            return True  # a pin holds it: there is no more to remove than the last time
        cleaned = clean(
            folder,
            found,
            horizon.version,
            log_from=horizon.log_from,
            orphans_before=self._orphans_before(),
            waiting=partial(all_waiting, self._root),
            stop=self._end_piece,
        )
        self._last[name] = horizon.version, time.monotonic()
        _say(name, cleaned)
        return horizon.version < found.newest

    def _control(self, keep: Callable[..., object]) -> bool:
        keep(self._root, self._end_piece)
        return True

    def _pins(self) -> bool:
        if self._pins_are_read():
            remove_expired(self._root, pins=self._horizons.pins)
            wait_log.remove_old(self._root)
        return True

    def _pins_are_read(self) -> bool:
        """False: the piece is to end before. Thousands of pins take a while, the first time."""
        self._horizons.pins.read_ahead(self._end_piece)
        return not self._end_piece.is_set()

    def _orphans_before(self) -> float | None:
        """Whatever this driver has written, or stages, it may yet commit."""
        if self._began is None:
            self._began = generation_began(self._root, self._generation)
        if self._began is None:
            return None
        return min(self._began.timestamp(), datetime.now(UTC).timestamp() - ORPHAN_SECONDS)


def _key(table: str) -> str:
    return f"table {table}"


def _say(name: str, cleaned: Cleaned) -> None:
    if cleaned.files or cleaned.log_files:
        log.info(
            "%s: removed %s files (%s bytes) and %s of its log", name, cleaned.files, cleaned.bytes, cleaned.log_files
        )
