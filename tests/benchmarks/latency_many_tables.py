"""Commit at the source -> position published, at HEADWATER_BENCH_RATE (10,000) changes/s over HEADWATER_BENCH_TABLES
(500) tables for HEADWATER_BENCH_SECONDS (600), in transactions of ten rows of one table: whether the lag grows.

Reference of the same run: a tenth of that rate before it, for a tenth of the time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from pathlib import Path

import numpy as np
from bench_latency import STEP, at_rate
from figures import figure
from mixed_load import pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.replicate.replicate import replicate

TABLES = int(os.environ.get("HEADWATER_BENCH_TABLES", "500"))
SECONDS = float(os.environ.get("HEADWATER_BENCH_SECONDS", "600"))
RATE = int(os.environ.get("HEADWATER_BENCH_RATE", "10000"))
ROWS = 2000
PER_TRANSACTION = 10


def make_tables(source: EmbeddedServer) -> list[str]:
    """And `mixed(changes)`: transactions of ten rows of one table. Of ten on a table eight update, one inserts, and one
    deletes what was inserted."""
    with source.connect("postgres") as connection:
        for number in range(TABLES):
            connection.execute(f"create table m{number} (id bigint primary key, a int, note text, at timestamptz)")
            connection.execute(f"insert into m{number} select g, g, 'note', now() from generate_series(1, {ROWS}) g")
        connection.execute("create sequence mixed_number minvalue 0 start 0 cache 1000")
        connection.execute(
            f"""
            create procedure mixed(changes int) language plpgsql as $$
            declare i bigint; n bigint; t text;
            begin
              for k in 1 .. changes / {PER_TRANSACTION} loop
                i := nextval('mixed_number');
                t := 'm' || (i % {TABLES});
                n := i / {TABLES};
                if n % 10 = 0 then
                  execute format('insert into %I select g, 0, ''new'', now() from generate_series($1, $2) g', t)
                    using {ROWS} + 1, {ROWS} + {PER_TRANSACTION};
                elsif n % 10 = 9 then
                  execute format('delete from %I where id > $1', t) using {ROWS};
                else
                  execute format('update %I set a = a + 1, note = $2, at = now() where id between $1 and $1 + $3', t)
                    using 1 + (n * 7919) % ({ROWS} - {PER_TRANSACTION}), 'changed ' || i, {PER_TRANSACTION - 1};
                end if;
                commit;
              end loop;
            end $$
            """
        )
    return [f"public.m{number}" for number in range(TABLES)]


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        wanted = pipeline(Path(scratch), source, *make_tables(source))
        load(wanted)
        root, stop = wanted.lake_path(), threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        while read_position_file(root) is None:
            stop.wait(0.05)
        _, quiet = at_rate(source, root, RATE // 10, SECONDS / 10)
        written, found = at_rate(source, root, RATE, SECONDS)
        stop.set()
        driver.join()
        settled = found[len(found) // 4 :]  # every table's first batch builds its index
        moments, delays = (np.array(column) for column in zip(*settled, strict=True))
        what = f"commit to readable, {RATE:,} changes/s over {TABLES} tables, {SECONDS:.0f} s"
        tenth, slow = statistics.median(delay for _, delay in quiet[len(quiet) // 2 :]), "a tenth of the rate: p50"
        figure(f"{what}: p50", float(np.median(delays)), "s", slow, tenth)
        figure(f"{what}: p99", float(np.quantile(delays, 0.99)), "s", slow, tenth)
        figure(f"{what}: slope of the lag", float(np.polyfit(moments, delays, 1)[0]) * 3600, "s/hour")
        for number, part in enumerate(np.array_split(delays, 5), 1):
            figure(f"{what}: p50 of fifth {number}", float(np.median(part)), "s")
        figure(f"{what}: published", len(found) * int(RATE * STEP) / SECONDS, "changes/s", "written", written / SECONDS)


if __name__ == "__main__":
    main()
