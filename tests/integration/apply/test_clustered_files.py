"""Tables with `cluster_by`: how their rows lie in files while batches go on."""

from __future__ import annotations

import random
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql.functions import col

from fixtures.twins import FENCE, Twins, by_delta_rs, make_twins
from headwater.apply import clustered_files as clustered_rewrite
from headwater.apply import small_files as upkeep
from headwater.apply.direct import Fence, obstacle
from headwater.apply.small_files import Rewritten, Upkeep, rewrite
from headwater.delta import clustering, delta_log
from headwater.delta.delta_log import DataFile
from headwater.delta.small_tables import write_checkpoint
from headwater.delta.tables import cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def _rewritten(twins: Twins, work: Upkeep) -> tuple[Any, Future[list[Rewritten]]]:
    """All live files as one run, not committed yet."""
    path = str(twins.direct)
    state = twins.applier._states[path]
    sources = [(file, state.deleted_rows(file.name)) for file in state.snapshot.files.values()]
    done: Future[list[Rewritten]] = Future()
    done.set_result([rewrite(path, twins.schema, state.snapshot.metadata, sources, "a test", lambda: None)])
    return state, done


def _runs(folder: Path) -> dict[str, list[DataFile]]:
    found: dict[str, list[DataFile]] = {}
    for file in delta_log.read_snapshot(str(folder)).files.values():
        found.setdefault(clustering.run_of(file.name), []).append(file)
    return found


@pytest.mark.parametrize(
    ("kind", "cluster_by"),
    [
        ("bigint", ("region",)),
        ("uuid", ("day", "local")),
        ("two integers", ("since", "level", "line")),
        ("text and date", ("code", "day", "level", "region")),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_rows_deleted_while_a_run_is_written_stay_deleted(
    spark: SparkSession, tmp_path: Path, kind: str, cluster_by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every row is found by its key afterwards, wherever the order has put it."""
    monkeypatch.setattr(clustered_rewrite, "_FILE_BYTES", 4 << 10)
    twins = make_twins(spark, tmp_path, kind, seed=random.randrange(1 << 30), cluster_by=cluster_by)
    twins.universe = 3000  # else a file may lose all its rows, and nothing is committed
    for _ in range(12):
        twins.write(twins.batch())
    work = Upkeep(Fence(FENCE, 1))
    state, done = _rewritten(twins, work)
    for _ in range(6):
        twins.write(twins.batch())
    work.finish(str(twins.direct), state, done)
    ((_, files),) = ((run, files) for run, files in _runs(twins.direct).items() if run)
    assert len(files) > 1
    assert any(file.vector for file in files), "rows went meanwhile"
    assert by_delta_rs(twins.direct) == twins.expected()
    for _ in range(3):
        assert twins.write(twins.batch()).divergence == 0
        assert by_delta_rs(twins.direct) == twins.expected()
    work.close()
    twins.assert_as_the_model(spark, merged=False)


def test_files_of_a_run_hold_what_lies_together(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reader leaves the others unread."""
    monkeypatch.setattr(clustered_rewrite, "_FILE_BYTES", 1 << 10)
    twins = make_twins(spark, tmp_path, "bigint", seed=5, cluster_by=("day",))
    for _ in range(15):
        twins.write(twins.batch())
    work = Upkeep(Fence(FENCE, 1))
    state, done = _rewritten(twins, work)
    work.finish(str(twins.direct), state, done)
    work.close()
    ((run, files),) = _runs(twins.direct).items()
    assert run
    assert len(files) > 4
    held = [set(pq.read_table(file.in_folder(str(twins.direct)))["day"].to_pylist()) for file in files]
    for day in {row["day"] for row in twins.model.values()}:
        assert sum(day in days for days in held) < len(files)
    spans = sorted((min(d for d in days if d), max(d for d in days if d)) for days in held if days - {None})
    assert all(low[1] <= high[0] for low, high in pairwise(spans)), "one order through all of them"
    wanted = next(row["day"] for row in twins.model.values() if row["day"] is not None)
    expected = sorted(row["id"] for row in twins.model.values() if row["day"] == wanted)
    # The file that this reader has to open, if it must not miss a row; the others are gone.
    for file, days in zip(files, held, strict=True):
        if not days - {None} or not min(days - {None}) <= wanted <= max(days - {None}):
            Path(file.in_folder(str(twins.direct))).unlink()
    by_spark = spark.read.format("delta").load(str(twins.direct)).where(col("day") == wanted).collect()
    assert sorted(row["id"] for row in by_spark) == expected
    rows = polars.scan_delta(str(twins.direct)).filter(polars.col("day") == wanted).collect()
    assert sorted(rows["id"].to_list()) == expected


def test_runs_are_gathered_as_files_are_and_a_file_made_anew_stays_in_its_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustered_rewrite, "_FILE_BYTES", 4 << 10)
    monkeypatch.setattr(upkeep, "_TIERS", ((8 << 10, 4), (64 << 10, 3)))
    monkeypatch.setattr(upkeep, "_REST", 0.0)  # a slow round would be followed by a long rest
    twins = make_twins(spark, tmp_path, "uuid", seed=random.randrange(1 << 30), cluster_by=("region", "level"))
    twins.universe = 3000
    path, most = str(twins.direct), 0
    for _ in range(100):
        applied = twins.write(twins.batch())
        twins.applier.keep_up(path, twins.schema, applied.version)
        most = max(most, len(_runs(twins.direct)))
    assert by_delta_rs(twins.direct) == twins.expected()
    assert most < 60
    runs = {run: files for run, files in _runs(twins.direct).items() if run}
    large = max(runs, key=lambda run: len(runs[run]))
    assert len(runs[large]) > 2
    before = runs[large][0]
    work, state = Upkeep(Fence(FENCE, 1)), twins.applier._states[path]
    sources = [(before, state.deleted_rows(before.name))]
    rewritten = rewrite(path, twins.schema, state.snapshot.metadata, sources, "a test", lambda: None)
    assert work.commit(path, state, [rewritten])
    work.close()
    assert len(_runs(twins.direct)[large]) == len(runs[large])
    assert before.name not in delta_log.read_snapshot(path).files
    assert by_delta_rs(twins.direct) == twins.expected()


def test_a_clustered_table_comes_out_as_by_merge_and_spark_may_optimize_it(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=random.randrange(1 << 30), cluster_by=("region", "day"))
    for _ in range(3):
        direct, merged = twins.apply(twins.batch())
        assert (direct.divergence, merged.divergence) == (0, 0), (direct, merged)
        twins.assert_as_the_model()
    assert direct.apply_path != "merge"
    for folder in (twins.direct, twins.merged):
        spark.sql(f"optimize delta.`{folder}`")
        known = spark.sql(f"describe detail delta.`{folder}`").collect()[0]
        assert known["clusteringColumns"] == ["region", "day"]
    twins.apply(twins.batch())
    twins.assert_as_the_model(spark)


def test_what_a_table_is_clustered_by_outlives_its_log(spark: SparkSession, tmp_path: Path) -> None:
    """A checkpoint by delta-rs, and the log before it gone."""
    twins = make_twins(spark, tmp_path, "bigint", seed=8, cluster_by=("region",))
    twins.write(twins.batch())
    folder = str(twins.direct)
    write_checkpoint(folder)
    for number in range(DeltaTable(folder).version()):
        (twins.direct / "_delta_log" / f"{number:020d}.json").unlink()
    snapshot = delta_log.read_snapshot(folder)
    assert clustering.clustered_by(snapshot) == ("region",)
    assert obstacle(snapshot) == ""


def test_delta_knows_what_a_table_is_clustered_by(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_twins(spark, tmp_path, "bigint", seed=8, cluster_by=("region",))
    twins.write(twins.batch())
    folder = str(twins.direct)
    version = DeltaTable(folder).version()
    wanted: list[tuple[str, ...]] = [("id", "big"), (), ("small",)]
    for columns in wanted:
        for _ in range(2):
            cluster(folder, columns)
        version += 1
        assert DeltaTable(folder).version() == version, "said once"
        assert clustering.clustered_by(delta_log.read_snapshot(folder)) == columns
        known = spark.sql(f"describe detail delta.`{folder}`").collect()[0]
        assert known["clusteringColumns"] == list(columns)
