"""The apply paths without look-up: `append` for inserts that cannot collide, `replace` after a truncate."""

from __future__ import annotations

from pyspark.sql import SparkSession

from headwater.apply.by_spark.frames import frame
from headwater.apply.plan import Plan
from headwater.delta.tables import struct_type


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
        frames.write.format("delta").mode(mode).save(plan.path)
    return 0, ""
