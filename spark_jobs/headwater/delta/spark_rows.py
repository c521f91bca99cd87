"""How Spark reads the lake: wherever that is, each of its tables and files is opened here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headwater.delta.storage import hadoop_place
from headwater.spark.stores import enter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def rows_of_table(spark: SparkSession, place: str, version: int | None = None) -> DataFrame:
    """The rows of the Delta table at `place` (None: of its newest version)."""
    enter(spark, place)
    reader = spark.read.format("delta")
    return (reader if version is None else reader.option("versionAsOf", version)).load(hadoop_place(place))


def table_in_sql(place: str) -> str:
    """What a statement of Spark's calls the Delta table at `place`."""
    return f"delta.`{hadoop_place(place).replace('`', '``')}`"


def rows_of_files(spark: SparkSession, kind: StructType, places: Iterable[str]) -> DataFrame:
    """The rows of Parquet files, or of the folder of such, with the columns of `kind`."""
    found = list(places)
    for place in found[:1]:  # all of them lie in one lake
        enter(spark, place)
    return spark.read.schema(kind).parquet(*map(hadoop_place, found))
