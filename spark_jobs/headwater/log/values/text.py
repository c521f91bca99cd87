"""Converters from PostgreSQL's text form to Arrow, one column at a time: what `values` is for the binary form.

Used where the log connection had to ask for text (`binary` is a property of the connection): a column then comes as
what its type's output function writes under the fixed settings of the session. Where the lake holds text, that is the
value; all else is read back with nothing lost, mostly by Arrow's own parsers over the whole column. What the lake's
type cannot hold is NULL and marked *bad*, as in `values`; text that no output function writes is a `MalformedMessage`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.arrow_types import arrow_type
from headwater.log.values.binary import Converted, convert
from headwater.log.values.wire import Bytes, Ints, MalformedMessage, Mask, booleans, fixed
from headwater.schema import ValueType

_TEXT: Final = ValueType("text", "string")
_DAY: Final = r"\d{4}-\d\d-\d\d"
_CLOCK: Final = r" \d\d:\d\d:\d\d(?:\.\d{1,6})?"
_FAR_DAY: Final = r"\d{4,7}-\d\d-\d\d"
_ENDLESS: Final = "-?infinity"
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^",{}]+)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_SPECIAL_NUMERICS: Final = ("NaN", "Infinity", "-Infinity")
_MOST_DIGITS: Final = 38
_NO_DIGIT: Final = 255
_NIBBLES: Final = np.full(256, _NO_DIGIT, dtype=np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16, dtype=np.uint8)


class _Unreadable(ValueError):
    """`row`: of the first text that is none of its type."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def convert_text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    """The values whose text stands at `starts`, of `lengths` bytes (-1: NULL); all inside the buffer."""
    texts, undecodable = convert(_TEXT, buffer, starts, lengths)
    try:
        array, bad = _parsed(value, texts)
    except _Unreadable as unreadable:
        what = f"a text that is no value of type {value.wire}"
        raise MalformedMessage(what, int(starts[unreadable.row])) from None
    return array, _either(bad, undecodable)


def _either(one: Mask | None, other: Mask | None) -> Mask | None:
    return one if other is None else other if one is None else one | other


def _parsed(value: ValueType, texts: pa.Array) -> Converted:
    if value.lake == "string":
        return texts, None
    if value.wire == "array":
        return _lists(value, texts)
    return _PARSERS[value.wire](value, texts)


def _cast(value: ValueType, texts: pa.Array) -> Converted:
    """Numbers: Arrow's parsers give the nearest float and refuse what is out of range."""
    try:
        return texts.cast(arrow_type(value)), None
    except pa.ArrowInvalid:
        raise _Unreadable(_first_refused(texts, arrow_type(value))) from None


def _first_refused(texts: pa.Array, kind: pa.DataType) -> int:
    for row in range(len(texts)):
        try:
            texts.slice(row, 1).cast(kind)
        except pa.ArrowInvalid:
            return row
    raise ValueError("every text can be read by itself")


def _boolean(value: ValueType, texts: pa.Array) -> Converted:
    true = pc.equal(texts, "t")
    _refuse_others(texts, pc.or_(true, pc.equal(texts, "f")))
    return true, None


def _refuse_others(texts: pa.Array, known: pa.Array) -> None:
    """`known`: per row whether the text is one of its type; NULL where the text is."""
    others = _mask(pc.invert(known))
    if others.any():
        raise _Unreadable(int(np.argmax(others)))


def _mask(found: pa.Array) -> Mask:
    result: Mask = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return result


def _calendar(value: ValueType, texts: pa.Array) -> Converted:
    """Dates and timestamps; infinities and what lies outside of the years 1 to 9999 are bad values."""
    clock = "" if value.wire == "date" else _CLOCK
    zone = r"\+00" if value.wire == "timestamptz" else ""
    fits = pc.match_substring_regex(texts, f"^{_DAY}{clock}{zone}$")
    if pc.all(fits).as_py() is not False:
        return _cast(value, texts)
    _refuse_others(texts, pc.match_substring_regex(texts, f"^(?:{_ENDLESS}|{_FAR_DAY}{clock}{zone}(?: BC)?)$"))
    array, _ = _cast(value, pc.if_else(fits, texts, None))
    return array, _mask(pc.invert(fits))


def _decimal(value: ValueType, texts: pa.Array) -> Converted:
    kind = arrow_type(value)
    if _cannot_wrap(texts, kind):
        with contextlib.suppress(pa.ArrowInvalid):
            return texts.cast(kind), None
    # A value does not fit, or is no number: one by one.
    items = [_fitting(text, kind, row) for row, text in enumerate(texts.to_pylist())]
    bad = np.array([item is None for item in items], dtype=np.bool_) & ~_mask(pc.is_null(texts))
    return pa.array(items, kind), bad


def _cannot_wrap(texts: pa.Array, kind: pa.Decimal128Type) -> bool:
    """Whether Arrow's parser may be asked: of what does not fit into 128 bits, by itself or brought to the scale, it
    gives what is left of it, and says nothing."""
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > _MOST_DIGITS:
        return False
    before_point = kind.precision - kind.scale
    whole = rf"\d{{1,{before_point}}}" if before_point > 0 else "0"
    return pc.all(pc.match_substring_regex(texts, rf"^-?{whole}(?:\.\d+)?$")).as_py() is not False


def _fitting(text: str | None, kind: pa.Decimal128Type, row: int) -> Decimal | None:
    """None where the decimal cannot hold it exactly."""
    if text is None or text in _SPECIAL_NUMERICS:
        return None
    whole, _, fraction = text.removeprefix("-").partition(".")
    if not (whole + fraction).isdecimal():
        raise _Unreadable(row)
    if len(whole.lstrip("0")) > kind.precision - kind.scale or len(fraction.rstrip("0")) > kind.scale:
        return None
    sign = "-" if text.startswith("-") else ""
    return Decimal(f"{sign}{whole}.{fraction.rstrip('0') or '0'}")


def _bytea(value: ValueType, texts: pa.Array) -> Converted:
    """`\\x` and two digits a byte (bytea_output hex)."""
    _, borders, data = texts.buffers()
    offsets = np.frombuffer(borders, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    sizes = np.diff(offsets)
    known = ~_mask(pc.is_null(texts))
    _refuse_others(texts, pc.and_(pc.starts_with(texts, "\\x"), pa.array(sizes % 2 == 0)))
    characters = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]] if data is not None else offsets[:0]
    digits = np.ones(len(characters), dtype=np.bool_)
    for place in (0, 1):
        digits[offsets[:-1][known] - offsets[0] + place] = False
    nibbles = _NIBBLES[characters[digits]]
    ends = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(np.where(known, sizes - 2, 0), out=ends[1:])
    if (wrong := np.flatnonzero(nibbles == _NO_DIGIT)).size:
        raise _Unreadable(int(np.searchsorted(ends, wrong[0], side="right")) - 1)
    octets = nibbles[0::2] << 4 | nibbles[1::2]
    validity = booleans(known).buffers()[1]
    parts = [validity, pa.py_buffer((ends // 2).astype(np.int32)), pa.py_buffer(octets)]
    return pa.Array.from_buffers(pa.binary(), len(texts), parts), None


def _lists(value: ValueType, texts: pa.Array) -> Converted:
    """Lists of one dimension that begins at 1; another shape, or an element that is bad, makes a value bad."""
    if value.element is None:
        raise ValueError("an array without an element type")
    _refuse_others(texts, pc.match_substring_regex(texts, r"(?s)^(?:\[[-\d:\[\]]+\]=)?\{.*\}$"))
    bad = _mask(pc.match_substring_regex(texts, r"^(?:\[|\{\{)"))
    one = pc.if_else(pa.array(bad), None, texts) if bad.any() else texts
    elements, counts = _split(one)
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    owners = np.repeat(np.arange(len(texts)), counts)
    try:
        values, bad_elements = _parsed(value.element, elements)
    except _Unreadable as unreadable:
        raise _Unreadable(int(owners[unreadable.row])) from None
    if bad_elements is not None:
        bad[owners[bad_elements]] = True
    missing = bad | _mask(pc.is_null(texts))
    mask = booleans(missing) if missing.any() else None
    borders = fixed(pa.int32(), offsets.astype(np.int32), None)
    return pa.ListArray.from_arrays(borders, values, type=arrow_type(value), mask=mask), bad if bad.any() else None


def _split(texts: pa.Array) -> tuple[pa.Array, Ints]:
    """The elements of all values one behind the other, and how many each value has."""
    if pc.any(pc.match_substring_regex(texts, r'["\\]')).as_py():
        return _split_one_by_one(texts)
    inside = pc.utf8_trim(texts, "{}")
    some = pc.if_else(pc.equal(inside, ""), None, inside)
    lists = pc.split_pattern(some, ",")
    elements = pc.list_flatten(lists)
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return pc.if_else(pc.equal(elements, "NULL"), None, elements), counts


def _split_one_by_one(texts: pa.Array) -> tuple[pa.Array, Ints]:
    """Where an element is quoted."""
    elements: list[str | None] = []
    counts = np.zeros(len(texts), dtype=np.int64)
    for row, text in enumerate(texts.to_pylist()):
        if text is None or text == "{}":
            continue
        before, at = len(elements), 1
        while at < len(text):
            found = _ELEMENT.match(text, at)
            if found is None or text[found.end()] not in ",}":
                raise _Unreadable(row)
            quoted, plain = found.groups()
            elements.append(_ESCAPED.sub(r"\1", quoted) if plain is None else None if plain == "NULL" else plain)
            at = found.end() + 1
        counts[row] = len(elements) - before
    return pa.array(elements, pa.string()), counts


_PARSERS: dict[str, Callable[[ValueType, pa.Array], Converted]] = {
    **dict.fromkeys(("int2", "int4", "int8", "oid", "float4", "float8"), _cast),
    **dict.fromkeys(("date", "timestamp", "timestamptz"), _calendar),
    "bool": _boolean,
    "bytea": _bytea,
    "numeric": _decimal,
}
