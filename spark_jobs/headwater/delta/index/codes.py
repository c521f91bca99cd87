"""Keys as numbers that are equal exactly when the keys are the same (`headwater.key_equality`): what the look-up of
rows compares.

One word (64 bits) for a single integer or date. Two words otherwise: exact for two integers and for a uuid, a 128-bit
digest for everything else (BLAKE2b: keys are other people's data, and nobody shall be able to build two that meet).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.key_equality import comparable
from headwater.schema import TableSchema

UInt64 = npt.NDArray[np.uint64]

# Odd, so that the map below can be undone: two pairs never share both words.
_SPREAD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_SIGN = np.uint64(1 << 63)

_UUID_TEXT = np.dtype(
    {
        "names": list("abcdef"),
        "formats": [">u8", ">u4", ">u4", ">u4", ">u4", ">u8"],
        "offsets": [0, 9, 14, 19, 24, 28],
        "itemsize": 36,
    }
)
"""Of a uuid's text the digits without the hyphens, the last twelve as four and eight."""
_LOW, _EACH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
_CLOSER = [
    (np.uint64(4), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(8), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(16), np.uint64(0xFFFFFFFF)),
]
"""Digits that have a byte each come side by side."""


@dataclass(frozen=True, slots=True)
class Codes:
    """One key each. `first` alone decides where `second` is None."""

    first: UInt64
    second: UInt64 | None = None

    def __len__(self) -> int:
        return len(self.first)

    def take(self, indices: npt.NDArray[np.int64]) -> Codes:
        return Codes(self.first[indices], self.second[indices] if self.second is not None else None)

    @classmethod
    def joined(cls, parts: Sequence[Codes]) -> Codes:
        first = np.concatenate([part.first for part in parts])
        seconds = [part.second for part in parts if part.second is not None]
        return cls(first, np.concatenate(seconds) if seconds else None)


def encode(schema: TableSchema, keys: pa.Table) -> Codes:
    """The codes of `keys`, which holds the table's key columns. Key columns have no NULL."""
    columns = [keys[name].combine_chunks() for name in schema.key]
    if len(columns) == 1 and _is_number(columns[0].type):
        return Codes(_word(columns[0]))
    if len(columns) == 2 and all(_is_number(column.type) for column in columns):
        return _spread(_word(columns[0]), _word(columns[1]))
    if len(columns) == 1 and schema.column(schema.key[0]).value.wire == "uuid":
        return _uuid(columns[0])
    return _digest(columns)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_date32(kind))


def _word(column: pa.Array) -> UInt64:
    """In the order of the values, so that neighbours stay neighbours."""
    numbers = column.cast(pa.int32()) if pa.types.is_date32(column.type) else column
    signed: npt.NDArray[np.int64] = numbers.to_numpy(zero_copy_only=False).astype(np.int64)
    return np.bitwise_xor(signed.view(np.uint64), _SIGN)


def _spread(high: UInt64, low: UInt64) -> Codes:
    """Without it all rows of one customer would share the first word, and a look-up would walk through them."""
    return Codes(high * _SPREAD[0] + low * _SPREAD[1], high)


def _uuid(column: pa.Array) -> Codes:
    """The text form's 32 digits as 128 bits."""
    texts = _flat(column).view(_UUID_TEXT)
    a, b, c, d, e, f = (texts[name].astype(np.uint64) for name in "abcdef")
    half = np.uint64(32)
    high = _digits(a) << half | _digits(b << half | c)
    return _spread(high, _digits(d << half | e) << half | _digits(f))


def _digits(texts: UInt64) -> UInt64:
    """Eight hexadecimal digits in a word each, as the number that they write; all words at once."""
    found: UInt64 = (texts & _LOW) + (texts >> np.uint64(6) & _EACH) * np.uint64(9)  # a letter's low bits count from 1
    for shift, mask in _CLOSER:
        found = (found | found >> shift) & mask
    return found


def _flat(column: pa.Array) -> npt.NDArray[np.uint8]:
    if not len(column):
        return np.zeros(0, np.uint8)
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]]


def _digest(columns: list[pa.Array]) -> Codes:
    texts = [_bytes(column) for column in columns]
    if len(texts) == 1:
        joined = texts[0]
    else:
        # Each with its length before it: ("a", "bc") and ("ab", "c") are different keys.
        parts = [part for text in texts for part in (_bytes(pc.binary_length(text)), text)]
        joined = pc.binary_join_element_wise(*parts, pa.scalar(b":", pa.binary()))
    digests = b"".join(hashlib.blake2b(key, digest_size=16).digest() for key in joined.to_pylist())
    words = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    return Codes(np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1]))


def _bytes(column: pa.Array) -> pa.Array:
    column = comparable(column)
    kind = column.type
    if pa.types.is_binary(kind):
        return column
    return (column if pa.types.is_string(kind) else column.cast(pa.string())).cast(pa.binary())
