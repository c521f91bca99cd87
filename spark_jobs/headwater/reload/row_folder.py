"""The folder of rows that a reload or a rebuild has read: Parquet files, sorted by name in the order of the rows.

Few rows are written by the job's own process. On disk Spark writes them by itself. In an object store it would write
each under another name first and copy it twice; there every task puts its file through the lake's door.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os.path import join
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from headwater.apply.replacement import rows_in
from headwater.delta import storage
from headwater.delta.clustering import ordered
from headwater.delta.data_files import gathered
from headwater.delta.spark_rows import rows_of_files
from headwater.lake_root import is_remote
from headwater.load.executors import LakeAccess
from headwater.load.ordering import in_order


def put_rows(frame: DataFrame, folder: str, lake: LakeAccess) -> None:
    """Let `folder`, which lies in `lake`, hold the rows of `frame`, and no others."""
    if not is_remote(storage.path_of(folder)):
        frame.write.mode("overwrite").option("compression", "snappy").parquet(folder)
        return
    storage.delete_folder(folder)  # an attempt before this one may have written to it
    _put_files(frame, folder, lake)


def put_rows_in_order(frame: DataFrame, folder: str, lake: LakeAccess, cluster_by: tuple[str, ...]) -> None:
    """The same for rows that can be read once only, along the curve through these columns."""
    aside = join(folder, "as-read")
    storage.delete_folder(folder)
    put_rows(frame, aside, lake)
    files = _files(aside)
    if files:  # in a store there is none where there was no row
        found = rows_in(files)
        rows = rows_of_files(frame.sparkSession, frame.schema, files)
        ordered = in_order(rows, cluster_by, sum(count for count, _ in found), sum(size for _, size in found))
        if is_remote(storage.path_of(folder)):
            _put_files(ordered, folder, lake)
        else:
            ordered.write.mode("append").option("compression", "snappy").parquet(folder)
    storage.delete_folder(aside)


def put_few_rows(rows: Iterable[pa.Table], folder: str, cluster_by: tuple[str, ...]) -> None:
    """The same for rows that come to this process; along the curve through `cluster_by`, if it names columns, for which
    all are held in memory."""
    storage.delete_folder(folder)
    storage.make_folder(folder, mode=0o700)
    _put_file(ordered(rows, cluster_by) if cluster_by else rows, folder, 0)


def _files(folder: str) -> list[str]:
    return [join(folder, name) for name in storage.names(folder) if name.endswith(".parquet")]


def _put_files(frame: DataFrame, folder: str, lake: LakeAccess) -> None:
    put = {row["name"] for row in frame.mapInArrow(_Put(folder, lake), "name string").collect()}
    for file in _files(folder):
        if file not in put:
            storage.delete(file)  # of a task that did not end, and was done again


@dataclass(frozen=True)
class _Put:
    """For `mapInArrow`: rows in, the name of the file that holds them out."""

    folder: str
    lake: LakeAccess

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.lake.enter()
        context = TaskContext.get()
        assert context is not None
        rows = (pa.Table.from_batches([batch]) for batch in batches)
        if place := _put_file(rows, self.folder, context.partitionId()):
            yield pa.RecordBatch.from_pydict({"name": [place]})


def _put_file(rows: Iterable[pa.Table], folder: str, number: int) -> str | None:
    """Its place; None: there was no row, and is no file."""
    parts = gathered(some for some in rows if some.num_rows)
    first = next(parts, None)
    if first is None:
        return None
    place = join(folder, f"part-{number:05d}-{uuid.uuid4()}.snappy.parquet")
    writer: Any = storage.parquet_writer(place, first.schema, compression="snappy")
    try:
        writer.write_table(first)
        for part in parts:
            writer.write_table(part)
        writer.close()
    except BaseException:
        writer.close()
        storage.delete(place)
        raise
    return place
