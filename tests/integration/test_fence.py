"""The fence: of two drivers only the newer one publishes, whenever the older one wakes up.

The slot lets one driver read at a time, but a stopped driver loses it without knowing. It may still finish a table
commit that it had begun; it publishes no ledger row and no position file, and lake and cuts stay exact.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.bank import TABLES, Writer, assert_cuts_consistent, create_bank
from fixtures.jobs import Hold, Job, armed, assert_equal, catch_up, in_thread, lake_path_of, load_tables, until
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, new_database
from headwater import failpoints
from headwater.config import Pipeline
from headwater.embedded import EmbeddedServer
from headwater.errors import HeadwaterError
from headwater.lake.ledger import Epoch, read_all, read_generation
from headwater.lake.paths import position_file_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@dataclass
class Bank:
    database: Database
    pipeline: Pipeline
    folder: Path
    writer: Writer

    def free_the_slot(self) -> None:
        """What wal_sender_timeout does to a driver that does not answer."""
        slot = self.pipeline.source.slot
        with self.database.superuser() as connection:
            connection.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", (slot,)
            )

        def is_free() -> bool:
            with self.database.superuser() as connection:
                row = connection.execute(
                    "select active from pg_replication_slots where slot_name = %s", (slot,)
                ).fetchone()
            return row == (False,)

        until(is_free, "the slot is free")

    def epochs(self) -> list[Epoch]:
        return read_all(self.pipeline.lake_path())

    def generation(self) -> int:
        return read_generation(self.pipeline.lake_path(), self.pipeline.name)

    def position_file(self) -> str:
        return Path(position_file_path(self.pipeline.lake_path())).read_text()

    def assert_exact(self) -> None:
        assert_equal(self.database, self.pipeline, *TABLES)
        assert_cuts_consistent(self.pipeline)


@pytest.fixture(scope="module")
def bank(postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    with new_database(postgres) as database, database.connect() as connection:
        create_bank(database)
        database.allow_publishing()
        folder = tmp_path_factory.mktemp("bank")
        pipeline = write_pipeline(folder, database, *TABLES)
        load_tables(pipeline)
        catch_up(pipeline)
        yield Bank(database, pipeline, folder, Writer(connection, seed=11))


@pytest.mark.parametrize("place", ["replicate.before_table_commit", "replicate.before_ledger"])
def test_a_stopped_driver_that_wakes_up_after_its_successor_publishes_nothing(
    bank: Bank, spark: SparkSession, place: str
) -> None:
    bank.writer.write(30)
    hold = Hold(bank.folder / place)
    with Job(bank.pipeline, "replicate", failpoint=f"{place}={hold.action}", spark=spark) as job:
        until(lambda: hold.is_reached or job.process.poll() is not None, "the first driver stands", 120)
        stopped = [job.pid, *job.family]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        first = bank.generation()
        bank.free_the_slot()
        bank.writer.write(30)
        catch_up(bank.pipeline)
        published, file = bank.epochs(), bank.position_file()
        assert published[-1].generation == bank.generation() == first + 1
        bank.assert_exact()

        hold.release()
        for process in stopped:
            os.kill(process, signal.SIGCONT)
        status = job.wait(60)
        assert status == 1 or job.result["stopped_by"] == "fenced", (status, job.result)
        assert not [epoch for epoch in bank.epochs() if epoch.generation == first and epoch not in published]
    assert bank.epochs() == published
    assert bank.position_file() == file
    bank.assert_exact()
    bank.writer.write(10)
    catch_up(bank.pipeline)
    bank.assert_exact()


# Two drivers of one process share a JVM, and with it the exact moments.


def _outcome(job: Future[Any]) -> str:
    """How an old driver ended: "fenced", or the code of the error by which it noticed."""
    error = job.exception(60)
    if error is None:
        return str(job.result()["stopped_by"])
    assert isinstance(error, HeadwaterError)
    assert error.exit_status == 1
    return error.code


def test_a_table_commit_that_lands_after_the_successor_began_is_counted_once(bank: Bank) -> None:
    """The successor has raised the generation and not yet read the tables: it finds the late commit there."""
    bank.writer.write(30)
    with armed(bank.folder, "replicate.before_table_commit") as old_hold:
        old = in_thread(lambda: catch_up(bank.pipeline))
        old_hold.reached(old)
        bank.free_the_slot()
        bank.writer.write(10)
        new_hold = Hold(bank.folder / "successor")
        os.environ["HEADWATER_FAILPOINT"] += f";replicate.after_generation={new_hold.action}"
        failpoints._reached.pop("replicate.after_generation", None)
        new = in_thread(lambda: catch_up(bank.pipeline))
        new_hold.reached(new)
        before = bank.epochs()
        old_hold.release()
        assert _outcome(old) in ("fenced", "source_unreachable")
        assert bank.epochs() == before
        new_hold.release()
        assert new.result(90)["stopped_by"] == "until"
    bank.assert_exact()


def test_a_successor_that_meets_a_late_commit_reads_the_position_and_skips(bank: Bank) -> None:
    """The successor has read the tables and is about to commit: it loses the race and plans again."""
    bank.writer.write(30)
    others = len(TABLES) - 1
    versions = {name: _version(bank, name) for name in TABLES}
    with armed(bank.folder, "replicate.before_table_commit") as old_hold:
        old = in_thread(lambda: catch_up(bank.pipeline))
        old_hold.reached(old)
        until(lambda: sum(_version(bank, name) > versions[name] for name in TABLES) == others, "all others")
        bank.free_the_slot()
        bank.writer.write(10)
        new_hold = Hold(bank.folder / "successor_in_apply")
        os.environ["HEADWATER_FAILPOINT"] = f"replicate.before_table_commit={new_hold.action}"
        failpoints._reached.clear()
        new = in_thread(lambda: catch_up(bank.pipeline))
        new_hold.reached(new)
        before = bank.epochs()
        old_hold.release()
        assert _outcome(old) in ("fenced", "source_unreachable")
        assert bank.epochs() == before
        new_hold.release()
        assert new.result(90)["stopped_by"] == "until"
    bank.assert_exact()


def _version(bank: Bank, name: str) -> int:
    log = Path(lake_path_of(bank.pipeline, name)) / "_delta_log"
    return max(int(file.stem) for file in log.glob("*.json") if file.stem.isdigit())
