"""Values of partition columns as the log of a Delta table writes them, and the folder that a partition's files lie in.

Source: Delta protocol, "Partition Value Serialization". Folders are a habit there and no rule, but there are readers
that take the values from them (Polars): they are named exactly as Spark names them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from headwater.errors import BadValue

# As Spark escapes them (ExternalCatalogUtils.escapePathName).
_ESCAPED = frozenset([*map(chr, range(1, 0x20)), *"\"#%'*/:=?\\\x7f{[]^"])
_LEFT_IN_PATHS = "/=!$&'()*+,;:@~"
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
_LONGEST_NAME = 255  # bytes, on every usual file system
# Not the line of code itself, which stands in a traceback as well.
_TOO_LONG = re.compile(r"(?<!\")a value of the partition column .* is too long for the name of a folder")

UNSUPPORTED = ("float", "double", "binary")
"""Delta types whose partition values differ from writer to writer."""


def to_text(value: Any) -> str | None:
    """`value` as Spark writes it into the log."""
    if value is None:
        return None
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    return _plain(value)


def from_text(text: str | None, kind: Any) -> Any:
    """The value of the Arrow type `kind`, for pyarrow. An empty text is NULL, whatever the type."""
    if not text:
        return None
    if pa.types.is_boolean(kind):
        return text.lower() == "true"
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_decimal(kind):
        return Decimal(text)
    if pa.types.is_date(kind):
        return date.fromisoformat(text)
    if pa.types.is_timestamp(kind):
        value = datetime.fromisoformat(text)
        # Without a zone: by the writing session's, and every session here is in UTC.
        if kind.tz is None:
            return value.replace(tzinfo=None)
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return text


def escaped(path: str) -> str:
    """`path` as the log has it: escaped as Java does, which leaves letters of other scripts as they are."""
    return "".join(
        character if ord(character) > 127 and character.isprintable() else quote(character, safe=_LEFT_IN_PATHS)
        for character in path
    )


class NameTooLong(ValueError):
    """No file system has a folder for this value."""


def too_long(text: str, table: str) -> BadValue | None:
    """The error of a load or batch of `table` that the text of a NameTooLong means; None: it is none."""
    found = _TOO_LONG.search(text)
    if found is None:
        return None
    return BadValue(
        found[0],
        where=table,
        remedy=f"partition it by another column, then headwater load PIPELINE.yaml --table {table} --again",
    )


def folder_of(values: Mapping[str, Any]) -> str:
    """The folder of a partition, by column, below the table's and ending in "/", as the file system names it."""
    texts = {name: "" if value is None else _plain(value) for name, value in values.items()}
    parts = [f"{_escaped(name)}={_escaped(text) or _NULL_FOLDER}" for name, text in texts.items()]
    for name, part in zip(values, parts, strict=True):
        if len(part.encode()) > _LONGEST_NAME:
            raise NameTooLong(f"a value of the partition column {name} is too long for the name of a folder")
    return "".join(f"{part}/" for part in parts)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime):
        in_utc = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo is not None else value
        text = in_utc.isoformat(" ", timespec="microseconds")
        return text.rstrip("0").rstrip(".") if value.microsecond else text[: -len(".000000")]
    return value.isoformat() if isinstance(value, date) else str(value)


def _escaped(text: str) -> str:
    return "".join(f"%{ord(character):02X}" if character in _ESCAPED else character for character in text)
