"""Verify of tables that are small enough for the process itself, beside the same tables compared by Spark, as large
ones are.

HEADWATER_BENCH_TABLES tables (200) of 1,000 rows, and HEADWATER_BENCH_MIDDLE (10) of 100,000 rows. All agree with the
source. Spark compares ten of the former, and is warm when it is measured: its start is in neither.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

from figures import figure
from mixed_load import pipeline, server

from headwater.delta import small_versions
from headwater.demo.postgres import EmbeddedServer
from headwater.load.load import load
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.replicate import replicate
from headwater.verify.verify import verify

TABLES = int(os.environ.get("HEADWATER_BENCH_TABLES", "200"))
MIDDLE = int(os.environ.get("HEADWATER_BENCH_MIDDLE", "10"))
SMALL = {f"public.small_{number}": 1_000 for number in range(TABLES)}
LARGER = {f"public.middle_{number}": 100_000 for number in range(MIDDLE)}


def make_tables(source: EmbeddedServer) -> None:
    with source.connect("postgres") as connection:
        for name, rows in {**SMALL, **LARGER}.items():
            connection.execute(
                f"create table {name} as select g as id, (g % 1000)::int as a, 'note ' || g as note, "
                "(g * 1.25)::numeric(12,2) as amount, now() - g * interval '1 second' as at, g % 2 = 0 as flag, "
                f"md5(g::text)::uuid as tag from generate_series(1, {rows}::bigint) g"
            )
            connection.execute(f"alter table {name} add primary key (id)")
            connection.execute(f"vacuum analyze {name}")


def seconds(wanted: Pipeline, rows: dict[str, int], small_bytes: int) -> float:
    before, small_versions.SMALL_BYTES = small_versions.SMALL_BYTES, small_bytes  # type: ignore[misc]
    started = time.perf_counter()
    try:
        found = verify(wanted, [TableName.parse(name) for name in rows])["tables"]
    finally:
        small_versions.SMALL_BYTES = before  # type: ignore[misc]
    took = time.perf_counter() - started
    wrong = {name: one for name, one in found.items() if one["rows"] != rows[name] or one["keys"] or one["unsettled"]}
    if wrong:
        raise SystemExit(f"verify is wrong: {wrong}")
    return took


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        make_tables(source)
        wanted = pipeline(Path(scratch), source, *SMALL, *LARGER)
        load(wanted)
        replicate(wanted, "now", None, threading.Event())
        bytes_ = small_versions.SMALL_BYTES
        here = {1_000: seconds(wanted, SMALL, bytes_), 100_000: seconds(wanted, LARGER, bytes_)}
        few = dict(list(SMALL.items())[:10])
        seconds(wanted, few, 0)
        by_spark = {1_000: seconds(wanted, few, 0) / len(few), 100_000: seconds(wanted, LARGER, 0) / len(LARGER)}
    for rows, tables in ((1_000, SMALL), (100_000, LARGER)):
        what = f"verify of {len(tables)} tables of {rows:,} rows, each"
        figure(what, here[rows] / len(tables), "s", "the same by Spark", by_spark[rows])


if __name__ == "__main__":
    main()
