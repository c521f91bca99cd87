"""Preapply: from the commit of one large transaction to its published epoch, with and without staging.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_preapply.py [ROWS...]

Inserts, then updates of as many rows, each one transaction that stays open until all of it was sent and what can be
staged is; then it commits. The reference is the same transaction in the same run with a driver that does not stage.
Beside it a small table gets a row every tenth of a second: p50 and p99 of its commits to published while the large
transaction is open. Rows (1,000,000 unless said) are of about 150 bytes, keys are bigint.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from figures import figure
from mixed_load import pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.lake.paths import staged_path
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.log.large import STAGE_FROM
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import parse_lsn
from headwater.replicate.replicate import replicate

PAYLOAD = "g, repeat('n', 60), now(), g * 1.5"
COLUMNS = "id bigint primary key, n int, note text, at timestamptz, amount float8"
QUIET = 3.0
"""Seconds without a new staged file after which everything that can be staged is."""


def position(connection: Any) -> int:
    row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    return parse_lsn(row[0])


def published(root: str, end: int) -> float:
    while (file := read_position_file(root)) is None or file.position.lsn < end:
        time.sleep(0.005)
    return time.perf_counter()


def trickle(source: EmbeddedServer, root: str, stop: threading.Event, delays: list[float]) -> None:
    with source.connect("postgres") as connection:
        while not stop.wait(0.1):
            connection.execute("insert into small (note) values ('x')")
            began, end = time.perf_counter(), position(connection)
            delays.append(published(root, end) - began)


def settled(root: str) -> int:
    """Bytes staged, once no more come for a while."""
    size, since = -1, time.perf_counter()
    while time.perf_counter() - since < QUIET:
        now = sum(
            os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(staged_path(root)) for name in names
        )
        if now != size:
            size, since = now, time.perf_counter()
        time.sleep(0.2)
    return size


def one(source: EmbeddedServer, root: str, statement: str) -> dict[str, Any]:
    delays: list[float] = []
    stop = threading.Event()
    beside = threading.Thread(target=trickle, args=(source, root, stop, delays))
    with source.connect("postgres", autocommit=False) as connection:
        beside.start()
        connection.execute(statement)
        staged = settled(root)
        stop.set()
        beside.join()
        started = time.perf_counter()
        connection.commit()
        seconds = time.perf_counter() - started
        end = position(connection)
    seconds = published(root, end) - started
    delays.sort()
    return {
        "seconds": round(seconds, 2),
        "staged_mb": round(staged / 1e6),
        "beside_p50": round(statistics.median(delays), 2),
        "beside_p99": round(delays[int(len(delays) * 0.99)], 2),
    }


def run(source: EmbeddedServer, wanted: Pipeline, rows: int, first: int, *, staging: bool) -> dict[str, Any]:
    root, stop = wanted.lake_path(), threading.Event()
    driver = threading.Thread(
        target=lambda: replicate(wanted, None, None, stop, stage_from=STAGE_FROM if staging else 0)
    )
    driver.start()
    with source.connect("postgres") as connection:
        connection.execute("insert into small (note) values ('begins')")
        published(root, position(connection))
    last = first + rows - 1
    insert = f"insert into large select g, {PAYLOAD} from generate_series({first}, {last}) g"
    update = f"update large set n = n + 1 where id between {first} and {last}"
    results = {"inserts": one(source, root, insert), "updates": one(source, root, update)}
    stop.set()
    driver.join()
    return results


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        with source.connect("postgres") as connection:
            connection.execute(f"create table large ({COLUMNS})")
            connection.execute("create table small (id bigserial primary key, note text)")
        wanted = pipeline(Path(scratch), source, "public.large", "public.small")
        load(wanted)
        first = 1
        for rows in [int(argument) for argument in sys.argv[1:]] or [1_000_000]:
            found = {}
            for staging in (False, True):
                found[staging] = run(source, wanted, rows, first, staging=staging)
                first += rows
            for kind in ("inserts", "updates"):
                with_it, without = found[True][kind], found[False][kind]
                what, plain = f"one transaction of {rows:,} {kind}, staged while it is open", "not staged"
                figure(f"{what}: commit to readable", with_it["seconds"], "s", plain, without["seconds"])
                figure(f"{what}: commits beside it, p50", with_it["beside_p50"], "s", plain, without["beside_p50"])
                figure(f"{what}: commits beside it, p99", with_it["beside_p99"], "s", plain, without["beside_p99"])
                figure(f"{what}: staged files", with_it["staged_mb"], "MB")


if __name__ == "__main__":
    main()
