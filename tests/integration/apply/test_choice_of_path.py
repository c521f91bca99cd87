"""Which way a table's share takes: inserts that are proved new are appended, and what only Delta's own writer may touch
goes by MERGE, also in a session whose tasks run in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from fixtures.twins import Twins, by_delta_rs, make_twins, normal
from headwater.apply.plan import choose
from headwater.delta import delta_log
from headwater.delta.log_entries import read_actions
from headwater.monitor.table_page import reason_of
from headwater.net_changes import NetChanges

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

FEATURES = {
    "change data feed": ("changeDataFeed", ["set tblproperties ('delta.enableChangeDataFeed' = 'true')"]),
    "row tracking": ("rowTracking", ["set tblproperties ('delta.enableRowTracking' = 'true')"]),
    "constraints": ("checkConstraints", ["add constraint known check (id > -1000000000000000)"]),
    "generated columns": ("generatedColumns", []),
}


def inserts(twins: Twins, *numbers: int) -> NetChanges:
    rows = {number: twins.row(number) for number in numbers}
    twins.model |= rows
    count = len(rows)
    return twins.changes(list(rows.values()), [False] * count, [False] * count, [None] * count, [])


@pytest.mark.parametrize("feature", FEATURES)
def test_a_table_with_a_feature_that_is_not_known_here_goes_by_merge(
    spark: SparkSession, tmp_path: Path, feature: str
) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=21)
    name, changes = FEATURES[feature]
    folder = twins.direct
    if not changes:
        folder = tmp_path / "generated"
        columns = spark.read.format("delta").load(str(twins.direct)).schema
        described = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in columns.fields)
        spark.sql(
            f"create table delta.`{folder}` ({described}, twice bigint generated always as (id * 2)) using delta "
            "tblproperties ('delta.enableDeletionVectors' = 'true')"
        )
    for change in changes:
        spark.sql(f"alter table delta.`{folder}` {change}")
    for _ in range(2):
        batch = twins.batch()
        version = DeltaTable(str(folder)).version()
        because = twins.applier.why_by_engine(twins.record, str(folder), version)
        assert name in because
        path, reason = choose(batch, twins.schema, because)
        assert (path, reason) == ("merge", because)
        twins.lsn += 1
        plan = replace(twins.plan(folder, batch, path), because=reason, by_engine=because)
        assert twins.applier.apply(plan).divergence == 0
        wanted = [column.name for column in twins.schema.columns]
        rows = spark.read.format("delta").load(str(folder)).select(*wanted).toArrow().to_pylist()
        assert sorted(repr(normal(row)) for row in rows) == twins.expected()
        found = read_actions(str(folder), DeltaTable(str(folder)).version()) or []
        assert [a["commitInfo"]["operation"] for a in found if "commitInfo" in a] == ["MERGE"]
        assert reason_of(str(folder), DeltaTable(str(folder)).version()) == because
    if not changes:
        wrong = spark.read.format("delta").load(str(folder)).where("not (twice <=> id * 2)").count()
        assert wrong == 0


def path_of(folder: Path) -> tuple[str, str]:
    """Path and reason as the newest commit tells them."""
    actions = read_actions(str(folder), DeltaTable(str(folder)).version()) or []
    (info,) = [action["commitInfo"] for action in actions if "commitInfo" in action]
    return info["operationParameters"]["path"], info["operationParameters"]["because"]


def test_inserts_that_are_proved_new_are_appended_and_say_how(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=22)
    for numbers, proof in (
        ((60, 61), "statistics"),  # an empty table
        ((62, 70), "statistics"),
        ((65, 80), "index"),  # between those that are there
        ((81, 90), "statistics"),
    ):
        direct, _ = twins.apply(inserts(twins, *numbers))
        assert (direct.apply_path, direct.divergence) == ("append", 0)
        path, because = path_of(twins.direct)
        assert path == "append"
        assert proof in because
        twins.assert_as_the_model()
    # What was appended without a look is found by the next ones.
    changed = {number: twins.row(number) for number in (70, 81)}
    twins.model |= changed
    direct, _ = twins.apply(twins.changes(list(changed.values()), [True] * 2, [False] * 2, [None] * 2, []))
    assert (direct.apply_path, direct.divergence) == ("", 0)
    assert path_of(twins.direct)[0] == "positional"
    twins.assert_as_the_model(spark)


def test_an_insert_of_a_stored_key_is_never_appended(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=23)
    twins.apply(inserts(twins, 60, 70))
    before = by_delta_rs(twins.direct)
    lie = twins.changes([twins.row(70)], [False], [False], [None], [])
    direct, merged = twins.apply(lie)
    assert (direct.divergence, merged.divergence, direct.apply_path) == (1, 1, "")
    assert by_delta_rs(twins.direct) == before
    # Without statistics nothing is proved by them.
    folder = str(twins.direct)
    files = delta_log.read_snapshot(folder).files.values()
    version = DeltaTable(folder).version() + 1
    silent = [delta_log.add(replace(f, stats=f'{{"numRecords": {f.rows}}}'), data=False) for f in files]
    delta_log.commit(folder, version, [*(delta_log.remove(f, data=False) for f in files), *silent])
    twins.apply(inserts(twins, 95))
    assert "index" in path_of(twins.direct)[1]


_LARGE = """
import sys
from dataclasses import replace
from pathlib import Path
from fixtures.twins import by_delta_rs, make_twins
from headwater.spark.session import build_session

spark = build_session(app_name="headwater local-cluster test")
assert spark.sparkContext.master == "local-cluster[2,1,1024]", spark.sparkContext.master
twins = make_twins(spark, Path(sys.argv[1]), "uuid", seed=31)
count = 20_000
rows = [twins.row(number) for number in range(count)]
first = twins.changes(rows, [False] * count, [False] * count, [None] * count, [])
assert [applied.divergence for applied in twins.apply(first)] == [0, 0]
half = count // 2
again = [twins.row(number) for number in range(half)]
gone = [twins.key(number) for number in range(half, half + 1000)]
second = twins.changes(again, [True] * half, [False] * half, [None] * half, gone)
assert [applied.divergence for applied in twins.apply(second)] == [0, 0]
direct, merged = by_delta_rs(twins.direct), by_delta_rs(twins.merged)
assert len(direct) == count - 1000
assert direct == merged
tracker = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
assert tracker >= 3, f"driver and two executors, found {tracker}"
print("equal")
"""


def test_a_large_batch_is_merged_by_executors_of_their_own(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HEADWATER_SPARK_MASTER": "local-cluster[2,1,1024]",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = [sys.executable, "-c", _LARGE, str(tmp_path)]
    done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
