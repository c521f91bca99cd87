"""Values of partition columns as texts and folders; new rows dealt out to one file for each partition."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.delta import new_files as partitioned_write
from headwater.delta.data_files import read_columns
from headwater.delta.layout import Layout, layout_of, obstacle
from headwater.delta.new_files import Written, write_rows
from headwater.delta.partition_values import NameTooLong, folder_of, from_text, to_text

KINDS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "smallint": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "bigint": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "decimal": (pa.decimal128(20, 4), st.decimals(-(10**15), 10**15, places=4)),
    "boolean": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates(date(1, 1, 1), date(9999, 12, 31))),
    "timestamp": (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    "timestamp_ntz": (pa.timestamp("us"), st.datetimes()),
    "string": (pa.string(), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None)
def test_a_value_is_the_same_after_the_log(kind: str, data: st.DataObject) -> None:
    arrow, values = KINDS[kind]
    value = pa.scalar(data.draw(st.none() | values), arrow).as_py()
    assert pa.scalar(from_text(to_text(value), arrow), arrow).as_py() == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024-02-03 04:05:06", datetime(2024, 2, 3, 4, 5, 6, tzinfo=UTC)),
        ("2024-02-03 04:05:06.5", datetime(2024, 2, 3, 4, 5, 6, 500000, tzinfo=UTC)),
        ("2024-02-03T05:05:06.000007+01:00", datetime(2024, 2, 3, 4, 5, 6, 7, tzinfo=UTC)),
        ("", None),
    ],
)
def test_times_are_read_as_older_writers_wrote_them(text: str, value: datetime | None) -> None:
    kind = pa.timestamp("us", "UTC")
    assert pa.scalar(from_text(text, kind), kind).as_py() == value


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=9), st.none() | st.text(max_size=9), min_size=1, max_size=3))
def test_a_folder_has_one_level_for_each_column_whatever_its_value(values: dict[str, str | None]) -> None:
    folder = folder_of(values)
    levels = folder.split("/")
    assert levels.pop() == ""
    assert len(levels) == len(values)
    assert all(level.count("=") == 1 and level not in (".", "..") for level in levels)


def test_a_name_that_no_file_system_has_is_refused_and_names_the_column() -> None:
    assert folder_of({"a": "ä" * 126}) == f"a={'ä' * 126}/"
    with pytest.raises(NameTooLong, match="column a "):
        folder_of({"b": "x", "a": "ä" * 127})


SCHEMA = pa.schema([("id", pa.int64()), ("p", pa.string()), ("q", pa.int32())])


def parts(*sizes: int, partitions: int) -> list[pa.Table]:
    """Tables with rising ids, their rows scattered over so many partitions."""
    tables, first = [], 0
    for size in sizes:
        ids = np.arange(first, first + size)
        mixed = ids * 7919 % partitions
        texts = [None if number % 5 == 0 else f"p/{number % 5}" for number in mixed.tolist()]
        columns = [pa.array(ids), pa.array(texts, pa.string()), pa.array((mixed // 5).astype(np.int32))]
        tables.append(pa.table(columns, schema=SCHEMA))
        first += size
    return tables


def rows_in(folder: Path, written: list[Written], layout: Layout) -> list[tuple[Any, ...]]:
    return [
        tuple(row.values())
        for one in written
        for row in read_columns(str(folder), one.file, SCHEMA, layout).to_pylist()
    ]


@pytest.mark.parametrize("open_files", [64, 2])
def test_every_row_is_in_a_file_of_its_partition_and_its_number_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_files: int
) -> None:
    monkeypatch.setattr(partitioned_write, "_OPEN_FILES", open_files)
    monkeypatch.setattr("headwater.delta.data_files._ROW_GROUP", 50)
    layout = Layout(("p", "q"))
    tables = parts(100, 1, 120, partitions=10)
    written = write_rows(str(tmp_path), SCHEMA, tables, layout)
    assert len(written) == 10 if open_files == 64 else len(written) > 10
    whole = pa.concat_tables(tables)
    numbers = np.concatenate([one.numbers for one in written if one.numbers is not None])
    assert sorted(numbers.tolist()) == list(range(221))
    assert rows_in(tmp_path, written, layout) == [
        tuple(row.values()) for row in whole.take(pa.array(numbers)).to_pylist()
    ]
    for one in written:
        assert pq.read_schema(one.file.in_folder(str(tmp_path))).names == ["id"]
        assert set(one.file.partition_values) == {"p", "q"}


def test_what_fails_half_way_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned_write, "_OPEN_FILES", 2)

    def failing() -> Any:
        yield from parts(200_000, partitions=10)
        raise OSError("the source of the rows has gone")

    with pytest.raises(OSError, match="has gone"):
        write_rows(str(tmp_path), SCHEMA, failing(), Layout(("p", "q")))
    assert not list(tmp_path.rglob("*.parquet"))


def test_files_hold_physical_names_and_field_ids(tmp_path: Path) -> None:
    fields = ",".join(
        f'{{"name":"{name}","type":"{kind}","nullable":true,"metadata":'
        f'{{"delta.columnMapping.id":{at},"delta.columnMapping.physicalName":"col-{at}"}}}}'
        for at, (name, kind) in enumerate([("id", "long"), ("p", "string"), ("q", "integer")], 1)
    )
    metadata = {
        "partitionColumns": ["p"],
        "configuration": {"delta.columnMapping.mode": "name"},
        "schemaString": f'{{"type":"struct","fields":[{fields}]}}',
    }
    layout = layout_of(metadata)
    assert obstacle(metadata) == ""
    assert "by id" in obstacle({**metadata, "configuration": {"delta.columnMapping.mode": "id"}})
    (table,) = parts(4, partitions=1)
    (one,) = write_rows(str(tmp_path), SCHEMA, [table], layout)
    stored = pq.read_schema(one.file.in_folder(str(tmp_path)))
    assert [(f.name, f.metadata[b"PARQUET:field_id"]) for f in stored] == [("col-1", b"1"), ("col-3", b"3")]
    assert one.file.partition_values == {"col-2": None}
    assert '"col-3":0' in (one.file.stats or "")
    assert rows_in(tmp_path, [one], layout) == [tuple(row.values()) for row in table.to_pylist()]


def test_a_type_that_every_writer_writes_otherwise_is_left_to_delta() -> None:
    field = '{"name":"r","type":"double","nullable":true,"metadata":{}}'
    metadata = {"partitionColumns": ["r"], "schemaString": f'{{"type":"struct","fields":[{field}]}}'}
    assert "r, a column of type double" in obstacle(metadata)
