"""The stores that a process has opened."""

from __future__ import annotations

import pytest

from headwater import store_options
from headwater.delta import object_store
from headwater.store_options import StoreOptions


def test_a_store_goes_when_the_keys_that_it_was_opened_with_have_been_exchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_options, "_known", {})
    monkeypatch.setattr(object_store, "_opened", {})

    def opened(number: int) -> object:
        keys = (("access_key_id", f"key{number}"), ("secret_access_key", "s"))
        store_options.register("s3://bucket/shop", StoreOptions("http://127.0.0.1:9", "eu", None, keys))
        assert object_store._at("s3://bucket/shop/a")[0] is object_store._at("s3://bucket/shop/b")[0]
        return object_store._at("s3://bucket/shop/a")[0]

    other = object_store._at("s3://bucket/elsewhere")[0]
    stores = [opened(number) for number in range(5)]
    assert len(set(map(id, stores))) == 5
    assert list(object_store._opened.values()) == [other, stores[-1]]
