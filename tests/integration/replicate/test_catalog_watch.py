"""Changes of the source's catalog that the log does not tell: the driver notices them, and the source's writers go on.

The judgement is tested on the catalog alone, without a lake; what the driver makes of it on one source and one lake,
harmed while it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from fixtures.jobs import (
    Outcome,
    Rows,
    assert_equal,
    catch_up,
    following,
    lake_rows,
    load_tables,
    registry_of,
    source_rows,
    states_of,
    until,
)
from fixtures.lakes import as_published
from fixtures.loaded import loaded_pipeline
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.cli import main
from headwater.errors import EXIT_SUSPENDED
from headwater.lake.registry import State, TableRecord
from headwater.log.blocks import Ddl
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.catalog_watch import watch as catalog_watch
from headwater.replicate.catalog_watch.watch import CatalogWatch
from headwater.source.catalog import partitions
from headwater.source.catalog.catalog import Catalog, read_catalog
from headwater.source.connection import Connection, connect
from headwater.source.publication.publication import add_tables, ensure_publications, published_tables
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.postgres

PUBLICATION = "headwater_shop"
TABLES = ("public.orders", "public.events", "public.quiet")


@dataclass
class Watched:
    """Three published tables (one of them partitioned) and a watch that has looked once."""

    database: Database
    connection: Connection
    watch: CatalogWatch
    records: dict[str, TableRecord]
    pipeline: Pipeline

    def found(self, *statements: str) -> dict[str, tuple[str, str]]:
        """Reason and remedy of each table that one look finds after the owner's `statements`."""
        self.database.execute(*statements)
        self.watch.poll(self.connection)
        return {name: (error.message, error.remedy) for name, error in self.watch.take()}

    @property
    def published(self) -> set[str]:
        return {str(name) for name in published_tables(self.connection, PUBLICATION)}

    def catalog(self) -> Catalog:
        return read_catalog(self.connection, self.pipeline)

    def suspend(self, name: str, state: State = "suspended") -> None:
        self.records[name] = self.records[name].entered(state)


@pytest.fixture
def watched(database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Watched]:
    database.execute(
        "create table orders (id int primary key, n int)",
        "create type mood as enum ('glad', 'sad')",
        "create domain feeling as mood",
        "create type inner_pair as (felt feeling, at date)",
        "create type pair as (a int, b inner_pair[])",
        "create table quiet (id int primary key, n int, p pair)",
        "create table events (id int primary key, n int) partition by range (id)",
        "create table events_1 partition of events for values from (0) to (100)",
    )
    made_by_headwater = getattr(request, "param", True)
    if made_by_headwater:
        database.allow_publishing()
    else:
        database.grant("orders", "quiet", "events", "events_1")
        database.publish(PUBLICATION, "orders", "quiet", "events")
    pipeline = write_pipeline(tmp_path, database, *TABLES)
    with connect(database.conninfo) as connection:
        if made_by_headwater:
            ensure_publications(connection, PUBLICATION, pipeline="shop")
            add_tables(connection, PUBLICATION, map(TableName.parse, TABLES))
        records = {
            str(table.name): TableRecord(str(table.name), table.name.path, "active", schemas=((0, table.schema),))
            for table in read_catalog(connection, pipeline).tables
        }
        records = {record.name: record for record in as_published(connection, PUBLICATION, *records.values())}
        watched = Watched(database, connection, CatalogWatch(pipeline, lambda: records), records, pipeline)
        assert set(records) == set(TABLES)
        assert watched.found() == {}
        yield watched


def test_a_table_that_is_truncated_again_and_again_is_told_of_once_an_hour(
    watched: Watched, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    def told() -> list[str]:
        assert watched.found("truncate orders") == {}
        lines = [record.args[1] for record in caplog.records if isinstance(record.args, tuple) and record.args]
        caplog.clear()
        return [str(name) for name in lines if "orders" in str(name)]

    assert [told() for _ in range(3)] == [["public.orders"], [], []]
    monkeypatch.setattr(catalog_watch, "_TELL_SECONDS", 0.0)
    assert told() == ["public.orders"]


def _again(name: str) -> str:
    return f"headwater load PIPELINE.yaml --table {name} --again"


@pytest.mark.parametrize(
    ("statements", "name", "reason", "remedy"),
    [
        (["drop table orders"], "orders", "was dropped at the source", "take public.orders out of the pipeline file"),
        (
            ["drop table orders", "create table orders (id int primary key, n int)"],
            "orders",
            "dropped and created again",
            _again("public.orders"),
        ),
        (["alter table orders rename to sold"], "orders", "renamed to public.sold", "name public.sold in the pipeline"),
        (["alter table events rename to happened"], "events", "renamed to public.happened", "name public.happened"),
        (
            ["alter table orders rename to old", "create table orders (id int primary key, n int)"],
            "orders",
            "another relation has its name now",
            _again("public.orders"),
        ),
        (["alter schema public rename to shop"], "quiet", "renamed to shop.quiet", "name shop.quiet in the pipeline"),
        (
            [f"alter publication {PUBLICATION} drop table only events"],
            "events",
            "not in the publication headwater_shop any more",
            _again("public.events"),
        ),
        (
            [
                f"alter publication {PUBLICATION} drop table only orders",
                f"alter publication {PUBLICATION} add table only orders",
            ],
            "orders",
            "left the publication headwater_shop and came back",
            _again("public.orders"),
        ),
        (
            [f"alter publication {PUBLICATION} set (publish = 'insert')"],
            "quiet",
            "publishes insert",
            f"ALTER PUBLICATION {PUBLICATION} SET (publish = ",
        ),
        (["alter table events_1 set unlogged"], "events", "UNLOGGED", "ALTER TABLE public.events_1 SET LOGGED; then"),
        (
            [
                "alter table orders add other int not null unique",
                "alter table orders replica identity using index orders_other_key",
            ],
            "orders",
            "replica identity does not carry the key",
            "ALTER TABLE public.orders REPLICA IDENTITY DEFAULT; then",
        ),
        (
            ["alter table orders replica identity full", "alter table orders drop constraint orders_pkey"],
            "orders",
            "nothing guarantees its key any more",
            "headwater load PIPELINE.yaml --table public.orders --again",
        ),
    ],
)
def test_what_the_log_does_not_tell_is_found_in_the_catalog(
    watched: Watched, statements: list[str], name: str, reason: str, remedy: str
) -> None:
    with watched.database.superuser() as connection:
        connection.execute(f"alter publication {PUBLICATION} owner to {watched.database.owner_role}")
    found = watched.found(*statements)
    assert reason in found[f"public.{name}"][0]
    assert remedy in found[f"public.{name}"][1]
    wide = reason == "publishes insert" or name == "quiet"
    assert set(found) == (set(TABLES) if wide else {f"public.{name}"})
    # Once is enough, also when it looks again.
    watched.connection.execute(f"drop publication {PUBLICATION}_inserts")
    assert watched.found() == {}


@pytest.mark.parametrize(
    ("statements", "name"),
    [
        (["alter table orders drop constraint orders_pkey"], "orders"),
        (["alter table orders replica identity nothing"], "orders"),
        (["alter table orders drop column id"], "orders"),
        (["alter table orders rename to sold", "alter table sold drop constraint orders_pkey"], "orders"),
        (["alter table events drop constraint events_pkey"], "events"),
        (["alter table events_1 replica identity nothing"], "events"),
    ],
)
def test_a_table_whose_key_is_gone_leaves_the_publication_and_its_writers_go_on(
    watched: Watched, statements: list[str], name: str
) -> None:
    now = "sold" if "sold" in statements[0] else name
    insert = f"insert into {now} (n) values (1)" if "drop column" in statements[0] else f"insert into {now} values (1)"
    watched.database.execute(*statements, insert)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        watched.database.execute(f"update {now} set n = 2")
    found = watched.found()
    assert set(found) == {f"public.{name}"}
    assert watched.published == set(TABLES) - {f"public.{name}"}
    watched.database.execute(f"update {now} set n = 2", f"delete from {now}")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_new_partition_without_an_identity_is_found_before_it_has_a_row(watched: Watched, is_known: bool) -> None:
    create = "create table events_2 partition of events for values from (100) to (200)"
    if is_known:
        assert watched.found(create) == {}
    watched.database.execute(*([] if is_known else [create]), "alter table events_2 replica identity nothing")
    [(reason, remedy)] = watched.found().values()
    assert "the key of public.events_2 was dropped" in reason
    assert "ALTER TABLE public.events_2 REPLICA IDENTITY DEFAULT" in remedy
    assert "public.events" not in watched.published


def test_a_key_that_may_be_null_from_now_on_is_found(watched: Watched) -> None:
    assert (
        watched.found(
            "alter table orders add constraint other unique (id)",
            "alter table orders replica identity full",
            "alter table orders drop constraint orders_pkey",
            "alter table orders alter id set not null",
        )
        == {}
    )
    [(reason, _)] = watched.found("alter table orders alter id drop not null").values()
    assert "nothing guarantees its key any more" in reason


def test_the_remedy_names_the_statement_that_gives_the_key_back(watched: Watched) -> None:
    [(reason, remedy)] = watched.found("alter table orders drop constraint orders_pkey").values()
    assert "taken out of the publication" in reason
    assert "ALTER TABLE public.orders ADD PRIMARY KEY (id)" in remedy
    assert remedy.endswith(f"then {_again('public.orders')}")


@pytest.mark.parametrize("state", ["suspended", "removed"])
def test_a_table_that_is_not_replicated_any_more_leaves_the_publication_as_well(watched: Watched, state: State) -> None:
    watched.suspend("public.orders", state)
    assert watched.found("alter table orders drop constraint orders_pkey") == {}
    assert "public.orders" not in watched.published


@pytest.mark.parametrize("watched", [False], indirect=True)
def test_a_publication_of_somebody_else_is_left_alone_with_an_alarm_and_the_exact_statement(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    statement = f"ALTER PUBLICATION {PUBLICATION} DROP TABLE ONLY public.orders"
    [(reason, remedy)] = watched.found("alter table orders drop constraint orders_pkey").values()
    assert statement in reason
    assert statement in remedy
    assert "public.orders" in watched.published
    watched.found("alter table quiet rename to loud")  # looks again: the alarm is not repeated at once
    alarms = [record for record in caplog.records if record.levelname == "ERROR" and statement in record.getMessage()]
    assert len(alarms) == 1
    watched.database.execute(statement)
    watched.database.execute("update orders set n = 1")


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("alter type mood rename value 'sad' to 'blue'", "the label 'sad' is 'blue' now"),
        ("alter type pair add attribute c int", "a composite type has other attributes"),
        ("alter type inner_pair drop attribute at", "a composite type has other attributes"),
    ],
)
def test_a_type_whose_stored_values_look_different_is_found_however_deep_it_is(
    watched: Watched, statement: str, reason: str
) -> None:
    before = watched.database.query('select \'(1,"{""(sad,2026-01-01)""}")\'::pair::text')
    watched.database.execute("insert into quiet values (1, 1, row(1, array[row('sad', '2026-01-01')::inner_pair]))")
    assert watched.database.query("select p::text from quiet") == before
    [(name, (message, remedy))] = watched.found(statement).items()
    assert watched.database.query("select p::text from quiet") != before
    assert (name, remedy) == ("public.quiet", "headwater verify PIPELINE.yaml --table public.quiet --repair")
    assert reason in message


def test_what_changes_no_stored_text_suspends_nothing_and_a_new_label_is_known_from_then_on(watched: Watched) -> None:
    watched.database.execute("insert into quiet values (1, 1, row(1, array[row('sad', '2026-01-01')::inner_pair]))")
    before = watched.database.query("select p::text from quiet")
    nothing = ["alter type mood add value 'odd' before 'sad'", "alter type pair rename attribute a to z"]
    assert watched.found(*nothing) == {}
    assert watched.database.query("select p::text from quiet") == before
    [(name, meanings)] = watched.watch.learned().items()
    assert name == "public.quiet"
    assert {"glad", "sad", "odd"} <= {value for _, value in meanings}
    assert "public.quiet" in watched.found("alter type mood rename value 'odd' to 'strange'")


def test_new_files_are_told_of_once_and_suspend_nothing(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert watched.found("vacuum full orders") == {}
    assert watched.found("alter table quiet add more int") == {}  # looks again
    told = [record.getMessage() for record in caplog.records if "has new files" in record.getMessage()]
    assert [message.split(":")[0] for message in told] == ["public.orders"]


def _rewritten(watched: Watched, *statements: str) -> set[str]:
    """The tables that are found behind statements of which the last one writes `orders` anew, and says so."""
    watched.database.execute(*statements)
    watched.watch.look_behind(_told_of_orders(watched), [], watched.connection)
    return _anew(watched)


def _told_of_orders(watched: Watched) -> Ddl:
    [(relation,)] = watched.database.query("select 'orders'::regclass::oid::int8")
    return Ddl(frozenset({relation}))


def _anew(watched: Watched) -> set[str]:
    """The tables that looks since the last call have found to be written anew."""
    return {name for name, error in watched.watch.take() if "rewritten by ALTER TABLE" in error.message}


def _anew_after_a_look(watched: Watched) -> set[str]:
    watched.watch.poll(watched.connection)
    return _anew(watched)


def _register(watched: Watched, *, files: bool = True, columns: bool = True) -> None:
    """What the catalog shows of `orders` now is registered; its files or its columns only, if told."""
    record = watched.records["public.orders"]
    now = next(table.schema for table in watched.catalog().tables if str(table.name) == "public.orders")
    schema = replace(now if columns else record.schema, leaves=(now if files else record.schema).leaves)
    watched.records["public.orders"] = replace(record, schemas=((0, schema),))


@pytest.mark.parametrize(
    "statements",
    [
        ["alter table orders alter n type int using n * 10"],
        ["alter table orders add gone int", "alter table orders drop gone, alter n type int using n * 10"],
        ["alter table orders rename n to m", "alter table orders alter m type int using m * 10"],
        ["alter table orders alter n type int using n * 10", "alter table orders add five int default 5"],
    ],
    ids=["alone", "beside a drop", "beside a rename", "beside a new column"],
)
def test_values_that_were_rewritten_are_found_whatever_else_has_happened(
    watched: Watched, statements: list[str]
) -> None:
    assert _rewritten(watched, *statements) == {"public.orders"}


def test_a_rewrite_that_the_log_tells_more_of_is_left_to_it_and_then_forgotten(watched: Watched) -> None:
    assert _rewritten(watched, "alter table orders alter n type bigint") == set()
    _register(watched)
    assert watched.found("truncate orders") == {}
    assert watched.found("vacuum full orders") == {}


def test_a_rewrite_that_was_not_what_the_log_told_of_is_found_when_its_columns_were_followed(watched: Watched) -> None:
    assert _rewritten(watched, "alter table orders alter n type bigint") == set()
    _register(watched, files=False)
    assert _anew_after_a_look(watched) == {"public.orders"}


def test_a_column_that_the_log_may_never_bring_excuses_its_own_rewrite_and_no_later_one(watched: Watched) -> None:
    # Looks come every second: also between the DDL and what the log says of it.
    assert watched.found("alter table orders add twice bigint generated always as (id * 2) stored") == {}
    assert _rewritten(watched) == set()
    assert _rewritten(watched, "alter table orders alter n type int using n * 10") == {"public.orders"}


def test_of_two_rewrites_the_second_is_found_when_only_the_first_was_compared(watched: Watched) -> None:
    watched.database.execute("alter table orders alter n type int using n * 10")
    first = next(table.schema for table in watched.catalog().tables if str(table.name) == "public.orders")
    assert _rewritten(watched, "alter table orders alter n type int using n * 10") == {"public.orders"}
    record = watched.records["public.orders"]
    watched.records["public.orders"] = replace(record, incarnation=record.incarnation + 1, schemas=((0, first),))
    assert _anew_after_a_look(watched) == {"public.orders"}


@pytest.mark.parametrize("again", [False, True])
def test_a_rewrite_that_is_told_of_while_a_load_ends_is_found_when_its_record_is_there(
    watched: Watched, again: bool
) -> None:
    before = watched.records["public.orders"]
    if again:
        watched.database.execute("vacuum full orders")
        loaded = next(table.schema for table in watched.catalog().tables if str(table.name) == "public.orders")
    else:
        loaded = before.schema
    loading = before.entered("loading")
    watched.records["public.orders"] = loading if again else replace(loading, schemas=())
    assert _rewritten(watched, "alter table orders alter n type int using n * 10") == set()
    watched.records["public.orders"] = replace(loading.entered("catching up"), schemas=((0, loaded),))
    assert _anew_after_a_look(watched) == {"public.orders"}


def _rewriting(watched: Watched, connection: psycopg.Connection[Any]) -> int:
    """The id (32 bit) of an open transaction that writes `orders` anew."""
    connection.execute("alter table orders alter n type int using n * 10")
    row = connection.execute("select pg_current_xact_id()::text::bigint & x'ffffffff'::bigint").fetchone()
    assert row is not None
    return int(row[0])


def test_a_commit_that_the_log_has_before_others_see_it_is_waited_for(watched: Watched) -> None:
    asks = f"select 1 from pg_stat_activity where pid = {watched.connection.info.backend_pid} and query ~ 'snapshot'"
    with (
        watched.database.superuser() as observer,
        watched.database.connect(autocommit=False) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        xid = _rewriting(watched, other)
        look = pool.submit(watched.watch.look_behind, _told_of_orders(watched), [xid], watched.connection)
        until(lambda: observer.execute(asks.encode()).fetchall() != [], "the watch waits")
        other.commit()
        look.result()
    assert _anew(watched) == {"public.orders"}


def test_a_commit_that_stays_invisible_for_long_is_judged_by_a_later_look(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_watch, "VISIBLE_SECONDS", 0)
    with watched.database.connect(autocommit=False) as other:
        xid = _rewriting(watched, other)
        watched.watch.look_behind(_told_of_orders(watched), [xid], watched.connection)
        assert _anew_after_a_look(watched) == set()
        other.commit()
    assert _anew_after_a_look(watched) == {"public.orders"}


@pytest.mark.parametrize("watched", [True, False], indirect=True)
def test_a_table_that_left_and_came_back_before_the_first_look_is_found_whoever_made_the_publication(
    watched: Watched, tmp_path: Path
) -> None:
    with watched.database.superuser() as connection:
        for change in ("drop", "add"):
            connection.execute(f"alter publication {PUBLICATION} {change} table only orders, only events")
    # A watch of its own: no driver has looked since the table was loaded.
    watched.watch = CatalogWatch(write_pipeline(tmp_path, watched.database, *TABLES), lambda: watched.records)
    found = watched.found()
    assert set(found) == {"public.orders", "public.events"}
    for name, (reason, remedy) in found.items():
        assert "left the publication headwater_shop and came back" in reason
        assert remedy == _again(name)


def test_a_table_whose_lock_is_not_to_be_had_is_taken_out_by_a_later_look(watched: Watched) -> None:
    watched.database.execute("alter table orders drop constraint orders_pkey")
    with watched.database.connect(autocommit=False) as other:
        other.execute("lock table orders in share update exclusive mode")
        assert set(watched.found()) == {"public.orders"}
        assert "public.orders" in watched.published
    watched.found()
    assert "public.orders" not in watched.published


def test_new_columns_partitions_and_indexes_are_not_the_watchs_business(watched: Watched) -> None:
    assert (
        watched.found(
            "alter table orders add column extra int",
            "alter table orders rename column id to number",
            "create index on orders (n)",
            "create table events_2 partition of events for values from (100) to (200)",
            "alter table events detach partition events_1",
            "reindex table quiet",
            "alter table quiet drop constraint quiet_pkey, add primary key (id)",
            "vacuum full quiet",
            "analyze",
        )
        == {}
    )


# Attached partitions

MAKE = "create table events_2 (id int primary key, n int)"
FILL = "insert into events_2 select i, i from generate_series(100, 150) i"
ATTACH = "alter table events attach partition events_2 for values from (100) to (200)"
CREATE = "create table events_2 partition of events for values from (100) to (200)"


def _attached(watched: Watched, *transactions: str) -> dict[str, list[str]]:
    """The partitions that one look finds behind these, each with statements of its own; no log is read."""
    assert watched.found(*transactions) == {}
    return {table: [leaf.name for leaf in leaves] for table, leaves in watched.watch.attached().items()}


@pytest.mark.parametrize(
    ("transactions", "brought"),
    [
        ([MAKE, FILL, ATTACH], True),
        ([MAKE, FILL, f"{ATTACH}; insert into events values (160, 1)"], True),
        ([f"{MAKE}; {FILL}; {ATTACH}; insert into events values (160, 1)"], True),
        ([CREATE, FILL], False),
        ([f"{CREATE}; {FILL}"], False),
        ([CREATE], False),
        # The log brings all that comes to it, and judges it.
        ([MAKE, ATTACH], False),
        ([f"{MAKE}; {ATTACH}; {FILL}"], False),
        ([f"{MAKE}; {ATTACH}", FILL, "update events set n = 0"], False),
        ([f"{MAKE}; {FILL}; truncate events_2; {ATTACH}", "insert into events values (160, 1)"], False),
        ([MAKE, FILL, "create table old partition of events for values from (300) to (400)", ATTACH], True),
    ],
)
def test_a_partition_that_brought_rows_is_found_without_a_change_of_it(
    watched: Watched, transactions: list[str], brought: bool
) -> None:
    expected = {"public.events": ["events_2"]} if brought else {}
    assert _attached(watched, *transactions) == expected
    assert _attached(watched, "truncate orders") == expected, "until it is known"


def test_what_brought_nothing_is_judged_once_by_who_attached_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = []
    brought_rows = partitions._Came.brought_rows

    def counted(came: Any, *asked: Any, **how: Any) -> bool:
        judged.append(came.leaf.name)
        return brought_rows(came, *asked, **how)

    monkeypatch.setattr(partitions._Came, "brought_rows", counted)
    assert _attached(watched, f"{MAKE}; {ATTACH}", FILL) == {}
    assert _attached(watched, "truncate orders") == {}
    assert judged == ["events_2"]
    out_of_sight = ["alter table events detach partition events_2", "insert into events_2 values (170, 1)"]
    assert _attached(watched, *out_of_sight, ATTACH) == {"public.events": ["events_2"]}


def test_a_partition_that_is_locked_is_judged_later(watched: Watched) -> None:
    watched.database.execute(f"{MAKE}; {ATTACH}", FILL)
    with watched.database.connect(autocommit=False) as other:
        other.execute("lock table events_2 in access exclusive mode")
        assert _attached(watched) == {}
    assert _attached(watched) == {}
    watched.database.execute(
        "create table events_3 (id int primary key, n int)", "insert into events_3 values (200, 1)"
    )
    watched.database.execute("alter table events attach partition events_3 for values from (200) to (300)")
    with watched.database.connect(autocommit=False) as other:
        other.execute("lock table events_3 in access exclusive mode")
        assert _attached(watched) == {}
    assert _attached(watched) == {"public.events": ["events_3"]}


@pytest.mark.parametrize("state", ["loading", "catching up", "suspended"])
def test_a_table_that_is_out_of_step_is_judged_when_it_is_in_step_again(watched: Watched, state: State) -> None:
    watched.suspend("public.events", state)
    assert _attached(watched, MAKE, FILL, ATTACH) == {}
    watched.suspend("public.events", "active")
    assert _attached(watched) == {"public.events": ["events_2"]}


# The driver


HEALTHY, KEYLESS, UNPUBLISHED, RECREATED = "public.healthy", "public.keyless", "public.unpublished", "public.recreated"
HARMED = (KEYLESS, UNPUBLISHED, RECREATED)


@dataclass(frozen=True)
class Shop(Outcome):
    """What the driver made of the harm, as it stood when it ended: tests run in any order."""

    keyless: Rows
    published: frozenset[TableName]


@pytest.fixture(scope="module")
def shop(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """Loaded, and harmed while replicate runs; nothing is written to the harmed tables before they are suspended."""
    database = shared_database
    for name in (HEALTHY, *HARMED):
        database.execute(
            f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1), (2, 2)"
        )
    pipeline = loaded_pipeline(tmp_path_factory.mktemp("watch"), database, HEALTHY, *HARMED)
    with following(pipeline) as running:

        def states() -> set[str]:
            assert not running.done(), running.exception() or running.result()
            return {registry_of(pipeline).record(name).state for name in HARMED}

        until(lambda: states() == {"active"}, "the driver follows the log")
        database.execute(
            "alter table keyless drop constraint keyless_pkey",
            "drop table recreated",
            "create table recreated (id int primary key, n int)",
        )
        with database.superuser() as connection:
            connection.execute(f"alter publication {PUBLICATION} drop table unpublished")
        until(lambda: states() == {"suspended"}, "the harmed tables are suspended", 30)
        database.execute("update keyless set n = 5", "update healthy set n = 5", "update unpublished set n = 5")
        _, expected = source_rows(database, HEALTHY)
        until(lambda: states() and lake_rows(pipeline, HEALTHY) == expected, "the other table goes on")
    with connect(database.conninfo) as connection:
        published = published_tables(connection, PUBLICATION)
    records = dict(registry_of(pipeline).tables)
    return Shop(database, pipeline, running.result(), records, lake_rows(pipeline, KEYLESS), published)


@pytest.mark.spark
def test_tables_that_fall_silent_are_suspended_while_the_driver_goes_on(shop: Shop) -> None:
    assert states_of(shop.result) == {HEALTHY: "active", **dict.fromkeys(HARMED, "suspended")}
    assert shop.result["stopped_by"] == "signal"
    for name, reason in ((KEYLESS, "taken out of the publication"), (UNPUBLISHED, "not in the publication")):
        assert reason in shop.records[name].reason
        assert _again(name) in shop.records[name].remedy
    assert shop.keyless == [(1, 1), (2, 2)]
    assert shop.published == {TableName.parse(HEALTHY)}


@pytest.mark.spark
def test_the_remedies_cure_and_a_table_that_fell_silent_without_a_driver_is_never_active(shop: Shop) -> None:
    shop.database.execute("alter table keyless add primary key (id)", "insert into recreated values (7, 7)")
    load_tables(shop.pipeline, *HARMED, again=True)
    with shop.database.superuser() as connection:
        connection.execute(f"alter publication {PUBLICATION} drop table unpublished")
    shop.database.execute("update keyless set n = 6", "insert into recreated values (8, 8)")
    states = states_of(catch_up(shop.pipeline))
    assert states == {HEALTHY: "active", KEYLESS: "active", RECREATED: "active", UNPUBLISHED: "suspended"}
    assert_equal(shop.database, shop.pipeline, HEALTHY, KEYLESS, RECREATED)


@pytest.mark.spark
@pytest.mark.parametrize("happens", ["drop constraint moved_pkey", "drop id"])
def test_a_key_that_moved_to_another_column_is_chosen_by_the_load_that_the_remedy_names(
    database: Database, spark: SparkSession, tmp_path: Path, happens: str
) -> None:
    database.allow_publishing()
    database.execute(
        "create table moved (id int primary key, u int not null unique, note text)",
        "insert into moved select i, i, 'x' from generate_series(1, 5) i",
    )
    pipeline = loaded_pipeline(tmp_path, database, "public.moved")
    database.execute(f"begin; alter table moved {happens}; alter table moved add primary key (u); commit")
    catch_up(pipeline)
    record = registry_of(pipeline).tables["public.moved"]
    assert (record.state, record.remedy) == ("suspended", _again("public.moved"))
    load_tables(pipeline, "public.moved", again=True)
    database.execute("update moved set note = 'y' where u = 3", "delete from moved where u = 4")
    catch_up(pipeline)
    record = registry_of(pipeline).tables["public.moved"]
    assert (record.state, record.schema.key) == ("active", ("u",))
    assert_equal(database, pipeline, "public.moved")


@pytest.mark.spark
@pytest.mark.parametrize("rests", [False, True])
def test_a_column_that_was_dropped_and_added_again_is_in_no_cut_with_the_values_of_before(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rests: bool
) -> None:
    """Its description is the same as before. The catalog is looked at because it comes once more, or for the first time
    where the table `rests` when the driver begins: no other look does, here, and no event trigger tells of the DDL."""
    database.allow_publishing()
    database.execute("create table t (id int primary key, n int)", "insert into t values (1, 1), (2, 2)")
    pipeline = loaded_pipeline(tmp_path, database, "public.t")
    looks = _only_the_first_look(monkeypatch)
    with following(pipeline) as running:
        until(lambda: bool(looks) or running.done(), "the driver has begun")
        if not rests:
            database.execute("update t set n = n + 10")
            until(lambda: lake_rows(pipeline, "public.t") == [(1, 11), (2, 12)] or running.done(), "the driver follows")
        before = lake_rows(pipeline, "public.t")
        database.execute("alter table t drop column n, add column n int", "update t set n = 7 where id = 1")
        until(lambda: registry_of(pipeline).record("public.t").state == "suspended" or running.done(), "it is found")
    assert len(looks) > 1
    assert "dropped and added again" in registry_of(pipeline).record("public.t").reason
    assert lake_rows(pipeline, "public.t") == before, "nothing of a row behind it was applied"


@pytest.mark.spark
def test_columns_of_a_partitioned_table_that_swapped_their_names_are_in_no_cut_with_the_values_of_before(
    database: Database, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description of its partition is as before but for the order, which each partition has for itself."""
    database.allow_publishing()
    database.execute(
        "create table t (id int primary key, n int, m int) partition by range (id)",
        "create table t_1 partition of t for values from (0) to (100)",
        "insert into t values (1, 1, -1)",
    )
    pipeline = loaded_pipeline(tmp_path, database, "public.t")
    looks = _only_the_first_look(monkeypatch)
    with following(pipeline) as running:
        database.execute("update t set n = 11")
        until(lambda: lake_rows(pipeline, "public.t", ["n"]) == [(11,)] or running.done(), "the driver follows")
        database.execute(
            "alter table t rename n to x; alter table t rename m to n; alter table t rename x to m; "
            "insert into t values (2, 2, -2)"
        )
        until(lambda: registry_of(pipeline).record("public.t").state == "suspended" or running.done(), "it is found")
    assert len(looks) > 1
    assert "took the name of another one" in registry_of(pipeline).record("public.t").reason
    assert lake_rows(pipeline, "public.t", ["id", "n", "m"]) == [(1, 11, -1)], "nothing of a row behind it was applied"


def _only_the_first_look(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """No look of the watch's own but the first one; those that were to be."""
    first = CatalogWatch.look
    looks: list[Connection] = []

    def once(self: CatalogWatch, connection: Connection) -> None:
        if not looks:
            first(self, connection)
        looks.append(connection)

    monkeypatch.setattr(CatalogWatch, "look", once)
    return looks


def test_a_label_that_was_renamed_while_no_driver_ran_suspends_its_table_before_anything_says_it_is_in_step(
    database: Database, spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    database.allow_publishing()
    database.execute(
        "create type mood as enum ('glad', 'sad')",
        "create table felt (id int primary key, m mood)",
        "insert into felt values (1, 'glad'), (2, 'sad')",
    )
    pipeline = loaded_pipeline(tmp_path, database, "public.felt")
    database.execute("alter type mood add value 'odd'", "insert into felt values (3, 'odd')")
    assert states_of(catch_up(pipeline)) == {"public.felt": "active"}
    database.execute("alter type mood rename value 'odd' to 'strange'", "insert into felt values (4, 'strange')")
    assert states_of(catch_up(pipeline)) == {"public.felt": "suspended"}
    assert "the label 'odd' is 'strange' now" in registry_of(pipeline).tables["public.felt"].reason
    assert main(["replicate", pipeline.file, "--until", "now"]) == EXIT_SUSPENDED
    said = capfd.readouterr().err
    assert "public.felt is suspended: values in its rows look different now" in said
    assert f"What to do: headwater verify {pipeline.file} --table public.felt --repair" in said
    found = verify(pipeline, [TableName.parse("public.felt")], repair=True)["tables"]["public.felt"]
    assert (found["different"], found["missing"]) == (1, 1)
    assert states_of(catch_up(pipeline)) == {"public.felt": "active"}
    assert_equal(database, pipeline, "public.felt")
    database.execute("drop table felt", "create table felt (id int primary key, m mood)")
    shown = status(pipeline)["tables"]["public.felt"]  # no driver has noticed it
    assert (shown["state"], bool(shown["since"])) == ("suspended", True)
