"""Where Hadoop's default file system is another one, as in a cluster with HDFS, Spark still writes to the lake."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.twins import by_delta_rs, make_twins, normal, on_disk
from headwater.apply.by_spark import merge
from headwater.delta.delta_log import read_snapshot
from headwater.delta.tables import create
from headwater.lake.executors import LakeAccess
from headwater.reload.row_folder import put_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_what_spark_writes_lies_in_the_lake(spark: SparkSession, tmp_path: Path) -> None:
    elsewhere = tmp_path / "default"
    elsewhere.mkdir()
    session = spark.newSession()
    session.conf.set("fs.defaultFS", "viewfs://other/")
    session.conf.set("fs.viewfs.mounttable.other.linkFallback", elsewhere.as_uri())
    twins = make_twins(spark, tmp_path, "bigint", seed=24)
    rows = [twins.row(number) for number in (1, 2, 3)]
    new, changed = rows[:2], {**rows[0], "small": "new"}
    first = twins.changes(new, [False] * 2, [False] * 2, [None] * 2, [])
    merge.append(session, twins.plan(twins.merged, first, "append"), "")
    second = twins.changes([changed], [True], [False], [None], [])
    merge.merge(session, twins.plan(twins.merged, second, "merge"), "")
    (tmp_path / "spilled").mkdir()
    third = on_disk(twins.changes(rows[2:], [False], [False], [None], []), tmp_path / "spilled", 1)
    merge.append(session, twins.plan(twins.merged, third, "append"), "")
    assert by_delta_rs(twins.merged) == sorted(repr(normal(row)) for row in (changed, *rows[1:]))

    create(session, str(tmp_path / "made"), twins.schema)
    assert read_snapshot(str(tmp_path / "made")).version == 0
    folder = tmp_path / "rows"
    put_rows(session.range(3), str(folder), LakeAccess.to(str(tmp_path)))
    assert list(folder.glob("*.parquet"))
    assert not [path for path in elsewhere.rglob("*") if path.is_file()]
