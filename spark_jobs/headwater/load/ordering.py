"""Rows of a whole table laid out by Spark, since a driver should not hold them: in the order of
`headwater.delta.clustering`, where each task writes its own stretch of the curve, or by partitions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from headwater.apply.waiting_files import put_note
from headwater.arrow_types import as_stored, lake_schema
from headwater.delta.clustering import SAMPLED_ROWS, Curve, new_run
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import Layout
from headwater.delta.new_files import discard, write_rows
from headwater.delta.spark_rows import rows_of_files
from headwater.delta.tables import quoted, struct_type
from headwater.errors import Transient
from headwater.lake.executors import LakeAccess
from headwater.schema import TableSchema
from headwater.spark.session import cores_of

_STRETCH_BYTES: Final = 128 << 20
"""Of Parquet: what a task sorts at a time, at most."""
_SHARE_BYTES: Final = 16 << 20
"""Smaller ones are not worth a task of their own, where cores would be idle without."""
_STRETCH, _PLACE = "_hw_stretch", "_hw_place"
"""Reserved: no column of a table is called like this."""


def in_order(frame: DataFrame, columns: Sequence[str], rows: int, size: int) -> DataFrame:
    """The rows of `frame`, about so many and of so many bytes, in stretches of the curve through `columns`: one for
    each partition, and in each in order. `frame` is read twice, these columns alone at first."""
    sampled = frame.select(*map(quoted, columns)).sample(min(1.0, SAMPLED_ROWS / max(rows, 1)), seed=rows)
    sample = sampled.toArrow()
    curve = Curve.of(sample, columns)
    stretches = _stretches(frame.sparkSession, size)
    places = np.sort(curve.places(sample))
    at = np.arange(1, stretches) * len(places) // stretches
    bounds = np.unique(places[at]) if len(places) else places
    kind = StructType([*frame.schema.fields]).add(_STRETCH, IntegerType()).add(_PLACE, LongType())
    placed = frame.mapInArrow(_Placed(curve, bounds), kind)
    dealt = placed.repartitionById(len(bounds) + 1, _STRETCH)
    return dealt.sortWithinPartitions(_PLACE, *map(quoted, columns)).drop(_STRETCH, _PLACE)


def _stretches(spark: SparkSession, size: int) -> int:
    """Into how many to deal `size` bytes: a multiple of the cores, or the last round of tasks leaves some idle."""
    cores = cores_of(spark) or spark.sparkContext.defaultParallelism
    least, most = max(1, math.ceil(size / _STRETCH_BYTES)), math.ceil(size / _SHARE_BYTES)
    return max(least, min(most, math.ceil(least / cores) * cores))


@dataclass(frozen=True)
class _Placed:
    """Adds to each row its place on the curve, and the number of the stretch that `bounds` of places make of it."""

    curve: Curve
    bounds: npt.NDArray[np.uint64]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            places = self.curve.places(pa.Table.from_batches([batch]))
            stretch = np.searchsorted(self.bounds, places, side="right").astype(np.int32)
            more = [pa.array(stretch), pa.array(places.astype(np.int64))]
            names = [*batch.schema.names, _STRETCH, _PLACE]
            yield pa.RecordBatch.from_arrays([*batch.columns, *more], names)


@dataclass(frozen=True)
class TableFiles:
    """Where tasks put rows of `schema`: in files of the table in `folder`, as `layout` says, that no commit names yet.
    `lake`: what they write to; `notes`: the folder where each notes what it has written, if that is wanted."""

    folder: str
    schema: TableSchema
    layout: Layout
    lake: LakeAccess
    notes: str = ""

    @property
    def have_order(self) -> bool:
        """Whether rows are to be laid out, and not left as they come."""
        return bool(self.layout.partition_by or self.schema.cluster_by)

    def write(self, rows: Iterable[pa.Table], run: str = "") -> list[DataFile]:
        """By a task: put `rows` into files of their own. `run`: that these are of, if any."""
        files = [written.file for written in write_rows(self.folder, lake_schema(self.schema), rows, self.layout, run)]
        if self.notes and files:
            put_note(self.lake.root, self.notes, self.folder, files)
        return files

    def as_they_come(self, frame: DataFrame) -> list[DataFile]:
        """Put the rows of `frame`, which are read once, each task's into files of its own."""
        return _written(frame, _Writer(self))

    def as_read(self, frame: DataFrame) -> list[DataFile]:
        """The same without regard to partitions: no file for a reader of the table."""
        return replace(self, layout=replace(self.layout, partition_by=())).as_they_come(frame)

    def laid_out(self, frame: DataFrame, rows: int, size: int) -> list[DataFile]:
        """Put the rows of `frame`, about so many and of so many bytes, where a reader looks for them: each file with
        those of one partition, or all as one run in the order of the clustering."""
        if not self.layout.partition_by:
            return _written(in_order(frame, self.schema.cluster_by, rows, size), _Writer(self, new_run()))
        partition_by, key = self.layout.partition_by, self.schema.key
        # By the key as well: of a partition that is larger than others each of several tasks has a share, and its files
        # have bounds.
        by = [*map(quoted, partition_by), *(quoted(name) for name in key if name not in partition_by)]
        dealt = frame.repartitionByRange(_stretches(frame.sparkSession, size), *by)
        return _written(dealt.sortWithinPartitions(*by), _Writer(self))

    def lay_out(self, spark: SparkSession, files: Sequence[DataFile]) -> list[DataFile]:
        """The same for the rows of `files`, which lie in the table's folder as they were read. Transient where not all
        of them were found there."""
        rows, size = sum(file.rows or 0 for file in files), sum(file.size for file in files)
        if not rows:
            return list(files)
        kind = struct_type(self.schema)
        stored = StructType([StructField(self.layout.in_files(column.name), column.dataType, True) for column in kind])
        paths = [file.in_folder(self.folder) for file in files if file.rows]
        laid_out = self.laid_out(rows_of_files(spark, stored, paths).toDF(*kind.names), rows, size)
        if (found := sum(file.rows or 0 for file in laid_out)) != rows:
            discard(self.folder, laid_out)
            raise Transient(
                f"{rows} rows were read and {found} of them found again: a file is missing or damaged in "
                f"{self.folder}; nothing was changed",
                code="rows_lost",
                where=f"{self.schema.schema}.{self.schema.name}",
                remedy="run it again; if that fails as well, look at the disk",
            )
        return laid_out


def _written(frame: DataFrame, writer: _Writer) -> list[DataFile]:
    found = frame.mapInArrow(writer, "file string").collect()
    return [DataFile(**json.loads(row["file"])) for row in found]


@dataclass(frozen=True)
class _Writer:
    """For `mapInArrow`: rows in, the files that hold them out. `run`: that these are of, if any."""

    into: TableFiles
    run: str = ""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.into.lake.enter()
        kind = lake_schema(self.into.schema)
        files = self.into.write((as_stored(batch, kind) for batch in batches), self.run)
        yield pa.RecordBatch.from_pydict({"file": pa.array([json.dumps(asdict(file)) for file in files], pa.string())})
