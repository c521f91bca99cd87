"""The history of any log, replayed row by row, is what the log made of the table; what the log left out is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.soak import examples
from headwater.history_columns import history_schema
from headwater.log.blocks import Chunk
from headwater.log.net import history_rows as every_change_module
from headwater.log.net.history_rows import every_change
from headwater.schema import PARTITION_COLUMN
from unit.log.test_net_effect import NAMES, ROOT, Key, Log, Row, Shape, a_row, in_parts, logs


def history_of(shape: Shape, chunk: Chunk, above: int = 0) -> list[Row]:
    found: list[Row] = table_of(shape, chunk, above).to_pylist()
    return found


def table_of(shape: Shape, chunk: Chunk, above: int = 0) -> pa.Table:
    blocks = [(block, np.asarray(block.sequence >= above)) for block in chunk.blocks]
    truncates = [truncate for truncate in chunk.truncates if truncate.sequence >= above]
    history = history_schema(shape.schema)
    return every_change(shape.schema, history, 7, blocks, truncates, chunk.transactions, str)


def replayed(shape: Shape, stored: dict[Key, Row], rows: list[Row]) -> dict[Key, Row]:
    """The table after `rows`, in the order that their columns say; whatever contradicts the table is an error."""
    table = dict(stored)
    for row in sorted(rows, key=lambda row: (row["_hw_lsn"], row["_hw_sequence"])):
        operation = row["_hw_operation"]
        key = tuple(row[name] for name in shape.key)
        before = tuple(row[f"_hw_before_{name}"] for name in shape.key)
        leaf = row[PARTITION_COLUMN] if len(shape.leaves) > 1 else shape.leaves[0]
        if operation == "truncate":
            gone = shape.leaves if len(shape.leaves) == 1 or leaf is None else (leaf,)
            table = {k: one for k, one in table.items() if one["leaf"] not in gone}
            continue
        assert (before[0] is None) == (operation == "insert")
        if operation == "delete":
            assert key == before
            assert row["_hw_unchanged"] is None
            del table[before]
            continue
        old = table.pop(before) if operation == "update" else {}
        assert key not in table
        assert all(row[name] is None for name in row["_hw_unchanged"])
        kept = {name: old[name] for name in row["_hw_unchanged"]}
        table[key] = {**{name: row[name] for name in NAMES}, **kept, "leaf": leaf}
    return table


@settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(logs(), st.data())
def test_the_history_replayed_is_the_table(log: Log, data: st.DataObject) -> None:
    above = data.draw(st.integers(0, len(log.history)))
    stored = log.history[above - 1] if above else {}
    chunk = log.cut()
    found = history_of(log.shape, chunk, above)
    assert replayed(log.shape, stored, found) == log.model
    assert found == sorted(found, key=lambda row: (row["_hw_lsn"], row["_hw_sequence"]))
    ends, firsts = chunk.transactions.end_lsn.tolist(), chunk.transactions.first_sequence.tolist()
    numbers = {firsts[ends.index(row["_hw_lsn"])] + row["_hw_sequence"] for row in found}
    assert numbers == set(range(above, len(log.history))), "every change, and each once"
    xids = dict(zip(ends, chunk.transactions.xid.tolist(), strict=True))
    assert all((row["_hw_xid"], row["_hw_incarnation"]) == (xids[row["_hw_lsn"]], 7) for row in found)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(logs())
def test_of_blocks_on_disk_it_is_the_same(log: Log) -> None:
    whole = log.cut()
    with in_parts(whole) as (chunk, _):
        assert counted(history_of(log.shape, chunk)) == counted(history_of(log.shape, whole))


def counted(rows: list[Row]) -> list[str]:
    return sorted(map(repr, rows))


def test_rows_of_a_large_transaction_go_back_to_disk(monkeypatch: Any) -> None:
    shape = Shape(("id",))
    log = Log(shape)
    log.begin()
    for number in range(40_000):
        log.insert(a_row(id=number))
        log.model.clear()
    log.commit()
    monkeypatch.setattr(every_change_module, "_PART_BYTES", 1 << 16)
    with in_parts(log.cut()) as (chunk, _):
        before = pa.total_allocated_bytes()
        found = table_of(shape, chunk)
        assert found.num_rows == 40_000
        assert found.nbytes > 3 << 20
        assert pa.total_allocated_bytes() - before < 1 << 20, "mapped from disk"
        assert found["id"].to_pylist() == list(range(40_000))


def test_a_truncate_of_some_leaves_is_a_row_for_each_and_one_of_the_table_a_single_one() -> None:
    shape = Shape(("id",), leaves=(1, 2, 3))
    log = Log(shape)
    log.begin()
    log.truncate((1, 3))
    log.truncate((ROOT, 1, 2, 3))
    log.commit()
    assert [row[PARTITION_COLUMN] for row in history_of(shape, log.cut())] == [1, 3, None]
