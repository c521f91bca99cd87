"""A change of source drops no slot that may be another lake's."""

from __future__ import annotations

import pytest

from headwater.errors import LostLease, SlotGap
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.takeover.new_source import _refuse_slot
from headwater.source.slot import SlotState

PIPELINE = Pipeline.model_validate(
    {
        "pipeline": "shop",
        "source": {"connection": "postgresql://localhost/shop", "slot": "shop"},
        "lake": {"root": "file:///lake"},
        "tables": ["public.orders"],
    }
)


def slot(*, plugin: str = "pgoutput", active: bool = False) -> SlotState:
    return SlotState(
        "shop",
        plugin,
        "shop",
        active,
        7 if active else None,
        1,
        1,
        0,
        "reserved",
        None,
        two_phase=False,
        failover=False,
    )


def test_a_slot_of_our_name_on_another_system_is_for_a_person_to_drop() -> None:
    _refuse_slot(slot(), "shop", PIPELINE, ours=True)
    _refuse_slot(None, "shop", PIPELINE, ours=False)
    with pytest.raises(SlotGap, match="a slot of this name is there already") as refused:
        _refuse_slot(slot(), "shop", PIPELINE, ours=False)
    assert refused.value.code == "foreign_slot"
    assert "pg_drop_replication_slot('shop')" in refused.value.remedy


def test_a_slot_that_is_in_use_or_of_another_plugin_is_never_dropped() -> None:
    with pytest.raises(LostLease, match="in use by server process 7"):
        _refuse_slot(slot(active=True), "shop", PIPELINE, ours=True)
    with pytest.raises(SlotGap, match="plugin wal2json"):
        _refuse_slot(slot(plugin="wal2json"), "shop", PIPELINE, ours=True)
