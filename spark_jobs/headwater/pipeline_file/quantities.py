"""Durations and sizes as people write them: `500ms`, `1.5h`, `256MiB`.

Durations are seconds (a bare number too), sizes are bytes. Kept apart from the pipeline file, since the command
line takes durations without reading one. The errors do not repeat the text: it may come from the environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}

_LONGEST = 36_500 * 86_400.0
"""Moments so far from now are beyond what a date can be."""

DURATION_FORM = "a duration: a number with ms, s, m, h or d, for example 500ms or 10m (a bare number is seconds)"
SIZE_FORM = "a size: a number with B, KiB, MiB, GiB, kB, MB or GB, for example 256MiB (a bare number is bytes)"


def parse_duration(value: str | float) -> float:
    """Seconds; ValueError when `value` is no duration, or one of more than a hundred years. Never negative."""
    seconds = _scale(value, _SECONDS, DURATION_FORM)
    if seconds > _LONGEST:
        raise ValueError("expected a duration of at most a hundred years (36500d)")
    # 5 ms must not become 0.005000000000000001 in output.
    return round(seconds, 9)


def parse_size(value: str | float) -> int:
    """Whole bytes, of a larger unit rounded down; ValueError when `value` is no size, or says a part of a byte."""
    size = _scale(value, _BYTES, SIZE_FORM)
    match = _QUANTITY.fullmatch(value if isinstance(value, str) else repr(value))
    if match is None or _BYTES[match[2]] == 1:
        if size != int(size):
            raise ValueError("a size must be a whole number of bytes")
        return int(size)
    return int(Decimal(match[1]) * _BYTES[match[2]])


def _scale(value: str | float, units: Mapping[str, float], form: str) -> float:
    match = _QUANTITY.fullmatch(value if isinstance(value, str) else repr(value))
    # repr of a float may be 1e-05 or inf: no form that the file allows, except through this door.
    if match is None and isinstance(value, float) and math.isfinite(value) and value >= 0:
        return value
    if match is None or match[2] not in units:
        raise ValueError(f"expected {form}")
    scaled = float(match[1]) * units[match[2]]
    if not math.isfinite(scaled):
        raise ValueError(f"expected {form}")
    return scaled


def number_text(value: float) -> str:
    """A number of at most nine places as both functions above read it: `600`, `0.5`, never `2.592e+06`."""
    return f"{value:.9f}".rstrip("0").rstrip(".")


def size_text(size: float) -> str:
    """Bytes, for a person: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A duration, for a person: `5 ms`, `0.8 s`, `5 s`, `4 min`, `3 h 20 min`, `2 d 5 h`."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.{0 if seconds >= 10 else 1}f}".removesuffix(".0") + " s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
