"""What is refused of a cut before Spark or the lake are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headwater
from headwater.errors import Refused

NOBODY: Any = None
"""In place of a Spark session."""
ENTRY = {"path": "/nowhere", "version": 1, "applied_lsn": "0/10", "state": "in step"}
AT_SOURCE = {"path": None, "version": None, "applied_lsn": None, "state": "at the source"}
READERS: list[Callable[[Any], Any]] = [
    lambda cut: headwater.views(NOBODY, cut),
    lambda cut: headwater.views(NOBODY, cut, temporary=True),
    lambda cut: headwater.register(NOBODY, cut),
    lambda cut: headwater.history(NOBODY, cut, "public.t"),
    lambda cut: headwater.scan(cut, "public.t"),
]


@pytest.mark.parametrize("reader", READERS)
def test_what_a_wait_says_that_ended_without_a_cut_is_refused_as_none(reader: Callable[[Any], Any]) -> None:
    with pytest.raises(Refused, match="the wait ended as timed_out") as refused:
        reader({"outcome": "timed_out", "target": "0/10", "tables": {"public.t": {"state": "active"}}, "reason": "r"})
    assert refused.value.code == "bad_argument"


@pytest.mark.parametrize("reader", READERS)
def test_a_cut_that_fell_back_to_the_source_is_refused_where_the_lake_is_needed(reader: Callable[[Any], Any]) -> None:
    fallback = {"pipeline_file": "shop.yaml", "repeatable": False}
    with pytest.raises(Refused) as refused:
        reader({"pipeline": "shop", "epoch": None, "tables": {"public.t": AT_SOURCE}, "fallback": fallback})
    assert refused.value.code == "at_source"


@pytest.mark.parametrize(
    ("other", "options", "keeps_apart"),
    [
        ("archive.t", {"database": "shop"}, "`database`"),
        ("archive.t", {"temporary": True}, "`temporary`"),
        ('public."T"', {"database": "shop"}, ""),
        ('public."T"', {"temporary": True}, ""),
        ('public."T"', {}, ""),
    ],
)
def test_two_tables_of_one_view_are_told_apart_by_schemas_only_where_these_differ(
    other: str, options: dict[str, Any], keeps_apart: str
) -> None:
    with pytest.raises(Refused) as refused:
        headwater.views(
            NOBODY, {"pipeline": "shop", "epoch": 1, "tables": {"public.t": ENTRY, other: ENTRY}}, **options
        )
    assert refused.value.code == "same_view"
    expected = f", or leave {keeps_apart} out: then schemas keep them apart" if keeps_apart else ""
    assert refused.value.remedy == f"make views of a cut with one of them{expected}"
