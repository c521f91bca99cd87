"""The apply paths of Spark: `append` for inserts that cannot collide and `replace` after a truncate, without a look-up;
`merge` for any table, any feature, by Delta's MERGE with literal key bounds.

A MERGE has three kinds of source rows: put over a stored row, put as a new row, remove. Delta's row counts must come
out as the log foretold; where they do not, the table has diverged. Under `report` the clauses' conditions let a row
that contradicts the log change nothing; under `suspend` such a row ends the MERGE before it commits (`_refusing`);
under `repair` the log's row is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from delta.tables import DeltaMergeBuilder, DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import BooleanType, IntegerType, LongType

from headwater.apply.by_spark.frames import frame
from headwater.apply.by_spark.where_sql import spark_condition
from headwater.apply.find_rows import DELETE_MISSED, EXAMPLES, INSERT_MET, UPDATE_MISSED
from headwater.apply.plan import Plan, PlanAgain
from headwater.apply.plan import diverged as refused
from headwater.apply.unchanged_values import have_moved, not_repairable, with_values
from headwater.delta.spark_rows import rows_of_table
from headwater.delta.storage import hadoop_place
from headwater.delta.tables import quoted, struct_type
from headwater.errors import Diverged
from headwater.net_changes import NetChanges
from headwater.predicate import Compared, OneOf
from headwater.schema import DELETED, DELETED_AT, DELETED_LSN, PARTITION_COLUMN, TableSchema

_OPERATION = "_hw_op"
_UNCHANGED = "_hw_unchanged_"
_PUT_STORED, _PUT_NEW, _REMOVE = 1, 2, 3
_FEW_VALUES = 50
_CONTRADICTS: Final = "a row of the log contradicts the lake"


def append(spark: SparkSession, plan: Plan, shared: str) -> tuple[int, str]:
    """Append the plan's rows. Returns (divergence, example): never any here. `shared`: see `frame`."""
    return _write(spark, plan, shared, "append")


def replace(spark: SparkSession, plan: Plan, shared: str) -> tuple[int, str]:
    """Make the plan's rows the whole content."""
    return _write(spark, plan, shared, "overwrite")


def _write(spark: SparkSession, plan: Plan, shared: str, mode: str) -> tuple[int, str]:
    changes, kind = plan.changes, struct_type(plan.record.schema)
    with frame(spark, changes, kind, lambda part: part.rows, shared) as rows:
        # A batch in memory is at most max_rows: one file, not one per core.
        frames = rows.coalesce(1) if changes.on_disk is None else rows
        # Else a setting of the session may leave the partitions that no row is for.
        writer = frames.write.format("delta").mode(mode).option("partitionOverwriteMode", "static")
        writer.save(hadoop_place(plan.path))
    return 0, ""


def merge(spark: SparkSession, plan: Plan, shared: str) -> tuple[int, str]:
    """Commit the plan. Returns how many rows diverged, and a few of their keys. `shared`: see `frame`."""
    names = list(plan.changes.unchanged)

    def source_of(part: NetChanges) -> pa.Table:
        return _source(_with_values_of_moved_rows(spark, plan, part), names)

    with frame(spark, plan.changes, _source_type(plan.record.schema, names), source_of, shared) as source:
        return _merge(spark, plan, source, names)


def _merge(spark: SparkSession, plan: Plan, source: DataFrame, unchanged: list[str]) -> tuple[int, str]:
    changes, schema = plan.changes, plan.record.schema
    strict = plan.record.on_divergence != "repair"
    diverged, example = (0, "") if strict or not schema.key else _contradictions(spark, plan, source)
    target = DeltaTable.forPath(spark, hadoop_place(plan.path)).alias("t")
    whole = " AND ".join(f"NOT s.{_UNCHANGED}{index}" for index in range(len(unchanged))) or "true"
    builder = (
        target.merge(source.alias("s"), _condition(schema, changes))
        .whenMatchedDelete(f"s.{_OPERATION} = {_REMOVE}")
        .whenMatchedUpdate(_update_condition(schema, changes, strict=strict), _values(schema, unchanged))
        .whenNotMatchedInsert(_insert_condition(schema, whole, strict=strict), _values(schema, ()))
    )
    refuses = plan.refuses_divergence and bool(schema.key)
    if refuses:
        builder = _refusing(builder, schema)
    if changes.emptied:
        for leaf, moment in changes.emptied.items():
            here = f"t.{PARTITION_COLUMN} = {leaf}" if schema.partitioned else "true"
            builder = builder.whenNotMatchedBySourceUpdate(f"NOT t.{DELETED} AND {here}", _marks(moment))
    elif changes.truncated_leaves:
        builder = builder.whenNotMatchedBySourceDelete(_in_leaves(changes))
    elif changes.replaced is not None:
        builder = builder.whenNotMatchedBySourceDelete(spark_condition(changes.replaced, "t"))
    try:
        counted = builder.execute().collect()
    except (PySparkException, Py4JJavaError) as error:
        if not refuses or _CONTRADICTS not in str(error):
            raise
        diverged, example = _contradictions(spark, plan, source)
        if not diverged:
            raise PlanAgain from error  # not at the version planned on: somebody has written since
        raise refused(plan, diverged, example) from None
    if not counted:
        # Delta saw this position, or a later one, in the table already and did nothing.
        raise PlanAgain
    counts = counted[0]
    # Delta counts the rows that a TRUNCATE has taken with the others.
    foretold = not changes.truncated_leaves and _as_foretold(schema, changes, counts)
    if strict and schema.key and not refuses and not foretold:
        diverged, example = _contradictions(spark, plan, source)
    return diverged, example


def _refusing(builder: DeltaMergeBuilder, schema: TableSchema) -> DeltaMergeBuilder:
    """Whatever no clause has taken contradicts the log. What it would be set to cannot be computed, so that no kill
    behind a commit forgets that the table has diverged."""
    kinds = struct_type(schema).fields
    values: dict[str, Any] = {quoted(field.name): f"s.{quoted(field.name)}" for field in kinds}
    values[quoted(kinds[0].name)] = f"CAST(raise_error('{_CONTRADICTS}') AS {kinds[0].dataType.simpleString()})"
    return builder.whenMatchedUpdate(None, values).whenNotMatchedInsert(None, values)


def _values(schema: TableSchema, unchanged: Sequence[str]) -> dict[str, Any]:
    """What each column is set to: where the log has left a value out, the stored row's stays."""
    values: dict[str, Any] = {quoted(field.name): f"s.{quoted(field.name)}" for field in struct_type(schema).fields}
    for index, name in enumerate(unchanged):
        column = quoted(name)
        values[column] = f"CASE WHEN s.{_UNCHANGED}{index} THEN t.{column} ELSE s.{column} END"
    return values


def _is_truncated(schema: TableSchema, changes: NetChanges) -> str:
    """Of a stored row."""
    if not changes.truncated_leaves:
        return "false"
    return _in_leaves(changes) if schema.partitioned else "true"


def _in_leaves(changes: NetChanges) -> str:
    return f"t.{PARTITION_COLUMN} IN ({', '.join(str(leaf) for leaf in changes.truncated_leaves)})"


def _marks(moment: tuple[int, int]) -> dict[str, Any]:
    """Assignments that make a row a deleted one. `moment`: LSN, and microseconds since 1970."""
    lsn, time = moment
    return {DELETED: "true", DELETED_LSN: f"{lsn}L", DELETED_AT: f"timestamp_micros({time}L)"}


def _insert_condition(schema: TableSchema, whole: str, *, strict: bool) -> str:
    if strict:
        return f"s.{_OPERATION} = {_PUT_NEW}"
    condition = f"s.{_OPERATION} <> {_REMOVE} AND {whole}"
    # What was to be deleted and is not there needs no repair.
    return f"{condition} AND (s.{_OPERATION} = {_PUT_NEW} OR NOT s.{DELETED})" if schema.soft_delete else condition


def _update_condition(schema: TableSchema, changes: NetChanges, *, strict: bool) -> str:
    if not strict:
        condition = f"s.{_OPERATION} <> {_REMOVE}"
        nothing_to_delete = f"(s.{_OPERATION} = {_PUT_STORED} AND s.{DELETED} AND t.{DELETED})"
        return f"{condition} AND NOT {nothing_to_delete}" if schema.soft_delete else condition
    condition = f"s.{_OPERATION} = {_PUT_STORED}"
    if schema.soft_delete:
        # A row that is marked is not there; a new one may take its place.
        condition = f"({condition} AND NOT t.{DELETED} OR s.{_OPERATION} = {_PUT_NEW} AND t.{DELETED})"
    if changes.truncated_leaves:
        # The row that a new one meets in a truncated leaf is the truncated row.
        condition = f"({condition} OR {_is_truncated(schema, changes)} AND s.{_OPERATION} = {_PUT_NEW})"
    return condition


def _as_foretold(schema: TableSchema, changes: NetChanges, counts: Any) -> bool:
    over_stored = int(changes.stored.sum())
    if schema.soft_delete:
        # New rows may come over marked ones: only a row that contradicts the log is neither updated nor inserted.
        return bool(counts["num_updated_rows"] + counts["num_inserted_rows"] == changes.rows.num_rows)
    return bool(
        counts["num_updated_rows"] == over_stored
        and counts["num_inserted_rows"] == changes.rows.num_rows - over_stored
        and counts["num_deleted_rows"] == changes.removed.num_rows
    )


def _contradictions(spark: SparkSession, plan: Plan, source: DataFrame) -> tuple[int, str]:
    """Source rows whose stored row was to exist and did not, or the reverse, at the version planned on.

    Diverged, with nothing written, when `repair` is asked for and a row is not whole in the log.
    """
    keys = plan.record.schema.key
    stored = (
        _living(spark, plan)
        .alias("t")
        .selectExpr(
            *(f"t.{quoted(k)} AS _hw_k{i}" for i, k in enumerate(keys)),
            f"{_is_truncated(plan.record.schema, plan.changes)} AS _hw_truncated",
        )
    )
    condition = " AND ".join(f"s.{quoted(k)} = t._hw_k{i}" for i, k in enumerate(keys))
    partial = " OR ".join(f"s.{_UNCHANGED}{index}" for index in range(len(plan.changes.unchanged))) or "false"
    joined = source.alias("s").join(stored.alias("t"), expr(condition), "left")
    # A new row that takes values from the stored one under its key (only a reload has such) must meet one.
    lacks = f"t._hw_k0 IS NULL AND s.{_OPERATION} = {_PUT_NEW} AND ({partial})"
    contradicts = f"IF(s.{_OPERATION} = {_PUT_NEW}, t._hw_k0 IS NOT NULL AND NOT t._hw_truncated, t._hw_k0 IS NULL)"
    wrong = joined.where(f"{contradicts} OR ({lacks})").selectExpr(
        f"s.{_OPERATION} AS op",
        f"({partial}) AS partial",
        "t._hw_k0 IS NULL AS missing",
        f"{f's.{DELETED}' if plan.record.schema.soft_delete else 'false'} AS deleted",
        *(f"CAST(s.{quoted(k)} AS STRING) AS _hw_k{i}" for i, k in enumerate(keys)),
    )
    # Counted by Spark: a large batch may contradict the lake in every row.
    unknown = f"partial AND NOT deleted AND (op = {_PUT_STORED} OR op = {_PUT_NEW} AND missing)"
    count, broken = wrong.selectExpr("count(*)", f"count_if({unknown})").collect()[0]
    words = {_PUT_STORED: UPDATE_MISSED, _REMOVE: DELETE_MISSED, _PUT_NEW: INSERT_MET}
    rows = wrong.limit(EXAMPLES).collect() if count else []
    shown = [
        f"{words[_REMOVE if row['deleted'] and row['op'] == _PUT_STORED else row['op']]} at key "
        f"({', '.join(str(value) for value in row[4:])})"
        for row in rows
    ]
    example = "; ".join(shown)
    if plan.record.on_divergence == "repair" and broken:
        raise not_repairable(plan, count, example)
    return count, example


def _living(spark: SparkSession, plan: Plan) -> DataFrame:
    """The rows, at the version planned on, that are not marked as deleted."""
    rows = rows_of_table(spark, plan.path, plan.version)
    return rows.where(f"NOT {DELETED}") if plan.record.schema.soft_delete else rows


def _source(changes: NetChanges, unchanged: list[str]) -> pa.Table:
    """One Arrow table: rows to put, then keys to remove, with the operation and the masks of `unchanged` columns."""
    rows, removed = changes.rows, changes.removed
    operation = np.concatenate(
        [np.where(changes.stored, _PUT_STORED, _PUT_NEW), np.full(removed.num_rows, _REMOVE)]
    ).astype(np.int32)
    table = pa.concat_tables([rows, removed.cast(rows.select(removed.column_names).schema)], promote_options="default")
    table = table.append_column(_OPERATION, pa.array(operation))
    nothing = np.zeros(rows.num_rows, dtype=np.bool_)
    for index, name in enumerate(unchanged):
        mask = np.concatenate([changes.unchanged.get(name, nothing), np.zeros(removed.num_rows, dtype=np.bool_)])
        table = table.append_column(f"{_UNCHANGED}{index}", pa.array(mask))
    return table


def _source_type(schema: TableSchema, unchanged: list[str]) -> Any:
    kind = struct_type(schema).add(_OPERATION, IntegerType())
    for index in range(len(unchanged)):
        kind = kind.add(f"{_UNCHANGED}{index}", BooleanType())
    return kind


def _condition(schema: TableSchema, changes: NetChanges) -> str:
    """Key equality, and bounds that name target columns alone: only those prune files."""
    parts = [f"t.{quoted(name)} = s.{quoted(name)}" for name in schema.key]
    if not changes.truncated_leaves and changes.replaced is None:
        for name in schema.key:
            parts += _bounds(name, changes)
    return " AND ".join(parts) or "false"


def _bounds(name: str, changes: NetChanges) -> list[str]:
    """Literals that the stored rows' key column `name` is one of, or lies between."""
    kind = changes.rows.schema.field(name).type
    if not (changes.rows.num_rows or changes.removed.num_rows):
        return ["false"]
    if not (pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_string(kind)):
        return []
    columns = [table[name] for part in changes.in_parts() for table in (part.rows, part.removed) if table.num_rows]
    values = pc.unique(pa.chunked_array([chunk for column in columns for chunk in column.chunks], kind))
    if len(values) <= _FEW_VALUES:  # of a partition column, say: between two of them others may lie
        return [spark_condition(OneOf(name, tuple(values.to_pylist())), "t")]
    extent = pc.min_max(values).as_py()
    return [
        spark_condition(Compared(name, ">=", extent["min"]), "t"),
        spark_condition(Compared(name, "<=", extent["max"]), "t"),
    ]


def _with_values_of_moved_rows(spark: SparkSession, plan: Plan, changes: NetChanges) -> NetChanges:
    """A row that changed its key keeps its unchanged TOAST values: they lie under its old key."""
    if changes.origins is None:
        return changes
    schema = plan.record.schema
    names = list(changes.unchanged)
    key_type = struct_type(schema)
    at = np.flatnonzero(have_moved(changes, list(schema.key)))
    wanted = changes.origins.take(pa.array(at)).append_column("_hw_row", pa.array(at))
    wanted_type = type(key_type)([key_type[name] for name in schema.key]).add("_hw_row", LongType())
    source = spark.createDataFrame(wanted, schema=wanted_type).alias("s")
    stored = _living(spark, plan).alias("t")
    condition = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in schema.key)
    found = source.join(stored, expr(condition)).selectExpr("s._hw_row", *(f"t.{quoted(name)}" for name in names))
    values = found.toArrow()
    if values.num_rows != len(at):
        raise Diverged(
            f"{len(at) - values.num_rows} rows changed their key in the log but are not stored under the old one",
            where=plan.record.name,
            remedy=f"headwater load PIPELINE.yaml --table {plan.record.name} --again",
        )
    return with_values(changes, schema.key, values["_hw_row"].to_numpy(), values)
