"""Commits that are in the log and not visible at the source yet, because a synchronous standby does not answer: what
the catalog says of them is waited for, and nothing of them is passed by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import (
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_rows,
    record_of,
    stalled_commit,
    until,
)
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from headwater.errors import Transient
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source import snapshots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

SALES = "public.sales"
PARTITION = (
    "create table sales_us partition of sales for values in ('us')",
    "insert into sales values (3, 'us', 3), (4, 'us', 4)",
)
COLUMN = ("alter table sales add c int default 5", "update sales set n = 10 where id = 1")


@pytest.fixture
def pipeline(database: Database, spark: SparkSession, tmp_path: Path) -> Pipeline:
    database.allow_publishing()
    database.execute(
        "create table sales (id int, region text, n int, primary key (id, region)) partition by list (region)",
        "create table sales_eu partition of sales for values in ('eu')",
        "insert into sales values (1, 'eu', 1), (2, 'eu', 2)",
    )
    return pipeline_in_step(tmp_path, database, SALES)


def _asks_for_visibility(database: Database, application: str) -> bool:
    asked = "select 1 from pg_stat_activity where application_name = %s and query ~ 'pg_current_snapshot'"
    with database.superuser() as watcher:
        return watcher.execute(asked.encode(), (application,)).fetchone() is not None


@pytest.mark.parametrize(
    ("statements", "application"), [(PARTITION, "headwater replicate"), (COLUMN, "headwater columns")]
)
def test_a_commit_that_becomes_visible_later_is_waited_for(
    database: Database, pipeline: Pipeline, statements: Sequence[str], application: str
) -> None:
    with stalled_commit(database, *statements):
        running = in_thread(lambda: catch_up(pipeline))
        until(lambda: _asks_for_visibility(database, application) or running.done(), "the driver waits")
    running.result(60)
    assert_equal(database, pipeline, SALES)
    assert record_of(pipeline, SALES).state == "active"


@pytest.mark.parametrize("statements", [PARTITION, COLUMN])
def test_a_commit_that_stays_invisible_ends_the_driver_and_comes_again(
    database: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, statements: Sequence[str]
) -> None:
    with stalled_commit(database, *statements), monkeypatch.context() as patch:
        patch.setattr(snapshots, "VISIBLE_SECONDS", 0)
        with pytest.raises(Transient, match="a synchronous standby does not answer"):
            catch_up(pipeline)
    catch_up(pipeline)
    assert_equal(database, pipeline, SALES)
    assert record_of(pipeline, SALES).state == "active"


def test_a_table_that_an_invisible_commit_attaches_is_not_passed_by(
    database: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog still shows it as none of ours, and there is no later change of it to ask again for."""
    database.execute("create table sales_us (id int not null, region text not null, n int, primary key (id, region))")
    attach = "alter table sales attach partition sales_us for values in ('us')"
    with stalled_commit(database, attach, PARTITION[1]), monkeypatch.context() as patch:
        patch.setattr(snapshots, "VISIBLE_SECONDS", 0)
        with pytest.raises(Transient, match="a synchronous standby does not answer"):
            catch_up(pipeline)
    catch_up(pipeline)
    record = record_of(pipeline, SALES)
    assert (record.state, "the partition public.sales_us was attached" in record.reason) == ("suspended", True)


def test_a_table_that_an_invisible_commit_attaches_and_that_seemed_none_of_ours_is_noticed_when_it_is_visible(
    database: Database, pipeline: Pipeline
) -> None:
    """As somebody's publication of all tables has it by itself. Nothing of it changes again."""
    database.execute("create table sales_us (id int not null, region text not null, n int, primary key (id, region))")
    with database.superuser() as connection:
        connection.execute("create publication others for all tables")
    attach = "alter table sales attach partition sales_us for values in ('us')"
    with following(pipeline) as running:
        with stalled_commit(database, attach, PARTITION[1]):
            behind = in_thread(lambda: database.execute("insert into sales values (5, 'eu', 5)"))
            until(lambda: 5 in _ids(pipeline) or running.done(), "the attachment is passed by")
            assert record_of(pipeline, SALES).state == "active"
        behind.result(30)
        until(lambda: record_of(pipeline, SALES).state == "suspended" or running.done(), "it is suspended")
    assert _ids(pipeline) == {1, 2, 5}
    assert "the partition public.sales_us was attached" in record_of(pipeline, SALES).reason


def _ids(pipeline: Pipeline) -> set[int]:
    return {row[0] for row in lake_rows(pipeline, SALES, ["id"])}
