"""Converters from PostgreSQL's binary form to Arrow, one column at a time: the same for the load and the log.

`convert` takes the byte ranges of one column's values in a buffer and gives an Arrow array and a mask of *bad*
values: those that the lake's type cannot hold (NaN in a decimal, an infinite or far date, a two-dimensional
array, text that is not UTF-8). They are NULL in the array; what to do about them is the caller's business.
Bytes that the type's send function cannot have written are a `MalformedMessage`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from headwater.arrow_types import arrow_type
from headwater.log import arrays, numeric, ranges, times
from headwater.log.text_forms import FORMATTERS
from headwater.log.wire import (
    Bytes,
    Ints,
    MalformedMessage,
    Mask,
    booleans,
    byte_strings,
    fixed,
    gather,
    gather_bytes,
    present,
    shown_characters,
    spread,
)
from headwater.schema import SERVER_TEXT, ValueType

Converted = tuple[pa.Array, Mask | None]

TEXT_WIRES = frozenset({"text", "json", "xml", "enum", SERVER_TEXT})
"""Wire forms whose bytes are the text itself."""

_NUMBERS = {"int2": ">i2", "int4": ">i4", "int8": ">i8", "oid": ">u4", "float4": ">f4", "float8": ">f8"}
_NATIVE = {"smallint": "i2", "int": "i4", "bigint": "i8", "float": "f4", "double": "f8"}
_HEX = np.frombuffer(bytes(range(256)).hex().encode(), dtype=np.uint16)  # both characters of a byte
_UUID_GROUPS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))


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
    table = _AS_TEXT if value.lake == "string" else _AS_ITSELF
    try:
        converter = table[value.wire]
    except KeyError:
        raise ValueError(f"no converter from {value.wire} to {value.lake}") from None
    return converter(value, buffer, starts, lengths)


def _number(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    """Integers and floats, widened when the lake's type is wider. Floats go bit by bit: -0 and NaN stay."""
    dtype = np.dtype(_NUMBERS[value.wire])
    at, known = present(starts, lengths, dtype.itemsize, value.wire)
    kind = arrow_type(value)
    numbers = gather(buffer, at, dtype.str).astype(_NATIVE[value.lake], copy=False)
    return fixed(kind, spread(numbers, known), known), None


def _number_text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    number, _ = _number(ValueType(value.wire, "bigint"), buffer, starts, lengths)
    return number.cast(pa.string()), None


def _boolean(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    at, known = present(starts, lengths, 1, value.wire)
    return booleans(spread(buffer[at], known) != 0, known), None


def _binary(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return byte_strings(buffer, starts, lengths), None


def _text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    raw = byte_strings(buffer, starts, lengths)
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
        return None  # only a database with encoding SQL_ASCII can send this


def _jsonb(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    """A version byte, 1, then the text."""
    known = lengths >= 0
    there = starts[known]
    if (lengths == 0).any():
        raise MalformedMessage("a jsonb without a version", int(starts[np.argmax(lengths == 0)]))
    if (buffer[there] != 1).any():
        raise MalformedMessage("a jsonb of an unknown version", int(there[np.argmax(buffer[there] != 1)]))
    return _text(value, buffer, starts + known, lengths - known)


def _uuid(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    at, known = present(starts, lengths, 16, value.wire)
    hexadecimal = _HEX[gather_bytes(buffer, at, 16)].view(np.uint8)
    characters = np.full((len(at), 36), ord("-"), dtype=np.uint8)
    for dashes, (begin, end) in enumerate(_UUID_GROUPS):
        characters[:, begin + dashes : end + dashes] = hexadecimal[:, begin:end]
    return shown_characters(spread(characters, known), None, known), None


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


def _date(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return times.dates(buffer, starts, lengths)


def _date_text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return times.date_texts(buffer, starts, lengths), None


def _timestamp(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return times.timestamps(buffer, starts, lengths, arrow_type(value))


def _timestamp_text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    zone = "+00" if value.wire == "timestamptz" else ""
    return times.timestamp_texts(buffer, starts, lengths, zone), None


def _time_text(value: ValueType, buffer: Bytes, starts: Ints, lengths: Ints) -> Converted:
    return times.time_texts(buffer, starts, lengths), None


_Converter = Callable[[ValueType, Bytes, Ints, Ints], Converted]
_AS_ITSELF: dict[str, _Converter] = {
    **dict.fromkeys(_NUMBERS, _number),
    "bool": _boolean,
    "bytea": _binary,
    "date": _date,
    "timestamp": _timestamp,
    "timestamptz": _timestamp,
}
_AS_TEXT: dict[str, _Converter] = {
    **dict.fromkeys(FORMATTERS, _formatted),
    **dict.fromkeys(TEXT_WIRES, _text),
    **dict.fromkeys(("int2", "int4", "int8", "oid"), _number_text),
    "date": _date_text,
    "jsonb": _jsonb,
    "numeric": _numeric_text,
    "time": _time_text,
    "timestamp": _timestamp_text,
    "timestamptz": _timestamp_text,
    "uuid": _uuid,
}
