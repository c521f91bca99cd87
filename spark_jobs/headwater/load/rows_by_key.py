"""Rows of the source by their keys, under a snapshot: the second look of `verify` at single keys.

The same short transactions, lock, rewrite check and decoders as a load's units, with a list of keys in place of a
page range, and with the id of the transaction that wrote each row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import LiteralString, cast

import psycopg
import pyarrow as pa
from psycopg import sql

from headwater.arrow_types import lake_schema
from headwater.load.units import BYTES_PER_BATCH, Unit, UnitReader
from headwater.log.values.decode import frame_copy
from headwater.schema import Column, ValueType
from headwater.source.catalog.where_sql import row_filter, selected
from headwater.source.connection import Connection, connect

ORIGIN = "_hw_origin"
_ORIGIN = Column(ORIGIN, 0, 0, -1, ValueType("int8", "bigint"))

Key = tuple[str | None, ...]
"""A key's values as PostgreSQL reads them; of an array the JSON of its elements' texts."""


@dataclass(frozen=True, repr=False)
class KeyReader(UnitReader):
    """`read` gives the rows under keys that the source takes for equal to `keys`, whatever their text: the schema's
    columns, and `_hw_origin` last. Errors as of a load's units."""

    keys: Sequence[Key] = ()
    as_text: bool = False

    def rows(self) -> pa.Table:
        """All that `read` gives."""
        kind = lake_schema(self.schema).append(pa.field(ORIGIN, pa.int64()))
        return pa.concat_tables([kind.empty_table(), *(pa.Table.from_batches([b]).cast(kind) for b in self.read())])

    def read(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._read_leaves()
        except (psycopg.errors.DataError, psycopg.errors.IntegrityError):
            # The lake holds a key that the column's type cannot: compared as text it simply finds no row. Or one that
            # its domain would refuse by now: a constraint that is not valid lets older rows be.
            yield from replace(self, as_text=True)._read_leaves()

    def _read_leaves(self) -> Iterator[pa.RecordBatch]:
        with (
            contextlib.closing(connect(self.conninfo, application_name="headwater verify")) as reading,
            contextlib.closing(connect(self.conninfo, application_name="headwater verify")) as looking,
        ):
            for leaf in self.schema.leaves:
                yield from self._read(reading, looking, Unit(leaf.relation_id, leaf.schema, leaf.name, 0, None))

    def _bounds(self) -> dict[str, float]:
        """One statement for a leaf, however large that is, and a scan of it where the keys are compared as text."""
        return {name: seconds for name, seconds in super()._bounds().items() if name != "statement_timeout"}

    def _copy(self, connection: Connection, unit: Unit) -> Iterator[pa.RecordBatch]:
        columns = sql.SQL(", ").join(map(selected, self.schema.columns))
        statement = sql.SQL("copy (select {}, xmin::text::bigint from only {} where {}) to stdout (format binary)")
        table = sql.Identifier(unit.schema, unit.name)
        messages: list[bytes] = []
        size = 0
        with connection.cursor().copy(statement.format(columns, table, self._condition(connection, unit))) as copy:
            for message in copy:
                messages.append(bytes(message))
                size += len(message)
                if size >= BYTES_PER_BATCH:
                    yield from self._batch(messages, unit)
                    messages, size = [], 0
        yield from self._batch(messages, unit)

    def _condition(self, connection: Connection, unit: Unit) -> sql.Composed:
        """Membership in the list of keys, each value given as text and read as the column's own type; `as_text`: where
        the lake has no text, as the type below its domains, which takes every value."""
        types = _type_names(connection, unit.relation_id, below_domains=self.as_text)
        columns: list[sql.Composable] = []
        values: list[sql.Composable] = []
        arrays: list[sql.Composable] = []
        for index, name in enumerate(self.schema.key):
            given, column, kind = sql.Identifier(f"k{index}"), sql.Identifier(name), self.schema.column(name).value.lake
            if self.as_text and kind == "string":
                columns.append(sql.SQL("format('%s', {})").format(column))
                values.append(given)
            else:
                columns.append(sql.SQL("{}::{}").format(column, types[name]) if self.as_text else column)
                values.append(sql.SQL("{}::{}").format(_read(kind, given), types[name]))
            arrays.append(sql.SQL("{}::text[]").format(sql.Literal([key[index] for key in self.keys])))
        comma = sql.SQL(", ").join
        given_names = comma([sql.Identifier(f"k{index}") for index in range(len(arrays))])
        wanted = sql.SQL("({}) in (select {} from unnest({}) as keys ({}))").format(
            comma(columns), comma(values), comma(arrays), given_names
        )
        return sql.SQL(" and ").join([wanted, *row_filter(self.schema)])

    def _batch(self, messages: list[bytes], unit: Unit) -> Iterator[pa.RecordBatch]:
        buffer, starts = frame_copy(messages)
        if len(starts):
            yield self._checked(buffer, starts, unit, (_ORIGIN,))


def _read(kind: str, given: sql.Identifier) -> sql.Composable:
    """A key's text; of an array it is JSON, whose elements are texts."""
    elements = sql.SQL("array(select pg_catalog.json_array_elements_text({}::json))")
    return elements.format(given) if kind.startswith("array<") else given


def _type_names(connection: Connection, relation_id: int, *, below_domains: bool) -> dict[str, sql.SQL]:
    """How SQL writes the type of each column."""
    rows = connection.execute(
        """
        with recursive typed (name, type, modifier, depth) as (
            select attname::text, atttypid, atttypmod, 0 from pg_attribute
             where attrelid = %s and attnum > 0 and not attisdropped
            union all
            select name, typbasetype, typtypmod, depth + 1 from typed join pg_type on pg_type.oid = type
             where %s and typtype = 'd'
        )
        select name, format_type(type, modifier) from typed order by depth
        """,
        [relation_id, below_domains],
    ).fetchall()
    return {name: sql.SQL(cast(LiteralString, text)) for name, text in rows}
