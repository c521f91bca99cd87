"""Commit at the source -> position published, at 1,000 changes/s over 10 tables, for HEADWATER_BENCH_SECONDS.

Reference of the same run: a bare Delta append of one row by Spark, which no publishing through Spark can beat.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psycopg
from figures import figure
from mixed_load import TABLES, make_mixed_tables, pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.position import parse_lsn
from headwater.replicate.replicate import replicate
from headwater.spark.session import build_session

SECONDS = float(os.environ.get("HEADWATER_BENCH_SECONDS", "60"))
RATE = int(os.environ.get("HEADWATER_BENCH_RATE", "1000"))
STEP = 0.1


def write(conninfo: str, marks: list[tuple[int, float]], stop: threading.Event, rate: int) -> None:
    """`rate` changes a second in steps; after each step its position and the moment."""
    connection = psycopg.connect(conninfo, autocommit=True)
    execute = connection.execute
    execute("set synchronous_commit = off")
    per_step = int(rate * STEP)
    due = time.perf_counter()
    while not stop.is_set():
        execute(f"call mixed({per_step})")
        row = execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        marks.append((parse_lsn(row[0]), time.perf_counter()))
        due += STEP
        stop.wait(max(0.0, due - time.perf_counter()))
    connection.close()


def _at_rate(conninfo: str, root: str, rate: int, seconds: float) -> tuple[int, list[tuple[float, float]]]:
    marks: list[tuple[int, float]] = []
    found: list[tuple[float, float]] = []
    stop, pause = threading.Event(), threading.Event()
    writer = threading.Thread(target=write, args=(conninfo, marks, stop, rate))
    writer.start()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        pause.wait(0.02)
        file = read_position_file(root)
        now = time.perf_counter()
        while file is not None and len(found) < len(marks) and marks[len(found)][0] <= file.position.lsn:
            moment = marks[len(found)][1]
            found.append((moment, now - moment))
    stop.set()
    writer.join()
    return len(marks) * int(rate * STEP), found


def at_rate(source: EmbeddedServer, root: str, rate: int, seconds: float) -> tuple[int, list[tuple[float, float]]]:
    """Write `rate` changes a second by `call mixed(changes)`, for so long. How many were written, and of each step that
    was published meanwhile its moment and the seconds that it took.

    In a process of its own: who writes and who waits must not take the driver's interpreter from it.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_at_rate, (source.conninfo("postgres"), root, rate, seconds))


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        wanted = pipeline(Path(scratch), source, *make_mixed_tables(source))
        load(wanted)
        root = wanted.lake_path()
        stop = threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        while read_position_file(root) is None:
            stop.wait(0.05)
        written, found = at_rate(source, root, RATE, SECONDS)
        delays = [delay for _, delay in found]
        stop.set()
        driver.join()
        spark = build_session()
        appends = []
        for _ in range(10):
            started = time.perf_counter()
            spark.createDataFrame([(1,)], "id int").write.format("delta").mode("append").save(f"{scratch}/bare")
            appends.append(time.perf_counter() - started)
        half = delays[len(delays) // 2 :]  # the JVM is warm by then
        what = f"commit to readable, {RATE:,} changes/s over {TABLES} tables, {SECONDS:.0f} s"
        append, bare = "a one-row Delta append by Spark", statistics.median(appends)
        p99 = statistics.quantiles(half, n=100)[98] if len(half) > 1 else None
        figure(f"{what}: p50", statistics.median(half) if half else None, "s", append, bare)
        figure(f"{what}: p99", p99, "s", append, bare)
        figure(f"{what}: changes published", len(delays) * int(RATE * STEP), "changes", "changes written", written)


if __name__ == "__main__":
    main()
