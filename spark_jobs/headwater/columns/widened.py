"""Whether the values of a column stayed the same when its type became a wider one.

The log shows the new type and no row that the rewrite has written, so the lake makes the wider values of those that it
has; a USING that made others of them would go unseen. But ALTER TABLE writes every row under its own transaction id,
and rows that still carry it were changed by nobody since: once the lake has followed behind the change, it must hold
just these values. A sample of such rows is compared. Source: PostgreSQL documentation, "System Columns" (xmin),
TABLESAMPLE.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from headwater.arrow_types import as_stored, lake_schema
from headwater.columns.changes import changed
from headwater.errors import KeepsChanging, Transient
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Int64
from headwater.log.values.decode import decode_copy_rows, frame_copy
from headwater.names import quote_ident
from headwater.pipeline_file.pipeline import Pipeline
from headwater.schema import Column, Leaf, TableSchema
from headwater.source.catalog.where_sql import row_filter, selected
from headwater.source.connection import Connection, connect, errors_named

SAMPLED_PAGES: Final = 256
SAMPLED_ROWS: Final = 10_000
_LOCK_SECONDS: Final = 10.0
# It is gone, or has another name; or only single columns may be read, and xmin is none of them.
_CANNOT_TELL = (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege)

Found = Callable[[pa.Table, pa.Schema], tuple[npt.NDArray[np.bool_], Iterable[tuple[Int64, pa.Table]]]]
"""Under which keys (a table of the key's columns) the lake has a row, and the columns asked for of these rows, in
parts: the numbers of their keys, and the rows."""


def refuse_other_values(pipeline: Pipeline, record: TableRecord, widened: Collection[Column], found: Found) -> None:
    """SchemaChanged when the columns `widened` hold other values at the source than in the lake, which stands behind
    the change. KeepsChanging while somebody has locked the table."""
    schema = record.schema
    names = [*schema.key, *(column.name for column in widened if column.name not in schema.key)]
    if not schema.key or not widened:
        return
    session = connect(pipeline.conninfo(), application_name="headwater columns", lock_timeout=_LOCK_SECONDS)
    with contextlib.closing(session) as connection:
        for leaf in schema.leaves:
            try:
                rows = _rewritten_rows(connection, leaf, schema, names, {column.name for column in widened})
            except Transient as failed:
                if failed.code != "lock_timeout":
                    raise
                raise KeepsChanging(failed.message, where=record.name, remedy=failed.remedy) from failed
            other = _first_other(schema, rows, names, found) if rows.num_rows else None
            if other is not None:
                what = f"column {quote_ident(other)} has a wider type"
                raise changed(record, f"{what}, and USING made other values of those that it had")


def _first_other(schema: TableSchema, rows: pa.Table, names: list[str], found: Found) -> str | None:
    keys = list(schema.key)
    there, parts = found(rows.select(keys), rows.schema)
    if not there.all():
        return keys[0]  # nobody has changed these rows, so they are under other keys there
    for numbers, stored in parts:
        ours = rows.take(pa.array(numbers))
        for name in names:
            if not _are_same(ours[name], stored[name]):
                return name
    return None


def _are_same(here: pa.ChunkedArray, there: pa.ChunkedArray) -> bool:
    same = pc.or_(pc.fill_null(pc.equal(here, there), False), pc.and_(pc.is_null(here), pc.is_null(there)))
    if pa.types.is_floating(here.type):
        same = pc.or_(same, pc.fill_null(pc.and_(pc.is_nan(here), pc.is_nan(there)), False))
    return bool(pc.all(same).as_py())


def _rewritten_rows(
    connection: Connection, leaf: Leaf, schema: TableSchema, names: list[str], widened: set[str]
) -> pa.Table:
    """Some rows of the leaf that the change of types has written and nobody since; none where that cannot be told (any
    more)."""
    columns = [schema.column(name) for name in names]
    kind = pa.schema([lake_schema(schema).field(name) for name in names])
    table = sql.Identifier(leaf.schema, leaf.name)
    leaves = max(1, len(schema.leaves))
    with errors_named("source"), contextlib.suppress(*_CANNOT_TELL), connection.transaction():
        connection.execute(sql.SQL("select from only {} where false").format(table))  # from here on nobody alters it
        origins = _origins(connection, leaf, columns, widened)
        if not origins:
            return kind.empty_table()
        share = connection.execute(
            "select least(100, 100.0 * %s * current_setting('block_size')::int / greatest(pg_relation_size(%s), 1))",
            [max(4, SAMPLED_PAGES // leaves), leaf.relation_id],
        ).fetchone()
        assert share is not None
        written = sql.SQL("xmin = any({}::xid[])").format(sql.Literal([str(xid) for xid in origins]))
        statement = sql.SQL(
            "copy (select {} from only {} tablesample system ({}) where {} limit {}) to stdout (format binary)"
        ).format(
            sql.SQL(", ").join(map(selected, columns)),
            table,
            sql.Literal(float(share[0])),
            sql.SQL(" and ").join([written, *row_filter(schema)]),
            sql.Literal(max(200, SAMPLED_ROWS // leaves)),
        )
        with connection.cursor().copy(statement) as copy:
            buffer, starts = frame_copy(bytes(message) for message in copy)
        decoded = decode_copy_rows(buffer, starts, columns)
        if decoded.bad:  # what the lake holds in their place is decided elsewhere
            return kind.empty_table()
        return as_stored(pa.RecordBatch.from_arrays([decoded.columns[name] for name in names], names=names), kind)
    return kind.empty_table()


def _origins(connection: Connection, leaf: Leaf, columns: list[Column], widened: set[str]) -> set[int]:
    """The transactions that gave the leaf's columns the types which they have; empty where these are others by now.

    Their ids do not tell which of them the lake holds: a savepoint has one of its own that the log never names, and who
    began later may have committed earlier. One that the lake lacks has altered the column once more."""
    rows = connection.execute(
        "select attname::text, atttypid::bigint, atttypmod, xmin::text::bigint from pg_catalog.pg_attribute "
        "where attrelid = %s and attname = any(%s) and not attisdropped",
        [leaf.relation_id, [column.name for column in columns]],
    ).fetchall()
    types = {name: (type_oid, typmod) for name, type_oid, typmod, _ in rows}
    if any(types.get(column.name) != (column.type_oid, column.typmod) for column in columns):
        return set()
    return {xid for name, _, _, xid in rows if name in widened}
