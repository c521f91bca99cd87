"""What a power cut takes of a table's changes of columns and shape, and the registry still knows, the next driver does
again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fixtures.jobs import queried
from fixtures.lakes import HandLake, position_at
from headwater.apply import whole_table
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.direct import Fence
from headwater.arrow_types import key_schema, lake_schema
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import log_entry
from headwater.gate import recovery
from headwater.lake.ledger import TableVersion
from headwater.lake.paths import table_path
from headwater.net_changes import NetChanges
from headwater.replicate.tables.columns import Evolving
from headwater.replicate.tables.reshaping import Reshaping
from headwater.replicate.tables.states import TableStates
from headwater.schema import Column, Leaf, TableSchema, ValueType

NAME = "public.t"
LOADED, CHANGED = 0x1000, 0x1200


def column(name: str, attnum: int, kind: str = "bigint") -> Column:
    source = {"bigint": "int8", "int": "int4"}[kind]
    return Column(name, attnum, 20 if kind == "bigint" else 23, -1, ValueType(source, kind))


ID, A = column("id", 1), column("a", 2, "int")
LOAD = TableSchema(1, "public", "t", (ID, A), ("id",), (Leaf(1, "public", "t", 1),))
WITH_B = (ID, A, column("b", 3))


def no_spark() -> Any:
    pytest.fail("Spark was asked for")


class Lake:
    """A table with one durable version, as its load has left it, and a driver's lane of it."""

    def __init__(self, root: Path) -> None:
        self.hand = HandLake(root, position_at(lsn=LOADED), [NAME])
        record = self.hand.registry.record(NAME)
        self.hand.registry.write(replace(record, incarnation=1, start_lsn=LOADED, schemas=((LOADED, LOAD),)))
        self.folder = table_path(self.hand.root, record.path)
        whole_table.create(self.folder, LOAD, 3600.0)
        rows = pa.record_batch({"id": [1, 2], "a": [1, 2]}, schema=lake_schema(LOAD))
        whole_table.overwrite(self.folder, LOAD, [rows], self.hand.registry.record(NAME).app_id("shop"), LOADED)
        self.hand.versions[NAME] = TableVersion(1, LOADED, "active")
        self.hand.publish(LOADED + 1)
        self.driver()

    def driver(self) -> None:
        """A new one takes over."""
        registry, ledger = self.hand.registry, self.hand.ledger
        self.states = TableStates(self.hand.root, registry, ledger)
        self.states.versions[NAME] = TableVersion(read_snapshot(self.folder).version, LOADED, "active")
        fence, tasks = Fence(ledger.generation_app, ledger.generation), FileTasks(no_spark, self.hand.root)
        pipeline: Any = SimpleNamespace(name="shop")
        foreign: Any = SimpleNamespace(met=Counter[str]())
        histories: Any = SimpleNamespace(evolve=lambda *_: None)
        self.reshaping = Reshaping("shop", self.states, foreign, fence, registry.reloads)
        self.columns = Evolving(
            pipeline, self.states, foreign, histories, self.reshaping, fence, tasks, {}, {}, binary=True
        )

    def follow(self, columns: Sequence[Column]) -> None:
        """As for a change that the log shows: the registry, then the lake."""
        after = replace(self.states.records[NAME].schema, columns=tuple(columns))
        self.states.change(NAME, lambda old: replace(old, schemas=(*old.schemas, (CHANGED, after))))
        self.columns.finish(NAME, lambda: None)

    def lose_power(self) -> None:
        """Nothing of the table's versions above the durable one had reached the disk."""
        for version in range(2, read_snapshot(self.folder).version + 1):
            Path(log_entry(self.folder, version)).write_bytes(b"")
        recovery.mend_control_tables(self.hand.root)
        self.hand.registry.refresh()
        recovery.mend(self.hand.root, "shop", self.hand.registry.tables.values(), LOADED + 1)
        assert read_snapshot(self.folder).version == 1
        self.driver()

    def stored(self) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """The table's columns with their types, and its rows."""
        fields = json.loads(read_snapshot(self.folder).metadata["schemaString"])["fields"]
        rows = queried(self.folder, "select * from t order by id").to_pylist(maps_as_pydicts="strict")
        return {field["name"]: field["type"] for field in fields}, rows


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


@pytest.mark.parametrize(
    "changes",
    [
        [WITH_B, (*WITH_B, column("c", 4))],
        [(ID, column("renamed", 2, "int")), (ID, column("renamed", 2, "int"), column("c", 4))],
        [(ID, column("renamed", 2, "int")), (ID, column("again", 2, "int"))],
        [(ID,), (ID, column("c", 4))],
        [(ID, column("a", 2)), (ID, column("a", 2), column("c", 4))],
        [WITH_B, (ID, A)],
        [WITH_B, (ID, A, column("renamed", 3)), (ID, A, column("renamed", 3), column("c", 4))],
    ],
    ids=["added", "renamed", "renamed twice", "dropped", "widened", "added and dropped", "three"],
)
def test_each_change_of_columns_that_a_power_cut_took_is_made_again(lake: Lake, changes: list[list[Column]]) -> None:
    for columns in changes:
        lake.follow(columns)
    before = lake.stored()
    lake.lose_power()
    lake.columns.finish(NAME, lambda: None)
    assert lake.stored() == before


def test_a_rebuilt_table_is_on_disk_before_the_registry_learns_its_shape(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a power cut in between, the next driver learns the shape from the lake, or makes it again."""
    shape = replace(LOAD, partition_by=("a",))
    rows = pa.table({"id": [1, 2], "a": [1, 2]}, schema=lake_schema(shape))
    nothing, none_stored = key_schema(LOAD).empty_table(), np.zeros(2, dtype=np.bool_)
    changes = NetChanges(rows, none_stored, {}, None, nothing, 2, truncated=True)
    synced = []

    def sync(_: str) -> None:
        in_lake = read_snapshot(lake.folder).metadata["partitionColumns"]
        synced.append((tuple(in_lake), lake.hand.registry.tables[NAME].schema.partition_by))

    monkeypatch.setattr(storage, "sync", sync)
    lake.reshaping.rebuild(lake.states.records[NAME], shape, lambda _: changes, lambda: None)
    assert synced == [(("a",), ())]
    assert lake.hand.registry.tables[NAME].schema.partition_by == ("a",)
