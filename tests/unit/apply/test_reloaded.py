"""A reload's rows brought forward by the changes since: large values that the log does not carry wait on local disk,
and no more of them than fit come into memory at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.apply import replacement, unchanged_values
from headwater.apply.replacement import part_of, rows_read, under_keys, write_keys
from headwater.arrow_types import key_schema, lake_schema
from headwater.lake.paths import reloaded_path
from headwater.net_changes import NetChanges
from headwater.schema import Column, Leaf, TableSchema, ValueType

SCHEMA = TableSchema(
    1,
    "public",
    "t",
    (
        Column("id", 1, 23, -1, ValueType("int4", "int")),
        Column("n", 2, 23, -1, ValueType("int4", "int")),
        Column("big", 3, 25, -1, ValueType("text", "string")),
    ),
    ("id",),
    (Leaf(1, "public", "t", 1),),
)
ROWS = 200


def large(number: int) -> str:
    return f"{number} " * 500


def rows(ids: range, n: int, big: bool = True) -> pa.Table:
    values = [{"id": i, "n": n, "big": large(i) if big else None} for i in ids]
    return pa.Table.from_pylist(values, schema=lake_schema(SCHEMA))


def updates_of_all_that_keep_their_large_values() -> NetChanges:
    """Every second row has another key since: 1000 more."""
    ids = [i + 1000 * (i % 2) for i in range(ROWS)]
    table = rows(range(ROWS), 7, big=False).set_column(0, lake_schema(SCHEMA).field("id"), pa.array(ids, pa.int32()))
    origins = pa.table([pa.array([i if i % 2 else None for i in range(ROWS)], pa.int32())], schema=key_schema(SCHEMA))
    removed = pa.table([pa.array(range(1, ROWS, 2), pa.int32())], schema=key_schema(SCHEMA))
    stored = np.array([i % 2 == 0 for i in range(ROWS)])
    return NetChanges(table, stored, {"big": np.ones(ROWS, dtype=np.bool_)}, origins, removed, ROWS)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every table that waits, or is written."""
    for module in (replacement, unchanged_values):
        monkeypatch.setattr(module, "_BYTES", 40_000)
    return []


def keeping(held: list[int]) -> Any:
    def keep(table: pa.Table) -> pa.Table:
        held.append(table.nbytes)
        return table

    return keep


def test_values_that_changes_keep_come_piece_by_piece(tmp_path: Path, held: list[int]) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(rows(range(ROWS + 50), 1), path)
    since = updates_of_all_that_keep_their_large_values()
    parts = list(
        part_of(SCHEMA, partial(rows_read, SCHEMA, [str(path)]), (), None, since, str, keeping(held)).in_parts()
    )
    found = {row["id"]: (row["n"], row["big"]) for part in parts for row in part.rows.to_pylist()}
    changed = {i + 1000 * (i % 2): (7, large(i)) for i in range(ROWS)}
    assert found == changed | {i: (1, large(i)) for i in range(ROWS, ROWS + 50)}
    assert sum(part.rows.num_rows for part in parts) == ROWS + 50
    assert not any(part.unchanged or part.origins is not None for part in parts)
    assert sum(held) > 5 * 40_000
    assert max(held) < 60_000
    assert max(part.rows.nbytes for part in parts) < 60_000


def test_of_the_changes_since_only_rows_under_the_keys_of_a_repair_are_held(tmp_path: Path, held: list[int]) -> None:
    keys = pa.table([pa.array([3, 4, 1005, 777], pa.int32())], schema=key_schema(SCHEMA))
    write_keys(str(tmp_path), "r", keys, rows(range(3, 6), 1))
    assert Path(reloaded_path(str(tmp_path), "r")).is_dir()
    since = updates_of_all_that_keep_their_large_values()
    net = under_keys(SCHEMA, str(tmp_path), "r", since, keeping(held))
    assert {row["id"]: (row["n"], row["big"]) for row in net.rows.to_pylist()} == {
        4: (7, large(4)),
        1005: (7, large(5)),
    }
    assert sorted(net.removed["id"].to_pylist()) == [3, 777]
