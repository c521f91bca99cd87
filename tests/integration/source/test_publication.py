"""The two publications at a real server: what Headwater makes, refuses, adds, takes away, and never touches."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from fixtures.postgres import Database
from headwater.errors import Refused, Transient
from headwater.names import TableName
from headwater.source.catalog.identity import why_writers_would_fail
from headwater.source.catalog.relations import list_relations, read_relations
from headwater.source.connection import Connection, connect
from headwater.source.publication.parts import PublishedPart
from headwater.source.publication.publication import (
    add_tables,
    drop_publications,
    ensure_publications,
    published_tables,
    read_publication,
    remove_table,
)

pytestmark = pytest.mark.postgres

NAME, INSERTS = "headwater_shop", "headwater_shop_inserts"


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    """The least-privileged role, allowed to publish the owner's tables."""
    database.allow_publishing()
    with connect(database.conninfo) as connection:
        yield connection


def _table(name: str) -> TableName:
    return TableName("public", name)


def test_both_publications_are_made_once_empty_and_marked(database: Database, connection: Connection) -> None:
    assert ensure_publications(connection, NAME, pipeline="shop")
    assert not ensure_publications(connection, NAME, pipeline="shop")
    both, inserts = read_publication(connection, NAME), read_publication(connection, INSERTS)
    assert both is not None
    assert inserts is not None
    assert both.operations == {"insert", "update", "delete", "truncate"}
    assert inserts.operations == {"insert", "truncate"}
    for publication in (both, inserts):
        assert publication.made_for == "shop"
        assert not publication.via_root
        assert not publication.for_all_tables
        assert not publication.members
        assert publication.publishes_generated == (connection.info.server_version >= 180000)


def test_without_the_right_to_create_publications_a_dba_gets_the_exact_statements(database: Database) -> None:
    with connect(database.conninfo) as connection:
        with pytest.raises(Refused) as refusal:
            ensure_publications(connection, NAME, pipeline="shop")
        assert refusal.value.code == "missing_rights"
        statements = refusal.value.remedy.removeprefix("a DBA can run: ").split("; ")
        assert read_publication(connection, NAME) is None
        database.execute(*statements)
        assert not ensure_publications(connection, NAME, pipeline="shop")
        made = read_publication(connection, NAME)
        assert made is not None
        assert made.made_for is None


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        (f"create publication {NAME} for all tables", "publication_too_wide"),
        (f"create publication {NAME} for tables in schema public", "publication_too_wide"),
        (f"create publication {NAME} with (publish = 'insert')", "publication_operations"),
        (f"create publication {INSERTS}", "publication_operations"),
        (f"create publication {NAME} with (publish_via_partition_root)", "publication_via_root"),
        (f"create publication {NAME} for table t where (id > 1)", "publication_narrowed"),
        (f"create publication {NAME} for table t (id)", "publication_narrowed"),
    ],
)
def test_an_existing_publication_that_cannot_serve_is_refused_with_the_cure(
    database: Database, connection: Connection, statement: str, code: str
) -> None:
    database.execute("create table t (id int primary key, v int)")
    with database.superuser() as superuser:
        superuser.execute(statement)
        with pytest.raises(Refused) as refusal:
            ensure_publications(connection, NAME, pipeline="shop", wanted={_table("t"): PublishedPart()})
        assert refusal.value.code == code
        for cure in refusal.value.remedy.split(", and")[0].split("; "):
            superuser.execute(cure)
        ensure_publications(connection, NAME, pipeline="shop")


def test_added_tables_are_members_and_the_snapshot_noted_lies_behind_the_commit(
    database: Database, connection: Connection
) -> None:
    database.execute("create table a (id int primary key)", 'create table "B b" (id int primary key)')
    ensure_publications(connection, NAME, pipeline="shop")
    with database.connect() as writer:
        (before,) = writer.execute("select pg_current_xact_id()::text::bigint").fetchone() or (None,)
    xmax = add_tables(connection, NAME, [_table("a"), TableName("public", "B b")])
    assert before is not None
    assert xmax > before + 1  # the ALTER's own transaction lies between
    assert published_tables(connection, NAME) == {_table("a"), TableName("public", "B b")}
    assert add_tables(connection, NAME, [_table("a")]) >= xmax
    assert remove_table(connection, NAME, _table("a"))
    assert not remove_table(connection, NAME, _table("a"))
    assert published_tables(connection, NAME) == {TableName("public", "B b")}


def test_publishing_a_partitioned_table_publishes_its_leaves_as_themselves(
    database: Database, connection: Connection
) -> None:
    database.execute(
        "create table p (id int primary key) partition by range (id)",
        "create table p_1 partition of p for values from (1) to (10)",
    )
    ensure_publications(connection, NAME, pipeline="shop")
    add_tables(connection, NAME, [_table("p")])
    assert published_tables(connection, NAME) == {_table("p")}
    assert database.query(f"select tablename from pg_publication_tables where pubname = '{NAME}'") == [("p_1",)]
    assert remove_table(connection, NAME, _table("p"))


def test_the_children_of_a_plain_table_are_not_published_with_it(database: Database, connection: Connection) -> None:
    database.execute("create table parent (id int primary key)", "create table child () inherits (parent)")
    ensure_publications(connection, NAME, pipeline="shop")
    add_tables(connection, NAME, [_table("parent")])
    assert published_tables(connection, NAME) == {_table("parent")}


_WRITABLE_OR_NOT = {
    "primary key": ["create table t (id int primary key, v int)"],
    "no key": ["create table t (id int, v int)"],
    "nothing": ["create table t (id int primary key, v int)", "alter table t replica identity nothing"],
    "full": ["create table t (id int, v int)", "alter table t replica identity full"],
    "unique only": ["create table t (id int not null unique, v int)"],
    "index": [
        "create table t (id int not null, v int)",
        "create unique index t_id on t (id)",
        "alter table t replica identity using index t_id",
    ],
    "dropped index": [
        "create table t (id int primary key, v int not null)",
        "create unique index t_v on t (v)",
        "alter table t replica identity using index t_v",
        "drop index t_v",
    ],
    "deferrable": ["create table t (id int primary key deferrable, v int)"],
    "full, stored": [
        "create table t (id int, v int, g int generated always as (id) stored)",
        "alter table t replica identity full",
    ],
    "stored key": ["create table t (id int, v int, g int generated always as (id) stored primary key)"],
    "full, virtual": [
        "create table t (id int, v int, g int generated always as (id) virtual)",
        "alter table t replica identity full",
    ],
}


@pytest.mark.parametrize("kind", _WRITABLE_OR_NOT)
@pytest.mark.parametrize("generated", [False, True])
def test_a_table_is_published_only_if_the_server_lets_its_writers_go_on(
    database: Database, connection: Connection, kind: str, generated: bool
) -> None:
    version = connection.info.server_version
    if version < 180000 and (generated or "virtual" in kind):
        pytest.skip("came with 18")
    database.execute(*_WRITABLE_OR_NOT[kind], "insert into t (id, v) values (1, 1)")
    option = "" if version < 180000 else f", publish_generated_columns = {'stored' if generated else 'none'}"
    database.execute(f"create publication {NAME} with (publish = 'insert, update, delete, truncate'{option})")
    database.execute("create publication oracle for table t" + (f" with ({option[2:]})" if option else ""))
    with database.connect() as writer:
        try:
            writer.execute("update t set v = v + 1")
            fails = False
        except psycopg.Error:
            fails = True
    database.execute("drop publication oracle")
    [relation] = [r for r in list_relations(connection) if r.name == _table("t")]
    facts = read_relations(connection, [relation.relation_id])[relation.relation_id]
    assert (why_writers_would_fail(facts, version, generated) is not None) == fails
    if fails:
        with pytest.raises(Refused) as refusal:
            add_tables(connection, NAME, [_table("t")])
        assert refusal.value.code == "no_identity"
        assert not published_tables(connection, NAME)
    else:
        add_tables(connection, NAME, [_table("t")])
    database.execute("update t set v = v + 1", "delete from t")


def test_a_leaf_without_an_identity_keeps_the_whole_table_out(database: Database, connection: Connection) -> None:
    database.execute(
        "create table p (id int primary key) partition by range (id)",
        "create table p_1 partition of p for values from (1) to (10)",
        "create table p_2 partition of p for values from (10) to (20)",
        "alter table p_2 replica identity nothing",
    )
    ensure_publications(connection, NAME, pipeline="shop")
    with pytest.raises(Refused) as refusal:
        add_tables(connection, NAME, [_table("p")])
    assert (refusal.value.code, refusal.value.where) == ("no_identity", "public.p_2")
    assert not published_tables(connection, NAME)


def test_an_insert_only_table_needs_no_identity_and_keeps_its_updates(
    database: Database, connection: Connection
) -> None:
    database.execute("create table t (v int)", "insert into t values (1)")
    ensure_publications(connection, NAME, pipeline="shop")
    add_tables(connection, INSERTS, [_table("t")])
    database.execute("update t set v = 2", "delete from t")


def test_adding_a_table_of_somebody_else_is_refused_with_the_statement_for_a_dba(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    database.publish(NAME)
    with connect(database.conninfo) as connection:
        with pytest.raises(Refused) as refusal:
            add_tables(connection, NAME, [_table("t")])
        assert refusal.value.code == "missing_rights"
        database.execute(refusal.value.remedy.removeprefix("a DBA can run: "))
        add_tables(connection, NAME, [_table("t")])
        with pytest.raises(Refused, match=r"DROP TABLE ONLY public\.t"):
            remove_table(connection, NAME, _table("t"))


@pytest.mark.parametrize(("name", "code"), [("absent", "table_missing"), ("u", "not_a_table"), ("v", "not_a_table")])
def test_what_cannot_be_published_is_refused_and_nothing_is_added(
    database: Database, connection: Connection, name: str, code: str
) -> None:
    database.execute(
        "create table t (id int primary key)",
        "create unlogged table u (id int primary key)",
        "create view v as select 1 as id",
    )
    ensure_publications(connection, NAME, pipeline="shop")
    with pytest.raises(Refused) as refusal:
        add_tables(connection, NAME, [_table("t"), _table(name)])
    assert refusal.value.code == code
    assert not published_tables(connection, NAME)


def test_a_held_lock_is_waited_for_only_so_long_and_its_holder_is_named(
    database: Database, connection: Connection
) -> None:
    database.execute("create table t (id int primary key)")
    ensure_publications(connection, NAME, pipeline="shop")
    with psycopg.connect(database.owner, application_name="vacuum_like") as holder:
        holder.execute("lock table t in share update exclusive mode")
        with pytest.raises(Transient, match=r"process \d+ \(vacuum_like\)") as error:
            add_tables(connection, NAME, [_table("t")], wait_seconds=0.1)
        assert error.value.code == "lock_timeout"
        holder.rollback()
        add_tables(connection, NAME, [_table("t")])
    assert published_tables(connection, NAME) == {_table("t")}


def test_only_publications_that_headwater_made_for_this_pipeline_are_dropped(
    database: Database, connection: Connection
) -> None:
    database.execute(f"create publication {NAME}")
    ensure_publications(connection, NAME, pipeline="shop")
    assert drop_publications(connection, NAME, pipeline="another") == ()
    assert drop_publications(connection, NAME, pipeline="shop") == (INSERTS,)
    assert read_publication(connection, NAME) is not None
    assert drop_publications(connection, NAME, pipeline="shop") == ()


def test_a_name_that_the_server_would_cut_off_is_refused(database: Database, connection: Connection) -> None:
    with pytest.raises(Refused, match="too long"):
        ensure_publications(connection, "p" * 60, pipeline="shop")
