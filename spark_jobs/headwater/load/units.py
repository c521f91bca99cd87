"""The units of a load: ranges of a relation, read by Spark tasks as COPY BINARY under one exported snapshot.

The rows are decoded by the same code as the log's tuples, because COPY BINARY and pgoutput both carry what the
type's send function writes: a value cannot differ between load and log. Runs inside Python workers; a unit is one short
transaction that holds ACCESS SHARE for its own time only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
from psycopg import sql

from headwater.errors import BadValue, HeadwaterError, TableError
from headwater.lake.executors import LakeAccess
from headwater.log.hiding import hide_columns
from headwater.log.values.decode import decode_copy_rows, mark_lost_in_partitions
from headwater.names import yaml_key
from headwater.predicate import Predicate
from headwater.schema import PARTITION_COLUMN, Column, Leaf, TableSchema
from headwater.source.catalog.catalog import Signature, signature
from headwater.source.catalog.where_sql import condition, row_filter, selected
from headwater.source.connection import Connection, connect
from headwater.source.reading_now import Tally

ROWS_PER_BATCH = 10_000
BYTES_PER_BATCH = 32 << 20
"""Of a batch as it came: with what is made of it it takes four times as much memory."""
LOCK_SECONDS = 30.0
UNIT_SECONDS = 1800.0
"""A unit is read in a second or two; one that hangs holds up whoever wants to alter the table no longer than this."""
PAGES_PER_UNIT = 4096
BYTES_PER_PLAIN_UNIT = PAGES_PER_UNIT * 8192
BYTES_PER_UNIT = 256 << 20
"""With what lies beside the pages (TOAST)."""
_BOUNDS = {
    "lock_timeout": LOCK_SECONDS,
    "statement_timeout": UNIT_SECONDS,
    # Whoever takes the rows may hang, too: between two statements, or in the middle of one, where the server waits in
    # a write that no other bound ends.
    "idle_in_transaction_session_timeout": UNIT_SECONDS,
    "tcp_user_timeout": UNIT_SECONDS,
}
_NO_SNAPSHOT = (
    psycopg.errors.InvalidParameterValue,
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.UndefinedObject,
)
_UNTRANSLATABLE = (
    psycopg.errors.UntranslatableCharacter,
    psycopg.errors.CharacterNotInRepertoire,  # of a SQL_ASCII database: the bytes are not UTF-8
)
_SNAPSHOT_TOO_OLD = "72000"  # up to 16, by old_snapshot_threshold
_VALUES = ("22", "2F", "38", "39", "P0")
"""Classes of SQLSTATE: an expression, as of the row filter, or a type's own function has failed over a value."""
_STORAGE = ("54", "58P01", "XX")
"""What is stored is damaged, is missing, or is more than the server can send."""
_HEADER = 11 + 4
CHANGED = "HEADWATER_TABLE_CHANGED"
BAD_VALUE = "HEADWATER_BAD_VALUE"
_GONE = f"{CHANGED}: the relation is gone or has another name"


@dataclass(frozen=True, slots=True)
class Unit:
    """Pages `first` to `end` (exclusive; None: to the end, however long the relation has become) of one leaf."""

    relation_id: int
    schema: str
    name: str
    first: int
    end: int | None


class TableChanged(Exception):
    """It cannot be read on at this capture point, but it may be at another one: the relation is not what the capture
    point saw (its rows may be invisible to the old snapshot), it is locked, or the snapshot is gone."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a relation is: its own pages, and bytes with what lies beside them (TOAST)."""

    pages: int
    bytes: int


class UnfitValue(Exception):
    """A value that the lake's type cannot hold; where, the text says."""


def cut_units(leaf: Leaf, extent: Extent, first: int = 0, end: int | None = None) -> list[Unit]:
    """Units of at most `PAGES_PER_UNIT` pages over the pages `first` to `end` of `leaf`, of fewer where much lies
    beside them: a unit is a short transaction. Where there is no `end` the last one has none."""
    beside = extent.bytes / extent.pages if extent.pages else 0.0
    step = max(1, min(PAGES_PER_UNIT, int(BYTES_PER_UNIT / beside) if beside else PAGES_PER_UNIT))
    last = end if end is not None else max(extent.pages, first + 1)
    bounds: list[int | None] = [*range(first, last, step), end]
    return [Unit(leaf.relation_id, leaf.schema, leaf.name, begin or 0, end) for begin, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Two at the source, for one reader: it reads in one, and looks at the catalog and tells how far it is in the
    other."""

    reading: Connection
    looking: Connection
    tally: Tally


@dataclass(frozen=True)
class UnitReader:
    """What a Spark task needs to read units; travels pickled, never as text.

    `writes_to`: the lake that the task writes to; None: it writes nothing there.
    `where`: the rows that are read; None: all. `hash_key`: see `headwater.columns.hidden.key_of`.
    """

    conninfo: str
    snapshot_id: str
    schema: TableSchema
    signatures: dict[int, Signature]
    writes_to: LakeAccess | None = None
    where: Predicate | None = None
    hash_key: bytes = b""

    def __repr__(self) -> str:  # the connection string holds a password
        return f"UnitReader({self.schema.schema}.{self.schema.name})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For `mapInArrow`: record batches of unit descriptions in, rows of the table out."""
        if self.writes_to is not None:
            self.writes_to.enter()
        return self.rows_of(Unit(**json.loads(text)) for batch in batches for text in batch.column(0).to_pylist())

    def rows_of(self, units: Iterable[Unit]) -> Generator[pa.RecordBatch, None, None]:
        """The rows of the units, in batches of at most ROWS_PER_BATCH. TableChanged, UnfitValue, or what the server
        says."""
        with self.sessions() as sessions:
            yield from self.rows_by(sessions, units)

    @contextlib.contextmanager
    def sessions(self) -> Iterator[Sessions]:
        """What reading takes, as long as the block lasts."""
        with (
            contextlib.closing(connect(self.conninfo, application_name="headwater load unit")) as reading,
            contextlib.closing(connect(self.conninfo, application_name="headwater load look")) as looking,
        ):
            yield Sessions(reading, looking, Tally(looking, self.snapshot_id))

    def rows_by(self, sessions: Sessions, units: Iterable[Unit]) -> Iterator[pa.RecordBatch]:
        """`rows_of`, by sessions that are there."""
        for unit in units:
            for rows in self._read(sessions.reading, sessions.looking, unit):
                sessions.tally.read(rows.num_rows, rows.nbytes)
                yield rows
            sessions.tally.unit_done()

    @contextlib.contextmanager
    def at_snapshot(self, reading: Connection, looking: Connection, unit: Unit) -> Iterator[None]:
        """A transaction under the snapshot that holds the unit's relation as it was at the capture point, or
        TableChanged. UnfitValue where the server itself cannot read what the relation holds: nothing else is lost
        with it."""
        try:
            with reading.transaction():
                self._begin(reading, unit)
                # With the lock held no DDL is under way: what the catalog shows now holds for the whole unit.
                now = signature(looking, [unit.relation_id]).get(unit.relation_id)
                if now != self.signatures[unit.relation_id]:
                    raise TableChanged(f"{CHANGED}: it was rewritten, truncated or altered after the capture point")
                yield
        except psycopg.errors.LockNotAvailable as error:
            raise TableChanged(f"{CHANGED}: it was locked for {LOCK_SECONDS:g} s") from error
        except (psycopg.errors.QueryCanceled, psycopg.errors.IdleInTransactionSessionTimeout) as error:
            raise TableChanged(
                f"{CHANGED}: reading a part of it was cancelled, or took longer than {UNIT_SECONDS:g} s"
            ) from error
        except _UNTRANSLATABLE as error:
            raise UnfitValue(f"{BAD_VALUE}: {json.dumps({'column': None, 'key': ''})}") from error
        except psycopg.Error as error:
            if error.sqlstate == _SNAPSHOT_TOO_OLD:
                raise TableChanged(f"{CHANGED}: the server has given its snapshot up") from error
            why = _unreadable(error)
            if not why:
                raise
            raise UnfitValue(f"{BAD_VALUE}: {json.dumps({'column': None, 'key': '', 'unreadable': why})}") from error

    def _read(self, reading: Connection, looking: Connection, unit: Unit) -> Iterator[pa.RecordBatch]:
        with self.at_snapshot(reading, looking, unit):
            yield from self._copy(reading, unit)

    def _begin(self, reading: Connection, unit: Unit) -> None:
        reading.execute("set transaction isolation level repeatable read, read only")
        try:
            reading.execute(sql.SQL("set transaction snapshot {}").format(sql.Literal(self.snapshot_id)))
        except _NO_SNAPSHOT as error:
            raise TableChanged(
                f"{CHANGED}: its snapshot is gone: it was held for load.max_snapshot_age, or its session was ended"
            ) from error
        for name, seconds in self._bounds().items():
            bound = sql.Literal(f"{round(seconds * 1000)}ms")
            reading.execute(sql.SQL("set local {} = {}").format(sql.Identifier(name), bound))
        table = sql.Identifier(unit.schema, unit.name)
        try:
            # The same lock as LOCK TABLE, which a right on single columns is not enough for.
            reading.execute(sql.SQL("select from only {} where false").format(table))
            # With the lock held a name stays what it is: another relation may have taken it since.
            named = reading.execute("select pg_catalog.to_regclass(%s)::oid", [table.as_string()]).fetchone()
        except psycopg.errors.UndefinedTable as error:
            raise TableChanged(_GONE) from error
        if named is None or named[0] != unit.relation_id:
            raise TableChanged(_GONE)

    def _bounds(self) -> dict[str, float]:
        """Settings of the server for a unit's transaction, in seconds."""
        return _BOUNDS

    def _copy(self, connection: Connection, unit: Unit) -> Iterator[pa.RecordBatch]:
        columns = sql.SQL(", ").join(map(selected, self.schema.columns))
        bounds: list[sql.Composable] = [condition(self.where)] if self.where is not None else []
        # A unit of the whole relation leaves the way to the planner.
        if unit.first or unit.end is not None or self.where is None:
            bounds += within(unit)
        bounds += row_filter(self.schema)
        statement = sql.SQL("copy (select {} from only {} where {}) to stdout (format binary)").format(
            columns, sql.Identifier(unit.schema, unit.name), sql.SQL(" and ").join(bounds)
        )
        rows: list[bytes] = []
        size = 0
        with connection.cursor().copy(statement) as copy:
            first = True
            for data in copy:
                row = bytes(data)
                if first:
                    row, first = _without_header(row), False
                if len(row) > 2:
                    rows.append(row)
                    size += len(row)
                if len(rows) == ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
                    yield self._decoded(rows, unit)
                    rows, size = [], 0
        if rows:
            yield self._decoded(rows, unit)

    def _decoded(self, rows: list[bytes], unit: Unit) -> pa.RecordBatch:
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        buffer = np.frombuffer(b"".join(rows), dtype=np.uint8)
        return self._checked(buffer, np.cumsum(lengths) - lengths, unit)

    def _checked(
        self,
        buffer: npt.NDArray[np.uint8],
        starts: npt.NDArray[np.int64],
        unit: Unit,
        beside: tuple[Column, ...] = (),
    ) -> pa.RecordBatch:
        """The rows that begin at `starts`, as the lake holds them; `beside`: columns that were copied behind the
        table's own, and come last. UnfitValue for what the lake cannot hold."""
        decoded = decode_copy_rows(buffer, starts, [*self.schema.columns, *beside])
        hide_columns(self.schema.columns, self.hash_key, decoded)
        mark_lost_in_partitions(self.schema, decoded)
        if decoded.bad:
            name, row = decoded.bad[0]
            keys = ", ".join(f"{key} = {decoded.columns[key][row]}" for key in self.schema.key)
            raise UnfitValue(f"{BAD_VALUE}: {json.dumps({'column': name, 'key': keys})}")
        arrays = [decoded.columns[column.name] for column in self.schema.columns]
        if self.schema.partitioned:
            arrays.append(pa.array(np.full(decoded.rows, unit.relation_id, dtype=np.int64)))
        arrays += [decoded.columns[column.name] for column in beside]
        return pa.RecordBatch.from_arrays(arrays, names=[*row_names(self.schema), *(c.name for c in beside)])


def within(unit: Unit) -> list[sql.Composed]:
    """The condition for the pages of the unit."""
    bounds = [sql.SQL("ctid >= {}").format(sql.Literal(f"({unit.first},0)"))]
    if unit.end is not None:
        bounds.append(sql.SQL("ctid < {}").format(sql.Literal(f"({unit.end},0)")))
    return bounds


def row_names(schema: TableSchema) -> list[str]:
    return [column.name for column in schema.columns] + ([PARTITION_COLUMN] if schema.partitioned else [])


def describe(unit: Unit) -> str:
    return json.dumps(asdict(unit))


def why_changed(text: str) -> str:
    """The reason in a Spark exception's text with CHANGED in it."""
    return text.split(CHANGED + ": ", 1)[1].splitlines()[0]


def _unreadable(error: psycopg.Error) -> str:
    """Why the server cannot read a relation's rows, which no other relation has to do with; empty: it is something
    else. What it says of a value may quote it, so that then only the condition's name is told."""
    state = error.sqlstate or ""
    if state.startswith(_STORAGE):
        return f"{error.diag.message_primary} (SQLSTATE {state})"
    return f"{type(error).__name__} (SQLSTATE {state})" if state.startswith(_VALUES) else ""


def bad_value(text: str, table: str, schema: TableSchema) -> TableError:
    """The error that a Spark exception's text with BAD_VALUE in it tells of."""
    found = json.loads(text.split(BAD_VALUE + ": ", 1)[1].splitlines()[0])
    if "unreadable" in found:
        where = f"; its row filter is {schema.where}" if schema.where else ""
        return TableError(
            f"the source cannot read its rows: {found['unreadable']}{where}",
            code="unreadable",
            where=table,
            remedy=f"put it right at the source, then headwater load PIPELINE.yaml --table {table} --again",
        )
    if found["column"] is None:
        return BadValue(
            "it holds a text that is not UTF-8, or has a character that UTF-8 does not have: the server cannot send it",
            where=table,
            remedy=f"put the text right at the source, then headwater load PIPELINE.yaml --table {table} --again",
        )
    column = schema.column(found["column"])
    return BadValue(
        f"column {column.name} holds a value that the lake's type {column.value.lake} cannot hold ({found['key']})",
        where=table,
        remedy=f'set on_bad_value: {{{yaml_key(column.name)}: "null"}} (or string), then headwater load PIPELINE.yaml '
        f"--table {table} --again",
    )


def _without_header(message: bytes) -> bytes:
    """The first CopyData message carries the file header before its row (documentation of COPY, "Binary Format")."""
    if not message.startswith(b"PGCOPY\n\xff\r\n\0"):
        raise HeadwaterError("the server did not answer COPY in binary format", where="load")
    extension = int.from_bytes(message[_HEADER : _HEADER + 4], "big")
    return message[_HEADER + 4 + extension :]
