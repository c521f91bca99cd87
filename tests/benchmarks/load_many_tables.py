"""Many tables in one load, small ones and a large one, against as many rows in a single table, loaded in one session.

HEADWATER_BENCH_TABLES small tables (200) of 100 rows, a large one of HEADWATER_BENCH_ROWS rows (2,000,000), all of ten
columns; HEADWATER_BENCH_CONNECTIONS reading connections (2).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from mixed_load import pipeline, report, server

from headwater.jobs.load import load
from headwater.names import TableName
from headwater.session import build_session

TABLES = int(os.environ.get("HEADWATER_BENCH_TABLES", "200"))
ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "2000000"))
CONNECTIONS = int(os.environ.get("HEADWATER_BENCH_CONNECTIONS", "2"))
SMALL = 100


def main() -> None:
    sizes = {f"small_{number}": SMALL for number in range(TABLES)} | {"large": ROWS}
    whole = {"warm": SMALL, "single": ROWS + TABLES * SMALL}
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        with source.connect("postgres") as connection:
            for table, rows in (sizes | whole).items():
                connection.execute(
                    f"create table {table} as select g as id, (g % 1000)::int as a, 'note ' || g as note, "
                    "(g * 1.25)::numeric(12,2) as amount, now() - g * interval '1 second' as at, date '2020-01-01' + "
                    "(g % 1000)::int as day, g % 2 = 0 as flag, g * 0.5::float8 as ratio, md5(g::text)::uuid as tag, "
                    f"'category ' || g % 50 as category from generate_series(1, {rows}::bigint) g"
                )
                connection.execute(f"alter table {table} add primary key (id)")
        names = [f"public.{table}" for table in sizes | whole]
        wanted = pipeline(Path(scratch), source, *names, load={"connections": CONNECTIONS})
        build_session()
        load(wanted, [TableName("public", "warm")])
        seconds = {}
        for what, tables in (("single", ["single"]), ("small", list(sizes)[:-1]), ("large", ["large"])):
            started = time.perf_counter()
            load(wanted, [TableName("public", table) for table in tables])
            seconds[what] = time.perf_counter() - started
        started = time.perf_counter()
        load(wanted, [TableName("public", table) for table in sizes], again=True)
        together = time.perf_counter() - started
        report(
            "load of many tables",
            tables=len(sizes),
            rows=sum(sizes.values()),
            connections=CONNECTIONS,
            seconds=round(together, 2),
            small_alone_seconds=round(seconds["small"], 2),
            large_alone_seconds=round(seconds["large"], 2),
            reference="as many rows in one table",
            reference_seconds=round(seconds["single"], 2),
            times_reference=round(together / seconds["single"], 2),
        )


if __name__ == "__main__":
    main()
