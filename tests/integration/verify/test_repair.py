"""`verify --repair`: what differs is put right, only that, and the log goes on behind it without a gap."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from fixtures.jobs import assert_equal, catch_up, following, lake_path_of, record_of, until
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from headwater.cli import main
from headwater.delta.tables import read_commit
from headwater.errors import EXIT_DONE
from headwater.load.driver_answers import is_running
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload import replacing
from headwater.source.connection import connect
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

PEOPLE, PAIRS, PARTED = "public.people", "public.pairs", "public.parted"
SOURCE = [
    "create table people (id bigint primary key, name text, score float8, note text)",
    "alter table people alter note set storage external",
    "insert into people select i, 'name ' || i, i / 3.0, repeat('x', 3000) || i from generate_series(1, 50) i",
    "create table pairs (a int, b text, note text, primary key (a, b))",
    "insert into pairs select i % 5, 'k' || i, 'note' from generate_series(1, 20) i",
    "create table parted (id int, region text, primary key (id, region)) partition by list (region)",
    "create table parted_eu partition of parted for values in ('eu')",
    "create table parted_us partition of parted for values in ('us')",
    "insert into parted select i, case when i % 2 = 0 then 'eu' else 'us' end from generate_series(1, 10) i",
]


@dataclass(frozen=True)
class Shop:
    """All tables are loaded and in step; nobody replicates now."""

    database: Database
    pipeline: Pipeline
    spark: SparkSession

    def damage(self, table: str, statement: str) -> None:
        self.spark.sql(statement.replace("TABLE", f"delta.`{lake_path_of(self.pipeline, table)}`"))

    def repaired(self, table: str) -> dict[str, Any]:
        return dict(verify(self.pipeline, [TableName.parse(table)], repair=True)["tables"][table])

    def is_equal(self, name: str) -> bool:
        try:
            assert_equal(self.database, self.pipeline, name)
        except AssertionError:
            return False
        return True


@pytest.fixture
def shop(database: Database, spark: SparkSession, tmp_path: Path) -> Shop:
    database.allow_publishing()
    database.execute(*SOURCE)
    pipeline = pipeline_in_step(tmp_path, database, PEOPLE, PAIRS, PARTED)
    return Shop(database, pipeline, spark)


@pytest.mark.usefixtures("each_comparison")
def test_what_somebody_else_wrote_is_repaired_by_what_differs_and_the_log_goes_on(
    shop: Shop, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next driver suspends such a table, and the repair lifts that."""
    shop.damage(PEOPLE, "delete from TABLE where id = 7")
    shop.damage(PEOPLE, "update TABLE set name = 'other', note = null where id = 8")
    shop.damage(PEOPLE, "insert into TABLE (id, name) values (900, 'nobody')")
    shop.damage(PAIRS, "insert into TABLE select * from TABLE where a = 1 and b = 'k1'")
    shop.database.execute("update people set score = 1.5 where id = 9", "insert into people values (103, 'later')")
    assert main(["verify", shop.pipeline.file, "--table", PEOPLE, "--table", PAIRS, "--repair", "--json"]) == EXIT_DONE
    tables = json.loads(capfd.readouterr().out)["tables"]
    people, pairs = tables[PEOPLE], tables[PAIRS]
    assert (people["missing"], people["extra"], people["different"], people["repaired"]) == (2, 1, 2, 5)
    assert "written_anew" not in people
    assert (pairs["missing"], pairs["extra"], pairs["different"], pairs["repaired"]) == (0, 1, 0, 1)
    assert "written_anew" not in pairs
    path = lake_path_of(shop.pipeline, PEOPLE)
    found = [read_commit(path, version) for version in range(DeltaTable(path).version() + 1)]
    (commit,) = [c for c in found if c is not None and c.operation == "HEADWATER APPLY" and c.overwrites]
    assert int(commit.metrics["numOutputRows"]) == 4, "only what differs is written"
    shop.database.execute("update people set score = 2.5 where id < 5", "delete from people where id = 103")
    catch_up(shop.pipeline)
    assert_equal(shop.database, shop.pipeline, PEOPLE, PAIRS)
    assert record_of(shop.pipeline, PEOPLE).state == "active"


def test_a_table_in_step_is_repaired_beside_its_driver(shop: Shop) -> None:
    with following(shop.pipeline) as driver:
        until(lambda: status(shop.pipeline)["running"] or driver.done(), "the driver follows")
        shop.database.execute(
            "alter table parted detach partition parted_eu",
            "delete from parted_eu where id = 2",
            "insert into parted_eu values (12, 'eu')",
            "alter table parted attach partition parted_eu for values in ('eu')",
        )
        assert shop.repaired(PARTED)["repaired"] == 2
        shop.database.execute("insert into parted values (14, 'eu')", "delete from parted where id = 12")
        until(lambda: shop.is_equal(PARTED) or driver.done(), "it goes on")
    assert_equal(shop.database, shop.pipeline, PARTED)


def test_of_two_drivers_that_start_together_the_slower_ones_job_goes_on_beside_the_other(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(shop.pipeline), connect(shop.database.conninfo) as connection:
        until(lambda: is_running(connection, shop.pipeline), "the other one runs")
        looks = iter([False])  # it did not, when the job looked
        monkeypatch.setattr(replacing, "await_return", lambda *given: next(looks))
        with replacing.driver_beside(connection, shop.pipeline, print):
            assert is_running(connection, shop.pipeline)
        assert next(looks, None) is None
