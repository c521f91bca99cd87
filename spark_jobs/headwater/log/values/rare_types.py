"""PostgreSQL's own text of a value, from its binary form: one Python function for each of the rarer types.

Each takes the bytes of one value and gives what the type's output function writes under the fixed settings
(`DateStyle ISO, IntervalStyle postgres, TimeZone UTC, extra_float_digits 1, bytea_output hex, lc_monetary C`).
The names of the C functions that were followed stand beside each.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np

_INTERVAL_UNITS = ("year", "mon", "day")


def _clock(microseconds: int) -> str:
    """A time of day or the clock part of an interval; trailing zeros of the fraction are not written."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{text}.{fraction:06d}".rstrip("0") if fraction else text


def timetz(value: bytes) -> str:
    """EncodeTimezone: seconds *west* of UTC, written with the opposite sign."""
    microseconds, west = struct.unpack("!qi", value)
    seconds = abs(west)
    zone = f"{seconds // 3600:02d}"
    if seconds % 60:
        zone += f":{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    elif seconds // 60 % 60:
        zone += f":{seconds // 60 % 60:02d}"
    return f"{_clock(microseconds)}{'-' if west > 0 else '+'}{zone}"


def interval(value: bytes) -> str:
    """EncodeInterval, style postgres; a positive part after a negative one carries its sign."""
    microseconds, days, months = struct.unpack("!qii", value)
    if (microseconds, days, months) == (2**63 - 1, 2**31 - 1, 2**31 - 1):
        return "infinity"
    if (microseconds, days, months) == (-(2**63), -(2**31), -(2**31)):
        return "-infinity"
    years = abs(months) // 12 * (1 if months >= 0 else -1)
    parts: list[str] = []
    before = False
    for number, unit in zip((years, months - 12 * years, days), _INTERVAL_UNITS, strict=True):
        if number:
            parts.append(f"{'+' if before and number > 0 else ''}{number} {unit}{'' if number == 1 else 's'}")
            before = number < 0
    if microseconds or not parts:
        sign = "-" if microseconds < 0 else "+" if before else ""
        parts.append(sign + _clock(abs(microseconds)))
    return " ".join(parts)


def money(value: bytes) -> str:
    """cash_out under lc_monetary C."""
    (cents,) = struct.unpack("!q", value)
    return f"{'-' if cents < 0 else ''}${abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def macaddr(value: bytes) -> str:
    if len(value) not in (6, 8):
        raise ValueError("a hardware address has 6 or 8 bytes")
    return value.hex(":")


def bit(value: bytes) -> str:
    (count,) = struct.unpack_from("!i", value)
    if count < 0 or len(value) - 4 != (count + 7) // 8:
        raise ValueError("the number of bits does not match the length")
    return "".join(f"{byte:08b}" for byte in value[4:])[:count]


def network(value: bytes) -> str:
    """network_out: inet leaves out the length of the prefix when it is the whole address, cidr never does."""
    family, bits, is_cidr, size = struct.unpack_from("!BBBB", value)
    address = value[4:]
    if len(address) != size or (family, size) not in ((2, 4), (3, 16)):
        raise ValueError("an address of an unknown family")
    text = ".".join(map(str, address)) if size == 4 else _ipv6(address)
    return text if bits == size * 8 and not is_cidr else f"{text}/{bits}"


def _ipv6(address: bytes) -> str:
    """pg_inet_net_ntop: the first longest run of zero words is `::`; embedded IPv4 in the server's own cases."""
    words = struct.unpack("!8H", address)
    best, best_length, start = -1, 1, 0
    while start < 8:
        end = start
        while end < 8 and words[end] == 0:
            end += 1
        if end - start > best_length:
            best, best_length = start, end - start
        start = max(end, start + 1)
    tail = [f"{word:x}" for word in words]
    embedded = best == 0 and (best_length == 6 or (best_length == 5 and words[5] == 0xFFFF))
    if embedded:
        tail[6:] = [".".join(map(str, address[12:]))]
    if best < 0:
        return ":".join(tail)
    return f"{':'.join(tail[:best])}::{':'.join(tail[best + best_length :])}"


def pg_lsn(value: bytes) -> str:
    high, low = struct.unpack("!II", value)
    return f"{high:X}/{low:X}"


def xid8(value: bytes) -> str:
    return str(struct.unpack("!Q", value)[0])


def single_char(value: bytes) -> str:
    """charout of type "char": one byte; zero is empty, bytes above ASCII are octal."""
    if len(value) != 1:
        raise ValueError('a "char" has one byte')
    return "" if value == b"\0" else chr(value[0]) if value[0] < 128 else f"\\{value[0]:03o}"


def boolean(value: bytes) -> str:
    if len(value) != 1:
        raise ValueError("a boolean has one byte")
    return "t" if value[0] else "f"


def bytea(value: bytes) -> str:
    return "\\x" + value.hex()


def _points(value: bytes) -> list[str]:
    if len(value) % 16:
        raise ValueError("points have 16 bytes each")
    numbers = [float8(value[at : at + 8]) for at in range(0, len(value), 8)]
    return [f"({x},{y})" for x, y in zip(numbers[::2], numbers[1::2], strict=True)]


def _some_points(value: bytes, count: int) -> list[str]:
    points = _points(value)
    if len(points) != count:
        raise ValueError(f"{len(points)} points instead of {count}")
    return points


def point(value: bytes) -> str:
    return _some_points(value, 1)[0]


def box(value: bytes) -> str:
    return ",".join(_some_points(value, 2))


def lseg(value: bytes) -> str:
    return f"[{box(value)}]"


def line(value: bytes) -> str:
    """line_out: the coefficients of Ax + By + C = 0."""
    if len(value) != 24:
        raise ValueError("a line has 24 bytes")
    return "{" + ",".join(float8(value[at : at + 8]) for at in (0, 8, 16)) + "}"


def circle(value: bytes) -> str:
    return f"<{point(value[:16])},{float8(value[16:])}>"


def polygon(value: bytes) -> str:
    (count,) = struct.unpack_from("!i", value)
    return f"({','.join(_some_points(value[4:], count))})"


def path(value: bytes) -> str:
    """path_out: round brackets where it is closed."""
    return polygon(value[1:]) if value[:1] == b"\1" else f"[{polygon(value[1:])[1:-1]}]"


def float4(value: bytes) -> str:
    (number,) = struct.unpack("!f", value)
    single = np.float32(number)
    around = [float(np.nextafter(single, np.float32(end))) for end in ("-inf", "inf")]
    return _float(float(number), np.format_float_scientific(single, unique=True), around, 6)


def float8(value: bytes) -> str:
    (number,) = struct.unpack("!d", value)
    return _float(number, repr(number), [math.nextafter(number, end) for end in (-math.inf, math.inf)], 15)


def _float(number: float, shortest: str, around: list[float], fixed_below: int) -> str:
    """The shortest digits that read back as the same number, as the server's Ryu writes them (d2s.c, f2s.c).

    Others count a number exactly half-way to a neighbour as readable when the rounding to even helps; the
    server does not rely on that, so there a digit more is needed.
    """
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    if number == 0:
        return "-0" if math.copysign(1, number) < 0 else "0"
    exact = Fraction(number)
    chosen = Decimal(shortest)
    borders = [(exact + Fraction(other)) / 2 for other in around if math.isfinite(other)]
    if Fraction(chosen) in borders:
        chosen = _inside(exact, min(borders), max(borders), chosen)
    _, digits, _ = chosen.as_tuple()
    text = "".join(map(str, digits)).rstrip("0")
    exponent = chosen.adjusted()
    sign = "-" if number < 0 else ""
    if not -4 <= exponent < fixed_below:
        mantissa = text[0] + ("." + text[1:] if len(text) > 1 else "")
        return f"{sign}{mantissa}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{text}"
    whole = text.ljust(exponent + 1, "0")
    return sign + whole[: exponent + 1] + ("." + whole[exponent + 1 :] if len(whole) > exponent + 1 else "")


def _inside(exact: Fraction, low: Fraction, high: Fraction, near: Decimal) -> Decimal:
    for count in range(len(near.as_tuple().digits), 20):
        unit = near.adjusted() - count + 1
        step = Fraction(10) ** unit
        lower = math.floor(exact / step)
        fitting = [digits for digits in (lower, lower + 1) if low < digits * step < high]
        if fitting:
            return Decimal(min(fitting, key=lambda digits: abs(digits * step - exact))).scaleb(unit)
    return near


FORMATTERS: dict[str, Callable[[bytes], str]] = {
    "bit": bit,
    "bool": boolean,
    "box": box,
    "bytea": bytea,
    "char": single_char,
    "cidr": network,
    "circle": circle,
    "float4": float4,
    "float8": float8,
    "inet": network,
    "interval": interval,
    "line": line,
    "lseg": lseg,
    "macaddr": macaddr,
    "money": money,
    "path": path,
    "pg_lsn": pg_lsn,
    "point": point,
    "polygon": polygon,
    "timetz": timetz,
    "xid8": xid8,
}
"""Formatter of each wire form that has no vectorised one. varbit and macaddr8 share with their siblings."""
