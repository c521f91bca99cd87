"""Killed with -9 anywhere and started again, the lake equals the source and every cut is a state that the source had.

The runs that a failpoint kills are processes of their own on the JVM of this one, because a JVM costs seconds: it
finishes what the dead driver asked for while the next run, in this process, already reads the log. Three more kill
driver, reader or JVM of a run under load. All cases share one source and one lake: each finds what the one
before has left, under a writer that never repeats itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from fixtures.bank import ENTRIES, TABLES, Writer, assert_cuts_consistent, create_bank, leave_to_spark, writing
from fixtures.jobs import JVM, READER, Job, assert_equal, catch_up, load_tables, states_of, until
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, new_database
from headwater.demo.postgres import EmbeddedServer
from headwater.failpoints import NAMES
from headwater.lake.position_file import read_position_file
from headwater.pipeline_file.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

# Where a point is passed several times in a run, the kill comes when some of the tables are done and others are not.
OCCASION = {
    "load.before_commit": 2,
    "load.after_commit": 2,
    "replicate.before_table_commit": 3,
    "replicate.after_table_commit": 2,
}
AGAIN = ("--table", "counters", "--table", "entries")
GONE_SECONDS = 20
ELSEWHERE = (
    "adopt.",
    "take_over.",
    "reload.",
    "load.after_stretches",
    "load.after_ordering",
    "replicate.after_kept_share",
    "replicate.before_chunk",
    "replicate.before_part",
    "replicate.before_round",
    "replicate.before_ready_commit",
    "replicate.after_part_",
    "replicate.before_evolution",
    "replicate.after_evolution",
    "replicate.before_rebuild",
    "replicate.after_rebuild",
)
"""Reached only with another job beside, or a change of columns: test_take_over, test_reload, test_load_beside,
test_schema_changes, test_rebuild, test_load_stretches, test_cluster_by."""


@dataclass
class Bank:
    database: Database
    pipeline: Pipeline
    writer: Writer
    checked_epoch: int = 0

    @property
    def epoch(self) -> int:
        """The newest one's number, by the file that pollers read."""
        file = read_position_file(self.pipeline.lake_path())
        return file.epoch if file is not None else 0

    def recover(self) -> None:
        """What the next run makes of it: everything, exactly."""
        load_tables(self.pipeline)
        assert set(states_of(catch_up(self.pipeline)).values()) == {"active"}
        assert_equal(self.database, self.pipeline, *TABLES)
        self.checked_epoch = assert_cuts_consistent(self.pipeline, self.checked_epoch)


@pytest.fixture(scope="module")
def bank(
    each_store: str, postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bank]:
    with new_database(postgres) as database, database.connect() as connection:
        create_bank(database)
        database.allow_publishing()
        pipeline = write_pipeline(tmp_path_factory.mktemp("bank"), database, *ENTRIES)
        yield Bank(database, pipeline, Writer(connection, seed=3))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(ELSEWHERE)])
def test_killed_at_a_failpoint_and_started_again_the_lake_equals_the_source(
    bank: Bank, spark: SparkSession, name: str
) -> None:
    bank.writer.write(25)
    if name.startswith("replicate.") and not bank.checked_epoch:
        bank.recover()
        bank.writer.write(25)
    arguments = ("load", "--again", *AGAIN) if name.startswith("load.") else ("replicate", "--until", "now")
    with Job(bank.pipeline, *arguments, failpoint=f"{name}:{OCCASION.get(name, 1)}=kill", spark=spark) as job:
        assert job.wait() == -signal.SIGKILL, job.log[-3000:]
        until(lambda: not job.left, f"the reader of the killed driver has ended: {job.left}", GONE_SECONDS)
    bank.writer.write(25)
    bank.recover()


@pytest.mark.parametrize("victim", ["driver", "reader", "JVM"])
def test_a_part_killed_under_load_takes_the_others_with_it_and_the_next_run_goes_on(
    bank: Bank, spark: SparkSession, victim: str, each_store: str
) -> None:
    if each_store != "disk" and victim == "JVM":
        pytest.skip("in a store no driver has one: there Spark writes no table")
    bank.recover()
    if each_store == "disk":
        leave_to_spark(bank.pipeline)
    before = bank.checked_epoch
    # What becomes of a JVM matters where driver or JVM die: there it is one of their own.
    jvm = spark if victim == "reader" else None
    with Job(bank.pipeline, "replicate", spark=jvm, as_users_do=True) as job:
        with writing(bank.database, seed=len(victim), pace=0.1):
            until(lambda: bank.epoch > before or job.process.poll() is not None, "it publishes", 300)
            pid = job.pid if victim == "driver" else job.child(READER if victim == "reader" else JVM)
            os.kill(pid, signal.SIGKILL)
            status = job.wait(90)
        assert status == (-signal.SIGKILL if victim == "driver" else 1), job.log[-3000:]
        if victim != "driver":
            assert "error" in job.result
        until(lambda: not job.left, f"nothing of it is left: {job.left}", GONE_SECONDS)
    bank.recover()
