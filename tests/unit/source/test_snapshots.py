"""Visibility of transactions in a snapshot, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.source.snapshots import VisibilitySnapshot, widen_xid

EPOCH = 1 << 32


def test_a_snapshot_prints_as_it_was_read() -> None:
    for text in ("10:20:10,14,15", "10:10:", "4294967295:4294967300:4294967295,4294967297"):
        assert str(VisibilitySnapshot.parse(text)) == text


@pytest.mark.parametrize("text", ["", "10:20", "10:20:x", "20:10:", "10:20:25", "10:20:9", "0:0:", "10:20:10:11"])
def test_a_text_that_is_no_snapshot_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        VisibilitySnapshot.parse(text)


def test_ended_transactions_are_visible_and_running_and_later_ones_are_not() -> None:
    snapshot = VisibilitySnapshot.parse("10:20:10,14,15")
    seen = [xid for xid in range(5, 25) if snapshot.visible(xid)]
    assert seen == [5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 18, 19]


def test_a_snapshot_without_running_transactions_sees_all_below_its_end() -> None:
    snapshot = VisibilitySnapshot.parse("20:20:")
    assert snapshot.visible(19)
    assert not snapshot.visible(20)


@given(st.integers(3, 1 << 62), st.integers(-(1 << 31) + 1, (1 << 31) - 1))
def test_a_narrow_id_widens_to_the_one_nearby(near: int, distance: int) -> None:
    xid = near + distance
    if xid >= 0:
        assert widen_xid(xid % EPOCH, near) == xid


def test_a_narrow_id_never_widens_below_zero() -> None:
    assert widen_xid(EPOCH - 1, 5) == EPOCH - 1


def test_a_snapshot_across_a_wraparound_knows_both_sides() -> None:
    snapshot = VisibilitySnapshot(EPOCH - 2, EPOCH + 5, frozenset({EPOCH - 2, EPOCH + 3}))
    narrow = [EPOCH - 3, EPOCH - 2, EPOCH - 1, 3, 4, 5, 6]
    assert snapshot.visible_mask(narrow) == [True, False, True, False, True, False, False]
