"""How a run ends that the lake or the source ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwater.errors import Fenced, HeadwaterError, LostLease, SlotGap
from headwater.replicate.ending import outages


@pytest.mark.parametrize(
    "met",
    [
        SlotGap("the slot was changed by somebody else", where="slot", remedy="load"),
        LostLease("the slot is in use", where="slot", remedy="wait"),
    ],
)
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_slot_that_a_successor_has_is_not_lost(met: HeadwaterError, is_replaced: bool) -> None:
    def check_fence() -> None:
        if is_replaced:
            raise Fenced("generation 3 has taken over", where="pipeline shop", remedy="nothing")

    run: Any = SimpleNamespace(ledger=SimpleNamespace(check_fence=check_fence))
    with pytest.raises(Fenced if is_replaced else type(met)), outages(run):
        raise met
