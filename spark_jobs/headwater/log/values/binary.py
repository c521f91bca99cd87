"""Converters from PostgreSQL's binary form to Arrow, one column at a time: the same for the load and the log.

`convert` takes the byte ranges of one column's values in a buffer and gives an Arrow array and a mask of *bad*
values: those that the lake's type cannot hold (NaN in a decimal, an infinite or far date, a two-dimensional
array, text that is not UTF-8). They are NULL in the array; what to do about them is the caller's business.
Bytes that the type's send function cannot have written are a `MalformedMessage`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.arrow_types import arrow_type
from headwater.log.values import arrays, numeric, ranges, times
from headwater.log.values.rare_types import FORMATTERS
from headwater.log.values.wire import (
    Bytes,
    Fields,
    Ints,
    MalformedMessage,
    Mask,
    booleans,
    byte_strings,
    fixed,
    gather,
    is_ascii,
    present,
    spread,
    wide_texts,
)
from headwater.schema import SERVER_TEXT, ValueType

Converted = tuple[pa.Array, Mask | None]

TEXT_WIRES = frozenset({"text", "json", "xml", "enum", SERVER_TEXT})
"""Wire forms whose bytes are the text itself."""

_NUMBERS = {"int2": ">i2", "int4": ">i4", "int8": ">i8", "oid": ">u4", "float4": ">f4", "float8": ">f8"}
_WIDE = {**_NUMBERS, "bool": "u1", "date": ">i4", "timestamp": ">i8", "timestamptz": ">i8", "uuid": "V16"}
_NATIVE = {"smallint": "i2", "int": "i4", "bigint": "i8", "float": "f4", "double": "f8"}
_HEX = np.frombuffer(np.arange(1 << 16, dtype="<u2").tobytes().hex().encode(), dtype=np.uint32)
"""The four characters of two bytes that stand one behind the other."""
_UUID_PLACES = (0, 4, 9, 14, 19, 24, 28, 32)
"""Where each two bytes of a uuid show in its text; dashes between."""


def convert(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    """The values at `starts` of `lengths` bytes (-1: NULL), which must lie inside the buffer."""
    if value.wire == "array":
        if value.element is None:
            raise ValueError("an array without an element type")
        if value.lake == "string":
            return arrays.texts(value.element, buffer, starts, lengths, convert)
        return arrays.lists(value.element, arrow_type(value), buffer, starts, lengths, convert)
    if value.wire in ("range", "multirange"):
        if value.element is None:
            raise ValueError("a range without a subtype")
        return ranges.texts(value.element, buffer, starts, lengths, convert, several=value.wire == "multirange")
    if value.wire == "numeric" and value.lake != "string":
        kind = arrow_type(value)
        return numeric.decimals(buffer, starts, lengths, kind.precision, kind.scale)
    form = wide_form(value)
    if form is not None:
        at, known = present(starts, lengths, form.itemsize, value.wire)
        return convert_wide(value, gather(buffer, at, form), known)
    table = _AS_TEXT if value.lake == "string" else _AS_ITSELF
    try:
        converter = table[value.wire]
    except KeyError:
        raise ValueError(f"no converter from {value.wire} to {value.lake}") from None
    return converter(value, buffer, starts, lengths)


def wide_form(value: ValueType) -> np.dtype[Any] | None:
    """As what numpy reads a wire form that is as wide in every row; None for the others."""
    return _FORMS[value.wire] if value.wire in (_WIDE_AS_TEXT if value.lake == "string" else _WIDE_AS_ITSELF) else None


def convert_wide(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    """The `fields` of the `known` rows (None: of all rows) in the value's `wide_form`, of any byte order and stride."""
    return (_WIDE_AS_TEXT if value.lake == "string" else _WIDE_AS_ITSELF)[value.wire](value, fields, known)


def _number(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    """Integers and floats, widened when the lake's type is wider. Floats go bit by bit: -0 and NaN stay."""
    return fixed(arrow_type(value), spread(fields.astype(_NATIVE[value.lake]), known), known), None


def _number_text(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    return fixed(pa.int64(), spread(fields.astype(np.int64), known), known).cast(pa.string()), None


def _boolean(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    return booleans(spread(fields != 0, known), known), None


def _date(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    return times.dates(fields, known)


def _date_text(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    return times.date_texts(fields, known), None


def _timestamp(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    return times.timestamps(fields, known, arrow_type(value))


def _timestamp_text(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    return times.timestamp_texts(fields, known, "+00" if value.wire == "timestamptz" else ""), None


def _uuid(value: ValueType, fields: Fields, known: Mask | None) -> Converted:
    pairs = np.ascontiguousarray(fields).view(np.dtype("<u2")).reshape(len(fields), 8)
    characters = np.empty((len(fields), 36), dtype=np.uint8)
    characters[:, 8:24:5] = ord("-")
    for pair, place in enumerate(_UUID_PLACES):
        characters[:, place : place + 4].view(np.uint32)[:, 0] = _HEX[pairs[:, pair]]
    return wide_texts(characters, known), None


def _binary(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return byte_strings(buffer, starts, lengths), None


def _text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    raw = byte_strings(buffer, starts, lengths)
    if is_ascii(raw):
        return raw.view(pa.string()), None
    try:
        return raw.cast(pa.string()), None  # validates UTF-8, copies nothing
    except pa.ArrowInvalid:
        texts = [None if item is None else _utf8(item) for item in raw.to_pylist()]
    bad = np.array([text is None for text in texts], dtype=np.bool_) & (lengths >= 0)
    return pa.array(texts, pa.string()), bad


def _utf8(item: bytes) -> str | None:
    try:
        return item.decode()
    except UnicodeDecodeError:
        return None  # no send function of PostgreSQL's own writes this, an extension's may


def _jsonb(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    """A version byte, 1, then the text."""
    known = lengths >= 0
    there = starts[known]
    if (lengths == 0).any():
        raise MalformedMessage("a jsonb without a version", int(starts[np.argmax(lengths == 0)]))
    if (buffer[there] != 1).any():
        raise MalformedMessage("a jsonb of an unknown version", int(there[np.argmax(buffer[there] != 1)]))
    return _text(value, buffer, starts + known, lengths - known)


def _formatted(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    """The rarer types, one Python call for each value."""
    formatter = FORMATTERS[value.wire]
    texts: list[str | None] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length < 0:
            texts.append(None)
            continue
        try:
            texts.append(formatter(buffer[start : start + length].tobytes()))
        except (ValueError, struct.error) as error:
            raise MalformedMessage(f"a value of type {value.wire} that cannot be read: {error}", start) from None
    return pa.array(texts, pa.string()), None


def _numeric_text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return numeric.texts(buffer, starts, lengths), None


def _time_text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return times.time_texts(buffer, starts, lengths), None


_Converter = Callable[[ValueType, Bytes, Ints, Ints], Converted]
_AS_ITSELF: dict[str, _Converter] = {"bytea": _binary}
_AS_TEXT: dict[str, _Converter] = {
    **dict.fromkeys(FORMATTERS, _formatted),
    **dict.fromkeys(TEXT_WIRES, _text),
    "jsonb": _jsonb,
    "numeric": _numeric_text,
    "time": _time_text,
}

_WideConverter = Callable[[ValueType, Fields, Mask | None], Converted]
_FORMS = {wire: np.dtype(form) for wire, form in _WIDE.items()}
_WIDE_AS_ITSELF: dict[str, _WideConverter] = {
    **dict.fromkeys(_NUMBERS, _number),
    "bool": _boolean,
    "date": _date,
    "timestamp": _timestamp,
    "timestamptz": _timestamp,
}
_WIDE_AS_TEXT: dict[str, _WideConverter] = {
    **dict.fromkeys(("int2", "int4", "int8", "oid"), _number_text),
    "date": _date_text,
    "timestamp": _timestamp_text,
    "timestamptz": _timestamp_text,
    "uuid": _uuid,
}
