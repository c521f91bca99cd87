"""Which way a table's share takes: inserts that are proved new are appended, and what only Delta's own writer may touch
goes by MERGE (on executors: `tests/integration/spark/test_cluster.py`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from fixtures.twins import Twins, by_delta_rs, make_twins, normal
from headwater.apply.applier import Applier
from headwater.apply.by_spark import merge
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
        assert twins.applier.commit(plan).divergence == 0
        wanted = [column.name for column in twins.schema.columns]
        rows = spark.read.format("delta").load(str(folder)).select(*wanted).toArrow().to_pylist()
        assert sorted(repr(normal(row)) for row in rows) == twins.expected()
        found = read_actions(str(folder), DeltaTable(str(folder)).version()) or []
        assert [a["commitInfo"]["operation"] for a in found if "commitInfo" in a] == ["MERGE"]
        assert reason_of(str(folder), DeltaTable(str(folder)).version()) == because
    if not changes:
        wrong = spark.read.format("delta").load(str(folder)).where("not (twice <=> id * 2)").count()
        assert wrong == 0


def test_a_truncate_by_the_engine_takes_every_partition_whatever_the_session_says(
    spark: SparkSession, tmp_path: Path
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    twins = make_twins(spark, tmp_path, "bigint", seed=23, partition_by=("region",))
    first, second = ({**twins.row(number), "region": region} for number, region in ((1, "eu"), (2, "us")))
    both = twins.changes([first, second], [False] * 2, [False] * 2, [None] * 2, [])
    twins.applier.commit(twins.plan(twins.merged, both, "append"))
    after = twins.changes([first], [False], [False], [None], [])
    merge.replace(session, twins.plan(twins.merged, after, "replace"), "")
    assert by_delta_rs(twins.merged) == [repr(normal(first))]


@pytest.mark.parametrize("behind", [False, True], ids=["kept off", "behind the commit"])
def test_a_table_that_compacts_itself_does_not_fence_its_writer(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    session = spark.newSession()
    session.conf.set("spark.databricks.delta.autoCompact.minNumFiles", "2")
    if behind:  # as by a Delta that lets the table decide
        monkeypatch.setattr(Applier, "_session", lambda _: session)
    else:
        monkeypatch.setattr("headwater.apply.applier.for_thread", lambda _: session)
    twins = make_twins(spark, tmp_path, "bigint", seed=25)
    spark.sql(f"alter table delta.`{twins.merged}` set tblproperties ('delta.autoOptimize.autoCompact' = 'true')")
    noted = []
    for number in (1, 2, 3):
        changes = inserts(twins, number)
        twins.lsn += 1
        plan = replace(twins.plan(twins.merged, changes, "append"), by_engine="a test")
        applied = twins.applier.commit(plan)
        assert applied.version == plan.version + 1
        noted += [applied.noted] if applied.noted else []
    assert by_delta_rs(twins.merged) == twins.expected()
    operations = [one["operation"] for one in DeltaTable(str(twins.merged)).history()]
    assert ("OPTIMIZE" in operations) == behind
    assert [text.split(" at ")[0] for text in noted] == ["OPTIMIZE"] * operations.count("OPTIMIZE")


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
        direct = twins.write(inserts(twins, *numbers))
        assert (direct.apply_path, direct.divergence) == ("append", 0)
        path, because = path_of(twins.direct)
        assert path == "append"
        assert proof in because
        twins.assert_as_the_model(merged=False)
    # What was appended without a look is found by the next ones.
    changed = {number: twins.row(number) for number in (70, 81)}
    twins.model |= changed
    direct = twins.write(twins.changes(list(changed.values()), [True] * 2, [False] * 2, [None] * 2, []))
    assert (direct.apply_path, direct.divergence) == ("", 0)
    assert path_of(twins.direct)[0] == "positional"
    twins.assert_as_the_model(spark, merged=False)


def test_an_insert_of_a_stored_key_is_never_appended(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=23)
    twins.fill(inserts(twins, 60, 70))
    before = by_delta_rs(twins.direct)
    lie = twins.changes([twins.row(70)], [False], [False], [None], [])
    twins.contradicted(lie, 1)
    assert by_delta_rs(twins.direct) == before
    # Without statistics nothing is proved by them.
    folder = str(twins.direct)
    files = delta_log.read_snapshot(folder).files.values()
    version = DeltaTable(folder).version() + 1
    silent = [delta_log.add(replace(f, stats=f'{{"numRecords": {f.rows}}}'), data=False) for f in files]
    delta_log.commit(folder, version, [*(delta_log.remove(f, data=False) for f in files), *silent])
    twins.write(inserts(twins, 95))
    assert "index" in path_of(twins.direct)[1]
