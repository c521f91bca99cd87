"""Rebuilds of a live table: other partition columns, other types, while readers and replication go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from fixtures.jobs import (
    Job,
    armed,
    catch_up,
    following,
    following_next,
    in_thread,
    lake_path_of,
    lake_rows,
    load_tables,
    queried,
    record_of,
    registry_of,
    until,
)
from fixtures.lake_waits import wait
from fixtures.loaded import loaded_pipeline
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import Fence
from headwater.apply.reshape import rebuild as rebuild_in_lake
from headwater.arrow_types import lake_schema
from headwater.delta import storage
from headwater.delta.small_tables import open_table
from headwater.errors import Refused, Transient
from headwater.gate.check import check
from headwater.lake import cuts
from headwater.lake.paths import reloaded_path
from headwater.lake.registry import now_text
from headwater.lake.reload_records import Reload
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.rebuild import rebuild
from headwater.reload.reload import reload
from headwater.validate.validate import validate
from headwater.verify.verify import verify
from headwater.verify.version import Versions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

NAME = "public.orders"
TABLE = TableName("public", "orders")
COLUMNS = ["id", "region", "amount", "note"]


@dataclass
class Shop:
    folder: Path
    database: Database
    pipeline: Pipeline

    def declare(self, **entry: Any) -> Pipeline:
        """The pipeline file says this of the table from now on."""
        self.pipeline = write_pipeline(self.folder, self.database, {"name": NAME, **entry})
        return self.pipeline

    def rebuild(self) -> dict[str, Any]:
        table: dict[str, Any] = rebuild(self.pipeline, TABLE)["tables"][NAME]
        return table

    def source(self) -> list[tuple[Any, ...]]:
        return sorted(self.database.query(f"select {', '.join(COLUMNS)} from orders"), key=repr)

    def lake(self) -> list[tuple[Any, ...]]:
        return [
            (i, region, Decimal(amount) if isinstance(amount, str) else amount, note)
            for i, region, amount, note in lake_rows(self.pipeline, NAME, COLUMNS)
        ]

    def is_equal(self) -> bool:
        return sorted(self.lake(), key=repr) == self.source()

    @property
    def partitioned_by(self) -> list[str]:
        return list(DeltaTable(lake_path_of(self.pipeline, NAME)).metadata().partition_columns)

    @property
    def types(self) -> dict[str, str]:
        """Of the table's columns in the lake."""
        return {field.name: str(field.type) for field in DeltaTable(lake_path_of(self.pipeline, NAME)).schema().fields}

    def write_meanwhile(self) -> None:
        """Large values stay out of the log; a key is taken by another row; a row comes and goes."""
        self.database.execute(
            "update orders set amount = amount + 1 where id <= 20",
            "update orders set id = 5000, region = 'cn' where id = 41",
            "delete from orders where id between 21 and 30",
            "insert into orders values (25, 'eu', 2.5, 'again'), (6000, 'new', 1, 'new'), (6001, 'new', 1, 'gone')",
            "delete from orders where id = 6001",
        )


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    database.allow_publishing()
    database.execute(
        "create table orders (id int primary key, region text not null, amount numeric(8, 2), note text)",
        "alter table orders alter note set storage external",
        "insert into orders select i, (array['eu', 'us'])[1 + i % 2], i, repeat('x', 3000) || i "
        "from generate_series(1, 100) i",
    )
    made = Shop(tmp_path, database, write_pipeline(tmp_path, database, NAME))
    load_tables(made.pipeline)
    catch_up(made.pipeline)
    return made


@pytest.fixture(params=["in this process", "file by file", "by Spark"])
def each_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of a small table are read here, those of a large one by tasks: file by file, or as Spark lays them out."""
    ways = {
        "in this process": "headwater.reload.rebuild.put_few_rows",
        "file by file": "headwater.reload.row_folder.ReloadFiles.put_by",
        "by Spark": "headwater.reload.row_folder.ReloadFiles.put_again",
    }
    if request.param != "in this process":
        request.getfixturevalue("reloads_by_spark")
    if request.param == "by Spark":
        monkeypatch.setattr("headwater.reload.stored_rows.FEW_PARTITIONS", 0)
    monkeypatch.setattr("headwater.reload.stored_rows._OF_A_TASK", 1)
    monkeypatch.setattr("headwater.apply.by_spark.tasks.LARGE_BYTES", 0)
    asked, by_spark = [], FileTasks._by_spark

    def noted(self: FileTasks, work: Any, items: Any, can_wait: bool) -> Any:
        asked.append(len(items))
        made = by_spark(self, work, items, can_wait)
        assert made is not None
        return made

    monkeypatch.setattr(FileTasks, "_by_spark", noted)
    for way, place in ways.items():
        if way != request.param:
            monkeypatch.setattr(place, lambda *_, place=place: pytest.fail(f"{place} was called"))
    yield
    assert (max(asked, default=0) > 1) == (request.param == "file by file")


@pytest.mark.usefixtures("each_reader")
def test_a_live_table_is_partitioned_anew_from_its_rows_in_the_lake(
    shop: Shop, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is not read; a cut of before is read as before; what is written meanwhile is there once."""
    shop.database.execute("update orders set note = 'short' where id = 1")
    with following(shop.pipeline) as running:
        until(lambda: shop.is_equal() or running.done(), "the driver follows")
        before = wait(shop.pipeline, [TABLE], "now", 60).cut
        old = shop.source()
        monkeypatch.setattr("headwater.reload.reload.rows_at", None)
        shop.declare(partition_by=["region"])
        shop.database.execute("update orders set region = '' where id = 99")
        until(lambda: shop.is_equal() or running.done(), "the driver follows")
        with pytest.raises(Refused, match="region holds empty texts, which Delta takes for NULL"):
            shop.rebuild()
        shop.database.execute("update orders set region = 'us' where id = 99")
        until(lambda: shop.is_equal() or running.done(), "the driver follows")
        with armed(tmp_path, "reload.after_read") as hold:
            job = in_thread(shop.rebuild)
            hold.reached(job)
            shop.write_meanwhile()
            until(shop.is_equal, "what is committed meanwhile is applied meanwhile")
            assert shop.partitioned_by == []
            hold.release()
            done = job.result(120)
        assert (done["state"], done["read_from"], done["rows"]) == ("active", "lake", 100)
        assert done["changed"] == ["partition_by"]
        assert shop.partitioned_by == ["region"]
        assert shop.is_equal()
        shop.database.execute(
            "update orders set region = 'jp' where id between 50 and 60",
            "insert into orders values (7000, 'jp', 1, 'since')",
            "delete from orders where id = 5000",
        )
        until(lambda: shop.is_equal() or running.done(), "replication goes on in the new shape")
    assert before is not None
    frames = cuts.read(spark, before)
    assert sorted((tuple(row) for row in frames[NAME].collect()), key=repr) == old
    found = verify(shop.pipeline, [TABLE])["tables"][NAME]
    assert (found["compared"], found["missing"], found["extra"], found["different"]) == (True, 0, 0, 0)
    # Nothing is left of what was read, and the driver's successor knows the shape.
    assert storage.names(reloaded_path(shop.pipeline.lake_path(), "")) == []
    shop.database.execute("update orders set amount = 0 where id = 2")
    catch_up(shop.pipeline)
    assert shop.is_equal()
    assert shop.rebuild()["changed"] == []


@pytest.mark.usefixtures("each_reader")
def test_empty_texts_become_null_in_a_column_that_partitions_where_that_is_wanted(shop: Shop) -> None:
    shop.declare(on_bad_value={"region": "null"})
    load_tables(shop.pipeline, again=True)
    shop.database.execute("update orders set region = '' where id in (3, 50)")
    catch_up(shop.pipeline)
    shop.declare(on_bad_value={"region": "null"}, partition_by=["region"])
    done = shop.rebuild()
    assert (done["read_from"], done["rows"]) == ("lake", 100)
    assert shop.partitioned_by == ["region"]
    wanted = [(i, region or None, amount, note) for i, region, amount, note in shop.source()]
    assert sorted(shop.lake(), key=repr) == sorted(wanted, key=repr)


def test_a_damaged_table_is_not_rebuilt_and_the_remedy_is_named(shop: Shop) -> None:
    shop.declare(partition_by=["region"])
    files = list(Path(lake_path_of(shop.pipeline, NAME)).glob("*.parquet"))
    content = files[0].read_bytes()
    files[0].write_bytes(content[:4] + bytes(60) + content[64:])
    with pytest.raises(Refused, match="cannot be read"):
        shop.rebuild()
    files[0].unlink()
    with pytest.raises(Refused, match="cannot be read") as refused:
        shop.rebuild()
    assert refused.value.remedy == f"headwater load PIPELINE.yaml --table {NAME} --again"


def test_a_live_table_takes_other_types_from_the_source(shop: Shop, tmp_path: Path) -> None:
    with following(shop.pipeline) as running:
        until(lambda: running.done() or status(shop.pipeline)["running"], "the driver runs")
        shop.declare(types={"amount": "string"}, partition_by=["region"])
        (warned,) = [
            p for p in check(shop.pipeline).problems if p.code == "option_waits_for_rebuild" and "amount" in p.message
        ]
        assert "headwater rebuild" in warned.remedy
        with armed(tmp_path, "reload.after_capture") as hold:
            job = in_thread(shop.rebuild)
            hold.reached(job)
            shop.write_meanwhile()
            hold.release()
            done = job.result(120)
        assert done["read_from"] == "source"
        assert shop.types["amount"] == 'PrimitiveType("string")'
        assert shop.partitioned_by == ["region"]
        shop.database.execute(
            "update orders set amount = 'NaN' where id = 3", "update orders set amount = 7.5 where id = 4"
        )
        until(lambda: (3, "NaN") in lake_rows(shop.pipeline, NAME, ["id", "amount"]) or running.done(), "it goes on")
    shop.database.execute("update orders set amount = 1 where id = 3")
    catch_up(shop.pipeline)
    assert shop.is_equal()
    assert not [p for p in check(shop.pipeline).problems if p.code == "option_waits_for_rebuild"]
    reload(shop.pipeline, TABLE)
    assert shop.is_equal()
    assert shop.partitioned_by == ["region"]


def test_types_that_change_beside_a_verify_or_behind_a_cut_are_told_apart(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = wait(shop.pipeline, [TABLE], "0/1", 0.0).cut
    assert before is not None

    rebuilt: list[dict[str, Any]] = []

    genuine = Versions.holding

    @contextlib.contextmanager
    def behind_a_rebuild(*arguments: Any) -> Iterator[Any]:
        if not rebuilt:
            shop.declare(types={"amount": "string"})
            rebuilt.append(shop.rebuild())
        with genuine(*arguments) as stored:
            yield stored

    with following(shop.pipeline) as running:
        until(lambda: running.done() or status(shop.pipeline)["running"], "the driver runs")
        monkeypatch.setattr(Versions, "holding", behind_a_rebuild)
        found = verify(shop.pipeline, [TABLE])["tables"][NAME]
    assert shop.types["amount"] == 'PrimitiveType("string")'
    assert found["compared"]
    assert (found["missing"], found["extra"], found["different"], found["unsettled"]) == (0, 0, 0, 0)
    for cut in (before, None):
        assert validate(shop.pipeline, [TABLE], cut=cut)["tables"][NAME]["success"]


@pytest.mark.parametrize(
    ("here", "failpoint"),
    [
        (True, "replicate.before_rebuild"),
        (True, "replicate.after_rebuild"),
        (True, "replicate.after_part_commit"),
        (True, "replicate.after_part_answer"),
        (False, "replicate.before_rebuild"),
        (False, "replicate.after_rebuild"),
    ],
)
def test_a_driver_that_dies_over_a_rebuild_is_followed_by_one_that_ends_it(
    shop: Shop, spark: SparkSession, tmp_path: Path, here: bool, failpoint: str, request: pytest.FixtureRequest
) -> None:
    if not here:
        request.getfixturevalue("reloads_by_spark")
    with Job(shop.pipeline, "replicate", failpoint=failpoint, spark=spark) as job:
        until(lambda: job.process.poll() is not None or status(shop.pipeline)["running"], "the driver runs")
        shop.declare(types={"amount": "string"}, partition_by=["region"])
        asked = in_thread(shop.rebuild)
        assert job.wait() == -9, job.log[-2000:]
        shop.write_meanwhile()
        with following_next(shop.pipeline) as running:
            until(lambda: asked.done() or running.done(), "the rebuild ends")
            done = asked.result()
            until(lambda: shop.is_equal() or running.done(), "the lake equals the source")
            shop.database.execute("update orders set amount = amount * 2 where id < 50")
            until(lambda: shop.is_equal() or running.done(), "it goes on")
    assert done["state"] == "active"
    assert (shop.partitioned_by, shop.types["amount"]) == (["region"], 'PrimitiveType("string")')
    assert len(record_of(shop.pipeline, NAME).schemas) == 2
    assert record_of(shop.pipeline, NAME).state == "active", record_of(shop.pipeline, NAME)


@pytest.mark.parametrize("failpoint", ["reload.after_read", "reload.after_handover"])
def test_a_rebuild_that_is_killed_and_run_again_ends_in_the_new_shape(
    shop: Shop, spark: SparkSession, failpoint: str
) -> None:
    shop.declare(partition_by=["region"])
    with Job(shop.pipeline, "rebuild", "--table", NAME, failpoint=failpoint, spark=spark) as job:
        assert job.wait() == -9, job.log[-3000:]
    shop.write_meanwhile()
    done = shop.rebuild()
    assert done["state"] == "active"
    # What was read before the kill is what is finished: it is not read a second time.
    assert (done["rows"] == 0) == (failpoint == "reload.after_handover")
    assert shop.partitioned_by == ["region"]
    catch_up(shop.pipeline)
    assert shop.is_equal()


def test_a_partitioned_table_takes_another_type_of_its_key_and_keeps_its_odd_names(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are mapped in the lake (a name with a space), its rows say which partition they are of."""
    database.allow_publishing()
    database.execute(
        'create table tree (id numeric(9), "a day" date not null, n int, primary key (id, "a day")) '
        'partition by range ("a day")',
        "create table tree_1 partition of tree for values from ('2026-01-01') to ('2026-02-01')",
        "create table tree_2 partition of tree for values from ('2026-02-01') to ('2026-03-01')",
        "insert into tree select i, date '2026-01-01' + i % 50, i from generate_series(1, 80) i",
    )
    tree = "public.tree"
    pipeline = loaded_pipeline(tmp_path, database, tree)
    with following(pipeline) as running:
        until(lambda: running.done() or status(pipeline)["running"], "the driver runs")
        database.execute("delete from tree where id < 5", "update tree set n = -n where id > 70")
        typed = {"name": tree, "types": {"id": "decimal(12,0)"}, "partition_by": ['"a day"']}
        pipeline = write_pipeline(tmp_path, database, typed)
        done = rebuild(pipeline, TableName("public", "tree"))["tables"][tree]
        assert (done["read_from"], done["rows"]) == ("source", 76)
        database.execute(
            "update tree set \"a day\" = '2026-02-20' where id between 10 and 19",
            "delete from tree where id = 20",
            "truncate tree_1",
            "insert into tree values (999, '2026-01-31', 0)",
        )
        expected = database.query('select id, "a day", n, tableoid::bigint from tree')

        def stored() -> list[tuple[Any, ...]]:
            return lake_rows(pipeline, tree, ["id", "a day", "n", "_hw_partition"])

        until(lambda: sorted(stored()) == sorted(expected) or running.done(), "the lake equals the source")
    assert sorted(stored()) == sorted(expected)
    assert len(spark.read.format("delta").load(lake_path_of(pipeline, tree)).where("`a day` = '2026-02-20'").collect())
    assert DeltaTable(lake_path_of(pipeline, tree)).metadata().partition_columns == ["a day"]
    # Read file by file, its rows in the lake are the same without partitions.
    monkeypatch.setattr("headwater.delta.small_versions.SMALL_BYTES", 0)
    monkeypatch.setattr("headwater.reload.row_folder.ReloadFiles.put_again", lambda *_: pytest.fail("Spark reads them"))
    pipeline = write_pipeline(tmp_path, database, {"name": tree, "types": {"id": "decimal(12,0)"}})
    assert rebuild(pipeline, TableName("public", "tree"))["tables"][tree]["read_from"] == "lake"
    assert sorted(stored()) == sorted(expected)
    assert DeltaTable(lake_path_of(pipeline, tree)).metadata().partition_columns == []


def test_a_column_that_comes_while_a_rebuild_waits_keeps_its_values(shop: Shop, tmp_path: Path) -> None:
    """The rows are read behind the change, the shape was made before it."""
    shop.declare(partition_by=["region"])

    def extra() -> list[tuple[Any, ...]]:
        return [row for row in lake_rows(shop.pipeline, NAME, ["id", "extra"]) if row[0] == 1]

    with following(shop.pipeline) as running:
        until(lambda: running.done() or status(shop.pipeline)["running"], "the driver runs")
        with armed(tmp_path, "reload.after_answer") as hold:
            job = in_thread(shop.rebuild)
            hold.reached(job)
            shop.database.execute("alter table orders add extra int", "update orders set extra = 7 where id = 1")
            # The registry knows of the column before the table has it.
            until(lambda: "extra" in shop.types or running.done(), "the lake follows")
            until(lambda: extra() == [(1, 7)] or running.done(), "the value is in the lake")
            hold.release()
            with pytest.raises(Transient, match="was not rebuilt: the table's columns changed meanwhile"):
                job.result(120)
        assert extra() == [(1, 7)]
        assert shop.rebuild()["state"] == "active"
        assert (extra(), shop.partitioned_by) == ([(1, 7)], ["region"])


def test_columns_that_the_lake_has_yet_to_follow_are_refused(shop: Shop) -> None:
    shop.declare(partition_by=["region"])
    shop.database.execute("alter table orders drop note")
    with pytest.raises(Refused, match="its columns changed at the source") as refused:
        shop.rebuild()
    assert refused.value.code == "schema_changed"


def test_a_driver_that_dies_over_a_second_rebuild_is_followed_by_one_that_knows_which(
    shop: Shop, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr("headwater.reload.replacing.secrets.token_hex", lambda size: next(names))
    shop.declare(partition_by=["region"])
    shop.rebuild()
    with Job(shop.pipeline, "replicate", failpoint="replicate.after_rebuild", spark=spark) as job:
        until(lambda: job.process.poll() is not None or status(shop.pipeline)["running"], "the driver runs")
        shop.declare(types={"amount": "string"})
        asked = in_thread(shop.rebuild)
        assert job.wait() == -9, job.log[-2000:]
        shop.write_meanwhile()
        with following_next(shop.pipeline) as running:
            until(lambda: asked.done() or running.done(), "the rebuild ends")
            asked.result()
            until(lambda: shop.is_equal() or running.done(), "the lake equals the source")
    assert (shop.partitioned_by, shop.types["amount"]) == ([], 'PrimitiveType("string")')
    # What was committed is found in the lake, and not done once more.
    assert len(record_of(shop.pipeline, NAME).schemas) == 3


def test_a_driver_whose_predecessor_wakes_up_over_a_rebuild_goes_on_in_its_shape(shop: Shop, tmp_path: Path) -> None:
    record, path = record_of(shop.pipeline, NAME), lake_path_of(shop.pipeline, NAME)
    shape = replace(record.schema, partition_by=("region",))
    app_id = record.app_id(shop.pipeline.name)
    with armed(tmp_path, "replicate.before_table_commit") as hold, following(shop.pipeline) as running:
        until(lambda: running.done() or status(shop.pipeline)["running"], "the driver runs")
        shop.database.execute("update orders set region = 'jp' where id = 1", "insert into orders values (8000, 'jp')")
        hold.reached(running)
        found = open_table(path)
        assert found is not None
        rows = queried(path, "select * from t").cast(lake_schema(shape))
        lease = registry_of(shop.pipeline)
        asked = Reload("0" * 16, NAME, record.incarnation, (), NAME, "", "read", now_text(), rows=100, shape=shape)
        lease.write(asked)
        rebuild_in_lake(path, found.version(), NAME, app_id, shape, [rows], 2, Fence("headwater/other", 1))
        hold.release()
        until(lambda: shop.is_equal() or running.done(), "the lake equals the source")
        until(lambda: len(record_of(shop.pipeline, NAME).schemas) == 2 or running.done(), "the shape is known")
    assert shop.is_equal()
    assert shop.partitioned_by == ["region"]
    values = DeltaTable(path).get_add_actions(flatten=True)
    assert set(pa.table(values)["partition.region"].to_pylist()) == {"eu", "us", "jp"}


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"columns": {"exclude": ["note"]}}, "columns.exclude"),
        ({"soft_delete": True, "partition_by": ["region"]}, "soft_delete"),
        ({"where": "id > 5"}, "where"),
    ],
)
def test_what_only_a_load_brings_about_is_refused_before_anything_is_done(
    shop: Shop, entry: dict[str, Any], why: str
) -> None:
    shop.declare(**entry)
    before = DeltaTable(lake_path_of(shop.pipeline, NAME)).version()
    with pytest.raises(Refused, match=why) as refused:
        shop.rebuild()
    assert refused.value.code == "not_rebuildable"
    assert "--again" in refused.value.remedy
    assert DeltaTable(lake_path_of(shop.pipeline, NAME)).version() == before
