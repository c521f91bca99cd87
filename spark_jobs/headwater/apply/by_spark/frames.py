"""A net effect as a DataFrame: from memory, or, where it lies on disk, from Parquet files, a part at a time.

They lie beside it for a Spark on this machine, else in the lake, which executors of a cluster share with the driver
(below `_headwater/staged`: what a killed driver leaves there is swept by the next one). No table names them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os.path import join
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headwater.delta import storage
from headwater.delta.storage import hadoop_place
from headwater.net_changes import NetChanges


@contextmanager
def frame(
    spark: SparkSession, changes: NetChanges, kind: Any, table: Callable[[NetChanges], pa.Table], shared: str
) -> Iterator[DataFrame]:
    """What `table` makes of `changes`, part by part, as a DataFrame of the type `kind`, which lives as long as the
    block. `shared`: a folder of the lake for what executors elsewhere are to read."""
    if changes.on_disk is None:
        yield spark.createDataFrame(table(changes), schema=kind)
    elif (spark.sparkContext.master or "").startswith("local"):
        paths: list[str] = []
        try:
            paths.extend(changes.on_disk.write_parquet(table(part)) for part in changes.in_parts())
            yield _read(spark, kind, paths)
        finally:
            for path in paths:
                os.unlink(path)
    else:
        folder = join(shared, f"rows-{uuid.uuid4()}")
        storage.make_folder(folder)
        try:
            for number, part in enumerate(changes.in_parts()):
                rows = table(part)
                with storage.parquet_writer(join(folder, f"{number}.parquet"), rows.schema) as writer:
                    writer.write_table(rows)
            yield _read(spark, kind, [folder])
        finally:
            storage.delete_folder(folder)


def _read(spark: SparkSession, kind: Any, places: list[str]) -> DataFrame:
    # Dates of the years before 1582 are as they are: nobody wrote them by the old calendar.
    return spark.read.schema(kind).option("datetimeRebaseMode", "CORRECTED").parquet(*map(hadoop_place, places))
