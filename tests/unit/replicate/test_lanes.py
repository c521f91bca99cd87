"""Lanes and open epochs: each table in order, the ledger in order, and what lies between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from fixtures.waiting import until
from headwater.errors import SchemaChanged
from headwater.lake.ledger import TableVersion
from headwater.log.blocks import Chunk, Transactions, Truncate
from headwater.replicate.batches.batch import Batch, Share
from headwater.replicate.batches.lanes import Done, Lanes, Result, lanes_for
from headwater.replicate.batches.open_epochs import OpenEpochs
from headwater.replicate.batches.retries import TryAgain


def batch_at(lsn: int) -> Batch:
    one = np.array([lsn], dtype=np.int64)
    return Batch([Chunk(Transactions(one, one, one, one), (), (), lsn, lsn)])


def share(number: int) -> Share:
    return Share(truncates=[Truncate(number, (1,))])


def done(name: str, *numbers: int, version: int | None, at: float = 1.0, rows: int = 1) -> Done:
    stands = TableVersion(version, version, "active", rows) if version is not None else None
    return Done(name, numbers, Result({name: stands} if stands is not None else {}), 0.0, at, {})


class Work:
    """Stands for applying: notes what came, and holds the tables named until they are let go."""

    def __init__(self, *held: str) -> None:
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        self.free = {name: threading.Event() for name in held}
        self.began = {name: threading.Event() for name in held}

    def has_seen(self, name: str, *lsns: int) -> bool:
        return (name, lsns) in self.seen

    def __call__(self, name: str, what: Share, transactions: Transactions) -> Result:
        self.seen.append((name, tuple(int(lsn) for lsn in transactions.end_lsn)))
        if name in self.free:
            self.began[name].set()
            assert self.free[name].wait(20)
        return Result({name: TableVersion(len(self.seen), int(transactions.end_lsn[-1]), "active")})


@pytest.fixture
def slow() -> Iterator[Work]:
    work = Work("slow")
    yield work
    work.free["slow"].set()


def test_a_fast_table_runs_ahead_of_a_slow_one_that_then_takes_all_it_missed_at_once(slow: Work) -> None:
    with Lanes(slow, lambda: None) as lanes:
        lanes.submit(1, {"slow": share(1), "fast": share(1)}, batch_at(10).transactions())
        assert slow.began["slow"].wait(20)
        until(partial(slow.has_seen, "fast", 10), "the fast table's first share")
        for number in (2, 3):
            lanes.submit(number, {"slow": share(number), "fast": share(number)}, batch_at(number * 10).transactions())
            until(partial(slow.has_seen, "fast", number * 10), "the fast table goes on")
        assert [lsns for name, lsns in slow.seen if name == "slow"] == [(10,)]
        slow.free["slow"].set()
        until(lambda: slow.has_seen("slow", 20, 30), "the slow table takes both")


def test_a_table_is_never_in_two_threads(slow: Work) -> None:
    with Lanes(slow, lambda: None) as lanes:
        lanes.submit(1, {"slow": share(1)}, batch_at(10).transactions())
        assert slow.began["slow"].wait(20)
        lanes.submit(2, {"slow": share(2)}, batch_at(20).transactions())
        lanes.behind("slow", Result)
        lanes.submit(3, {"other": share(3)}, batch_at(30).transactions())
        until(lambda: slow.has_seen("other", 30), "the other table's share")
        assert len([name for name, _ in slow.seen if name == "slow"]) == 1
        slow.free["slow"].set()  # lanes end when their shares have


def test_lanes_are_crowded_while_a_share_waits_for_a_thread_but_not_for_its_own_table() -> None:
    work = Work("a", "b")
    with Lanes(work, lambda: None, threads=2) as lanes:
        lanes.submit(1, {"a": share(1)}, batch_at(10).transactions())
        assert work.began["a"].wait(20)
        lanes.submit(2, {"a": share(2)}, batch_at(20).transactions())
        assert not lanes.crowded
        lanes.submit(3, {"b": share(3)}, batch_at(30).transactions())
        assert work.began["b"].wait(20)
        lanes.submit(4, {"c": share(4)}, batch_at(40).transactions())
        assert lanes.crowded
        for event in work.free.values():
            event.set()
        until(lambda: not lanes.crowded, "every share has a thread")


class Told(Work):
    """Work whose end is told: everything is held, and `is_told` after a release says whether the main thread was."""

    def __init__(self, *held: str) -> None:
        super().__init__(*held)
        self.woken = threading.Event()

    def release(self, name: str) -> None:
        assert self.began[name].wait(20)
        self.woken.clear()
        self.free[name].set()

    @property
    def is_told(self) -> bool:
        return self.woken.wait(20)

    def close(self) -> None:
        for event in self.free.values():
            event.set()


class Clock:
    """The clock of lanes stands still until it is set; the process computes for a share of the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.computes = 1000.0, 1.0
        monkeypatch.setattr("headwater.replicate.batches.lanes.monotonic", lambda: self.now)
        monkeypatch.setattr("headwater.replicate.batches.lanes.process_time", lambda: self.now * self.computes)


def most_at_once(lanes: Lanes, inside: list[int], count: int) -> int:
    """How many shares were applied at the same time, of `count` small ones."""
    found: list[Done] = []

    def all_of_them() -> bool:
        found.extend(done for done in lanes.take_done() if done.name.startswith("t"))
        return len(found) == count

    lanes.submit(1, {f"t{number}": share(1) for number in range(count)}, batch_at(10).transactions())
    until(all_of_them, "every table has its share")
    return max(inside)


def small(inside: list[int], held: Work | None = None) -> Callable[[str, Share, Transactions], Result]:
    """Shares of a millisecond; notes in `inside` how many there are with each that begins. Others are `held`'s."""
    watched, names = threading.Lock(), set[str]()

    def work(name: str, what: Share, transactions: Transactions) -> Result:
        if held is not None and name in held.free:
            return held(name, what, transactions)
        with watched:
            names.add(name)
            inside.append(len(names))
        threading.Event().wait(0.001)
        with watched:
            names.discard(name)
        return Result()

    return work


def test_shares_that_compute_are_applied_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    inside: list[int] = []
    with Lanes(small(inside), lambda: None) as lanes:
        assert most_at_once(lanes, inside, 100) == 1


def test_beside_one_that_takes_long_they_are_still_applied_one_after_the_other(
    slow: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, inside = Clock(monkeypatch), list[int]()
    with Lanes(small(inside, slow), lambda: None, patience=60) as lanes:
        lanes.submit(1, {"slow": share(1)}, batch_at(10).transactions())
        assert slow.began["slow"].wait(20)
        clock.now += 100
        assert most_at_once(lanes, inside, 50) == 1
        slow.free["slow"].set()


@pytest.mark.parametrize(
    ("patience", "seconds"),
    [pytest.param(0.0, 0.0, id="without patience"), pytest.param(60.0, 61.0, id="that is over")],
)
def test_lanes_begin_beside_each_other(patience: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, work = Clock(monkeypatch), Told("a", "b", "c")
    with Lanes(work, lambda: None, threads=3, patience=patience) as lanes, contextlib.closing(work):
        lanes.submit(1, {name: share(1) for name in "abc"}, batch_at(10).transactions())
        for began in work.began.values():
            assert began.wait(20)
            clock.now += seconds


def test_where_lanes_wait_for_their_disk_they_begin_beside_each_other_until_they_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, inside = Clock(monkeypatch), list[int]()
    others, held = small(inside), Told()

    def work(name: str, what: Share, transactions: Transactions) -> Result:
        if name in held.free:
            return held(name, what, transactions)
        if name.startswith("takes"):
            clock.now += float(name.removeprefix("takes "))
            return Result()
        return others(name, what, transactions)

    def after(computes: float, *seconds: float) -> None:
        """One after the other so many seconds; the process computes for this share of them."""
        clock.computes = computes
        for number in seconds:
            lanes.submit(1, {f"takes {number}": share(1)}, batch_at(10).transactions())
            until(lambda: lanes.is_idle(f"takes {number}"), "it is done")  # noqa: B023 - at once
        lanes.take_done()

    def beside_each_other() -> None:
        nonlocal held
        with contextlib.closing(Told("a", "b", "c")) as held:
            lanes.submit(1, {name: share(1) for name in held.free}, batch_at(10).transactions())
            for began in held.began.values():
                assert began.wait(20)
        until(lambda: all(map(lanes.is_idle, "abc")), "they are done")
        lanes.take_done()

    with Lanes(work, lambda: None, threads=3, patience=60) as lanes:
        after(0.5, *[0.01] * 50)
        assert most_at_once(lanes, inside, 50) == 1
        after(0.0, *[0.01] * 50)
        beside_each_other()
        after(0.5, *[0.01] * 50)
        beside_each_other()
        after(0.0, 10.0)
        after(1.0, *[0.01] * 50)
        inside.clear()
        assert most_at_once(lanes, inside, 50) == 1


def test_a_lake_in_a_store_has_more_threads_that_wait_for_nobody() -> None:
    (threads, patience), (more, none) = lanes_for("/data/lake"), lanes_for("s3://bucket/lake")
    assert more > threads
    assert patience > none == 0.0


def test_what_is_done_is_told_before_the_last_thread_takes_a_table_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch)
    work = Told("slow", "first", "second", "slower", "late")
    with Lanes(work, work.woken.set, threads=2, patience=0) as lanes, contextlib.closing(work):
        lanes.submit(1, {name: share(1) for name in work.free}, batch_at(10).transactions())
        for name in ("first", "second"):
            work.release(name)
            assert work.is_told


def test_what_is_done_is_told_in_time_while_a_table_waits_for_one_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, work = Clock(monkeypatch), Told("first", "second", "slow", "late")
    with Lanes(work, work.woken.set, threads=2, patience=60) as lanes, contextlib.closing(work):
        lanes.submit(1, {name: share(1) for name in work.free}, batch_at(10).transactions())
        work.release("first")
        assert work.is_told
        work.release("second")
        assert work.began["slow"].wait(20)
        assert not work.woken.is_set()
        clock.now += 1
        assert work.is_told
        assert not work.began["late"].is_set()


def test_a_failure_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    work = Told("first", "broken", "slow", "late")

    def fail(name: str, what: Share, transactions: Transactions) -> Result:
        result = work(name, what, transactions)
        if name == "broken":
            raise RuntimeError("disk")
        return result

    with Lanes(fail, work.woken.set, threads=2, patience=60) as lanes, contextlib.closing(work):
        lanes.submit(1, {name: share(1) for name in work.free}, batch_at(10).transactions())
        for name in ("first", "broken"):
            work.release(name)
            assert work.is_told


def test_who_waits_for_lanes_is_woken_when_one_has_ended(slow: Work) -> None:
    with Lanes(slow, lambda: None) as lanes:
        waiting = threading.Thread(target=lanes.wait, args=(240,))
        waiting.start()
        lanes.submit(1, {"slow": share(1)}, batch_at(10).transactions())
        assert slow.began["slow"].wait(20)
        assert waiting.is_alive()
        slow.free["slow"].set()
        waiting.join(20)
        assert not waiting.is_alive()


def test_an_errand_of_a_table_to_which_nothing_happens_is_done() -> None:
    with Lanes(Work(), lambda: None) as lanes:
        lanes.behind("idle", Result)
        until(lambda: [done.name for done in lanes.take_done()] == ["idle"], "the errand")


def test_what_cannot_be_joined_fails_the_run_and_not_the_thread(slow: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the lane that has fallen behind that there may be too little memory."""

    def too_much(shares: list[Share]) -> Share:
        if len(shares) > 1:
            raise MemoryError
        return shares[0]

    monkeypatch.setattr(Share, "joined", too_much)
    failures: list[BaseException | None] = []

    def two() -> bool:
        failures.extend(done.failure for done in lanes.take_done())
        return len(failures) == 2

    with Lanes(slow, lambda: None, threads=1) as lanes:
        lanes.submit(1, {"slow": share(1)}, batch_at(10).transactions())
        assert slow.began["slow"].wait(20)
        for number in (2, 3):
            lanes.submit(number, {"slow": share(number)}, batch_at(number * 10).transactions())
        slow.free["slow"].set()
        until(two, "both have ended")
        assert failures[0] is None
        assert isinstance(failures[1], MemoryError)


def test_work_that_is_to_be_tried_again_rests_without_a_thread_and_takes_what_came_meanwhile() -> None:
    may_pass = threading.Event()
    seen: list[tuple[str, tuple[int, ...]]] = []

    def work(name: str, what: Share, transactions: Transactions) -> Result:
        seen.append((name, tuple(int(lsn) for lsn in transactions.end_lsn)))
        if name != "well" and not may_pass.is_set():
            raise TryAgain(0.05)
        return Result()

    with Lanes(work, lambda: None, threads=1) as lanes:
        lanes.submit(1, {"a": share(1), "b": share(1), "well": share(1)}, batch_at(10).transactions())
        until(lambda: seen.count(("a", (10,))) > 1 and seen.count(("b", (10,))) > 1, "both are tried again")
        assert ("well", (10,)) in seen
        until(lambda: [one.name for one in lanes.take_done()] == ["well"], "a share that rests is not done")
        lanes.submit(2, {"a": share(2)}, batch_at(20).transactions())
        may_pass.set()
        until(lambda: ("a", (10, 20)) in seen, "one commit for both")
        found: list[Done] = []

        def both() -> bool:
            found.extend(lanes.take_done())
            return len(found) == 2

        until(both, "both are done")
        assert {one.name: one.numbers for one in found} == {"a": (1, 2), "b": (1,)}
        assert not lanes.only_resting


def test_what_fails_is_told_and_the_lane_goes_on() -> None:
    def fail(name: str, what: Share, transactions: Transactions) -> Result:
        if name == "broken":
            raise RuntimeError("disk")
        return Result(error=SchemaChanged("a new column"))

    found: list[Done] = []

    def both() -> bool:
        found.extend(lanes.take_done())
        return len(found) == 2

    with Lanes(fail, lambda: None) as lanes:
        lanes.submit(1, {"broken": share(1), "changed": share(1)}, batch_at(10).transactions())
        until(both, "both are done")
    by_name = {d.name: d for d in found}
    assert isinstance(by_name["broken"].failure, RuntimeError)
    assert isinstance(by_name["changed"].result.error, SchemaChanged)


def test_rows_appear_in_order_and_only_when_every_table_holds_them() -> None:
    epochs = OpenEpochs()
    epochs.begin(batch_at(10), ["a", "b"], 0.0)
    epochs.begin(batch_at(20), ["a"], 0.0)
    epochs.resolve(done("a", 1, version=1))
    epochs.resolve(done("a", 2, version=2))
    assert epochs.publishable() is None
    epochs.resolve(done("b", 1, version=7))
    row = epochs.publishable()
    assert row is not None
    assert (row.lsn, {name: v.version for name, v in row.touched.items()}) == (20, {"a": 2, "b": 7})
    assert row.touched["a"].rows == 2
    assert not epochs


def test_a_row_holds_the_versions_of_its_own_position_while_a_table_is_further() -> None:
    epochs = OpenEpochs()
    epochs.begin(batch_at(10), ["a", "b"], 0.0)
    epochs.begin(batch_at(20), ["a", "b"], 0.0)
    epochs.resolve(done("a", 1, version=1))
    epochs.resolve(done("a", 2, version=2))
    epochs.resolve(done("b", 1, version=7))
    row = epochs.publishable()
    assert row is not None
    assert (row.lsn, {name: v.version for name, v in row.touched.items()}) == (10, {"a": 1, "b": 7})


def test_there_is_no_row_at_a_position_at_which_some_table_never_stood() -> None:
    epochs = OpenEpochs()
    for lsn in (10, 20, 30):
        epochs.begin(batch_at(lsn), ["a", "b"] if lsn != 20 else ["b"], 0.0)
    for number in (1, 2, 3):
        epochs.resolve(done("b", number, version=number))
    epochs.resolve(done("a", 1, 3, version=5))
    row = epochs.publishable()
    assert row is not None
    assert (row.lsn, {name: v.version for name, v in row.touched.items()}) == (30, {"a": 5, "b": 3})
    assert not epochs


def test_half_of_what_one_commit_took_is_not_published_before_the_other_half() -> None:
    epochs = OpenEpochs()
    for lsn in (10, 20, 30):
        epochs.begin(batch_at(lsn), ["a", "b"], 0.0)
    epochs.resolve(done("b", 1, version=1))
    epochs.resolve(done("b", 2, version=2))
    epochs.resolve(done("a", 1, 2, 3, version=5))
    assert epochs.publishable() is None  # at 20 table a holds more than table b
    epochs.resolve(done("b", 3, version=3))
    row = epochs.publishable()
    assert row is not None
    assert row.lsn == 30


def test_shares_that_came_to_nothing_together_hold_a_row_back_as_a_commit_of_them_does() -> None:
    """A row that came with the one and went with the other was there in between."""
    epochs = OpenEpochs()
    epochs.begin(batch_at(10), ["a", "b"], 0.0)
    epochs.begin(batch_at(20), ["a", "b"], 0.0)
    epochs.resolve(done("a", 1, 2, version=None))
    epochs.resolve(done("b", 1, version=1))
    assert epochs.publishable() is None
    epochs.resolve(done("b", 2, version=2))
    row = epochs.publishable()
    assert row is not None
    assert row.lsn == 20


def test_shares_of_a_table_that_does_not_follow_the_log_hold_no_row_back() -> None:
    epochs = OpenEpochs()
    epochs.begin(batch_at(10), ["a"], 0.0)
    epochs.begin(batch_at(20), ["a", "b"], 0.0)
    epochs.resolve(Done("a", (1, 2), Result(skipped=True), 0.0, 1.0, {}))
    row = epochs.publishable()
    assert row is not None
    assert row.lsn == 10


def test_the_newest_source_time_and_the_demand_survive_joining() -> None:
    epochs = OpenEpochs()
    first = batch_at(10)
    first.chunks[0] = Chunk(first.chunks[0].transactions, (), (), 10, 10, demand=True)
    epochs.begin(first, ["a"], 5.0)
    epochs.begin(batch_at(20), ["a"], 6.0)
    epochs.resolve(done("a", 1, 2, version=3))
    row = epochs.publishable()
    assert row is not None
    assert (row.demand, row.transactions, row.begun) == (True, 2, 5.0)


def test_of_several_epochs_that_become_one_row_each_table_has_its_newest_version() -> None:
    epochs = OpenEpochs()
    for lsn, tables in ((10, ["a", "b"]), (20, ["a"]), (30, ["b"])):
        epochs.begin(batch_at(lsn), tables, 0.0)
    epochs.resolve(done("a", 1, version=1))
    epochs.resolve(done("a", 2, version=2))
    epochs.resolve(done("b", 1, 3, version=7))
    row = epochs.publishable()
    assert row is not None
    assert (row.lsn, {name: (v.version, v.rows) for name, v in row.touched.items()}) == (30, {"a": (2, 2), "b": (7, 1)})
