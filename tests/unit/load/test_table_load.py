"""What a load leaves in the registry when it is not the only one that says something of the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.lakes import HandLake
from headwater.errors import LostLease
from headwater.lake.registry import Registry, TableRecord
from headwater.lake.reload_records import Keeping, load_name
from headwater.load.one_table import TableLoad
from headwater.position import Position

NAME = "public.a"


def _load(lake: HandLake) -> tuple[TableLoad, TableRecord]:
    """One of the table, at its first incarnation."""
    registry = Registry.open(lake.root, "shop")
    assert registry is not None
    record = replace(registry.record(NAME).entered("loading"), incarnation=1)
    registry.write(record)
    lake.registry.refresh()
    nothing: Any = None
    return TableLoad(nothing, registry, nothing, nothing, nothing, nothing, None), record


def test_a_load_that_fails_says_nothing_of_a_table_that_another_one_has_loaded_since(tmp_path: Path) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    load, record = _load(lake)
    lake.registry.write(replace(record.entered("active"), incarnation=2))
    load.registry.refresh()  # as it does for another of its tables
    with pytest.raises(LostLease, match="not this load's any more"):
        load._suspended(record, "it cannot be read", "")
    load.registry.refresh()
    assert load.registry.record(NAME).phase == (2, "active")


@pytest.mark.parametrize("state", ["catching up", "suspended"])
def test_a_load_that_was_given_up_may_only_say_that_it_has_failed(tmp_path: Path, state: str) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    load, record = _load(lake)
    lake.registry.write(Keeping(load_name(record), NAME, "failed", 1, 0x100, record.since))  # unread by the load
    if state == "catching up":
        with pytest.raises(LostLease, match="was cut"):
            load._ended(record.entered("catching up"))
    else:
        load._suspended(record, "it cannot be read", "")
    assert load.registry.record(NAME).state == ("loading" if state == "catching up" else "suspended")
