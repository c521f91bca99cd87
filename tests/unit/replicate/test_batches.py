"""Which changes of a batch count for a table."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.lake.registry import Capture, TableRecord
from headwater.log.blocks import Block, Held, Relation, Transactions, Truncate
from headwater.replicate.batches.batch import Share
from headwater.replicate.tables.planning import transactions_that_count

LSNS = [100, 200, 300, 400]
XIDS = [7, 5, 9, 6]
BATCH = Transactions(np.array(XIDS), np.array(LSNS), np.array(LSNS), np.array([0, 2, 4, 6]))


def _record(capture: Capture | None) -> TableRecord:
    return TableRecord("public.t", "public/t", "active", capture=capture)


def _capture(handover_end: int | None) -> Capture:
    return Capture(50, "6:8:6", handover_end, "")  # sees 5 and 7; 6 was open, 9 came later


@pytest.mark.parametrize(
    ("applied", "capture", "counting"),
    [
        (0, None, [7, 5, 9, 6]),
        (100, None, [5, 9, 6]),
        (400, None, []),
        (50, _capture(60), [7, 5, 9, 6]),  # the hand-over has ended before the batch
        (50, _capture(100), [5, 9, 6]),  # it ends with the first one, which is in the snapshot
        (50, _capture(400), [9, 6]),
        (50, _capture(None), [9, 6]),
        (300, _capture(None), [6]),
    ],
)
def test_what_is_applied_or_was_loaded_does_not_count(
    applied: int, capture: Capture | None, counting: list[int]
) -> None:
    counts = transactions_that_count(_record(capture), BATCH, applied)
    assert BATCH.xid[counts].tolist() == counting


def test_changes_and_truncates_count_with_their_transaction() -> None:
    relation = Relation(1, "public", "t", "d", ())
    places = np.arange(4)
    share = Share(
        [Block(relation, Held(np.zeros(4, np.uint8), places, places, np.array([0, 3, 4, 7])))],
        [Truncate(2, (1,)), Truncate(6, (1,))],
    )
    ((_, some),), truncates = share.that_count(BATCH, np.array([True, False, True, False]))
    assert (some.tolist(), truncates) == ([True, False, True, False], [])
    ((_, every),), truncates = share.that_count(BATCH, np.ones(4, dtype=np.bool_))
    assert (every.tolist(), truncates) == ([True] * 4, share.truncates)
