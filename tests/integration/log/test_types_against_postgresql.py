"""Every supported type, edge values included, by COPY and by the log, against the server's own text of it."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from fixtures.postgres import Database
from fixtures.type_values import BAD, GOOD, ONLY_TEXT, PREPARE, PREPARE_ONLY_TEXT
from headwater.log.values.decode import DecodedTuples, decode_copy_rows, decode_tuples, frame_copy
from headwater.schema import SERVER_TEXT, Column, ValueType
from headwater.source.catalog.pg_types import read_types
from headwater.source.catalog.types import PgType, value_type

pytestmark = pytest.mark.postgres

Connection = psycopg.Connection[tuple[Any, ...]]

SETTINGS = (
    "set datestyle = 'ISO'; set intervalstyle = 'postgres'; set timezone = 'UTC'; set extra_float_digits = 1; "
    "set bytea_output = 'hex'; set lc_monetary = 'C'; set client_encoding = 'UTF8'"
)


def _resolve(connection: Connection, oid: int, typmod: int) -> PgType:
    return replace(read_types(connection, [oid])[oid], typmod=typmod)


def _table(connection: Connection, types: dict[str, list[str]]) -> list[PgType]:
    """A table `everything` with a column c0, c1, ... for each type, its values first, NULLs at the end."""
    connection.execute("create table everything (id int, " + _joined(types, lambda at, kind: f"c{at} {kind}") + ")")
    for row in range(max(map(len, types.values())) + 1):
        values = [items[row] if row < len(items) else None for items in types.values()]
        places = _joined(types, lambda at, kind: f"%s::text::{kind}")
        connection.execute(f"insert into everything values ({row}, {places})", values)
    found = connection.execute(
        "select atttypid, atttypmod from pg_attribute where attrelid = 'everything'::regclass and attnum > 1 "
        "order by attnum"
    ).fetchall()
    return [_resolve(connection, oid, typmod) for oid, typmod in found]


def _joined(types: dict[str, list[str]], item: Callable[[int, str], str]) -> str:
    return ", ".join(item(at, kind) for at, kind in enumerate(types))


def _columns(values: list[ValueType], on_bad_value: str = "suspend") -> list[Column | None]:
    return [
        None,
        *(Column(f"c{at}", at + 2, 0, -1, value, on_bad_value=on_bad_value) for at, value in enumerate(values)),
    ]


def _by_copy(connection: Connection, columns: list[Column | None]) -> DecodedTuples:
    with connection.cursor().copy("copy (select * from everything order by id) to stdout (format binary)") as copy:
        buffer, starts = frame_copy(copy)
    decoded = decode_copy_rows(buffer, starts, columns)
    assert decoded.ends.tolist() == [*starts.tolist()[1:], len(buffer)]
    return decoded


def _server_texts(connection: Connection, at: int) -> list[str | None]:
    statement = f"select case when c{at}::text is not null then format('%s', c{at}) end from everything order by id"
    return [text for (text,) in connection.execute(statement).fetchall()]


def _connect(database: Database) -> Connection:
    connection = database.connect()
    connection.execute(SETTINGS)
    for statement in PREPARE:
        connection.execute(statement)
    return connection


def _types(connection: Connection) -> dict[str, list[str]]:
    """The values that this server knows."""
    types = {kind: list(items) for kind, items in GOOD.items()}
    if connection.info.server_version >= 170000:
        types["interval"] += ["infinity", "-infinity"]
    try:
        connection.execute("select '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        del types["xml"]  # the embedded server is built without; Debian's has it
    if connection.info.server_version >= 160000:
        types['"char"'] += ["\\377"]
    return types


def test_every_value_asked_for_as_a_string_is_the_servers_own_text(database: Database) -> None:
    with _connect(database) as connection:
        types = _types(connection)
        for kind, items in BAD.items():
            types[kind] = [*types.get(kind, []), *items]
        columns = _columns([value_type(pg, "string") for pg in _table(connection, types)])
        decoded = _by_copy(connection, columns)
        assert decoded.bad == []
        for at, kind in enumerate(types):
            assert (kind, decoded.columns[f"c{at}"].to_pylist()) == (kind, _server_texts(connection, at))
            decoded.columns[f"c{at}"].validate(full=True)


def _parsed(lake: str, text: str | None) -> Any:
    if text is None:
        return None
    if lake == "boolean":
        return text == "t"
    if lake in ("smallint", "int", "bigint"):
        return int(text)
    if lake == "float":
        return struct.pack("!f", float(text))
    if lake == "double":
        return struct.pack("!d", float(text))
    if lake.startswith("decimal("):
        return Decimal(text)
    if lake == "date":
        return date.fromisoformat(text)
    if lake.startswith("timestamp"):
        return datetime.fromisoformat(text)
    if lake == "binary":
        return bytes.fromhex(text[2:])
    return text


def _comparable(lake: str, value: Any) -> Any:
    if value is not None and lake in ("float", "double"):
        return struct.pack("!f" if lake == "float" else "!d", value)
    return value


def test_every_value_in_the_type_of_the_lake_equals_the_servers(database: Database) -> None:
    with _connect(database) as connection:
        types = _types(connection)
        values = [value_type(pg) for pg in _table(connection, types)]
        decoded = _by_copy(connection, _columns(values))
        assert decoded.bad == []
        for at, (kind, value) in enumerate(zip(types, values, strict=True)):
            array = decoded.columns[f"c{at}"]
            array.validate(full=True)
            if value.lake.startswith("array<"):
                assert value.element is not None
                lake = value.element.lake
                found: list[Any] = [
                    None if items is None else [_comparable(lake, item) for item in items]
                    for items in array.to_pylist()
                ]
                server: list[Any] = [
                    None if items is None else [_parsed(lake, item) for item in items]
                    for (items,) in connection.execute(
                        f"select case when c{at} is not null then array("
                        "select case when e is not null then format('%s', e) end "
                        f"from unnest(c{at}) with ordinality as u(e, n) order by n) end from everything order by id"
                    ).fetchall()
                ]
            else:
                found = [_comparable(value.lake, item) for item in array.to_pylist()]
                server = [_parsed(value.lake, text) for text in _server_texts(connection, at)]
            assert (kind, found) == (kind, server)


def test_values_that_the_lake_cannot_hold_are_reported_or_null_as_the_column_says(database: Database) -> None:
    with _connect(database) as connection:
        types = _table(connection, BAD)
        suspending = _by_copy(connection, _columns([value_type(pg) for pg in types]))
        expected = [(f"c{at}", row) for at, items in enumerate(BAD.values()) for row in range(len(items))]
        assert sorted(suspending.bad) == sorted(expected)
        accepting = _by_copy(connection, _columns([value_type(pg) for pg in types], "null"))
        assert accepting.bad == []
        for decoded in (suspending, accepting):
            for array in decoded.columns.values():
                array.validate(full=True)
                assert array.null_count == len(array)
        texts = _by_copy(connection, _columns([value_type(pg, None, "string") for pg in types], "string"))
        assert texts.bad == []
        for at in range(len(BAD)):
            assert texts.columns[f"c{at}"].to_pylist() == _server_texts(connection, at)


@pytest.mark.parametrize("binary", ["true", "false"])
@pytest.mark.parametrize("override", [None, "string"])
def test_the_log_and_the_load_give_the_same_arrays(database: Database, override: str | None, binary: str) -> None:
    with _connect(database) as connection, database.superuser() as superuser:
        types = _types(connection)
        for kind, items in BAD.items():
            types[kind] = [*types.get(kind, []), *items]
        superuser.execute(SETTINGS)
        connection.execute("create publication everything")  # older than all that is decoded: 15 insists
        superuser.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (database.name,))
        resolved = _table(connection, types)
        connection.execute("alter publication everything add table everything")
        connection.execute("create table again as select * from everything; truncate everything")
        connection.execute("insert into everything select * from again order by id")
        changes = superuser.execute(
            "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1', "
            "'publication_names', 'everything', 'binary', %s)",
            (database.name, binary),
        ).fetchall()
        tuples = [message[6:] for (message,) in changes if message[:1] == b"I"]
        buffer = np.frombuffer(b"".join(tuples), dtype=np.uint8)
        starts = np.cumsum([0, *map(len, tuples)], dtype=np.int64)
        columns = _columns([value_type(pg, override) for pg in resolved])
        by_log = decode_tuples(buffer, starts[:-1], columns)
        assert by_log.ends.tolist() == starts[1:].tolist()
        by_copy = _by_copy(connection, columns)
        assert by_log.rows == by_copy.rows == max(map(len, types.values())) + 1
        assert by_log.bad == by_copy.bad
        assert bool(by_log.bad) == (override is None)
        for name, array in by_copy.columns.items():
            assert (name, _bits(by_log.columns[name])) == (name, _bits(array))


def _bits(array: pa.Array) -> str:
    """Tells -0 from 0 and takes NaN as equal to NaN, which comparing arrays would not."""
    return repr(array.to_pylist())


@pytest.mark.parametrize(("kind", "code", "size"), [("float4", "!i", 32), ("float8", "!q", 64)])
def test_random_floats_have_the_servers_shortest_text(database: Database, kind: str, code: str, size: int) -> None:
    generator = random.Random(size)
    form = "!f" if size == 32 else "!d"
    patterns = [generator.getrandbits(size) - (1 << size - 1) for _ in range(3000)]
    numbers = [struct.unpack(form, struct.pack(code, pattern))[0] for pattern in patterns]
    lowest, highest = (-149, 127) if size == 32 else (-1074, 1023)
    numbers += [2.0**exponent for exponent in range(lowest, highest + 1)]
    numbers += [float(10**exponent) for exponent in range(38)] + [float(generator.randrange(10**9)) for _ in range(300)]
    with _connect(database) as connection:
        connection.execute(f"create table everything (id int, c0 {kind})")
        connection.execute(
            "insert into everything select n, v from unnest(%b::float8[]) with ordinality as u(v, n)", (numbers,)
        )
        decoded = _by_copy(connection, _columns([ValueType(kind, "string")]))
        assert decoded.columns["c0"].to_pylist() == _server_texts(connection, 0)


def test_random_numerics_have_the_servers_text_and_the_exact_decimal(database: Database) -> None:
    generator = random.Random(7)
    texts = []
    for _ in range(4000):
        digits = "".join(generator.choice("0000123456789") for _ in range(generator.randint(1, 29)))
        fraction = "".join(generator.choice("0000123456789") for _ in range(generator.randint(0, 9)))
        texts.append(f"{generator.choice(['', '-'])}{digits}{'.' if fraction else ''}{fraction}")
    with _connect(database) as connection:
        connection.execute("create table everything (id int, c0 numeric, c1 numeric(38,9))")
        connection.execute(
            "insert into everything select n, v::numeric, v::numeric "
            "from unnest(%s::text[]) with ordinality as u(v, n)",
            (texts,),
        )
        columns = _columns([ValueType("numeric", "string"), ValueType("numeric", "decimal(38,9)", 38, 9)])
        decoded = _by_copy(connection, columns)
        assert decoded.columns["c0"].to_pylist() == _server_texts(connection, 0)
        assert decoded.columns["c1"].to_pylist() == [Decimal(text) for text in texts]
        assert decoded.bad == []


def test_a_type_whose_binary_form_is_not_known_is_the_servers_own_text(database: Database) -> None:
    with _connect(database) as connection:
        for statement in PREPARE_ONLY_TEXT:
            connection.execute(statement)
        values = [value_type(pg) for pg in _table(connection, ONLY_TEXT)]
        assert {(value.wire, value.lake) for value in values} == {(SERVER_TEXT, "string")}
