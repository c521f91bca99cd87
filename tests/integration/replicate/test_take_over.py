"""One driver takes the place of another without a pause, and whichever of them dies, nothing is lost or done twice.

Drivers that are killed or stopped are processes of their own on the JVM of this one; the others share this process.
All tests share one source and one lake.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.bank import TABLES, Bank, assert_cuts_consistent, free_the_slot, replicated_bank, writing
from fixtures.jobs import Hold, Job, armed, assert_equal, catch_up, in_thread, until
from headwater.apply import file_keys
from headwater.delta import data_files
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import LostLease
from headwater.lake.ledger import read_all, read_epoch, read_generation
from headwater.position import format_lsn
from headwater.replicate.replicate import replicate
from headwater.replicate.takeover import succession
from headwater.source.connection import connect, position_now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

LONG = 600.0


@pytest.fixture(scope="module")
def bank(
    each_store: str, postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bank]:
    with replicated_bank(postgres, tmp_path_factory.mktemp("bank"), seed=19) as bank:
        yield bank


class Drivers:
    """Drivers in threads of this process, asked to stop and waited for at the end."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self.stop = threading.Event()
        self._running: list[Future[Any]] = []

    def start(
        self, *, take_over: bool, until: str | None = None, seconds: float | None = LONG, overtime: float = 0
    ) -> Future[Any]:
        arguments = (self._bank.pipeline, until, seconds, self.stop, take_over)
        driver = in_thread(lambda: replicate(*arguments, overtime=overtime))
        self._running.append(driver)
        return driver

    def end(self) -> None:
        self.stop.set()
        for driver in self._running:
            driver.exception(60)


@pytest.fixture
def drivers(bank: Bank) -> Iterator[Drivers]:
    drivers = Drivers(bank)
    yield drivers
    drivers.end()


def _slot_is_active(bank: Bank) -> bool:
    with connect(bank.pipeline.conninfo()) as connection:
        query = "select active from pg_replication_slots where slot_name = %s"
        return connection.execute(query, [bank.pipeline.source.slot]).fetchone() == (True,)


def _locks(bank: Bank) -> int:
    """How many of the two locks of a successor are held."""
    query = "select count(*) from pg_locks where locktype = 'advisory' and objsubid = 2 and classid::bigint = %s"
    with connect(bank.pipeline.conninfo()) as connection:
        row = connection.execute(query, [succession._lock_class(bank.pipeline.source.slot) & 0xFFFFFFFF]).fetchone()
    assert row is not None
    return int(row[0])


def _generation(bank: Bank) -> int:
    return read_generation(bank.pipeline.lake_path(), bank.pipeline.name)


def _await_publication(bank: Bank, generation: int, *drivers: Future[Any]) -> None:
    def published() -> bool:
        assert not any(driver.done() and driver.exception() for driver in drivers), [d.exception() for d in drivers]
        newest = read_epoch(bank.pipeline.lake_path())
        return newest is not None and newest.generation == generation

    until(published, f"generation {generation} publishes", 120)


def _assert_exact(bank: Bank) -> None:
    """Every epoch is looked at once: these tests make hundreds."""
    catch_up(bank.pipeline)
    assert_equal(bank.database, bank.pipeline, *TABLES)
    _checked[bank.pipeline.file] = assert_cuts_consistent(bank.pipeline, _checked.get(bank.pipeline.file, 0))


_checked: dict[str, int] = {}


def test_drivers_that_take_over_from_each_other_leave_lake_and_cuts_exact(bank: Bank, drivers: Drivers) -> None:
    first = _generation(bank) + 1
    with writing(bank.database, seed=1):
        running = drivers.start(take_over=False)
        _await_publication(bank, first, running)
        for generation in range(first + 1, first + 4):
            successor = drivers.start(take_over=True)
            _await_publication(bank, generation, successor)
            report = running.result(60)
            assert (report["stopped_by"], report["handed_over"]) == ("seconds", True)
            until(lambda: _locks(bank) == 0, "the next successor may announce itself")
            running = successor
    drivers.end()
    assert running.result()["stopped_by"] == "signal"
    assert running.result()["handed_over"] is False
    _assert_exact(bank)


def test_a_driver_with_overtime_goes_on_past_its_slice_until_somebody_takes_over(bank: Bank, drivers: Drivers) -> None:
    first = _generation(bank) + 1
    late = drivers.start(take_over=False, seconds=1, overtime=LONG)
    _await_publication(bank, first, late)
    time.sleep(3)
    with writing(bank.database, seed=11):
        before = _newest_epoch(bank)
        until(lambda: _newest_epoch(bank) > before + 1 or late.done(), "it goes on behind its slice")
        assert not late.done()
        successor = drivers.start(take_over=True)
        _await_publication(bank, first + 1, successor)
    report = late.result(60)
    assert (report["stopped_by"], report["handed_over"]) == ("seconds", True)
    drivers.end()
    _assert_exact(bank)


def _newest_epoch(bank: Bank) -> int:
    newest = read_epoch(bank.pipeline.lake_path())
    assert newest is not None
    return newest.epoch


def test_what_was_read_before_the_take_over_is_not_read_again(
    bank: Bank, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[bool, int, str]] = []
    genuine = data_files.column_batches

    def noting(folder: str, file: Any, *arguments: Any) -> Any:
        # Up to its end the other driver, of the same process, reads files, too.
        reads.append((threading.current_thread().name == "headwater-warm-up", _generation(bank), file.name))
        return genuine(folder, file, *arguments)

    monkeypatch.setattr(file_keys, "column_batches", noting)
    running = drivers.start(take_over=False)
    with writing(bank.database, seed=2):
        generation = _generation(bank) + 1
        _await_publication(bank, generation, running)
        successor = drivers.start(take_over=True)
        _await_publication(bank, generation + 1, successor)
    drivers.end()
    ahead = {file for is_ahead, _, file in reads if is_ahead}
    later = {file for is_ahead, begun, file in reads if not is_ahead and begun > generation}
    assert ahead, "files were read before the slot was free"
    assert not ahead & later
    _assert_exact(bank)


def test_a_driver_does_not_take_its_own_claim_for_a_successor_while_the_server_still_holds_it(
    bank: Bank, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server takes its time to end a session; meanwhile nobody would replicate until the next slice."""
    close, held_up = succession.Successor.close, list[int]()

    def close_slowly(successor: succession.Successor) -> None:
        if not held_up:
            held_up.append(successor.claim)
            os.kill(successor.claim, signal.SIGSTOP)
        close(successor)

    monkeypatch.setattr(succession.Successor, "close", close_slowly)
    first = _generation(bank) + 1
    running = drivers.start(take_over=False)
    _await_publication(bank, first, running)
    try:
        with writing(bank.database, seed=23):
            successor = drivers.start(take_over=True)
            _await_publication(bank, first + 1, successor)
            assert running.result(60)["handed_over"]
            until(lambda: successor.done() or _looks(bank) > 1, "it has looked for others since it began")
            assert not successor.done()
            assert _locks(bank) == 2
    finally:
        for process in held_up:
            os.kill(process, signal.SIGCONT)
    until(lambda: _locks(bank) == 0, "the server has forgotten the claim")
    with writing(bank.database, seed=24):
        third = drivers.start(take_over=True)
        _await_publication(bank, first + 2, third)
    assert successor.result(60)["handed_over"]
    drivers.end()
    _assert_exact(bank)


def _looks(bank: Bank) -> int:
    """Of the driver that runs: a second after its start it is on its way, and each second later."""
    newest = read_epoch(bank.pipeline.lake_path())
    assert newest is not None
    epochs = [epoch for epoch in read_all(bank.pipeline.lake_path()) if epoch.generation == newest.generation]
    return int((epochs[-1].applied_at - epochs[0].applied_at).total_seconds())


def test_without_take_over_a_second_driver_is_still_refused(bank: Bank, drivers: Drivers) -> None:
    drivers.start(take_over=False)
    until(lambda: _slot_is_active(bank), "the first one runs")
    with pytest.raises(LostLease) as refused:
        catch_up(bank.pipeline)
    assert (refused.value.code, refused.value.exit_status) == ("already_running", 1)


def test_take_over_with_nobody_there_is_a_plain_start(bank: Bank) -> None:
    bank.writer.write(5)
    report = replicate(bank.pipeline, "now", None, threading.Event(), take_over=True)
    assert (report["stopped_by"], report["handed_over"]) == ("until", False)
    _assert_exact(bank)


def test_of_two_successors_the_second_is_refused(bank: Bank, drivers: Drivers) -> None:
    drivers.start(take_over=False)
    until(lambda: _slot_is_active(bank), "the first one runs")
    with armed(bank.folder, "take_over.announced") as hold:
        waiting = drivers.start(take_over=True)
        hold.reached(waiting)
        with pytest.raises(LostLease) as refused:
            replicate(bank.pipeline, None, 5, threading.Event(), take_over=True)
    assert (refused.value.code, refused.value.exit_status) == ("successor_waiting", 1)


def test_locks_of_another_role_are_no_successor(bank: Bank, drivers: Drivers) -> None:
    number = succession._lock_class(bank.pipeline.source.slot)
    with bank.database.superuser() as connection:
        connection.execute("select pg_advisory_lock(%s, 1), pg_advisory_lock(%s, 2)", [number, number])
        assert _locks(bank) == 2
        report = drivers.start(take_over=False, seconds=5).result(60)
    assert (report["stopped_by"], report["handed_over"]) == ("seconds", False)


def test_a_driver_whose_slice_is_over_goes_on_until_its_successor_is_warm(bank: Bank, drivers: Drivers) -> None:
    generation = _generation(bank) + 1
    with writing(bank.database, seed=3), armed(bank.folder, "take_over.announced") as hold:
        successor = drivers.start(take_over=True)  # it holds before it has looked whether the slot is free
        hold.reached(successor)
        running = drivers.start(take_over=False, seconds=3)
        _await_publication(bank, generation, running)
        before = bank.epoch
        until(lambda: bank.epoch >= before + 3 or running.done(), "it publishes on past its slice's end")
        assert not running.done()
        hold.release()
        _await_publication(bank, generation + 1, successor)
        assert running.result(60)["handed_over"]
    drivers.end()
    _assert_exact(bank)


def test_a_driver_with_a_target_reaches_it_before_it_lets_a_successor_in(bank: Bank, drivers: Drivers) -> None:
    with connect(bank.pipeline.conninfo()) as connection:
        ahead = position_now(connection).lsn + (1 << 18)
    running = drivers.start(take_over=False, until=format_lsn(ahead), seconds=None)
    until(lambda: _slot_is_active(bank), "it runs")
    successor = drivers.start(take_over=True)
    until(lambda: _locks(bank) == 2, "the successor is warm")
    bank.writer.write(3)
    assert not running.done()
    with writing(bank.database, seed=4):
        until(lambda: _beyond(bank, ahead), "the log has passed the target", 180)
    assert running.result(60)["stopped_by"] == "until"
    assert not running.result()["handed_over"]
    until(lambda: _locks(bank) == 0 or successor.done(), "the successor has the slot")
    drivers.end()
    assert successor.result()["stopped_by"] == "signal"
    _assert_exact(bank)


def _beyond(bank: Bank, lsn: int) -> bool:
    with connect(bank.pipeline.conninfo()) as connection:
        return position_now(connection).lsn > lsn


@pytest.mark.parametrize(("seconds", "word"), [(LONG, "signal"), (1.0, "seconds")])
def test_a_successor_that_is_not_let_in_ends_by_its_limit_or_a_signal(
    bank: Bank, drivers: Drivers, seconds: float, word: str
) -> None:
    with connect(bank.pipeline.conninfo()) as connection:
        ahead = position_now(connection).lsn + (1 << 30)
    running = drivers.start(take_over=False, until=format_lsn(ahead), seconds=None)
    until(lambda: _slot_is_active(bank), "it runs")
    stop = threading.Event()
    waiting = in_thread(lambda: replicate(bank.pipeline, None, seconds, stop, True))
    until(lambda: _locks(bank) == 2 or waiting.done(), "it is warm")
    if word == "signal":
        stop.set()
    report = waiting.result(30)
    assert (report["stopped_by"], report["epochs"], report["handed_over"]) == (word, 0, False)
    assert set(report["tables"]) == set(TABLES)
    until(lambda: _locks(bank) == 0, "it leaves no trace")
    assert not running.done()


@pytest.mark.parametrize("place", ["take_over.announced", "take_over.warm", "take_over.slot_is_free"])
def test_a_successor_that_dies_costs_nothing(bank: Bank, spark: SparkSession, drivers: Drivers, place: str) -> None:
    generation = _generation(bank) + 1
    with writing(bank.database, seed=5):
        running = drivers.start(take_over=False)
        _await_publication(bank, generation, running)
        with Job(bank.pipeline, "replicate", "--take-over", failpoint=f"{place}=kill", spark=spark) as successor:
            assert successor.wait() == -signal.SIGKILL, successor.log[-3000:]
            until(lambda: not successor.left, f"nothing of it is left: {successor.left}", 20)
            until(lambda: _locks(bank) == 0, "its claim went with it")
        if place == "take_over.announced":
            assert not running.done(), "nobody was ready to go on"
    drivers.end()
    assert running.exception() is None
    _assert_exact(bank)


@pytest.mark.parametrize("place", ["replicate.before_ledger", "replicate.after_ledger", "replicate.before_release"])
def test_a_driver_that_dies_is_followed_by_the_one_that_waits(
    bank: Bank, spark: SparkSession, drivers: Drivers, place: str
) -> None:
    generation = _generation(bank) + 1
    hold = Hold(bank.folder / f"dying_{place}")
    # In the middle of its second batch, or when it has just been asked to hand over.
    nth = "" if place == "replicate.before_release" else ":2"
    job = Job(bank.pipeline, "replicate", failpoint=f"{place}{nth}={hold.action}", spark=spark)
    with writing(bank.database, seed=6), job as running:
        until(lambda: _generation(bank) == generation or running.process.poll() is not None, "it runs", 120)
        if nth:
            until(lambda: hold.is_reached or running.process.poll() is not None, "it stands", 120)
        successor = drivers.start(take_over=True)
        until(lambda: (hold.is_reached and _locks(bank) == 2) or successor.done(), "a warm successor", 120)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        _await_publication(bank, generation + 1, successor)
    drivers.end()
    assert successor.result()["stopped_by"] == "signal"
    _assert_exact(bank)


def test_a_driver_that_is_stopped_loses_the_slot_to_its_successor_and_wakes_up_fenced(
    bank: Bank, spark: SparkSession, drivers: Drivers
) -> None:
    generation = _generation(bank) + 1
    hold = Hold(bank.folder / "stopped")
    with writing(bank.database, seed=7), _stopped_driver(bank, spark, hold) as running:
        successor = drivers.start(take_over=True)
        until(lambda: _locks(bank) == 2 or successor.done(), "a warm successor", 60)
        free_the_slot(bank)
        _await_publication(bank, generation + 1, successor)
        hold.release()
        for process in [running.pid, *running.family]:
            os.kill(process, signal.SIGCONT)
        status = running.wait(60)
        assert status == 1 or running.result["stopped_by"] == "fenced", (status, running.log[-2000:])
    drivers.end()
    _assert_exact(bank)


@contextmanager
def _stopped_driver(bank: Bank, spark: SparkSession, hold: Hold) -> Iterator[Job]:
    with Job(bank.pipeline, "replicate", failpoint=f"replicate.before_ledger={hold.action}", spark=spark) as running:
        until(lambda: hold.is_reached or running.process.poll() is not None, "the driver stands", 120)
        for process in [running.pid, *running.family]:
            os.kill(process, signal.SIGSTOP)
        yield running
