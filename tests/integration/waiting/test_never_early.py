"""Guarantee 3 with the real driver: who waited reads everything committed before the wait began, from the cut alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest

from fixtures.jobs import in_thread, until
from fixtures.loaded import loaded_pipeline
from fixtures.postgres import Database
from headwater import commit_position, scan, wait
from headwater.lake.position_file import read_position_file
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.replicate.replicate import replicate

ACCOUNTS, TRANSFERS = "public.accounts", "public.transfers"


@pytest.fixture
def pipeline(database: Database, tmp_path: Path) -> Iterator[Pipeline]:
    """Two tables, loaded, with a driver running."""
    database.allow_publishing()
    database.execute(
        "create table accounts (id int primary key, balance bigint)",
        "insert into accounts select g, 100 from generate_series(1, 50) g",
        "create table transfers (id bigint generated always as identity primary key, source int, target int,"
        " marker text)",
    )
    wanted = loaded_pipeline(tmp_path, database, ACCOUNTS, TRANSFERS)
    stop = threading.Event()
    driver = in_thread(lambda: replicate(wanted, None, None, stop))
    until(lambda: driver.done() or read_position_file(wanted.lake_path()), "the driver publishes")
    yield wanted
    stop.set()
    assert driver.result(timeout=120)["stopped_by"] == "signal"


def _move_money(database: Database, seed: int, stop: threading.Event) -> None:
    """Transfers that keep the sum, each a transaction over both tables."""
    with database.connect(autocommit=False) as connection:
        number = seed
        while not stop.wait(0.02):
            number += 7919
            # In one order, so that two writers never wait for each other in a circle.
            source, target = sorted((1 + number % 50, 1 + number // 50 % 50))
            connection.execute("update accounts set balance = balance - 1 where id = %s", (source,))
            connection.execute("update accounts set balance = balance + 1 where id = %s", (target,))
            connection.execute("insert into transfers (source, target) values (%s, %s)", (source, target))
            connection.commit()


def test_a_marker_committed_before_the_wait_is_always_in_the_cut(pipeline: Pipeline, database: Database) -> None:
    stop = threading.Event()
    writers = [in_thread(partial(_move_money, database, seed, stop)) for seed in (1, 2)]
    try:
        for number in range(10):
            marker = f"marker {number}"
            with database.connect() as connection:
                connection.execute("insert into transfers (source, target, marker) values (0, 0, %s)", (marker,))
                position = commit_position(connection)
            # Alternately by "now" and by the writer's own position.
            require = "now" if number % 2 == 0 else format_lsn(position.lsn)
            cut = wait(pipeline, require=require, timeout=120)
            transfers, accounts = (scan(cut, name).read_all().to_pylist() for name in (TRANSFERS, ACCOUNTS))
            assert [row["marker"] for row in transfers].count(marker) == 1
            balances = dict.fromkeys(range(1, 51), 100)
            for row in transfers:
                if row["marker"] is None:
                    balances[row["source"]] -= 1
                    balances[row["target"]] += 1
            assert {row["id"]: row["balance"] for row in accounts} == balances, "a cut with half a transfer"
    finally:
        stop.set()
        for writer in writers:
            writer.result(timeout=30)


def test_a_wait_ends_where_nothing_is_written_to_the_tables(pipeline: Pipeline, database: Database) -> None:
    # Idle.
    first = wait(pipeline, require="now", timeout=60)
    # Only another database of the server writes.
    with psycopg.connect(database.server.conninfo("postgres"), autocommit=True) as other:
        other.execute("create table if not exists elsewhere as select g from generate_series(1, 1000) g")
        other.execute("drop table elsewhere")
        second = wait(pipeline, require="now", timeout=60)
        # The insert position stands at the start of a segment that nobody has written to.
        other.execute("select pg_switch_wal()")
    third = wait(pipeline, require="now", timeout=60)
    staleness = wait(pipeline, require="30s", timeout=60)
    assert first["epoch"] <= second["epoch"] <= third["epoch"] <= staleness["epoch"]
    assert {table["state"] for table in third["tables"].values()} == {"in step"}
