"""A source whose texts are not all possible in UTF-8: the server can send those to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import assert_equal, catch_up, load_tables, record_of
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database, new_database
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import Refused
from headwater.gate.check import check
from headwater.source.connection import connect
from headwater.source.slot import drop_slot
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

TABLE, OTHER = "public.t", "public.other"
UNTRANSLATABLE = {"WIN1252": r"convert_from('\x81', 'WIN1252')", "SQL_ASCII": r"convert_from('\xe9', 'SQL_ASCII')"}


@pytest.fixture(params=UNTRANSLATABLE)
def encoding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(postgres: EmbeddedServer, encoding: str) -> Iterator[Database]:
    with new_database(postgres, f"encoding '{encoding}' template template0 locale 'C'") as made:
        made.allow_publishing()
        made.execute(f"alter database {made.name} set client_encoding = 'UTF8'")  # for the test's own sessions
        for name in (TABLE, OTHER):
            made.execute(f"create table {name} (id int primary key, note text)", f"insert into {name} values (1, 'é')")
        yield made


def test_text_that_utf8_cannot_hold_stops_replicate_for_good_and_the_remedy_cures_it(
    database: Database, encoding: str, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = pipeline_in_step(tmp_path, database, TABLE, OTHER)
    assert [(p.code, p.severity) for p in check(pipeline).problems if p.code == "encoding"] == [("encoding", "warning")]
    database.execute("update t set note = 'ü'", f"insert into t values (2, {UNTRANSLATABLE[encoding]})")
    with pytest.raises(Refused, match="a character that UTF-8 does not have") as refused:
        catch_up(pipeline)
    assert refused.value.code == "untranslatable_text"
    database.execute("update t set note = '?' where id = 2", "insert into other values (2, 'ä')")
    with connect(database.conninfo) as connection:
        drop_slot(connection, pipeline.source.slot)
    verify(pipeline, repair=True)
    catch_up(pipeline)
    assert_equal(database, pipeline, TABLE, OTHER)


def test_text_that_utf8_cannot_hold_suspends_its_table_alone_in_a_load(
    database: Database, encoding: str, spark: SparkSession, tmp_path: Path
) -> None:
    pipeline = pipeline_in_step(tmp_path, database, TABLE, OTHER)
    database.execute(f"insert into t values (2, {UNTRANSLATABLE[encoding]})")
    load_tables(pipeline, TABLE, OTHER, again=True)
    record = record_of(pipeline, TABLE)
    assert (record.state, record.remedy) == (
        "suspended",
        f"put the text right at the source, then headwater load PIPELINE.yaml --table {TABLE} --again",
    )
    assert record_of(pipeline, OTHER).state != "suspended"
