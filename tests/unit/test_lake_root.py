"""Where a lake may lie, and the one way to write each place."""

from __future__ import annotations

import pytest

from headwater.lake_root import is_remote, place_of


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("/data//lake/", "/data/lake"),
        ("file:///data/a%20b/", "/data/a b"),
        ("s3://lake", "s3://lake"),
        ("s3://lake/", "s3://lake"),
        ("s3://my.lake-1/a/b%20c/", "s3://my.lake-1/a/b%20c"),
        ("gs://lake_1/a", "gs://lake_1/a"),
        ("abfss://lake@account.dfs.core.windows.net/a/", "abfss://lake@account.dfs.core.windows.net/a"),
    ],
)
def test_a_place_is_written_in_one_way(written: str, place: str) -> None:
    assert place_of(written) == place == place_of(place)
    assert is_remote(place) == ("://" in place)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("lake", "absolute path"),
        ("hdfs://host/lake", "hdfs:// is not known"),
        ("s3a://lake", "write s3://"),
        ("wasbs://c@a.blob.core.windows.net/x", "write abfss://"),
        ("s3:/lake", "s3://<bucket>"),
        ("s3://", "s3://<bucket>"),
        ("s3://key:not-shown@lake/a", "no password"),
        ("s3://lake:9000/a", "no port"),
        ("gs://lake?x=1", "no query"),
        ("abfss://lake/a", "<container>@<account>"),
        ("abfss://lake@account.dfs.core.chinacloudapi.cn/a", "no other cloud"),
        ("abfss://lake@onelake.dfs.fabric.microsoft.com/a", "no other cloud"),
        ("abfss://lake@account.dfs.core.windows.net.other.example/a", "no other cloud"),
        ("s3://lake//a", "single slashes"),
        ("s3://lake/a/../b", "single slashes"),
        ("file://host/lake", "file:///"),
    ],
)
def test_what_is_no_place_is_refused_and_not_repeated(written: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        place_of(written)
    assert "not-shown" not in str(refused.value)
