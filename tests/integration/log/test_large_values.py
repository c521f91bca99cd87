"""A value that the server can store, and cannot send in the text form that some other column needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.jobs import assert_equal, catch_up
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from fixtures.soak import SOAK
from fixtures.waiting import until
from headwater.errors import Refused
from headwater.source.connection import connect
from headwater.source.slot import drop_slot, read_slot
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.skipif(not SOAK, reason="takes some GB of memory: make soak"),
]

BLOBS, ODD = "public.blobs", "public.odd"
TOO_LARGE = 520 << 20  # two characters for each byte, and a message ends at 1 GiB


def test_a_value_that_is_too_large_as_text_stops_replicate_with_a_remedy_that_cures_it(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    database.allow_publishing()
    database.execute(
        "create table blobs (id int primary key, b bytea)",
        "create type pair as (a int, b text)",
        "create table odd (id int primary key, p pair)",
    )
    pipeline = pipeline_in_step(tmp_path, database, BLOBS, ODD)
    database.execute(f"insert into blobs values (1, convert_to(repeat('x', {TOO_LARGE}), 'UTF8'))")
    with pytest.raises(Refused, match=r"a row in the log at [0-9A-F]+/[0-9A-F]+ is larger than the 1 GB") as refused:
        catch_up(pipeline)
    assert refused.value.code == "row_too_large"
    database.execute("update blobs set b = 'short'", "insert into odd values (1, row(1, 'x'))")
    with connect(database.conninfo) as connection:
        until(
            lambda: not getattr(read_slot(connection, pipeline.source.slot), "active", False), "the server lets it go"
        )
        drop_slot(connection, pipeline.source.slot)
    verify(pipeline, repair=True)
    catch_up(pipeline)
    assert_equal(database, pipeline, BLOBS, ODD)
