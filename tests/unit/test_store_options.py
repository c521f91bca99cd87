"""What a process knows of the stores of its lakes."""

from __future__ import annotations

import pytest

from headwater import store_options
from headwater.store_options import StoreOptions


def test_of_lakes_that_lie_in_each_other_the_innermost_says_how_a_place_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_options, "_known", {})
    for root in ("s3://lake/team", "s3://lake", "s3://lake/team/shop", "s3://lake/te"):
        store_options.register(root, StoreOptions(region=root))
    for place, root in [
        ("s3://lake/team/shop/public/t", "s3://lake/team/shop"),
        ("s3://lake/team/shops", "s3://lake/team"),
        ("s3://lake/team", "s3://lake/team"),
        ("s3://lake/other", "s3://lake"),
        ("s3://lakes/team", ""),
    ]:
        assert store_options.of(place).region == root, place
