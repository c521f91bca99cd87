"""Unchanged large values and old tuples, from a real server into the lake: within a batch, over batches, in parts.

The server leaves a large value that an UPDATE does not touch out of the log (TOAST). Each case is a short history of
rows; all of them are run in one transaction, with a replicate behind every step, and in one transaction so large that
it is sent while it is open, goes to disk and is netted in parts. While replicate runs the tables are locked: nothing is
read at the source after the load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import pytest

from fixtures.jobs import Rows, catch_up, lake_rows, load_tables, source_rows, states_of
from fixtures.log_of import Change, source_of
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.log.net import net_effect as net_effect_module
from headwater.log.net.on_disk import PartsOnDisk
from headwater.net_changes import NetChanges
from headwater.pipeline_file.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_STORAGE: Final = "alter table {t} alter big set storage external, alter wide set storage external"
_ROW: Final = "n int, big text, wide text"
TABLES: Final = {
    "plain": [f"create table plain (id int primary key, {_ROW})"],
    "moving": [f"create table moving (id int primary key, {_ROW})"],
    "complete": [f"create table complete (id int primary key, {_ROW})", "alter table complete replica identity full"],
    "indexed": [
        f"create table indexed (id int not null, pk int primary key, {_ROW})",
        "create unique index indexed_id on indexed (id)",
        "alter table indexed replica identity using index indexed_id",
    ],
    "pair": [f"create table pair (id int, half int, {_ROW}, primary key (id, half))"],
    "leaves": [
        f"create table leaves (id int, k int, {_ROW}, primary key (id, k)) partition by list (k)",
        "create table leaves_1 partition of leaves for values in (1)",
        "create table leaves_2 partition of leaves for values in (2)",
    ],
    "inserted": [f"create table inserted (id int, {_ROW})", "alter table inserted replica identity nothing"],
    "long_key": [
        "create table long_key (id int, name text primary key, n int, big text, wide text)",
        "alter table long_key alter name set storage external",
    ],
    "long_half": [
        "create table long_half (id int, name text, n int, big text, wide text, primary key (id, name))",
        "alter table long_half alter name set storage external",
    ],
}
INSERT_ONLY: Final = "inserted"
FILLER: Final = "filler"
FILL: Final = "insert into filler select g, repeat('x', 1000000) from generate_series(1, 80) g"
"""More than the reader holds of open transactions (64 MiB)."""
PART_CHANGES: Final = 4


@dataclass(frozen=True)
class Case:
    """`{a}`, `{b}`, `{c}`: ids of its own; `{A}`, `{B}`: large values; `{t}`: the table."""

    table: str
    stored: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)


INSERT: Final = "insert into {t} (id, n, big, wide) values ({a}, 1, {A}, {B})"
KEEP: Final = "update {t} set n = n + 1 where id = {a}"
TO_B: Final = "update {t} set id = {b}, n = 7 where id = {a}"
BIG: Final = "update {t} set big = {A} || 'new' where id = {a}"
WIDE: Final = "update {t} set wide = {B} || 'new' where id = {a}"
DELETE: Final = "delete from {t} where id = {a}"

CASES: Final[dict[str, Case]] = {
    "an update keeps the stored value": Case("plain", [INSERT], [KEEP]),
    "an insert and updates that keep its values": Case("plain", [], [INSERT, KEEP, KEEP]),
    "each update changes one value and keeps the other": Case("plain", [INSERT], [BIG, WIDE, KEEP]),
    "NULL is not unchanged": Case("plain", [INSERT], ["update {t} set big = null where id = {a}", KEEP, WIDE]),
    "unchanged is not NULL": Case(
        "plain", ["insert into {t} (id, n) values ({a}, 1)"], [KEEP, "update {t} set big = {A} where id = {a}", KEEP]
    ),
    "the same key again, without large values": Case(
        "plain", [INSERT], [DELETE, "insert into {t} (id, n) values ({a}, 9)", KEEP]
    ),
    "the same key again, and an update that keeps its new values": Case(
        "plain", [INSERT], [DELETE, "insert into {t} (id, n, big) values ({a}, 9, {B})", KEEP]
    ),
    "kept, then deleted": Case("plain", [INSERT], [KEEP, DELETE]),
    "inserted, kept, then deleted": Case("plain", [], [INSERT, KEEP, DELETE]),
    "a change in a subtransaction that was rolled back": Case(
        "plain",
        [INSERT],
        [
            KEEP,
            "do $$ begin update {t} set big = 'x' where id = {a}; raise 'x'; exception when others then null; end $$",
            KEEP,
        ],
    ),
    "insert, one value, the other, key change": Case("moving", [], [INSERT, BIG, WIDE, TO_B]),
    "one value, the other, key change": Case("moving", [INSERT], [BIG, WIDE, TO_B]),
    "a key change of a stored row keeps its values": Case("moving", [INSERT], [TO_B]),
    "a key change, then updates that keep": Case(
        "moving", [INSERT], [TO_B, "update {t} set n = 8 where id = {b}", "update {t} set wide = 'w' where id = {b}"]
    ),
    "a key change and back": Case("moving", [INSERT], [TO_B, "update {t} set id = {a} where id = {b}", KEEP]),
    "two key changes": Case("moving", [INSERT], [KEEP, TO_B, "update {t} set id = {c} where id = {b}"]),
    "keys swapped through a third one": Case(
        "moving",
        [INSERT, "insert into {t} (id, n, big, wide) values ({b}, 2, {B}, {A})"],
        [
            "update {t} set id = {c} where id = {a}",
            "update {t} set id = {a} where id = {b}",
            "update {t} set id = {b} where id = {c}",
        ],
    ),
    "a key left by a key change and taken by another row": Case(
        "moving", [INSERT], [TO_B, "insert into {t} (id, n, big) values ({a}, 3, 'small')", KEEP]
    ),
    "a row moves to the key of a deleted one": Case(
        "moving",
        [INSERT, "insert into {t} (id, n, big, wide) values ({b}, 2, {B}, {A})"],
        ["delete from {t} where id = {b}", TO_B, "update {t} set n = 5 where id = {b}"],
    ),
    "a key change and a delete": Case("moving", [INSERT], [TO_B, "delete from {t} where id = {b}"]),
    "identity FULL, an update keeps the stored value": Case("complete", [INSERT], [KEEP, BIG, KEEP]),
    "identity FULL, insert, one value, key change": Case("complete", [], [INSERT, WIDE, TO_B]),
    "identity FULL, a key change of a stored row": Case("complete", [INSERT], [TO_B]),
    "identity FULL, the same key again": Case("complete", [INSERT], [DELETE, INSERT, KEEP]),
    "identity USING INDEX, an update keeps the stored value": Case(
        "indexed", ["insert into {t} values ({a}, {a}, 1, {A}, {B})"], [KEEP, BIG]
    ),
    "identity USING INDEX, its key changes": Case(
        "indexed", ["insert into {t} values ({a}, {a}, 1, {A}, {B})"], [TO_B, "update {t} set n = 3 where id = {b}"]
    ),
    "identity USING INDEX, only the primary key changes": Case(
        "indexed", ["insert into {t} values ({a}, {a}, 1, {A}, {B})"], ["update {t} set pk = {b} where id = {a}"]
    ),
    "identity USING INDEX, the same key again": Case(
        "indexed",
        ["insert into {t} values ({a}, {a}, 1, {A}, {B})"],
        [DELETE, "insert into {t} values ({a}, {b}, 1, {B})"],
    ),
    "identity NOTHING, inserts only": Case("inserted", [INSERT], [INSERT, INSERT]),
    "half of a key changes": Case(
        "pair",
        ["insert into {t} values ({a}, 1, 1, {A}, {B})"],
        ["update {t} set half = 2 where id = {a}", KEEP, "update {t} set id = {b} where id = {a}"],
    ),
    "a row moves to another leaf": Case(
        "leaves",
        ["insert into {t} values ({a}, 1, 1, {A}, {B})"],
        [KEEP, "update {t} set k = 2 where id = {a}", KEEP, "update {t} set id = {b} where id = {a}"],
    ),
    "a key that is large itself stays": Case(
        "long_key", ["insert into {t} values ({a}, {K}, 1, {A}, {B})"], [KEEP, WIDE, KEEP]
    ),
    "a key that is large itself, inserted and kept": Case(
        "long_key", [], ["insert into {t} values ({a}, {K}, 1, {A}, {B})", KEEP, WIDE]
    ),
    "a key that is large itself changes": Case(
        "long_key",
        ["insert into {t} values ({a}, {K}, 1, {A}, {B})"],
        ["update {t} set name = name || 'x' where id = {a}", KEEP],
    ),
    "a key that is large itself is deleted": Case(
        "long_key", ["insert into {t} values ({a}, {K}, 1, {A}, {B})"], [KEEP, DELETE]
    ),
    "a large half of a key stays and the other changes": Case(
        "long_half",
        ["insert into {t} values ({a}, {K}, 1, {A}, {B})"],
        [KEEP, TO_B, "update {t} set n = 9 where id = {b}"],
    ),
    "a large half of a key stays, inserted and moved": Case(
        "long_half", [], ["insert into {t} values ({a}, {K}, 1, {A}, {B})", TO_B, WIDE.replace("{a}", "{b}")]
    ),
    "a row with a large key loses its other values": Case(
        "long_key",
        ["insert into {t} values ({a}, {K}, 1, {A}, {B})"],
        ["update {t} set big = null where id = {a}", KEEP],
    ),
}
MODES: Final = ("one transaction", "a batch for each step", "a transaction in progress, in parts")
STEPS: Final = max(len(case.steps) for case in CASES.values())


def ids_of(mode: str, name: str) -> dict[str, int]:
    first = MODES.index(mode) * 100_000 + list(CASES).index(name) * 100
    return {"a": first + 1, "b": first + 2, "c": first + 3}


def filled(statement: str, mode: str, name: str) -> str:
    ids = ids_of(mode, name)
    large = {
        "A": f"repeat('A{ids['a']} ', 900)",
        "B": f"repeat('B{ids['a']} ', 800)",
        "K": f"repeat('{ids['a']}', 430)",
    }
    return statement.replace("$$", "$body$").format(t=CASES[name].table, **ids, **large)


def step(mode: str, number: int) -> list[str]:
    """The statements of all cases that stand at place `number`."""
    return [filled(case.steps[number], mode, name) for name, case in CASES.items() if number < len(case.steps)]


@dataclass
class Run:
    """What source and lake held after each replicate of a mode, by table; and what was netted in parts."""

    pipeline: Pipeline
    seen: dict[str, list[dict[str, tuple[Rows, Rows]]]]
    parts: int


@pytest.fixture(scope="module")
def run(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Run:
    database = shared_database
    for name, statements in TABLES.items():
        database.execute(*statements)
        if name != "leaves":
            database.execute(_STORAGE.format(t=name))
    database.execute(
        *(_STORAGE.format(t=leaf) for leaf in ("leaves_1", "leaves_2")),
        "create table filler (id int primary key, note text)",
        *(filled(sql, mode, name) for mode in MODES for name, case in CASES.items() for sql in case.stored),
    )
    entries: list[str | dict[str, Any]] = [
        {"name": f"public.{name}", "insert_only": name == INSERT_ONLY} for name in (*TABLES, FILLER)
    ]
    made = Run(write_pipeline(tmp_path_factory.mktemp("toast"), database, *entries), {mode: [] for mode in MODES}, 0)
    load_tables(made.pipeline)

    def replicate(mode: str) -> None:
        with database.connect(autocommit=False) as nobody_reads:
            nobody_reads.execute(f"lock table {', '.join(TABLES)} in access exclusive mode")
            states = states_of(catch_up(made.pipeline))
        assert set(states.values()) == {"active"}, states
        made.seen[mode].append({name: _both(database, made.pipeline, name) for name in TABLES})

    one, each, large = MODES
    with database.connect(autocommit=False) as writer:
        for number in range(STEPS):
            for statement in step(one, number):
                writer.execute(statement)
        writer.commit()
    replicate(one)
    for number in range(STEPS):
        database.execute(*step(each, number))
        replicate(each)
    with database.connect(autocommit=False) as writer:
        for number in range(STEPS):
            for statement in step(large, number):
                writer.execute(statement)
            if number == 1:
                writer.execute(FILL)
        writer.commit()
    with _counted_parts(made):
        replicate(large)
    return made


def _both(database: Database, pipeline: Pipeline, name: str) -> tuple[Rows, Rows]:
    columns, expected = source_rows(database, name)
    return expected, lake_rows(pipeline, f"public.{name}", columns)


@contextlib.contextmanager
def _counted_parts(run: Run) -> Iterator[None]:
    """Netting in parts of few changes; their number goes to `run`."""

    add = PartsOnDisk.add

    def counted(parts: PartsOnDisk, net: NetChanges) -> None:
        run.parts += "wide" in net.rows.column_names
        add(parts, net)

    with (
        patch.object(net_effect_module, "PART_CHANGES", PART_CHANGES),
        patch.object(PartsOnDisk, "add", counted),
    ):
        yield


def _rows_of(rows: Rows, mode: str, name: str) -> Rows:
    ids = set(ids_of(mode, name).values())
    return [row for row in rows if row[0] in ids]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_every_value_is_the_sources(run: Run, name: str, mode: str) -> None:
    table = CASES[name].table
    for seen in run.seen[mode]:
        source, lake = (_rows_of(rows, mode, name) for rows in seen[table])
        assert lake == source
    if "delete" not in name:
        assert any(len(str(value)) > 2000 for row in source for value in row) or "without" in name


def test_the_large_transaction_was_netted_in_parts(run: Run) -> None:
    assert run.parts > 6


def test_what_the_server_leaves_out_and_which_old_tuples_it_sends(database: Database) -> None:
    """The premise of all cases above: where the log has a value and where it has none."""
    names = ("plain", "complete", "indexed")
    database.execute(*(statement for name in names for statement in (*TABLES[name], _STORAGE.format(t=name))))
    large, other = "a" * 5000, "b" * 5000
    with source_of(database, *names) as source:
        for name in ("plain", "complete"):
            database.execute(
                f"insert into {name} values (1, 1, '{large}', null)",
                f"update {name} set n = 2",
                f"update {name} set big = '{other}'",
                f"update {name} set id = 3",
                f"delete from {name}",
            )
        database.execute(
            f"insert into indexed values (1, 10, 1, '{large}')",
            "update indexed set id = 2",
            "update indexed set pk = 11",
        )
        found = [change for transaction in source.committed() for change in transaction.changes]

    def row(id: int, n: int | None, *big: str | None) -> dict[str, Any]:
        return {"id": id, "n": n, **({"big": big[0]} if big else {}), "wide": None}

    assert [change for change in found if change.table == "plain"] == [
        Change("I", "plain", row(1, 1, large), None),
        Change("U", "plain", row(1, 2), None),
        Change("U", "plain", row(1, 2, other), None),
        Change("U", "plain", row(3, 2), row(1, None, None)),
        Change("D", "plain", None, row(3, None, None)),
    ]
    assert [change for change in found if change.table == "complete"] == [
        Change("I", "complete", row(1, 1, large), None),
        Change("U", "complete", row(1, 2), row(1, 1, large)),
        Change("U", "complete", row(1, 2, other), row(1, 2, large)),
        Change("U", "complete", row(3, 2), row(1, 2, other)),
        Change("D", "complete", None, row(3, 2, other)),
    ]
    assert [change for change in found if change.table == "indexed"] == [
        Change("I", "indexed", {"pk": 10, **row(1, 1, large)}, None),
        Change("U", "indexed", {"pk": 10, **row(2, 1)}, {"pk": None, **row(1, None, None)}),
        Change("U", "indexed", {"pk": 11, **row(2, 1)}, None),
    ]
