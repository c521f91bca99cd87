"""Dates of before 1582 are the same to every reader, whatever its session takes the writer of a file for."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from headwater.apply import whole_table
from headwater.arrow_types import lake_schema
from headwater.delta.data_files import _WRITTEN_AS
from headwater.delta.spark_rows import rows_of_table
from headwater.schema import Column, TableSchema, ValueType

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

KINDS = {
    "id": ValueType("int8", "bigint"),
    "day": ValueType("date", "date"),
    "at": ValueType("timestamptz", "timestamp"),
}
SCHEMA = TableSchema(
    1, "public", "t", tuple(Column(n, i, 0, -1, k) for i, (n, k) in enumerate(KINDS.items(), 1)), ("id",)
)


@pytest.mark.parametrize("mode", ["LEGACY", "EXCEPTION"])
def test_dates_of_before_1582_are_as_they_are_to_every_session(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    folder = str(tmp_path / "t")
    whole_table.create(folder, SCHEMA, 3600.0)
    stored = {"id": [1], "day": [date(1500, 1, 1)], "at": [datetime(1500, 1, 1, tzinfo=UTC)]}
    whole_table.overwrite(folder, SCHEMA, pa.table(stored, schema=lake_schema(SCHEMA)).to_batches(), "app", 1)
    session = spark.newSession()
    session.conf.set("spark.sql.parquet.datetimeRebaseModeInRead", mode)
    (row,) = rows_of_table(session, folder).selectExpr("cast(day as string)", "cast(at as string)").collect()
    assert tuple(row) == ("1500-01-01", "1500-01-01 00:00:00")


def test_files_name_the_spark_that_headwater_runs_with(spark: SparkSession) -> None:
    assert list(_WRITTEN_AS.values()) == [spark.version]
