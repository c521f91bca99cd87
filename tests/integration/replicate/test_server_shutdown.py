"""`pg_ctl stop -m fast` at the source returns promptly, whatever replicate is doing, and nothing is lost by it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from fixtures.bank import TABLES, Writer, assert_cuts_consistent, create_bank
from fixtures.jobs import armed, assert_equal, catch_up, in_thread, until
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database, new_database
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import Transient
from headwater.lake.position_file import read_position_file
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.reader.process import ReaderOptions
from headwater.replicate.replicate import replicate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

PROMPT_SECONDS = 30.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver connects again for a while, as it does to a server that comes back. This one stays away."""
    monkeypatch.setattr("headwater.replicate.start.ReaderOptions", partial(ReaderOptions, patience=3.0))


@dataclass
class Bank:
    server: EmbeddedServer
    database: Database
    pipeline: Pipeline

    def start(self) -> Future[Any]:
        """A replicate that runs until it is stopped, as soon as it publishes."""
        before = self._generation()
        running = in_thread(lambda: replicate(self.pipeline, None, None, threading.Event()))
        until(lambda: self._generation() > before or running.done(), "it publishes")
        return running

    @property
    def epoch(self) -> int:
        file = read_position_file(self.pipeline.lake_path())
        return file.epoch if file is not None else 0

    def _generation(self) -> int:
        file = read_position_file(self.pipeline.lake_path())
        return file.generation if file is not None else 0

    def stop_server(self) -> float:
        """Seconds that a fast shutdown took."""
        started = time.monotonic()
        self.server.stop("fast")
        return time.monotonic() - started

    def recover(self) -> None:
        self.server.start()
        catch_up(self.pipeline)
        assert_equal(self.database, self.pipeline, *TABLES)
        assert_cuts_consistent(self.pipeline)


@pytest.fixture(scope="module")
def bank(
    server_binaries: Path,
    server_folder: Callable[[], Path],
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bank]:
    with (
        EmbeddedServer(server_folder(), server_binaries, durable=False) as server,
        new_database(server) as database,
    ):
        create_bank(database)
        database.allow_publishing()
        pipeline = pipeline_in_step(tmp_path_factory.mktemp("bank"), database, *TABLES)
        yield Bank(server, database, pipeline)


def _ended(running: Future[Any]) -> None:
    error = running.exception(60)
    assert isinstance(error, Transient), error
    assert error.exit_status == 1


@contextlib.contextmanager
def _writing_until_the_server_goes(database: Database) -> Iterator[threading.Event]:
    wrote = threading.Event()

    def write() -> None:
        with contextlib.suppress(psycopg.OperationalError), database.connect() as connection:
            writer = Writer(connection, seed=5)
            pace = threading.Event()
            while not pace.wait(0.01):
                writer.write(2)
                wrote.set()

    thread = threading.Thread(target=write, name="writer", daemon=True)
    thread.start()
    yield wrote
    thread.join(30)


def test_a_server_stops_promptly_under_an_idle_replicate(bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    running = bank.start()
    assert bank.stop_server() < PROMPT_SECONDS
    _ended(running)
    # It is asked once a second; the log has a line for the outage, and not one for each question.
    assert sum("the source does not answer, it is asked again each second" in line for line in caplog.messages) == 1
    bank.recover()


def test_a_server_stops_promptly_under_a_busy_replicate(bank: Bank) -> None:
    running = bank.start()
    before = bank.epoch
    with _writing_until_the_server_goes(bank.database) as wrote:
        assert wrote.wait(30)
        until(lambda: bank.epoch > before or running.done(), "epochs come")
        assert bank.stop_server() < PROMPT_SECONDS
    _ended(running)
    bank.recover()


def test_a_server_stops_promptly_under_a_replicate_stalled_at_the_lake(bank: Bank, tmp_path: Path) -> None:
    with armed(tmp_path, "replicate.before_table_commit") as hold:
        running = bank.start()
        with bank.database.connect() as connection:
            Writer(connection, seed=6).write(20)
        hold.reached(running)
        assert bank.stop_server() < PROMPT_SECONDS
    _ended(running)
    bank.recover()
