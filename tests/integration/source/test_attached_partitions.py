"""Whether a partition was created as one, or attached with rows that the log never carried: by a real catalog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest

from fixtures.postgres import Database
from headwater.source.catalog import partitions
from headwater.source.catalog.partitions import DISTANCE, attached, attached_leaves, look_at_attached, new_leaf
from headwater.source.connection import connect

pytestmark = pytest.mark.postgres

TABLE = "(id int not null default 1, region text not null, n int)"
FILL = "insert into leaf select 1, 'us', i from generate_series(1, 100) i"
ATTACH = "alter table sales attach partition leaf for values in ('us')"
MAKE = f"create table leaf {TABLE}"
CREATE = "create table leaf partition of sales for values in ('us')"
INDEX, CLUSTER = "create index leaf_n on leaf (n)", "cluster leaf using leaf_n"
BEHIND = "insert into sales values (2, 'us', 2)"
SUBTREE = f"create table us {TABLE} partition by list (id)"
BELOW = "create table leaf partition of us for values in (1, 2)"
ATTACH_TREE = "alter table sales attach partition us for values in ('us')"


@pytest.fixture
def owner(database: Database) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    database.allow_publishing()
    with database.connect() as connection:
        connection.execute(f"create table sales {TABLE} partition by list (region)")
        yield connection


@pytest.mark.parametrize(
    ("transactions", "created"),
    [
        ([[CREATE]], True),
        ([[CREATE, FILL, "update leaf set n = 1 where n < 50"]], True),
        ([[CREATE], ["alter table sales add z int default 7", BEHIND]], True),
        ([["savepoint a", CREATE, FILL, "release a"]], True),
        ([["savepoint a", "savepoint b", CREATE, "release b", FILL, "release a"], [BEHIND]], True),
        ([[MAKE], [FILL], [ATTACH]], False),
        ([[MAKE], [ATTACH]], False),
        ([[MAKE, FILL, ATTACH]], False),
        ([[MAKE, FILL, ATTACH, "delete from leaf where n > 1"], ["alter table sales add z int default 7"]], False),
        ([[MAKE, FILL, ATTACH], ["alter table sales alter n type bigint"]], False),
        ([["savepoint a", MAKE, FILL, ATTACH, "release a"]], False),
        ([["savepoint a", MAKE, "release a", FILL, ATTACH]], False),
        # As pg_partman makes them: empty, and nothing is missing in the log.
        ([["create table leaf (like sales including all)", ATTACH]], True),
        ([["create table leaf (like sales including all)", ATTACH, BEHIND], [FILL, "update sales set n = 0"]], True),
        ([["savepoint a", MAKE, ATTACH, "release a"], [FILL]], True),
        # A rewrite writes rows as its own, and a TRUNCATE leaves none that were brought.
        ([[MAKE, ATTACH], ["truncate leaf", FILL]], True),
        ([[MAKE, ATTACH], ["truncate leaf"], [FILL]], True),
        ([[MAKE, FILL, ATTACH], ["truncate leaf", FILL]], True),
        ([[MAKE, ATTACH], ["alter table sales alter n type bigint"], [FILL]], True),
        ([[MAKE, ATTACH], ["alter table sales add z float8 default random()"], [FILL]], True),
        ([[MAKE, ATTACH, INDEX], [CLUSTER], [FILL]], True),
        ([[MAKE, FILL, ATTACH, INDEX], [CLUSTER], [BEHIND]], False),
        ([[MAKE, FILL, ATTACH], ["alter table sales alter n type bigint", BEHIND], [BEHIND]], False),
        ([["create table us partition of sales for values in ('us') partition by list (id)"], [BELOW]], True),
        ([[SUBTREE], [ATTACH_TREE], [BELOW]], True),
        ([[SUBTREE], [BELOW], [ATTACH_TREE]], False),
        ([[SUBTREE, BELOW, FILL, ATTACH_TREE]], False),
        ([[SUBTREE, BELOW, ATTACH_TREE, FILL]], True),
        ([[SUBTREE, ATTACH_TREE, BELOW, FILL]], True),
    ],
)
def test_a_partition_that_brought_rows_is_told_from_one_that_did_not(
    database: Database,
    owner: psycopg.Connection[tuple[object, ...]],
    transactions: Sequence[Sequence[str]],
    created: bool,
) -> None:
    for statements in transactions:
        with owner.transaction():
            for statement in statements:
                owner.execute(statement.encode())
    root, leaf = owner.execute("select 'sales'::regclass::oid::int, 'leaf'::regclass::oid::int").fetchone() or (0, 0)
    assert isinstance(root, int)
    assert isinstance(leaf, int)
    with connect(database.conninfo) as connection:
        found = new_leaf(connection, leaf)
        assert found is not None
        assert (found[0], found[1].name, found[2]) == (root, "leaf", created)
        assert [one.name for one in attached_leaves(connection, root, [], 0)] == ([] if created else ["leaf"])
        assert [one.name for one in attached_leaves(connection, root, [], leaf)] == ["leaf"]
        assert list(attached(connection, [leaf], lambda *_: True)) == ([] if created else [leaf])
        assert attached(connection, [leaf], lambda *_: False) == {}


@pytest.mark.parametrize(
    ("transactions", "brought", "empty"),
    [
        ([[MAKE], [ATTACH]], False, True),
        ([["create table leaf (like sales including all)"], [ATTACH]], False, True),
        ([[MAKE, ATTACH]], False, True),
        ([[MAKE], [FILL], ["truncate leaf"], [ATTACH]], False, True),
        ([[SUBTREE], [BELOW], [ATTACH_TREE]], False, True),
        ([[MAKE], [ATTACH], ["savepoint a", "alter table leaf set unlogged", "rollback to a"]], False, True),
        # What was written to may have brought rows, also if none of them can be read any more.
        ([[MAKE], [FILL], [ATTACH]], True, False),
        ([[MAKE], [ATTACH], [BEHIND]], True, False),
        ([[MAKE], [FILL], ["delete from leaf"], [ATTACH]], True, False),
        ([[MAKE], ["savepoint a", FILL, "rollback to a"], [ATTACH]], True, False),
        ([[MAKE, ATTACH], [FILL]], False, False),
        # The log does not bring what comes to it.
        ([[MAKE.replace("table", "unlogged table")], [ATTACH]], False, False),
        # It came as a partition: its first change in the log tells of it.
        ([[CREATE]], False, False),
    ],
)
def test_an_attached_partition_without_file_content_is_seen_to_be_empty_behind_its_attachment(
    database: Database,
    owner: psycopg.Connection[tuple[object, ...]],
    transactions: Sequence[Sequence[str]],
    brought: bool,
    empty: bool,
) -> None:
    for statements in transactions:
        with owner.transaction():
            for statement in statements:
                owner.execute(statement.encode())
    found = owner.execute("select 'leaf'::regclass::oid::int, pg_current_wal_insert_lsn() - '0/0'").fetchone()
    assert found is not None
    with connect(database.conninfo) as connection:
        seen = look_at_attached(connection, [found[0]], set())  # type: ignore[list-item]
        again = look_at_attached(connection, [found[0]], {(leaf.relation_id, leaf.link) for leaf in seen.empty})  # type: ignore[list-item]
    assert [leaf.name for leaf in seen.brought] == ["leaf"] * brought
    assert [leaf.name for leaf in seen.empty] == ["leaf"] * empty
    assert seen.lsn >= found[1]  # type: ignore[operator]
    assert again.empty == []
    if empty:
        link = owner.execute("select max(xmin::text::bigint) from pg_inherits where inhparent = 'sales'::regclass")
        assert link.fetchone() == (seen.empty[0].link,)


def test_a_partition_that_somebody_fills_just_now_is_not_seen_to_be_empty(
    database: Database, owner: psycopg.Connection[tuple[object, ...]]
) -> None:
    """His row is committed above the position of the look, or below: nobody knows."""
    for statement in (MAKE, ATTACH):
        owner.execute(statement.encode())
    row = owner.execute("select 'leaf'::regclass::oid::int").fetchone()
    assert row is not None
    with database.connect(autocommit=False) as other, connect(database.conninfo) as connection:
        other.execute("insert into sales values (2, 'us', 2)")
        assert look_at_attached(connection, [row[0]], set()).empty == []  # type: ignore[list-item]
        other.rollback()


def test_a_partition_that_cannot_be_read_in_time_is_judged_by_where_rows_that_it_brought_would_be(
    database: Database, owner: psycopg.Connection[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_row = partitions._Came._has_row

    def slow(*asked: Any) -> bool:
        if asked[-1] == "true":
            raise psycopg.errors.QueryCanceled
        return has_row(*asked)

    monkeypatch.setattr(partitions._Came, "_has_row", slow)
    for made in ([MAKE, ATTACH, FILL], [MAKE, FILL, ATTACH]):
        with owner.transaction():
            for statement in ("drop table if exists leaf", *made):
                owner.execute(statement.encode())
        row = owner.execute("select 'leaf'::regclass::oid::int").fetchone()
        assert row is not None
        with connect(database.conninfo) as connection:
            found = new_leaf(connection, row[0])  # type: ignore[arg-type]
            assert found is not None
            assert found[2] is (made[-1] == FILL)


def test_who_attached_an_empty_partition_is_known_behind_its_look(
    database: Database, owner: psycopg.Connection[tuple[object, ...]]
) -> None:
    """So that its rows are not looked at again and again."""
    with owner.transaction():
        owner.execute(MAKE.encode())
        owner.execute(ATTACH)
    row = owner.execute("select 'leaf'::regclass::oid::int, xmin::text::int from pg_inherits").fetchone()
    assert row is not None
    with connect(database.conninfo) as connection:
        found = new_leaf(connection, row[0])  # type: ignore[arg-type]
    assert found is not None
    assert found[1].link == row[1]


def test_rows_of_a_partition_are_looked_for_where_that_is_of_interest_alone(database: Database) -> None:
    """Of each that pg_partman has made all rows would be read, each time."""
    database.allow_publishing()
    with database.connect() as connection:
        connection.execute(f"create table sales {TABLE} partition by list (region)".encode())
        with connection.transaction():
            connection.execute(MAKE.encode())
            connection.execute(ATTACH)
        connection.execute(FILL)
        row = connection.execute("select 'leaf'::regclass::oid::int").fetchone()
    assert row is not None
    with database.superuser() as holder, connect(database.conninfo) as connection:
        holder.execute("begin; lock table leaf in access exclusive mode")
        assert attached(connection, [row[0]], lambda relation, xid: relation != row[0]) == {}
        # And who asks is not kept waiting by a lock: one that cannot be read counts as one that brought rows.
        assert list(attached(connection, [row[0]], lambda *_: True)) == [row[0]]


@pytest.mark.parametrize("change", ["update leaf set n = 0 where n < 5", "delete from leaf where n < 5"])
def test_rows_that_somebody_is_about_to_change_do_not_tell_that_none_were_brought(
    database: Database, owner: psycopg.Connection[tuple[object, ...]], change: str
) -> None:
    """He has left the number of his own command in place of that of the one which wrote them."""
    with owner.transaction():
        for statement in (MAKE, "insert into leaf values (1, 'us', 1)", ATTACH):
            owner.execute(statement.encode())
    row = owner.execute("select 'leaf'::regclass::oid::int").fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    with database.connect(autocommit=False) as other, connect(database.conninfo) as connection:
        for _ in range(5):  # commands before it
            other.execute("insert into sales values (7, 'us', 100)")
        other.execute(change.encode())
        found = new_leaf(connection, row[0])
        assert found is not None
        assert found[2] is False
        other.rollback()
        found = new_leaf(connection, row[0])
        assert found is not None
        assert found[2] is False


@pytest.mark.parametrize(
    ("by", "bounds", "made", "created"),
    [
        ("list (region)", "for values in ('us')", [MAKE], True),
        ("list (region)", "for values in ('us')", [MAKE, FILL], False),
        ("range (n)", "for values from (0) to (1000)", [MAKE], True),
        ("range (n)", "for values from (0) to (1000)", [MAKE, FILL], False),
        # Through their root they are found by reading all of it.
        ("hash (n)", "for values with (modulus 1, remainder 0)", [MAKE], False),
        ("list (region)", "default", [MAKE], False),
    ],
)
def test_of_a_new_partition_that_only_its_root_may_read_its_rows_are_looked_for_there(
    database: Database, by: str, bounds: str, made: list[str], created: bool
) -> None:
    """As the role may: rights on a table are none on partitions that come later."""
    database.execute(
        f"create table sales {TABLE} partition by {by}",
        "grant usage on schema public to public",
        "grant select on sales to public",
    )
    if by.startswith("list"):
        database.execute("create table sales_eu partition of sales for values in ('eu')")
    with database.connect(autocommit=False) as connection:
        for statement in (*made, f"alter table sales attach partition leaf {bounds}"):
            connection.execute(statement.encode())
        row = connection.execute("select 'leaf'::regclass::oid::int").fetchone()
    database.execute("insert into sales values (2, 'us', 2)")
    assert row is not None
    with connect(database.conninfo) as connection:
        found = new_leaf(connection, row[0])
    assert found is not None
    assert found[2] is created


def test_an_attached_partition_with_rows_that_cannot_be_read_counts_as_one_that_brought_them(
    database: Database,
) -> None:
    database.execute(f"create table sales {TABLE} partition by list (region)", "grant usage on schema public to public")
    with database.connect(autocommit=False) as connection:
        connection.execute(MAKE.encode())
        connection.execute(ATTACH)
        row = connection.execute("select 'leaf'::regclass::oid::int").fetchone()
    assert row is not None
    for is_empty in (True, False):
        with connect(database.conninfo) as connection:
            found = new_leaf(connection, row[0])
            assert found is not None
            assert found[2] is is_empty, "its size needs no right"
        database.execute(FILL)


@pytest.mark.parametrize("ago", [0, 5, 2**31 - 10, 2**31, 2**31 + 10, 2**32 - 10_000])
def test_how_long_ago_a_transaction_was_is_told_beyond_half_of_all_ids(database: Database, ago: int) -> None:
    with connect(database.conninfo) as connection:
        row = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
        assert row is not None
        xid = (row[0] - ago) % 2**32
        asked = f"select {DISTANCE.format('%(xid)s::text::xid')} - {DISTANCE.format('%(now)s::text::xid')}"
        found = connection.execute(asked.encode(), {"xid": xid, "now": row[0]}).fetchone()
    assert found == (ago,)
