"""What is said of executors that lack something."""

from __future__ import annotations

import pytest

from headwater.lake.executors import NO_FOLDER, lacking


@pytest.mark.parametrize(
    ("place", "remedy"),
    [("/data/lake/_headwater/tables", "mount the lake"), ("s3://lake/shop/_headwater/tables", "reach the store")],
)
def test_a_lake_that_an_executor_does_not_see_is_named_with_what_cures_that(place: str, remedy: str) -> None:
    refused = lacking(f"PythonException: FileNotFoundError: {NO_FOLDER}: {place}\n  at task 1")
    assert refused is not None
    assert (refused.code, refused.where) == ("lake_not_shared", place)
    assert remedy in refused.remedy
