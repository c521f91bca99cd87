"""The kept index of a table's keys: found again after a restart, and never believed when there is any doubt."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyroaring import BitMap

from headwater.apply import file_keys
from headwater.apply.live_table import Added, Keep, LiveTable
from headwater.arrow_types import key_schema, lake_schema
from headwater.delta import delta_log
from headwater.delta.data_files import column_batches, write_batches
from headwater.delta.deletion_vectors import write_vectors
from headwater.delta.delta_log import DataFile
from headwater.delta.index import cache as index_cache
from headwater.delta.index import kept_index
from headwater.delta.index.cache import cache_folder
from headwater.delta.index.codes import encode
from headwater.delta.index.index import NOWHERE
from headwater.delta.log_entries import Action
from headwater.schema import Column, TableSchema, ValueType

COLUMNS = (Column("id", 1, 0, -1, ValueType("int8", "bigint")), Column("a", 2, 0, -1, ValueType("int4", "int")))
SCHEMA = TableSchema(1, "public", "t", COLUMNS, ("id",))


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of a few rows are kept, below the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_index, "WORTH_KEEPING", 1)


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files of which keys were read."""
    found: list[str] = []

    def noted(folder: str, file: DataFile, *rest: object) -> Iterator[pa.Table]:
        found.append(file.name)
        return column_batches(folder, file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(file_keys, "column_batches", noted)
    return found


class Table:
    """A table of files with ascending ids, written by hand."""

    def __init__(self, folder: Path) -> None:
        (folder / "_delta_log").mkdir(parents=True)
        self.folder, self.version = str(folder), -1
        self.files: list[DataFile] = []
        self.commit({"metaData": {"id": folder.name, "configuration": {}}})

    def commit(self, *actions: Action) -> None:
        self.version += 1
        lines = [json.dumps(action) for action in (*actions, delta_log.commit_info("WRITE", {}, {}, self.version - 1))]
        (Path(self.folder) / "_delta_log" / f"{self.version:020d}.json").write_text("\n".join(lines) + "\n")

    def add(self, *ids: int) -> DataFile:
        rows = pa.table({"id": list(ids), "a": [0] * len(ids)}, schema=lake_schema(SCHEMA))
        file = write_batches(self.folder, rows.schema, [rows])
        self.commit(delta_log.add(file))
        self.files.append(file)
        return file

    def delete(self, file: DataFile, *rows: int) -> DataFile:
        (vector,) = write_vectors(self.folder, {file.name: BitMap(rows)}).values()
        after = delta_log.with_vector(file, vector)
        self.commit(delta_log.remove(file), delta_log.add(after))
        return after

    def state(self, beside: ThreadPoolExecutor, incarnation: int = 1, generation: int = 1) -> LiveTable:
        return LiveTable(self.folder, SCHEMA, Keep(incarnation, generation), beside)


def find(state: LiveTable, *ids: int) -> list[tuple[str, int] | None]:
    """File and row of each id."""
    places = state.find(encode(SCHEMA, pa.table({"id": list(ids)}, schema=key_schema(SCHEMA))))
    found: list[tuple[str, int] | None] = []
    for place in places.tolist():
        if place == NOWHERE:
            found.append(None)
            continue
        ((name, rows),) = state.deletions(np.array([place])).items()
        (row,) = rows - state.deleted_rows(name)
        found.append((name, row))
    return found


def kept(table: Table, beside: ThreadPoolExecutor, generation: int = 1) -> None:
    """Use the table once and keep its index."""
    state = table.state(beside, generation=generation)
    find(state, 1)
    state.save_index(at_once=True)
    state.close()


def test_after_a_restart_only_what_is_new_is_read(tmp_path: Path, beside: ThreadPoolExecutor, reads: list[str]) -> None:
    table = Table(tmp_path / "t")
    first, second = table.add(1, 2, 3), table.add(4, 5, 6)
    kept(table, beside)
    assert reads == [first.name, second.name]
    reads.clear()
    table.delete(first, 0)  # 1 goes, 2 moves into a new file, which is written in two steps
    third = table.add(2, 7)
    state = table.state(beside)
    assert find(state, 1, 3, 4, 6, 7, 8) == [
        None,
        (first.name, 2),
        (second.name, 0),
        (second.name, 2),
        (third.name, 1),
        None,
    ]
    assert find(state, 2) == [(third.name, 0)]
    assert reads == [third.name]
    state.close()


def test_a_driver_goes_on_with_what_it_has_restored_and_keeps_it_again(
    tmp_path: Path, beside: ThreadPoolExecutor, reads: list[str]
) -> None:
    table = Table(tmp_path / "t")
    first = table.add(1, 2, 3)
    for turn in range(3):
        kept(table, beside, generation=turn + 1)
        state = table.state(beside, generation=turn + 1)
        assert find(state, 1) != [None]
        rows = pa.table({"id": [10 + turn], "a": [0]}, schema=lake_schema(SCHEMA))
        file = write_batches(table.folder, rows.schema, [rows])
        actions = [delta_log.add(file), delta_log.commit_info("WRITE", {}, {}, table.version)]
        table.version += 1
        delta_log.commit(table.folder, table.version, actions)
        state.follow_own(actions, {}, [Added(file, encode(SCHEMA, rows.select(["id"])))])
        assert find(state, 10 + turn) == [(file.name, 0)]
        state.save_index(at_once=True)
        state.close()
    assert reads == [first.name]
    (folder,) = cache_folder().iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *(run["name"] for run in manifest["runs"])}


def damage_a_run(folder: Path, table: Table) -> None:
    (run,) = folder.glob("*.run")
    data = bytearray(run.read_bytes())
    data[3] ^= 1
    run.write_bytes(data)


def shorten_a_run(folder: Path, table: Table) -> None:
    (run,) = folder.glob("*.run")
    run.write_bytes(run.read_bytes()[:-8])


def remove_a_run(folder: Path, table: Table) -> None:
    (run,) = folder.glob("*.run")
    run.unlink()


def change_the_manifest(folder: Path, table: Table) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))


def cut_the_manifest(folder: Path, table: Table) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])


def rewrite_history(folder: Path, table: Table) -> None:
    """A lake that was put back to a backup, and has come to the same version again on another way."""
    last = Path(table.folder) / "_delta_log" / f"{table.version:020d}.json"
    last.write_text(last.read_text() + "\n")


def open_the_folder_to_others(folder: Path, table: Table) -> None:
    folder.chmod(0o777)


def remove_everything(folder: Path, table: Table) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    "doubt",
    [
        damage_a_run,
        shorten_a_run,
        remove_a_run,
        change_the_manifest,
        cut_the_manifest,
        rewrite_history,
        open_the_folder_to_others,
        remove_everything,
    ],
)
def test_at_any_doubt_the_index_is_built_anew(
    tmp_path: Path, beside: ThreadPoolExecutor, reads: list[str], doubt: Callable[[Path, Table], None]
) -> None:
    table = Table(tmp_path / "t")
    first, second = table.add(1, 2, 3), table.add(4, 5, 6)
    kept(table, beside)
    reads.clear()
    (folder,) = cache_folder().iterdir()
    doubt(folder, table)
    state = table.state(beside)
    assert find(state, 2, 4) == [(first.name, 1), (second.name, 0)]
    assert reads == [first.name, second.name]
    state.save_index(at_once=True)
    state.close()


@pytest.mark.parametrize(("incarnation", "generation", "key"), [(2, 1, "id"), (1, 0, "id"), (1, 1, "a")])
def test_another_incarnation_an_older_driver_and_other_keys_do_not_meet(
    tmp_path: Path, beside: ThreadPoolExecutor, reads: list[str], incarnation: int, generation: int, key: str
) -> None:
    table = Table(tmp_path / "t")
    table.add(1, 2, 3)
    kept(table, beside)
    reads.clear()
    other = TableSchema(1, "public", "t", COLUMNS, (key,))
    state = LiveTable(table.folder, other, Keep(incarnation, generation), beside)
    state.find(encode(other, pa.table({key: [1]}, schema=key_schema(other))))
    assert len(reads) == 1
    state.close()


def test_rows_that_are_there_again_are_read_again(tmp_path: Path, beside: ThreadPoolExecutor, reads: list[str]) -> None:
    table = Table(tmp_path / "t")
    first = table.add(1, 2)
    without = table.delete(first, 0)
    second = table.add(1)
    kept(table, beside)
    reads.clear()
    table.commit(delta_log.remove(second), delta_log.remove(without), delta_log.add(first))  # a RESTORE
    state = table.state(beside)
    assert find(state, 1, 2) == [(first.name, 0), (first.name, 1)]
    state.close()


def test_two_processes_do_not_share_a_kept_index(tmp_path: Path, beside: ThreadPoolExecutor, reads: list[str]) -> None:
    table = Table(tmp_path / "t")
    file = table.add(1)
    kept(table, beside)
    one, other = table.state(beside), table.state(beside)
    for state in (one, other):
        assert find(state, 1) == [(file.name, 0)]
    assert reads == [file.name, file.name], "read for the first time, and by the one that found it locked"
    one.close()
    reads.clear()
    other.save_index(at_once=True)  # the one that ended has left it
    other.close()
    after = table.state(beside)
    assert find(after, 1) == [(file.name, 0)]
    assert reads == []
    after.close()
    assert len(list(cache_folder().rglob("*.run"))) == 1, "nothing is left of the other's"


def test_what_is_kept_stays_below_its_limit_and_is_private(
    tmp_path: Path, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_cache, "_AT_MOST", 100)
    tables = [Table(tmp_path / name) for name in ("one", "two", "three")]
    for age, table in enumerate(tables):
        table.add(*range(1, 4))  # 48 bytes of index
        kept(table, beside)
        (newest,) = (path for path in cache_folder().iterdir() if (path / "manifest.json").stat().st_mtime > 1000)
        os.utime(newest / "manifest.json", (age, age))
    ages = sorted((path / "manifest.json").stat().st_mtime for path in cache_folder().iterdir())
    assert ages == [1, 2], "the one that was longest not used has gone"
    for path in [cache_folder(), *cache_folder().rglob("*.run")]:
        assert path.stat().st_mode & 0o077 == 0


def test_what_is_kept_never_fills_the_disk(
    tmp_path: Path, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_cache, "_AT_MOST", 1 << 20)
    first, second = Table(tmp_path / "first"), Table(tmp_path / "second")
    for table in (first, second):
        table.add(*range(1, 4))
    kept(first, beside)
    (old,) = cache_folder().iterdir()
    usage = shutil.disk_usage(tmp_path)
    nearly_full = usage._replace(free=int(usage.total * 0.04))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if not old.exists() else nearly_full)
    kept(second, beside)
    assert not old.exists(), "the one that was longest not used makes room"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full)
    kept(first, beside)
    assert "the disk is nearly full" in caplog.text
    assert len(list(cache_folder().rglob("manifest.json"))) <= 1


def test_where_nothing_can_be_kept_the_index_works_all_the_same(
    tmp_path: Path, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    table = Table(tmp_path / "t")
    file = table.add(1)
    kept(table, beside)
    state = table.state(beside)
    assert find(state, 1, 2) == [(file.name, 0), None]
    state.close()
