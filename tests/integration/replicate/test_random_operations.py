"""Random operations on many kinds of tables: the lake becomes the source, and every cut is a state it had.

HEADWATER_SEED replays the run of a seed. HEADWATER_SOAK=1 runs long: many seeds, more rounds, a driver process that
is replaced again and again (`make soak`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import following
from fixtures.oracle import Oracle, assert_every_cut_is_a_state_the_source_had, assert_same, content_of_lake
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.random_writers import INSERT_ONLY, KEYS, KINDS, TABLES, RandomWriters, create_tables
from fixtures.soak import SOAK
from headwater.lake.ledger import read_epoch
from headwater.load.load import load
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.replicate import replicate
from headwater.source.samples import commit_position

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

ROUNDS, SLICES, TRANSACTIONS = (8, 12, 400) if SOAK else (2, 2, 40)
SEEDS = int(os.environ.get("HEADWATER_SOAK_SEEDS", "20")) if SOAK else 1


@pytest.mark.parametrize("turn", range(SEEDS if "HEADWATER_SEED" not in os.environ else 1))
def test_after_any_operations_the_lake_is_the_source_and_every_cut_a_state_it_had(
    turn: int, database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    # The long run draws from the system: pytest-randomly seeds `random` itself, alike for every test of a run.
    drawn = random.SystemRandom().randrange(1 << 31) if SOAK else 505783899
    seed = int(os.environ.get("HEADWATER_SEED", drawn))
    print(f"\nHEADWATER_SEED={seed}")
    create_tables(database)
    database.allow_publishing()
    entries = [{"name": f"public.{name}", "insert_only": name == INSERT_ONLY} for name in TABLES]
    limits = {"max_rows": random.Random(seed).choice((20, 500_000))}
    pipeline = write_pipeline(tmp_path, database, *entries, replicate=limits)
    names = [f"public.{name}" for name in TABLES]
    with Oracle(database, *names, insert_only=[f"public.{INSERT_ONLY}"]) as oracle:
        database.execute("insert into quiet values (1, 'never touched again')")
        writers = RandomWriters(database, seed)
        writers.run(TRANSACTIONS)
        load(pipeline)
        writers.loaded = True
        newest = 0
        for _ in range(ROUNDS):
            write_while_replicating(pipeline, writers)
            replicate(pipeline, "now", None, threading.Event())
            newest = assert_every_cut_is_a_state_the_source_had(pipeline.lake_path(), None, oracle, newest)
            assert_lake_is_the_source(pipeline, spark, oracle)
        writers.close()
        print(f"{writers.statements} statements, {writers.commits} commits, {newest} epochs")


def write_while_replicating(pipeline: Pipeline, writers: RandomWriters) -> None:
    """Slices of writing on a few tables each, transactions left open between them, each with an epoch of its own."""
    with running_driver(pipeline):
        for _ in range(SLICES):
            before = newest_epoch(pipeline)
            writers.run(TRANSACTIONS // SLICES, tables=3, finish=False)
            # A slice whose transactions are all open still, or rolled back, is followed by no epoch at once.
            deadline = time.monotonic() + 10
            while newest_epoch(pipeline) == before and time.monotonic() < deadline:
                time.sleep(0.05)
        writers.run(2)


def newest_epoch(pipeline: Pipeline) -> int:
    epoch = read_epoch(pipeline.lake_path())
    return epoch.epoch if epoch is not None else 0


@contextmanager
def running_driver(pipeline: Pipeline) -> Iterator[None]:
    """A driver beside the block: in the soak a process of its own, which ends when its time is over."""
    if SOAK:
        command = [sys.executable, "-m", "headwater.cli", "replicate", pipeline.file, "--max-seconds", "60"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as driver:
            yield
            driver.terminate()
            assert driver.wait(timeout=180) == 0
        return
    with following(pipeline):
        yield


def assert_lake_is_the_source(pipeline: Pipeline, spark: SparkSession, oracle: Oracle) -> None:
    """Nobody writes now: the newest epoch holds what a plain SELECT finds, and the oracle agrees."""
    epoch = read_epoch(pipeline.lake_path())
    assert epoch is not None
    for name in oracle.tables:
        source = oracle.content_of_source(name)
        if name != f"public.{INSERT_ONLY}":  # updates and deletes of an insert-only table are not replicated
            assert_same(oracle.content(name), source, f"the oracle's {name}")
        version = epoch.tables[name]
        assert version.state == "active", f"{name} is {version.state}"
        path = f"{pipeline.lake_path()}/{TableName.parse(name).path}"
        assert_same(content_of_lake(spark, path, version.version), oracle.content(name), f"{name} at the end")


def test_the_random_operations_touch_every_kind_of_table_in_every_way(database: Database) -> None:
    """Else a run could pass because its statements did nothing."""
    create_tables(database)
    writers = RandomWriters(database, seed=1)
    writers.run(500)
    writers.close()
    assert {table for table, _ in writers.effects} >= set(TABLES) - {"quiet"}
    assert len({table for table, kind in writers.effects if kind == "truncate"}) > 3
    for table in KEYS:
        kinds = {kind for name, kind in writers.effects if name == table}
        assert kinds >= KINDS, f"{table}: {KINDS - kinds} never touched a row"
    assert writers.commits > 300


def test_the_oracle_knows_each_commit_by_the_position_that_its_writer_is_given(database: Database) -> None:
    database.execute('create table "Odd, name" (id int primary key, note text, tags text[])')
    with Oracle(database, 'public."Odd, name"') as oracle, database.connect() as connection:
        positions = []
        for number in range(5):
            connection.execute('insert into "Odd, name" values (%s, %s, %s)', (number, "it's [x]: 'y'\n", ["a", None]))
            positions.append(commit_position(connection).lsn)
        ends = [transaction.end_lsn for transaction in oracle.read() if transaction.changes]
        assert len(ends) == len(positions)
        for index, (end, position) in enumerate(zip(ends, positions, strict=True)):
            assert end <= position
            assert index + 1 == len(ends) or position < ends[index + 1]
        oracle.replay_to(ends[2])
        assert sum(oracle.content('public."Odd, name"').values()) == 3
        oracle.replay_to(ends[-1])
        assert oracle.content('public."Odd, name"') == oracle.content_of_source('public."Odd, name"')
