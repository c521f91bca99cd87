"""Where the rows lie that a reload or a rebuild has read. Many of them are written by Spark's tasks as files of the
table, which one commit is to name; so they are written once, by all executors.

Few rows lie in a folder beside the table, as Parquet files sorted by name in the order of the rows, and so do those for
a table that only Spark writes. These Spark writes by itself on disk. In an object store it would write each under
another name first and copy it twice; there every task puts its file through the lake's door.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import join
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.waiting_files import discard_waiting, make_notes, put_list
from headwater.arrow_types import lake_schema
from headwater.delta import storage
from headwater.delta.clustering import ordered
from headwater.delta.data_files import gathered
from headwater.delta.delta_log import DataFile
from headwater.delta.new_files import discard
from headwater.delta.small_versions import TableUnreadable
from headwater.delta.storage import hadoop_place
from headwater.lake.executors import LakeAccess
from headwater.lake_root import is_remote
from headwater.load.ordering import TableFiles
from headwater.spark.stores import is_readable

Item = TypeVar("Item")


def put_rows(frame: DataFrame, folder: str, lake: LakeAccess) -> None:
    """Let `folder`, which lies in `lake`, hold the rows of `frame`, and no others."""
    if not is_remote(storage.path_of(folder)):
        frame.write.mode("overwrite").option("compression", "snappy").parquet(hadoop_place(folder))
        return
    storage.delete_folder(folder)  # an attempt before this one may have written to it
    _put_files(frame, folder, lake)


@dataclass(frozen=True)
class ReloadFiles:
    """The files of a table that hold what the reload `name` has read (`headwater.apply.waiting_files`). `into`: where
    tasks put rows; the folder of their notes is made here."""

    root: str
    name: str
    into: TableFiles

    def put(self, frame: DataFrame) -> None:
        """Let them be the rows of `frame`, that can be read once only, and no others."""
        into = self._begun()
        if not into.have_order or not is_readable(frame.sparkSession, into.folder):
            self._list(into.as_they_come(frame))
            return
        as_read = into.as_read(frame)
        laid_out = into.lay_out(frame.sparkSession, as_read)
        self._list(laid_out)
        if laid_out != as_read:
            discard(into.folder, as_read)

    def put_again(self, frame: DataFrame, rows: int, size: int, *, is_exact: bool) -> None:
        """As `put`, for rows of a table that can be read several times, about so many and of so many bytes. `is_exact`:
        TableUnreadable where as many `rows` are not found."""
        into = self._begun()
        files = into.laid_out(frame, rows, size) if into.have_order else into.as_they_come(frame)
        if is_exact and rows != (found := sum(file.rows or 0 for file in files)):
            discard(into.folder, files)
            raise TableUnreadable(f"its Delta table cannot be read: it has {rows} rows, and {found} were found")
        self._list(files)

    def put_by(
        self, tasks: FileTasks, read: Callable[[Item], Iterator[pa.Table]], items: Sequence[Item], size: int
    ) -> None:
        """As `put`, for what `read` finds of each of the `items`, of `size` bytes together: a task puts the rows of one
        into files of their own."""
        into = self._begun()
        found = tasks.map(_Rewrite(into, read), items, size, lambda files: discard(into.folder, files))
        self._list([file for files in found for file in files])

    def _begun(self) -> TableFiles:
        discard_waiting(self.root, self.name)  # of an attempt before this one
        return replace(self.into, notes=make_notes(self.root, self.name))

    def _list(self, files: list[DataFile]) -> None:
        if files:
            put_list(self.root, self.name, self.into.folder, files)


@dataclass(frozen=True)
class _Rewrite:
    into: TableFiles
    read: Callable[[Any], Iterator[pa.Table]]

    def __call__(self, item: Any) -> list[DataFile]:
        kind = lake_schema(self.into.schema)
        return self.into.write(rows.cast(kind) for rows in self.read(item))


def put_few_rows(rows: Iterable[pa.Table], folder: str, cluster_by: tuple[str, ...]) -> None:
    """As `put_rows`, for rows that come to this process; along the curve through `cluster_by`, if there are any: then
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
