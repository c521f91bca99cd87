"""A net effect as a DataFrame: from memory, or, where it lies on disk, from Parquet files beside it.

Only a Spark on this machine can read such files; any other one is sent the rows, as if they were in memory. They lie
where changes are spilled, and are no part of the lake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headwater.changes import NetChanges


@contextmanager
def frame(
    spark: SparkSession, changes: NetChanges, kind: Any, table: Callable[[NetChanges], pa.Table]
) -> Iterator[DataFrame]:
    """What `table` makes of `changes`, part by part, as a DataFrame of the type `kind`, which lives as long as the
    block."""
    if changes.on_disk is None or not (spark.sparkContext.master or "").startswith("local"):
        yield spark.createDataFrame(table(changes), schema=kind)
        return
    paths: list[str] = []
    try:
        paths.extend(changes.on_disk.write_parquet(table(part)) for part in changes.in_parts())
        # Dates of the years before 1582 are as they are: nobody wrote them by the old calendar.
        yield spark.read.schema(kind).option("datetimeRebaseMode", "CORRECTED").parquet(*paths)
    finally:
        for path in paths:
            os.unlink(path)
