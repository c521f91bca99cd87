"""The log of a Delta table, read and written without an engine; deletion vectors as bytes."""

from __future__ import annotations

import json
import os
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from headwater.delta import data_files as data_files_module
from headwater.delta import delta_log, entries
from headwater.delta.data_files import read_columns, read_rows, write_batches
from headwater.delta.deletion_vectors import read_vector, write_vectors
from headwater.delta.delta_log import read_snapshot
from headwater.delta.entries import EntryReplaced
from headwater.delta.log_entries import log_entry, position_in, read_actions
from headwater.delta.small_tables import LostRace
from headwater.errors import Transient


@given(vectors=st.lists(st.sets(st.integers(0, 2**32 - 1)), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_every_vector_of_a_file_is_read_back(tmp_path_factory: pytest.TempPathFactory, vectors: list[set[int]]) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    wanted = {f"file {number}": BitMap(rows) for number, rows in enumerate(vectors)}
    descriptors = write_vectors(folder, wanted)
    assert {name: read_vector(folder, found) for name, found in descriptors.items()} == wanted
    assert all(len(found["pathOrInlineDv"]) == 20 for found in descriptors.values())


def test_a_damaged_vector_is_refused(tmp_path: Path) -> None:
    (descriptor,) = write_vectors(str(tmp_path), {"a": BitMap(range(100))}).values()
    (file,) = tmp_path.glob("deletion_vector_*.bin")
    data = bytearray(file.read_bytes())
    data[-6] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        read_vector(str(tmp_path), descriptor)


def test_the_second_commit_of_a_version_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    delta_log.commit(str(tmp_path), 1, [delta_log.transaction("first", 1)])
    with pytest.raises(LostRace):
        delta_log.commit(str(tmp_path), 1, [delta_log.transaction("second", 1)])
    assert read_snapshot(str(tmp_path)).transactions == {"first": 1}
    assert sorted(path.suffix for path in (tmp_path / "_delta_log").iterdir()) == [".json", ".json"]


def test_a_commit_over_an_entry_that_a_power_cut_has_torn_says_so_and_is_no_lost_race(tmp_path: Path) -> None:
    """Who looks again after a lost race sees the version below, and would try this one for ever."""
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    Path(log_entry(str(tmp_path), 1)).touch()
    with pytest.raises(Transient, match=r"00001\.json is empty or cut short"):
        delta_log.commit(str(tmp_path), 1, [delta_log.transaction("second", 1)])


@pytest.mark.parametrize("before", ["a merge", "wide columns", "a line that is cut off"])
def test_the_position_of_a_commit_is_found_behind_whatever_comes_before_it(tmp_path: Path, before: str) -> None:
    folder = str(tmp_path)
    (tmp_path / "_delta_log").mkdir()
    own = {"txn": {"appId": "headwater/shop/public.a/1", "version": 300, "lastUpdated": 1}}
    come_before: dict[str, list[dict[str, Any]]] = {
        "a merge": [{"commitInfo": {"operationParameters": {"predicate": "x" * 40_000}}}],
        "wide columns": [{"commitInfo": {}}, {"metaData": {"schemaString": "x" * 200_000}}],
        # 16 KiB, which are read first, end between the braces that end the line.
        "a line that is cut off": [{"commitInfo": "x" * (16_384 + 1 - len('{"commitInfo":""}\n') - len(_line(own)))}],
    }
    files = [{"add": {"path": f"file {number}"}} for number in range(1000)]
    Path(log_entry(folder, 0)).write_text(
        "".join(f"{_line(action)}\n" for action in (*come_before[before], own, *files))
    )
    assert position_in(folder, 0, "headwater/shop/") == 300
    assert position_in(folder, 0, "headwater/other/") is None
    assert position_in(folder, 1, "headwater/shop/") is None


def _line(action: dict[str, Any]) -> str:
    return json.dumps(action, separators=(",", ":"))


def overwrite(folder: str, version: int, *actions: dict[str, Any]) -> None:
    """As a program does that has looked before there was an entry, and renames its own over it now."""
    entry = Path(log_entry(folder, version))
    scratch = entry.with_name(".scratch")
    scratch.write_text("".join(f"{json.dumps(action)}\n" for action in actions))
    scratch.rename(entry)


def info(operation: str = "OPTIMIZE") -> dict[str, Any]:
    return delta_log.commit_info(operation, {}, {}, 0)


@pytest.mark.parametrize("behind", [1, 2])
def test_nothing_goes_on_top_of_a_commit_that_somebody_has_overwritten(tmp_path: Path, behind: int) -> None:
    folder = str(tmp_path)
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    for version in (1, 2):
        delta_log.commit(folder, version, [info("OURS")])
    overwrite(folder, behind, info())
    with pytest.raises(EntryReplaced) as refused:
        delta_log.commit(folder, 3, [info("OURS")])
    assert (refused.value.version, entries.stands(folder, 2)) == (behind, False)
    assert not Path(log_entry(folder, 3)).exists()
    entries.meet(folder, 2)  # judged, and accepted
    delta_log.commit(folder, 3, [info("OURS")])


def test_the_same_commit_in_another_file_is_still_ours(tmp_path: Path) -> None:
    """A folder that was copied back, or a network file system that numbers its files anew."""
    folder = str(tmp_path)
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    delta_log.commit(folder, 1, [info("OURS")])
    overwrite(folder, 1, *(read_actions(folder, 1) or []))
    assert entries.stands(folder, 1)
    delta_log.commit(folder, 2, [info("OURS")])


def test_an_entry_that_is_gone_is_not_taken_for_one_that_was_overwritten(tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    for version in (1, 2):
        delta_log.commit(folder, version, [info("OURS")])
    Path(log_entry(folder, 1)).unlink()
    assert entries.refuse_replaced(folder) == 2
    assert entries.stands(folder, 2)
    Path(log_entry(folder, 2)).unlink()
    assert entries.refuse_replaced(folder) is None
    assert not entries.stands(folder, 2)
    with pytest.raises(LostRace):
        delta_log.commit(folder, 3, [info("OURS")])


def test_a_commit_names_the_one_that_it_stands_on(tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    delta_log.commit(folder, 1, [info("OURS")])  # delta-rs gives its commits no name
    delta_log.commit(folder, 2, [info("OURS")])
    first, second = (delta_log.read_commit_info(folder, version) for version in (1, 2))
    assert delta_log.STANDS_ON not in first
    assert second[delta_log.STANDS_ON] == first["txnId"]
    assert DeltaTable(tmp_path).history()[0]["operation"] == "OURS"


def test_a_commit_that_was_made_is_not_taken_for_a_lost_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may carry a request out, lose the answer, and refuse the repetition."""
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    delta_log.commit(str(tmp_path), 1, [delta_log.transaction("mine", 1)])
    assert read_snapshot(str(tmp_path)).transactions == {"mine": 1}


def test_a_log_that_was_begun_anew_gets_no_gap(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    with pytest.raises(LostRace, match="version 4"):
        delta_log.commit(str(tmp_path), 5, [delta_log.transaction("late", 1)])


def test_a_text_in_the_statistics_does_not_end_a_line(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"a": ["x\u2028y\u0085z"]}))
    (commit,) = (tmp_path / "_delta_log").glob("*.json")
    commit.write_text(
        "\n".join(json.dumps(json.loads(line), ensure_ascii=False) for line in commit.read_text().split("\n"))
    )
    assert "\u2028" in commit.read_text()
    assert len(read_snapshot(str(tmp_path)).files) == 1


def test_a_snapshot_is_the_same_from_a_checkpoint_from_commits_and_at_a_version(tmp_path: Path) -> None:
    for number in range(5):
        write_deltalake(tmp_path, pa.table({"a": [number]}), mode="append")
    write_deltalake(tmp_path, pa.table({"a": [9]}), mode="overwrite")
    before, folder = read_snapshot(str(tmp_path)), str(tmp_path)
    DeltaTable(tmp_path).create_checkpoint()
    after = read_snapshot(folder)
    assert (after.version, set(after.files), after.protocol["minReaderVersion"]) == (
        5,
        set(before.files),
        before.protocol["minReaderVersion"],
    )
    assert len(after.files) == 1
    assert after.metadata["schemaString"] == before.metadata["schemaString"]
    assert len(read_snapshot(folder, 3).files) == 4
    older = read_snapshot(folder, 3)
    assert len(older.advance()) == 2
    assert set(older.files) == set(before.files)
    with pytest.raises(FileNotFoundError):
        read_snapshot(folder, 6)


def test_rows_are_read_by_number_in_any_order_and_over_row_groups(tmp_path: Path) -> None:
    rows = pa.table({"a": pa.array(range(300_000), pa.int64()), "b": pa.array([str(i) for i in range(300_000)])})
    file = write_batches(str(tmp_path), rows.schema, [rows])
    numbers = np.array([299_999, 0, 131_072, 131_071, 0, 262_144], dtype=np.int64)
    parts = list(read_rows(str(tmp_path), file, numbers, rows.schema))
    assert len(parts) == 3, "a row group at a time"
    for here, found in parts:
        assert found.to_pylist() == rows.take(pa.array(numbers[here])).to_pylist()
    assert sorted(np.concatenate([here for here, _ in parts])) == list(range(len(numbers)))
    assert read_columns(str(tmp_path), file, pa.schema([rows.schema.field("b")])).num_rows == 300_000
    assert file.rows == 300_000


def test_large_values_are_written_and_read_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"a": pa.array(range(500), pa.int64()), "big": pa.array([f"{i} " * 300 for i in range(500)])})
    monkeypatch.setattr(data_files_module, "_PART_BYTES", 100_000)
    file = write_batches(str(tmp_path), rows.schema, [rows])
    groups = pq.ParquetFile(file.in_folder(str(tmp_path))).metadata
    assert max(groups.row_group(at).num_rows for at in range(groups.num_row_groups)) < 100
    monkeypatch.setattr(data_files_module, "_READ_BYTES", 10_000)
    numbers = np.random.default_rng(1).permutation(500)
    parts = list(read_rows(str(tmp_path), file, numbers, rows.schema.remove(0)))
    assert max(found.nbytes for _, found in parts) < 20_000
    for here, found in parts:
        assert found["big"].to_pylist() == [f"{i} " * 300 for i in numbers[here]]
    assert sorted(np.concatenate([here for here, _ in parts])) == list(range(500))


def test_statistics_bound_every_value_and_say_nothing_of_floats(tmp_path: Path) -> None:
    early, late = datetime(1899, 1, 1, 0, 0, 0, 1, UTC), datetime(2024, 1, 1, 0, 0, 0, 999_999, UTC)
    rows = pa.table(
        {
            "number": pa.array([3, None, -5], pa.int32()),
            "day": pa.array([date(1, 1, 1), date(9999, 12, 31), None]),
            "at": pa.array([early, None, late], pa.timestamp("us", "UTC")),
            "text": pa.array(["b" * 40, "a" * 33, None]),
            "last": pa.array(["\U0010ffff" * 40, None, "x"]),
            "ratio": pa.array([float("nan"), 1.0, None]),
            "empty": pa.array([None, None, None], pa.int64()),
            "tags": pa.array([["a"], [], None], pa.list_(pa.string())),
        }
    )
    stats = json.loads(write_batches(str(tmp_path), rows.schema, [rows]).stats or "")
    assert stats["numRecords"] == 3
    assert stats["minValues"] == {"number": -5, "day": "0001-01-01", "at": "1899-01-01T00:00:00.000Z", "text": "a" * 32}
    assert stats["maxValues"] == {
        "number": 3,
        "day": "9999-12-31",
        "at": "2024-01-01T00:00:01.000Z",
        "text": "b" * 32 + "\U0010ffff",
    }
    assert stats["nullCount"]["empty"] == 3
    assert stats["tightBounds"] is True
