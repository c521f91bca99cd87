"""`headwater.read`: the tables of a cut, from the lake; of a cut that fell back, from the source.

Read at the source, all tables of one call are one snapshot, with the lake's columns and types. Another call sees
another moment: nothing there can be pinned. The rows are brought into Spark before the call returns, since the
snapshot lives only as long as the session that holds it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwater.columns.selection import as_registered, registered_columns
from headwater.errors import Refused, Transient
from headwater.lake import cuts
from headwater.lake.registry import Registry
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.position import format_lsn
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.catalog import read_catalog, signature
from headwater.source.connection import Connection, connect
from headwater.source.snapshots import capture_point
from headwater.spark.stores import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)
_ATTEMPTS = 3


class _Changed(Exception):
    """A table was rewritten or altered under the snapshot."""


def read(spark: SparkSession, cut: Mapping[str, Any], *, allow_behind: bool = False) -> dict[str, DataFrame]:
    """Each table of `cut` as a DataFrame, by name: at the cut's version, or at the source where the cut says so.

    Refused when a table is not in step; with `allow_behind` such a table is read as it last was, and one that is
    absent is left out. Refused as well when a version is no longer kept, and, at the source, when the columns there
    are not those of the lake.
    """
    cuts.refuse_no_cut(cut)
    if not cuts.is_at_source(cut):
        return cuts.read(spark, cut, allow_behind=allow_behind)
    if is_connect(spark):
        raise Refused(
            "the cut fell back to the source, which a session of Spark Connect cannot read",
            code="no_spark_driver",
            where=f"cut of pipeline {cut['pipeline']}",
            remedy="read it in a Spark job (SparkOnCutOperator), or wait without on_timeout=fallback",
        )
    pipeline = load_pipeline(cut["fallback"]["pipeline_file"])
    with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater fallback")) as connection:
        for _ in range(_ATTEMPTS):
            try:
                return _read_at_source(spark, pipeline, connection, cut["tables"])
            except _Changed as changed:
                log.info("pipeline %s: %s; reading the source again", pipeline.name, changed)
    raise Transient(
        f"a table was rewritten or altered during each of {_ATTEMPTS} attempts to read it at the source",
        where=f"pipeline {pipeline.name}",
        remedy="read again when the schema rests",
    )


def _read_at_source(
    spark: SparkSession, pipeline: Pipeline, connection: Connection, tables: Mapping[str, Mapping[str, Any]]
) -> dict[str, DataFrame]:
    from headwater.delta.tables import LIVING
    from headwater.load.source_rows import rows_at

    names = list(tables)
    schemas = _schemas(pipeline, connection, names)
    relations = [leaf.relation_id for schema in schemas.values() for leaf in schema.leaves]
    frames: dict[str, DataFrame] = {}
    with capture_point(pipeline.conninfo()) as capture:
        signatures = signature(connection, relations)
        # An old snapshot sees a rewritten table as empty: nothing may have happened between these two looks.
        if _schemas(pipeline, connection, names) != schemas:
            raise _Changed("a table was altered before it was read")
        for name, whole in schemas.items():
            wanted = tables[name].get("partitions")
            schema = whole.with_leaves(_wanted(whole.leaves, wanted) if wanted is not None else whole.leaves)
            rows = rows_at(spark, pipeline, connection, schema.without_marks(), capture.snapshot_id, signatures)
            frames[name] = _brought(rows.selectExpr("*", *LIVING) if schema.soft_delete else rows, name, schema)
        if signature(connection, relations) != signatures:
            raise _Changed("a table was rewritten, truncated or altered while it was read")
    log.warning(
        "pipeline %s: %s read at the source, at %s in one snapshot; this cannot be repeated",
        pipeline.name,
        ", ".join(names),
        format_lsn(capture.position.lsn),
    )
    return frames


def _wanted(leaves: tuple[Leaf, ...], wanted: Mapping[str, int]) -> tuple[Leaf, ...]:
    """Those that a cut wants, by name and relation id. By name first: the id is the one that the lake knew, and a
    partition that was dropped and created anew has another one."""
    by_name = {str(TableName(leaf.schema, leaf.name)): leaf.relation_id for leaf in leaves}
    ids = {by_name.get(name, number) for name, number in wanted.items()}
    return tuple(leaf for leaf in leaves if leaf.relation_id in ids)


def _brought(rows: DataFrame, name: str, schema: TableSchema) -> DataFrame:
    """`rows` as they are now, without the way on which they came."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from headwater.lake.executors import lacking
    from headwater.load.units import BAD_VALUE, CHANGED, bad_value

    try:
        return rows.localCheckpoint(eager=True)
    except (PySparkException, Py4JJavaError) as error:
        if CHANGED in str(error):
            raise _Changed(f"{name} was rewritten, truncated or altered while it was read") from error
        if BAD_VALUE in str(error):
            raise bad_value(str(error), name, schema) from error
        if (problem := lacking(str(error))) is not None:
            raise problem from error
        raise


def _schemas(pipeline: Pipeline, connection: Connection, names: list[str]) -> dict[str, TableSchema]:
    """The lake's schema of each table, with the leaves that it has at the source now."""
    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    records = registry.tables if registry is not None else {}
    catalog = read_catalog(connection, as_registered(pipeline, records.values()))
    found: dict[str, TableSchema] = {}
    for name in names:
        now = catalog.table(TableName.parse(name)).schema
        record = records.get(name)
        if record is None or not record.schemas:
            found[name] = now
            continue
        stored, now = record.schema, registered_columns(now, record)
        if now.definition != stored.definition:
            raise Refused(
                "its columns at the source are not those of the lake any more",
                code="columns_changed",
                where=name,
                remedy=f"headwater load PIPELINE.yaml --table {name} --again",
            )
        found[name] = stored.with_leaves(now.leaves)
    return found
