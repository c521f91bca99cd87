"""Rows of a whole table laid out by Spark, since a driver should not hold them: in the order of
`headwater.delta.clustering`, where each task writes its own stretch of the curve, or by partitions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from headwater.arrow_types import as_stored, lake_schema
from headwater.delta.clustering import SAMPLED_ROWS, Curve, new_run
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import Layout
from headwater.delta.new_files import write_rows
from headwater.delta.spark_rows import rows_of_files
from headwater.delta.tables import quoted, struct_type
from headwater.load.executors import LakeAccess
from headwater.schema import TableSchema

_STRETCH_BYTES: Final = 128 << 20
"""Of Parquet: what a task sorts at a time."""
_STRETCH, _PLACE = "_hw_stretch", "_hw_place"
"""Reserved: no column of a table is called like this."""


def in_order(frame: DataFrame, columns: Sequence[str], rows: int, size: int) -> DataFrame:
    """The rows of `frame`, about so many and of so many bytes, in stretches of the curve through `columns`: one for
    each partition, and in each in order. `frame` is read twice, these columns alone at first."""
    sampled = frame.select(*map(quoted, columns)).sample(min(1.0, SAMPLED_ROWS / max(rows, 1)), seed=rows)
    sample = sampled.toArrow()
    curve = Curve.of(sample, columns)
    stretches = max(1, round(size / _STRETCH_BYTES))
    places = np.sort(curve.places(sample))
    at = np.arange(1, stretches) * len(places) // stretches
    bounds = np.unique(places[at]) if len(places) else places
    kind = StructType([*frame.schema.fields]).add(_STRETCH, IntegerType()).add(_PLACE, LongType())
    placed = frame.mapInArrow(_Placed(curve, bounds), kind)
    dealt = placed.repartitionById(len(bounds) + 1, _STRETCH)
    return dealt.sortWithinPartitions(_PLACE, *map(quoted, columns)).drop(_STRETCH, _PLACE)


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


def files_in_order(
    spark: SparkSession, folder: str, schema: TableSchema, layout: Layout, files: Sequence[DataFile], lake: LakeAccess
) -> list[DataFile]:
    """The rows of `files`, which are written below `folder` and in no commit yet, as one run of new files there.
    `lake`: what executors write to."""
    rows, size = sum(file.rows or 0 for file in files), sum(file.size for file in files)
    if not rows:
        return list(files)
    ordered = in_order(_rows_of(spark, folder, schema, layout, files), schema.cluster_by, rows, size)
    return _written(ordered, _Writer(folder, schema, layout, lake, new_run()))


def files_in_partitions(
    spark: SparkSession, folder: str, schema: TableSchema, layout: Layout, files: Sequence[DataFile], lake: LakeAccess
) -> list[DataFile]:
    """The rows of `files`, which lie unpartitioned below `folder` and are in no commit yet, as new files there, each of
    one partition of `layout`. `lake`: what executors write to."""
    size = sum(file.size for file in files)
    # By the key as well: a partition that is larger than others is shared by several tasks, and its files have bounds.
    by = [*map(quoted, layout.partition_by), *(quoted(name) for name in schema.key if name not in layout.partition_by)]
    dealt = _rows_of(spark, folder, schema, layout, files).repartitionByRange(max(1, round(size / _STRETCH_BYTES)), *by)
    return _written(dealt.sortWithinPartitions(*by), _Writer(folder, schema, layout, lake))


def _rows_of(
    spark: SparkSession, folder: str, schema: TableSchema, layout: Layout, files: Sequence[DataFile]
) -> DataFrame:
    kind = struct_type(schema)
    stored = StructType([StructField(layout.in_files(column.name), column.dataType, True) for column in kind])
    paths = [file.in_folder(folder) for file in files if file.rows]
    return rows_of_files(spark, stored, paths).toDF(*kind.names)


def _written(frame: DataFrame, writer: _Writer) -> list[DataFile]:
    return [DataFile(**json.loads(row["file"])) for row in frame.mapInArrow(writer, "file string").collect()]


@dataclass(frozen=True)
class _Writer:
    """For `mapInArrow`: rows in, the files that hold them out. `run`: that these are of, if any."""

    folder: str
    schema: TableSchema
    layout: Layout
    lake: LakeAccess
    run: str = ""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.lake.enter()
        kind = lake_schema(self.schema)
        tables = (as_stored(batch, kind) for batch in batches)
        found: list[dict[str, Any]] = [
            asdict(written.file) for written in write_rows(self.folder, kind, tables, self.layout, self.run)
        ]
        yield pa.RecordBatch.from_pydict({"file": pa.array([json.dumps(file) for file in found], pa.string())})
