"""A server that restarts under a running replicate: the same driver goes on, and the lake equals the source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.bank import TABLES, Writer, assert_cuts_consistent, create_bank
from fixtures.jobs import assert_equal, in_thread, until
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database, new_database
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.ledger import read_all
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import parse_lsn
from headwater.replicate.replicate import replicate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def server(server_binaries: Path, server_folder: Callable[[], Path]) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(server_folder(), server_binaries, durable=False) as running:
        yield running


@pytest.fixture(scope="module")
def bank(
    server: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Database, Pipeline]]:
    with new_database(server) as database:
        create_bank(database)
        database.allow_publishing()
        pipeline = pipeline_in_step(tmp_path_factory.mktemp("bank"), database, *TABLES)
        yield database, pipeline


def applied_to(pipeline: Pipeline) -> int:
    return read_all(pipeline.lake_path())[-1].position.lsn


def written(database: Database, seed: int) -> int:
    """The position behind some transactions."""
    with database.connect() as connection:
        Writer(connection, seed=seed).write(20)
        row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_driver_goes_on_after_the_server_has_restarted(bank: tuple[Database, Pipeline], mode: str) -> None:
    database, pipeline = bank
    generation = read_all(pipeline.lake_path())[-1].generation
    stop = threading.Event()
    running = in_thread(lambda: replicate(pipeline, None, None, stop))
    before = written(database, seed=1)
    until(lambda: running.done() or applied_to(pipeline) >= before, "the first changes are applied", 180)
    database.server.restart(mode)  # type: ignore[arg-type]
    after = written(database, seed=2)
    until(lambda: running.done() or applied_to(pipeline) >= after, "later changes are applied", 180)
    assert not running.done(), running.exception() or running.result()
    stop.set()
    assert running.result(120)["stopped_by"] == "signal"
    assert read_all(pipeline.lake_path())[-1].generation == generation + 1
    assert_equal(database, pipeline, *TABLES)
    assert_cuts_consistent(pipeline)
