"""One transaction that touches many tables: commit at the source -> published in one epoch.

HEADWATER_BENCH_TABLES says how many (500). Reference of the same run: the same number of rows into one table.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from figures import figure
from mixed_load import pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.lake.ledger import read_epoch
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.position import parse_lsn
from headwater.replicate.replicate import replicate

TABLES = int(os.environ.get("HEADWATER_BENCH_TABLES", "500"))
ROWS = 10
ROUNDS = 3


def make_tables(source: EmbeddedServer) -> list[str]:
    with source.connect("postgres") as connection:
        for number in range(TABLES):
            connection.execute(f"create table m{number} (id int primary key, a int, note text)")
            connection.execute(f"insert into m{number} select g, g, 'note' from generate_series(1, 100) g")
    return [f"public.m{number}" for number in range(TABLES)]


def seconds_until_published(root: str, source: EmbeddedServer, statements: list[str]) -> float:
    with source.connect("postgres") as connection:
        with connection.transaction():
            for statement in statements:
                connection.execute(statement)
        started = time.perf_counter()
        row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    end, pause = parse_lsn(row[0]), threading.Event()
    # The insert position may stand past the commit: read up to there, with nothing pending, is published.
    while (file := read_position_file(root)) is None or file.read_position < end or file.pending:
        pause.wait(0.01)
    return time.perf_counter() - started


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        names = make_tables(source)
        wanted = pipeline(Path(scratch), source, *names)
        load(wanted)
        root, stop = wanted.lake_path(), threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        while read_epoch(root) is None:
            stop.wait(0.05)
        times, single = [], []
        for turn in range(ROUNDS):
            update = f"set a = a + 1, note = 'turn {turn}' where id <= {ROWS}"
            times.append(seconds_until_published(root, source, [f"update {name} {update}" for name in names]))
            first = (turn + 1) * 1_000_000
            series = f"generate_series({first}, {first + TABLES * ROWS - 1})"
            inserts = f"insert into m0 select g, g, 'new' from {series} g"
            single.append(seconds_until_published(root, source, [inserts]))
        stop.set()
        driver.join()
        what = f"one transaction of {TABLES * ROWS:,} rows over {TABLES} tables, commit to readable"
        reference, alone = "as many rows into one table", statistics.median(single)
        # The index of each table's keys is built by the first.
        figure(f"{what}: the first", times[0], "s", reference, single[0])
        figure(f"{what}: median of the following", statistics.median(times[1:]), "s", reference, alone)


if __name__ == "__main__":
    main()
