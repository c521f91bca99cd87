"""A log that the server itself cannot read past: replicate says why and is not tried again, and the remedy cures it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import assert_equal, catch_up, lake_rows, load_tables
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.errors import Refused
from headwater.gate.check import check
from headwater.source.connection import connect
from headwater.source.slot import drop_slot
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.mark.parametrize("dropped", ["headwater_shop", "headwater_shop_inserts"])
def test_a_publication_that_was_missing_at_a_change_stops_replicate_before_18(
    dropped: str, database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute("create table t (id int primary key)", "create table other (id int primary key)")
    pipeline = pipeline_in_step(tmp_path, database, "public.t", "public.other")
    with connect(database.conninfo) as connection:
        connection.execute(f"drop publication {dropped}")
        reads_past = connection.info.server_version >= 180000
    found = [(problem.code, problem.where) for problem in check(pipeline).problems if problem.is_error]
    assert found == ([] if reads_past else [("publication_missing", f"publication {dropped}")])
    if reads_past:
        return
    database.execute("insert into t values (1)")
    load_tables(pipeline)
    assert check(pipeline).ok
    with pytest.raises(Refused, match=f'missing, .* .publication "{dropped}" does not exist') as refused:
        catch_up(pipeline)
    assert refused.value.code == "publication_missing"
    with connect(database.conninfo) as connection:
        connection.execute(f"drop publication {dropped}")
        drop_slot(connection, pipeline.source.slot)
    verify(pipeline, repair=True)
    database.execute("insert into t values (2)", "insert into other values (1)")
    catch_up(pipeline)
    assert_equal(database, pipeline, "public.t", "public.other")


def test_a_row_filter_that_fails_for_a_row_stops_replicate(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute("create table t (q int primary key, n int)", "create table other (id int primary key)")
    pipeline = pipeline_in_step(tmp_path, database, {"name": "public.t", "where": "100 / q > 5"}, "public.other")
    database.execute("insert into t values (0, 1), (2, 2)", "insert into other values (1)")
    with pytest.raises(Refused, match=r"fails for a row .* \(DivisionByZero\)") as refused:
        catch_up(pipeline)
    assert refused.value.code == "row_filter_failed"
    corrected = {"name": "public.t", "where": "100 / nullif(q, 0) > 5"}
    pipeline = write_pipeline(tmp_path, database, corrected, "public.other")
    load_tables(pipeline, "public.t", again=True)
    with connect(database.conninfo) as connection:
        drop_slot(connection, pipeline.source.slot)
    verify(pipeline, repair=True)
    database.execute("update t set n = 3", "insert into t values (3, 3), (50, 4)", "insert into other values (2)")
    catch_up(pipeline)
    assert sorted(lake_rows(pipeline, "public.t")) == [(2, 3), (3, 3)]
    assert_equal(database, pipeline, "public.other")
