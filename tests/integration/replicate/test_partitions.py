"""Partitions that come while replicate runs: one that was created as such is adopted, an attached one brings rows
that the log never carried.

A driver runs over the whole module; what it has made of each statement is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import headwater
from fixtures.jobs import (
    Job,
    Rows,
    armed,
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_rows,
    load_tables,
    record_of,
    until,
)
from fixtures.loaded import loaded_pipeline, pipeline_in_step
from fixtures.postgres import Database
from headwater.lake.ledger import read_epoch
from headwater.lake.position_file import read_position_file
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload
from headwater.replicate.pausing import pause, resume
from headwater.verify.verify import verify
from headwater.waiting.result import NotFresh

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

SALES, NESTED, WHOLE = "public.sales", "public.nested", "public.whole"


@dataclass(frozen=True)
class Shop:
    database: Database
    pipeline: Pipeline
    running: Future[Any]

    def source(self, name: str) -> Rows:
        """Every row, and the partition that holds it."""
        return sorted(self.database.query(f"select *, tableoid::bigint from {name}"), key=repr)

    def lake(self, name: str) -> Rows:
        return lake_rows(self.pipeline, name, ["id", "region", "n", "_hw_partition"])

    def until_equal(self, name: str) -> None:
        until(lambda: self.lake(name) == self.source(name) or self.running.done(), f"{name} equals the source")
        assert self.lake(name) == self.source(name)


@pytest.fixture(scope="module")
def shop(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    for name in (SALES, NESTED, WHOLE):
        shared_database.execute(
            f"create table {name} (id int, region text, n int, primary key (id, region)) partition by list (region)",
            f"create table {name}_eu partition of {name} for values in ('eu')",
            f"insert into {name} values (1, 'eu', 1), (2, 'eu', 2)",
        )
    pipeline = loaded_pipeline(tmp_path_factory.mktemp("partitions"), shared_database, SALES, NESTED, WHOLE)
    with following(pipeline) as running:
        until(lambda: record_of(pipeline, SALES).state == "active" or running.done(), "the driver follows the log")
        yield Shop(shared_database, pipeline, running)


def _leaves(shop: Shop, name: str) -> set[str]:
    return {leaf.name for leaf in record_of(shop.pipeline, name).schema.leaves}


def test_a_partition_that_is_created_while_replicate_runs_is_adopted_with_its_rows(shop: Shop) -> None:
    shop.database.execute(
        "create table sales_us partition of sales for values in ('us')",
        "insert into sales values (3, 'us', 3), (4, 'us', 4), (5, 'eu', 5)",
        "update sales set region = 'us' where id = 1",  # to the new partition
        "delete from sales where id = 4",
    )
    shop.until_equal(SALES)
    assert len({row[-1] for row in shop.lake(SALES)}) == 2
    assert _leaves(shop, SALES) == {"sales_eu", "sales_us"}
    # Known from now on: emptied by itself, the other partition keeps its rows.
    shop.database.execute("truncate sales_us", "insert into sales values (6, 'us', 6)")
    shop.until_equal(SALES)


def test_a_partition_below_a_partition_is_adopted_by_the_root(shop: Shop) -> None:
    shop.database.execute(
        "create table nested_us partition of nested for values in ('us') partition by range (id)",
        "create table nested_us_low partition of nested_us for values from (0) to (100)",
        "insert into nested values (3, 'us', 3), (4, 'eu', 4)",
        "update nested set n = n + 1",
    )
    shop.until_equal(NESTED)
    assert _leaves(shop, NESTED) == {"nested_eu", "nested_us_low"}


def test_a_published_table_that_is_attached_is_noticed_though_it_was_none_of_ours_before(shop: Shop) -> None:
    publication = shop.pipeline.source.publication
    shop.database.execute(
        "create table nested_old (id int not null, region text not null, n int, primary key (id, region))",
    )
    with shop.database.superuser() as connection:
        connection.execute(f'alter publication "{publication}" add table only nested_old'.encode())
    shop.database.execute(
        "insert into nested_old values (9, 'old', 9)",
        "insert into nested values (50, 'eu', 50)",
    )
    shop.until_equal(NESTED)
    shop.database.execute(
        "alter table nested attach partition nested_old for values in ('old')",
        "insert into nested values (10, 'old', 10)",
    )
    until(lambda: record_of(shop.pipeline, NESTED).state == "suspended" or shop.running.done(), "it is suspended")
    assert "the partition public.nested_old was attached" in record_of(shop.pipeline, NESTED).reason
    reload(shop.pipeline, TableName.parse(NESTED), [TableName.parse("public.nested_old")])
    shop.until_equal(NESTED)


def test_a_partition_of_a_published_table_is_noticed_when_that_table_is_attached(shop: Shop) -> None:
    publication = shop.pipeline.source.publication
    shop.database.execute(
        "create table sales_more (id int, region text, n int, primary key (id, region)) partition by range (id)",
        "create table sales_more_low partition of sales_more for values from (0) to (100)",
    )
    with shop.database.superuser() as connection:
        connection.execute(f'alter publication "{publication}" add table only sales_more'.encode())
    shop.database.execute("insert into sales_more values (9, 'more', 9)", "insert into sales values (51, 'eu', 51)")
    shop.until_equal(SALES)
    shop.database.execute(
        "alter table sales attach partition sales_more for values in ('more')",
        "insert into sales values (10, 'more', 10)",
    )
    until(lambda: record_of(shop.pipeline, SALES).state == "suspended" or shop.running.done(), "it is suspended")
    reload(shop.pipeline, TableName.parse(SALES), [TableName.parse("public.sales_more_low")])
    shop.until_equal(SALES)


def _attach(shop: Shop, *regions: str) -> None:
    """Each with two rows; then the first is written to."""
    for region in regions:
        shop.database.execute(
            f"create table whole_{region} (n int, id int not null, region text not null, primary key (id, region))",
            f"insert into whole_{region} values (9, 9, '{region}'), (8, 8, '{region}')",
            f"alter table whole attach partition whole_{region} for values in ('{region}')",
        )
    shop.database.execute(f"insert into whole values (10, '{regions[0]}', 10), (11, 'eu', 11) on conflict do nothing")
    _until_suspended(shop, regions)


def _until_suspended(shop: Shop, regions: Sequence[str]) -> None:
    """For all of them: each may be noticed by itself."""

    def named() -> bool:
        return all(f"whole_{region}" in record_of(shop.pipeline, WHOLE).reason for region in regions)

    until(lambda: named() or shop.running.done(), "it is suspended")


def _reload(shop: Shop, *partitions: str) -> dict[str, Any]:
    done = reload(shop.pipeline, TableName.parse(WHOLE), [TableName.parse(f"public.{name}") for name in partitions])
    table: dict[str, Any] = done["tables"][WHOLE]
    return table


def test_the_reload_of_a_partition_that_was_attached_lifts_the_suspension(shop: Shop, tmp_path: Path) -> None:
    _attach(shop, "old")
    record = record_of(shop.pipeline, WHOLE)
    assert "the partition public.whole_old was attached" in record.reason
    assert record.remedy == f"headwater reload PIPELINE.yaml --table {WHOLE} --partition public.whole_old"
    until(lambda: {row[0] for row in shop.lake(WHOLE)} == {1, 2, 11} or shop.running.done(), "the rest is followed")
    with pytest.raises(NotFresh, match="is suspended"):
        headwater.wait(shop.pipeline, tables=[WHOLE], timeout=60)
    with armed(tmp_path, "reload.after_capture") as hold:
        job = in_thread(lambda: _reload(shop, "whole_old"))
        hold.reached(job)
        shop.database.execute(
            "update whole set n = -n",
            "update whole set id = id + 100 where id in (2, 9)",
            "update whole set region = 'eu' where id = 8",  # out of the partition
            "update whole set region = 'old' where id = 1",  # into it
            "delete from whole where id = 10",
        )
        until(lambda: (11, "eu", -11) in [row[:3] for row in shop.lake(WHOLE)], "the rest is followed meanwhile")
        assert record_of(shop.pipeline, WHOLE).state == "suspended"
        hold.release()
        done = job.result(120)
    assert (done["state"], done["rows"]) == ("active", 3)
    shop.until_equal(WHOLE)
    newest = read_epoch(shop.pipeline.lake_path())
    assert newest is not None
    assert newest.tables[WHOLE].state == "active"
    shop.database.execute("update whole set n = n + 1", "truncate whole_old", "insert into whole values (12, 'old', 1)")
    shop.until_equal(WHOLE)


def test_of_two_partitions_that_were_attached_both_have_to_be_reloaded(shop: Shop) -> None:
    _attach(shop, "one", "two")
    assert "the partitions public.whole_one, public.whole_two were attached" in record_of(shop.pipeline, WHOLE).reason
    since = record_of(shop.pipeline, WHOLE).since
    assert _reload(shop, "whole_two")["state"] == "suspended"
    left = record_of(shop.pipeline, WHOLE)
    assert "the partition public.whole_one was attached" in left.reason
    assert left.remedy == f"headwater reload PIPELINE.yaml --table {WHOLE} --partition public.whole_one"
    assert left.since == since
    shop.database.execute("update whole set n = 7", "insert into whole values (20, 'two', 1), (21, 'one', 1)")
    assert _reload(shop, "whole_one")["state"] == "active"
    shop.until_equal(WHOLE)
    shop.database.execute("update sales set n = n + 1")
    shop.until_equal(SALES)


def test_a_table_that_awaits_a_partition_stands_still_when_it_is_paused(shop: Shop) -> None:
    _attach(shop, "late")
    table = TableName.parse(WHOLE)
    pause(shop.pipeline, [table])
    assert record_of(shop.pipeline, WHOLE).reason == "it was paused by hand"
    until(lambda: _paused_in_file(shop) or shop.running.done(), "the driver knows")
    before = shop.lake(WHOLE)
    shop.database.execute("insert into whole values (30, 'eu', 30)", "update sales set n = n + 1")
    shop.until_equal(SALES)
    assert shop.lake(WHOLE) == before
    resume(shop.pipeline, [table])
    shop.until_equal(WHOLE)


def _paused_in_file(shop: Shop) -> bool:
    file = read_position_file(shop.pipeline.lake_path())
    return file is not None and file.states.get(WHOLE, {}).get("reason") == "it was paused by hand"


def test_a_partition_that_brought_rows_is_noticed_though_nothing_of_it_ever_changes(shop: Shop) -> None:
    shop.database.execute(
        "create table whole_still (id int not null, region text not null, n int, primary key (id, region))",
        "insert into whole_still values (40, 'still', 40)",
        "alter table whole attach partition whole_still for values in ('still')",
    )
    _until_suspended(shop, ["still"])
    record = record_of(shop.pipeline, WHOLE)
    assert record.state == "suspended"
    assert "the partition public.whole_still was attached" in record.reason
    assert record.remedy == f"headwater reload PIPELINE.yaml --table {WHOLE} --partition public.whole_still"
    assert _reload(shop, "whole_still")["state"] == "active"
    shop.until_equal(WHOLE)


@pytest.mark.parametrize("changes", [False, True])
def test_a_partition_that_takes_the_place_of_another_under_its_name_asks_for_a_load(
    database: Database, spark: SparkSession, tmp_path: Path, changes: bool
) -> None:
    """A reload of it would leave the rows of the old one behind."""
    database.allow_publishing()
    database.execute(
        "create table swapped (id int primary key) partition by range (id)",
        "create table swapped_low partition of swapped for values from (0) to (100)",
        "insert into swapped values (1), (2)",
    )
    pipeline = loaded_pipeline(tmp_path, database, "public.swapped")
    with following(pipeline) as running:
        until(lambda: record_of(pipeline, "public.swapped").state == "active" or running.done(), "it is in step")
        database.execute(
            "create table other (id int primary key)",
            "insert into other values (1)",
            "alter table swapped detach partition swapped_low; alter table swapped_low rename to swapped_old; "
            "alter table other rename to swapped_low; "
            "alter table swapped attach partition swapped_low for values from (0) to (100)",
            *(["insert into swapped values (5)"] if changes else []),
        )
        until(lambda: record_of(pipeline, "public.swapped").state == "suspended" or running.done(), "it is suspended")
    record = record_of(pipeline, "public.swapped")
    assert record.reason == (
        "the partition public.swapped_low was replaced by another one of that name: "
        "the lake still holds the rows of the former one"
    )
    assert record.remedy == "headwater load PIPELINE.yaml --table public.swapped --again"


def test_a_partition_that_is_dropped_and_created_again_asks_for_a_load(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = _rotated(database, tmp_path)
    again = "create table whole_now partition of whole for values in ('eu')"
    database.execute("drop table whole_now", again, "insert into whole values (1, 'eu', 1)")
    catch_up(pipeline)
    record = record_of(pipeline, WHOLE)
    assert record.state == "suspended"
    assert record.reason.startswith("the partition public.whole_now was replaced by another one of that name")
    assert record.remedy == f"headwater load PIPELINE.yaml --table {WHOLE} --again"


def test_a_partition_under_the_name_of_one_that_another_table_had_is_not_passed_by(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    for name in ("whole", "nested"):
        database.execute(
            f"create table {name} (id int, region text, n int, primary key (id, region)) partition by list (region)",
            f"create table {name}_eu partition of {name} for values in ('eu')",
            f"insert into {name} values (1, 'eu', 1)",
        )
    pipeline = pipeline_in_step(tmp_path, database, WHOLE, NESTED)
    database.execute(
        "drop table whole_eu",
        "create table whole_eu partition of nested for values in ('us')",
        "insert into nested values (2, 'us', 2)",
    )
    catch_up(pipeline)
    assert record_of(pipeline, WHOLE).state == "suspended"
    assert record_of(pipeline, WHOLE).reason.startswith("the partition public.whole_eu was replaced")
    assert record_of(pipeline, NESTED).state == "active"
    assert_equal(database, pipeline, NESTED)


def _rotated(database: Database, folder: Path) -> Pipeline:
    database.allow_publishing()
    database.execute(
        "create table whole (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table whole_now partition of whole for values in ('eu')",
        "insert into whole values (1, 'eu', 1), (2, 'eu', 2)",
    )
    return pipeline_in_step(folder, database, WHOLE)


def _rotate(former: str, region: str) -> list[str]:
    """`whole_now` gets the name `former`, and another one gets that of `whole_now`."""
    return [
        f"alter table whole_now rename to {former}",
        f"create table whole_now partition of whole for values in ('{region}')",
        f"insert into whole values (3, '{region}', 3), (4, '{region}', 4)",
        "update whole set n = n + 1",
        "delete from whole where id = 4",
    ]


def _is_as_at_the_source(database: Database, pipeline: Pipeline) -> bool:
    return _rows(pipeline) == sorted(database.query("select id, region, n, tableoid::bigint from whole"), key=repr)


def test_a_partition_that_gets_another_name_is_followed_and_so_is_the_one_that_gets_its_name(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = _rotated(database, tmp_path)
    with following(pipeline) as running:
        for former, region in (("whole_1", "us"), ("whole_2", "ca")):
            database.execute(*_rotate(former, region))
            until(lambda: _is_as_at_the_source(database, pipeline) or running.done(), "the lake has it all")
            assert record_of(pipeline, WHOLE).state == "active"
        until(lambda: _names(pipeline) == {"whole_1", "whole_2", "whole_now"} or running.done(), "names are followed")
        database.execute(
            "create table other (like whole including all)",
            "insert into other values (9, 'old', 9)",
            "begin; alter table whole_now rename to whole_3; alter table other rename to whole_now; "
            "alter table whole attach partition whole_now for values in ('old'); commit",
        )
        until(lambda: record_of(pipeline, WHOLE).state == "suspended" or running.done(), "it is suspended")
        assert record_of(pipeline, WHOLE).reason.startswith("the partition public.whole_now was attached")
        done = reload(pipeline, TableName.parse(WHOLE), [TableName.parse("public.whole_now")])
        assert done["tables"][WHOLE]["state"] == "active"
        until(lambda: _is_as_at_the_source(database, pipeline) or running.done(), "the lake has it all")
    assert _names(pipeline) == {"whole_1", "whole_2", "whole_3", "whole_now"}


def test_names_that_partitions_had_while_no_driver_ran_are_told_from_those_of_now(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    """The log shows them under names that others have by now, or nobody."""
    pipeline = _rotated(database, tmp_path)
    database.execute(*_rotate("whole_1", "us"), *_rotate("whole_2", "ca"), *_rotate("whole_3", "mx"))
    catch_up(pipeline)
    assert (record_of(pipeline, WHOLE).state, record_of(pipeline, WHOLE).reason) == ("active", "")
    assert _is_as_at_the_source(database, pipeline)
    assert _names(pipeline) == {"whole_1", "whole_2", "whole_3", "whole_now"}


def test_rows_that_come_behind_the_attachment_never_suspend_the_table(shop: Shop) -> None:
    made = "create table whole_{} (id int not null, region text not null, n int, primary key (id, region))"
    for number in range(10):
        region = f"r{number}"
        attach = f"alter table whole attach partition whole_{region} for values in ('{region}')"
        create = f"create table whole_{region} partition of whole for values in ('{region}')"
        fill = f"insert into whole select 100 + i, '{region}', i from generate_series(1, 5) i"
        statements = [[create, fill], [f"{create}; {fill}"], [f"{made.format(region)}; {attach}", fill]][number % 3]
        shop.database.execute(*statements)
    shop.until_equal(WHOLE)
    assert record_of(shop.pipeline, WHOLE).state == "active"


@pytest.mark.parametrize("option", [None, "soft_delete", "history"])
def test_a_table_that_was_attached_empty_is_followed_from_its_first_row_on(
    database: Database, spark: SparkSession, tmp_path: Path, option: str | None
) -> None:
    """Also if that comes while no driver runs: it is known from the look on, and not from its first row."""
    database.allow_publishing()
    database.execute(
        "create table whole (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table whole_eu partition of whole for values in ('eu')",
        "insert into whole values (1, 'eu', 1)",
    )
    pipeline = pipeline_in_step(tmp_path, database, {"name": WHOLE, **({option: True} if option else {})})
    with following(pipeline) as running:
        for region in ("one", "two"):
            database.execute(
                f"create table whole_{region} (like whole including all)",
                f"alter table whole attach partition whole_{region} for values in ('{region}')",
            )
            until(lambda: f"whole_{region}" in _names(pipeline) or running.done(), "it is known")  # noqa: B023
        database.execute("insert into whole values (2, 'one', 2), (3, 'eu', 3)", "update whole set region = 'one'")
        until(lambda: len(_rows(pipeline)) == 3 or running.done(), "its rows are there")
    database.execute("insert into whole values (4, 'two', 4)", "update whole set n = n + 1 where id > 2")
    catch_up(pipeline)
    assert (record_of(pipeline, WHOLE).state, record_of(pipeline, WHOLE).reason) == ("active", "")
    assert _rows(pipeline) == sorted(database.query("select id, region, n, tableoid::bigint from whole"), key=repr)


def _names(pipeline: Pipeline) -> set[str]:
    return {leaf.name for leaf in record_of(pipeline, WHOLE).schema.leaves}


def _rows(pipeline: Pipeline) -> Rows:
    columns = ["id", "region", "n", "_hw_partition"]
    if not record_of(pipeline, WHOLE).schema.soft_delete:
        return lake_rows(pipeline, WHOLE, columns)
    return [row[:-1] for row in lake_rows(pipeline, WHOLE, [*columns, "_hw_deleted"]) if not row[-1]]


def test_what_was_done_to_a_table_before_it_was_attached_empty_is_not_its_partitioned_tables(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    """It was published by itself then, and the log still has to bring that when the catalog is looked at."""
    database.allow_publishing()
    database.execute(
        "create table whole (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table whole_eu partition of whole for values in ('eu')",
        "create table whole_old (like whole including all)",
    )
    pipeline = pipeline_in_step(tmp_path, database, WHOLE)
    publication = pipeline.source.publication
    with database.superuser() as connection:
        connection.execute(f'alter publication "{publication}" add table only whole_old'.encode())
        connection.execute("insert into whole_old values (1, 'old', 1)")
        connection.execute(f'alter publication "{publication}" drop table only whole_old'.encode())
    database.execute(
        "truncate whole_old",
        "alter table whole attach partition whole_old for values in ('old')",
        "insert into whole values (2, 'eu', 2)",
    )
    catch_up(pipeline)
    record = record_of(pipeline, WHOLE)
    assert record.state == "suspended"
    assert "the partition public.whole_old was attached" in record.reason
    assert [row[0] for row in _rows(pipeline)] == [2]


@pytest.mark.parametrize("failpoint", ["replicate.after_part_commit", "replicate.after_part_answer"])
def test_a_driver_that_dies_over_the_reload_leaves_the_table_to_the_next_one(
    database: Database, spark: SparkSession, tmp_path: Path, failpoint: str
) -> None:
    database.allow_publishing()
    database.execute(
        "create table whole (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table whole_eu partition of whole for values in ('eu')",
        "insert into whole select i, 'eu', i from generate_series(1, 20) i",
    )
    pipeline = pipeline_in_step(tmp_path, database, WHOLE)
    database.execute(
        "create table whole_old (id int not null, region text not null, n int, primary key (id, region))",
        "insert into whole_old select i, 'old', i from generate_series(1, 20) i",
        "alter table whole attach partition whole_old for values in ('old')",
        "update whole set n = n + 1",
    )
    catch_up(pipeline)
    assert record_of(pipeline, WHOLE).state == "suspended"
    with Job(pipeline, "replicate", failpoint=failpoint, spark=spark) as driver:
        until(lambda: status(pipeline)["running"] or driver.process.poll() is not None, "the driver runs")
        job = in_thread(lambda: reload(pipeline, TableName.parse(WHOLE), [TableName.parse("public.whole_old")]))
        assert driver.wait() == -9, driver.log[-2000:]
        database.execute("update whole set n = n + 1", "update whole set id = id + 100 where id < 3")
        with following(pipeline):
            assert job.result(120)["tables"][WHOLE]["state"] == "active"
    database.execute("delete from whole where id = 7")
    catch_up(pipeline)
    assert_equal(database, pipeline, WHOLE)
    assert record_of(pipeline, WHOLE).state == "active"


@pytest.mark.parametrize("option", [None, "soft_delete", "history"])
def test_a_partition_that_was_attached_with_rows_while_no_driver_ran_is_noticed_by_the_next_one(
    database: Database, spark: SparkSession, tmp_path: Path, option: str | None
) -> None:
    database.allow_publishing()
    database.execute(
        "create table whole (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table whole_eu partition of whole for values in ('eu')",
        "create table whole_old (id int not null, region text not null, n int, primary key (id, region))",
        "insert into whole_old values (1, 'old', 1)",
    )
    pipeline = pipeline_in_step(tmp_path, database, {"name": WHOLE, **({option: True} if option else {})})
    database.execute(
        "begin; alter table whole attach partition whole_old for values in ('old');"
        "insert into whole values (2, 'eu', 2); commit"
    )
    catch_up(pipeline)
    record = record_of(pipeline, WHOLE)
    assert record.state == "suspended"
    assert "the partition public.whole_old was attached" in record.reason
    cure = "load PIPELINE.yaml --table public.whole --again" if option else "--partition public.whole_old"
    assert cure in record.remedy


@pytest.mark.parametrize("gone", ["alter table sales detach partition sales_us", "drop table sales_us"])
def test_a_partition_that_came_and_went_before_its_rows_were_read_is_told_of(
    database: Database, spark: SparkSession, tmp_path: Path, gone: str
) -> None:
    database.allow_publishing()
    database.execute(
        "create table sales (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table sales_eu partition of sales for values in ('eu')",
        "create table other (id int primary key, n int)",
    )
    pipeline = pipeline_in_step(tmp_path, database, SALES, "public.other")
    database.execute(
        "create table sales_us partition of sales for values in ('us')",
        "insert into sales values (1, 'us', 1), (2, 'eu', 2)",
        gone,
        "insert into other values (1, 1)",
    )
    catch_up(pipeline)
    assert_equal(database, pipeline, SALES, "public.other")
    record = record_of(pipeline, SALES)
    assert (record.state, record_of(pipeline, "public.other").reason) == ("active", "")
    assert record.reason.startswith("if public.sales_us was a partition of it until it was detached or dropped")


def _two_tables(database: Database, folder: Path) -> Pipeline:
    """Two partitioned tables and an ordinary one. Of `whole` the partition `moving` is to become one of `nested`."""
    database.allow_publishing()
    for name, region in (("whole", "eu"), ("nested", "us")):
        database.execute(
            f"create table {name} (id int, region text, n int, primary key (id, region)) partition by list (region)",
            f"create table {name}_{region} partition of {name} for values in ('{region}')",
            f"insert into {name} values (1, '{region}', 1)",
        )
    database.execute(
        "create table moving partition of whole for values in ('ca')",
        "insert into whole values (2, 'ca', 2), (3, 'ca', 3)",
        "create table alone (like whole including all)",
        "insert into alone values (8, 'mx', 8)",
    )
    return pipeline_in_step(folder, database, WHOLE, NESTED, "public.alone")


MOVE = (
    "begin; alter table whole detach partition moving; "
    "alter table nested attach partition moving for values in ('ca'); commit"
)
CHANGES = ("insert into nested values (4, 'ca', 4)", "update nested set n = n + 1", "delete from nested where id = 2")


def _assert_moved(pipeline: Pipeline) -> None:
    record = record_of(pipeline, WHOLE)
    assert (record.state, record.unread) == ("suspended", ())
    assert (
        record.reason == f"the partition public.moving was moved to {NESTED}: the lake still holds its rows here, too"
    )
    assert record.remedy == f"headwater load PIPELINE.yaml --table {WHOLE} --again"
    assert "moving" not in _names(pipeline)


def _assert_to_be_reloaded(pipeline: Pipeline, partition: str) -> None:
    record = record_of(pipeline, NESTED)
    assert record.state == "suspended"
    assert f"the partition {partition} was attached" in record.reason
    assert record.remedy == f"headwater reload PIPELINE.yaml --table {NESTED} --partition {partition}"


def _cure(database: Database, pipeline: Pipeline, partition: str) -> None:
    reload(pipeline, TableName.parse(NESTED), [TableName.parse(partition)])
    load_tables(pipeline, WHOLE, again=True)
    database.execute(f"insert into {partition} select 5, region, 5 from {partition} limit 1")
    database.execute("update nested set n = n + 1", "update whole set n = n + 1", "delete from nested where id = 3")
    catch_up(pipeline)
    assert {record_of(pipeline, name).state for name in (WHOLE, NESTED)} == {"active"}
    assert_equal(database, pipeline, WHOLE, NESTED)


@pytest.mark.parametrize("changes", [CHANGES, ()])
def test_a_partition_that_moves_to_another_table_suspends_both_until_each_is_read_again(
    database: Database, spark: SparkSession, tmp_path: Path, changes: Sequence[str]
) -> None:
    """Also if nothing is changed in it: nobody else would tell."""
    pipeline = _two_tables(database, tmp_path)
    with following(pipeline) as running:
        database.execute(MOVE, *changes)
        until(
            lambda: {record_of(pipeline, name).state for name in (WHOLE, NESTED)} == {"suspended"} or running.done(),
            "both are suspended",
        )
    _assert_moved(pipeline)
    _assert_to_be_reloaded(pipeline, "public.moving")
    _cure(database, pipeline, "public.moving")


@pytest.mark.parametrize("changes", [CHANGES, ()])
def test_a_partition_that_has_moved_while_no_driver_ran_is_found_by_the_first_look(
    database: Database, spark: SparkSession, tmp_path: Path, changes: Sequence[str]
) -> None:
    pipeline = _two_tables(database, tmp_path)
    database.execute(MOVE, *changes)
    catch_up(pipeline)
    _assert_moved(pipeline)
    _assert_to_be_reloaded(pipeline, "public.moving")
    _cure(database, pipeline, "public.moving")


def test_a_partition_that_moves_without_rows_is_followed_where_it_is_now(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = _two_tables(database, tmp_path)
    with following(pipeline) as running:
        database.execute("truncate moving", MOVE)

        def is_known() -> bool:
            return "moving" in {leaf.name for leaf in record_of(pipeline, NESTED).schema.leaves}

        until(lambda: is_known() or running.done(), "it is known where it is now")
        _assert_moved(pipeline)
        database.execute(*CHANGES)
    catch_up(pipeline)
    assert record_of(pipeline, NESTED).state == "active"
    assert_equal(database, pipeline, NESTED)


def test_a_table_that_was_loaded_with_a_partition_which_still_counts_as_another_tables_reads_it_again(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    """Changes of it that came in between may have gone to the other one."""
    pipeline = _two_tables(database, tmp_path)
    database.execute(MOVE)
    load_tables(pipeline, NESTED, again=True)
    database.execute(*CHANGES)
    with following(pipeline) as running:
        until(lambda: record_of(pipeline, NESTED).state == "suspended" or running.done(), "it is suspended")
    _assert_moved(pipeline)
    _assert_to_be_reloaded(pipeline, "public.moving")
    _cure(database, pipeline, "public.moving")


def test_a_replicated_table_that_is_attached_to_another_one_is_replicated_there(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = _two_tables(database, tmp_path)
    with following(pipeline) as running:
        database.execute("alter table nested attach partition alone for values in ('mx')")
        until(
            lambda: (
                {record_of(pipeline, name).state for name in ("public.alone", NESTED)} == {"suspended"}
                or running.done()
            ),
            "both are suspended",
        )
    record = record_of(pipeline, "public.alone")
    assert record.reason == f"it was attached to {NESTED}, and is replicated there"
    assert record.remedy.startswith("take public.alone out of the pipeline file")
    _assert_to_be_reloaded(pipeline, "public.alone")
    verify(pipeline, [TableName.parse("public.alone")], repair=True)
    catch_up(pipeline)
    assert record_of(pipeline, "public.alone").state == "suspended", "whatever has put it in step again"
    _cure(database, pipeline, "public.alone")
