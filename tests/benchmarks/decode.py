"""Rows per second of `decode_tuples` for ten ordinary columns, beside a loop with `struct` over the same bytes.

    PYTHONPATH=spark_jobs python tests/benchmarks/decode.py

The loop is the reference: what one would write without numpy, giving Arrow arrays of the same values. Both run
over the same blocks in the same process, on one core; time is the process's CPU time, so that a busy machine
does not count. The same rows as text, as a connection without `binary` sends them, are decoded beside.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from figures import figure

from headwater.arrow_types import arrow_type
from headwater.log.values.decode import decode_tuples
from headwater.schema import Column, ValueType

ROWS = 10_000
BLOCKS = 40
REFERENCE_BLOCKS = 5
REPEATS = 5

TYPES: dict[str, ValueType] = {
    "id": ValueType("int8", "bigint"),
    "customer": ValueType("int4", "int"),
    "state": ValueType("text", "string"),
    "note": ValueType("text", "string"),
    "amount": ValueType("numeric", "decimal(12,2)", 12, 2),
    "created": ValueType("timestamptz", "timestamp"),
    "day": ValueType("date", "date"),
    "paid": ValueType("bool", "boolean"),
    "rating": ValueType("float8", "double"),
    "token": ValueType("uuid", "string"),
}
COLUMNS = [Column(name, at, 0, -1, value) for at, (name, value) in enumerate(TYPES.items(), 1)]


def _numeric(cents: int) -> bytes:
    whole, fraction = divmod(cents, 100)
    digits = [whole // 10000, whole % 10000, fraction * 100]
    return struct.pack("!hhHH3h", 3, 1, 0, 2, *digits)


def make_block(generator: np.random.Generator, only: str = "") -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Any]:
    """Rows of all columns, or of one."""
    parts, starts, size = [], [], 0
    for row in range(ROWS):
        number = int(generator.integers(0, 2**40))
        values = [
            struct.pack("!q", row),
            struct.pack("!i", number % 2**31),
            (b"open", b"paid", b"shipped")[number % 3],
            None if number % 10 == 0 else b"a note of some words, not too long"[: number % 34],
            _numeric(10**6 + number % 10**9),
            struct.pack("!q", 700_000_000_000_000 + number),
            struct.pack("!i", 8000 + number % 1000),
            struct.pack("!?", number % 2),
            struct.pack("!d", number / 7),
            number.to_bytes(16, "big"),
        ]
        if only:
            values = [values[list(TYPES).index(only)]]
        tuple_data = struct.pack("!h", len(values)) + b"".join(
            b"n" if value is None else b"b" + struct.pack("!i", len(value)) + value for value in values
        )
        parts.append(tuple_data)
        starts.append(size)
        size += len(tuple_data)
    return np.frombuffer(b"".join(parts), dtype=np.uint8), np.array(starts, dtype=np.int64)


_EPOCH = date(2000, 1, 1)
_READERS: dict[str, Callable[[bytes], Any]] = {
    "int8": lambda value: struct.unpack("!q", value)[0],
    "int4": lambda value: struct.unpack("!i", value)[0],
    "text": bytes.decode,
    "timestamptz": lambda value: struct.unpack("!q", value)[0] + 946_684_800_000_000,
    "date": lambda value: _EPOCH + timedelta(days=struct.unpack("!i", value)[0]),
    "bool": lambda value: value != b"\0",
    "float8": lambda value: struct.unpack("!d", value)[0],
    "uuid": lambda value: str(uuid.UUID(bytes=value)),
    "numeric": lambda value: _read_numeric(value),
}


def _read_numeric(value: bytes) -> Any:
    count, weight, sign, _ = struct.unpack_from("!hhHH", value)
    number = 0
    for digit in struct.unpack_from(f"!{count}h", value, 8):
        number = number * 10000 + digit
    return Decimal(-number if sign else number).scaleb(4 * (weight - count + 1)).quantize(Decimal("0.01"))


def reference(buffer: bytes, starts: list[int]) -> dict[str, pa.Array]:
    lists: list[list[Any]] = [[] for _ in COLUMNS]
    readers = [_READERS[column.value.wire] for column in COLUMNS]
    for start in starts:
        at = start + 2
        for items, reader in zip(lists, readers, strict=True):
            if buffer[at] == 110:
                items.append(None)
                at += 1
                continue
            (length,) = struct.unpack_from("!i", buffer, at + 1)
            items.append(reader(buffer[at + 5 : at + 5 + length]))
            at += 5 + length
    return {
        column.name: pa.array(items, arrow_type(column.value)) for column, items in zip(COLUMNS, lists, strict=True)
    }


def text_block(columns: dict[str, pa.Array]) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Any]:
    """The rows as a connection without `binary` sends them."""
    tuples = []
    for row in zip(*(columns[name].to_pylist() for name in TYPES), strict=True):
        texts = (None if value is None else _text(value).encode() for value in row)
        fields = (b"n" if text is None else b"t" + struct.pack("!i", len(text)) + text for text in texts)
        tuples.append(struct.pack("!h", len(row)) + b"".join(fields))
    sizes = np.fromiter(map(len, tuples), dtype=np.int64)
    return np.frombuffer(b"".join(tuples), dtype=np.uint8), np.cumsum(sizes) - sizes


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return value.strftime("%Y-%m-%d %H:%M:%S.%f+00") if isinstance(value, datetime) else str(value)


def seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def alone(generator: np.random.Generator, column: Column) -> float:
    """Nanoseconds per value of a table that has this column only."""
    buffer, starts = make_block(generator, column.name)
    return round(seconds(lambda: decode_tuples(buffer, starts, [column])) / ROWS * 1e9, 1)


def main() -> None:
    generator = np.random.default_rng(1)
    blocks = [make_block(generator) for _ in range(4)]
    for buffer, starts in blocks:
        decoded = decode_tuples(buffer, starts, COLUMNS).columns
        expected = reference(buffer.tobytes(), starts.tolist())
        assert all(decoded[name].equals(expected[name]) for name in TYPES), "the two decoders differ"
    texts = text_block(decode_tuples(*blocks[0], COLUMNS).columns)
    texts_decoded, from_binary = (decode_tuples(*block, COLUMNS).columns for block in (texts, blocks[0]))
    assert all(texts_decoded[name].equals(from_binary[name]) for name in TYPES), "text and binary differ"

    def vectorised() -> None:
        for block in range(BLOCKS):
            buffer, starts = blocks[block % len(blocks)]
            decode_tuples(buffer, starts, COLUMNS)

    def loop() -> None:
        for block in range(REFERENCE_BLOCKS):
            buffer, starts = blocks[block % len(blocks)]
            reference(buffer.tobytes(), starts.tolist())

    rate = ROWS * BLOCKS / seconds(vectorised)
    reference_rate = ROWS * REFERENCE_BLOCKS / seconds(loop)
    by_column = {column.name: alone(generator, column) for column in COLUMNS}
    what = f"decoding {len(COLUMNS)} ordinary columns, blocks of {ROWS:,} rows, one core"
    from_text = ROWS / seconds(lambda: decode_tuples(*texts, COLUMNS))
    figure(what, rate, "rows/s", "a struct loop by row", reference_rate)
    figure(f"{what}: from text", from_text, "rows/s", "from binary", rate)
    figure(f"{what}: bytes of a row", len(blocks[0][0]) / ROWS, "bytes")
    for column, nanoseconds in by_column.items():
        figure(f"{what}: one value of {column} alone", nanoseconds, "ns")


if __name__ == "__main__":
    main()
