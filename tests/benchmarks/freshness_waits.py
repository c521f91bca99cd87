"""What a wait for "now" gives under full write load, and that it is never early.

First HEADWATER_BENCH_READERS (30) readers wait and read, again and again for HEADWATER_BENCH_SECONDS (60), beside
HEADWATER_BENCH_RATE (10,000) single-row commits a second: how long a wait takes. Then, beside a tenth of that rate,
HEADWATER_BENCH_WAITS (10,000) markers: each is committed, waited for, alternately by "now" and by its own commit's
position, and looked for in the cut; one that is not there would be a stale read. Reference of the same run: one reader
while nobody writes.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import psycopg
from bench_latency import write
from figures import figure
from mixed_load import make_mixed_tables, pipeline, server

from headwater import commit_position, scan, wait
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.cuts import Cut
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.position import format_lsn
from headwater.replicate.replicate import replicate

READERS = int(os.environ.get("HEADWATER_BENCH_READERS", "30"))
RATE = int(os.environ.get("HEADWATER_BENCH_RATE", "10000"))
SECONDS = float(os.environ.get("HEADWATER_BENCH_SECONDS", "60"))
WAITS = int(os.environ.get("HEADWATER_BENCH_WAITS", "10000"))
MARKERS = "public.markers"


@contextmanager
def writing(source: EmbeddedServer, rate: int) -> Iterator[None]:
    """Somebody writes so many changes a second."""
    stop = threading.Event()
    writer = threading.Thread(target=write, args=(source.conninfo("postgres"), [], stop, rate))
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def waits(file: str, tables: list[str], readers: int, seconds: float) -> list[float]:
    """Seconds of each wait; each is followed by a reading of one table at its cut."""
    wanted, end = load_pipeline(file), time.perf_counter() + seconds

    def read_on(number: int) -> list[float]:
        found = []
        while time.perf_counter() < end:
            began = time.perf_counter()
            cut = wait(wanted, require="now", timeout=300)
            found.append(time.perf_counter() - began)
            # Not the table with the large texts, whose reading would be what takes the time.
            scan(cut, tables[1 + number % (len(tables) - 1)]).read_all()
        return found

    with ThreadPoolExecutor(readers) as pool:
        return [seconds for each in pool.map(read_on, range(readers)) for seconds in each]


def markers(file: str, count: int) -> tuple[int, list[float]]:
    """Stale reads, and seconds of each wait."""
    wanted, read, reading = load_pipeline(file), dict[int, frozenset[int]](), threading.Lock()

    def in_cut(cut: Cut) -> frozenset[int]:
        """The markers in the version of `cut`, which many waits share: read once, or reading them would be the loop."""
        version = cut["tables"][MARKERS]["version"]
        with reading:
            if version not in read:
                read[version] = frozenset(scan(cut, MARKERS).read_all()["id"].to_pylist())
            return read[version]

    def one(number: int) -> tuple[bool, float]:
        with psycopg.connect(wanted.conninfo(), autocommit=True) as connection:
            connection.execute("insert into markers values (%s)", (number,))
            position = commit_position(connection)
        began = time.perf_counter()
        require = "now" if number % 2 else format_lsn(position.lsn)
        cut = wait(wanted, require=require, timeout=300, tables=[MARKERS])
        seconds = time.perf_counter() - began
        return number not in in_cut(cut), seconds

    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(one, range(count)))
    return sum(stale for stale, _ in found), [seconds for _, seconds in found]


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        tables = make_mixed_tables(source)
        with source.connect("postgres") as connection:
            connection.execute("create table markers (id bigint primary key)")
        wanted = pipeline(Path(scratch), source, *tables, MARKERS)
        load(wanted)
        stop = threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        try:
            while read_position_file(wanted.lake_path()) is None:
                stop.wait(0.05)
            # In a process of its own: who waits and reads must not take the driver's interpreter from it.
            with multiprocessing.get_context("spawn").Pool(1) as waiting:
                measure(source, wanted.file, tables, waiting)
        finally:
            stop.set()
            driver.join()


def measure(source: EmbeddedServer, file: str, tables: list[str], waiting: Pool) -> None:
    alone = waiting.apply(waits, (file, tables, 1, min(SECONDS, 10)))
    with writing(source, RATE):
        found = waiting.apply(waits, (file, tables, READERS, SECONDS))
    what, alone_reads = (
        f"{READERS} readers wait for now and read, beside {RATE:,} commits/s",
        "one reader, nobody writes: mean",
    )
    figure(f"{what}: mean", float(np.mean(found)), "s", alone_reads, float(np.mean(alone)))
    figure(f"{what}: p99", float(np.quantile(found, 0.99)), "s", alone_reads, float(np.mean(alone)))
    figure(f"{what}: waits that ended", len(found), "waits")
    with writing(source, RATE // 10):
        stale, found = waiting.apply(markers, (file, WAITS))
    what = f"{WAITS:,} markers committed and waited for, beside {RATE // 10:,} commits/s"
    figure(f"{what}: missing in the cut", stale, "markers")
    figure(f"{what}: mean", float(np.mean(found)), "s", alone_reads, float(np.mean(alone)))
    figure(f"{what}: p99", float(np.quantile(found, 0.99)), "s", alone_reads, float(np.mean(alone)))


if __name__ == "__main__":
    main()
