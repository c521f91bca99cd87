"""What makes two keys the same: the lake's value everywhere, never coarser than PostgreSQL, and as the log tells it."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from fixtures.jobs import catch_up, lake_rows, states_of
from fixtures.loaded import loaded_pipeline
from fixtures.postgres import Database
from headwater.arrow_types import key_schema
from headwater.delta.index.codes import encode
from headwater.delta.tables import struct_type
from headwater.log.net.codes import key_codes
from headwater.log.net.hash_parts import _hash
from headwater.log.values.decode import decode_copy_rows, frame_copy
from headwater.schema import Column, TableSchema
from headwater.source.catalog.pg_types import read_types
from headwater.source.catalog.types import value_type
from headwater.source.catalog.where_sql import selected

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

Connection = psycopg.Connection[tuple[Any, ...]]

COLLATION = "create collation same (provider = icu, locale = 'und-u-ks-level1', deterministic = false)"
PREPARE = (
    "create type mood as enum ('sad', 'Sad')",
    "create type pair as (a int, b numeric)",
    "create domain amount as numeric",
    "set timezone = 'UTC'; set lc_monetary = 'C'; set extra_float_digits = 1; set bytea_output = 'hex'",
)
# Of each type: values that nearly are the same key, or are at the source.
VALUES: dict[str, list[str]] = {
    "bool": ["t", "f"],
    "int2": ["1", "-1"],
    "int4": ["1", "2"],
    "int8": ["1", "9223372036854775807"],
    "oid": ["1", "4294967295"],
    "float4": ["0", "-0", "NaN", "1.5"],
    "float8": ["0", "-0", "NaN", "Infinity"],
    "numeric": ["1.0", "1.00", "1", "0", "-0.0", "NaN", "Infinity"],
    "numeric(9,2)": ["1.0", "-0"],
    "amount": ["1.0", "1.00"],
    "text": ["a", "A", "a ", "\u00e4", "a\u0308"],
    "text collate same": ["a", "A", "\u00e4", "b"],
    "varchar(9)": ["a", "a "],
    "char(4)": ["a", "a ", "A"],
    "bpchar": ["a", "a ", "b"],
    "name": ["a", "A"],
    '"char"': ["a", "A"],
    "bytea": ["\\x00", "\\x0000", "\\x"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "00000000-0000-0000-0000-000000000000"],
    "date": ["2024-02-29", "2024-03-01"],
    "timestamp": ["2024-02-29 12:00", "2024-02-29 12:00:00.000001"],
    "timestamptz": ["2024-02-29 12:00+00", "2024-02-29 13:00+00"],
    "time": ["00:00", "24:00"],
    "timetz": ["12:00+00", "13:00+01"],
    "interval": ["1 day", "24:00:00", "1 mon", "30 days", "0"],
    "jsonb": ["1.0", "1.00", '{"a": 1}', '{"a": 1.0}', '["a"]'],
    "inet": ["10.0.0.0/8", "10.0.0.0/32", "::ffff:1.2.3.4", "1.2.3.4"],
    "cidr": ["10.0.0.0/8", "10.0.0.0/16"],
    "macaddr": ["08:00:2b:01:02:03", "08:00:2b:01:02:04"],
    "money": ["1.0", "2"],
    "varbit": ["1", "10"],
    "bit(3)": ["100", "001"],
    "pg_lsn": ["0/0", "16/B374D848"],
    "xid8": ["1", "2"],
    "mood": ["sad", "Sad"],
    "int4range": ["[1,3)", "(1,3)", "empty"],
    "numrange": ["[1.0,2)", "[1.00,2.0)", "empty"],
    "nummultirange": ["{[1.0,2)}", "{[1.00,2)}"],
    "pair": ["(1,1.0)", "(1,1.00)", "(1,)"],
    "pair[]": ['{"(1,1.0)"}', '{"(1,1.00)"}'],
    "int4[]": ["{1,2}", "{1}", "{}", "{NULL}"],
    "text[]": ["{a}", "{A}", '{"NULL"}', "{NULL}"],
    "float8[]": ["{0}", "{-0}", "{NaN}"],
    "numeric[]": ["{1.0}", "{1.00}"],
    "interval[]": ['{"1 day"}', '{"24:00"}'],
}
FINER = {
    "numeric", "amount", "text collate same", "citext", "bpchar", "interval", "jsonb", "numrange", "nummultirange",
    "pair", "pair[]", "numeric[]", "interval[]",
}  # fmt: skip
"""Of these the source calls some keys equal that are two keys in the lake."""
NANS = {"float4": ">f4", "float8": ">f8"}


def rows_of(connection: Connection, database: Database) -> dict[str, list[str]]:
    """A table for each type; its rows, all of which the key would take one at a time."""
    for statement in PREPARE:
        connection.execute(statement)
    types = dict(VALUES)
    try:
        connection.execute(COLLATION)
    except psycopg.errors.FeatureNotSupported:
        del types["text collate same"]  # the embedded server is built without ICU; Debian's has it
    with database.superuser() as superuser:
        if superuser.execute("select 1 from pg_available_extensions where name = 'citext'").fetchall():
            superuser.execute("create extension citext")
            types["citext"] = ["a", "A", "b"]
    for at, (kind, values) in enumerate(types.items()):
        connection.execute(f"create table t{at} (id serial, k {kind})")
        place = f"%s::text::{kind.removesuffix(' collate same')}"
        connection.cursor().executemany(f"insert into t{at} (k) values ({place})", [(value,) for value in values])
        if kind in NANS:  # other bits of NaN, which no text gives
            bits = [struct.pack(NANS[kind].replace("f4", "f").replace("f8", "d"), -float("nan"))]
            connection.execute(f"insert into t{at} (k) values (%b)", [np.frombuffer(bits[0], NANS[kind])[0].item()])
    return types


def the_keys(connection: Connection, at: int) -> tuple[TableSchema, pa.Table]:
    """The column `k` as a load reads it."""
    (found,) = connection.execute(
        f"select atttypid, atttypmod from pg_attribute where attrelid = 't{at}'::regclass and attname = 'k'"
    ).fetchall()
    pg = replace(read_types(connection, [found[0]])[found[0]], typmod=found[1])
    column = Column("k", 2, found[0], found[1], value_type(pg))
    statement = sql.SQL("copy (select {} from {} order by id) to stdout (format binary)")
    with connection.cursor().copy(statement.format(selected(column), sql.Identifier(f"t{at}"))) as copy:
        buffer, starts = frame_copy(copy)
    schema = TableSchema(1, "public", f"t{at}", (column,), ("k",))
    decoded = decode_copy_rows(buffer, starts, [column])
    assert not decoded.bad
    return schema, pa.table([decoded.columns["k"]], schema=key_schema(schema))


def pairs(codes: list[Any]) -> list[list[bool]]:
    return [[one == other for other in codes] for one in codes]


def test_every_part_means_the_same_and_the_source_is_never_finer(database: Database, spark: SparkSession) -> None:
    with database.connect() as connection:
        types = rows_of(connection, database)
        read = [the_keys(connection, at) for at in range(len(types))]
        of_spark = in_spark(spark, read)
        for at, kind in enumerate(types):
            schema, keys = read[at]
            in_index = encode(schema, keys)
            second = in_index.second if in_index.second is not None else in_index.first
            expected = pairs(list(zip(in_index.first.tolist(), second.tolist(), strict=True)))
            assert pairs(key_codes(keys, keys.slice(0, 0))[0].tolist()) == expected, kind
            assert pairs(_hash(keys, 3).tolist()) == expected, kind
            assert of_spark[at] == expected, kind
            found = connection.execute(f"select a.k = b.k from t{at} a, t{at} b order by a.id, b.id").fetchall()
            at_source: npt.NDArray[np.bool_] = np.array(found).reshape(len(expected), -1)
            assert at_source[np.array(expected)].all(), f"{kind}: the lake has one key for two of the source"
            assert (kind in FINER) == bool((at_source != np.array(expected)).any()), kind


def in_spark(spark: SparkSession, read: list[tuple[TableSchema, pa.Table]]) -> list[list[list[bool]]]:
    """Per table which of its keys are the same: as MERGE joins, and as `verify` joins, groups, and makes cells."""
    rows = max(keys.num_rows for _, keys in read)
    kind, columns = StructType().add("n", "long"), [pa.array(range(rows), pa.int64())]
    for at, (schema, keys) in enumerate(read):
        kind = kind.add(f"k{at}", struct_type(schema)["k"].dataType)
        columns.append(pa.concat_arrays([*keys["k"].chunks, pa.nulls(rows - keys.num_rows, keys["k"].type)]))
    frame = spark.createDataFrame(pa.table(columns, names=kind.names), schema=kind).coalesce(1).cache()
    ways = ["a.{0} = b.{0}", "a.{0} <=> b.{0}", "xxhash64(a.{0}) = xxhash64(b.{0})"]
    asked = [f"{way.format(f'k{at}')} as w{number}_{at}" for number, way in enumerate(ways) for at in range(len(read))]
    pairs = frame.alias("a").crossJoin(frame.alias("b")).orderBy("a.n", "b.n").selectExpr(*asked).toArrow()
    result = []
    for at, (schema, keys) in enumerate(read):
        count = keys.num_rows
        equal, joined, cell = (
            np.array(pairs[f"w{number}_{at}"].to_pylist()).reshape(rows, rows)[:count, :count] for number in range(3)
        )
        assert (equal == joined).all()
        assert cell[equal.astype(bool)].all()  # but not the other way round: a NULL in an array is hashed as nothing
        if schema.columns[0].value.lake in ("float", "double", "array<double>"):
            groups = frame.where(f"k{at} is not null").groupBy(f"k{at}").count().count()
            assert groups == len({tuple(row) for row in equal.tolist()})
        result.append([[bool(one) for one in row] for row in equal.tolist()])
    frame.unpersist()
    return result


def test_an_update_to_an_equal_key_that_differs_carries_the_old_one(database: Database) -> None:
    """The premise: the lake may go by the value, since the log says of which row it speaks."""
    with database.connect() as connection, database.superuser() as superuser:
        types = rows_of(connection, database)
        differing = []
        for at, kind in enumerate(types):
            texts = [
                text for (text,) in connection.execute(f"select format('%s', k) from t{at} order by id").fetchall()
            ]
            equal = connection.execute(
                f"select a.id, b.id from t{at} a, t{at} b where a.k = b.k "
                """and format('%s', a.k) collate "C" <> format('%s', b.k) collate "C" order by 1, 2"""
            ).fetchall()
            if equal:
                differing.append((at, kind, *equal[0], texts))
        assert {kind for _, kind, *_ in differing} == FINER & types.keys() | {"float4", "float8", "float8[]"}
        for at, _, one, _, _ in differing:
            connection.execute(f"create table u{at} (k {list(types)[at]} primary key)")
            connection.execute(f"insert into u{at} select k from t{at} where id = {one}")
        superuser.execute("select pg_create_logical_replication_slot('keys', 'test_decoding', true)")
        for at, _, _, other, _ in differing:
            changed = connection.execute(f"update u{at} set k = (select k from t{at} where id = {other})")
            assert changed.rowcount == 1
        changes = superuser.execute("select data from pg_logical_slot_get_changes('keys', null, null)").fetchall()
        told = [data for (data,) in changes if data.startswith("table public.u")]
        assert len(told) == len(differing)
        for line, (_, kind, *_) in zip(told, differing, strict=True):
            assert "UPDATE: old-key: k" in line, kind


TABLES = {
    "numerics": ("numeric", "format('%s', k)", ["1.0", "2.0", "3.0"], ["1.00", "2.000", "4"]),
    "blanks": ("bpchar", "format('%s', k)", ["a", "b", "c"], ["a  ", "b ", "d"]),
    "intervals": ("interval", "format('%s', k)", ["1 day", "2 days", "1 mon"], ["24:00:00", "48:00:00", "1 year"]),
    "floats": ("float8", "k", ["0", "NaN", "1"], ["-0", "NaN", "2"]),
    "arrays": ("int4[]", "k", ["{1,2}", "{}", "{3}"], ["{1}", "{NULL}", "{3,4}"]),
}
"""Table: type of the key, how its value is compared with the lake's, keys, and keys that take their place."""


def test_rows_are_followed_from_a_key_to_one_that_is_equal_at_the_source(database: Database, tmp_path: Path) -> None:
    database.allow_publishing()
    for name, (kind, _, keys, _) in TABLES.items():
        database.execute(
            f"create table {name} (k {kind} primary key, n int, big text)",
            f"alter table {name} alter big set storage external",
            *(f"insert into {name} values ('{key}', 0, repeat('{at}', 5000))" for at, key in enumerate(keys)),
        )
    pipeline = loaded_pipeline(tmp_path, database, *(f"public.{name}" for name in TABLES))
    for name, (_, _, keys, others) in TABLES.items():
        moves = zip(keys, others, strict=True)
        database.execute(
            *(f"update {name} set k = '{other}', n = n + 1 where k = '{key}'" for key, other in moves),
            f"update {name} set n = n + 10 where k = '{keys[0]}' or k = '{others[0]}'",
            f"delete from {name} where k = '{others[2]}'",
            f"insert into {name} values ('{keys[2]}', 7, 'new')",
        )
    assert set(states_of(catch_up(pipeline)).values()) == {"active"}
    for name, (_, shown, _, _) in TABLES.items():
        with database.connect() as connection:
            connection.execute("set intervalstyle = 'postgres'")
            expected = connection.execute(f"select {shown}, n, big from {name}").fetchall()
        found = lake_rows(pipeline, f"public.{name}", ["k", "n", "big"])
        assert list(map(repr, found)) == sorted(map(repr, expected)), name
