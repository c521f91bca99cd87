"""Keys as codes, and the index that leads from codes to places: against plain dictionaries."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.arrow_types import key_schema
from headwater.delta.index import index as key_index
from headwater.delta.index import runs as key_runs
from headwater.delta.index.codes import _SPREAD, Codes, encode
from headwater.delta.index.index import NOWHERE, KeyIndex, file_of, place_of, row_of
from headwater.schema import Column, TableSchema, ValueType

INTEGERS = st.integers(-(2**31), 2**31 - 1)
TEXTS = st.text(alphabet="ab:1é", max_size=4)
KINDS: dict[str, tuple[list[ValueType], st.SearchStrategy[Any]]] = {
    "smallint": ([ValueType("int2", "smallint")], st.tuples(st.integers(-(2**15), 2**15 - 1))),
    "bigint": ([ValueType("int8", "bigint")], st.tuples(st.integers(-(2**63), 2**63 - 1))),
    "date": ([ValueType("date", "date")], st.tuples(st.dates(date(1, 1, 1), date(9999, 12, 31)))),
    "two integers": ([ValueType("int4", "int")] * 2, st.tuples(st.integers(-3, 3), INTEGERS)),
    "uuid": ([ValueType("uuid", "string")], st.tuples(st.uuids().map(str))),
    "text": ([ValueType("text", "string")], st.tuples(TEXTS)),
    "two texts": ([ValueType("text", "string")] * 2, st.tuples(TEXTS, TEXTS)),
    "bytes and integer": (
        [ValueType("bytea", "binary"), ValueType("int4", "int")],
        st.tuples(st.binary(max_size=3), INTEGERS),
    ),
}


def schema_of(values: list[ValueType]) -> TableSchema:
    columns = tuple(Column(f"k{at}", at, 0, -1, value) for at, value in enumerate(values, 1))
    return TableSchema(1, "public", "t", columns, tuple(column.name for column in columns))


def table(schema: TableSchema, keys: list[tuple[Any, ...]]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.key, key, strict=True)) for key in keys], schema=key_schema(schema))


def pairs(codes: Codes) -> list[tuple[int, int]]:
    second = codes.second if codes.second is not None else np.zeros(len(codes), dtype=np.uint64)
    return list(zip(codes.first.tolist(), second.tolist(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_codes_are_equal_exactly_when_the_keys_are(kind: str, data: st.DataObject) -> None:
    values, strategy = KINDS[kind]
    keys = data.draw(st.lists(strategy, max_size=30))
    schema = schema_of(values)
    codes = pairs(encode(schema, table(schema, keys)))
    assert [codes[i] == codes[j] for i in range(len(keys)) for j in range(i)] == [
        keys[i] == keys[j] for i in range(len(keys)) for j in range(i)
    ]


def test_a_uuid_is_its_digits_and_a_slice_of_a_column_is_not_the_whole() -> None:
    schema = schema_of([ValueType("uuid", "string")])
    keys = [(str(uuid.UUID(int=number)),) for number in (0, 1, 2**127 + 5, 2**128 - 1)]
    whole = table(schema, keys)
    assert pairs(encode(schema, whole.slice(2, 2))) == pairs(encode(schema, whole))[2:]
    upper = table(schema, [(key.upper(),) for (key,) in keys])
    assert pairs(encode(schema, upper)) == pairs(encode(schema, whole))


@given(st.lists(st.uuids(), max_size=20))
def test_a_uuid_is_its_digits_whatever_they_are(keys: list[uuid.UUID]) -> None:
    schema = schema_of([ValueType("uuid", "string")])
    codes = encode(schema, table(schema, [(str(key),) for key in keys]))
    assert codes.second is not None
    assert codes.second.tolist() == [key.int >> 64 for key in keys]
    undone = np.uint64(pow(int(_SPREAD[1]), -1, 1 << 64))
    low = (codes.first - codes.second * _SPREAD[0]) * undone
    assert low.tolist() == [key.int & (1 << 64) - 1 for key in keys]


def test_minus_zero_and_zero_are_one_key() -> None:
    schema = schema_of([ValueType("float8", "double")])
    zero, minus = pairs(encode(schema, table(schema, [(0.0,), (-0.0,)])))
    assert zero == minus


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("on_disk_above", [1 << 21, 0])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_newest_place_of_a_key_is_found_and_of_no_other(
    data: st.DataObject, words: int, on_disk_above: int
) -> None:
    index, model = KeyIndex(), dict[tuple[int, int], int]()
    word = st.integers(0, 40)
    puts = data.draw(st.lists(st.lists(st.tuples(word, word if words == 2 else st.just(0)), unique=True), max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "_ON_DISK_ABOVE", on_disk_above)
        if not on_disk_above:
            # Every run as a large one: through its samples, and merged in many parts.
            patch.setattr(key_index, "_AT_ONCE", 0)
            patch.setattr(key_runs, "_SHORT", 0)
            patch.setattr(key_runs, "_SAMPLED", 2)
            patch.setattr(key_runs, "_PART", 4)
        for number, keys in enumerate(puts):
            places = place_of(number, np.arange(len(keys), dtype=np.int64))
            index.put(codes_of(keys, words), places)
            model.update(zip(keys, places.tolist(), strict=True))
        asked = [(a, b) for a in range(42) for b in (range(42) if words == 2 else [0])]
        found = index.find(codes_of(asked, words)).tolist()
    assert found == [model.get(key, NOWHERE) for key in asked]
    assert len(index) <= sum(map(len, puts))


def codes_of(keys: list[tuple[int, int]], words: int) -> Codes:
    both = np.array(keys, dtype=np.uint64).reshape(-1, 2)
    return Codes(both[:, 0].copy(), both[:, 1].copy() if words == 2 else None)


def test_a_place_is_a_file_and_a_row_of_it() -> None:
    rows = np.array([0, 7, 2**32 - 1], dtype=np.int64)
    places = place_of(2**20, rows)
    assert file_of(places).tolist() == [2**20] * 3
    assert row_of(places).tolist() == rows.tolist()


def test_what_lay_in_files_that_are_gone_is_forgotten() -> None:
    live = np.ones(1000, dtype=np.bool_)
    index = KeyIndex(lambda: live.copy())
    for number in range(1000):
        index.put(codes_of([(number, 0)], 1), place_of(number, np.zeros(1, dtype=np.int64)))
        live[: max(0, number - 3)] = False
    assert len(index) < 520  # the newest half at most has not been merged since
    assert index.find(codes_of([(999, 0)], 1)).tolist() == [place_of(999, np.zeros(1, dtype=np.int64))[0]]


def test_runs_stay_few_however_many_small_batches_come() -> None:
    index = KeyIndex()
    for number in range(1000):
        index.put(codes_of([(number * 10 + i, 0) for i in range(10)], 1), place_of(number, np.arange(10)))
    assert len(index) == 10_000
    assert len(index._runs) <= 14


class Later(Executor):
    """Runs nothing until it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: call(*args, **named)))
        return future

    def run(self) -> None:
        future, call = self.waiting.pop(0)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)


def put_all(index: KeyIndex, number: int, keys: range) -> None:
    index.put(codes_of([(key, 0) for key in keys], 1), place_of(number, np.arange(len(keys), dtype=np.int64)))


def files_of(index: KeyIndex, *keys: int) -> list[int]:
    found: list[int] = file_of(index.find(codes_of([(key, 0) for key in keys], 1))).tolist()
    return found


def test_a_large_merge_goes_on_beside_the_writer_and_is_swapped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_AT_ONCE", 100)
    later = Later()
    index = KeyIndex(beside=later)
    put_all(index, 0, range(1000))
    put_all(index, 1, range(500, 1100))
    assert len(later.waiting) == 1, "it waits for its turn beside the writer"
    put_all(index, 2, range(550, 560))  # meanwhile
    put_all(index, 3, range(555, 565))
    asked = (0, 499, 500, 549, 550, 555, 564, 565, 1099, 1100)
    expected = [0, 0, 1, 1, 2, 3, 3, 1, 1, NOWHERE]
    assert files_of(index, *asked) == expected
    later.run()
    assert files_of(index, *asked) == expected
    assert len(index) == 1100 + 15
    assert len(index._runs) == 2


def test_a_merge_that_fails_leaves_the_index_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_index, "_AT_ONCE", 0)
    later = Later()
    index = KeyIndex(beside=later)
    put_all(index, 0, range(100))
    put_all(index, 1, range(50, 150))

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(key_index, "merged", full)
    later.run()
    assert files_of(index, 49, 50, 150) == [0, 1, NOWHERE]
    assert "no space left" in caplog.text
    monkeypatch.undo()
    put_all(index, 2, range(10))
    later.run()
    assert files_of(index, 9, 49, 50) == [2, 0, 1]


def test_closing_does_not_wait_for_a_merge_that_has_not_begun() -> None:
    later = Later()
    index = KeyIndex(beside=later)
    for number in range(2):
        put_all(index, number, range(200_000))
    index.close()
    later.run()
    assert files_of(index, 5) == [1]


@pytest.mark.parametrize("in_order", [False, True])
def test_an_index_is_built_of_many_parts_with_few_of_them_in_memory(
    monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    monkeypatch.setattr(key_index, "_ON_DISK_ABOVE", 1000)
    index = KeyIndex()
    chance = np.random.default_rng(5)
    keys = chance.permutation(10_000)

    def parts() -> Iterator[tuple[Codes, Any]]:
        for number, part in enumerate(np.split(keys, 40)):
            rows = np.argsort(part) if in_order else np.arange(250)
            yield Codes(part[rows].astype(np.uint64)), place_of(number, rows.astype(np.int64))

    index.build(parts(), in_order=in_order)
    assert len(index._runs) == 1
    places = index.find(Codes(keys.astype(np.uint64)))
    assert (keys[file_of(places) * 250 + row_of(places)] == keys).all()
    assert (index.find(Codes(np.arange(10_000, 10_100).astype(np.uint64))) == NOWHERE).all()


def test_a_full_folder_is_no_end_of_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_ON_DISK_ABOVE", 10)
    index = KeyIndex(folder=lambda: str(tmp_path / "removed by somebody"))
    for number in range(3):
        put_all(index, number, range(100))
    assert files_of(index, 99) == [2]


def test_what_waits_for_a_merge_beside_the_writer_is_not_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_ON_DISK_ABOVE", 1000)
    monkeypatch.setattr(key_index, "_AT_ONCE", 100)
    later = Later()
    index = KeyIndex(beside=later)
    for number in range(20):
        put_all(index, number, range(number * 250, number * 250 + 500))
        in_memory = [run for run in index._runs if run.mapping is None]
        assert sum(map(len, in_memory)) <= 1000 + 1000, "those that are being merged, and those that wait"
    assert files_of(index, 0, 249, 250, 4999, 5249) == [0, 0, 1, 19, 19]
    while later.waiting:
        later.run()
        assert files_of(index, 0, 249, 250, 4999, 5249, 5250) == [0, 0, 1, 19, 19, NOWHERE]
