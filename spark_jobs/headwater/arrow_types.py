"""The Arrow types of lake columns: what the log decodes to, what data files hold, what keys are compared as."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pyarrow as pa

from headwater.schema import DELETED, DELETED_AT, DELETED_LSN, PARTITION_COLUMN, TableSchema, ValueType

_DECIMAL = re.compile(r"\Adecimal\((\d+),(\d+)\)\Z")
_SCALARS: dict[str, Any] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


@cache
def arrow_type(value: ValueType) -> Any:
    """The Arrow type of a lake type."""
    if value.lake == "string":
        return pa.string()
    if value.lake.startswith("array<") and value.element is not None:
        return pa.list_(arrow_type(value.element))
    if match := _DECIMAL.match(value.lake):
        return pa.decimal128(int(match[1]), int(match[2]))
    try:
        return _SCALARS[value.lake]
    except KeyError:
        raise ValueError(f"no Arrow type for {value.lake}") from None


MARKS = pa.schema([(DELETED, pa.bool_()), (DELETED_LSN, pa.int64()), (DELETED_AT, pa.timestamp("us", "UTC"))])
"""The last columns of a table with `soft_delete`."""


def lake_schema(schema: TableSchema) -> pa.Schema:
    """All columns of the table in the lake, in order."""
    fields = [pa.field(column.name, arrow_type(column.value)) for column in schema.columns]
    if schema.partitioned:
        fields.append(pa.field(PARTITION_COLUMN, pa.int64()))
    if schema.soft_delete:
        fields += MARKS
    return pa.schema(fields)


def as_stored(rows: pa.RecordBatch, kind: pa.Schema) -> pa.Table:
    """Rows that are read at the source as a table of schema `kind` (`lake_schema`) stores them: where it has marks, as
    rows that live."""
    table = pa.Table.from_batches([rows])
    for field in list(kind)[table.num_columns :]:
        value = pa.scalar(False if field.name == DELETED else None, field.type)
        table = table.append_column(field, pa.repeat(value, table.num_rows))
    return table.cast(kind)


def key_schema(schema: TableSchema) -> pa.Schema:
    return pa.schema([pa.field(name, arrow_type(schema.column(name).value)) for name in schema.key])
