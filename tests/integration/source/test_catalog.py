"""The catalog of a real server: which tables a pipeline has, their columns, keys, leaves, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.errors import Refused
from headwater.names import TableName
from headwater.source.catalog.catalog import Catalog, CatalogTable, read_catalog, signature
from headwater.source.connection import connect

pytestmark = pytest.mark.postgres

_ONE_KEY = "create table t (id int primary key, a int not null)"
_TWO_KEYS = "create table t (id int primary key, a int not null unique)"
_FULL = "alter table t replica identity full"


def _read(folder: Path, database: Database, *tables: str | dict[str, Any]) -> Catalog:
    pipeline = write_pipeline(folder, database, *tables)
    with connect(database.conninfo) as connection:
        return read_catalog(connection, pipeline)


def _one(folder: Path, database: Database, table: str | dict[str, Any]) -> CatalogTable:
    catalog = _read(folder, database, table)
    assert not [problem for problem in catalog.problems if problem.is_error]
    [found] = catalog.tables
    return found


def _codes(folder: Path, database: Database, *tables: str | dict[str, Any]) -> set[tuple[str, str]]:
    return {(problem.code, problem.where) for problem in _read(folder, database, *tables).problems}


def _is_18(database: Database) -> bool:
    with database.connect() as connection:
        return connection.info.server_version >= 180000


def test_columns_come_in_attnum_order_with_their_declared_types_and_without_dropped_ones(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "create domain amount as numeric(12,2)",
        "create table t (gone int, id bigint primary key, note text, price amount, tags text[], n numeric(9,3)[])",
        "alter table t drop column gone",
        "alter table t add column late timestamptz not null default now()",
    )
    database.grant("t")
    schema = _one(tmp_path, database, "public.t").schema
    assert [(c.name, c.attnum, c.value.lake, c.not_null) for c in schema.columns] == [
        ("id", 2, "bigint", True),
        ("note", 3, "string", False),
        ("price", 4, "decimal(12,2)", False),
        ("tags", 5, "array<string>", False),
        ("n", 6, "array<decimal(9,3)>", False),
        ("late", 7, "timestamp", True),
    ]
    assert schema.key == ("id",)
    [leaf] = schema.leaves
    assert (leaf.relation_id, leaf.schema, leaf.name, leaf.replica_identity) == (schema.relation_id, "public", "t", "d")
    assert leaf.relfilenode > 0
    assert not schema.partitioned


def test_names_go_before_patterns_and_patterns_leave_out_what_is_excluded_or_no_table(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        "create table log_a (id int primary key)",
        "create table log_b (id int primary key)",
        "create table log_old (id int primary key)",
        "create view log_view as select 1 as id",
        'create table "Other One" (id int primary key)',
    )
    database.grant("log_a", "log_b", "log_old", '"Other One"')
    catalog = _read(
        tmp_path,
        database,
        {"name": "public.log_*", "exclude": ["public.log_old"], "insert_only": True},
        "public.log_b",
        'public."Other One"',
    )
    assert {str(t.name): t.schema.insert_only for t in catalog.tables} == {
        'public."Other One"': False,
        "public.log_a": True,
        "public.log_b": False,
    }
    assert not catalog.problems


def test_missing_tables_views_and_temporary_unlogged_or_foreign_tables_are_errors(
    database: Database, tmp_path: Path
) -> None:
    with database.superuser() as superuser:
        superuser.execute("create foreign data wrapper nothing")
        superuser.execute("create server nowhere foreign data wrapper nothing")
        superuser.execute("create foreign table far (id int) server nowhere")
    database.execute("create view v as select 1 as id", "create unlogged table u (id int primary key)")
    database.grant("u")
    assert _codes(tmp_path, database, "public.v", "public.u", "public.far", "public.absent") == {
        ("not_a_table", "public.v"),
        ("unlogged_table", "public.u"),
        ("not_a_table", "public.far"),
        ("table_missing", "public.absent"),
    }


def test_a_pattern_without_a_table_is_a_warning(database: Database, tmp_path: Path) -> None:
    catalog = _read(tmp_path, database, "public.nothing_*")
    assert [(p.code, p.severity) for p in catalog.problems] == [("pattern_empty", "warning")]


def test_the_leaves_of_a_partitioned_table_of_any_depth_hold_its_rows(database: Database, tmp_path: Path) -> None:
    database.execute(
        "create table p (id int, at date, v text, primary key (id, at)) partition by range (at)",
        "create table p_1 partition of p for values from ('2020-01-01') to ('2021-01-01')",
        "create table p_2 partition of p for values from ('2021-01-01') to ('2022-01-01') partition by hash (id)",
        "create table p_2_a partition of p_2 for values with (modulus 2, remainder 0)",
        "create table p_2_b partition of p_2 for values with (modulus 2, remainder 1)",
    )
    database.grant("p", "p_1", "p_2_a", "p_2_b")
    catalog = _read(tmp_path, database, "public.p*")
    assert not catalog.problems
    [table] = catalog.tables
    assert table.schema.partitioned
    assert table.schema.key == ("id", "at")
    assert [leaf.name for leaf in table.schema.leaves] == ["p_1", "p_2_a", "p_2_b"]
    assert all(leaf.relfilenode for leaf in table.schema.leaves)


def test_a_partition_alone_is_a_table_and_beside_its_parent_it_is_not(database: Database, tmp_path: Path) -> None:
    database.execute(
        "create table p (id int primary key) partition by range (id)",
        "create table p_1 partition of p for values from (1) to (10)",
        "create table p_2 partition of p for values from (10) to (20)",
    )
    database.grant("p", "p_1", "p_2")
    assert [str(t.name) for t in _read(tmp_path, database, "public.p_1").tables] == ["public.p_1"]
    catalog = _read(tmp_path, database, "public.p_1", "public.p")
    assert [str(t.name) for t in catalog.tables] == ["public.p"]
    assert [(p.code, p.severity) for p in catalog.problems] == [("partition_listed", "warning")]


def test_foreign_partitions_are_an_error(database: Database, tmp_path: Path) -> None:
    database.execute("create table p (id int) partition by range (id)")
    with database.superuser() as superuser:
        superuser.execute("create foreign data wrapper nothing")
        superuser.execute("create server nowhere foreign data wrapper nothing")
        superuser.execute("create foreign table far partition of p for values from (1) to (10) server nowhere")
        superuser.execute(f"grant select on far to {database.role}")
    database.grant("p")
    assert ("foreign_table", "public.far") in _codes(tmp_path, database, {"name": "public.p", "insert_only": True})


@pytest.mark.parametrize(
    ("ddl", "declared", "key"),
    [
        ([_TWO_KEYS], None, ("id",)),
        ([_TWO_KEYS, "alter table t replica identity using index t_a_key"], None, ("a",)),
        (["create table t (a int not null, b int not null, primary key (b, a))"], None, ("b", "a")),
        (["create table t (a int, b int not null unique)", _FULL], None, ("b",)),
        ([_TWO_KEYS, _FULL], ["a"], ("a",)),
        ([_ONE_KEY, _FULL], ["id", "a"], ("id", "a")),
    ],
)
def test_the_key_is_the_declared_one_or_the_identity_index_or_the_primary_key(
    database: Database, tmp_path: Path, ddl: list[str], declared: list[str] | None, key: tuple[str, ...]
) -> None:
    database.execute(*ddl)
    database.grant("t")
    entry: dict[str, Any] = {"name": "public.t"}
    if declared:
        entry["key"] = declared
    assert _one(tmp_path, database, entry).schema.key == key


@pytest.mark.parametrize(
    ("ddl", "declared", "code"),
    [
        (["create table t (a int)"], None, "no_key"),
        (["create table t (a int)", _FULL], None, "no_key"),
        (["create table t (a int unique)"], None, "no_key"),
        (["create table t (a int not null unique)"], None, "no_identity"),
        ([_ONE_KEY, "alter table t replica identity nothing"], None, "no_identity"),
        (["create table t (a int primary key deferrable)"], None, "deferrable_key"),
        (["create table t (a int not null, b int)", "create unique index on t (a) where b > 0"], None, "no_key"),
        (["create table t (a int not null)", "create unique index on t ((a + 1))"], None, "no_key"),
        ([_TWO_KEYS], ["a"], "key_not_carried"),
        ([_ONE_KEY], ["id", "a"], "key_not_carried"),
        ([_ONE_KEY], ["a"], "key_not_unique"),
        (["create table t (id int primary key, a int unique)", _FULL], ["a"], "key_nullable"),
        ([_ONE_KEY], ["absent"], "unknown_column"),
    ],
)
def test_a_table_whose_rows_the_log_does_not_identify_is_refused(
    database: Database, tmp_path: Path, ddl: list[str], declared: list[str] | None, code: str
) -> None:
    database.execute(*ddl)
    database.grant("t")
    entry: dict[str, Any] = {"name": "public.t"}
    if declared:
        entry["key"] = declared
    catalog = _read(tmp_path, database, entry)
    assert [(p.code, p.severity) for p in catalog.problems] == [(code, "error")]
    assert not catalog.tables
    with pytest.raises(Refused) as refusal:
        catalog.table(TableName("public", "t"))
    assert refusal.value.code == code


def test_an_insert_only_table_needs_no_key_and_no_identity(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (a int)")
    database.grant("t")
    schema = _one(tmp_path, database, {"name": "public.t", "insert_only": True}).schema
    assert (schema.key, schema.insert_only) == ((), True)


def test_every_leaf_must_have_an_identity_that_carries_the_key(database: Database, tmp_path: Path) -> None:
    database.execute(
        "create table p (id int primary key, other int not null) partition by range (id)",
        "create table p_1 partition of p for values from (1) to (10)",
        "create table p_2 partition of p for values from (10) to (20)",
        "create table p_3 partition of p for values from (20) to (30)",
        "alter table p_2 replica identity nothing",
        "create unique index p_3_other on p_3 (other)",
        "alter table p_3 replica identity using index p_3_other",
    )
    database.grant("p", "p_1", "p_2", "p_3")
    entry = {"name": "public.p", "key": ["id"]}
    assert _codes(tmp_path, database, entry) == {("key_not_carried", "public.p_3")}
    database.execute("alter table p_3 replica identity default")
    assert _codes(tmp_path, database, entry) == {("no_identity", "public.p_2")}
    database.execute("alter table p_2 replica identity full")
    assert _codes(tmp_path, database, entry) == set()


def test_missing_rights_are_errors_with_the_statement_that_grants_them(database: Database, tmp_path: Path) -> None:
    database.execute("create schema closed", "create table closed.t (id int primary key)")
    problems = {p.code: p for p in _read(tmp_path, database, "closed.t").problems}
    assert problems["no_usage"].remedy == f"GRANT USAGE ON SCHEMA closed TO {database.role}"
    assert problems["no_select"].remedy == f"GRANT SELECT ON TABLE closed.t TO {database.role}"
    database.grant("closed.t")
    assert not _read(tmp_path, database, "closed.t").problems


def test_row_security_is_an_error_unless_the_role_bypasses_it(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)", "alter table t enable row level security")
    database.grant("t")
    assert _codes(tmp_path, database, "public.t") == {("row_security", "public.t")}
    with database.superuser() as superuser:
        superuser.execute(f"alter role {database.role} bypassrls")
    table = _one(tmp_path, database, "public.t")
    assert table.relation.row_security
    assert not table.relation.row_security_active


def test_an_inheritance_parent_is_a_warning_and_only_its_own_rows_belong_to_it(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table parent (id int primary key)", "create table child () inherits (parent)")
    database.grant("parent")
    catalog = _read(tmp_path, database, "public.parent")
    assert [(p.code, p.severity) for p in catalog.problems] == [("inheritance_parent", "warning")]
    [table] = catalog.tables
    assert [str(child) for child in table.children] == ["public.child"]
    assert [leaf.name for leaf in table.schema.leaves] == ["parent"]


def test_stored_generated_columns_are_replicated_where_the_server_publishes_them(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table t (id int primary key, twice int generated always as (id * 2) stored)")
    database.grant("t")
    catalog = _read(tmp_path, database, "public.t")
    [table] = catalog.tables
    if _is_18(database):
        assert [c.name for c in table.schema.columns] == ["id", "twice"]
        assert not catalog.problems
        database.publish("headwater_shop", "t")  # a publication that does not publish them
        catalog = _read(tmp_path, database, "public.t")
    assert [c.name for c in catalog.tables[0].schema.columns] == ["id"]
    assert [(p.code, p.severity) for p in catalog.problems] == [("generated_column", "warning")]


def test_virtual_generated_columns_are_left_out(database: Database, tmp_path: Path) -> None:
    if not _is_18(database):
        pytest.skip("virtual generated columns came with 18")
    database.execute("create table t (id int primary key, twice int generated always as (id * 2) virtual)")
    database.grant("t")
    catalog = _read(tmp_path, database, "public.t")
    assert [c.name for c in catalog.tables[0].schema.columns] == ["id"]
    assert [(p.code, p.severity) for p in catalog.problems] == [("generated_column", "warning")]
    # Under FULL the identity holds the virtual column, and the server refuses the source's updates.
    database.execute("alter table t replica identity full")
    assert ("no_identity", "public.t") in _codes(tmp_path, database, "public.t")


def test_column_names_that_the_lake_cannot_hold_are_errors(database: Database, tmp_path: Path) -> None:
    database.execute('create table t (id int primary key, "Id" int, _hw_partition int)')
    database.grant("t")
    assert _codes(tmp_path, database, "public.t") == {("column_reserved", "public.t"), ("column_case", "public.t")}


def test_what_the_file_says_about_columns_is_checked_against_the_table(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key, f float8, b bytea, p tsvector, n numeric)")
    database.grant("t")
    entry = {
        "name": "public.t",
        "partition_by": ["f", "nowhere"],
        "types": {"nothing": "string", "n": "decimal(38,9)"},
        "on_bad_value": {"none": "null"},
    }
    catalog = _read(tmp_path, database, entry)
    assert sorted((p.code, p.where) for p in catalog.problems) == [
        ("partition_by_type", "public.t"),
        ("text_format", "public.t.p"),
        ("unknown_column", "public.t"),
        ("unknown_column", "public.t"),
        ("unknown_column", "public.t"),
    ]


def test_a_key_that_the_lake_cannot_hold_is_never_null_there(database: Database, tmp_path: Path) -> None:
    database.execute("create table t (at timestamptz primary key, seen timestamptz)")
    database.grant("t")
    schema = _one(tmp_path, database, {"name": "public.t", "on_bad_value": "null"}).schema
    assert {column.name: column.on_bad_value for column in schema.columns} == {"at": "suspend", "seen": "null"}


def test_the_signature_shows_the_present_whatever_the_snapshot_of_a_load_shows(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table t (id int primary key, v int)", "insert into t values (1, 1)")
    database.grant("t")
    relation_id = _one(tmp_path, database, "public.t").schema.relation_id
    with connect(database.conninfo) as connection:
        before = signature(connection, [relation_id])
        assert set(before) == {relation_id}
        assert [column[1] for column in before[relation_id].columns] == ["id", "v"]
        assert signature(connection, [relation_id]) == before
        database.execute("truncate t")
        truncated = signature(connection, [relation_id])
        assert truncated[relation_id].relfilenode != before[relation_id].relfilenode
        database.execute("alter table t rename column v to w")
        renamed = signature(connection, [relation_id])
        assert renamed[relation_id].relfilenode == truncated[relation_id].relfilenode
        assert renamed[relation_id].columns != truncated[relation_id].columns
        database.execute("drop table t")
        assert signature(connection, [relation_id]) == {}
