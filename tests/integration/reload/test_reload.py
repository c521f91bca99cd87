"""Reloads beside a running driver: a part of a table is replaced by what the source holds, and nothing that was
committed meanwhile is lost or doubled."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.exceptions import CommitFailedError

import headwater
from fixtures.jobs import (
    Job,
    armed,
    assert_equal,
    catch_up,
    following,
    following_next,
    in_thread,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
    registry_of,
    until,
)
from fixtures.lake_waits import request
from fixtures.loaded import loaded_pipeline, pipeline_in_step
from fixtures.postgres import Database
from headwater.cli import main
from headwater.delta import delta_log, storage
from headwater.delta.log_entries import Action
from headwater.errors import EXIT_SUSPENDED, BadValue, LostLease, Refused, Transient
from headwater.lake import registry as registry_module
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import kept_path, reloaded_path
from headwater.lake.position_file import read_position_file
from headwater.lake_root import is_remote
from headwater.monitor.status import status
from headwater.monitor.table_page import reloads_of
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload import reload as reload_module
from headwater.reload.reload import reload
from headwater.verify.verify import verify
from headwater.waiting.on_timeout import instead_of_cut

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

SALES, PLAIN, TREE, DATED = "public.sales", "public.plain", "public.tree", "public.dated"
COLUMNS = ["id", "region", "n", "note", "_hw_partition"]


@dataclass(frozen=True)
class Shop:
    database: Database
    pipeline: Pipeline
    running: Future[Any]

    def source(self) -> list[tuple[Any, ...]]:
        return sorted(self.database.query("select *, tableoid::bigint from sales"), key=repr)

    def lake(self, version: int | None = None) -> list[tuple[Any, ...]]:
        return lake_rows(self.pipeline, SALES, COLUMNS, version)

    def until_equal(self) -> None:
        until(lambda: self.lake() == self.source() or self.running.done(), "the lake equals the source")
        assert self.lake() == self.source()
        assert record_of(self.pipeline, SALES).state == "active", record_of(self.pipeline, SALES)


@pytest.fixture(scope="module")
def shop(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shared_database.execute(
        "create table sales (id int, region text, n int, note text, primary key (id, region)) "
        "partition by list (region)",
        "create table sales_eu partition of sales for values in ('eu')",
        "create table sales_us partition of sales for values in ('us')",
        "alter table sales_eu alter note set storage external",
        "create table plain (id int primary key, n int, note text)",
        "alter table plain alter note set storage external",
        "insert into sales select i, case when i % 2 = 0 then 'eu' else 'us' end, i, repeat('x', 3000) || i "
        "from generate_series(1, 200) i",
        "insert into plain select i, i, repeat('y', 3000) || i from generate_series(1, 100) i",
        "create table dated (id int primary key, day date)",
        "insert into dated select i, date '2026-01-01' + i from generate_series(1, 20) i",
    )
    shared_database.execute(
        "create table tree (region text, id int, n int, note text, primary key (region, id)) "
        "partition by list (region)",
        "create table tree_eu partition of tree for values in ('eu', 'uk') partition by range (id)",
        "create table tree_low partition of tree_eu for values from (0) to (1000) partition by hash (id)",
        "create table tree_low_0 partition of tree_low for values with (modulus 2, remainder 0)",
        "create table tree_low_1 partition of tree_low for values with (modulus 2, remainder 1)",
        "create table tree_high partition of tree_eu default",
        "create table tree_rest partition of tree default partition by hash (region, id)",
        "create table tree_rest_0 partition of tree_rest for values with (modulus 2, remainder 0)",
        "create table tree_rest_1 partition of tree_rest for values with (modulus 2, remainder 1)",
        "insert into tree select (array['eu', 'uk', 'us', 'in'])[1 + i % 4], i * 20, i, repeat('z', 3000) || i "
        "from generate_series(1, 80) i",
    )
    for leaf in ("tree_low_0", "tree_low_1", "tree_high", "tree_rest_0", "tree_rest_1"):
        shared_database.execute(f"alter table {leaf} alter note set storage external")
    pipeline = loaded_pipeline(tmp_path_factory.mktemp("reload"), shared_database, SALES, PLAIN, TREE, DATED)
    with following(pipeline) as running:
        until(lambda: record_of(pipeline, SALES).state == "active" or running.done(), "the driver follows the log")
        yield Shop(shared_database, pipeline, running)


@pytest.fixture(params=["here", "by Spark"])
def each_reader(request: pytest.FixtureRequest) -> None:
    if request.param == "by Spark":
        request.getfixturevalue("reloads_by_spark")


def _reload(shop: Shop, table: str = SALES, *partitions: str) -> dict[str, Any]:
    names = [TableName.parse(name, default_schema="public") for name in partitions]
    return reload(shop.pipeline, TableName.parse(table), names)


def _delete(place: str, predicate: str) -> None:
    """By delta-rs, once more where a commit of the driver's came in between."""

    def deleted() -> bool:
        try:
            DeltaTable(place).delete(predicate)
        except CommitFailedError:
            return False
        return True

    until(deleted, "it is deleted")


@pytest.mark.usefixtures("reloads_by_spark")
def test_a_partition_is_reloaded_while_the_source_goes_on(shop: Shop, tmp_path: Path) -> None:
    before = DeltaTable(lake_path_of(shop.pipeline, SALES)).version()
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: _reload(shop, SALES, "sales_eu"))
        hold.reached(job)
        shop.database.execute(
            "insert into sales values (1002, 'eu', 1, 'new'), (1003, 'us', 1, 'new')",
            "update sales set n = n + 1000 where id <= 20",  # large values stay out of the log
            "delete from sales where id between 21 and 30",
            "update sales set region = 'us' where id = 40",
            "update sales set region = 'eu' where id = 41",
            "update sales set id = 5000 where id = 42",
        )
        until(lambda: shop.lake() == shop.source(), "what is committed meanwhile is applied meanwhile")
        hold.release()
        done = job.result(120)
    table = done["tables"][SALES]
    assert table["state"] == "active"
    assert table["rows"] == 100
    assert table["replaced_rows"] == len([row for row in shop.source() if row[1] == "eu"])
    assert table["partitions"] == ["public.sales_eu"] or table["partitions"] == ("public.sales_eu",)
    shop.until_equal()
    newest = read_epoch(shop.pipeline.lake_path())
    assert newest is not None
    assert newest.tables[SALES].version > before
    assert shop.lake(newest.tables[SALES].version) == shop.source()
    shop.database.execute("update sales set n = n + 1")
    shop.until_equal()


@pytest.mark.usefixtures("each_reader")
def test_a_table_that_is_rewritten_before_it_is_read_is_read_at_another_capture_point(
    shop: Shop, tmp_path: Path
) -> None:
    lines: list[str] = []
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: reload(shop.pipeline, TableName.parse(PLAIN), progress=lines.append))
        hold.reached(job)
        shop.database.execute("alter table plain alter n type int using n + 1")  # the log carries nothing of it
        hold.release()
        assert job.result(120)["tables"][PLAIN]["rows"] == 100
    assert [line for line in lines if "rewritten, truncated or altered" in line and "reading it again (1 of 3)" in line]
    until(lambda: _equal(shop, PLAIN), "the lake equals the source")


@pytest.mark.usefixtures("each_reader")
def test_a_value_that_the_lake_cannot_hold_is_named_and_nothing_changes(shop: Shop) -> None:
    version = DeltaTable(lake_path_of(shop.pipeline, DATED)).version()
    shop.database.execute("alter table dated alter day type date using case when id = 7 then 'infinity' else day end")
    with pytest.raises(BadValue, match=r"column day holds a value .* \(id = 7\)"):
        _reload(shop, DATED)
    assert DeltaTable(lake_path_of(shop.pipeline, DATED)).version() == version
    shop.database.execute("alter table dated alter day type date using case when id = 7 then '2026-01-08' else day end")


def test_what_was_done_to_a_detached_partition_comes_with_its_reload(shop: Shop) -> None:
    """The log carries nothing of it, and the table's driver does not know."""
    shop.database.execute(
        "alter table sales detach partition sales_us",
        "delete from sales_us where id between 60 and 69",
        "update sales_us set note = 'other' where id between 70 and 79",
        "insert into sales_us values (2001, 'us', 1, 'alone')",
        "alter table sales attach partition sales_us for values in ('us')",
        "insert into sales values (2002, 'us', 1, 'together')",
    )
    until(lambda: any(row[0] == 2002 for row in shop.lake()), "the driver goes on")
    wrong = {row[0] for row in set(shop.lake()) ^ set(shop.source())}
    assert wrong == {61, 63, 65, 67, 69, 71, 73, 75, 77, 79, 2001}
    _reload(shop, SALES, "sales_us")
    shop.until_equal()


def test_a_partition_that_was_attached_comes_with_its_reload_and_is_followed_from_then_on(shop: Shop) -> None:
    shop.database.execute(
        "create table sales_old (id int not null, region text not null, n int, note text, primary key (id, region))",
        "insert into sales_old values (9001, 'old', 9, 'brought along')",
        "alter table sales attach partition sales_old for values in ('old')",
    )
    assert _reload(shop, SALES, "sales_old")["tables"][SALES]["rows"] == 1
    shop.until_equal()
    shop.database.execute(
        "insert into sales values (9002, 'old', 1, 'since')", "update sales set n = 8 where id = 9001"
    )
    shop.until_equal()


def test_a_whole_table_is_reloaded_with_the_large_values_that_the_log_leaves_out(shop: Shop, tmp_path: Path) -> None:
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: _reload(shop, PLAIN))
        hold.reached(job)
        shop.database.execute(
            "update plain set n = -n where id <= 10",
            "update plain set id = id + 1000 where id between 5 and 15",
            "delete from plain where id = 20",
            "insert into plain values (20, 20, 'again')",
        )
        hold.release()
        assert job.result(120)["tables"][PLAIN]["replaced_rows"] == 100
    until(lambda: _equal(shop, PLAIN), "the lake equals the source")


@pytest.mark.usefixtures("reloads_by_spark")
def test_beside_what_is_made_ready_the_table_goes_on_and_cuts_have_it_in_step(shop: Shop, tmp_path: Path) -> None:
    def cut() -> dict[int, int]:
        found = headwater.wait(shop.pipeline, tables=[PLAIN], timeout=60)
        assert found["tables"][PLAIN]["state"] == "in step"
        return {row["id"]: row["n"] for row in headwater.scan(found, PLAIN, columns=["id", "n"]).read_all().to_pylist()}

    shop.database.execute("alter table plain alter n type int using n + 7000")  # the log does not carry it
    before = cut()
    with armed(tmp_path, "replicate.before_round") as hold:
        job = in_thread(lambda: _reload(shop, PLAIN))
        hold.reached(job)
        for number in range(3):
            shop.database.execute(
                f"insert into plain values ({7000 + number}, {number})", f"delete from plain where id = {number + 50}"
            )
            now = cut()
            assert now[7000 + number] == number
            assert number + 50 not in now
            assert all(n == before[key] for key, n in now.items() if key < 7000)
        assert not job.done()
        hold.release()
        job.result(120)
    until(lambda: _equal(shop, PLAIN), "the lake equals the source")


@pytest.mark.usefixtures("reloads_by_spark")
def test_a_commit_whose_answer_was_lost_is_not_made_twice(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, lost = delta_log.commit, list[int]()

    def losing(folder: str, version: int, actions: Iterable[Action], **options: Any) -> None:
        written = list(actions)
        commit(folder, version, written, **options)
        if not lost and any("/reload/" in action.get("txn", {}).get("appId", "") for action in written):
            lost.append(version)
            raise OSError(5, "the answer was lost")

    monkeypatch.setattr(delta_log, "commit", losing)
    shop.database.execute("insert into sales values (7001, 'eu', 1, 'before')")
    assert _reload(shop, SALES, "sales_eu")["tables"][SALES]["state"] == "active"
    assert lost
    shop.until_equal()
    shop.database.execute("update sales set n = n + 1 where region = 'eu'", "delete from sales where id = 7001")
    shop.until_equal()


@pytest.mark.parametrize("parts", [["tree_low"], ["tree_low_0", "tree_rest_1"], ["tree_eu", "tree_rest"]], ids=str)
def test_hashes_trees_and_default_partitions_are_reloaded_while_rows_move_through_them(
    shop: Shop, tmp_path: Path, parts: list[str]
) -> None:
    """What a reload does not name stays as wrong as it was."""
    shop.database.execute("alter table tree alter n type int using n + 1000")
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: _reload(shop, TREE, *parts))
        hold.reached(job)
        shop.database.execute(
            "update tree set id = id + 1 where id in (20, 40, 60, 80, 100, 120)",  # to the other leaf of a hash, or not
            "update tree set id = id + 2000 where id in (140, 160, 180, 200, 240)",
            "update tree set region = 'us' where region = 'eu' and id between 300 and 500",
            "update tree set region = 'uk' where region = 'in' and id between 300 and 500",
            "update tree set n = -n where id between 900 and 1100",
            "delete from tree where id between 600 and 700",
            "insert into tree values ('eu', 620, 1, 'again'), ('eu', 5000, 1, 'new'), ('xx', 1, 1, 'new') "
            "on conflict do nothing",
        )
        hold.release()
        named = {name.removeprefix("public.") for name in job.result(120)["tables"][TREE]["partitions"]}
    leaves = {oid: name for name, oid in shop.database.query("select relname, oid::bigint from pg_class")}

    def rows() -> tuple[list[Any], list[Any]]:
        source = shop.database.query("select region, id, note, tableoid::bigint, n from tree")
        return sorted(source), lake_rows(shop.pipeline, TREE, ["region", "id", "note", "_hw_partition", "n"])

    def but_for_n() -> list[list[Any]]:
        return [sorted(row[:4] for row in some) for some in rows()]

    until(lambda: but_for_n()[0] == but_for_n()[1] or shop.running.done(), "all rows are where the source has them")
    source, lake = map(set, rows())
    wrong = {leaves[row[3]] for row in source - lake}
    assert not wrong & named
    assert wrong or len(named) == 5
    _reload(shop, TREE)
    until(lambda: rows()[0] == sorted(rows()[1]) or shop.running.done(), "the whole is right")


def test_two_reloads_of_one_partition_are_refused_and_of_two_run_beside_each_other(shop: Shop, tmp_path: Path) -> None:
    with armed(tmp_path, "reload.after_capture") as hold:
        first = in_thread(lambda: _reload(shop, SALES, "sales_eu"))
        hold.reached(first)
        for same in ((), ("sales_eu",)):
            with pytest.raises(LostLease) as refused:
                _reload(shop, SALES, *same)
            assert refused.value.code == "reload_running"
            assert "sales_eu" in str(refused.value)
        shop.database.execute("update sales set n = n + 1 where id % 3 = 0")
        assert _reload(shop, SALES, "sales_us")["tables"][SALES]["rows"] > 50
        hold.release()
        first.result(120)
    shop.until_equal()


def test_what_no_partition_is_called_is_refused_with_the_names_that_there_are(shop: Shop) -> None:
    for name, code in (("sales_asia", "no_partition"), ("plain", "no_partition")):
        with pytest.raises(Refused) as refused:
            _reload(shop, SALES, name)
        assert refused.value.code == code
        assert {"public.sales_eu", "public.sales_us"} <= set(re.findall(r"[\w.]+", refused.value.remedy))
    with pytest.raises(Refused) as refused:
        _reload(shop, PLAIN, "sales_eu")
    assert refused.value.code == "not_partitioned"


def test_a_truncate_while_the_rows_are_read_leaves_what_came_after_it(shop: Shop, tmp_path: Path) -> None:
    with armed(tmp_path, "reload.after_read") as hold:
        job = in_thread(lambda: _reload(shop, SALES, "sales_eu"))
        hold.reached(job)
        shop.database.execute("truncate sales_eu", "insert into sales values (3001, 'eu', 1, 'after')")
        until(lambda: shop.lake() == shop.source(), "the driver goes on")
        hold.release()
        job.result(120)
    shop.until_equal()


def test_a_reload_that_fails_changes_nothing_and_leaves_nothing(shop: Shop, tmp_path: Path) -> None:
    version = DeltaTable(lake_path_of(shop.pipeline, PLAIN)).version()
    shop.database.execute("alter table plain add column more int")
    with pytest.raises(Refused) as refused:
        _reload(shop, PLAIN)
    assert refused.value.code == "schema_changed"
    shop.database.execute("alter table plain drop column more")
    assert DeltaTable(lake_path_of(shop.pipeline, PLAIN)).version() == version
    root = shop.pipeline.lake_path()
    until(lambda: not storage.names(kept_path(root, "")), "what was kept for it is gone")
    assert not storage.names(reloaded_path(root, ""))


def test_a_reload_whose_table_is_loaded_anew_meanwhile_says_so(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(rows: object, folder: str, cluster_by: object) -> None:
        load_tables(shop.pipeline, PLAIN, again=True)
        name = Path(folder).name

        def given_up() -> bool:
            answer = registry_of(shop.pipeline).kept.get(name)
            return answer is not None and answer.state == "failed"

        until(lambda: given_up() or shop.running.done(), "the driver has given it up")
        raise FileNotFoundError(folder)  # as the engine does whose files are removed

    monkeypatch.setattr(reload_module, "put_few_rows", overtaken)
    with pytest.raises(Transient) as failed:
        _reload(shop, PLAIN)
    assert (failed.value.code, failed.value.where) == ("reload_failed", PLAIN)
    assert "was not reloaded: the table was loaded again" in failed.value.message
    assert storage.names(reloaded_path(shop.pipeline.lake_path(), "")) == []
    until(lambda: record_of(shop.pipeline, PLAIN).state == "active" or shop.running.done(), "it is followed again")


@pytest.mark.parametrize(
    ("each_reader", "failpoint"),
    [
        *(("here", point) for point in ("replicate.before_part", "replicate.after_part_commit")),
        *(("by Spark", point) for point in ("replicate.before_round", "replicate.before_ready_commit")),
        *(("by Spark", point) for point in ("replicate.after_part_commit", "replicate.after_part_answer")),
    ],
    indirect=["each_reader"],
)
@pytest.mark.usefixtures("each_reader")
def test_a_driver_that_dies_over_a_reload_leaves_it_to_the_next_one(
    database: Database, spark: SparkSession, tmp_path: Path, failpoint: str
) -> None:
    database.allow_publishing()
    database.execute(
        "create table plain (id int primary key, n int)", "insert into plain select i, i from generate_series(1, 50) i"
    )
    pipeline = loaded_pipeline(tmp_path, database, PLAIN)
    with (
        armed(tmp_path, "reload.after_capture") as hold,
        Job(pipeline, "replicate", failpoint=failpoint, spark=spark) as driver,
    ):
        until(lambda: status(pipeline)["running"] or driver.process.poll() is not None, "the driver runs")
        job = in_thread(lambda: reload(pipeline, TableName.parse(PLAIN)))
        hold.reached(job)
        database.execute("update plain set n = -n where id < 10", "delete from plain where id = 20")
        hold.release()
        assert driver.wait() == -9, driver.log[-2000:]
        database.execute("update plain set n = 7 where id = 30")
        with following_next(pipeline):
            assert job.result(120)["tables"][PLAIN]["rows"] == 50
    catch_up(pipeline)
    assert_equal(database, pipeline, PLAIN)
    assert record_of(pipeline, PLAIN).state == "active"
    assert not storage.names(kept_path(pipeline.lake_path(), ""))


@pytest.mark.parametrize("failpoint", ["replicate.before_table_commit", "replicate.after_table_commit"])
def test_what_a_driver_kept_before_it_died_comes_once_whether_or_not_the_table_holds_it(
    database: Database, spark: SparkSession, tmp_path: Path, failpoint: str
) -> None:
    """It is behind the ledger: the next driver merges the part before the log has delivered it again."""
    database.allow_publishing()
    database.execute(
        "create table plain (id int primary key, n int)", "insert into plain select i, i from generate_series(1, 50) i"
    )
    pipeline = loaded_pipeline(tmp_path, database, PLAIN)
    root = pipeline.lake_path()

    def is_followed() -> bool:
        epoch = read_epoch(root)
        return epoch is not None and epoch.tables[PLAIN].touched

    def answers() -> list[str]:
        return [answer.state for answer in registry_of(pipeline).kept.values()]

    with (
        armed(tmp_path, "reload.after_read") as hold,
        Job(pipeline, "replicate", failpoint=f"{failpoint}@{PLAIN}:2", spark=spark) as driver,
    ):
        until(lambda: status(pipeline)["running"] or driver.process.poll() is not None, "the driver runs")
        job = in_thread(lambda: reload(pipeline, TableName.parse(PLAIN)))
        hold.reached(job)
        database.execute("update plain set n = -n where id < 10")
        until(lambda: is_followed() or driver.process.poll() is not None, "a cut lies behind what was read")
        database.execute(
            "insert into plain values (60, 1); delete from plain where id = 1; update plain set id = 0 where id = 2"
        )
        assert driver.wait() == -9, driver.log[-2000:]
        hold.release()
        until(lambda: [one.state for one in registry_of(pipeline).reloads.values()] == ["read"], "all was read")
    with armed(tmp_path, "replicate.before_chunk") as log, following_next(pipeline) as running:
        until(lambda: answers() == ["done"] or running.done(), "the part is merged")
        log.release()
        assert job.result(120)["tables"][PLAIN]["rows"] == 50
    catch_up(pipeline)
    assert_equal(database, pipeline, PLAIN)
    assert record_of(pipeline, PLAIN).state == "active", record_of(pipeline, PLAIN)


def test_a_reload_that_is_killed_changes_nothing_and_stands_in_nobodys_way(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute(
        "create table plain (id int primary key, n int)", "insert into plain select i, i from generate_series(1, 50) i"
    )
    pipeline = loaded_pipeline(tmp_path, database, PLAIN)
    root = pipeline.lake_path()

    def keeps() -> bool:
        said = [answer.state for answer in registry_of(pipeline).kept.values()]
        return "keeping" in said or storage.names(kept_path(root, "")) != []

    def killed(failpoint: str) -> None:
        with Job(pipeline, "reload", "--table", PLAIN, "--where", "id <= 20", failpoint=failpoint, spark=spark) as job:
            assert job.wait() == -9, job.log[-2000:]
        assert "keeping" in [answer.state for answer in registry_of(pipeline).kept.values()]
        assert is_remote(root) or storage.names(kept_path(root, ""))  # a store has no folders that are empty
        database.execute("update plain set n = n + 1 where id <= 5", "update plain set id = id + 100 where id = 20")
        database.execute("insert into plain values (20, 0)")

    with following(pipeline) as driver:
        until(lambda: status(pipeline)["running"] or driver.done(), "the driver runs")
        for failpoint in ("reload.after_answer", "reload.after_capture", "reload.after_read"):
            killed(failpoint)
            until(lambda: not keeps() or driver.done(), "the driver gives it up")
            assert not storage.names(reloaded_path(root, ""))
            until(lambda: len(lake_rows(pipeline, PLAIN)) == len(database.query("select from plain")), "it goes on")
            database.execute("delete from plain where id = 120")
    for failpoint in ("reload.after_read", "reload.after_handover"):
        killed(failpoint)  # and the driver that ran in its process
        assert reload(pipeline, TableName.parse(PLAIN), where="id < 30")["tables"][PLAIN]["rows"] == 29
        assert_equal(database, pipeline, PLAIN)
        database.execute("delete from plain where id = 120")


def test_without_a_driver_a_reload_runs_one_until_it_is_published(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute(
        "create table plain (id int primary key, n int)", "insert into plain select i, i from generate_series(1, 50) i"
    )
    pipeline = pipeline_in_step(tmp_path, database, PLAIN)
    database.execute("update plain set n = -n")
    assert main(["reload", pipeline.file, "--table", PLAIN, "--json"]) == 0
    assert_equal(database, pipeline, PLAIN)
    newest = read_epoch(pipeline.lake_path())
    assert newest is not None
    assert newest.tables[PLAIN].version == DeltaTable(lake_path_of(pipeline, PLAIN)).version()
    assert not status(pipeline)["running"]


def test_a_wait_for_a_partition_gets_what_its_reload_brings_and_minds_no_other(
    shop: Shop, spark: SparkSession, tmp_path: Path
) -> None:
    def wait(*names: str) -> Any:
        return headwater.wait(shop.pipeline, tables=[SALES], partitions={SALES: names}, timeout=120)

    with armed(tmp_path, "reload.after_read") as hold:
        job = in_thread(lambda: _reload(shop, SALES, "sales_eu"))
        hold.reached(job)
        eu = in_thread(lambda: wait("sales_eu"))
        us = wait("sales_us")
        assert {row["region"] for row in headwater.read(spark, us)[SALES].collect()} == {"us"}
        assert not eu.done()
        hold.release()
        job.result(120)
    cut = eu.result(120)
    version = max(kept.version or 0 for kept in registry_of(shop.pipeline).kept.values() if kept.table == SALES)
    assert cut["tables"][SALES]["version"] >= version
    assert list(cut["tables"][SALES]["partitions"]) == ["public.sales_eu"]
    at_source = shop.database.query("select id from sales where region = 'eu'")
    assert sorted(row["id"] for row in headwater.read(spark, cut)[SALES].collect()) == sorted(i for (i,) in at_source)
    assert headwater.scan(cut, SALES, columns=["id"], where="id > 0").read_all().num_rows == len(at_source)
    assert headwater.scan(cut, SALES, where="id < 0").read_all().num_rows == 0
    views = headwater.views(spark, cut, temporary=True)
    assert spark.sql(f"select 1 from {views[SALES]}").count() == len(at_source)
    wanted = {TableName.parse(SALES): [TableName.parse("public.sales_us")]}
    ended = {"outcome": "timed_out"}
    instead = instead_of_cut(shop.pipeline, ended, "fallback", request(tables=list(wanted), partitions=wanted))
    assert instead is not None
    assert {row["region"] for row in headwater.read(spark, instead)[SALES].collect()} == {"us"}


def test_a_wait_takes_subtrees_and_partitions_that_the_lake_has_not_met(shop: Shop, spark: SparkSession) -> None:
    def wait(*names: str) -> Any:
        return headwater.wait(shop.pipeline, tables=[TREE], partitions={TREE: list(names)}, timeout=120)

    low = wait("tree_low")
    assert sorted(low["tables"][TREE]["partitions"]) == ["public.tree_low_0", "public.tree_low_1"]
    assert {row["region"] for row in headwater.read(spark, low)[TREE].collect()} <= {"eu", "uk"}
    shop.database.execute("create table tree_cn partition of tree for values in ('cn')")
    assert headwater.read(spark, wait("tree_cn"))[TREE].count() == 0
    shop.database.execute("drop table tree_cn")
    for name in ("sales_eu", "nothing"):
        with pytest.raises(Refused) as refused:
            wait("tree_low", name)
        assert (refused.value.code, name in refused.value.message) == ("no_partition", True)
    file = shop.pipeline.file
    assert main(["wait", file, "--table", TREE, "--partition", "tree_high", "--timeout", "60s", "--json"]) == 0
    assert main(["wait", file, "--partition", "tree_high", "--json"]) == 2


def test_parts_of_a_table_that_another_program_wrote_to_are_put_right_and_it_stays_suspended(
    shop: Shop, tmp_path: Path
) -> None:
    shop.database.execute(
        "insert into sales select i, case when i % 2 = 0 then 'eu' else 'us' end, i, 'mine' "
        "from generate_series(10001, 10200) i"
    )
    shop.until_equal()
    kinds = [pa.int32(), pa.string(), pa.int32(), pa.string(), pa.int64()]
    some = [(row[0] + 1000, *row[1:]) for row in shop.source() if 10001 <= row[0] <= 10012]
    more = [pa.array(values, kind) for values, kind in zip(zip(*some, strict=True), kinds, strict=True)]
    write_deltalake(lake_path_of(shop.pipeline, SALES), pa.table(more, names=COLUMNS), mode="append")
    _delete(lake_path_of(shop.pipeline, SALES), "id in (10013, 10014, 10113, 10114)")

    def wrong(region: str) -> set[int]:
        return {row[0] for row in set(shop.lake()) ^ set(shop.source()) if row[1] == region}

    shop.database.execute("update sales set n = 0 where id in (10015, 10016)")
    until(lambda: record_of(shop.pipeline, SALES).state == "suspended" or shop.running.done(), "it is noticed")
    suspended = record_of(shop.pipeline, SALES)
    assert "was written by another program" in suspended.reason
    shop.database.execute("update sales set n = 1 where id in (10101, 10102)", "delete from sales where id = 10018")
    us, us_low = {10113, 10101} | {row[0] for row in some if row[1] == "us"}, {10013, 10015}
    eu = {10014, 10016, 10018, 10114, 10102} | {row[0] for row in some if row[1] == "eu"}
    assert (wrong("eu"), wrong("us")) == (eu, us | us_low)
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: _reload(shop, SALES, "sales_eu"))
        hold.reached(job)
        shop.database.execute(
            "update sales set region = 'eu' where id = 10017", "update sales set n = 2 where id = 10020"
        )
        hold.release()
        done = job.result(120)["tables"][SALES]
    assert (done["state"], wrong("eu"), wrong("us")) == ("suspended", {10017, 10020}, us | us_low | {10017})
    predicate = "region = 'us' and id between 10001 and 10100"
    assert main(["reload", shop.pipeline.file, "--table", SALES, "--where", predicate]) == EXIT_SUSPENDED
    assert (wrong("eu"), wrong("us")) == ({10017, 10020}, us)
    assert record_of(shop.pipeline, SALES) == suspended
    DeltaTable(lake_path_of(shop.pipeline, SALES)).alter.add_columns([Field("extra", "integer")])
    with pytest.raises(Refused) as refused:  # what is written would not fit any more
        _reload(shop, SALES, "sales_eu")
    assert (refused.value.code, "changes its columns" in refused.value.message) == ("not_in_step", True)
    assert refused.value.remedy == f"headwater load PIPELINE.yaml --table {SALES} --again"
    found = verify(shop.pipeline, [TableName.parse(SALES)], repair=True)["tables"][SALES]
    assert (found["missing"], found["extra"], found["different"]) == (2, len(us) - 2, 2)
    until(lambda: record_of(shop.pipeline, SALES).state == "active" or shop.running.done(), "it is followed again")
    shop.until_equal()


def _equal(shop: Shop, name: str) -> bool:
    try:
        assert_equal(shop.database, shop.pipeline, name)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("driver", "by_older"), [("that goes on", False), ("that comes later", True)], ids=["now", "by an older Headwater"]
)
def test_a_reload_of_long_ago_is_not_done_again_when_its_records_are_thinned_out(
    database: Database,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    by_older: bool,
) -> None:
    """It had found the part empty: done again, it would take away what has come since. An older Headwater thinned out
    the driver's answer alone."""
    database.execute(
        "create table parts (id int, region text, primary key (id, region)) partition by list (region)",
        "create table parts_eu partition of parts for values in ('eu')",
        "create table parts_us partition of parts for values in ('us')",
        "insert into parts select i, 'us' from generate_series(1, 10) i",
    )
    database.allow_publishing()
    pipeline = loaded_pipeline(tmp_path, database, "public.parts")
    catch_up(pipeline)
    parts, eu = TableName.parse("public.parts"), TableName.parse("public.parts_eu")
    assert reload(pipeline, parts, [eu])["tables"]["public.parts"]["rows"] == 0
    database.execute("insert into parts select i, 'eu' from generate_series(1, 10) i")
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.parts")

    def thin_out() -> None:
        with monkeypatch.context() as later:
            registry = registry_of(pipeline)
            if by_older:
                registry.kept.clear()
            else:
                later.setattr(registry_module, "_week_ago", lambda: datetime(2099, 1, 1, tzinfo=UTC))
            later.setattr(registry_module, "_COMPACT_ABOVE", 0)
            assert registry.pipeline is not None
            registry.write(registry.pipeline)

    if driver == "that comes later":
        thin_out()
    with following(pipeline):
        until(lambda: (file := read_position_file(pipeline.lake_path())) and file.generation > 3, "it works")
        if driver == "that goes on":
            thin_out()
        for number in (11, 12, 13):
            database.execute(f"insert into parts values ({number}, 'eu')")
            until(lambda: len(lake_rows(pipeline, "public.parts")) == 10 + number, "what comes is applied")  # noqa: B023
    assert_equal(database, pipeline, "public.parts")
    registry = registry_of(pipeline)
    assert (len(registry.reloads), len(registry.kept)) == (1 if by_older else 0, 0), "what is past, and nothing new"
    if by_older:
        assert reloads_of(registry) == []
        assert reload(pipeline, parts, [eu])["tables"]["public.parts"]["rows"] == 13, "it stands in nobody's way"
