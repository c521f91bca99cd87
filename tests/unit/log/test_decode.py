"""Tuples of the log and rows of COPY, made by hand: framing, bad values, and nothing read beyond the buffer."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.arrow_types import arrow_type
from headwater.log.values.binary import convert
from headwater.log.values.decode import (
    DecodedTuples,
    MalformedMessage,
    decode_copy_rows,
    decode_tuples,
    frame_copy,
    mark_lost_in_partitions,
)
from headwater.schema import Column, TableSchema, ValueType

INT = ValueType("int4", "int")
TEXT = ValueType("text", "string")
DATE = ValueType("date", "date")
DECIMAL = ValueType("numeric", "decimal(10,2)", 10, 2)
INTS = ValueType("array", "array<int>", element=INT)

EVERY_TYPE = [
    INT,
    TEXT,
    DATE,
    DECIMAL,
    INTS,
    ValueType("bool", "boolean"),
    ValueType("int2", "bigint"),
    ValueType("int8", "string"),
    ValueType("float4", "float"),
    ValueType("float8", "string"),
    ValueType("numeric", "string"),
    ValueType("numeric", "decimal(38,20)", 38, 20),
    ValueType("bytea", "binary"),
    ValueType("uuid", "string"),
    ValueType("jsonb", "string"),
    ValueType("date", "string"),
    ValueType("timestamp", "timestamp_ntz"),
    ValueType("timestamptz", "string"),
    ValueType("time", "string"),
    ValueType("interval", "string"),
    ValueType("timetz", "string"),
    ValueType("inet", "string"),
    ValueType("cidr", "string"),
    ValueType("bit", "string"),
    ValueType("char", "string"),
    ValueType("array", "array<string>", element=TEXT),
    ValueType("array", "string", element=TEXT),
    ValueType("range", "string", element=ValueType("int4", "string")),
    ValueType("multirange", "string", element=ValueType("numeric", "string")),
    ValueType("path", "string"),
    ValueType("circle", "string"),
]


def _column(name: str, value: ValueType, on_bad_value: str = "suspend") -> Column:
    return Column(name, 1, 0, -1, value, on_bad_value=on_bad_value)


def _sized(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value


def _tuple(*parts: bytes) -> bytes:
    return struct.pack("!h", len(parts)) + b"".join(parts)


def _binary(value: bytes) -> bytes:
    return b"b" + _sized(value)


def _int(number: int) -> bytes:
    return _binary(struct.pack("!i", number))


def _array_of(*items: bytes | None, lower: int = 1) -> bytes:
    header = struct.pack("!iiI", 1, 0, 23) + struct.pack("!ii", len(items), lower)
    return header + b"".join(b"\xff\xff\xff\xff" if item is None else _sized(item) for item in items)


def _block(*tuples: bytes, before: bytes = b"") -> tuple[Any, Any]:
    starts = np.cumsum([len(before), *map(len, tuples)], dtype=np.int64)[:-1]
    return np.frombuffer(before + b"".join(tuples), dtype=np.uint8), starts


def _decode(columns: Sequence[Column | None], *tuples: bytes, before: bytes = b"") -> DecodedTuples:
    return decode_tuples(*_block(*tuples, before=before), columns)


def _converted(value: ValueType, *items: bytes | None) -> tuple[pa.Array, list[int]]:
    lengths = np.array([-1 if item is None else len(item) for item in items], dtype=np.int64)
    starts = np.cumsum([0, *np.maximum(lengths, 0)], dtype=np.int64)[:-1]
    buffer = np.frombuffer(b"".join(item or b"" for item in items), dtype=np.uint8)
    array, bad = convert(value, buffer, starts, lengths)
    array.validate(full=True)
    return array, [] if bad is None else np.flatnonzero(bad).tolist()


def test_columns_are_decoded_in_the_messages_order_and_skipped_ones_are_stepped_over() -> None:
    first = _tuple(_int(1), _binary(b"secret"), _binary(b"a"))
    second = _tuple(_int(-2), b"n", _binary("ü".encode()))
    decoded = _decode([_column("id", INT), None, _column("name", TEXT)], first, second, before=b"xyz")
    assert decoded.rows == 2
    assert decoded.columns["id"].to_pylist() == [1, -2]
    assert decoded.columns["name"].to_pylist() == ["a", "ü"]
    assert list(decoded.columns) == ["id", "name"]
    assert decoded.ends.tolist() == [3 + len(first), 3 + len(first) + len(second)]
    assert decoded.unchanged == {}


def test_an_unchanged_value_is_null_and_marked_while_null_is_only_null() -> None:
    rows = [_tuple(_int(1), b"u"), _tuple(_int(2), b"n"), _tuple(_int(3), _binary(b"x"))]
    decoded = _decode([_column("id", INT), _column("body", TEXT)], *rows)
    assert decoded.columns["body"].to_pylist() == [None, None, "x"]
    assert {name: marks.tolist() for name, marks in decoded.unchanged.items()} == {"body": [True, False, False]}


def test_rows_may_be_asked_for_in_any_order_and_twice() -> None:
    buffer, starts = _block(*(_tuple(_int(n), _binary(str(n).encode())) for n in range(4)))
    chosen = starts[[3, 0, 2, 0]]
    decoded = decode_tuples(buffer, chosen, [_column("id", INT), _column("name", TEXT)])
    assert decoded.columns["id"].to_pylist() == [3, 0, 2, 0]
    assert decoded.columns["name"].to_pylist() == ["3", "0", "2", "0"]
    backwards = decode_tuples(buffer, starts[::-1], [_column("id", INT), _column("name", TEXT)])
    assert backwards.columns["name"].to_pylist() == ["3", "2", "1", "0"]


UUID = ValueType("uuid", "string")
BIG, FLAG = ValueType("int8", "bigint"), ValueType("bool", "boolean")
_SENT: dict[str, Callable[[Any], bytes]] = {
    "int4": struct.Struct("!i").pack,
    "int8": struct.Struct("!q").pack,
    "bool": struct.Struct("!?").pack,
    "text": str.encode,
    "uuid": lambda value: value.bytes,
}
_ANY_VALUE: dict[str, st.SearchStrategy[Any]] = {
    "int4": st.integers(-(2**31), 2**31 - 1),
    "int8": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "text": st.text(max_size=20) | st.sampled_from(["b\0\0\0\4", "nnnn"]),
    "uuid": st.uuids(),
}


@settings(deadline=None)
@given(st.data())
def test_rows_with_and_without_nulls_are_what_was_sent_whatever_the_first_rows_look_like(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from([INT, BIG, FLAG, TEXT, UUID, None]), min_size=1, max_size=12))
    count = data.draw(st.integers(1, 7))
    columns, sent = [], []
    for place, kind in enumerate(kinds):
        value = _ANY_VALUE[kind.wire] if kind is not None else st.binary(max_size=9)
        nullable = data.draw(st.sampled_from([value, st.none(), value | st.none()]))
        columns.append(None if kind is None else _column(str(place), kind))
        sent.append(data.draw(st.lists(nullable, min_size=count, max_size=count)))
    unchanged = data.draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, len(kinds) - 1)), max_size=2))
    raw = [
        [None if value is None else _SENT[kind.wire](value) if kind is not None else value for value in values]
        for kind, values in zip(kinds, sent, strict=True)
    ]
    tuples, copied = [], []
    for row in range(count):
        cells = [(values[row], (row, place) in unchanged) for place, values in enumerate(raw)]
        tuples.append(_tuple(*(b"u" if kept else b"n" if cell is None else _binary(cell) for cell, kept in cells)))
        copied.append(_tuple(*(b"\xff\xff\xff\xff" if cell is None else _sized(cell) for cell, _ in cells)))
    for decode, rows, marked in ((decode_tuples, tuples, unchanged), (decode_copy_rows, copied, set())):
        decoded = decode(*_block(*rows, before=b"\0" * data.draw(st.integers(0, 3))), columns)
        for place, column in enumerate(columns):
            if column is None:
                continue
            shown = [str(value) if isinstance(value, uuid.UUID) else value for value in sent[place]]
            kept = [(row, place) in marked for row in range(count)]
            assert decoded.columns[column.name].to_pylist() == [
                None if keep else value for value, keep in zip(shown, kept, strict=True)
            ]
            decoded.columns[column.name].validate(full=True)
            assert decoded.unchanged.get(column.name, np.zeros(count, np.bool_)).tolist() == kept


def test_a_row_that_differs_from_the_first_middle_and_last_ends_its_run() -> None:
    rows = [_tuple(_int(n), _int(-n), _binary(struct.pack("!q", n)), _int(2 * n)) for n in range(9)]
    rows[2] = _tuple(_int(2), _int(-2), b"n", _int(4))
    decoded = _decode([_column("a", INT), _column("b", INT), _column("c", BIG), _column("d", INT)], *rows)
    assert decoded.columns["b"].to_pylist() == [-n for n in range(9)]
    assert decoded.columns["c"].to_pylist() == [0, 1, None, 3, 4, 5, 6, 7, 8]
    assert decoded.columns["d"].to_pylist() == [2 * n for n in range(9)]


def test_a_length_that_is_wrong_in_a_row_between_is_malformed() -> None:
    rows = [_tuple(_int(1), _int(2)) for _ in range(9)]
    rows[2] = _tuple(_int(1), _binary(b"\0\0\0"))
    with pytest.raises(MalformedMessage, match="3 bytes instead of 4"):
        _decode([_column("a", INT), _column("b", INT)], *rows)


def test_many_columns_are_decoded_as_a_few_are() -> None:
    columns = [_column(f"c{place}", INT if place % 3 else BIG) for place in range(200)]
    rows = [
        _tuple(*(_int(n * place) if place % 3 else _binary(struct.pack("!q", n)) for place in range(200)))
        for n in range(5)
    ]
    decoded = _decode(columns, *rows)
    assert decoded.columns["c199"].to_pylist() == [199 * n for n in range(5)]
    assert decoded.columns["c198"].to_pylist() == list(range(5))


def test_no_rows_give_empty_columns_of_the_right_type() -> None:
    columns = [_column(str(at), value) for at, value in enumerate(EVERY_TYPE)]
    for decode in (decode_tuples, decode_copy_rows):
        decoded = decode(np.empty(0, np.uint8), np.empty(0, np.int64), columns)
        assert [array.type for array in decoded.columns.values()] == [arrow_type(value) for value in EVERY_TYPE]
        assert decoded.rows == 0


@pytest.mark.parametrize("value", EVERY_TYPE, ids=lambda value: f"{value.wire} as {value.lake}")
def test_a_column_of_nulls_has_its_type(value: ValueType) -> None:
    decoded = _decode([_column("c", value)], _tuple(b"n"), _tuple(b"n"))
    decoded.columns["c"].validate(full=True)
    assert decoded.columns["c"].type == arrow_type(value)
    assert decoded.columns["c"].null_count == 2


def test_another_number_of_columns_than_expected_is_an_error_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"2 columns where 1 are expected \(at byte 7\)"):
        _decode([_column("id", INT)], _tuple(_int(1), _int(2)), before=b"1234567")


def test_a_text_may_come_in_either_form_and_what_is_not_asked_for_too() -> None:
    as_text = b"t" + _sized(b"12")
    found = _decode([_column("c", TEXT)], _tuple(as_text), _tuple(_binary(b"12"))).columns["c"].to_pylist()
    assert found == ["12", "12"]
    assert _decode([None], _tuple(as_text), _tuple(_int(1))).rows == 2


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0",
        _tuple(_int(1))[:-1],
        _tuple(_int(1))[:5],
        _tuple(b"b"),
        _tuple(b"b" + struct.pack("!i", 2**31 - 1)),
        _tuple(b"b" + struct.pack("!i", -1)),
        _tuple(b"x"),
        _tuple(_binary(b"abc")),
    ],
)
def test_what_no_server_writes_is_malformed_and_nothing_beyond_the_buffer_is_read(message: bytes) -> None:
    with pytest.raises(MalformedMessage):
        _decode([_column("id", INT)], message)


def test_a_bad_value_is_listed_when_its_column_suspends_and_only_null_when_it_accepts() -> None:
    infinite = _binary(struct.pack("!i", 2**31 - 1))
    rows = [_tuple(_int(0), _int(0)), _tuple(infinite, infinite), _tuple(b"n", b"n")]
    decoded = _decode([_column("strict", DATE), _column("lax", DATE, "null")], *rows)
    assert decoded.bad == [("strict", 1)]
    for name in ("strict", "lax"):
        assert [str(day) for day in decoded.columns[name].to_pylist()] == ["2000-01-01", "None", "None"]


@pytest.mark.parametrize(("policy", "bad"), [("suspend", [("region", 1)]), ("string", [("region", 1)]), ("null", [])])
def test_an_empty_text_is_bad_where_delta_would_make_it_null(policy: str, bad: list[tuple[str, int]]) -> None:
    columns = (_column("region", TEXT, policy), _column("note", TEXT))
    schema = TableSchema(1, "public", "t", columns, (), partition_by=("region",))
    rows = [_tuple(_binary(b"a"), _binary(b"")), _tuple(_binary(b""), _binary(b"")), _tuple(b"n", b"n")]
    decoded = _decode(list(columns), *rows)
    mark_lost_in_partitions(schema, decoded)
    assert decoded.bad == bad
    assert decoded.columns["region"].to_pylist() == ["a", None, None]
    assert decoded.columns["note"].to_pylist() == ["", "", None]


def test_text_that_is_not_utf8_is_bad() -> None:
    assert _converted(TEXT, b"ok", b"\xff", None, b"") == (pa.array(["ok", None, None, ""]), [1])


def test_floats_keep_every_bit() -> None:
    patterns = [b"\x80" + b"\0" * 7, bytes.fromhex("7ff8000000000001"), bytes.fromhex("0000000000000001")]
    array, _ = _converted(ValueType("float8", "double"), *patterns, None)
    assert array.buffers()[1].to_pybytes()[:24] == b"".join(pattern[::-1] for pattern in patterns)
    assert array.null_count == 1


def _numeric(weight: int, sign: int, scale: int, *digits: int) -> bytes:
    return struct.pack(f"!hhHH{len(digits)}h", len(digits), weight, sign, scale, *digits)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (_numeric(0, 0, 0), "0"),
        (_numeric(0, 0, 5), "0.00000"),
        (_numeric(0, 0x4000, 2, 1, 5000), "-1.50"),
        (_numeric(-1, 0, 4, 1), "0.0001"),
        (_numeric(-2, 0, 8, 1), "0.00000001"),
        (_numeric(2, 0, 0, 12), "1200000000"),
        (_numeric(0, 0xC000, 0), "NaN"),
        (_numeric(0, 0xF000, 0), "-Infinity"),
        (_numeric(30, 0, 1, 1), "1" + "0" * 120 + ".0"),
        (_numeric(-31, 0, 124, 1), "0." + "0" * 123 + "1"),
    ],
)
def test_a_numeric_as_text_shows_every_digit_of_its_scale(value: bytes, text: str) -> None:
    array, bad = _converted(ValueType("numeric", "string"), value, None, _numeric(0, 0, 0, 7))
    assert (array.to_pylist(), bad) == ([text, None, "7"], [])


@pytest.mark.parametrize(
    "value",
    [
        _numeric(0, 0xC000, 0),
        _numeric(0, 0xD000, 0),
        _numeric(2, 0, 0, 1),
        _numeric(1, 0, 0, 9999, 9999, 9999),
        _numeric(-1, 0, 3, 10),
        _numeric(-2, 0, 8, 1),
        _numeric(9, 0, 0, 1),
        _numeric(-30, 0, 200, 1),
        _numeric(4, 0, 4, 1, 0, 0, 0, 0, 1),
        _numeric(3000, 0, 0, 1),
    ],
)
def test_a_numeric_that_does_not_fit_its_decimal_exactly_is_bad(value: bytes) -> None:
    array, bad = _converted(DECIMAL, _numeric(0, 0, 0, 1), value, None)
    assert ([str(number) for number in array.to_pylist()], bad) == (["1.00", "None", "None"], [1])


@settings(deadline=None)  # other tests may be using the machine
@given(st.decimals(allow_nan=False, allow_infinity=False, places=9, min_value=-(10**29) + 1, max_value=10**29 - 1))
def test_every_decimal_of_38_digits_is_exact(number: Any) -> None:
    sign, digits, _ = number.as_tuple()
    text = "".join(map(str, digits)).rjust(10, "0")
    whole, fraction = text[:-9], text[-9:] + "000"
    whole = whole.rjust(-(-len(whole) // 4) * 4, "0")
    groups = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while groups and groups[0] == 0:
        groups, weight = groups[1:], weight - 1
    while groups and groups[-1] == 0:
        groups = groups[:-1]
    value = _numeric(weight if groups else 0, 0x4000 if sign and groups else 0, 9, *groups)
    array, bad = _converted(ValueType("numeric", "decimal(38,9)", 38, 9), value)
    assert (array.to_pylist(), bad) == ([number], [])
    texts, _ = _converted(ValueType("numeric", "string"), value)
    assert texts.to_pylist() == [f"{number if number else abs(number):f}"]


@st.composite
def _digits(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Weight, sign and digits as a server writes them: without zeros at either end."""
    digits = draw(st.lists(st.sampled_from([0, 1, 9, 10, 5000, 9999]) | st.integers(0, 9999), max_size=11))
    while digits and digits[0] == 0:
        digits = digits[1:]
    while digits and digits[-1] == 0:
        digits = digits[:-1]
    return (draw(st.integers(-5, 10)) if digits else 0), draw(st.sampled_from([0, 0x4000] if digits else [0])), digits


@settings(deadline=None)
@given(st.integers(1, 38), st.data(), st.lists(_digits() | st.none(), min_size=1, max_size=20))
def test_long_and_short_numerics_of_one_block_are_exact_or_bad(
    precision: int, data: st.DataObject, values: list[tuple[int, int, list[int]] | None]
) -> None:
    scale = data.draw(st.integers(0, precision))
    expected: list[Decimal | None] = []
    for value in values:
        weight, sign, digits = value or (0, 0, [])
        exact = sum(Fraction(digit) * Fraction(10000) ** (weight - at) for at, digit in enumerate(digits))
        unscaled = (-exact if sign else exact) * 10**scale
        fits = value is not None and unscaled.denominator == 1 and abs(unscaled) < 10**precision
        expected.append(Decimal(int(unscaled)).scaleb(-scale, Context(prec=40)) if fits else None)
    sent = [None if value is None else _numeric(value[0], value[1], 9, *value[2]) for value in values]
    array, bad = _converted(ValueType("numeric", f"decimal({precision},{scale})", precision, scale), *sent)
    assert array.to_pylist() == expected
    assert bad == [at for at, value in enumerate(values) if value is not None and expected[at] is None]


def test_arrays_of_one_dimension_from_one_are_lists_and_others_are_bad() -> None:
    one = struct.pack("!i", 1)
    two_dimensions = struct.pack("!iiI", 2, 0, 23) + struct.pack("!iiii", 1, 1, 1, 1) + _sized(one)
    items = [_array_of(one, None), struct.pack("!iiI", 0, 0, 23), two_dimensions, _array_of(one, lower=0), None]
    array, bad = _converted(INTS, *items)
    assert (array.to_pylist(), bad) == ([[1, None], [], None, None, None], [2, 3])
    texts, bad = _converted(ValueType("array", "string", element=ValueType("int4", "string")), *items)
    assert (texts.to_pylist(), bad) == (["{1,NULL}", "{}", "{{1}}", "[0:0]={1}", None], [])


def test_an_array_with_a_bad_element_is_bad() -> None:
    days = ValueType("array", "array<date>", element=DATE)
    good, bad_day = struct.pack("!i", 0), struct.pack("!i", -(2**31))
    array, bad = _converted(days, _array_of(good), _array_of(good, bad_day, good), _array_of(None))
    assert bad == [1]
    assert array.null_count == 1
    assert array[2].as_py() == [None]


def test_many_arrays_of_different_lengths_are_walked_together() -> None:
    lists = [[n] * (n % 40) for n in range(200)] + [list(range(3000))]
    packed = [_array_of(*(struct.pack("!i", item) for item in items)) for items in lists]
    array, bad = _converted(INTS, *packed)
    assert (array.to_pylist(), bad) == (lists, [])


@pytest.mark.parametrize(
    "value",
    [
        b"\0",
        struct.pack("!iiI", 1, 0, 23),
        struct.pack("!iiI", 7, 0, 23),
        struct.pack("!iiIii", 1, 0, 23, 2**31 - 1, 1),
        struct.pack("!iiIii", 1, 0, 23, -1, 1),
        _array_of(b"1234")[:-1],
        _array_of(b"123"),
    ],
)
def test_an_array_that_claims_what_it_does_not_have_is_malformed(value: bytes) -> None:
    for lake in (INTS, ValueType("array", "string", element=ValueType("int4", "string"))):
        with pytest.raises(MalformedMessage):
            _converted(lake, value)


ONE_TO_FIVE = b"\x02" + _sized(struct.pack("!i", 1)) + _sized(struct.pack("!i", 5))


@pytest.mark.parametrize(
    ("wire", "value"),
    [
        ("range", b""),
        ("range", b"\x80"),
        ("range", b"\x01\0"),
        ("range", ONE_TO_FIVE[:-1]),
        ("range", ONE_TO_FIVE + b"\0"),
        ("range", b"\x02" + struct.pack("!i", -1)),
        ("range", b"\x0a" + _sized(b"\0\0\1")),
        ("multirange", b"\0\0"),
        ("multirange", struct.pack("!i", -1)),
        ("multirange", struct.pack("!i", 2) + _sized(ONE_TO_FIVE)),
        ("multirange", struct.pack("!i", 1) + _sized(ONE_TO_FIVE) + b"\0"),
        ("point", bytes(15)),
        ("line", bytes(16)),
        ("circle", bytes(16)),
        ("path", b"\1"),
        ("polygon", struct.pack("!i", 2) + bytes(16)),
    ],
)
def test_a_range_or_figure_that_is_not_what_it_claims_is_malformed(wire: str, value: bytes) -> None:
    element = ValueType("int4", "string") if "range" in wire else None
    with pytest.raises(MalformedMessage):
        _converted(ValueType(wire, "string", element=element), value)


def test_rows_of_copy_are_found_in_the_servers_messages_without_header_and_trailer() -> None:
    header = b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0)
    rows = [struct.pack("!h", 2) + _sized(struct.pack("!i", n)) + b"\xff\xff\xff\xff" for n in range(3)]
    for messages in ([header + rows[0], *rows[1:], b"\xff\xff"], [header, *rows, b"\xff\xff"]):
        buffer, starts = frame_copy(messages)
        decoded = decode_copy_rows(buffer, starts, [_column("id", INT), _column("name", TEXT)])
        assert decoded.columns["id"].to_pylist() == [0, 1, 2]
        assert decoded.columns["name"].to_pylist() == [None] * 3
        assert decoded.ends[-1] == len(buffer)
    assert len(frame_copy([header + b"\xff\xff"])[1]) == 0


@settings(deadline=None)
@given(value=st.sampled_from(EVERY_TYPE), items=st.lists(st.none() | st.binary(max_size=40), max_size=12))
def test_random_bytes_as_a_value_are_decoded_or_malformed(value: ValueType, items: list[bytes | None]) -> None:
    _decode_or_malformed(
        [value], [_tuple(*(b"n" if item is None else _binary(item) for item in [item])) for item in items]
    )


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(EVERY_TYPE), min_size=1, max_size=3),
    st.binary(max_size=200),
    st.lists(st.integers(-3, 220), max_size=5),
)
def test_random_bytes_as_a_block_are_decoded_or_malformed(
    values: list[ValueType], content: bytes, places: list[int]
) -> None:
    buffer, starts = np.frombuffer(content, dtype=np.uint8), np.array(places, dtype=np.int64)
    columns = [_column(str(at), value) for at, value in enumerate(values)]
    for decode in (decode_tuples, decode_copy_rows):
        try:
            decoded = decode(buffer, starts, columns)
        except MalformedMessage:
            continue
        assert (decoded.ends <= len(content)).all()


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(EVERY_TYPE), min_size=1, max_size=3),
    st.data(),
    st.integers(0, 60),
    st.integers(0, 255),
)
def test_one_damaged_byte_is_decoded_or_malformed(
    values: list[ValueType], data: st.DataObject, place: int, byte: int
) -> None:
    samples = {
        "int4": struct.pack("!i", 5),
        "numeric": _numeric(1, 0, 2, 1, 2, 300),
        "array": _array_of(b"\0\0\0\1", None, b"\0\0\0\2"),
        "interval": struct.pack("!qii", 1, 2, 3),
        "inet": b"\x02\x18\0\x04\1\2\3\4",
        "jsonb": b"\x01{}",
        "bit": struct.pack("!i", 9) + b"\xff\x80",
        "range": ONE_TO_FIVE,
        "multirange": struct.pack("!i", 1) + _sized(b"\x18"),
        "path": b"\0" + struct.pack("!idd", 1, 1.5, 2),
        "circle": struct.pack("!ddd", 1, 2, 3),
    }
    fields = [_binary(samples.get(value.wire, b"\0\0\0\0\0\0\0\1")) for value in values]
    message = bytearray(_tuple(*fields))
    message[place % len(message)] = byte
    _decode_or_malformed(values, [bytes(message)] * data.draw(st.integers(1, 12)))


def _decode_or_malformed(values: list[ValueType], tuples: list[bytes]) -> None:
    try:
        decoded = _decode([_column(str(at), value) for at, value in enumerate(values)], *tuples)
    except MalformedMessage:
        return
    for array in decoded.columns.values():
        array.validate(full=True)
        array.to_pylist() if not pa.types.is_temporal(array.type) else array.cast(pa.string())
