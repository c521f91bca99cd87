"""The comparison by Spark under settings and with names that SQL takes for something else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql.functions import lit

from headwater.apply import whole_table
from headwater.arrow_types import lake_schema
from headwater.delta.spark_rows import rows_of_table
from headwater.delta.tables import struct_type
from headwater.load.rows_by_key import ORIGIN
from headwater.schema import Column, TableSchema, ValueType
from headwater.verify.by_spark import SparkComparison

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

INT, TEXT, BYTES = ValueType("int8", "bigint"), ValueType("text", "string"), ValueType("bytea", "binary")


def schema_of(columns: dict[str, ValueType]) -> TableSchema:
    found = tuple(Column(name, at, 0, -1, value) for at, (name, value) in enumerate(columns.items(), 1))
    return TableSchema(1, "public", "t", found, (found[0].name,))


def test_the_text_of_a_binary_key_is_postgresqls_whatever_a_backslash_means_to_the_session(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.parser.escapedStringLiterals", "true")
    schema = schema_of({"id": BYTES, "v": TEXT})
    source, lake = (
        session.createDataFrame(
            pa.table({"id": [b"\x01\xfe"], "v": [value]}, schema=lake_schema(schema)), struct_type(schema)
        )
        for value in ("a", "b")
    )
    _, candidates = SparkComparison(session, schema).compare(source, lake, 10)
    assert candidates.texts([0]) == [("\\x01FE",)]


def test_a_column_may_be_called_as_sparks_own_metadata(spark: SparkSession, tmp_path: Path) -> None:
    schema = schema_of({"id": INT, "_metadata": TEXT})
    kind = lake_schema(schema)
    folder = str(tmp_path / "t")
    whole_table.create(folder, schema, 3600.0)
    stored = pa.table({"id": [1, 2], "_metadata": ["a", "b"]}, schema=kind)
    whole_table.overwrite(folder, schema, stored.to_batches(), "app", 1)
    rows = pa.table({"id": [1, 2], "_metadata": ["a", "c"]}, schema=kind)
    source = spark.createDataFrame(rows, struct_type(schema))
    lake = rows_of_table(spark, folder)
    comparison = SparkComparison(spark, schema)
    _, candidates = comparison.compare(source, lake, 10)
    assert candidates.texts([0]) == [("2",)]
    state = comparison._states(
        source.withColumn(ORIGIN, lit(5).cast("long")), lake, comparison._numbered(candidates, [0])
    )
    assert state[0].lake.file.endswith(".parquet")
