"""Lanes: every table's shares in order, tables beside each other, each as fast as it can.

A share waits only for its own table. A lane that has fallen behind takes everything that waits in it at once: one
commit for several batches. One whose work is to be tried again rests without a thread until then. How ledger rows
follow from that is `headwater.replicate.batches.open_epochs`' business.

Threads are there for what takes long. Small shares, which most are, hold the interpreter for most of their few
milliseconds: two at once take it from each other at every call of native code, and each costs twice the processor. So
a lane begins where none has begun within `_PATIENCE`. Where lanes hardly compute, as in a store, or beside a disk that
takes its time, they begin at once.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, process_time

from headwater.errors import TableError
from headwater.lake.ledger import TableVersion
from headwater.lake_root import is_remote
from headwater.log.blocks import Transactions
from headwater.replicate.batches.batch import Share
from headwater.replicate.batches.retries import TryAgain
from headwater.stage_clock import measured

THREADS = 4
THREADS_IN_A_STORE = 12
"""There a lane waits for answers most of the time."""
_PATIENCE = 0.05
"""Seconds: a table that takes longer is not waited for. Most shares end within a tenth of it."""
_WAIT, _COMPUTE = 0.25, 0.75
"""Processor of the process against a lane's time: below the first, lanes wait for their disk and begin at once; above
the second they compute. In between it stays as it is: side by side they take more of the processor than alone."""
_LATELY = 0.2
"""Seconds of lanes' time of which that is the mean."""
_TELL_SECONDS = 0.01
"""While lanes wait for their turn what is done is told this often, or up to three times as late, and not share by
share: most of it cannot be published before them."""
_SWITCH_SECONDS = 0.0005
"""Between two threads that want the interpreter. A lane leaves it for a few microseconds of native code at a time, and
by Python's own 5 ms would wait a thousand times as long to come back: a third of the time of hundreds of tables."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a table's share. `versions`: where the table (and its history) stand now, by their names in ledger
    rows, if they moved; `error`: why it was suspended; `skipped`: the table does not follow the log now. Of an errand:
    `new_rows`, whether it did more than rearrange; `lifts`: whether a row with it may say that the table, which was
    suspended, is in step."""

    versions: Mapping[str, TableVersion] = field(default_factory=dict)
    error: TableError | None = None
    skipped: bool = False
    new_rows: bool = False
    lifts: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The shares of `name` in the batches `numbers` are applied: in one commit, or in none. No numbers: an errand.

    `began`, `ended`: monotonic; `stages`: seconds by stage; `failure`: what is not one table's own.
    """

    name: str
    numbers: tuple[int, ...]
    result: Result
    began: float
    ended: float
    stages: Mapping[str, float]
    failure: BaseException | None = None


@dataclass(slots=True)
class _Waiting:
    number: int
    share: Share
    transactions: Transactions


@dataclass(slots=True)
class _Lane:
    shares: deque[_Waiting] = field(default_factory=deque)
    errands: deque[Callable[[], Result]] = field(default_factory=deque)
    busy: bool = False
    ready: bool = False


def lanes_for(root: str) -> tuple[int, float]:
    """Of a driver whose lake is at `root`: threads of its lanes, and their patience."""
    return (THREADS_IN_A_STORE, 0.0) if is_remote(root) else (THREADS, _PATIENCE)


def side_by_side(root: str) -> int:
    """Lanes that work at the same time, but for those that take long."""
    return THREADS_IN_A_STORE if is_remote(root) else 1


_Taken = tuple[str, list[_Waiting], Callable[[], Result] | None]
"""A lane that a thread is in: its table, and shares or an errand."""


class Lanes:
    """Threads over lanes. `work(table, share, transactions)` applies; `wake` is called when something is done. Work and
    errands may raise TryAgain. `patience`: seconds that a lane waits for one that computes.

    Use as a context manager: at its end what waits is dropped, what runs is waited for.
    """

    def __init__(
        self,
        work: Callable[[str, Share, Transactions], Result],
        wake: Callable[[], None],
        threads: int = THREADS,
        patience: float = _PATIENCE,
    ) -> None:
        self._work, self._wake, self._count, self._patience = work, wake, threads, patience
        self._lock = threading.Lock()
        self._may_begin = threading.Condition(self._lock)  # for one of the threads
        self._is_done = threading.Condition(self._lock)
        # Lanes that a thread is in: when it began, by the clock and by the processor of the process.
        self._began: dict[str, tuple[float, float]] = {}
        self._computing = 1.0  # the processor that the process lately took while one worked, against its time
        self._disk_waits = False
        self._watched = False  # by a thread that looks again in a moment whether a lane that is ready may begin
        self._untold, self._told = False, 0.0
        self._lanes: dict[str, _Lane] = {}
        self._ready: deque[str] = deque()  # lanes that wait for a thread
        self._resting: dict[str, float] = {}  # until when (monotonic); what was tried is first in the lane again
        self._done: list[Done] = []
        self._joined: tuple[tuple[int, ...], Transactions] | None = None
        self._ending = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Lanes:
        sys.setswitchinterval(_SWITCH_SECONDS)  # for good: the process is a driver's
        for number in range(self._count):
            thread = threading.Thread(target=self._serve, name=f"headwater-apply-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ending = True
            self._may_begin.notify_all()
        for thread in self._threads:
            thread.join()

    def submit(self, number: int, shares: Mapping[str, Share], transactions: Transactions) -> None:
        """The shares of the next batch."""
        with self._lock:
            for name, share in shares.items():
                self._lane(name).shares.append(_Waiting(number, share, transactions))
                self._make_ready(name)
            self._may_begin.notify()

    def behind(self, name: str, errand: Callable[[], Result]) -> None:
        """Do `errand` in the table's turn, behind what waits in its lane."""
        with self._lock:
            self._lane(name).errands.append(errand)
            self._make_ready(name)
            self._may_begin.notify()

    def is_idle(self, name: str) -> bool:
        """Whether nothing of the table is done or waits."""
        with self._lock:
            lane = self._lane(name)
            return not (lane.busy or lane.shares or lane.errands)

    def take_done(self) -> list[Done]:
        with self._lock:
            done, self._done = self._done, []
            return done

    @property
    def crowded(self) -> bool:
        """Whether a table's share waits for a thread: nothing is gained by more batches."""
        with self._lock:
            return any(self._lanes[name].shares for name in self._ready)

    @property
    def only_resting(self) -> bool:
        """Whether nothing is done and nothing to be done, but what rests until it is tried again."""
        with self._lock:
            self._wake_rested()
            self._may_begin.notify()
            busy = any(lane.busy for lane in self._lanes.values())
            return not (busy or self._done or self._ready) and any(lane.shares for lane in self._lanes.values())

    def wait(self, seconds: float) -> None:
        """Until something is done and told, or `seconds` have passed."""
        with self._lock:
            if not self._done:
                self._is_done.wait(seconds)

    def _lane(self, name: str) -> _Lane:
        return self._lanes.setdefault(name, _Lane())

    def _make_ready(self, name: str) -> None:
        lane = self._lanes[name]
        if lane.busy or lane.ready or not (lane.shares or lane.errands):
            return
        if name not in self._resting:
            lane.ready = True
            self._ready.append(name)

    def _wake_rested(self) -> None:
        """Make ready what has rested enough."""
        now = monotonic()
        for name in [name for name, until in self._resting.items() if until <= now]:
            del self._resting[name]
            self._make_ready(name)

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            name, shares, errand = taken
            done = self._apply(name, shares) if shares else self._run(name, errand)
            self._end(name, shares, errand, done)
            del taken, shares

    def _take(self) -> _Taken | None:
        """The next lane, when it may begin; None: this is the end. Who waits here tells what is done meanwhile."""
        taken: _Taken | None = None
        while taken is None:
            with self._lock:
                if self._ending:
                    return None
                if (left := self._until_one_begins()) == 0:
                    taken = self._begin()
                elif self._watched:
                    self._may_begin.wait()
                else:
                    self._watched = bool(self._ready)
                    self._may_begin.wait(left)
                    self._watched = False
                tells = self._is_to_be_told()
            if tells:
                self._wake()
        return taken

    def _begin(self) -> _Taken:
        """The lane that is ready first, with all its shares, or with one errand."""
        name = self._ready.popleft()
        lane = self._lanes[name]
        lane.busy, lane.ready = True, False
        self._began[name] = monotonic(), process_time()
        shares = list(lane.shares)
        lane.shares.clear()
        errand = lane.errands.popleft() if not shares else None
        if (self._ready or self._resting) and not self._watched:
            self._may_begin.notify()  # one who looks whether this takes long
        return name, shares, errand

    def _end(self, name: str, shares: list[_Waiting], errand: Callable[[], Result] | None, done: Done) -> None:
        with self._lock:
            self._note_computing(*self._began.pop(name))
            lane = self._lanes[name]
            lane.busy = False
            if isinstance(done.failure, TryAgain):
                lane.shares.extendleft(reversed(shares))
                if errand is not None:
                    lane.errands.appendleft(errand)
                self._resting[name] = monotonic() + done.failure.seconds
            else:
                self._done.append(done)
                self._untold = True
                if done.failure is not None:
                    self._told = 0.0  # it ends the run: at once
            self._make_ready(name)
            tells = self._is_to_be_told()
        if tells:
            self._wake()

    def _note_computing(self, began: float, computed: float) -> None:
        """A lane has ended that began then."""
        if (passed := monotonic() - began) > 0:
            share = min((process_time() - computed) / passed, 1.0)
            self._computing += min(passed / _LATELY, 1.0) * (share - self._computing)
            self._disk_waits = self._computing < (_COMPUTE if self._disk_waits else _WAIT)

    def _is_to_be_told(self) -> bool:
        """Whether now is the time to say what is done, which nobody has been told of yet."""
        now = monotonic()
        # Who waits for a turn would tell later. There is nobody when all threads are in lanes.
        can_wait = self._ready and len(self._began) < self._count and now - self._told < _TELL_SECONDS
        if not self._untold or can_wait:
            return False
        self._untold, self._told = False, now
        self._is_done.notify()
        return True

    def _until_one_begins(self) -> float | None:
        """Seconds until a lane may begin, or it is to be looked again; 0: one may; None: none waits or rests."""
        self._wake_rested()
        now = monotonic()
        if not self._ready:
            return min((max(until - now, 0.001) for until in self._resting.values()), default=None)
        if not self._began:
            return 0.0
        newest, _ = max(self._began.values())
        if self._disk_waits or now - newest >= self._patience:
            return 0.0
        return min(newest + self._patience - now, 2 * _TELL_SECONDS)

    def _apply(self, name: str, waiting: list[_Waiting]) -> Done:
        numbers = tuple(w.number for w in waiting)

        def apply() -> Result:
            share = Share.joined([w.share for w in waiting])
            return self._work(name, share, self._transactions(numbers, waiting))

        return _timed(name, numbers, apply)

    def _transactions(self, numbers: tuple[int, ...], waiting: list[_Waiting]) -> Transactions:
        """Of hundreds of tables that have fallen behind, most have the same batches before them."""
        known = self._joined
        if known is None or known[0] != numbers:
            self._joined = known = numbers, Transactions.joined([w.transactions for w in waiting])
        return known[1]

    def _run(self, name: str, errand: Callable[[], Result] | None) -> Done:
        assert errand is not None
        return _timed(name, (), errand)


def _timed(name: str, numbers: tuple[int, ...], work: Callable[[], Result]) -> Done:
    began = monotonic()
    failure: BaseException | None = None
    result = Result()
    with measured() as stages:
        try:
            result = work()
        except BaseException as error:
            failure = error
    return Done(name, numbers, result, began, monotonic(), stages, failure)
