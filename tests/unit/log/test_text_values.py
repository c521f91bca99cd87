"""The text form of every type, read back with nothing lost; what cannot be held is bad, what is no such text stops."""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.arrow_types import arrow_type
from headwater.log.values.decode import DecodedTuples, MalformedMessage, decode_tuples
from headwater.log.values.text import convert_text
from headwater.schema import SERVER_TEXT, Column, ValueType

INT, TEXT = ValueType("int4", "int"), ValueType("text", "string")
DATE, BYTEA = ValueType("date", "date"), ValueType("bytea", "binary")
TIMESTAMP, TIMESTAMPTZ = ValueType("timestamp", "timestamp_ntz"), ValueType("timestamptz", "timestamp")
DECIMAL = ValueType("numeric", "decimal(10,2)", 10, 2)
INTS = ValueType("array", "array<int>", element=INT)
TEXTS = ValueType("array", "array<string>", element=TEXT)
DATES = ValueType("array", "array<date>", element=DATE)
BOOL = ValueType("bool", "boolean")
UNKNOWN = ValueType(SERVER_TEXT, "string")
TYPED = [INT, DATE, BYTEA, TIMESTAMP, TIMESTAMPTZ, DECIMAL, INTS, TEXTS, DATES, BOOL, ValueType("float8", "double")]


def converted(value: ValueType, *items: str | bytes | None) -> tuple[list[Any], list[int]]:
    """Values and the rows of the bad ones. Bytes stand in front, and the rows are not in the order of their bytes."""
    raw = [item.encode() if isinstance(item, str) else item for item in items]
    order = list(reversed(range(len(raw))))
    buffer, starts = bytearray(b"before"), np.zeros(len(raw), dtype=np.int64)
    for row in order:
        starts[row] = len(buffer)
        buffer += raw[row] or b""
    lengths = np.array([-1 if item is None else len(item) for item in raw], dtype=np.int64)
    array, bad = convert_text(value, np.frombuffer(bytes(buffer), dtype=np.uint8), starts, lengths)
    array.validate(full=True)
    assert array.type == arrow_type(value)
    return array.to_pylist(), [] if bad is None else np.flatnonzero(bad).tolist()


def test_numbers_and_booleans_are_read_exactly() -> None:
    assert converted(INT, "-2147483648", None, "7") == ([-(2**31), None, 7], [])
    assert converted(ValueType("int2", "bigint"), "-5", "32767") == ([-5, 32767], [])
    assert converted(ValueType("oid", "bigint"), "4294967295") == ([4294967295], [])
    assert converted(BOOL, "t", "f", None) == ([True, False, None], [])
    texts = ("0.1", "-0", "5e-324", "1.7976931348623157e+308", "Infinity", "-Infinity", "NaN")
    floats, _ = converted(ValueType("float8", "double"), *texts)
    assert [struct.pack("!d", number) for number in floats] == [struct.pack("!d", float(text)) for text in texts]
    # The nearest float4, not that of the nearest float8: halfway cases round twice.
    singles, _ = converted(ValueType("float4", "float"), "1e-45", "3.4028235e+38", "8.5899346e+09")
    assert singles == [float(np.float32(text)) for text in ("1e-45", "3.4028235e+38", "8.5899346e+09")]


def test_decimals_are_exact_and_what_does_not_fit_is_bad() -> None:
    assert converted(DECIMAL, "1.10", None, "-99999999.99", "5") == (
        [Decimal("1.10"), None, Decimal("-99999999.99"), Decimal("5.00")],
        [],
    )
    items = ("1.100", "NaN", "-Infinity", "1.101", "100000000", "-0.5", None)
    assert converted(DECIMAL, *items) == (
        [Decimal("1.10"), None, None, None, None, Decimal("-0.50"), None],
        [1, 2, 3, 4],
    )
    whole = "9" * 29 + "." + "9" * 9
    assert converted(ValueType("numeric", "decimal(38,9)", 38, 9), whole, f"-{whole}", "NaN") == (
        [Decimal(whole), Decimal(f"-{whole}"), None],
        [2],
    )


@pytest.mark.parametrize(
    ("scale", "text"),
    [(0, "9" * 39), (0, "1" * 45), (0, str(2**128 + 1)), (9, str(2**128 + 5)), (9, "9" * 38), (38, "9.5")],
)
def test_a_decimal_that_takes_more_than_128_bits_is_bad(scale: int, text: str) -> None:
    """Alone in its column: Arrow's parser wraps around, and what is left may fit."""
    assert converted(ValueType("numeric", f"decimal(38,{scale})", 38, scale), text) == ([None], [0])


_DIGITS = st.text("0123456789", max_size=45)


@settings(deadline=None, max_examples=500)
@given(st.integers(1, 38), st.integers(0, 38), st.lists(st.tuples(st.booleans(), _DIGITS, _DIGITS), max_size=3))
def test_decimals_are_those_of_the_text_or_bad(
    precision: int, scale: int, numbers: list[tuple[bool, str, str]]
) -> None:
    scale = min(scale, precision)
    texts = [f"{'-' * minus}{whole.lstrip('0') or '0'}{'.' * bool(part)}{part}" for minus, whole, part in numbers]
    found, bad = converted(ValueType("numeric", f"decimal({precision},{scale})", precision, scale), *texts)
    for row, text in enumerate(texts):
        exact = Fraction(text)
        fits = (exact * 10**scale).denominator == 1 and abs(exact * 10**scale) < 10**precision
        assert (row not in bad) == fits, text
        assert not fits or Fraction(found[row]) == exact, text


def test_dates_and_timestamps_outside_of_the_lakes_years_are_bad() -> None:
    assert converted(DATE, "2024-02-29", "0001-01-01", "9999-12-31") == (
        [date(2024, 2, 29), date(1, 1, 1), date(9999, 12, 31)],
        [],
    )
    far = ("infinity", "-infinity", "0001-12-31 BC", "10000-01-01", "5874897-12-31")
    assert converted(DATE, "2024-02-29", *far, None) == ([date(2024, 2, 29), *[None] * 6], [1, 2, 3, 4, 5])
    assert converted(TIMESTAMP, "2024-02-29 12:34:56.7", "infinity", "0044-03-15 12:00:00.5 BC", None) == (
        [datetime(2024, 2, 29, 12, 34, 56, 700000), None, None, None],
        [1, 2],
    )
    assert converted(TIMESTAMPTZ, "9999-12-31 23:59:59.999999+00", "4714-11-24 00:00:00+00 BC", "-infinity") == (
        [datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), None, None],
        [1, 2],
    )


def test_bytes_are_read_from_their_digits() -> None:
    every = bytes(range(256))
    assert converted(BYTEA, "\\x", None, "\\x" + every.hex(), "\\x00") == ([b"", None, every, b"\0"], [])
    assert converted(BYTEA) == ([], [])


def test_lists_quoted_or_not_are_split_as_the_server_joined_them() -> None:
    assert converted(INTS, "{1,NULL,-3}", "{}", None, "{7}") == ([[1, None, -3], [], None, [7]], [])
    plain = ("{ab,NULL,c}", "{}", None)
    assert converted(TEXTS, *plain) == ([["ab", None, "c"], [], None], [])
    quoted = '{a,"b c",NULL,"NULL","","q\\"\\\\x","{}","a,b","line\nbreak"}'
    found = ["a", "b c", None, "NULL", "", 'q"\\x', "{}", "a,b", "line\nbreak"]
    assert converted(TEXTS, *plain, quoted) == ([["ab", None, "c"], [], None, found], [])


def test_lists_of_another_shape_or_with_a_bad_element_are_bad() -> None:
    assert converted(INTS, "{{1,2},{3,4}}", "{5}", "[0:1]={1,2}", None, "[-1:0][2:3]={{1,2},{3,NULL}}") == (
        [None, [5], None, None, None],
        [0, 2, 4],
    )
    assert converted(TEXTS, '{{a,"b c"},{NULL,"}"}}', '{"{{"}') == ([None, ["{{"]], [0])
    assert converted(DATES, "{2024-01-01,infinity}", "{2024-01-02,NULL}") == ([None, [date(2024, 1, 2), None]], [0])


def test_text_is_itself_and_bytes_that_are_no_text_are_bad() -> None:
    for value in (TEXT, UNKNOWN, ValueType("interval", "string"), ValueType("array", "string", element=INT)):
        assert converted(value, "{1 day}", "", None, b"\xff") == (["{1 day}", "", None, None], [3])
    assert converted(ValueType("array", "array<string>", element=TEXT), "{a}", b"\xff") == ([["a"], None], [1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (INT, ""),
        (INT, "1.5"),
        (INT, "2147483648"),
        (BOOL, "true"),
        (ValueType("float8", "double"), "1,5"),
        (DECIMAL, ""),
        (DATE, "2024-2-3"),
        (DATE, "2024-13-01"),
        (DATE, "2024-01-01 00:00:00"),
        (TIMESTAMP, "2024-01-01 25:00:00"),
        (TIMESTAMP, "2024-01-01 00:00:00+00"),
        (TIMESTAMPTZ, "2024-01-01 00:00:00+02"),
        (BYTEA, "00ff"),
        (BYTEA, "\\x0"),
        (BYTEA, "\\x0g"),
        (BYTEA, ""),
        (INTS, "1,2"),
        (INTS, "{1,x}"),
        (INTS, "{1,,2}"),
        (TEXTS, '{"a'),
        (TEXTS, '{"a"b}'),
        (TEXTS, '{"a",}'),
    ],
)
def test_what_no_output_function_writes_is_malformed_with_its_place(value: ValueType, text: str) -> None:
    good = {"int": "5", "boolean": "t", "double": "1", "date": "2024-01-01", "binary": "\\x00"}
    first = good.get(value.lake) or {"d": "1.00", "a": "{}"}.get(value.lake[0])
    first = first or f"2024-01-01 00:00:00{'+00' if value is TIMESTAMPTZ else ''}"
    buffer = (first + text).encode()
    with pytest.raises(MalformedMessage) as failure:
        convert_text(
            value,
            np.frombuffer(buffer, dtype=np.uint8),
            np.array([0, len(first)], dtype=np.int64),
            np.array([len(first), len(text)], dtype=np.int64),
        )
    assert failure.value.position == len(first)
    assert text == "" or text not in str(failure.value)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(TYPED),
    st.lists(
        st.none() | st.text('0123456789-+:. {}",\\xNULtfeinfy[]=BC', max_size=14) | st.binary(max_size=6), max_size=8
    ),
)
def test_random_texts_are_read_or_malformed(value: ValueType, items: list[str | bytes | None]) -> None:
    try:
        found, bad = converted(value, *items)
    except MalformedMessage:
        return
    assert [row for row, item in enumerate(items) if item is None and found[row] is not None] == []
    assert all(found[row] is None and items[row] is not None for row in bad)


def _decoded(value: ValueType, *fields: bytes) -> DecodedTuples:
    tuples = [struct.pack("!h", 1) + field for field in fields]
    starts = np.cumsum([0, *map(len, tuples)], dtype=np.int64)[:-1]
    return decode_tuples(np.frombuffer(b"".join(tuples), dtype=np.uint8), starts, [Column("c", 1, 0, -1, value)])


def _field(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("!i", len(content)) + content


def test_a_column_is_decoded_by_what_its_message_says() -> None:
    text = _decoded(INT, _field(b"t", b"12"), b"n", b"u", _field(b"t", b"-3"))
    assert text.columns["c"].to_pylist() == [12, None, None, -3]
    assert text.unchanged["c"].tolist() == [False, False, True, False]
    assert _decoded(INT, _field(b"b", b"\0\0\0\x0c")).columns["c"].to_pylist() == [12]
    assert _decoded(DATE, _field(b"t", b"infinity")).bad == [("c", 0)]
    assert _decoded(ValueType("jsonb", "string"), _field(b"t", b"{}")).columns["c"].to_pylist() == ["{}"]


def test_both_forms_in_one_block_and_an_unknown_binary_form_are_malformed() -> None:
    with pytest.raises(
        MalformedMessage, match=r"column c .int4. came as text in one row, as binary in another"
    ) as mixed:
        _decoded(INT, _field(b"b", b"\0\0\0\1"), _field(b"t", b"1"))
    assert mixed.value.position == 2 + 9 + 2
    with pytest.raises(MalformedMessage, match="column c came in a binary form that is not known here"):
        _decoded(UNKNOWN, _field(b"t", b"1"), _field(b"b", b"1"))
    assert _decoded(UNKNOWN, _field(b"t", b"'a':1"), b"n").columns["c"].to_pylist() == ["'a':1", None]
    assert pa.types.is_string(_decoded(UNKNOWN, b"n").columns["c"].type)
