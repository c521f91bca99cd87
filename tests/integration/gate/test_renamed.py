"""`source.slot` and `source.publication` with other names in the pipeline file than those the lake goes by: said before
anything is changed, and nothing of the former ones stays behind a switch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.jobs import assert_equal, catch_up, following, until
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.errors import LostLease, Refused
from headwater.gate.check import check
from headwater.load.load import load
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.takeover import new_source
from headwater.setup.drop import drop
from headwater.verify.verify import verify

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

TABLE = "public.orders"
SOURCE = [
    "create table orders (id int primary key, n int)",
    "insert into orders select i, i from generate_series(1, 9) i",
]


@pytest.fixture
def in_step(database: Database, tmp_path: Path) -> Pipeline:
    database.execute(*SOURCE)
    database.allow_publishing()
    return pipeline_in_step(tmp_path, database, TABLE)


def renamed(folder: Path, database: Database, *, slot: str = "", publication: str = "headwater_shop") -> Pipeline:
    source = {"slot": f"slot_{database.name}{slot}", "publication": publication}
    return write_pipeline(folder, database, TABLE, source=source)


def at_the_source(database: Database) -> tuple[list[Any], list[Any]]:
    slots = f"select slot_name from pg_replication_slots where database = '{database.name}' order by 1"
    publications = "select pubname from pg_publication where pubname not like '%_inserts' order by 1"
    return [row[0] for row in database.query(slots)], [row[0] for row in database.query(publications)]


def test_other_names_are_said_and_a_switch_takes_the_former_ones_away(
    database: Database, in_step: Pipeline, tmp_path: Path
) -> None:
    before = at_the_source(database)
    pipeline = renamed(tmp_path, database, slot="_b", publication="other")
    slot, publication = (problem for problem in check(pipeline).problems if problem.is_error)
    assert (slot.code, slot.where, publication.where) == ("source_renamed", "source.slot", "source.publication")
    assert f"set source.slot back to {in_step.source.slot}" in slot.remedy
    works: list[Callable[[], Any]] = [
        lambda: load(pipeline),
        lambda: load(pipeline, [TableName.parse(TABLE)], again=True),
        lambda: catch_up(pipeline),
        lambda: verify(pipeline, [TableName.parse(TABLE)], repair=True),
    ]
    for refused in works:
        with pytest.raises(Refused, match=f"the lake goes by slot {in_step.source.slot}"):
            refused()
    assert at_the_source(database) == before

    database.execute("update orders set n = -1 where id = 1")
    assert verify(pipeline, repair=True)["tables"][TABLE]["repaired"] == 1
    assert at_the_source(database) == ([pipeline.source.slot], ["other"])
    assert check(pipeline).ok
    database.execute("update orders set n = -2 where id = 2")
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)

    pipeline = renamed(tmp_path, database, slot="_b", publication="third")  # by the slot's own name, which is made anew
    load(pipeline, again=True)
    assert at_the_source(database) == ([pipeline.source.slot], ["third"])
    database.execute("update orders set n = -3 where id = 3")
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE)

    drop(renamed(tmp_path, database, slot="_c", publication="fourth"))
    assert at_the_source(database) == ([], [])


def test_a_switch_waits_for_the_driver_and_leaves_a_dbas_own(
    database: Database, in_step: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = at_the_source(database)
    pipeline = renamed(tmp_path, database, slot="_b", publication="other")
    with following(in_step):
        until(lambda: _is_read(database), "a driver runs")
        switches: list[Callable[[], Any]] = [lambda: load(pipeline, again=True), lambda: verify(pipeline, repair=True)]
        for switch in switches:
            with pytest.raises(LostLease, match="a replicate goes by the former names"):
                switch()
        assert at_the_source(database)[0] == before[0]
    with database.superuser() as superuser:
        superuser.execute("comment on publication headwater_shop is null")
    with caplog.at_level(logging.WARNING):
        load(pipeline, again=True)
    assert at_the_source(database) == ([pipeline.source.slot], ["headwater_shop", "other"])
    assert "DROP PUBLICATION headwater_shop" in caplog.text


def test_a_switch_that_was_killed_is_gone_on_with(
    database: Database, in_step: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = renamed(tmp_path, database, slot="_b")
    with monkeypatch.context() as patched:
        patched.setattr(new_source, "drop_former", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            verify(pipeline, repair=True)
    assert verify(pipeline, repair=True)["tables"][TABLE]["state"] == "catching up"
    assert at_the_source(database) == ([pipeline.source.slot], ["headwater_shop"])


def test_a_slot_that_another_lake_may_go_by_is_not_taken_for_the_new_one(
    database: Database, in_step: Pipeline, tmp_path: Path
) -> None:
    pipeline = renamed(tmp_path, database, slot="_b")
    with database.superuser() as superuser:
        superuser.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [pipeline.source.slot])
    works: list[Callable[[], Any]] = [
        lambda: verify(pipeline, repair=True),
        lambda: load(pipeline, again=True),
        lambda: drop(pipeline),
    ]
    for work in works:
        with pytest.raises(Refused) as refused:
            work()
        assert pipeline.source.slot in refused.value.where
    assert at_the_source(database)[0] == [pipeline.source.slot]


def _is_read(database: Database) -> bool:
    return database.query(f"select active from pg_replication_slots where database = '{database.name}'") == [(True,)]
