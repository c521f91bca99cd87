"""`cluster_by` of the pipeline file: loads, reloads and rebuilds lay the rows of a table out along it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from fixtures.jobs import (
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_path_of,
    load_tables,
    record_of,
    until,
)
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater import failpoints
from headwater.delta import clustering
from headwater.delta import new_files as partitioned_write
from headwater.delta.delta_log import DataFile, read_snapshot
from headwater.errors import Refused
from headwater.failpoints import InjectedFailure
from headwater.gate.check import check
from headwater.load import copy as table_copy
from headwater.load import one_table as table_load
from headwater.load import ordering, stretches, units
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.rebuild import rebuild
from headwater.reload.reload import reload
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

NAME = "public.orders"
TABLE = TableName("public", "orders")


@dataclass
class Shop:
    folder: Path
    database: Database
    pipeline: Pipeline

    def declare(self, **entry: Any) -> Pipeline:
        """The pipeline file says this of the table from now on."""
        self.pipeline = write_pipeline(self.folder, self.database, {"name": NAME, **entry})
        return self.pipeline

    @property
    def path(self) -> str:
        return lake_path_of(self.pipeline, NAME)

    def clustered_by(self) -> tuple[str, ...]:
        return clustering.clustered_by(read_snapshot(self.path))

    def run(self) -> list[DataFile]:
        """The files of the table, which are of one run."""
        files = list(read_snapshot(self.path).files.values())
        assert len({clustering.run_of(file.name) for file in files}) == 1, files
        assert clustering.run_of(files[0].name)
        return files

    def spans(self, column: str) -> list[tuple[Any, Any]]:
        """The least and the greatest value of `column` in each file, in order."""
        found = []
        for file in self.run():
            values = [value for value in pq.read_table(file.in_folder(self.path))[column].to_pylist() if value]
            found.append((min(values), max(values)))
        return sorted(found)

    def rebuild(self) -> dict[str, Any]:
        table: dict[str, Any] = rebuild(self.pipeline, TABLE)["tables"][NAME]
        return table

    def assert_equal(self) -> None:
        assert_equal(self.database, self.pipeline, NAME)


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> Shop:
    """Its rows are in disorder but for their keys; 24 pages of them."""
    database.allow_publishing()
    database.execute(
        "create table orders (id int primary key, region text, day date, amount numeric(8, 2), note text not null)"
        " with (autovacuum_enabled = off)",
        "insert into orders select i, (array['eu', 'us', null, 'jp'])[1 + i % 4],"
        " date '2024-01-01' + (i * 7919) % 365, i, repeat(chr(97 + i % 26), 1000) from generate_series(0, 167) i",
    )
    return Shop(tmp_path, database, write_pipeline(tmp_path, database, NAME))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is large: six stretches of four pages, files and sorted stretches of some kilobytes."""
    monkeypatch.setattr(units, "PAGES_PER_UNIT", 2)
    monkeypatch.setattr(stretches, "UNITS_PER_STRETCH", 2)
    for module in (table_copy, table_load):
        monkeypatch.setattr(module, "BYTES_PER_PLAIN_UNIT", 2 * 8192)
    monkeypatch.setattr(ordering, "_STRETCH_BYTES", 4 << 10)


def _in_order(spans: list[tuple[Any, Any]]) -> bool:
    return all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_small_table_is_laid_out_at_its_load_and_goes_on(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustering, "_SLICE", 20)
    monkeypatch.setattr(partitioned_write, "_RUN_FILE_BYTES", 20_000)
    shop.declare(cluster_by=["day"])
    load_tables(shop.pipeline)
    assert len(shop.run()) > 3
    assert _in_order(shop.spans("day"))
    known = spark.sql(f"describe detail delta.`{shop.path}`").collect()[0]
    assert known["clusteringColumns"] == ["day"]
    shop.database.execute("update orders set day = day + 1 where id < 9", "delete from orders where id = 20")
    catch_up(shop.pipeline)
    shop.assert_equal()
    found = verify(shop.pipeline, [TABLE])["tables"][NAME]
    assert (found["compared"], found["missing"], found["extra"], found["different"]) == (True, 0, 0, 0)


@pytest.mark.usefixtures("small")
def test_a_large_table_is_laid_out_by_spark_and_its_stretches_outlive_a_failure(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.declare(cluster_by=["day"])
    failpoints._reached.clear()
    monkeypatch.setenv("HEADWATER_FAILPOINT", "load.after_ordering=fail")
    with pytest.raises(InjectedFailure):
        load_tables(shop.pipeline)
    monkeypatch.delenv("HEADWATER_FAILPOINT")
    assert not read_snapshot(shop.path).files
    assert load_tables(shop.pipeline)["tables"][NAME]["rows"] == 168
    assert len(shop.run()) > 3
    assert _in_order(shop.spans("day"))
    assert spark.read.format("delta").load(shop.path).where("day = '2024-02-01'").count() == len(
        shop.database.query("select from orders where day = '2024-02-01'")
    )
    catch_up(shop.pipeline)
    shop.assert_equal()


@pytest.mark.usefixtures("small")
def test_several_columns_are_all_of_use(shop: Shop, spark: SparkSession) -> None:
    """Neither column decides alone: each query by either of them leaves files unread."""
    shop.declare(cluster_by=["region", "day"])
    load_tables(shop.pipeline)
    files = shop.run()
    assert len(files) > 3
    table = spark.read.format("delta").load(shop.path)
    whole = table.count()
    assert whole == 168
    for column, value in (("region", "jp"), ("day", "2024-12-01")):
        held = [
            sum(str(found) == value for found in pq.read_table(file.in_folder(shop.path))[column].to_pylist())
            for file in files
        ]
        assert table.where(f"{column} = '{value}'").count() == sum(held)
        spans = [
            (min(texts), max(texts))
            for file in files
            if (texts := [str(v) for v in pq.read_table(file.in_folder(shop.path))[column].to_pylist() if v])
        ]
        assert sum(low <= value <= high for low, high in spans) < len(files), column
    catch_up(shop.pipeline)
    shop.assert_equal()


def test_names_that_delta_maps_are_clustered_as_others_are(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute(
        'create table orders (id int primary key, "order day" date)',
        "insert into orders select i, date '2024-01-01' + i % 50 from generate_series(1, 200) i",
    )
    shop = Shop(tmp_path, database, write_pipeline(tmp_path, database, NAME))
    shop.declare(cluster_by=['"order day"', "id"])
    for again in (False, True):
        load_tables(shop.pipeline, again=again)
        known = spark.sql(f"describe detail delta.`{shop.path}`").collect()[0]
        assert known["clusteringColumns"] == ["`order day`", "id"]
        assert shop.run()
    database.execute("update orders set \"order day\" = '2030-01-01' where id < 20")
    catch_up(shop.pipeline)
    shop.assert_equal()


@pytest.mark.usefixtures("small")
def test_a_live_table_is_clustered_anew_and_not_any_more(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned_write, "_RUN_FILE_BYTES", 20_000)
    load_tables(shop.pipeline)
    assert shop.clustered_by() == ()
    with following(shop.pipeline) as running:
        until(lambda: running.done() or _is_driven(shop), "the driver reads the log")
        shop.declare(cluster_by=["day"])
        (warned,) = [p for p in check(shop.pipeline).problems if p.code == "option_waits_for_rebuild"]
        assert "cluster_by" in warned.message
        done = shop.rebuild()
        assert (done["changed"], done["read_from"]) == (["cluster_by"], "lake")
        assert shop.clustered_by() == ("day",)
        assert _in_order(shop.spans("day"))
        shop.database.execute("update orders set amount = 1, day = '2025-01-01' where id < 30")
        # From the source, for another type.
        shop.declare(cluster_by=["region"], types={"amount": "string"})
        done = shop.rebuild()
        assert done["read_from"] == "source"
        assert shop.clustered_by() == ("region",)
        shop.declare(types={"amount": "string"}, partition_by=["region"])
        assert shop.rebuild()["changed"] == ["partition_by", "cluster_by"]
        assert shop.clustered_by() == ()
        assert list(DeltaTable(shop.path).metadata().partition_columns) == ["region"]
        shop.declare(types={"amount": "string"}, cluster_by=["region", "id"])
        shop.rebuild()
        assert shop.clustered_by() == ("region", "id")
        shop.database.execute("delete from orders where id > 150")
        until(lambda: running.done() or _rows(shop) == 151, "it goes on")
    catch_up(shop.pipeline)
    assert _rows(shop) == 151
    found = verify(shop.pipeline, [TABLE])["tables"][NAME]
    assert (found["compared"], found["missing"], found["extra"], found["different"]) == (True, 0, 0, 0)
    assert shop.rebuild()["changed"] == []


def _is_driven(shop: Shop) -> bool:
    return shop.database.query(
        "select count(*) from pg_replication_slots where active and database = current_database()"
    ) == [(1,)]


def _rows(shop: Shop) -> int:
    return sum((file.rows or 0) - file.deleted for file in read_snapshot(shop.path).files.values())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("reader", ["here", "by Spark"])
def test_a_reload_lays_the_table_out_anew(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, reader: str
) -> None:
    if reader == "by Spark":
        request.getfixturevalue("reloads_by_spark")
    monkeypatch.setattr(partitioned_write, "_RUN_FILE_BYTES", 20_000)
    shop.declare(cluster_by=["day"])
    load_tables(shop.pipeline)
    before = len(shop.run())
    with following(shop.pipeline) as running:
        for number in range(5):
            shop.database.execute(f"update orders set day = day + 100 where id % 11 = {number}")
        until(lambda: running.done() or len(read_snapshot(shop.path).files) > before, "the driver follows")
        job = in_thread(lambda: reload(shop.pipeline, TABLE))
        job.result(120)
        assert _in_order(shop.spans("day"))
    catch_up(shop.pipeline)
    shop.assert_equal()


def test_a_load_anew_takes_what_the_file_says_by_now(shop: Shop) -> None:
    shop.declare(cluster_by=["day"])
    load_tables(shop.pipeline)
    shop.declare()
    load_tables(shop.pipeline, again=True)
    assert shop.clustered_by() == ()
    assert record_of(shop.pipeline, NAME).schema.cluster_by == ()
    shop.declare(cluster_by=["id", "day"])
    load_tables(shop.pipeline, again=True)
    assert shop.clustered_by() == ("id", "day")
    shop.declare(partition_by=["region"])
    load_tables(shop.pipeline, again=True)
    assert shop.clustered_by() == ()
    shop.declare(cluster_by=["region"])
    load_tables(shop.pipeline, again=True)
    assert shop.clustered_by() == ("region",)
    catch_up(shop.pipeline)
    shop.assert_equal()


def test_what_cannot_be_clustered_by_is_said_before_anything_is_loaded(database: Database, tmp_path: Path) -> None:
    database.allow_publishing()
    many = ", ".join(f"c{number} int" for number in range(40))
    database.execute(f"create table orders (id int primary key, amount numeric(8, 2), {many})")
    shop = Shop(tmp_path, database, write_pipeline(tmp_path, database, NAME))
    shop.declare(cluster_by=["amount", "c39", "nowhere", "c0"])
    found = [(p.code, p.message) for p in check(shop.pipeline).problems if "cluster_by" in p.message]
    assert [code for code, _ in found] == ["unknown_column", "cluster_by_column", "cluster_by_column"]
    assert "cluster_by amount: files do not say which values of type" in found[1][1]
    assert "cluster_by c39: files say which values they hold of the first 32 columns only" in found[2][1]
    with pytest.raises(Refused, match="cluster_by"):
        load_tables(shop.pipeline)
    shop.declare(cluster_by=["c0"], columns={"exclude": ["c0"]})
    (problem,) = [p for p in check(shop.pipeline).problems if "cluster_by" in p.message]
    assert "the column is not replicated" in problem.message
