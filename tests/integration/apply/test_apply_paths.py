"""The direct paths against Delta's MERGE: the same random batches on twin tables leave the same rows and say the same.

After every batch the directly written table is read by two other engines, delta-rs and Polars, and in the end by Spark.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.functions import col

from fixtures.twins import (
    APP,
    FENCE,
    KEEP_CUTS,
    KEYS,
    by_delta_rs,
    make_twins,
    normal,
    on_disk,
)
from fixtures.waiting import until
from headwater.apply import small_files as upkeep
from headwater.apply import whole_table
from headwater.apply.applier import Applier
from headwater.apply.by_spark import optimize as compaction
from headwater.apply.direct import Fence
from headwater.apply.plan import ApplyPath, PlanAgain
from headwater.apply.small_files import Rewritten, Upkeep, rewrite
from headwater.delta import delta_log
from headwater.delta import new_files as partitioned_write
from headwater.delta.index import written_keys
from headwater.delta.log_entries import read_actions
from headwater.delta.tables import create
from headwater.errors import BadValue, Diverged, Fenced, ForeignWrite
from headwater.log.net.on_disk import PartsOnDisk
from headwater.log.spill import SpillStore
from headwater.net_changes import NetChanges
from headwater.predicate import Compared, Every, OneOf
from headwater.schema import PARTITION_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("kind", KEYS)
def test_the_same_batches_leave_the_same_rows_for_every_reader(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    twins = make_twins(spark, tmp_path, kind, seed=random.randrange(1 << 30))
    for _ in range(3):
        direct, merged = twins.apply(twins.batch())
        assert (direct.divergence, merged.divergence) == (0, 0), (direct, merged)
        twins.assert_as_the_model()
    twins.assert_as_the_model(spark)


@pytest.mark.parametrize("policy", ["suspend", "report", "repair"])
def test_rows_that_contradict_the_log_come_to_the_same_on_both_ways(
    spark: SparkSession, tmp_path: Path, policy: str
) -> None:
    twins = make_twins(spark, tmp_path, "two integers", seed=random.randrange(1 << 30), on_divergence=policy)
    twins.fill(twins.batch())
    for text in twins.contradicted(twins.batch(lies=True)):
        for said in ("update met no row at key (", "insert met a row at key (", "delete met no row at key ("):
            assert said in text
    assert by_delta_rs(twins.direct) == by_delta_rs(twins.merged)


@pytest.mark.parametrize("policy", ["suspend", "repair"])
def test_a_net_effect_in_parts_on_disk_comes_to_the_same_on_both_ways(
    spark: SparkSession, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned_write, "_FILE_BYTES", 100)
    monkeypatch.setattr(written_keys, "_IN_MEMORY", 10)
    twins = make_twins(spark, tmp_path, "text and date", seed=random.randrange(1 << 30), on_divergence=policy)
    spill = tmp_path / "spill"
    spill.mkdir()
    twins.fill(twins.batch())
    direct, merged = twins.apply(on_disk(twins.batch(), spill, 3))
    assert (direct.divergence, merged.divergence) == (0, 0), (direct, merged)
    twins.assert_as_the_model()
    version = DeltaTable(str(twins.direct)).version()
    added = [action["add"] for action in read_actions(str(twins.direct), version) or [] if "add" in action]
    assert len([add for add in added if "deletionVector" not in add]) > 1, "several files, and one commit"
    twins.contradicted(on_disk(twins.batch(lies=True), spill, 3))
    assert by_delta_rs(twins.direct) == by_delta_rs(twins.merged)
    twins.model.clear()
    twins.apply(on_disk(replace(twins.batch(), truncated=True), spill, 2), "replace")
    twins.assert_as_the_model()
    direct = twins.write(twins.batch())
    assert direct.divergence == 0, "the index knows where the rows of all parts are"
    twins.assert_as_the_model(spark, merged=False)
    gc.collect()
    assert not list(spill.iterdir()), "files of the parts go with the last reference"


def test_files_of_a_plan_that_lost_its_race_are_removed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned_write, "_FILE_BYTES", 500)
    twins = make_twins(spark, tmp_path, "bigint", seed=12)
    twins.write(twins.batch())
    files = sorted(path.name for path in twins.direct.iterdir())
    twins.lsn += 1
    late = twins.plan(twins.direct, on_disk(twins.batch(), tmp_path, 3), "positional")
    first = late.changes.on_disk

    class Overtaken(PartsOnDisk):
        def __iter__(self) -> Iterator[NetChanges]:
            assert first is not None
            yield from first
            delta_log.commit(
                str(twins.direct), late.version + 1, [delta_log.commit_info("NOTHING", {}, {}, late.version)]
            )

    changes = replace(late.changes, on_disk=Overtaken(SpillStore(str(tmp_path), 1)))
    with pytest.raises(PlanAgain):
        twins.applier.commit(replace(late, changes=changes))
    assert sorted(path.name for path in twins.direct.iterdir()) == files


def test_a_row_without_its_large_value_is_not_repaired_into_a_wrong_one(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=1, on_divergence="repair")
    changes = twins.changes([{**twins.row(5), "big": None}], [True], [True], [None], [])
    paths: list[tuple[Path, ApplyPath]] = [(twins.direct, "positional"), (twins.merged, "merge")]
    for folder, path in paths:
        plan = twins.plan(folder, changes, path)
        with pytest.raises(Diverged, match="cannot all be repaired"):
            twins.applier.commit(plan)
        assert DeltaTable(str(folder)).version() == 0


def test_a_truncate_leaves_what_was_written_after_it(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "uuid", seed=2)
    twins.fill(twins.batch())
    twins.model.clear()
    twins.apply(replace(twins.batch(), truncated=True), "replace")
    twins.assert_as_the_model()
    twins.write(twins.batch())
    twins.assert_as_the_model(spark, merged=False)


@pytest.mark.parametrize("parts", [0, 3])
def test_rows_of_a_predicate_are_replaced_alike_on_both_ways(spark: SparkSession, tmp_path: Path, parts: int) -> None:
    """As a reload puts them: those of the predicate that are not put go, and what is put may stand anywhere."""
    chance = random.Random(random.randrange(1 << 30))
    twins = make_twins(spark, tmp_path, "two integers", chance.randrange(1 << 30), "repair", ("level",))
    for _ in range(2):
        twins.fill(twins.batch())
    predicate = Every((Compared("order_id", "<=", 4), OneOf("level", (0, 7))))
    mine = [n for n, row in twins.model.items() if n // 7 - 3 <= 4 and row["level"] in (0, 7)]
    others = sorted(set(range(twins.universe)) - set(mine))
    put = {n: twins.row(n) for n in (*chance.sample(mine, len(mine) // 2), *chance.sample(others, 4))}
    keep = [n in twins.model and chance.random() < 0.5 for n in put]
    rows = [{**row, "big": None} if kept else row for row, kept in zip(put.values(), keep, strict=True)]
    changes = twins.changes(rows, [False] * len(put), keep, [None] * len(put), [])
    if parts:
        changes = replace(on_disk(changes, tmp_path, parts), rows=changes.rows.slice(0, 0))
    before = twins.model
    twins.model = {n: row for n, row in before.items() if n not in mine} | {
        n: {**row, "big": before[n]["big"]} if kept else row for (n, row), kept in zip(put.items(), keep, strict=True)
    }
    direct, _ = twins.apply(replace(changes, replaced=predicate))
    assert direct.gone == len(before.keys() & {*mine, *put})
    twins.assert_as_the_model(spark)


def test_another_commit_in_between_is_never_written_over(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=3)
    twins.write(twins.batch())
    twins.lsn += 1
    late = twins.plan(twins.direct, twins.batch(), "positional")
    spark.sql(f"delete from delta.`{twins.direct}` where true")
    version = DeltaTable(str(twins.direct)).version()
    files = sorted(path.name for path in twins.direct.glob("*.parquet"))
    with pytest.raises(PlanAgain):
        twins.applier.commit(late)
    assert DeltaTable(str(twins.direct)).version() == version
    assert sorted(path.name for path in twins.direct.glob("*.parquet")) == files, "nothing of the late one is left"


def test_files_that_another_rearranged_are_found_again(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "uuid", seed=4)
    for _ in range(3):
        twins.write(twins.batch())
    spark.sql(f"optimize delta.`{twins.direct}`")
    for _ in range(2):
        assert twins.write(twins.batch()).divergence == 0
    twins.assert_as_the_model(spark, merged=False)


def test_upkeep_bounds_the_files_and_keeps_every_row_while_batches_go_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_REST", 0.0)  # a slow round would be followed by a long rest
    twins = make_twins(spark, tmp_path, "uuid", seed=random.randrange(1 << 30))
    twins.universe = 1000  # so many that few files lose all their rows
    path, most = str(twins.direct), 0
    for _ in range(120):
        twins.lsn += 1
        version = twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional")).version
        twins.applier.keep_up(path, twins.schema, version)
        assert by_delta_rs(twins.direct) == twins.expected()
        most = max(most, len(delta_log.read_snapshot(path).files))
    # Enough of a tier are made into one as soon as the thread beside the writer gets to it.
    assert most <= 48
    operations = [commit["operation"] for commit in DeltaTable(path).history()]
    assert "OPTIMIZE" in operations
    assert spark.read.format("delta").load(path).count() == len(twins.model)
    # Made beside the writer, of the version that is the newest when its turn comes.
    log = twins.direct / "_delta_log"
    until(lambda: list(log.glob("*.checkpoint.parquet")), "the checkpoint is there")
    assert min(int(file.name[:20]) for file in log.glob("*.checkpoint.parquet")) >= 100


@pytest.mark.parametrize("kind", ["bigint", "text and date"])
def test_rows_deleted_while_their_files_are_rewritten_stay_deleted(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    twins = make_twins(spark, tmp_path, kind, seed=random.randrange(1 << 30))
    twins.universe = 3000  # else a file may lose all its rows, and nothing is committed (2 % of seeds at 700)
    for _ in range(20):
        twins.lsn += 1
        twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional"))
    path = str(twins.direct)
    state = twins.applier._states[path]
    upkeep = Upkeep(Fence(FENCE, 1))
    sources = [(file, state.deleted_rows(file.name)) for file in state.snapshot.files.values()]
    rewritten: Future[list[Rewritten]] = Future()
    rewritten.set_result([rewrite(path, twins.schema, state.snapshot.metadata, sources, "a test", lambda: None)])
    for _ in range(6):
        twins.lsn += 1
        twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional"))
    upkeep.finish(path, state, rewritten)
    assert DeltaTable(path).history(1)[0]["operation"] == "OPTIMIZE"
    assert by_delta_rs(twins.direct) == twins.expected()
    for _ in range(3):
        twins.lsn += 1
        assert twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional")).divergence == 0
        assert by_delta_rs(twins.direct) == twins.expected()
    upkeep.close()


def test_tables_that_spark_writes_are_compacted_between_two_batches(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_LOOK_EVERY", 2)
    monkeypatch.setattr(compaction, "_ENOUGH_BESIDE", 3)
    twins = make_twins(spark, tmp_path, "bigint", seed=random.randrange(1 << 30))
    path = str(twins.merged)
    spark.sql(f"alter table delta.`{path}` set tblproperties ('delta.enableChangeDataFeed' = 'true')")
    again = 0
    for _ in range(7):
        twins.lsn += 1
        changes = twins.batch()
        plan = replace(
            twins.plan(twins.merged, changes, "merge"), by_engine=twins.applier.why_by_engine(*twins.at(path))
        )
        try:
            applied = twins.applier.commit(plan)
        except PlanAgain:  # an OPTIMIZE came to its end in our turn
            again += 1
            applied = twins.applier.commit(replace(plan, version=DeltaTable(path).version()))
        assert applied.noted == ""
        assert twins.applier.keep_up(path, twins.schema, applied.version) == applied.version
    twins.applier.close()
    assert again
    rounds = [commit["operationMetrics"] for commit in DeltaTable(path).history() if commit["operation"] == "OPTIMIZE"]
    assert len(rounds) >= again
    assert all(int(of["numRemovedFiles"]) > int(of["numAddedFiles"]) for of in rounds), rounds
    rows = spark.read.format("delta").load(path).toArrow().to_pylist()
    assert sorted(repr(normal(row)) for row in rows) == twins.expected()


def test_a_table_that_a_newer_driver_has_written_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=5)
    twins.write(twins.batch())
    newer = Applier(lambda: spark, Fence(FENCE, 2))
    twins.lsn += 1
    newer.commit(twins.plan(twins.direct, twins.batch(), "positional"))
    twins.lsn += 1
    with pytest.raises(Fenced, match="generation 2"):
        twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional"))


def test_a_position_that_the_table_has_passed_is_not_applied_again(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=6)
    twins.write(twins.batch())
    with pytest.raises(PlanAgain):
        twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional"))


def test_a_checkpoint_holds_the_vectors_and_every_reader_goes_on_from_it(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=7)
    for _ in range(3):
        twins.write(twins.batch())
    DeltaTable(str(twins.direct)).create_checkpoint()
    log = twins.direct / "_delta_log"
    for number in range(3):
        (log / f"{number:020d}.json").unlink()  # nothing but the checkpoint tells of these versions now
    twins.applier = Applier(lambda: spark, Fence(FENCE, 1))
    assert twins.write(twins.batch()).divergence == 0
    twins.assert_as_the_model(spark, merged=False)
    snapshot = delta_log.read_snapshot(str(twins.direct))
    assert snapshot.transactions == {APP: twins.lsn, FENCE: 1}


def test_a_table_whose_features_are_not_known_here_is_left_to_delta(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=8)
    assert twins.applier.why_by_engine(twins.record, str(twins.direct), 0) == ""
    spark.sql(f"alter table delta.`{twins.direct}` set tblproperties ('delta.enableChangeDataFeed' = 'true')")
    assert "changeDataFeed" in twins.applier.why_by_engine(twins.record, str(twins.direct), 1)


def test_a_table_is_marked_with_the_generation_even_by_a_batch_that_comes_to_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=9)
    folder, nothing = str(twins.direct), twins.changes([], [], [], [], [])
    late = twins.plan(twins.direct, twins.batch(), "positional")
    successor = Applier(lambda: spark, Fence(FENCE, 2))
    assert successor.lacks_mark(twins.record, folder, 0)
    twins.lsn += 1
    assert successor.commit(twins.plan(twins.direct, nothing, "append")).version == 1
    assert not successor.lacks_mark(twins.record, folder, 1)
    with pytest.raises(PlanAgain):
        twins.applier.commit(late)
    assert by_delta_rs(twins.direct) == []


def test_a_missing_file_is_this_tables_trouble_and_has_a_name(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=10)
    twins.write(twins.batch())
    for file in twins.direct.glob("*.parquet"):
        file.unlink()
    twins.applier = Applier(lambda: spark, Fence(FENCE, 1))
    twins.lsn += 1
    with pytest.raises(ForeignWrite, match=r"missing or damaged.*public\.t|public\.t.*missing or damaged"):
        twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional"))


def test_rows_are_counted_in_the_file_where_statistics_do_not_tell(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=11)
    twins.write(twins.batch())
    folder = str(twins.direct)
    (file,) = delta_log.read_snapshot(folder).files.values()
    silent = [delta_log.remove(file, data=False), delta_log.add(replace(file, stats=None), data=False)]
    delta_log.commit(folder, 2, silent)
    assert twins.applier.why_by_engine(twins.record, folder, 2) == ""
    assert twins.write(twins.batch()).divergence == 0
    twins.assert_as_the_model(spark, merged=False)


@pytest.mark.parametrize(
    ("kind", "partition_by"),
    [
        ("bigint", ("region",)),
        ("uuid", ("day", "local")),
        ("two integers", ("since",)),
        ("bigint", ("price", "open")),
        ("text and date", ("day", "level")),
        ("two integers", ("line",)),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_a_table_that_is_partitioned_by_columns_comes_out_as_by_merge(
    spark: SparkSession, tmp_path: Path, kind: str, partition_by: tuple[str, ...]
) -> None:
    twins = make_twins(spark, tmp_path, kind, seed=random.randrange(1 << 30), partition_by=partition_by)
    for _ in range(2):
        direct, merged = twins.apply(twins.batch())
        assert (direct.divergence, merged.divergence) == (0, 0), (direct, merged)
        twins.assert_as_the_model()
    twins.assert_as_the_model(spark)
    files = {folder: delta_log.read_snapshot(str(folder)).files.values() for folder in (twins.direct, twins.merged)}
    values = {
        folder: {tuple(sorted(file.partition_values.items(), key=str)) for file in of} for folder, of in files.items()
    }
    assert values[twins.direct] <= values[twins.merged], "the same texts as Spark writes"
    for file in files[twins.direct]:
        stored = pq.read_schema(file.in_folder(str(twins.direct))).names
        assert set(stored) == {c.name for c in twins.schema.columns} - set(partition_by)
    by_folder = {folder: {str(Path(file.path).parent) for file in of} for folder, of in files.items()}
    assert by_folder[twins.direct] <= by_folder[twins.merged], "folders named as Spark names them"


def test_one_partition_is_pruned_to_by_every_reader(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=12, partition_by=("region",))
    for _ in range(3):
        twins.write(twins.batch())
    wanted = "eu"  # Polars 2.1 leaves out the deletion vector of a file whose path is escaped in the log
    expected = sorted(row["id"] for row in twins.model.values() if row["region"] == wanted)
    assert expected
    folder = str(twins.direct)
    by_spark = spark.read.format("delta").load(folder).where(col("`region`") == wanted)
    assert sorted(row["id"] for row in by_spark.collect()) == expected
    assert len(by_spark.inputFiles()) < len(delta_log.read_snapshot(folder).files)
    rows = polars.scan_delta(folder).filter(polars.col("region") == wanted).collect()
    assert sorted(rows["id"].to_list()) == expected


@pytest.mark.parametrize("partition_by", [("code",), ()], ids=["partitions", "statistics"])
def test_a_merge_opens_no_file_that_its_keys_cannot_lie_in(
    spark: SparkSession, tmp_path: Path, partition_by: tuple[str, ...]
) -> None:
    twins = make_twins(spark, tmp_path, "text and date", seed=14, partition_by=partition_by)
    numbers = [n for n in range(50) if n % 5 in (1, 3)]  # codes c1 and c3
    for code in (1, 3):
        mine = [n for n in numbers if n % 5 == code]
        rows = [twins.row(n) for n in mine]
        twins.apply(twins.changes(rows, [False] * len(mine), [False] * len(mine), [None] * len(mine), []), "append")
    gone = [
        file for file in twins.merged.rglob("*.parquet") if "_delta_log" not in file.parts and _code_of(file) == "c3"
    ]
    assert len(gone) == 1
    gone[0].rename(tmp_path / "away")
    mine = [n for n in numbers if n % 5 == 1]
    rows = [twins.row(n) for n in mine[:4]]
    changes = twins.changes(rows, [True] * 4, [False] * 4, [None] * 4, [twins.key(mine[5])])
    twins.lsn += 1
    plan = replace(twins.plan(twins.merged, changes, "merge"), by_engine="it shall be")
    assert twins.applier.commit(plan).divergence == 0
    (tmp_path / "away").rename(gone[0])
    assert len(by_delta_rs(twins.merged)) == len(numbers) - 1


def _code_of(file: Path) -> str:
    """The one code that all rows of `file` have."""
    (code,) = set(pq.read_table(file, partitioning="hive")["code"].to_pylist())
    return str(code)


def test_a_value_too_long_for_the_name_of_a_folder_is_a_bad_value(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=13, partition_by=("region",))
    rows = [{**twins.row(number), "region": value} for number, value in enumerate(["eu", "ä" * 200])]
    with pytest.raises(BadValue, match="region is too long"):
        twins.applier.commit(
            twins.plan(twins.direct, twins.changes(rows, [False] * 2, [False] * 2, [None] * 2, []), "append")
        )
    assert not list(twins.direct.rglob("*.parquet")), "nothing of it is left"


def test_upkeep_gathers_files_of_one_partition_only(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_TIERS", ((256 << 10, 2),))
    twins = make_twins(spark, tmp_path, "bigint", seed=random.randrange(1 << 30), partition_by=("region", "level"))
    path = str(twins.direct)
    for _ in range(100):
        twins.lsn += 1
        version = twins.applier.commit(twins.plan(twins.direct, twins.batch(), "positional")).version
        twins.applier.keep_up(path, twins.schema, version)
    assert by_delta_rs(twins.direct) == twins.expected()
    rounds = [commit for commit in DeltaTable(path).history() if commit["operation"] == "OPTIMIZE"]
    assert rounds
    assert len(delta_log.read_snapshot(path).files) < 150
    assert spark.read.format("delta").load(path).count() == len(twins.model)


def test_truncated_leaves_are_emptied_as_by_merge(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "two integers", seed=random.randrange(1 << 30))
    partitioned = replace(twins.schema, partitioned=True)
    twins.record = replace(twins.record, schemas=((0, partitioned),))
    for name in ("direct", "merged"):
        folder = tmp_path / "leaves" / name
        whole_table.create(str(folder), partitioned, KEEP_CUTS)
        setattr(twins, name, folder)
    leaf_of = {number: 11 + number % 3 for number in range(twins.universe)}

    def with_leaves(changes: NetChanges, numbers: list[int]) -> NetChanges:
        leaves = pa.array([leaf_of[number] for number in numbers], pa.int64())
        rows = (
            changes.rows.drop_columns([PARTITION_COLUMN])
            if PARTITION_COLUMN in changes.rows.column_names
            else changes.rows
        )
        return replace(changes, rows=rows.append_column(PARTITION_COLUMN, leaves))

    def numbers_in(changes: NetChanges) -> list[int]:
        by_key = {twins.key(number): number for number in range(twins.universe)}
        return [by_key[row["order_id"], row["line"]] for row in changes.rows.select(["order_id", "line"]).to_pylist()]

    def follow(changes: NetChanges) -> None:
        for number, row in twins.model.items():
            twins.model[number] = {**row, PARTITION_COLUMN: row.get(PARTITION_COLUMN, leaf_of[number])}

    for put in (twins.fill, twins.apply):
        changes = twins.batch()
        put(with_leaves(changes, numbers_in(changes)))
        follow(changes)
        twins.assert_as_the_model()
    # Emptied: leaf 11, and a leaf that holds nothing. Some of its keys come anew, one of them into another leaf.
    emptied = [number for number in twins.model if leaf_of[number] == 11]
    for number in emptied:
        del twins.model[number]
    again = emptied[:3]
    leaf_of[again[0]] = 12
    rows = [twins.row(number) for number in again]
    twins.model.update(
        {number: {**row, PARTITION_COLUMN: leaf_of[number]} for number, row in zip(again, rows, strict=True)}
    )
    changes = with_leaves(twins.changes(rows, [False] * 3, [False] * 3, [None] * 3, []), again)
    direct, merged = twins.apply(replace(changes, truncated_leaves=(11, 99)))
    assert (direct.divergence, merged.divergence) == (0, 0)
    twins.assert_as_the_model(spark)
    # A row that comes in the place of a truncated one contradicts nothing, any other one as ever.
    gone = next(number for number in range(twins.universe) if number not in twins.model)
    numbers = [again[0], gone, next(number for number in twins.model if leaf_of[number] == 13)]
    rows = [twins.row(number) for number in numbers]
    lies = with_leaves(twins.changes(rows, [False, True, False], [False] * 3, [None] * 3, []), numbers)
    for text in twins.contradicted(replace(lies, truncated_leaves=(13,)), 2):
        assert "insert met a row at key (" in text
        assert "update met no row at key (" in text


def test_names_that_need_column_mapping_are_physical_ones_in_the_files(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=14)
    columns = tuple(
        replace(c, name=f"the {c.name}, so called") if c.name in ("small", "at") else c for c in twins.schema.columns
    )
    renamed = {"small": "the small, so called", "at": "the at, so called"}
    schema = replace(twins.schema, columns=columns, partition_by=("the at, so called",))
    twins.record = replace(twins.record, schemas=((0, schema),))
    for name in ("direct", "merged"):
        folder = tmp_path / "mapped" / name
        create(spark, str(folder), schema)
        setattr(twins, name, folder)
    row_of = twins.row
    twins.row = lambda number: {renamed.get(name, name): value for name, value in row_of(number).items()}  # type: ignore[method-assign]
    assert twins.applier.why_by_engine(twins.record, str(twins.direct), 0) == ""
    for _ in range(2):
        direct, merged = twins.apply(twins.batch())
        assert (direct.divergence, merged.divergence) == (0, 0), (direct, merged)
        expected = twins.expected()
        for folder in (twins.direct, twins.merged):
            by_spark = spark.read.format("delta").load(str(folder)).toArrow().to_pylist()
            assert sorted(repr(normal(row)) for row in by_spark) == expected
        assert by_delta_rs(twins.direct) == expected
