"""Values of type numeric, from the wire's base-10000 digits to Arrow decimals or to PostgreSQL's own text.

The wire (numeric_send): int16 count of digits, int16 weight of the first one (in powers of 10000), uint16 sign,
uint16 display scale, then the digits as int16. NaN and the infinities are signs of their own. The server strips
leading and trailing zero digits, so a digit further right than the scale is a value that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.log.wire import Bytes, Ints, MalformedMessage, Mask, gather, shown_characters, validity

_NEGATIVE, _NAN, _PLUS_INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL_TEXT = {_NAN: "NaN", _PLUS_INFINITY: "Infinity", _MINUS_INFINITY: "-Infinity"}
_POWERS = 10 ** np.arange(19, dtype=np.int64)
_MAX_WEIGHT, _MAX_GROUPS = 12, 26  # above: value by value, so that one giant value does not widen a whole block
_GROUP = np.array([list(f"{digit:04d}".encode()) for digit in range(10000)], dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Headers:
    """The four header fields of each value that is not NULL, and where its digits begin."""

    count: Ints
    weight: Ints
    sign: Ints
    scale: Ints
    digits: Ints


def _headers(buffer: Bytes, starts: Ints, lengths: Ints) -> _Headers:
    if len(starts) == 0:
        return _Headers(*(np.empty(0, np.int64) for _ in range(5)))
    short = lengths < 8
    if short.any():
        raise MalformedMessage("a numeric of less than 8 bytes", int(starts[np.argmax(short)]))
    fields = gather(buffer, starts, ">u8")
    count = (fields >> np.uint64(48)).astype(np.int64)
    weight = ((fields >> np.uint64(32)) & np.uint64(0xFFFF)).astype(np.uint16).view(np.int16).astype(np.int64)
    sign = ((fields >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.int64)
    scale = (fields & np.uint64(0xFFFF)).astype(np.int64)
    wrong = (lengths != 8 + 2 * count) | ~np.isin(sign, (0, _NEGATIVE, *_SPECIAL_TEXT)) | (scale > 0x3FFF)
    if wrong.any():
        raise MalformedMessage("a numeric whose header does not fit its bytes", int(starts[np.argmax(wrong)]))
    return _Headers(count, weight, sign, scale, starts + 8)


def _digit(buffer: Bytes, headers: _Headers, index: Ints | int) -> npt.NDArray[np.int64]:
    """Digit number `index` of each value; zero where it has none."""
    if isinstance(index, int) and len(headers.count) and index < headers.count.min():
        found = gather(buffer, headers.digits + 2 * index, ">u2")
        if found.max() <= 9999:
            return found.astype(np.int64)
    at = np.flatnonzero((index >= 0) & (index < headers.count))
    result = np.zeros(len(headers.count), dtype=np.int64)
    if len(at):
        offsets = index[at] if isinstance(index, np.ndarray) else index
        found = gather(buffer, headers.digits[at] + 2 * offsets, ">u2")
        if found.max() > 9999:
            wrong = int(np.argmax(found > 9999))
            raise MalformedMessage("a numeric digit above 9999", int(headers.digits[at][wrong]))
        result[at] = found
    return result


def decimals(buffer: Bytes, starts: Ints, lengths: Ints, precision: int, scale: int) -> tuple[pa.Array, Mask | None]:
    """decimal128(precision, scale), exact; what does not fit exactly is NULL and marked in the mask."""
    known = lengths >= 0
    headers = _headers(buffer, starts[known], lengths[known])
    special = headers.sign >= _NAN
    # 18 decimal digits always fit 64 bits: how many are left of the point is bounded by the weight.
    wide = ~special & (headers.count > 0) & (4 * (headers.weight + 1) + scale > 18)
    bad = special.copy()
    amount = np.zeros(len(bad), dtype=np.int64)
    rare = wide | special
    deepest = int(np.where(rare, 0, headers.count).max(initial=0))
    exponent = 4 * headers.weight + scale
    for index in range(min(deepest, 6)):
        digit = _digit(buffer, headers, index)
        if rare.any():
            digit[rare] = 0
        below = exponent < 0
        if below.any():  # the digit straddles the last place: what lies behind it must be zero
            divided, rest = np.divmod(digit, _POWERS[np.clip(-exponent, 0, 4)])
            bad |= below & (rest != 0)
            digit = np.where(below, divided, digit)
        amount += digit * _POWERS[np.clip(exponent, 0, 18)]
        exponent -= 4
    # A digit after the sixth lies below 10**-4 of the last place even at the greatest weight that is not wide.
    bad |= ~wide & ~special & (headers.count > 6)
    bad |= ~wide & (amount >= _POWERS[min(precision, 18)]) & (precision < 19)
    amount[bad] = 0
    halves = np.empty((len(bad), 2), dtype=np.int64)
    halves[:, 0] = np.where(headers.sign == _NEGATIVE, -amount, amount)
    halves[:, 1] = halves[:, 0] >> 63
    for row in np.flatnonzero(wide).tolist():
        unscaled = _unscaled(buffer, headers, row, scale)
        if unscaled is None or abs(unscaled) >= 10**precision:
            bad[row] = True
        else:
            halves[row] = np.frombuffer(unscaled.to_bytes(16, "little", signed=True), dtype="<i8")
    return _decimal_array(halves, bad, known, pa.decimal128(precision, scale))


def _decimal_array(halves: npt.NDArray[np.int64], bad: Mask, known: Mask, kind: Any) -> tuple[pa.Array, Mask | None]:
    everywhere = np.zeros(len(known), dtype=np.bool_)
    everywhere[known] = bad
    full = halves
    if not known.all():
        full = np.zeros((len(known), 2), dtype=np.int64)
        full[known] = halves
    array = pa.Array.from_buffers(kind, len(known), [validity(known & ~everywhere), pa.py_buffer(full)])
    return array, everywhere if everywhere.any() else None


def _digits_of(buffer: Bytes, headers: _Headers, row: int) -> list[int]:
    begin, count = int(headers.digits[row]), int(headers.count[row])
    digits: list[int] = np.frombuffer(buffer[begin : begin + 2 * count].tobytes(), dtype=">u2").tolist()
    if any(digit > 9999 for digit in digits):
        raise MalformedMessage("a numeric digit above 9999", begin)
    return digits


def _unscaled(buffer: Bytes, headers: _Headers, row: int, scale: int) -> int | None:
    """The value times 10**scale, None when that is not whole or has no chance to fit in 38 digits."""
    digits = _digits_of(buffer, headers, row)
    if headers.weight[row] > 12 or 4 * (int(headers.weight[row]) - len(digits) + 1) + scale <= -4:
        return None
    number = int("".join(f"{digit:04d}" for digit in digits) or "0")
    exponent = 4 * (int(headers.weight[row]) - len(digits) + 1) + scale
    if exponent >= 0:
        number *= int(10**exponent)
    else:
        number, rest = divmod(number, int(10**-exponent))
        if rest:
            return None
    return -number if headers.sign[row] == _NEGATIVE else number


def texts(buffer: Bytes, starts: Ints, lengths: Ints) -> pa.Array:
    """The server's text (get_str_from_var): every digit of the display scale, no exponent, NaN and Infinity.

    The wire's digits are groups of four decimal digits, so each group becomes four characters at its place
    around the point; no arithmetic, hence no limit of digits.
    """
    known = lengths >= 0
    headers = _headers(buffer, starts[known], lengths[known])
    rare = (headers.sign >= _NAN) | (headers.weight > _MAX_WEIGHT) | (headers.scale > 4 * _MAX_GROUPS)
    plain = ~rare
    left = max(int(headers.weight[plain].max(initial=0)), 0) + 1
    right = (int(headers.scale[plain].max(initial=0)) + 3) // 4
    count = len(rare)
    characters = np.empty((count, 1 + 4 * (left + right) + 1), dtype=np.uint8)
    point = 1 + 4 * left
    characters[:, 0], characters[:, point] = ord("-"), ord(".")
    for group in range(left + right):
        digit = _digit(buffer, headers, headers.weight - (left - 1 - group))
        at = 1 + 4 * group + (group >= left)
        characters[:, at : at + 4] = _GROUP[digit]
    shown = np.ones(characters.shape, dtype=np.bool_)
    shown[:, 0] = headers.sign == _NEGATIVE
    whole = characters[:, 1:point] != ord("0")
    whole[:, -1] = True
    shown[:, 1:point] = np.logical_or.accumulate(whole, axis=1)
    shown[:, point] = headers.scale > 0
    shown[:, point + 1 :] = np.arange(4 * right) < headers.scale[:, None]
    full_characters, full_shown = characters, shown
    if not known.all():
        full_characters = np.zeros((len(known), characters.shape[1]), dtype=np.uint8)
        full_shown = np.zeros(full_characters.shape, dtype=np.bool_)
        full_characters[known], full_shown[known] = characters, shown
    array = shown_characters(full_characters, full_shown, None if known.all() else known)
    if not rare.any():
        return array
    strings = array.to_pylist()
    places = np.flatnonzero(known)
    for row in np.flatnonzero(rare).tolist():
        strings[places[row]] = _text(buffer, headers, row)
    return pa.array(strings, pa.string())


def _text(buffer: Bytes, headers: _Headers, row: int) -> str:
    sign, scale, weight = int(headers.sign[row]), int(headers.scale[row]), int(headers.weight[row])
    if sign in _SPECIAL_TEXT:
        return _SPECIAL_TEXT[sign]
    digits = _digits_of(buffer, headers, row)
    padded = "0000" * max(-weight - 1, 0) + "".join(f"{digit:04d}" for digit in digits)
    whole_length = 4 * max(weight + 1, 0)
    padded = padded.ljust(whole_length + scale, "0")
    whole = padded[:whole_length].lstrip("0") or "0"
    fraction = padded[whole_length : whole_length + scale]
    return f"{'-' if sign == _NEGATIVE else ''}{whole}{'.' + fraction if fraction else ''}"
