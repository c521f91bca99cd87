"""Dates, timestamps and times of day, from the wire to Arrow or to PostgreSQL's own text.

The wire counts days (int32) or microseconds (int64) from 2000-01-01 in the proleptic Gregorian calendar; the
greatest and the least number are the infinities. The lake holds 0001-01-01 to 9999-12-31, the rest is a bad
value there, while the text form (DateStyle ISO, TimeZone UTC) has no bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.log.values.wire import (
    Bytes,
    Fields,
    Ints,
    MalformedMessage,
    Mask,
    fixed,
    gather,
    present,
    shown_characters,
    spread,
)

_EPOCH_DAYS = 10957  # 1970-01-01 to 2000-01-01
_DAY = 86_400_000_000
_FIRST_DAY = -730_119  # 0001-01-01
_LAST_DAY = 2_921_939  # 9999-12-31
_INT32, _INT64 = np.iinfo(np.int32), np.iinfo(np.int64)
_INFINITY = np.frombuffer(b"-infinity", dtype=np.uint8)


def dates(days: Fields, known: Mask | None) -> tuple[pa.Array, Mask | None]:
    """`days` of the `known` rows (None: of all), as on the wire."""
    return _checked(pa.date32(), days.astype(np.int32), _FIRST_DAY, _LAST_DAY, _EPOCH_DAYS, known)


def timestamps(micros: Fields, known: Mask | None, kind: Any) -> tuple[pa.Array, Mask | None]:
    """`kind` is timestamp('us') or timestamp('us', 'UTC'); both are the same bytes."""
    first, last = _FIRST_DAY * _DAY, (_LAST_DAY + 1) * _DAY - 1
    return _checked(kind, micros.astype(np.int64), first, last, _EPOCH_DAYS * _DAY, known)


def _checked(
    kind: Any, values: npt.NDArray[Any], first: int, last: int, epoch: int, known: Mask | None
) -> tuple[pa.Array, Mask | None]:
    """`values` counted from 1970; those outside the lake's calendar are bad."""
    if not len(values) or (values.min() >= first and values.max() <= last):
        return fixed(kind, spread(values + values.dtype.type(epoch), known), known), None
    good = (values >= first) & (values <= last)
    values = np.where(good, values, 0) + values.dtype.type(epoch)
    valid = spread(good, known)
    bad = ~valid if known is None else known & ~valid
    return fixed(kind, spread(values, known), valid), bad


def date_texts(fields: Fields, known: Mask | None) -> pa.Array:
    """EncodeDateOnly."""
    days = fields.astype(np.int64)
    infinite = np.where(days == _INT32.max, 1, 0) - np.where(days == _INT32.min, 1, 0)
    return _calendar(np.where(infinite == 0, days, 0), None, "", infinite, known)


def timestamp_texts(fields: Fields, known: Mask | None, zone: str) -> pa.Array:
    """EncodeDateTime; `zone` is `+00` for a timestamptz, since the session's time zone is UTC."""
    micros = fields.astype(np.int64)
    infinite = np.where(micros == _INT64.max, 1, 0) - np.where(micros == _INT64.min, 1, 0)
    days, clock = np.divmod(np.where(infinite == 0, micros, 0), _DAY)
    return _calendar(days, clock, zone, infinite, known)


def time_texts(buffer: Bytes, starts: Ints, lengths: Ints) -> pa.Array:
    """EncodeTimeOnly; 24:00:00 is a time of day too."""
    at, known = present(starts, lengths, 8, "time")
    clock = gather(buffer, at, ">i8")
    wrong = (clock < 0) | (clock > _DAY)
    if wrong.any():
        raise MalformedMessage("a time outside the day", int(at[np.argmax(wrong)]))
    characters, shown = _clock(clock)
    return shown_characters(spread(characters, known), spread(shown, known), known)


def _decimal_digits(numbers: Ints, width: int) -> Bytes:
    powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    return (numbers[:, None] // powers % 10 + ord("0")).astype(np.uint8)


def _fill(characters: Bytes, at: int, text: str) -> None:
    characters[:, at : at + len(text)] = np.frombuffer(text.encode(), dtype=np.uint8)


def _clock(clock: Ints) -> tuple[Bytes, Mask]:
    """HH:MM:SS.ffffff; trailing zeros of the fraction are not shown, nor is a point with nothing behind it."""
    seconds, fraction = np.divmod(clock, 1_000_000)
    characters = np.empty((len(clock), 15), dtype=np.uint8)
    _fill(characters, 0, "00:00:00.000000")
    for at, part in ((0, seconds // 3600), (3, seconds // 60 % 60), (6, seconds % 60)):
        characters[:, at : at + 2] = _decimal_digits(part, 2)
    characters[:, 9:] = _decimal_digits(fraction, 6)
    shown = np.ones(characters.shape, dtype=np.bool_)
    needed = characters[:, 9:] != ord("0")
    shown[:, 9:] = np.logical_or.accumulate(needed[:, ::-1], axis=1)[:, ::-1]
    shown[:, 8] = fraction > 0
    return characters, shown


def _calendar(days: Ints, clock: Ints | None, zone: str, infinite: Ints, known: Mask | None) -> pa.Array:
    year, month, day = _civil(days)
    before = year <= 0  # year 0 is 1 BC
    year = np.where(before, 1 - year, year)
    time_width = 0 if clock is None else 16
    zone_at = 13 + time_width
    characters = np.empty((len(days), zone_at + len(zone) + 3), dtype=np.uint8)
    shown = np.ones(characters.shape, dtype=np.bool_)
    _fill(characters, 0, "0000000-00-00")
    characters[:, :7] = _decimal_digits(year, 7)
    shown[:, :3] = np.logical_or.accumulate(characters[:, :3] != ord("0"), axis=1)
    characters[:, 8:10] = _decimal_digits(month, 2)
    characters[:, 11:13] = _decimal_digits(day, 2)
    if clock is not None:
        characters[:, 13] = ord(" ")
        characters[:, 14:29], shown[:, 14:29] = _clock(clock)
    _fill(characters, zone_at, zone + " BC")
    shown[:, -3:] = before[:, None]
    for sign, width in ((1, 8), (-1, 9)):
        rows = infinite == sign
        characters[rows, :width] = _INFINITY[-width:]
        shown[rows] = np.arange(characters.shape[1]) < width
    return shown_characters(spread(characters, known), spread(shown, known), known)


def _civil(days: Ints) -> tuple[Ints, Ints, Ints]:
    """Year (astronomical), month and day of days since 2000-01-01, in eras of 400 years that begin on 1 March."""
    shifted = days + _EPOCH_DAYS + 719_468
    era, of_era = np.divmod(shifted, 146_097)
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * of_year + 2) // 153
    day = of_year - (153 * shifted_month + 2) // 5 + 1
    month = shifted_month + np.where(shifted_month < 10, 3, -9)
    return year_of_era + era * 400 + (month <= 2), month, day
