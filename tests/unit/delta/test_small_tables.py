"""Rows of small tables within bounds: what every file would give, though most are not opened."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.soak import examples
from headwater.delta import delta_log, small_tables, storage
from headwater.delta.log_entries import log_entry, read_actions
from headwater.delta.small_tables import (
    SmallTable,
    append_once,
    compact,
    create_table,
    newest_first,
    open_table,
    read_rows,
    write_checkpoint,
)

SCHEMA = pa.schema(
    [("number", pa.int64()), ("word", pa.string()), ("moment", pa.timestamp("us", "UTC")), ("size", pa.int64())]
)
BEGAN = datetime(2026, 1, 1, 0, 0, 0, 500, tzinfo=UTC)
MOMENTS = st.integers(0, 9).map(lambda number: BEGAN + timedelta(microseconds=337 * number))
WORDS = st.sampled_from(["a", "b", "bb", "a" * 40, "a" * 31 + "b" + "c" * 9])
ROWS = st.fixed_dictionaries(
    {"word": st.none() | WORDS, "moment": st.none() | MOMENTS, "size": st.none() | st.integers(-3, 3)}
)


def bounds_of(values: Any) -> Any:
    return st.tuples(st.none() | values, st.none() | values)


def made(folder: str, files: list[list[dict[str, Any]]]) -> tuple[SmallTable, list[dict[str, Any]]]:
    """A table with a file for each of `files`, whose rows are numbered."""
    table = create_table(folder, SCHEMA)
    rows: list[dict[str, Any]] = []
    for file in files:
        numbered = [{"number": len(rows) + place, **row} for place, row in enumerate(file)]
        rows += numbered
        append_once(table, numbered, SCHEMA)
    return table, rows


def holds(row: dict[str, Any], bounds: dict[str, tuple[Any, Any]]) -> bool:
    for column, (low, high) in bounds.items():
        value = row[column]
        if value is None or (low is not None and value < low) or (high is not None and value > high):
            return False
    return True


@settings(max_examples=examples(40), deadline=None)
@given(
    files=st.lists(st.lists(ROWS, min_size=1, max_size=3), min_size=1, max_size=6),
    bounds=st.fixed_dictionaries(
        {}, optional={"word": bounds_of(WORDS), "moment": bounds_of(MOMENTS), "size": bounds_of(st.integers(-3, 3))}
    ),
    gathered=st.booleans(),
)
def test_rows_within_bounds_are_those_of_all_files_that_lie_in_them(
    tmp_path_factory: pytest.TempPathFactory, files: Any, bounds: Any, gathered: bool
) -> None:
    table, rows = made(str(tmp_path_factory.mktemp("table")), files)
    if gathered:
        compact(table, 1 << 20)
    expected = [row for row in rows if holds(row, bounds)]
    found = read_rows(table, bounds).to_pylist()
    assert sorted(found, key=lambda row: int(row["number"])) == expected
    assert read_rows(table, bounds, ["word"]).to_pylist() == [{"word": row["word"]} for row in found]
    newest = [row for part in newest_first(table, "number", bounds, ["size"]) for row in part.to_pylist()]
    assert newest == [{"number": row["number"], "size": row["size"]} for row in reversed(expected)]


def test_what_was_read_before_an_error_is_still_news_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a store may fail between two requests."""
    table, _ = made(str(tmp_path), [])
    reader = open_table(str(tmp_path))
    assert reader is not None
    monkeypatch.setattr(small_tables, "is_remote", lambda folder: True)
    for number in range(2):
        append_once(table, [{"number": number}], SCHEMA)
    genuine = read_actions

    def failing(folder: str, version: int) -> Any:
        if version == 2:
            raise OSError("away")
        return genuine(folder, version)

    monkeypatch.setattr(delta_log, "read_actions", failing)
    with pytest.raises(OSError, match="away"):
        reader.look()
    monkeypatch.setattr(delta_log, "read_actions", genuine)
    assert (reader.version(), reader.look(), reader.version()) == (1, True, 2)
    assert not reader.look()
    append_once(reader, [{"number": 2}], SCHEMA)
    assert not reader.look(), "its own is no news"


def test_files_that_cannot_have_what_is_asked_for_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [[{"word": "a", "moment": BEGAN + timedelta(days=day), "size": None}] for day in range(30)]
    table, _ = made(str(tmp_path), files)
    genuine, opened = storage.parquet_file, 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal opened
        opened += 1
        return genuine(*arguments, **options)

    monkeypatch.setattr(storage, "parquet_file", counting)
    assert read_rows(table, {"moment": (BEGAN + timedelta(days=28), None)}).num_rows == 2
    assert read_rows(table, {"number": (None, 3)}, ["number"]).num_rows == 4
    assert (read_rows(table, {"size": (0, 0)}).num_rows, opened) == (0, 6)
    assert next(newest_first(table, "number", {}, [])).to_pylist() == [{"number": 29}]
    assert opened == 7


def test_who_opens_a_table_reads_each_entry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(str(tmp_path), [[{"word": "a", "moment": BEGAN, "size": None}] for _ in range(5)])
    read: list[str] = []
    genuine = storage.read_text

    def counting(place: str) -> str:
        read.append(place)
        return genuine(place)

    monkeypatch.setattr(storage, "read_text", counting)
    table = open_table(str(tmp_path))
    assert table is not None
    entries = [log_entry(str(tmp_path), version) for version in range(table.version() + 2)]
    assert read == entries, "and looks for one above"
    twin = table.twin()
    assert read == entries
    append_once(table, [{"number": 5}], SCHEMA)
    assert (twin.version(), len(twin.files)) == (table.version() - 1, 5)
    assert twin.look()
    assert (twin.version(), len(twin.files)) == (table.version(), 6)


def test_who_opens_a_table_while_its_log_is_cleaned_up_stands_at_its_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a log that rested with an old checkpoint is shortened, between the look at its names and at its entries."""
    folder = str(tmp_path)
    table, _ = made(folder, [[{"word": "a", "moment": BEGAN, "size": None}] for _ in range(3)])
    write_checkpoint(folder)
    for number in range(3, 6):
        append_once(table, [{"number": number}], SCHEMA)
    genuine = storage.names

    def names(place: str) -> list[str]:
        monkeypatch.setattr(storage, "names", genuine)
        found = genuine(place)
        write_checkpoint(folder)
        for version in range(table.version()):
            Path(log_entry(folder, version)).unlink()
        return found

    monkeypatch.setattr(storage, "names", names)
    opened = open_table(folder)
    assert opened is not None
    assert (opened.version(), len(opened.files)) == (table.version(), 6)


def test_of_a_large_file_without_a_wanted_row_no_other_column_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_tables, "_MANY_ROWS", 2)
    schema = pa.schema([("name", pa.string()), ("text", pa.string())])
    table = small_tables.create_table(str(tmp_path / "t"), schema)
    for names in (["a", "b", "c"], ["a", "c", "d"], ["b"]):
        small_tables.append_once(table, [{"name": name, "text": f"of {name}"} for name in names], schema)
    columns, read = [], pq.ParquetFile.read

    def told(file: pq.ParquetFile, wanted: list[str], **options: Any) -> pa.Table:
        columns.append(wanted)
        return read(file, wanted, **options)

    monkeypatch.setattr(pq.ParquetFile, "read", told)
    found = small_tables.read_rows(table, {"name": ("b", "b")}, ["text"])
    assert found.to_pylist() == [{"text": "of b"}] * 2
    assert sorted(columns) == [["name"], ["name"], ["text", "name"], ["text", "name"]]
