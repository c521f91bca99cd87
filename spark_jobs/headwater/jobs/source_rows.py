"""Every row of a table at the source, in Spark, at an exported snapshot: read and decoded as a load does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from headwater.config import Pipeline
from headwater.errors import Refused
from headwater.jobs.executors import share_engine
from headwater.jobs.schema_changes import COLUMNS_CHANGED, FOLLOWS
from headwater.jobs.selection import as_registered, registered_columns
from headwater.jobs.units import UnitReader, cut_units, describe
from headwater.lake.registry import TableRecord
from headwater.lake.tables import struct_type
from headwater.schema import TableSchema
from headwater.source.catalog import Signature, read_catalog
from headwater.source.connection import Connection, errors_named


def rows_at(
    spark: SparkSession,
    pipeline: Pipeline,
    connection: Connection,
    schema: TableSchema,
    snapshot_id: str,
    signatures: Mapping[int, Signature],
    writes_to: str = "",
) -> DataFrame:
    """The rows with the columns of `schema`; evaluated while the snapshot is held, or not at all. `writes_to`: see
    `headwater.jobs.units.UnitReader`."""
    share_engine(spark)
    units = [unit for leaf in schema.leaves for unit in cut_units(leaf, pages(connection, leaf.relation_id))]
    reader = UnitReader(pipeline.conninfo(), snapshot_id, schema, dict(signatures), writes_to)
    parallel = max(1, min(pipeline.load.connections, len(units)))
    descriptions = spark.sparkContext.parallelize([(describe(unit),) for unit in _dealt(units, parallel)], parallel)
    return spark.createDataFrame(descriptions, "unit string").mapInArrow(reader, struct_type(schema))


def _dealt(units: list[Any], hands: int) -> list[Any]:
    """Reordered so that consecutive shares of the list hold every `hands`-th unit: big tables end evenly."""
    return [unit for hand in range(hands) for unit in units[hand::hands]]


def schema_now(connection: Connection, pipeline: Pipeline, record: TableRecord) -> TableSchema:
    """The registered table with the leaves that it has at the source. Refused when its columns are not the registry's:
    those of one would be read as those of the other."""
    catalog = read_catalog(connection, as_registered(pipeline, [record]))
    found = [registered_columns(t.schema, record) for t in catalog.tables if str(t.name) == record.name]
    if not found or found[0].definition != record.schema.definition:
        raise Refused(
            COLUMNS_CHANGED if found else "the source has no such table that can be replicated",
            code="schema_changed",
            where=record.name,
            remedy=f"{FOLLOWS}headwater load PIPELINE.yaml --table {record.name} --again",
        )
    # What was declared at its load still holds.
    return record.schema.with_leaves(found[0].leaves)


def pages(connection: Connection, relation_id: int) -> int:
    """How large the relation is, in the server's pages."""
    with errors_named("source"):
        row = connection.execute(
            "select pg_relation_size(%s::oid) / current_setting('block_size')::int", [relation_id]
        ).fetchone()
    return int(row[0] or 0) if row else 0
