"""Which table's files are gathered when one thread serves them all."""

from __future__ import annotations

import gc
import itertools
import json
import time
from concurrent.futures import Future, wait
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.apply import small_files as upkeep
from headwater.apply.direct import Fence
from headwater.apply.live_table import LiveTable
from headwater.apply.small_files import Upkeep
from headwater.arrow_types import lake_schema
from headwater.delta import delta_log
from headwater.delta.data_files import write_batches
from headwater.delta.layout import layout_of
from headwater.schema import Column, TableSchema, ValueType

SCHEMA = TableSchema(1, "public", "t", (Column("n", 1, 20, -1, ValueType("int8", "bigint")),), ())


def _table(folder: Path) -> LiveTable:
    (folder / "_delta_log").mkdir(parents=True)
    field = {"name": "n", "type": "long", "nullable": True, "metadata": {}}
    metadata = {
        "id": folder.name,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": [field]}),
        "partitionColumns": [],
        "configuration": {"delta.checkpointInterval": "1000"},
    }
    protocol = {"minReaderVersion": 1, "minWriterVersion": 2}
    delta_log.create(str(folder), [{"protocol": protocol}, {"metaData": metadata}])
    return LiveTable(str(folder), SCHEMA)


def _append(folder: str, state: LiveTable) -> None:
    rows = pa.table({"n": [1]}, lake_schema(SCHEMA))
    file = write_batches(folder, rows.schema, [rows], layout_of(state.snapshot.metadata))
    delta_log.commit(folder, state.version + 1, [delta_log.add(file)])
    state.advance()


def test_each_of_two_tables_that_are_always_written_one_behind_the_other_is_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch finds the thread rested, at the first table of it."""
    clock = itertools.count(1000.0, 0.001)
    rest = [0.0]
    monkeypatch.setattr("headwater.apply.small_files.time.monotonic", lambda: next(clock) + rest[0])
    monkeypatch.setattr(upkeep, "_REST", 1e6)
    tables = {str(tmp_path / name): _table(tmp_path / name) for name in ("first", "second")}
    work = Upkeep(Fence("headwater/shop/generation", 1))
    for _ in range(40):
        rest[0] += 3
        for folder, state in tables.items():
            _append(folder, state)
            work.after_commit(folder, state, SCHEMA)
            wait(list(work._running.values()))
    work.close()
    for folder, state in tables.items():
        assert len(state.snapshot.files) < 40, folder


def test_tables_that_are_not_written_any_more_are_gathered_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("headwater.apply.small_files.time.monotonic", lambda: now[0])
    tables = {str(tmp_path / name): _table(tmp_path / name) for name in ("first", "second")}
    work = Upkeep(Fence("headwater/shop/generation", 1))
    work._rests_until = 2000.0  # busy with others, all the time that these are written
    for _ in range(10):
        for folder, state in tables.items():
            _append(folder, state)
            work.after_commit(folder, state, SCHEMA)
    assert work.next_idle(tables) is None
    now[0] = 3000.0
    turns = []
    while (chosen := work.next_idle(tables)) is not None:
        work.after_commit(chosen, tables[chosen], SCHEMA)
        wait(list(work._running.values()))
        now[0] += 60
        turns.append(chosen)
        assert len(turns) < 10
    work.close()
    for state in tables.values():
        assert len(state.snapshot.files) < 4


def test_a_table_that_may_not_have_its_turn_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("headwater.apply.small_files.time.monotonic", lambda: now[0])
    suspended, other = str(tmp_path / "suspended"), str(tmp_path / "other")
    tables = {folder: _table(Path(folder)) for folder in (suspended, other)}
    work = Upkeep(Fence("headwater/shop/generation", 1))
    for folder, state in tables.items():
        for _ in range(4):
            _append(folder, state)
            work.after_commit(folder, state, SCHEMA)
        wait(list(work._running.values()))
        work._rests_until = now[0] + 10
    assert list(work._running) == [suspended]
    now[0] += 60
    for _ in range(3):
        assert work.next_idle([other]) == other
        work.after_commit(other, tables[other], SCHEMA)
        wait(list(work._running.values()))
        now[0] += 60
        if work.next_idle([other]) is None:
            break
    assert len(tables[other].snapshot.files) < 4
    work.close()
    assert {path.name for path in Path(suspended).glob("*.parquet")} == set(tables[suspended].snapshot.files)


def test_what_was_rewritten_of_a_table_that_somebody_else_writes_is_discarded(tmp_path: Path) -> None:
    folder, state = str(tmp_path / "t"), _table(tmp_path / "t")
    work = Upkeep(Fence("headwater/shop/generation", 1))
    for _ in range(4):
        _append(folder, state)
        work.after_commit(folder, state, SCHEMA)
    assert work._running
    work.leave(folder)
    work.close()
    assert work.next_idle([folder]) is None
    assert {path.name for path in (tmp_path / "t").glob("*.parquet")} == set(state.snapshot.files)


def test_a_lane_may_come_while_another_one_looks_whose_turn_it_is() -> None:
    work = Upkeep(Fence("headwater/shop/generation", 1))
    numbers = itertools.count()

    def another_lane(phase: str, info: dict[str, int]) -> None:
        """Wherever Python collects garbage another thread may have its turn."""
        work._due[f"new {next(numbers)}"] = time.monotonic()
        work._running[f"new {next(numbers)}"] = Future()

    first = time.monotonic()
    work._due |= {f"table {number}": first for number in range(2000)}
    for number in range(2000):
        work._running[f"table {number}"] = Future()
        work._running[f"table {number}"].set_result([])
    thresholds = gc.get_threshold()
    gc.callbacks.append(another_lane)
    gc.set_threshold(10)
    try:
        assert work.next_idle(["table 1999"]) == "table 1999"
        assert work._is_next("table 0", first)
        assert not work._rested, "another lane has begun something"
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(another_lane)
        work._running.clear()
        work.close()
