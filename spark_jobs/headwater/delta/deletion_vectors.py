"""Deletion vectors: which rows of a data file are gone, in the bytes that every Delta reader understands.

Source: Delta transaction protocol, "Deletion Vectors" and "Deletion Vector Format". Row numbers are kept as 32-bit
bitmaps: a data file of more than four thousand million rows does not exist here.
"""

from __future__ import annotations

import os.path
import struct
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

from pyroaring import BitMap

from headwater.delta import storage

FILE_VERSION = b"\x01"
"""The first byte of a file of vectors."""
_MAGIC = 1681511377
_HEADER = struct.Struct("<IqI")  # magic, number of bitmaps, the one bitmap's high 32 bits
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_VALUES = {character: value for value, character in enumerate(_Z85)}


class DamagedVector(ValueError):
    """The bytes of a deletion vector are not what its descriptor says."""


def write_vectors(folder: str, vectors: Mapping[str, BitMap]) -> dict[str, dict[str, Any]]:
    """Write all `vectors` (by data file) into one new file of the table; returns each one's descriptor."""
    name = uuid.uuid4()
    short = _z85(name.bytes)
    parts, descriptors, offset = [FILE_VERSION], {}, 1
    for file, rows in vectors.items():
        data = _to_bytes(rows)
        parts.append(_stored(data))
        descriptors[file] = {
            "storageType": "u",
            "pathOrInlineDv": short,
            "offset": offset,
            "sizeInBytes": len(data),
            "cardinality": len(rows),
        }
        offset += len(data) + 8
    storage.write(os.path.join(folder, f"deletion_vector_{name}.bin"), b"".join(parts))
    return descriptors


def read_vector(folder: str, descriptor: Mapping[str, Any]) -> BitMap:
    """The rows that `descriptor` marks. DamagedVector when the bytes are not what it says."""
    path = vector_file(folder, descriptor)
    if path is None:
        inline = _from_z85(str(descriptor["pathOrInlineDv"]))
        return _from_bytes(inline[: int(descriptor["sizeInBytes"])])
    size = int(descriptor["sizeInBytes"])
    stored = storage.read_range(path, int(descriptor.get("offset") or 0), size + 8)
    data = stored[4:-4]
    if stored != _stored(data) or len(data) != size:
        raise DamagedVector(f"the deletion vector in {path} is damaged")
    return _from_bytes(data)


def vector_file(folder: str, descriptor: Mapping[str, Any]) -> str | None:
    """The file that holds the vector, often beside those of other data files; None: the descriptor itself does."""
    stored, kind = str(descriptor["pathOrInlineDv"]), descriptor["storageType"]
    if kind == "i":
        return None
    if kind == "u":
        # Behind an optional random prefix, which names a folder, twenty characters of the file's UUID.
        name = uuid.UUID(bytes=_from_z85(stored[-20:]))
        return os.path.join(folder, stored[:-20], f"deletion_vector_{name}.bin")
    if kind == "p":
        return storage.path_of(stored)
    raise DamagedVector(f"a deletion vector of unknown storage {kind!r}")


def _stored(data: bytes) -> bytes:
    """As it stands in the file: its size before it, its checksum behind."""
    return struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data))


def _to_bytes(rows: BitMap) -> bytes:
    return _HEADER.pack(_MAGIC, 1, 0) + bytes(rows.serialize())


def _from_bytes(data: bytes) -> BitMap:
    magic, count = struct.unpack_from("<Iq", data)
    if magic != _MAGIC or count not in (0, 1):
        raise DamagedVector("not a deletion vector of one 32-bit bitmap")
    return BitMap.deserialize(data[_HEADER.size :]) if count else BitMap()


def _z85(data: bytes) -> str:
    text = []
    for at in range(0, len(data), 4):
        value = int.from_bytes(data[at : at + 4], "big")
        text += [_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0)]
    return "".join(text)


def _from_z85(text: str) -> bytes:
    data = bytearray()
    for at in range(0, len(text), 5):
        value = 0
        for character in text[at : at + 5]:
            value = value * 85 + _VALUES[character]
        data += value.to_bytes(4, "big")
    return bytes(data)
