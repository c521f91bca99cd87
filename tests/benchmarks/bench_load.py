"""Bulk load against re-encoding the same rows Delta to Delta, in one session. Rows by HEADWATER_BENCH_ROWS.

A table of 400,000 rows goes first, loaded and re-encoded: both ways are timed warm. HEADWATER_BENCH_PARTITION_BY:
`day`, whose twenty values follow each other as the rows do, or `category`, whose fifty lie all over; the reference is
partitioned alike.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from figures import figure
from mixed_load import pipeline, server
from pyspark.sql import SparkSession

from headwater.load.load import load
from headwater.names import TableName
from headwater.spark.session import build_session

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "2000000"))
PARTITION_BY = os.environ.get("HEADWATER_BENCH_PARTITION_BY", "").split()


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        folder = Path(scratch)
        with source.connect("postgres") as connection:
            for table, rows in (("wide", ROWS), ("warm", 400_000)):
                day = f"g * 20 / ({rows} + 1)" if "day" in PARTITION_BY else "g % 1000"
                connection.execute(
                    f"create table {table} as select g as id, (g % 1000)::int as a, 'note ' || g as note, "
                    "(g * 1.25)::numeric(12,2) as amount, now() - g * interval '1 second' as at, date '2020-01-01' + "
                    f"({day})::int as day, g % 2 = 0 as flag, g * 0.5::float8 as ratio, md5(g::text)::uuid as tag, "
                    f"'category ' || g % 50 as category from generate_series(1, {rows}::bigint) g"
                )
                connection.execute(f"alter table {table} add primary key (id)")
        options = {"partition_by": PARTITION_BY} if PARTITION_BY else {}
        wanted = pipeline(folder, source, *({"name": f"public.{table}", **options} for table in ("wide", "warm")))
        spark = build_session()
        load(wanted, [TableName("public", "warm")])
        _reencode(spark, folder, "warm")
        started = time.perf_counter()
        result = load(wanted)["tables"]["public.wide"]
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        _reencode(spark, folder, "wide")
        again = time.perf_counter() - started
        by = f", partitioned by {' and '.join(PARTITION_BY)}" if PARTITION_BY else ""
        what = f"bulk load of {ROWS:,} rows x 10 columns{by}"
        again_by = "re-encoding the same rows Delta to Delta"
        files = len(list((folder / "lake" / "public" / "wide").rglob("*.parquet")))
        figure(what, seconds, "s", again_by, again)
        figure(f"{what}: speed", ROWS / seconds, "rows/s", again_by, ROWS / again)
        figure(f"{what}: copy and commit alone", result["seconds"], "s")
        figure(f"{what}: files", files, "files")


def _reencode(spark: SparkSession, folder: Path, table: str) -> None:
    frame = spark.read.format("delta").load(str(folder / "lake" / "public" / table))
    frame.write.format("delta").partitionBy(*PARTITION_BY).save(str(folder / "again" / table))


if __name__ == "__main__":
    main()
