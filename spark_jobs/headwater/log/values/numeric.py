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

from headwater.log.values.wire import Bytes, Ints, MalformedMessage, Mask, fixed, gather, shown_characters, spread

_NEGATIVE, _NAN, _PLUS_INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL_TEXT = {_NAN: "NaN", _PLUS_INFINITY: "Infinity", _MINUS_INFINITY: "-Infinity"}
_SIGNS = np.zeros(1 << 16, dtype=np.bool_)
_SIGNS[[0, _NEGATIVE, *_SPECIAL_TEXT]] = True
_POWERS = 10 ** np.arange(19, dtype=np.int64)
_DIGITS, _LIMB = 4, 16
"""Digits of base 10000 in a limb, and of base 10."""
_HALF = np.uint64(0xFFFFFFFF)
Words = npt.NDArray[np.uint64]
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

    def at(self, rows: Mask) -> _Headers:
        return _Headers(self.count[rows], self.weight[rows], self.sign[rows], self.scale[rows], self.digits[rows])


def _headers(buffer: Bytes, starts: Ints, lengths: Ints) -> _Headers:
    if len(starts) == 0:
        return _Headers(*(np.empty(0, np.int64) for _ in range(5)))
    if lengths.min() < 8:
        raise MalformedMessage("a numeric of less than 8 bytes", int(starts[np.argmax(lengths < 8)]))
    fields = gather(buffer, starts, ">i8")
    count, weight = fields >> 48 & 0xFFFF, (fields << 16) >> 48
    sign, scale = fields >> 16 & 0xFFFF, fields & 0xFFFF
    wrong = (lengths != 8 + 2 * count) | ~_SIGNS[sign] | (scale > 0x3FFF)
    if wrong.any():
        raise MalformedMessage("a numeric whose header does not fit its bytes", int(starts[np.argmax(wrong)]))
    return _Headers(count, weight, sign, scale, starts + 8)


def _digit(buffer: Bytes, headers: _Headers, index: Ints) -> Ints:
    """Digit number `index` of each value; zero where it has none."""
    there = (index >= 0) & (index < headers.count)
    # Where there is none, the header's first field is read and not used.
    found = gather(buffer, headers.digits + np.where(there, 2 * index, -8), ">u2").astype(np.int64) * there
    _refuse_digits(found, headers)
    return found


def _refuse_digits(digits: Ints, headers: _Headers) -> None:
    if digits.max(initial=0) > 9999:
        raise MalformedMessage("a numeric digit above 9999", int(headers.digits[np.argmax(digits > 9999)]))


def decimals(buffer: Bytes, starts: Ints, lengths: Ints, precision: int, scale: int) -> tuple[pa.Array, Mask | None]:
    """decimal128(precision, scale), exact; what does not fit exactly is NULL and marked in the mask."""
    known = lengths >= 0
    everywhere = bool(known.all())
    headers = _headers(buffer, starts, lengths) if everywhere else _headers(buffer, starts[known], lengths[known])
    # Counted in units of the last base-10000 digit that the scale reaches into, then divided down to the scale.
    places = -(-scale // 4)
    unit = 10 ** (4 * places - scale)
    top = headers.weight + places  # the unit is digit 0, and this the value's first
    short = (headers.count <= _DIGITS) & (top < _DIGITS)
    if short.all():
        halves, bad = _short(buffer, headers, top, unit, precision)
    else:
        halves, bad = np.empty((len(top), 2), dtype=np.int64), np.empty(len(top), dtype=np.bool_)
        for rows, read in ((short, _short), (~short, _long)):
            halves[rows], bad[rows] = read(buffer, headers.at(rows), top[rows], unit, precision)
    bad |= headers.sign >= _NAN
    return _decimal_array(halves, bad, known, pa.decimal128(precision, scale))


def _short(buffer: Bytes, headers: _Headers, top: Ints, unit: int, precision: int) -> tuple[Ints, Mask]:
    """Values below 10**16 units; their digits, at most four, are in the last eight bytes. Both halves, and the bad."""
    word = gather(buffer, headers.digits + 2 * headers.count - 8, ">i8")
    amount = np.zeros(len(word), dtype=np.int64)
    for place in range(int(headers.count.max(initial=0))):
        digit = np.where(place < headers.count, word >> 16 * place & 0xFFFF, 0)
        _refuse_digits(digit, headers)
        amount += digit * 10 ** (4 * place)
    below = top - headers.count + 1  # digits that the server has not sent, as they are zero
    bad = (below < 0) & (headers.count > 0)
    amount *= _POWERS[4 * np.clip(below, 0, _DIGITS)]
    if unit > 1:
        amount, whole = amount // unit, amount
        bad |= amount * unit != whole
    if precision < _LIMB:
        bad |= amount >= 10**precision
    halves = np.empty((len(amount), 2), dtype=np.int64)
    halves[:, 0] = np.where(headers.sign == _NEGATIVE, -amount, amount)
    halves[:, 1] = halves[:, 0] >> 63
    return halves, bad


def _long(buffer: Bytes, headers: _Headers, top: Ints, unit: int, precision: int) -> tuple[Ints, Mask]:
    """As `_short`, of up to 48 decimal digits, in three limbs of base 10**16."""
    bad = (headers.count > 0) & ((top - headers.count + 1 < 0) | (top >= 3 * _DIGITS))
    rest: Words = np.zeros(len(top), dtype=np.uint64)
    limbs: list[Words] = []
    for limb in (2, 1, 0):
        amount = rest * np.uint64(10**_LIMB)
        for place in range(_DIGITS):
            digit = _digit(buffer, headers, top - (_DIGITS * limb + place))
            amount += digit.astype(np.uint64) * np.uint64(10 ** (4 * place))
        rest = amount % np.uint64(unit)
        limbs.append(amount // np.uint64(unit))
        allowed = precision - _LIMB * limb
        if allowed < _LIMB:
            bad |= limbs[-1] >= np.uint64(10 ** max(allowed, 0))
    bad |= rest != 0
    low, high = limbs[0], np.zeros(len(top), dtype=np.uint64)
    for further in limbs[1:]:
        low, high = _times_limb(low, high)
        low += further
        high += low < further
    negative = headers.sign == _NEGATIVE
    high = np.where(negative, ~high + (low == 0), high)
    low = np.where(negative, ~low + np.uint64(1), low)
    return np.stack([low, high], axis=1).view(np.int64), bad


def _times_limb(low: Words, high: Words) -> tuple[Words, Words]:
    """10**16 times a number of 128 bits, by halves of words; there is no carry out of the upper one."""
    upper, lower = (np.uint64(half) for half in divmod(10**_LIMB, 1 << 32))
    right, left = low & _HALF, low >> np.uint64(32)
    first, middle, crossed = right * lower, right * upper, left * lower
    carried = (first >> np.uint64(32)) + (middle & _HALF) + (crossed & _HALF)
    above = left * upper + (middle >> np.uint64(32)) + (crossed >> np.uint64(32)) + (carried >> np.uint64(32))
    return first & _HALF | carried << np.uint64(32), above + high * np.uint64(10**_LIMB)


def _decimal_array(halves: npt.NDArray[np.int64], bad: Mask, known: Mask, kind: Any) -> tuple[pa.Array, Mask | None]:
    there = None if len(bad) == len(known) else known
    if not bad.any():
        return fixed(kind, spread(halves, there), there), None
    bad = spread(bad, there)
    return fixed(kind, spread(halves, there), known & ~bad), bad


def _digits_of(buffer: Bytes, headers: _Headers, row: int) -> list[int]:
    begin, count = int(headers.digits[row]), int(headers.count[row])
    digits: list[int] = np.frombuffer(buffer[begin : begin + 2 * count].tobytes(), dtype=">u2").tolist()
    if any(digit > 9999 for digit in digits):
        raise MalformedMessage("a numeric digit above 9999", begin)
    return digits


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
