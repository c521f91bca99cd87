"""Rollbacks of every shape on a real server: what the log says in the end is what the tables hold.

A server that finds a large transaction rolled back before it has sent any of it stays silent about the transaction and
may still tell of its subtransactions (18), so each load is read twice: while it is written, and when all is over. The
programs are random: savepoints, released and rolled back, nested, with TRUNCATE and DDL inside. HEADWATER_SEED makes
one again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo as pg_conninfo

from fixtures.log_of import Committed, Row, Source, read_to, source_of, transactions
from fixtures.postgres import Database
from headwater.replicate.reader.handle import LogReader

pytestmark = pytest.mark.postgres

WORK_MEM = ("64kB", "4MB", "1GB")
"""Streamed as soon as can be; as ever; nothing is streamed at all."""
_TABLES = ("t", "u")
_Writer = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def source(database: Database) -> Iterator[Source]:
    for table in _TABLES:
        database.execute(f"create table {table} (id bigint primary key, note text)")
    with source_of(database, *_TABLES) as made:
        yield made


def reader_of(source: Source, work_mem: str) -> LogReader:
    conninfo = pg_conninfo.make_conninfo(source.database.conninfo, options=f"-c logical_decoding_work_mem={work_mem}")
    return LogReader(source.options(conninfo=conninfo))


def said(committed: list[Committed], oids: dict[int, str]) -> dict[str, dict[int, Row]]:
    """The tables, as the log makes them."""
    tables: dict[str, dict[int, Row]] = {table: {} for table in _TABLES}
    for transaction in committed:
        assert len(transaction.truncates) <= 1, "the order of truncates and changes is not kept here"
        for truncate in transaction.truncates:  # the programs truncate before they change anything
            for relation_id in truncate.relation_ids:
                tables[oids[relation_id]].clear()
        for change in transaction.changes:
            rows = tables[change.table]
            if change.operation == "I":
                assert change.new is not None
                assert change.new["id"] not in rows
            else:
                gone = change.old or change.new
                assert gone is not None
                del rows[gone["id"]]
            if change.new is not None:
                rows[change.new["id"]] = change.new
    return tables


def held(database: Database) -> dict[str, dict[int, Row]]:
    """The tables, as they are."""
    found = {}
    for table in _TABLES:
        rows = database.query(f"select to_jsonb(r) from {table} r")
        found[table] = {row["id"]: row for (row,) in rows}
    return found


def same(left: dict[str, dict[int, Row]], right: dict[str, dict[int, Row]]) -> bool:
    """A column that was added later is NULL in the rows of before."""

    def plain(tables: dict[str, dict[int, Row]]) -> dict[str, dict[int, Row]]:
        return {
            table: {key: {c: v for c, v in row.items() if v is not None} for key, row in rows.items()}
            for table, rows in tables.items()
        }

    return plain(left) == plain(right)


def check(source: Source, work_mem: str, program: Callable[[], None]) -> None:
    """`program` writes; a reader beside it and one after it say what the tables hold."""
    with reader_of(source, work_mem) as reader:
        program()
        beside = list(transactions(read_to(reader, source.position())))
    with reader_of(source, work_mem) as reader:
        after = list(transactions(read_to(reader, source.position())))
    oids = {oid: name for name, oid in source.database.query("select relname, oid::bigint from pg_class")}
    there = held(source.database)
    assert same(said(beside, oids), there)
    assert same(said(after, oids), there)


@pytest.mark.parametrize("work_mem", WORK_MEM)
def test_a_large_transaction_that_was_rolled_back_before_anybody_read_is_nothing_to_do(
    source: Source, work_mem: str
) -> None:
    with source.database.connect(autocommit=False) as writer:
        for _ in range(2):  # the second one finds what the first one left at the server
            writer.execute("savepoint a")
            writer.execute("insert into t select g, repeat('x', 100) from generate_series(1, 60000) g")
            writer.execute("savepoint b")
            writer.execute("insert into t select g, repeat('x', 100) from generate_series(60001, 120000) g")
            writer.rollback()
    source.database.execute("insert into t values (1, 'kept')")
    with reader_of(source, work_mem) as reader:
        found = [t for t in transactions(read_to(reader, source.position())) if t.changes]
    assert [[change.new for change in t.changes] for t in found] == [[{"id": 1, "note": "kept"}]]


class _Program:
    """Transactions at random, two of them open at a time, in two tables each of its own."""

    def __init__(self, source: Source, seed: str) -> None:
        self._source, self._random = source, random.Random(seed)
        self._next, self._added = 1, 0

    def run(self) -> None:
        for _ in range(6):
            with (
                self._source.database.connect(autocommit=False) as first,
                self._source.database.connect(autocommit=False) as second,
            ):
                moves = [self._transaction(first, "t"), self._transaction(second, "u")]
                while moves:
                    move = self._random.choice(moves)
                    if next(move, "over") == "over":
                        moves.remove(move)

    def _transaction(self, writer: _Writer, table: str) -> Iterator[None]:
        """Savepoints nested at random; yields where the other transaction may go on."""
        depth = 0
        if self._random.random() < 0.3:
            writer.execute(f"truncate {table}")
        for _ in range(self._random.randint(2, 7)):
            move = self._random.choice(["open", "open", "release", "back", "change", "change", "truncated", "column"])
            if move == "open":
                depth += 1
                writer.execute(f"savepoint s{depth}")
                self._change(writer, table)
            elif move == "release" and depth:
                writer.execute(f"release s{depth}")
                depth -= 1
            elif move == "back" and depth:
                back = self._random.randint(1, depth)
                writer.execute(f"rollback to s{back}")
                depth = back
            elif move == "truncated":  # is rolled back in any case: the order among changes is not what is asked here
                writer.execute("savepoint gone")
                writer.execute(f"truncate {table}")
                self._change(writer, table)
                writer.execute("rollback to gone")
            elif move == "column":
                self._added += 1
                writer.execute("savepoint c")
                writer.execute(f"alter table {table} add column c{self._added} int")
                self._change(writer, table, f"c{self._added}")
                writer.execute(self._random.choice(["rollback to c", "release c", "release c"]))
            else:
                self._change(writer, table)
            yield
        end = self._random.choice(["commit", "commit", "rollback", "prepared", "prepared and gone"])
        if end.startswith("prepared"):
            writer.execute(f"prepare transaction '{table}'")
            writer.commit()
            yield
            with self._source.database.connect() as other:
                other.execute(f"{'rollback' if end.endswith('gone') else 'commit'} prepared '{table}'")
        elif end == "commit":
            writer.commit()
        else:
            writer.rollback()

    def _change(self, writer: _Writer, table: str, column: str = "") -> None:
        rows = self._random.choice([1, 30, 4000, 12_000])
        first, self._next = self._next, self._next + rows
        also, value = (f", {column}", ", 7") if column else ("", "")
        writer.execute(
            f"insert into {table} (id, note{also})"
            f" select g, repeat('x', 400){value} from generate_series(%s::bigint, %s::bigint) g",
            [first, first + rows - 1],
        )
        if self._random.random() < 0.5:
            writer.execute(f"update {table} set note = 'changed' where id %% 7 = %s", [self._random.randrange(7)])
        if self._random.random() < 0.3:
            writer.execute(f"delete from {table} where id %% 11 = %s", [self._random.randrange(11)])


@pytest.mark.parametrize("work_mem", WORK_MEM)
def test_random_savepoints_leave_in_the_log_what_they_leave_in_the_tables(source: Source, work_mem: str) -> None:
    seed = os.environ.get("HEADWATER_SEED", f"1 {work_mem}")
    print(f"HEADWATER_SEED={seed!r}")
    check(source, work_mem, _Program(source, seed).run)
