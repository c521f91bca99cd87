"""Many tables in one load, small ones and a large one, against as many rows in a single table, loaded in one session;
and what the syncs of the small ones cost, against a load of them without any.

HEADWATER_BENCH_TABLES small tables (200) of 100 rows, a large one of HEADWATER_BENCH_ROWS rows (2,000,000), all of ten
columns; HEADWATER_BENCH_CONNECTIONS reading connections (2).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import figure
from mixed_load import pipeline, server

from headwater.delta import storage
from headwater.load.load import load
from headwater.names import TableName
from headwater.spark.session import build_session

TABLES = int(os.environ.get("HEADWATER_BENCH_TABLES", "200"))
ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "2000000"))
CONNECTIONS = int(os.environ.get("HEADWATER_BENCH_CONNECTIONS", "2"))
SMALL = 100


class Syncs:
    """Stands at the door: how many there are of the whole lake and of single files, and the seconds that threads spend
    in them. `off`: there are none."""

    def __init__(self) -> None:
        self.off, self.done = False, [0, 0.0, 0, 0.0]
        storage.sync, storage.sync_files = self._timed(storage.sync, 0), self._timed(storage.sync_files, 2)

    def _timed(self, real: Callable[..., None], place: int) -> Callable[..., None]:
        def sync(*places: str) -> None:
            started = time.perf_counter()
            if not self.off:
                real(*places)
            self.done[place] += 1
            self.done[place + 1] += time.perf_counter() - started

        return sync


def main() -> None:
    syncs = Syncs()
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
        both = []
        for syncs.off in (False, True, False, True):
            before, started = list(syncs.done), time.perf_counter()
            load(wanted, [TableName("public", table) for table in list(sizes)[:-1]], again=True)
            spent = [round(now - then, 2) for now, then in zip(syncs.done, before, strict=True)]
            both.append((round(time.perf_counter() - started, 2), spent))
        syncs.off = False
        started = time.perf_counter()
        load(wanted, [TableName("public", table) for table in sizes], again=True)
        together = time.perf_counter() - started
        what, single = (
            f"load of {TABLES} tables of {SMALL:,} rows and one of {ROWS:,}, {CONNECTIONS} connections",
            "as many rows in one table",
        )
        figure(what, together, "s", single, seconds["single"])
        figure(f"{what}: the small ones alone", seconds["small"], "s", single, seconds["single"])
        figure(f"{what}: the large one alone", seconds["large"], "s", single, seconds["single"])
        synced, unsynced = (statistics.median(taken for taken, _ in runs) for runs in (both[::2], both[1::2]))
        figure(f"{what}: the small ones loaded again", synced, "s", "without any sync", unsynced)
        last = both[2][1]
        figure(f"{what}: syncs of lake and files when loaded again", last[0] + last[2], "syncs")
        figure(f"{what}: seconds of threads in these syncs", last[1] + last[3], "s")


if __name__ == "__main__":
    main()
