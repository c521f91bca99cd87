"""Partitions that come while replicate runs: one that was created as such is adopted, an attached one brings rows
that the log never carried.

A driver runs over the whole module; what it has made of each statement is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import Rows, following, lake_rows, load_tables, record_of, until
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.config import Pipeline

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
    pipeline = write_pipeline(tmp_path_factory.mktemp("partitions"), shared_database, SALES, NESTED, WHOLE)
    load_tables(pipeline)
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


def test_a_table_that_is_attached_suspends_with_a_remedy_that_names_the_whole(shop: Shop) -> None:
    shop.database.execute(
        "create table whole_old (id int not null, region text not null, n int, primary key (id, region))",
        "insert into whole_old values (9, 'old', 9)",
        "alter table whole attach partition whole_old for values in ('old')",
        "insert into whole values (10, 'old', 10), (11, 'eu', 11)",
    )
    until(lambda: record_of(shop.pipeline, WHOLE).state == "suspended" or shop.running.done(), "it is suspended")
    record = record_of(shop.pipeline, WHOLE)
    assert "the partition public.whole_old was attached" in record.reason
    assert record.remedy == f"headwater load PIPELINE.yaml --table {WHOLE} --again"
    assert [row[0] for row in shop.lake(WHOLE)] == [1, 2]
    shop.database.execute("update sales set n = n + 1")
    shop.until_equal(SALES)
