"""How the rows of a table lie in its files: which columns are the file's and not the rows', and under which names.

Partition columns are not in the Parquet file: the log says their values once per file. With column mapping (needed
for names with spaces and the like) files, statistics and partition values use physical names, and Parquet's field
ids. Source: Delta protocol, "Column Mapping", "Partition Values".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from headwater.delta.delta_log import DataFile
from headwater.delta.delta_types import fields_of
from headwater.delta.log_entries import Action
from headwater.delta.partition_values import UNSUPPORTED, from_text

_FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True)
class Layout:
    """`physical`: the name in files of each column that has another one there; `ids`: Parquet field ids by column."""

    partition_by: tuple[str, ...] = ()
    physical: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)

    def in_files(self, name: str) -> str:
        return self.physical.get(name, name)

    def stored(self, schema: pa.Schema) -> pa.Schema:
        """The columns of `schema` that are in the files, as they are named there."""
        return pa.schema([self._stored(column) for column in schema if column.name not in self.partition_by])

    def complete(self, stored: pa.Table, file: DataFile, schema: pa.Schema, count: int) -> pa.Table:
        """`count` rows of `file` as `schema` has them: under their own names, with the columns that are the file's.

        `stored` does not know how many rows it has where all wanted columns are the file's.
        """
        columns = []
        for column in schema:
            if column.name in self.partition_by:
                value = from_text(file.partition_values.get(self.in_files(column.name)), column.type)
                columns.append(pa.chunked_array([pa.repeat(pa.scalar(value, column.type), count)]))
            elif (name := self.in_files(column.name)) in stored.column_names:
                columns.append(stored[name].cast(column.type))
            else:  # a file that is older than a column has NULL there
                columns.append(pa.chunked_array([pa.nulls(count, column.type)]))
        return pa.table(columns, schema=schema)

    def _stored(self, column: pa.Field) -> pa.Field:
        number = self.ids.get(column.name)
        named = column.with_name(self.in_files(column.name))
        return named if number is None else named.with_metadata({_FIELD_ID: str(number).encode()})


PLAIN = Layout()
"""All columns in the files, under their own names."""


def layout_of(metadata: Action) -> Layout:
    """From the table's metadata action."""
    partition_by = tuple(metadata.get("partitionColumns") or ())
    if (metadata.get("configuration") or {}).get("delta.columnMapping.mode", "none") == "none":
        return Layout(partition_by)
    fields = {column["name"]: column.get("metadata") or {} for column in fields_of(metadata)}
    return Layout(
        partition_by,
        {name: of["delta.columnMapping.physicalName"] for name, of in fields.items()},
        {name: int(of["delta.columnMapping.id"]) for name, of in fields.items()},
    )


def obstacle(metadata: Action) -> str:
    """Why files of such a table are not written here; empty if they are."""
    mode = (metadata.get("configuration") or {}).get("delta.columnMapping.mode", "none")
    if mode not in ("none", "name"):
        return f"its column mapping goes by {mode}"
    wanted = set(metadata.get("partitionColumns") or ())
    kinds = {column["name"]: column["type"] for column in fields_of(metadata)} if wanted else {}
    for name in sorted(wanted):
        if kinds.get(name) in UNSUPPORTED:
            return f"it is partitioned by {name}, a column of type {kinds[name]}"
    return ""
