"""Log, parts and index call the same keys the same, and no others: random keys of every type of the lake."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.arrow_types import key_schema
from headwater.delta.index.codes import encode
from headwater.delta.index.index import KeySet
from headwater.key_equality import comparable
from headwater.log.net.codes import key_codes
from headwater.log.net.hash_parts import _hash
from headwater.schema import Column, TableSchema, ValueType

NANS = [
    struct.unpack(">d", bytes.fromhex(bits))[0] for bits in ("7ff8000000000000", "fff8000000000000", "7ff8000000000001")
]
_FLOATS = st.sampled_from([0.0, -0.0, 1.5, -1.5, float("inf"), *NANS])
_TEXTS = st.text("aA1.0 é", max_size=3)
KINDS: dict[str, tuple[ValueType, st.SearchStrategy[Any]]] = {
    "bool": (ValueType("bool", "boolean"), st.booleans()),
    "int": (ValueType("int4", "int"), st.integers(-2, 2)),
    "bigint": (ValueType("int8", "bigint"), st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1])),
    "double": (ValueType("float8", "double"), _FLOATS),
    "float": (ValueType("float4", "float"), _FLOATS),
    "date": (ValueType("date", "date"), st.integers(0, 3)),
    "timestamp": (ValueType("timestamp", "timestamp_ntz"), st.integers(0, 3)),
    "decimal": (ValueType("numeric", "decimal(9,2)", 9, 2), st.decimals(min_value=-1, max_value=1, places=2)),
    "uuid": (ValueType("uuid", "string"), st.integers(0, 3).map(lambda n: f"{n:08x}-0000-0000-0000-000000000000")),
    "string": (ValueType("text", "string"), _TEXTS),
    "binary": (ValueType("bytea", "binary"), st.binary(max_size=2)),
    "array of texts": (
        ValueType("array", "array<string>", element=ValueType("text", "string")),
        st.lists(st.none() | _TEXTS, max_size=2),
    ),
    "array of doubles": (
        ValueType("array", "array<double>", element=ValueType("float8", "double")),
        st.lists(_FLOATS, max_size=2),
    ),
}


def known(value: Any) -> Any:
    """Python's own equality, but for NaN; texts, bytes and numbers are no two of them equal."""
    if isinstance(value, list):
        return tuple(map(known, value))
    return "NaN" if isinstance(value, float) and value != value else value


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3), st.data())
def test_all_agree_on_which_keys_are_the_same(kinds: list[str], data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.tuples(*(KINDS[kind][1] for kind in kinds)), min_size=1, max_size=12))
    columns = tuple(Column(f"k{at}", at + 1, 0, -1, KINDS[kind][0]) for at, kind in enumerate(kinds))
    schema = TableSchema(1, "public", "t", columns, tuple(column.name for column in columns))
    table = pa.table(
        [
            pa.array(list(values), kind)
            for values, kind in zip(zip(*keys, strict=True), key_schema(schema).types, strict=True)
        ],
        schema=key_schema(schema),
    )
    compared = [tuple(map(known, key)) for key in keys]
    expected = [[one == other for other in compared] for one in compared]
    of_log, _, _ = key_codes(table, table.slice(0, 0))
    in_index = encode(schema, table)
    second = in_index.second if in_index.second is not None else np.zeros(len(keys), dtype=np.uint64)
    for name, codes in {
        "log": of_log.tolist(),
        "parts": _hash(table, 7).tolist(),
        "index": list(zip(in_index.first.tolist(), second.tolist(), strict=True)),
    }.items():
        assert [[one == other for other in codes] for one in codes] == expected, name
    for row in range(len(keys)):
        found = KeySet(schema, table.slice(row, 1)).has(table)
        assert found.tolist() == expected[row]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_what_is_no_number_is_one_value(kind: Any) -> None:
    values = comparable(pa.chunked_array([pa.array([*NANS, 0.0, -0.0, None], kind)]))
    assert len(values.unique()) == 3
