"""What stands in the lake in place of a column's values: their hash under a key, or a fixed text.

The hash is HMAC-SHA256 (RFC 2104) of PostgreSQL's text of the value, 64 hexadecimal digits. So one value is the same in
all columns and tables of a key, whatever its type, and nobody without the key can try values out. NULL stays NULL.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any, Literal

_KNOWN_BY = b"headwater: which key this is"


@dataclass(frozen=True, slots=True)
class Hidden:
    """`way` "hash": `text` is the fingerprint of the key; "mask": `text` is what stands there."""

    way: Literal["hash", "mask"]
    text: str

    @classmethod
    def from_json(cls, value: dict[str, Any] | None) -> Hidden | None:
        return None if value is None else cls(**value)


def hashed(key: bytes, text: bytes) -> str:
    return hmac.digest(key, text, "sha256").hex()


def fingerprint(key: bytes) -> str:
    """Tells two keys apart and neither of them to anybody: it may stand in the lake."""
    return hashed(key, _KNOWN_BY)[:16]
