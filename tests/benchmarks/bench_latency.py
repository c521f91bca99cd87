"""Commit at the source -> position published, at 1,000 changes/s over 10 tables, for HEADWATER_BENCH_SECONDS.

Reference of the same run: a bare Delta append of one row by Spark, which no publishing through Spark can beat.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from mixed_load import TABLES, make_mixed_tables, pipeline, report, server

from headwater.jobs.load import load
from headwater.jobs.replicate import replicate
from headwater.lake.position_file import read_position_file
from headwater.position import parse_lsn
from headwater.session import build_session

SECONDS = float(os.environ.get("HEADWATER_BENCH_SECONDS", "120"))
RATE = int(os.environ.get("HEADWATER_BENCH_RATE", "1000"))
STEP = 0.1


def write(connection: object, marks: list[tuple[int, float]], stop: threading.Event, rate: int = RATE) -> None:
    """`rate` single-row changes a second in steps; after each step its position and the moment."""
    execute = connection.execute  # type: ignore[attr-defined]
    per_step = int(rate * STEP)
    due = time.perf_counter()
    while not stop.is_set():
        execute(f"call mixed({per_step})")
        row = execute("select pg_current_wal_insert_lsn()::text").fetchone()
        marks.append((parse_lsn(row[0]), time.perf_counter()))
        due += STEP
        stop.wait(max(0.0, due - time.perf_counter()))


def seconds_to_published(root: str, marks: list[tuple[int, float]], seconds: float) -> list[tuple[float, float]]:
    """For so long: of each of `marks` that is published its moment and the seconds that it took."""
    found: list[tuple[float, float]] = []
    pause, began = threading.Event(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        pause.wait(0.02)
        file = read_position_file(root)
        now = time.perf_counter()
        while file is not None and len(found) < len(marks) and marks[len(found)][0] <= file.position.lsn:
            moment = marks[len(found)][1]
            found.append((moment, now - moment))
    return found


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        wanted = pipeline(Path(scratch), source, *make_mixed_tables(source))
        load(wanted)
        root = wanted.lake_path()
        marks: list[tuple[int, float]] = []
        stop_writing, stop = threading.Event(), threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        while read_position_file(root) is None:
            stop.wait(0.05)
        with source.connect("postgres") as connection:
            connection.execute("set synchronous_commit = off")
            writer = threading.Thread(target=write, args=(connection, marks, stop_writing))
            writer.start()
            delays = [delay for _, delay in seconds_to_published(root, marks, SECONDS)]
            stop_writing.set()
            writer.join()
        stop.set()
        driver.join()
        spark = build_session()
        appends = []
        for _ in range(10):
            started = time.perf_counter()
            spark.createDataFrame([(1,)], "id int").write.format("delta").mode("append").save(f"{scratch}/bare")
            appends.append(time.perf_counter() - started)
        half = delays[len(delays) // 2 :]  # the JVM is warm by then
        report(
            "commit to published",
            changes_per_second=RATE,
            tables=TABLES,
            seconds=SECONDS,
            written=len(marks) * int(RATE * STEP),
            published=len(delays) * int(RATE * STEP),
            p50_seconds=round(statistics.median(half), 2) if half else None,
            p99_seconds=round(statistics.quantiles(half, n=100)[98], 2) if len(half) > 1 else None,
            reference="one-row Delta append by Spark, median",
            reference_seconds=round(statistics.median(appends), 3),
        )


if __name__ == "__main__":
    main()
