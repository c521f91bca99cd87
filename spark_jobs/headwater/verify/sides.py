"""Both sides of a table that is compared: its rows at the source as of a capture point, and in the version of the
lake's table that holds it. Spark reads them, or this process where they are few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from headwater.arrow_types import lake_schema
from headwater.columns.hidden import key_of
from headwater.delta import small_versions
from headwater.delta.delta_log import Snapshot
from headwater.delta.delta_types import fields_of, value_type
from headwater.delta.small_versions import rows_by_file
from headwater.delta.spark_rows import rows_of_table
from headwater.errors import Transient
from headwater.load.rows_by_key import KeyReader
from headwater.load.source_rows import few_rows_at, rows_at, units_of
from headwater.load.units import LOCK_SECONDS, TableChanged, Unit
from headwater.pipeline_file.pipeline import Pipeline
from headwater.schema import DELETED, PARTITION_COLUMN, TableSchema
from headwater.source.catalog.catalog import Signature
from headwater.source.connection import Connection
from headwater.source.renewal import newest
from headwater.verify.candidates import Candidates

KEYS_PER_READ: Final = 2_000


@dataclass(frozen=True, slots=True)
class Sides:
    """`schema`: what is compared, without marks. `units`: of its leaves, `size` bytes in all. `lake`: what the lake
    holds, without the rows that `soft_delete` has marked."""

    pipeline: Pipeline
    connection: Connection
    schema: TableSchema
    snapshot_id: str
    signatures: dict[int, Signature]
    units: Sequence[Unit]
    size: int
    lake: Snapshot

    @property
    def few(self) -> bool:
        """Whether this process can read both sides, and faster than Spark would start."""
        return self.size < small_versions.SMALL_BYTES and small_versions.is_small(self.lake)

    @property
    def same_types(self) -> bool:
        """Whether the lake's table has the compared columns in their types."""
        kinds = {column["name"]: _lake_type(column["type"]) for column in fields_of(self.lake.metadata)}
        wanted = {column.name: column.value.lake for column in self.schema.columns}
        if self.schema.partitioned:
            wanted[PARTITION_COLUMN] = "bigint"
        return wanted.items() <= kinds.items()

    def source_by(self, spark: SparkSession) -> DataFrame:
        """Every row at the capture point, read as a load reads them."""
        read = (spark, self.pipeline, self.connection, self.schema, self.snapshot_id, self.signatures, self.units)
        return rows_at(*read)

    def lake_by(self, spark: SparkSession) -> DataFrame:
        """The rows that the lake holds as living."""
        rows = rows_of_table(spark, self.lake.folder, self.lake.version)
        return rows.where(f"NOT {DELETED}") if DELETED in rows.columns else rows

    def source_here(self) -> pa.Table:
        """As `source_by`, with the columns of `lake_schema`."""
        kind = lake_schema(self.schema)
        with few_rows_at(self.pipeline, self.schema, self.snapshot_id, self.signatures, self.units) as rows:
            return pa.concat_tables([kind.empty_table(), *rows])

    def lake_here(self) -> list[tuple[str, pa.Table]]:
        """As `lake_by`, by file. TableUnreadable."""
        kind = lake_schema(self.schema)
        if not any(column["name"] == DELETED for column in fields_of(self.lake.metadata)):
            return rows_by_file(self.lake, kind)
        marked = rows_by_file(self.lake, kind.append(pa.field(DELETED, pa.bool_())))
        return [(file, rows.filter(pc.invert(rows[DELETED])).select(kind.names)) for file, rows in marked]

    def under(self, candidates: Candidates, numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], pa.Table]]:
        """The source's rows under the keys `numbers`, some keys at a time, which come first: as of `KeyReader`."""
        for start in range(0, len(numbers), KEYS_PER_READ):
            part = numbers[start : start + KEYS_PER_READ]
            reader = KeyReader(
                newest(self.pipeline.conninfo()),
                self.snapshot_id,
                self.schema,
                self.signatures,
                keys=candidates.texts(part),
                hash_key=key_of(self.pipeline, self.schema),
            )
            yield part, reader.rows()


def _lake_type(kind: Any) -> str:
    try:
        return value_type(kind).lake
    except KeyError:
        return ""  # a struct or a map, which no source gives: another program has added the column


def sides_of(
    pipeline: Pipeline,
    connection: Connection,
    schema: TableSchema,
    snapshot_id: str,
    signatures: dict[int, Signature],
    place: str,
    version: int,
) -> Sides:
    """The leaves of `schema`, and `version` of the Delta table at `place`. TableUnreadable; TableChanged for a leaf
    that is locked for as long as `connection` waits."""
    try:
        units, size = units_of(connection, schema.leaves)
    except Transient as error:
        if error.code == "lock_timeout":
            raise TableChanged(f"it was locked for {LOCK_SECONDS:g} s") from error
        raise
    lake = small_versions.snapshot_at(place, version)
    return Sides(pipeline, connection, schema, snapshot_id, signatures, units, size, lake)
