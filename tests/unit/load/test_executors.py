"""What is said of executors that lack something, or whose store is away."""

from __future__ import annotations

import pytest

from fixtures.store_faults import answering
from headwater import store_options
from headwater.errors import Transient
from headwater.lake.executors import NO_FOLDER, LakeAccess, lacking
from headwater.store_options import StoreOptions


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("/data/lake/_headwater/tables", "mount the lake"),
        ("s3://lake/shop/_headwater/tables", "the store that the driver reaches"),
    ],
)
def test_a_lake_that_an_executor_does_not_see_is_named_with_what_cures_that(place: str, remedy: str) -> None:
    refused = lacking(f"PythonException: FileNotFoundError: {NO_FOLDER}: {place}\n  at task 1")
    assert refused is not None
    assert (refused.code, refused.where) == ("lake_not_shared", place)
    assert remedy in refused.remedy


def test_an_executor_whose_store_is_away_waits_as_its_job_does_and_the_load_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("_known", {}), ("_is_patient", False), ("JOB_PATIENCE_SECONDS", 0), ("PATIENCE_SECONDS", 60)):
        monkeypatch.setattr(store_options, name, value)
    keys = (("access_key_id", "a"), ("secret_access_key", "b"))
    text = "<Error><Code>SlowDown</Code><Message>less</Message></Error>"
    with answering(lambda method, target: (503, {}, text)) as (address, _), pytest.raises(OSError) as away:
        LakeAccess("s3://bucket/lake", StoreOptions(f"http://{address}", "eu", None, keys)).enter()
    told = lacking(f"PythonException: OSError: {away.value}\n  at task 1")
    assert isinstance(told, Transient)
    assert (told.code, told.where) == ("lake_unavailable", "s3://bucket/lake/_headwater/tables")
    assert "SlowDown: less" in told.message
