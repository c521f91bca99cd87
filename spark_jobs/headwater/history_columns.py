"""The columns of a history: what stands before the source's own in the table beside a table with `history`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headwater.schema import Column, TableSchema, ValueType

OPERATION: Final = "_hw_operation"
"""insert, update, delete, truncate; load: from here on the changes of another load."""
LSN: Final = "_hw_lsn"
"""End of the transaction's commit."""
SEQUENCE: Final = "_hw_sequence"
"""Rises within the transaction; it numbers all tables' changes, so one table's have gaps."""
COMMITTED_AT: Final = "_hw_committed_at"
XID: Final = "_hw_xid"
INCARNATION: Final = "_hw_incarnation"
"""The table's load that the change belongs to."""
UNCHANGED: Final = "_hw_unchanged"
"""Columns whose value the log does not carry because it did not change: NULL here."""
BEFORE: Final = "_hw_before_"
"""Begins the names of the key columns as they were before the change: of updates and deletes."""

_BIGINT = ValueType("int8", "bigint")
_TEXT = ValueType("text", "string")
_OWN = {
    OPERATION: _TEXT,
    LSN: _BIGINT,
    SEQUENCE: _BIGINT,
    COMMITTED_AT: ValueType("timestamptz", "timestamp"),
    XID: _BIGINT,
    INCARNATION: _BIGINT,
    UNCHANGED: ValueType("array", "array<string>", element=_TEXT),
}


def history_schema(schema: TableSchema, others: tuple[Column, ...] = ()) -> TableSchema:
    """The history of a table of `schema`, as a table: insert-only, without a key. `others`: columns that it holds from
    the table's earlier loads."""
    before = {BEFORE + name: schema.column(name).value for name in schema.key}
    own = tuple(Column(name, 0, 0, -1, value) for name, value in {**_OWN, **before}.items())
    columns = own + tuple(replace(column, not_null=False) for column in schema.columns)
    known = {column.name for column in columns}
    return TableSchema(
        relation_id=schema.relation_id,
        schema=schema.schema,
        name=schema.name,
        columns=columns + tuple(column for column in others if column.name not in known),
        key=(),
        leaves=schema.leaves,
        partitioned=schema.partitioned,
        insert_only=True,
    )
