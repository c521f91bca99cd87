"""Tables follow the columns of their source while replication runs; what cannot be followed suspends that table alone.

Each case is a table of its own: what it is, and what happens to it behind its load, a transaction a line. All of it
waits in the log when the driver begins, so that the catalog has moved on from most of what the driver meets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

import headwater
from fixtures.jobs import (
    Job,
    Outcome,
    armed,
    assert_equal,
    catch_up,
    following,
    in_thread,
    lake_path_of,
    lake_rows,
    record_of,
    registry_of,
    until,
)
from fixtures.loaded import loaded_pipeline
from fixtures.postgres import Database
from headwater.columns import widened
from headwater.errors import Transient
from headwater.lake.cuts import HISTORY
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import table_path
from headwater.maintain.maintain import maintain
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reading.newest_views import newest_cut
from headwater.reload.reload import reload
from headwater.validate.validate import validate
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

PLAIN = "create table {} (id int primary key, n int, note text)"
ROWS = "insert into {} select i, i, 'note ' || i from generate_series(1, 40) i"
LARGE = "repeat(md5(i::text), 100) || i"


@dataclass(frozen=True)
class Case:
    happens: tuple[str, ...]
    table: tuple[str, ...] = (PLAIN, ROWS)
    entry: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    lake_only: tuple[str, ...] = ()
    """Columns that only the lake has afterwards."""


def _moved(name: str = "note") -> tuple[str, ...]:
    return (
        f"update {{}} set n = n + 100, {name} = 'moved' where id between 5 and 8",
        "update {} set id = id + 1000 where id = 9",
        "delete from {} where id = 10",
    )


FOLLOWED = {
    "added": Case(("alter table {} add more int", "update {} set more = id where id < 10", *_moved())),
    "defaulted": Case(
        (
            *_moved(),
            "alter table {} add flag boolean not null default true",
            "insert into {} values (500, 1, 'new', false), (501, 2, 'default', default)",
            *_moved(),
        )
    ),
    "of_many_types": Case(
        (
            "alter table {} add at timestamptz default '2024-02-29 12:00:00.123456+02', "
            "add d date default '0044-03-15'",
            "update {} set n = 0 where id = 1",
            "alter table {} add amount numeric(12, 3) default -12.345, add list int[] default '{{1,null,3}}', "
            "add who uuid default '00112233-4455-6677-8899-aabbccddeeff', "
            'add doc jsonb default \'{{"a": [1, "ä"]}}\', '
            "add shape box default '((1,1),(0,0))', "
            'add quoted text[] default \'{{"a,\\\\\\"b",NULL}}\', '
            "add raw bytea default '\\x00ff', add ratio double precision default 0.1, add kind text default ''",
            "update {} set n = 0 where id = 2",
            "alter table {} add wall timestamp default '2024-01-01 10:00', add t time default '23:59:59.999999'",
            "update {} set n = 0 where id = 3",
        )
    ),
    "emptied": Case(("truncate {}", "alter table {} add more int", "insert into {} values (500, 1, 'new', 7)")),
    "emptied_twice": Case(
        (
            "insert into {} values (400, 4, 'gone')",
            "truncate {}; insert into {} values (401, 4, 'gone'); truncate {}",
            "alter table {} add more float8 default random()",
            "insert into {} (id, n) values (500, 1), (501, 2)",
            "update {} set n = 5 where id = 500",
        )
    ),
    "dropped": Case(
        ("alter table {} drop note", "insert into {} values (500, 5)", *_moved("n")[1:]), lake_only=("note",)
    ),
    "dropped_and_added": Case(
        (
            "alter table {} drop n; alter table {} add m int",
            "insert into {} values (500, 'new', 5)",
            "alter table {} drop note; alter table {} add last bigint default 7",
            "update {} set last = 8 where id < 5",
        ),
        lake_only=("n", "note"),
    ),
    "renamed": Case(("alter table {} rename note to remark", *_moved("remark"))),
    "key_renamed": Case(
        ("delete from {} where id = 6", "alter table {} rename id to number", "update {} set n = 7 where number = 7")
    ),
    "swapped": Case(
        (
            "alter table {} rename n to x; alter table {} rename m to n; alter table {} rename x to m",
            "update {} set n = n + 5 where id < 10",
        ),
        table=(
            "create table {} (id int primary key, n int, m int)",
            "insert into {} select i, i, -i from generate_series(1, 20) i",
        ),
    ),
    "widened": Case(
        (
            "update {} set code = 'before' where id = 1",
            "alter table {} alter code type varchar(20), alter note type text",
            "update {} set code = 'longer than ten' where id = 2",
        ),
        table=(
            "create table {} (id int primary key, code varchar(10), note varchar(5))",
            "insert into {} select i, 'c' || i, 'n' from generate_series(1, 9) i",
        ),
    ),
    "networks": Case(
        (
            "update {} set a = '10.1.2.0/24', b = '10.1.2.3/8' where id = 1",
            "alter table {} add more int; alter table {} add c cidr default '1.2.3.4/32'",
            "insert into {} values (500, '10.0.0.1/32', '10.0.0.1/32', '{{10.0.0.1/32}}', 1, '10.0.0.0/8')",
        ),
        table=(
            "create table {} (id int primary key, a cidr, b inet, list cidr[])",
            "insert into {} values (1, '10.1.2.3/32', '10.1.2.3/32', '{{10.1.2.3/32,::/0}}'), (2, '::1', '::1', null)",
        ),
    ),
    "longer": Case(
        (
            "update {} set n = -1 where id = 1",
            "alter table {} alter id type bigint, alter n type bigint, alter ratio type double precision, "
            "alter amount type numeric(12, 3)",
            "update {} set n = 1::bigint << 40, amount = 123456789.125 where id < 4",
            "insert into {} values (1::bigint << 33, -(1::bigint << 62), 0.1, -0.001)",
            "delete from {} where id = 7",
            "update {} set id = id + (1::bigint << 40) where id = 8",
        ),
        table=(
            "create table {} (id int primary key, n smallint, ratio real, amount numeric(8, 2))",
            "insert into {} select i, i, i * 0.1, i * 1.25 from generate_series(1, 20) i",
        ),
    ),
    "wide_before": Case(
        (
            "update {} set n = -1 where id = 3",
            "alter table {} alter id type int, alter n type bigint, alter ratio type double precision, "
            "alter words type bigint",
            "update {} set n = 1::bigint << 40, words = -(1::bigint << 41), ratio = 0.1 where id < 3",
            "insert into {} values (100000, -(1::bigint << 62), 0.1, 7)",
            "delete from {} where id = 7",
            "alter table {} add more int default 5",
            "update {} set more = 6 where id = 8",
        ),
        table=(
            "create table {} (id smallint primary key, n int, ratio real, words smallint)",
            "insert into {} select i, i, i * 0.1, -i from generate_series(1, 20) i",
        ),
        entry={"types": {"id": "bigint", "n": "bigint", "ratio": "double", "words": "string"}},
    ),
    "recast": Case(
        (
            "update {} set n = n + 1 where id < 5",
            "alter table {} alter n type bigint using n::bigint",
            "update {} set n = n * 2 where id between 3 and 8",
            *_moved(),
        )
    ),
    "recast_at_once": Case(
        ("alter table {} alter id type bigint, alter n type bigint; update {} set n = 1 where id < 10", *_moved())
    ),
    "recast_in_a_savepoint": Case(
        (
            "begin; savepoint s; alter table {} alter n type bigint; update {} set n = n + 1 where id < 5; release s; "
            "update {} set n = -n where id between 3 and 8; insert into {} values (500, 1, 'new'); "
            "commit",
            "do $$ begin begin alter table {} alter id type bigint; exception when others then raise; end; "
            "insert into {} values (1::bigint << 40, 1, 'new'); end $$",
            *_moved(),
        )
    ),
    "recast_and_defaulted": Case(
        (
            "alter table {} alter n type bigint",
            "update {} set note = 'y' where id = 20",
            "alter table {} alter n set default 5; update {} set n = 5 where id < 10",
        )
    ),
    "migrated": Case(
        (
            "alter table {} add a int default 1",
            "update {} set n = 100 where id = 1",
            "alter table {} add b text default 'b'",
            "update {} set n = 200 where id = 2",
            "alter table {} drop note",
            "update {} set n = 300 where id = 3",
            "alter table {} rename n to m",
            "insert into {} values (600, 1, 2, 'own')",
        ),
        lake_only=("note",),
    ),
    "in_one_transaction": Case(
        (
            "insert into {} values (700, 1, 'before'); alter table {} add more int default 9; "
            "insert into {} values (701, 1, 'after', 10); update {} set n = -n where id in (1, 700, 701)",
        )
    ),
    "rolled_back": Case(
        (
            "do $$ begin alter table {} add gone int default 3; update {} set n = 0; raise exception 'no'; "
            "exception when raise_exception then null; end $$",
            *_moved(),
        )
    ),
    "toasted": Case(
        (
            "update {} set n = 1 where id < 5",
            "alter table {} rename large to huge; alter table {} add more int default 5",
            "update {} set n = 2 where id between 3 and 8",
            "update {} set id = id + 100 where id = 1",
        ),
        table=(
            "create table {} (id int primary key, n int, large text)",
            "alter table {} alter large set storage external",
            f"insert into {{}} select i, i, {LARGE} from generate_series(1, 10) i",
        ),
    ),
    "parted": Case(
        (
            "insert into {} values (3, 50, 'before')",
            "alter table {} add more int default 5; alter table {} rename note to remark",
            "create table {}_4 partition of {} for values in (4)",
            "insert into {} values (4, 1, 'newer', 7)",
            "insert into {} values (1, 60, 'after', 6)",
            "update {} set region = 2 where n = 7",
        ),
        table=(
            "create table {} (region int, n int, note text, primary key (region, n)) partition by list (region)",
            "create table {}_1 partition of {} for values in (1)",
            "create table {}_2 partition of {} for values in (2)",
            "create table {}_3 (note text, n int not null, region int not null)",
            "alter table {} attach partition {}_3 for values in (3)",
            "insert into {} select 1 + i % 3, i, 'note' from generate_series(1, 30) i",
        ),
    ),
    "by_columns": Case(
        (
            "alter table {} add more text default 'x'",
            "insert into {} values (100, 5, 'e', 'y')",
            "delete from {} where n = 2",
        ),
        table=(
            "create table {} (id int primary key, n int, note text)",
            "insert into {} select i, i % 3, 'n' from generate_series(1, 30) i",
        ),
        entry={"partition_by": ["n"]},
    ),
}

NOT_FOLLOWED = {
    "emptied_before": Case(
        (
            "truncate {}",
            "insert into {} values (400, 4, 'older')",
            "alter table {} add more float8 default random()",
            "insert into {} (id, n) values (500, 1)",
        ),
        reason="and the table was rewritten",
    ),
    "random": Case(("alter table {} add u uuid default gen_random_uuid()", *_moved()), reason="rewritten"),
    "narrower": Case(
        ("alter table {} alter n type smallint", *_moved()), reason="another type: int in the lake would be smallint"
    ),
    "to_inet": Case(
        ("alter table {} alter a type inet", "insert into {} values (500, '10.0.0.1/32')"),
        table=(
            "create table {} (id int primary key, a cidr)",
            "insert into {} values (1, '10.1.2.3/32'), (2, '10.0.0.0/8')",
        ),
        reason="a has another type",
    ),
    "to_inet_of_a_domain": Case(
        ("alter table {} alter a type inet", "insert into {} values (500, '10.0.0.1/32')"),
        table=(
            "create domain {}_network as cidr",
            "create table {} (id int primary key, a {}_network)",
            "insert into {} values (1, '10.1.2.3/32'), (2, '10.0.0.0/8')",
        ),
        reason="a has another type",
    ),
    "to_oid": Case(
        (
            "update {} set n = -1 where id = 3",
            "alter table {} alter n type oid",
            "insert into {} values (500, 1, 'new')",
        ),
        reason="another type: int in the lake would be bigint",
    ),
    "widened_and_added": Case(
        ("alter table {} alter n type bigint, add more int", *_moved()), reason="and the table was rewritten"
    ),
    "wider_by_using": Case(
        ("alter table {} alter n type bigint using n * 10", "update {} set note = 'x' where id = 1"),
        reason="column n has a wider type, and USING made other values",
    ),
    "wide_before_by_using": Case(
        ("alter table {} alter n type bigint using n * 10", "update {} set note = 'x' where id = 1"),
        entry={"types": {"n": "bigint"}},
        reason="column n has a wider type, and USING made other values",
    ),
    "text_before_by_using": Case(
        ("alter table {} alter n type bigint using n * 10", "update {} set note = 'x' where id = 1"),
        entry={"types": {"n": "string"}},
        reason="column n has a wider type, and USING made other values",
    ),
    "text_of_floats": Case(
        ("alter table {} alter ratio type double precision", "insert into {} values (500, 0.1)"),
        table=(
            "create table {} (id int primary key, ratio real)",
            "insert into {} select i, i * 0.1 from generate_series(1, 20) i",
        ),
        entry={"types": {"ratio": "string"}},
        reason="ratio has another type",
    ),
    "wider_by_using_in_a_savepoint": Case(
        (
            "begin; savepoint s; alter table {} alter n type bigint using n * 10; release s; "
            "insert into {} values (500, 1, 'x'); commit",
        ),
        reason="column n has a wider type, and USING made other values",
    ),
    "wider_by_using_in_a_block": Case(
        (
            "do $$ begin begin alter table {} alter n type bigint using n * 10; exception when others then raise; end; "
            "insert into {} values (500, 1, 'x'); end $$",
        ),
        reason="column n has a wider type, and USING made other values",
    ),
    "wider_by_using_here_and_there": Case(
        (
            "alter table {} alter n type bigint using case when id = 17 then null else n end; "
            "update {} set n = 0 where id < 10",
            *_moved(),
        ),
        reason="column n has a wider type, and USING made other values",
    ),
    "wider_key_by_using": Case(
        ("alter table {} alter id type bigint using id + 1000", "insert into {} values (5000, 1, 'x')"),
        reason="column id has a wider type, and USING made other values",
    ),
    "wider_parts_by_using": Case(
        ("alter table {} alter n type bigint using n - 1", "insert into {} values (1000, 1)"),
        table=(
            "create table {} (id int primary key, n int) partition by range (id)",
            "create table {}_a partition of {} for values from (0) to (10)",
            "create table {}_b partition of {} for values from (10) to (2000)",
            "insert into {} select i, i from generate_series(1, 40) i",
        ),
        reason="column n has a wider type, and USING made other values",
    ),
    "other_type": Case(
        ("alter table {} alter note type bytea using note::bytea", "update {} set n = 0"), reason="another type"
    ),
    "with_using": Case(
        ("alter table {} alter note type varchar(30) using 'x' || note", "update {} set n = 0"),
        reason="another type, and the table was rewritten",
    ),
    "again": Case(
        ("alter table {} drop note", "alter table {} add note text default 'again'", *_moved()),
        reason="was dropped and added again",
    ),
    "came_and_went": Case(
        ("alter table {} add a int", "alter table {} drop a", "alter table {} add b int", *_moved()),
        reason="added and dropped again",
    ),
    "over_again": Case(
        ("alter table {} add a int", *_moved(), "alter table {} rename a to b", "update {} set b = 1"),
        reason="changed once more before it could be followed",
    ),
    "places": Case(
        ("alter table {} rename n to x; alter table {} rename m to n; alter table {} rename x to m",),
        table=(
            "create table {} (id int primary key, n int, m int) partition by range (id)",
            "create table {}_1 partition of {} for values from (0) to (100)",
            "insert into {} select i, i, -i from generate_series(1, 9) i",
        ),
        reason="took the name of another one",
    ),
    "renamed_and_again": Case(
        (
            "alter table {} rename n to m",
            "update {} set m = 7 where id < 5",
            "alter table {} drop m; alter table {} add m int",
            "insert into {} values (500, 'new', 3)",
        ),
        table=(
            "create table {} (id int primary key, note text, n int)",
            "insert into {} select i, 'note ' || i, i from generate_series(1, 40) i",
        ),
        reason="m may be a new column, or n under another name",
    ),
    "other_order": Case(
        (
            "alter table {} drop n; alter table {} add n int",
            "insert into {} values (500, 'new', 42)",
            "alter table {} rename n to m",
        ),
        reason="dropped and added again, or changed places",
    ),
    "told_not_to": Case(
        ("alter table {} add a int", *_moved()),
        entry={"on_schema_change": "suspend"},
        reason="on_schema_change says suspend",
    ),
    "clustered": Case(
        ("alter table {} rename n to m", "update {} set note = 'x' where id = 5"),
        entry={"cluster_by": ["n"]},
        reason="cluster_by names n, which the table does not have",
    ),
    "without": Case(
        ("alter table {} drop n", "update {} set note = 'x' where id = 5"),
        entry={"cluster_by": ["n"]},
        reason="cluster_by names n, which the table does not have",
    ),
    "keyless_for_a_while": Case(
        (
            "alter table {} replica identity using index {}_n_key; delete from {} where id = 2; "
            "alter table {} replica identity default; alter table {} add more int; update {} set more = 7 where id = 3",
        ),
        table=("create table {} (id int primary key, n int not null unique, note text)", ROWS),
        entry={"on_divergence": "repair"},
        reason="replica identity does not carry the key",
    ),
    "odd": Case(('alter table {} add "a b" int', *_moved()), reason="needs column mapping"),
    "by_case": Case(('alter table {} add "NOTE" int', *_moved()), reason="differ only by case"),
}


def _all(cases: dict[str, Case], part: str, name: str) -> list[str]:
    return [
        statement.replace("{}", name).replace("{{", "{").replace("}}", "}") for statement in getattr(cases[name], part)
    ]


@pytest.fixture(scope="module")
def outcome(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    database, cases = shared_database, FOLLOWED | NOT_FOLLOWED
    database.allow_publishing()
    for name in cases:
        database.execute(*_all(cases, "table", name))
    entries = [{"name": f"public.{name}", **case.entry} for name, case in cases.items()]
    pipeline = loaded_pipeline(tmp_path_factory.mktemp("lake"), database, *entries)
    for name in cases:
        for statement in _all(cases, "happens", name):
            database.execute(statement)
    result = catch_up(pipeline)
    return Outcome(database, pipeline, result, dict(registry_of(pipeline).tables))


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_table_follows_its_source(outcome: Outcome, name: str) -> None:
    record = outcome.records[f"public.{name}"]
    assert (record.state, record.reason) == ("active", "")
    lake = {f.name for f in DeltaTable(lake_path_of(outcome.pipeline, f"public.{name}")).schema().fields}
    assert lake - {"_hw_partition"} == {c.name for c in record.schema.columns} | set(FOLLOWED[name].lake_only)


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_cannot_be_followed_suspends_the_table_with_the_reason(outcome: Outcome, name: str) -> None:
    record = outcome.records[f"public.{name}"]
    assert record.state == "suspended"
    assert NOT_FOLLOWED[name].reason in record.reason
    assert record.remedy.endswith(f"headwater load PIPELINE.yaml --table public.{name} --again")


def test_what_was_followed_is_the_source_value_by_value(outcome: Outcome) -> None:
    names = [TableName.parse(f"public.{name}") for name in FOLLOWED]
    found = verify(outcome.pipeline, names)
    assert {
        name: (one["missing"], one["extra"], one["different"], one["compared"]) for name, one in found["tables"].items()
    } == {str(name): (0, 0, 0, True) for name in names}


def test_every_reader_sees_the_same(outcome: Outcome, spark: SparkSession) -> None:
    for name in FOLLOWED:
        path = lake_path_of(outcome.pipeline, f"public.{name}")
        columns = [column.name for column in outcome.records[f"public.{name}"].schema.columns]
        by_spark = [
            repr(tuple(row.values()))
            for row in spark.read.format("delta").load(path).select(*columns).toArrow().to_pylist()
        ]
        assert sorted(by_spark) == [repr(row) for row in lake_rows(outcome.pipeline, f"public.{name}", columns)]


def test_the_registry_tells_which_columns_held_from_where_on(outcome: Outcome) -> None:
    schemas = outcome.records["public.migrated"].schemas
    assert [[column.name for column in schema.columns] for _, schema in schemas] == [
        ["id", "n", "note"],
        ["id", "n", "note", "a"],
        ["id", "n", "note", "a", "b"],
        ["id", "n", "a", "b"],
        ["id", "m", "a", "b"],
    ]
    positions = [lsn for lsn, _ in schemas]
    assert positions == sorted(set(positions))
    newest = read_epoch(outcome.pipeline.lake_path())
    assert newest is not None
    assert positions[-1] <= newest.position.lsn


def test_a_dropped_column_keeps_what_it_held_and_is_null_from_then_on(outcome: Outcome) -> None:
    notes: dict[int, str | None] = dict(lake_rows(outcome.pipeline, "public.dropped", ["id", "note"]))
    assert (notes[1], notes[500]) == ("note 1", None)
    outcome.database.execute(*(f"update dropped set n = {n} where id = 500" for n in range(3)))
    maintain(outcome.pipeline)  # whoever rearranges files keeps it
    catch_up(outcome.pipeline)
    assert dict(lake_rows(outcome.pipeline, "public.dropped", ["id", "note"])) == notes


@dataclass(frozen=True)
class Plain:
    database: Database
    pipeline: Pipeline

    def is_equal(self) -> bool:
        try:
            assert_equal(self.database, self.pipeline, "public.plain", "public.other")
        except Exception:  # a column that is not there yet, too
            return False
        return True


@pytest.fixture
def plain(database: Database, spark: SparkSession, tmp_path: Path) -> Plain:
    database.allow_publishing()
    for name in ("plain", "other"):
        database.execute(PLAIN.replace("{}", name), ROWS.replace("{}", name))
    pipeline = loaded_pipeline(tmp_path, database, "public.plain", "public.other")
    return Plain(database, pipeline)


def test_a_running_driver_follows_one_change_after_the_other(plain: Plain) -> None:
    changes = (
        "add more int default 7",
        "rename note to remark",
        "add last text",
        "drop n",
        "add n2 numeric(10, 2) default 1.5",
    )
    with following(plain.pipeline) as running:
        for number, change in enumerate(changes):
            plain.database.execute(f"alter table plain {change}", "update other set n = n + 1")
            plain.database.execute(f"insert into plain (id) values ({1000 + number})", "delete from plain where id = 1")
            until(lambda: plain.is_equal() or running.done(), f"the lake follows: {change}", 60)
    assert plain.is_equal()
    assert len(record_of(plain.pipeline, "public.plain").schemas) == 1 + len(changes)
    assert len(record_of(plain.pipeline, "public.other").schemas) == 1


def test_a_table_that_was_emptied_and_filled_again_follows_its_columns_also_while_no_driver_looks(
    plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    def filled(number: int) -> None:
        plain.database.execute("truncate plain", f"insert into plain (id) values ({number}), ({number + 1})")

    caplog.set_level("INFO")
    with following(plain.pipeline) as running:
        filled(100)
        until(lambda: "public.plain has new files" in caplog.text or running.done(), "the catalog was looked at")
        plain.database.execute("alter table plain add more int", "insert into plain values (200, 1, 'new', 2)")
        until(lambda: plain.is_equal() or running.done(), "the lake follows")
        filled(300)
        until(lambda: plain.is_equal() or running.done(), "the lake follows")
    plain.database.execute("alter table plain add last int", "insert into plain values (400, 1, 'new', 2, 3)")
    catch_up(plain.pipeline)
    assert plain.is_equal()
    assert record_of(plain.pipeline, "public.plain").state == "active"
    plain.database.execute("alter table plain add random float8 default random()", "insert into plain values (500)")
    catch_up(plain.pipeline)
    assert "and the table was rewritten" in record_of(plain.pipeline, "public.plain").reason


def test_a_virtual_column_that_comes_and_goes_is_no_trouble_for_one_that_comes_later(plain: Plain) -> None:
    """It was never replicated: no change from while it was there holds a value of it."""
    known = record_of(plain.pipeline, "public.plain").schema.last_attnum
    with following(plain.pipeline) as running:
        plain.database.execute("alter table plain add double int generated always as (n * 2) virtual")
        until(
            lambda: record_of(plain.pipeline, "public.plain").schema.last_attnum > known or running.done(), "it is seen"
        )
        plain.database.execute("alter table plain drop double", "update plain set n = 5 where id = 1")
    plain.database.execute("alter table plain add more int default 7", "insert into plain values (100, 1, 'new', 2)")
    catch_up(plain.pipeline)
    assert record_of(plain.pipeline, "public.plain").reason == ""
    assert plain.is_equal()


@pytest.mark.parametrize("failpoint", ["replicate.before_evolution", "replicate.after_evolution"])
def test_a_driver_that_dies_while_a_table_changes_is_followed_by_one_that_ends_it(
    plain: Plain, spark: SparkSession, failpoint: str
) -> None:
    before = DeltaTable(lake_path_of(plain.pipeline, "public.plain")).version()
    plain.database.execute(
        "update plain set n = n + 7 where id > 30",
        "alter table plain rename n to m; alter table plain rename note to n; alter table plain add more int default 3",
        "update plain set m = -m where id < 5",
    )
    with Job(plain.pipeline, "replicate", "--until", "now", failpoint=failpoint, spark=spark) as job:
        assert job.wait() == -9, job.log[-2000:]
    catch_up(plain.pipeline)
    assert plain.is_equal()
    commits = DeltaTable(lake_path_of(plain.pipeline, "public.plain")).history()
    operations = [commit["operation"] for commit in reversed(commits) if commit["version"] > before]
    assert operations[-2:] == ["CHANGE COLUMNS", "HEADWATER APPLY"]
    assert operations[:-2] in ([], ["HEADWATER APPLY"]), "what came before the change may be a batch of its own"
    assert len(record_of(plain.pipeline, "public.plain").schemas) == 2


@pytest.mark.parametrize("failpoint", ["replicate.after_evolution", "replicate.after_table_commit"])
def test_no_row_says_that_a_table_is_in_step_whose_wider_column_has_other_values(
    plain: Plain, spark: SparkSession, failpoint: str
) -> None:
    """Nor does one of the driver that comes after a crash in between."""
    plain.database.execute(
        "alter table plain alter n type bigint using n + 1", "insert into plain values (1000, 1, 'new')"
    )
    with Job(plain.pipeline, "replicate", "--until", "now", failpoint=failpoint, spark=spark) as job:
        assert job.wait() == -9, job.log[-2000:]
    wide = DeltaTable(lake_path_of(plain.pipeline, "public.plain")).version()
    catch_up(plain.pipeline)
    record = record_of(plain.pipeline, "public.plain")
    assert record.state == "suspended"
    assert "USING made other values" in record.reason
    newest = read_epoch(plain.pipeline.lake_path())
    assert newest is not None
    epochs = [read_epoch(plain.pipeline.lake_path(), number) for number in range(1, newest.epoch + 1)]
    rows = [epoch.tables["public.plain"] for epoch in epochs if epoch and "public.plain" in epoch.tables]
    assert {row.state for row in rows if row.version >= wide} == {"suspended"}


@pytest.mark.parametrize(("using", "reason"), [("", ""), (" using n + 1", "and USING made other values")])
def test_a_wider_type_by_a_transaction_that_began_later_than_the_next_row_is_compared(
    plain: Plain, using: str, reason: str
) -> None:
    with plain.database.connect(autocommit=False) as earlier:
        earlier.execute("update other set n = 7 where id = 1")
        plain.database.execute(f"alter table plain alter n type bigint{using}")
        earlier.execute("insert into plain values (1000, 1, 'new')")
    catch_up(plain.pipeline)
    record = record_of(plain.pipeline, "public.plain")
    assert record.state == ("suspended" if reason else "active")
    assert reason in record.reason
    assert plain.is_equal() is not bool(reason)


def test_a_table_that_somebody_locks_while_its_wider_values_are_compared_is_tried_again_alone(
    plain: Plain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(widened, "_LOCK_SECONDS", 0.2)
    plain.database.execute(
        "alter table plain alter n type bigint", "insert into plain values (1000, 1, 'new')", "update other set n = 3"
    )

    def is_followed() -> bool:
        return set(lake_rows(plain.pipeline, "public.other", ["n"])) == {(3,)}

    def in_step() -> bool:
        return record_of(plain.pipeline, "public.plain").state == "active" and plain.is_equal()

    with plain.database.superuser() as holder, following(plain.pipeline) as running:
        holder.execute("begin; lock table plain in access exclusive mode")
        until(lambda: "public.plain: attempt 2 failed" in caplog.text or running.done(), "it is tried again", 60)
        until(lambda: is_followed() or running.done(), "the other table is followed", 60)
        assert not running.done()
        holder.execute("rollback")
        until(lambda: in_step() or running.done(), "the table is followed")
    assert in_step()


def test_a_column_that_only_text_can_carry_is_followed_by_the_next_run(plain: Plain) -> None:
    plain.database.execute(
        "update plain set n = 0 where id = 1",
        "alter table plain add words tsvector default 'a b', add shapes box[] default '{((3,3),(2,2));((1,1),(0,0))}'",
        "update plain set words = 'c' where id < 5",
    )
    with pytest.raises(Transient) as refused:
        catch_up(plain.pipeline)
    assert "must now send text because of public.plain.words" in refused.value.message
    catch_up(plain.pipeline)
    found = verify(plain.pipeline, [TableName.parse("public.plain")])["tables"]["public.plain"]
    assert (found["compared"], found["different"], found["missing"], found["extra"]) == (True, 0, 0, 0)
    assert (5, "'a' 'b'") in lake_rows(plain.pipeline, "public.plain", ["id", "words"])


def test_a_reload_reads_again_what_changes_while_it_is_read(plain: Plain, tmp_path: Path) -> None:
    with following(plain.pipeline) as running, armed(tmp_path, "reload.after_capture") as hold:
        until(lambda: status(plain.pipeline)["running"] or running.done(), "the driver runs")
        job = in_thread(lambda: reload(plain.pipeline, TableName.parse("public.plain")))
        hold.reached(job)
        plain.database.execute("alter table plain add more int default 3", "update plain set more = id where id < 5")
        hold.release()
        assert job.result(120)["tables"]["public.plain"]["rows"] == 40
    assert plain.is_equal()


def test_a_reload_that_was_read_before_a_change_is_given_up_and_says_why(plain: Plain, tmp_path: Path) -> None:
    with following(plain.pipeline) as running, armed(tmp_path, "reload.after_read") as hold:
        until(lambda: status(plain.pipeline)["running"] or running.done(), "the driver runs")
        job = in_thread(lambda: reload(plain.pipeline, TableName.parse("public.plain")))
        hold.reached(job)
        plain.database.execute("alter table plain add more int", "update plain set more = id")
        until(lambda: plain.is_equal() or running.done(), "the lake follows")
        hold.release()
        with pytest.raises(Transient) as failed:
            job.result(120)
    assert "columns changed meanwhile" in failed.value.message
    assert plain.is_equal()


def test_an_older_cut_is_read_and_validated_with_the_columns_of_its_time(plain: Plain, spark: SparkSession) -> None:
    catch_up(plain.pipeline)
    before = newest_cut(plain.pipeline)
    plain.database.execute(
        "alter table plain rename note to remark; alter table plain drop n; alter table plain add more int default 1",
        "update plain set more = id",
    )
    catch_up(plain.pipeline)
    now = newest_cut(plain.pipeline)
    older, newer = (headwater.read(spark, cut)["public.plain"] for cut in (before, now))
    assert (older.columns, newer.columns) == (["id", "n", "note"], ["id", "n", "remark", "more"])
    for cut in (before, now):
        found = validate(plain.pipeline, [TableName.parse("public.plain")], cut=cut)
        assert found["success"], found
        assert found["tables"]["public.plain"]["rows"] == 40


def test_a_history_has_the_columns_of_its_table(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    database.allow_publishing()
    database.execute(PLAIN.replace("{}", "plain"), ROWS.replace("{}", "plain"))
    pipeline = loaded_pipeline(tmp_path, database, {"name": "public.plain", "history": True, "soft_delete": True})
    database.execute(
        "update plain set n = 0 where id = 1",
        "alter table plain rename note to remark; alter table plain alter n type bigint, alter id type bigint; "
        "alter table plain add more int default 4",
        "insert into plain values (100, 1, 'new', 5)",
        "delete from plain where id = 2",
    )
    catch_up(pipeline)
    path = table_path(pipeline.lake_path(), TableName.parse("public.plain").path + HISTORY)
    told = spark.read.format("delta").load(path).orderBy("_hw_lsn", "_hw_sequence")
    found = [tuple(row) for row in told.select("_hw_operation", "id", "note", "remark", "more").collect()]
    assert found == [
        ("load", None, None, None, None),
        ("update", 1, None, "note 1", 4),
        ("insert", 100, None, "new", 5),
        ("delete", 2, None, None, None),
    ]
    rows = lake_rows(pipeline, "public.plain", ["id", "n", "remark", "more", "_hw_deleted"])
    assert (2, 2, "note 2", 4, True) in rows
    living = sorted((row[:4] for row in rows if not row[4]), key=repr)
    assert living == sorted(database.query("select id, n, remark, more from plain"), key=repr)
