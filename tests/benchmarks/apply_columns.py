"""What a change of columns costs a table of HEADWATER_BENCH_ROWS rows (5 M): added without a default (an entry in the
log), added with one and renamed (every file written anew), beside the same rows read and written once by pyarrow.

Ten columns of the common types, files of 1 M rows, a deletion vector of nobody. Removed afterwards.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from direct_tables import make_table
from figures import figure

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.columns import ColumnChange, evolve
from headwater.apply.direct import Fence
from headwater.arrow_types import lake_schema
from headwater.errors import Refused
from headwater.schema import Column, TableSchema, ValueType

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "5000000"))
FILE = 1_000_000
KINDS = ("bigint", "int", "int", "double", "string", "string", "date", "timestamp", "boolean", "bigint")
COLUMNS = tuple(Column(f"c{i}", i + 1, 0, -1, ValueType("", kind)) for i, kind in enumerate(KINDS))
SCHEMA = TableSchema(1, "public", "t", COLUMNS, ("c0",))


def rows(first: int, count: int) -> pa.Table:
    numbers = pa.array(np.arange(first, first + count))
    texts = numbers.cast(pa.string())
    days = pa.array(np.arange(count, dtype=np.int32) % 20_000)
    arrays = {"string": texts, "boolean": pa.array(np.arange(count) % 2 == 0), "date": days}
    kind = lake_schema(SCHEMA)
    plain = [arrays.get(name, numbers).cast(field.type) for name, field in zip(KINDS, kind, strict=True)]
    return pa.Table.from_arrays(plain, schema=kind)


def _no_spark() -> Any:
    raise Refused("one thread is what is measured")


def seconds(folder: Path, version: int, to: ColumnChange) -> float:
    began = time.monotonic()
    evolve(str(folder), version, "public.t", "app", to, Fence("fence", 1), FileTasks(_no_spark, str(folder)))
    return round(time.monotonic() - began, 3)


def written_once(folder: Path, target: Path) -> float:
    """The same files, read and written again by pyarrow."""
    target.mkdir()
    began = time.monotonic()
    for file in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(file) as read, pq.ParquetWriter(target / file.name, read.schema_arrow) as write:
            for batch in read.iter_batches(128 * 1024):
                write.write_batch(batch)
    return round(time.monotonic() - began, 3)


def main() -> None:
    base = Path(tempfile.mkdtemp(prefix="headwater-bench-"))
    try:
        folder = base / "t"
        make_table(folder, SCHEMA, (rows(first, min(FILE, ROWS - first)) for first in range(0, ROWS, FILE)))
        reference = written_once(folder, base / "once")
        number = ValueType("int4", "int")
        plain, filled = Column("plain", 11, 23, -1, number), Column("filled", 12, 23, -1, number)
        added = seconds(folder, 0, ColumnChange(SCHEMA, (plain,), number=2))
        default = seconds(
            folder, 1, ColumnChange(SCHEMA, (filled,), fill={"filled": pa.array([7], pa.int32())}, number=3)
        )
        renamed = seconds(folder, 2, ColumnChange(SCHEMA, (), renamed={"c5": "other"}, number=4))
        what, once = f"a table of {ROWS:,} rows x 10 columns", "the same files read and written once by pyarrow"
        figure(f"{what}: a column added without a default", added, "s", once, reference)
        figure(f"{what}: a column added with a default", default, "s", once, reference)
        figure(f"{what}: a column renamed", renamed, "s", once, reference)
        figure(f"{what}: peak memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MB")
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
