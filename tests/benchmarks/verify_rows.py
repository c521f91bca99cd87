"""Verify of a table that agrees, and of the same with one row that does not, beside one scan of each side.

HEADWATER_BENCH_ROWS rows (3,000,000) of ten columns, read by HEADWATER_BENCH_CONNECTIONS sessions (2). The scans: COPY
of the table to nowhere by as many sessions, and the Delta table read by Spark, every column, to nowhere.
`read_seconds`: the source's rows read and decoded to nowhere, as a load reads them. Everything HEADWATER_BENCH_ROUNDS
times (2), in turns, and the fastest counts.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from figures import figure
from mixed_load import pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry
from headwater.load.load import load
from headwater.load.source_rows import rows_at, schema_now
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.replicate import replicate
from headwater.source.catalog.catalog import signature
from headwater.source.snapshots import capture_point
from headwater.spark.session import build_session
from headwater.verify.verify import verify

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "3000000"))
CONNECTIONS = int(os.environ.get("HEADWATER_BENCH_CONNECTIONS", "2"))
ROUNDS = int(os.environ.get("HEADWATER_BENCH_ROUNDS", "2"))
TABLE = "public.orders"


def make_table(source: EmbeddedServer) -> None:
    with source.connect("postgres") as connection:
        connection.execute(
            "create table orders as select g as id, (g % 1000)::int as a, 'note ' || g as note, "
            "(g * 1.25)::numeric(12,2) as amount, now() - g * interval '1 second' as at, date '2020-01-01' + "
            "(g % 1000)::int as day, g % 2 = 0 as flag, g * 0.5::float8 as ratio, md5(g::text)::uuid as tag, "
            f"'category ' || g % 50 as category from generate_series(1, {ROWS}::bigint) g"
        )
        connection.execute("alter table orders add primary key (id)")
        connection.execute("vacuum analyze orders")


def copy_to_nowhere(source: EmbeddedServer) -> None:
    """By as many sessions as verify has, each its share of the pages."""
    with source.connect("postgres") as connection:
        row = connection.execute("select pg_relation_size('orders') / 8192").fetchone()
    assert row is not None
    step = -(-row[0] // CONNECTIONS)

    def share(number: int) -> None:
        pages = f"ctid >= '({number * step},0)' and ctid < '({(number + 1) * step},0)'"
        with (
            source.connect("postgres") as connection,
            connection.cursor().copy(f"copy (select * from orders where {pages}) to stdout (format binary)") as copy,
        ):
            for _ in copy:
                pass

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(share, range(CONNECTIONS)))


def read_and_decode(source: EmbeddedServer, wanted: Pipeline) -> None:
    registry = Registry.open(wanted.lake_path(), wanted.name)
    assert registry is not None
    with source.connect("postgres") as connection, capture_point(wanted.conninfo()) as capture:
        schema = schema_now(connection, wanted, registry.tables[TABLE])
        signatures = signature(connection, [leaf.relation_id for leaf in schema.leaves])
        rows = rows_at(build_session(), wanted, connection, schema, capture.snapshot_id, signatures)
        rows.write.format("noop").mode("overwrite").save()


def verified(wanted: Pipeline, different: int) -> None:
    found = verify(wanted)["tables"][TABLE]
    if (found["rows"], found["different"]) != (ROWS, different) or found["missing"] or found["extra"]:
        raise SystemExit(f"verify is wrong: {found}")


def main() -> None:
    seconds: dict[str, float] = {}

    def measured(what: str, work: Callable[..., Any], *arguments: Any) -> None:
        started = time.perf_counter()
        work(*arguments)
        took = time.perf_counter() - started
        seconds[what] = min(took, seconds.get(what, took))

    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        make_table(source)
        wanted = pipeline(Path(scratch), source, TABLE, load={"connections": CONNECTIONS})
        spark = build_session()
        load(wanted)
        replicate(wanted, "now", None, threading.Event())
        lake = f"delta.`{table_path(wanted.lake_path(), 'public/orders')}`"
        verified(wanted, 0)  # of what comes first a part is the engine's start
        for _ in range(ROUNDS):
            measured("copy", copy_to_nowhere, source)
            measured("read", read_and_decode, source, wanted)
            measured("scan", spark.table(lake).write.format("noop").mode("overwrite").save)
            measured("equal", verified, wanted, 0)
        spark.sql(f"update {lake} set a = -1 where id = {ROWS // 2}")
        for _ in range(ROUNDS):
            measured("differs", verified, wanted, 1)
    scans = seconds["copy"] + seconds["scan"]
    what, once = f"verify of {ROWS:,} rows x 10 columns", "COPY to nowhere, and a scan of the Delta table"
    figure(f"{what} that agree", seconds["equal"], "s", once, scans)
    figure(f"{what}, one of which differs", seconds["differs"], "s", once, scans)
    read = "the source's rows read and decoded, and that scan"
    figure(f"{what} that agree, beside decoding", seconds["equal"], "s", read, seconds["read"] + seconds["scan"])


if __name__ == "__main__":
    main()
