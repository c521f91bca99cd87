"""What is staged of an open transaction, slice by slice, is what the whole of it does; and when it is not staged."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.apply.staged.files import CannotStage, StagedRows, StagedTable, sweep_staged
from headwater.arrow_types import key_schema, lake_schema
from headwater.delta.data_files import read_columns
from headwater.delta.index.codes import encode
from headwater.lake.paths import key_scratch, staged_path
from headwater.net_changes import NetChanges
from headwater.replicate.preapply.decide import Worth
from headwater.schema import Column, TableSchema, ValueType

VALUES = {"id": ValueType("text", "string"), "note": ValueType("text", "string")}
SCHEMA = TableSchema(
    1, "public", "t", tuple(Column(name, at, 0, -1, kind) for at, (name, kind) in enumerate(VALUES.items(), 1)), ("id",)
)
KEYS = [f"key {number}" for number in range(8)]

Table = dict[str, str]


def changes(rows: dict[str, tuple[str, bool]], removed: list[str], **more: Any) -> NetChanges:
    """`rows`: per key its note, and whether the lake must hold the key."""
    return NetChanges(
        rows=pa.Table.from_pylist([{"id": key, "note": note} for key, (note, _) in rows.items()], lake_schema(SCHEMA)),
        stored=np.array([stored for _, stored in rows.values()], dtype=np.bool_),
        unchanged={},
        origins=None,
        removed=pa.Table.from_pylist([{"id": key} for key in removed], key_schema(SCHEMA)),
        changes=len(rows) + len(removed),
        **more,
    )


def slice_of(before: Table, after: Table, touched: set[str]) -> NetChanges:
    """What a slice does that found `before` and left `after`. A key that it inserted and deleted leaves no trace."""
    rows = {key: (after[key], key in before) for key in touched if key in after}
    return changes(rows, [key for key in touched if key in before and key not in after])


def applied(staged: StagedRows, stored: Table) -> Table:
    """The staged result on the table `stored`, which must be as it says."""
    result = dict(stored)
    for key in staged.removed["id"].to_pylist():
        assert key in stored
        del result[key]
    seen: set[str] = set()
    for file in staged.files:
        rows = read_columns(staged.folder, file.file, lake_schema(SCHEMA)).to_pylist()
        codes = encode(SCHEMA, pa.Table.from_pylist([{"id": row["id"]} for row in rows], key_schema(SCHEMA)))
        assert np.array_equal(file.keys().first, codes.first)
        for number, row in enumerate(rows):
            if number not in file.gone:
                assert row["id"] not in seen, "one row a key"
                assert (row["id"] in stored) == file.stored[number]
                seen.add(row["id"])
                result[row["id"]] = row["note"]
    assert not seen & set(staged.removed["id"].to_pylist())
    return result


OPERATIONS = st.lists(
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["put", "remove"])), max_size=10), max_size=8
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=st.sets(st.sampled_from(KEYS)), slices=OPERATIONS)
def test_slices_come_to_what_the_whole_transaction_does(
    tmp_path_factory: pytest.TempPathFactory, stored: set[str], slices: list[list[tuple[str, str]]]
) -> None:
    table: Table = dict.fromkeys(stored, "stored")
    before_all = dict(table)
    staged = StagedTable(str(tmp_path_factory.mktemp("staged")), SCHEMA)
    number = 0
    for operations in slices:
        before = dict(table)
        for key, what in operations:
            number += 1
            if what == "put":
                table[key] = f"note {number}"
            else:
                table.pop(key, None)
        staged.take(slice_of(before, table, {key for key, _ in operations}))
    assert applied(staged.result(), before_all) == table


def test_what_only_the_lake_knows_is_not_staged(tmp_path: Path) -> None:
    staged = StagedTable(str(tmp_path / "x"), SCHEMA)
    kept = replace(changes({"a": ("", True)}, []), unchanged={"note": np.array([True])})
    with pytest.raises(CannotStage, match="large values"):
        staged.take(kept)
    with pytest.raises(CannotStage, match="truncates"):
        staged.take(changes({}, [], truncated=True))


def test_files_of_other_generations_are_swept_and_those_of_the_newest_stay(tmp_path: Path) -> None:
    for generation in (3, 4, 5):
        StagedTable(f"{staged_path(str(tmp_path))}/{generation}/700/0", SCHEMA).take(changes({"a": ("b", False)}, []))
    assert len(sweep_staged(str(tmp_path), 5)) == 2
    assert os.listdir(staged_path(str(tmp_path))) == ["5"]
    assert sweep_staged(str(tmp_path / "nothing"), 5) == []


def test_keys_that_another_process_reads_stay_and_those_of_a_day_ago_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = key_scratch(str(tmp_path)), key_scratch(str(tmp_path))
    for folder in (old, new):
        os.makedirs(folder)
    assert sweep_staged(str(tmp_path), 5) == []
    moment = time.time() + 24 * 3600 + 2
    monkeypatch.setattr("headwater.apply.staged.files.time.time", lambda: moment)
    os.rename(new, new := new.replace("keys-", f"keys-{int(moment)}-"))
    assert sweep_staged(str(tmp_path), 5) == [old]
    assert os.listdir(staged_path(str(tmp_path))) == [os.path.basename(new)]


def test_while_most_transactions_are_rolled_back_only_some_are_staged() -> None:
    worth = Worth()
    for _ in range(4):
        assert worth.try_next() or worth.committed < 0.25
        worth.ended(committed=False)
    assert [worth.try_next() for _ in range(16)].count(True) == 2
    worth.ended(committed=True)
    assert worth.try_next()
