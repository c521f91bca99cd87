"""Every row of a table at the source, at an exported snapshot: read and decoded as a load does, by Spark's tasks or,
where there are few, by this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headwater.arrow_types import as_stored, lake_schema
from headwater.columns.changes import COLUMNS_CHANGED, FOLLOWS
from headwater.columns.hidden import key_of
from headwater.columns.selection import as_registered, registered_columns
from headwater.delta.tables import struct_type
from headwater.errors import Refused
from headwater.lake.executors import LakeAccess, share_engine
from headwater.lake.registry import TableRecord
from headwater.load.connections import connections_for
from headwater.load.units import BYTES_PER_UNIT, Extent, Unit, UnitReader, cut_units, describe
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.predicate import Predicate
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.catalog import Signature, read_catalog
from headwater.source.catalog.where_sql import reach_of
from headwater.source.connection import Connection, errors_named
from headwater.source.problems import refuse_errors
from headwater.source.renewal import newest

_BYTES_BY_INDEX = 16 * BYTES_PER_UNIT
"""Rows that an index leads to are read by one session, some of them far apart: up to a minute or two."""


def rows_at(
    spark: SparkSession,
    pipeline: Pipeline,
    connection: Connection,
    schema: TableSchema,
    snapshot_id: str,
    signatures: Mapping[int, Signature],
    units: Sequence[Unit] | None = None,
    connections: int = 0,
    writes_to: LakeAccess | None = None,
    where: Predicate | None = None,
) -> DataFrame:
    """The rows with the columns of `schema`; evaluated while the snapshot is held, or not at all. `units`: of the
    schema's leaves, cut since the snapshot was taken. `connections`: how many read (0: as of `connections_for`).
    `writes_to`, `where`: see `headwater.load.units.UnitReader`."""
    share_engine(spark)
    if units is None:
        units, _ = units_of(connection, schema.leaves)
    key = key_of(pipeline, schema)
    reader = UnitReader(newest(pipeline.conninfo()), snapshot_id, schema, dict(signatures), writes_to, where, key)
    parallel = max(1, min(connections or connections_for(pipeline, connection, spark), len(units)))
    # Consecutive shares of the list hold every `parallel`-th unit: large tables end evenly.
    dealt = [(describe(unit),) for hand in range(parallel) for unit in units[hand::parallel]]
    descriptions = spark.sparkContext.parallelize(dealt, parallel)
    return spark.createDataFrame(descriptions, "unit string").mapInArrow(reader, struct_type(schema))


@contextlib.contextmanager
def few_rows_at(
    pipeline: Pipeline,
    schema: TableSchema,
    snapshot_id: str,
    signatures: dict[int, Signature],
    units: Sequence[Unit],
    where: Predicate | None = None,
) -> Iterator[Iterator[pa.Table]]:
    """The same rows, read by this process one unit after the other: for so few, Spark takes longer to start."""
    conninfo, key = newest(pipeline.conninfo()), key_of(pipeline, schema)
    reader = UnitReader(conninfo, snapshot_id, schema, signatures, where=where, hash_key=key)
    kind = lake_schema(schema)
    # Closed at once, whatever happens: it has a transaction open at the source.
    with errors_named(f"{schema.schema}.{schema.name}"), contextlib.closing(reader.rows_of(units)) as rows:
        yield (as_stored(batch, kind) for batch in rows)


def units_of(connection: Connection, leaves: Iterable[Leaf]) -> tuple[list[Unit], int]:
    """All rows of the leaves, in units, and how many bytes they are."""
    leaves = list(leaves)
    found = extents(connection, [leaf.relation_id for leaf in leaves])
    units = [unit for leaf in leaves for unit in cut_units(leaf, found.get(leaf.relation_id, Extent(0, 0)))]
    return units, sum(extent.bytes for extent in found.values())


def units_where(connection: Connection, leaves: Iterable[Leaf], where: Predicate) -> tuple[list[Unit], int]:
    """The rows of the predicate, in units, and about how many bytes they are. Partitions that can have none of them
    are left out; where the planner takes an index the relation is one unit, unless that made a long transaction."""
    leaves = list(leaves)
    found = extents(connection, [leaf.relation_id for leaf in leaves])
    units: list[Unit] = []
    size = 0
    for leaf in leaves:
        extent, reach = found.get(leaf.relation_id, Extent(0, 0)), reach_of(connection, leaf, where)
        if reach.nothing:
            continue
        some = int(extent.bytes * reach.share)
        at_once = reach.by_index and some <= _BYTES_BY_INDEX
        units += [Unit(leaf.relation_id, leaf.schema, leaf.name, 0, None)] if at_once else cut_units(leaf, extent)
        size += some
    return units, size


def schema_now(connection: Connection, pipeline: Pipeline, record: TableRecord) -> TableSchema:
    """The registered table with the leaves that it has at the source. Refused when its columns are not the registry's:
    those of one would be read as those of the other."""
    name = TableName.parse(record.name)
    catalog = read_catalog(connection, as_registered(pipeline, [record]), name)
    found = [registered_columns(t.schema, record) for t in catalog.tables if t.name == name]
    if not found:
        refuse_errors(catalog.errors_of(name))
    if not found or found[0].definition != record.schema.definition:
        raise Refused(
            COLUMNS_CHANGED if found else "the source has no such table that can be replicated",
            code="schema_changed",
            where=record.name,
            remedy=f"{FOLLOWS}headwater load PIPELINE.yaml --table {record.name} --again",
        )
    # What was declared at its load still holds.
    return record.schema.with_leaves(found[0].leaves)


def extents(connection: Connection, relation_ids: Iterable[int]) -> dict[int, Extent]:
    """How large the relations are; without those that are gone."""
    with errors_named("source"):
        rows = connection.execute(
            "select oid, pg_relation_size(oid) / current_setting('block_size')::int, pg_table_size(oid) "
            "from pg_catalog.pg_class where oid = any(%s::oid[])",
            [list(relation_ids)],
        ).fetchall()
    return {oid: Extent(pages or 0, size or 0) for oid, pages, size in rows}
