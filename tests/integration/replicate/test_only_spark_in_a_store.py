"""What only Spark could write is left alone in an object store, by name; everything else goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.jobs import assert_equal, catch_up, lake_path_of, load_tables, record_of, states_of
from fixtures.loaded import pipeline_in_step
from fixtures.object_stores import S3Server
from fixtures.postgres import Database
from headwater.delta import storage
from headwater.delta.small_tables import open_version
from headwater.errors import Refused
from headwater.maintain.maintain import maintain

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

KEPT, WELL = "public.kept", "public.well"


def test_a_table_with_a_rule_that_only_spark_knows_is_suspended_and_loaded_again(
    database: Database, s3_server: S3Server, tmp_path: Path
) -> None:
    for name in (KEPT, WELL):
        database.execute(f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1)")
    database.allow_publishing()
    pipeline = pipeline_in_step(tmp_path, database, KEPT, WELL, lake=s3_server.lake("lake"))
    path = lake_path_of(pipeline, KEPT)
    open_version(path).alter.add_constraint({"small": "n < 1000"})
    database.execute("insert into kept values (2, 2)", "insert into well values (2, 2)")
    assert states_of(catch_up(pipeline)) == {KEPT: "suspended", WELL: "active"}
    assert_equal(database, pipeline, WELL)
    record = record_of(pipeline, KEPT)
    assert record.reason.startswith("only Spark could write it (")
    assert record.remedy.startswith(f"headwater load PIPELINE.yaml --table {KEPT} --again, once {path} is removed")
    assert maintain(pipeline)["tables"][KEPT]["not_compacted"] == "a suspended table stays as it is"
    with pytest.raises(Refused) as refused:
        load_tables(pipeline, KEPT, again=True)
    assert (refused.value.code, refused.value.remedy) == ("not_in_a_store", record.remedy)
    storage.delete_folder(path)
    load_tables(pipeline, KEPT, again=True)
    assert states_of(catch_up(pipeline)) == {KEPT: "active", WELL: "active"}
    assert_equal(database, pipeline, KEPT)
