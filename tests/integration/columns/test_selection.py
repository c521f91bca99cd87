"""Columns and rows that stay at the source: in load, log, verify and reads alike, and nowhere in the lake."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import headwater
from fixtures.jobs import (
    catch_up,
    contents,
    following,
    lake_path_of,
    lake_rows,
    load_tables,
    record_of,
    source_rows,
    states_of,
)
from fixtures.loaded import loaded_pipeline, pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.columns.changes import COLUMNS_CHANGED
from headwater.errors import Refused
from headwater.gate.check import check
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import BadPipelineFile, Pipeline
from headwater.reload.reload import reload
from headwater.source.connection import connect
from headwater.source.publication.publication import ensure_publications
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.postgres

PEOPLE, CALLS, PLAIN = "public.people", "public.calls", "public.plain"
SECRET = "kept-at-the-source"
PART: dict[str, Any] = {"name": PEOPLE, "columns": {"exclude": ["secret"]}, "where": "region = 'eu'"}
FILTERED = {"name": CALLS, "insert_only": True, "where": "length(note) < 5", "columns": {"exclude": ["secret"]}}
SOURCE = [
    "create table people (id int, region text, name text, secret text, note text, primary key (id, region))",
    "alter table people alter note set storage external",
    f"insert into people select g, case when g % 3 = 0 then 'us' else 'eu' end, 'name', '{SECRET}' || g, "
    "repeat('n', 3000) from generate_series(1, 30) g",
    "create table calls (at int, note text, secret text)",
    f"insert into calls values (1, 'a', '{SECRET}'), (2, 'too long', '{SECRET}')",
    "create table plain (id int primary key, n int)",
    "insert into plain values (1, 1)",
]
WRITES = [
    f"insert into people values (100, 'eu', 'new', '{SECRET}', 'x'), (101, 'us', 'new', '{SECRET}', 'x')",
    "update people set name = 'changed' where id in (1, 3)",
    "update people set region = 'eu', note = repeat('m', 3000) where id = 6",  # comes into view
    "update people set region = 'us' where id = 2",  # leaves it
    f"update people set secret = '{SECRET} again' where id = 4",
    "update people set id = 500 where id = 5",
    "delete from people where id in (7, 9)",
    f"insert into calls values (3, 'b', '{SECRET}'), (4, 'longer', null)",
    "update plain set n = 2",
]
REGISTERED = "(select id, region, name, note from people where region = 'eu') as people"


def assert_part_equal(database: Database, pipeline: Pipeline) -> None:
    columns, expected = source_rows(database, REGISTERED)
    assert lake_rows(pipeline, PEOPLE, columns) == expected
    columns, expected = source_rows(database, "(select at, note from calls where length(note) < 5) as calls")
    assert lake_rows(pipeline, CALLS, columns) == expected


def assert_secret_is_nowhere(folder: Path, pipeline: Pipeline) -> None:
    files = contents(folder, pipeline.lake_path())
    assert files
    assert [place for place, content in files.items() if SECRET.encode() in content] == []
    for name in (PEOPLE, CALLS):
        assert "secret" not in [column.name for column in DeltaTable(lake_path_of(pipeline, name)).schema().fields]


@pytest.fixture
def source(database: Database) -> Database:
    database.allow_publishing()
    database.execute(*SOURCE)
    return database


def replicated(folder: Path, source: Database, *tables: str | dict[str, Any]) -> Pipeline:
    return pipeline_in_step(folder, source, *tables)


@pytest.fixture
def pipeline(source: Database, tmp_path: Path) -> Pipeline:
    return replicated(tmp_path, source, PART, FILTERED, PLAIN)


def test_what_is_left_out_is_nowhere_and_the_rest_is_exact(
    database: Database, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spilled))
    assert_part_equal(database, pipeline)
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        database.execute(*WRITES)
        headwater.wait(pipeline)
        assert_part_equal(database, pipeline)
        # A transaction in progress goes through files of the reader and the stager.
        with database.connect(autocommit=False) as large:
            large.execute(
                f"insert into people select g, 'eu', 'large', '{SECRET}' || g, repeat('y', 3000) "
                "from generate_series(1000, 20000) g"
            )
            until(lambda: any(spilled.rglob("*.blocks")) or running.done(), "it is spilled")
            assert_secret_is_nowhere(tmp_path, pipeline)
        headwater.wait(pipeline)
        assert_part_equal(database, pipeline)
        for found in verify(pipeline)["tables"].values():
            assert (found["missing"], found["extra"], found["different"], found["unsettled"]) == (0, 0, 0, 0)
        reloaded = reload(pipeline, TableName.parse(PEOPLE))
        assert reloaded["tables"][PEOPLE]["state"] in ("active", "catching up")
        assert_part_equal(database, pipeline)
    assert_secret_is_nowhere(tmp_path, pipeline)


def test_a_repair_keeps_to_the_part(database: Database, pipeline: Pipeline) -> None:
    DeltaTable(lake_path_of(pipeline, PEOPLE)).delete("id = 1")
    foreign = pa.table({"id": pa.array([3], pa.int32()), "region": ["us"], "name": ["not ours"]})
    write_deltalake(lake_path_of(pipeline, PEOPLE), foreign, mode="append", schema_mode="merge")
    found = verify(pipeline, [TableName.parse(PEOPLE)], repair=True)["tables"][PEOPLE]
    assert (found["missing"], found["extra"], found["repaired"]) == (1, 1, 2)
    catch_up(pipeline)
    assert_part_equal(database, pipeline)
    assert status(pipeline)["tables"][PEOPLE]["state"] == "active"


@pytest.mark.spark
def test_a_read_at_the_source_keeps_to_the_part(database: Database, pipeline: Pipeline, spark: SparkSession) -> None:
    database.execute("insert into people values (200, 'eu'), (201, 'us')")  # no driver brings it into the lake
    cut = headwater.wait(pipeline, tables=[PEOPLE], timeout=0.1, on_timeout="fallback", require="now")
    rows = headwater.read(spark, cut)[PEOPLE]
    assert sorted(rows.columns) == ["id", "name", "note", "region"]
    assert rows.count() == 21


def test_another_partitioning_is_named_by_check_and_holds_from_the_next_load_on(
    database: Database, pipeline: Pipeline, tmp_path: Path
) -> None:
    cut = headwater.wait(pipeline, tables=[PEOPLE], require="1h", timeout=30)  # no driver reads what comes now
    before = sorted(headwater.scan(cut, PEOPLE).read_all().to_pylist(), key=repr)
    other = write_pipeline(tmp_path, database, {**PART, "partition_by": ["region"]}, FILTERED, PLAIN)
    (warned,) = [p for p in check(other).problems if p.code == "option_waits_for_rebuild"]
    assert (warned.where, warned.is_error) == (PEOPLE, False)
    assert "partition_by" in warned.message
    database.execute("insert into people values (200, 'eu', 'n', null, null)")
    catch_up(other)
    assert DeltaTable(lake_path_of(other, PEOPLE)).metadata().partition_columns == []
    load_tables(other, PEOPLE, again=True)
    database.execute("update people set name = 'later' where id = 200")
    catch_up(other)
    assert DeltaTable(lake_path_of(other, PEOPLE)).metadata().partition_columns == ["region"]
    assert_part_equal(database, other)
    assert sorted(headwater.scan(cut, PEOPLE).read_all().to_pylist(), key=repr) == before
    assert not [p for p in check(other).problems if p.code == "option_waits_for_rebuild"]


def test_another_selection_holds_from_the_next_load_on(database: Database, pipeline: Pipeline, tmp_path: Path) -> None:
    other = write_pipeline(tmp_path, database, {**PART, "where": "region <> 'eu'"}, FILTERED, PLAIN)
    (warned,) = [p for p in check(other).problems if p.code == "option_waits_for_load"]
    assert (warned.where, warned.is_error) == (PEOPLE, False)
    database.execute("insert into people values (200, 'us', 'n', null, null), (201, 'eu', 'n', null, null)")
    catch_up(other)
    assert_part_equal(database, other)
    load_tables(other, PEOPLE, again=True)
    database.execute("insert into people values (202, 'us', 'n', null, null), (203, 'eu', 'n', null, null)")
    catch_up(other)
    columns, expected = source_rows(database, REGISTERED.replace("= 'eu'", "<> 'eu'"))
    assert lake_rows(other, PEOPLE, columns) == expected
    whole = write_pipeline(tmp_path, database, PEOPLE, FILTERED, PLAIN)
    load_tables(whole, PEOPLE, again=True)
    database.execute("update people set secret = 'told' where id = 10")
    catch_up(whole)
    columns, expected = source_rows(database, "people")
    assert "secret" in columns
    assert lake_rows(whole, PEOPLE, columns) == expected


@pytest.mark.parametrize(("batches", "marked"), [(1, False), (1, True), (3, True)])
def test_a_row_that_left_and_came_back_has_no_value_of_before(
    source: Database, tmp_path: Path, batches: int, marked: bool
) -> None:
    shown = replicated(tmp_path, source, {"name": PEOPLE, "where": "region = 'eu'", "soft_delete": marked})
    for statement in (
        "update people set region = 'us' where id = 1",
        "update people set note = repeat('unseen', 1000) where id = 1",
        "update people set region = 'eu' where id = 1",
    ):
        source.execute(statement)
        if batches > 1:
            catch_up(shown)
    catch_up(shown)
    assert "values that the log does not carry" in record_of(shown, PEOPLE).reason
    load_tables(shown, PEOPLE, again=True)
    catch_up(shown)
    columns, expected = source_rows(source, "(select * from people where region = 'eu') as people")
    assert lake_rows(shown, PEOPLE, columns) == expected


def test_a_table_that_is_no_longer_insert_only_leaves_the_other_publication(
    database: Database, pipeline: Pipeline, tmp_path: Path
) -> None:
    database.execute("alter table calls add primary key (at)", "alter table calls replica identity default")
    other = write_pipeline(tmp_path, database, PART, {"name": CALLS, "where": "at < 10"}, PLAIN)
    load_tables(other, CALLS, again=True)
    database.execute("insert into calls values (5, 'in view'), (50, 'out of view')", "delete from calls where at = 1")
    catch_up(other)
    columns, expected = source_rows(database, "(select * from calls where at < 10) as calls")
    assert lake_rows(other, CALLS, columns) == expected


def test_a_selected_table_that_leaves_the_file_holds_nothing_up(
    database: Database, pipeline: Pipeline, tmp_path: Path
) -> None:
    rest = write_pipeline(tmp_path, database, PLAIN)
    assert check(rest).ok
    load_tables(rest, PLAIN, again=True)
    catch_up(rest)
    assert record_of(rest, PEOPLE).state == "removed"


def test_a_filter_follows_the_names_of_its_columns(database: Database, pipeline: Pipeline, tmp_path: Path) -> None:
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        database.execute("alter table people rename region to area", "update people set name = 'n' where id = 1")
        headwater.wait(pipeline)
    assert verify(pipeline, [TableName.parse(PEOPLE)])["tables"][PEOPLE]["different"] == 0
    assert "area" in record_of(pipeline, PEOPLE).schema.row_filter


def test_until_its_next_load_a_table_keeps_the_selection_that_it_was_loaded_with(
    database: Database, pipeline: Pipeline, tmp_path: Path
) -> None:
    other = write_pipeline(tmp_path, database, {**PART, "columns": {"exclude": ["secret", "note"]}}, FILTERED, PLAIN)
    database.execute("alter table people add more int", "alter table people drop secret")
    found = verify(other, [TableName.parse(PEOPLE)])["tables"][PEOPLE]
    assert (found["compared"], found["reason"]) == (False, COLUMNS_CHANGED)
    database.execute("alter table people drop more", "update people set name = 'x' where id = 1")
    catch_up(other)
    assert verify(other, [TableName.parse(PEOPLE)])["tables"][PEOPLE]["compared"]
    assert [p.code for p in check(other).problems if p.is_error] == ["unknown_column"]


@pytest.mark.parametrize("full", [False, True])
def test_a_row_that_comes_into_view_without_all_of_its_values_is_never_guessed(
    source: Database, tmp_path: Path, full: bool
) -> None:
    """The server makes an INSERT of such an UPDATE, and leaves out what it leaves out of every UPDATE."""
    if full:
        source.execute("alter table people replica identity full")
    shown = replicated(tmp_path, source, {"name": PEOPLE, "where": "region = 'eu'"}, PLAIN)
    source.execute("update people set region = 'eu' where id = 6", "update plain set n = 3")
    catch_up(shown)
    assert record_of(shown, PLAIN).state == "active"
    if not full:
        assert "values that the log does not carry" in record_of(shown, PEOPLE).reason
        load_tables(shown, PEOPLE, again=True)
        catch_up(shown)
    assert record_of(shown, PEOPLE).state == "active"
    columns, expected = source_rows(source, "(select * from people where region = 'eu') as people")
    assert lake_rows(shown, PEOPLE, columns) == expected


BEHIND_OUR_BACK = {
    "all columns": (["alter publication headwater_shop set table only people, only plain"], "left the publication"),
    "another filter": (
        ["alter publication headwater_shop set table only people (id, region, name, note) where (id > 3), only plain"],
        "left the publication",
    ),
    "a new column": (
        ["alter table people add more text default 'm'"],
        "more was added, which its column list does not",
    ),
}


@pytest.mark.parametrize("case", BEHIND_OUR_BACK)
def test_what_the_source_changes_about_the_selection_suspends_that_table_alone(
    database: Database, pipeline: Pipeline, case: str
) -> None:
    statements, reason = BEHIND_OUR_BACK[case]
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        with database.superuser() as superuser:
            for statement in statements:
                superuser.execute(statement)
        until(lambda: record_of(pipeline, PEOPLE).state == "suspended" or running.done(), "it is noticed")
        assert reason in record_of(pipeline, PEOPLE).reason
        database.execute("update plain set n = 3")
        headwater.wait(pipeline, tables=[PLAIN])
    if case == "a new column":
        load_tables(pipeline, PEOPLE, again=True)
        database.execute("update people set more = 'told' where id = 1")
        catch_up(pipeline)
        columns, expected = source_rows(database, REGISTERED.replace("note from", "note, more from"))
        assert lake_rows(pipeline, PEOPLE, columns) == expected
    else:
        load_tables(pipeline, PEOPLE, again=True)
        database.execute(f"insert into people values (300, 'eu', 'n', '{SECRET}', 'x')")
        catch_up(pipeline)
        assert_part_equal(database, pipeline)


@pytest.mark.parametrize("what", ["a filter", "a column list"])
def test_an_identity_that_no_longer_fits_takes_the_table_out_of_the_publication(
    source: Database, tmp_path: Path, what: str
) -> None:
    if what == "a filter":
        source.execute("alter table people replica identity full")
        pipeline = replicated(tmp_path, source, {"name": PEOPLE, "where": "name <> 'x'"})
        change = "alter table people replica identity default"
    else:
        pipeline = replicated(tmp_path, source, {**PART, "where": "id > 0"})
        change = "alter table people replica identity full"
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        source.execute(change)
        until(lambda: record_of(pipeline, PEOPLE).state == "suspended" or running.done(), "it is noticed")
        assert "taken out of the publication" in record_of(pipeline, PEOPLE).reason
        source.execute("update people set name = 'the source goes on'", "delete from people where id = 1")


def test_a_publication_and_rights_on_columns_that_a_dba_gave_are_enough(database: Database, tmp_path: Path) -> None:
    database.execute(*SOURCE)
    database.grant("plain")
    pipeline = write_pipeline(tmp_path, database, PART, PLAIN)
    (unreadable,) = [problem.remedy for problem in check(pipeline).problems if problem.code == "no_select"]
    columns = "id, region, name, note, ctid, xmin"
    assert unreadable == f"GRANT SELECT ({columns}) ON TABLE public.people TO {database.role}"
    database.execute(unreadable)
    missing = [problem.remedy for problem in check(pipeline).problems if problem.code == "missing_rights"]
    with database.superuser() as superuser:
        for remedy in missing:
            superuser.execute(remedy.removeprefix("a DBA can run: "))
    assert check(pipeline).ok
    load_tables(pipeline)
    database.execute("update people set region = 'us' where id = 2", "update people set name = 'changed' where id = 1")
    catch_up(pipeline)
    shown, expected = source_rows(database, REGISTERED)
    assert lake_rows(pipeline, PEOPLE, shown) == expected
    DeltaTable(lake_path_of(pipeline, PEOPLE)).delete("id = 1")
    assert verify(pipeline, [TableName.parse(PEOPLE)], repair=True)["tables"][PEOPLE]["repaired"] == 1
    assert reload(pipeline, TableName.parse(PEOPLE))["tables"][PEOPLE]["state"] in ("active", "catching up")
    catch_up(pipeline)
    assert lake_rows(pipeline, PEOPLE, shown) == expected
    where = "id between 5 and 9 AND region IN ('eu', 'us')"
    other = write_pipeline(tmp_path, database, {**PART, "where": where}, PLAIN)
    (problem,) = [problem for problem in check(other).problems if problem.is_error]
    assert problem.code == "publication_narrowed"
    with database.superuser() as superuser:
        for statement in problem.remedy.split("; "):
            superuser.execute(statement)
    assert check(other).ok


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "the key": ({"columns": {"exclude": ["id"]}}, [], "excluded_identity"),
    "a typing error": ({"columns": {"exclude": ["secrets"]}}, [], "unknown_column"),
    "replica identity full": (
        {"columns": {"exclude": ["secret"]}},
        ["alter table people replica identity full"],
        "excluded_identity",
    ),
    "no condition": ({"where": "regoin = 'eu'"}, [], "bad_row_filter"),
    "no boolean": ({"where": "id + 1"}, [], "bad_row_filter"),
    "a condition on another column": ({"where": "name = 'x'"}, [], "bad_row_filter"),
    "a query": ({"where": "id in (select n from plain)"}, [], "bad_row_filter"),
    "a condition that the server does not publish": ({"where": "id > random() * 10"}, [], "bad_row_filter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_part_that_cannot_be_published_is_refused_and_nothing_changes(
    database: Database, tmp_path: Path, case: str
) -> None:
    options, statements, code = REFUSED[case]
    database.allow_publishing()
    database.execute(*SOURCE, *statements)
    pipeline = write_pipeline(tmp_path, database, {"name": PEOPLE, **options})
    with pytest.raises(Refused) as refused:
        load_tables(pipeline)
    assert refused.value.code in (code, "check_failed")
    assert database.query("select from pg_publication_rel") == []
    found = [problem.code for problem in check(pipeline).problems if problem.is_error]
    assert code in found
    assert database.query(f"select from pg_replication_slots where slot_name = '{pipeline.source.slot}'") == []
    assert database.query("select from pg_publication") == []
    database.execute("update people set name = 'goes on'")


def test_a_first_load_that_the_server_refuses_to_publish_leaves_no_slot(database: Database, tmp_path: Path) -> None:
    database.allow_publishing()
    database.execute(*SOURCE)
    pipeline = write_pipeline(tmp_path, database, {"name": PEOPLE, "where": "id > random() * 10"})
    with connect(database.conninfo) as connection:
        ensure_publications(connection, pipeline.source.publication, pipeline="shop")
    with database.superuser() as superuser:
        superuser.execute(f"alter database {database.name} owner to current_user")
        superuser.execute(f"revoke create on database {database.name} from {database.role}")
        superuser.execute(f"grant connect, temporary on database {database.name} to {database.owner_role}")
    assert check(pipeline).ok  # only publishing it shows that
    with pytest.raises(Refused) as refused:
        load_tables(pipeline)
    assert refused.value.code == "bad_row_filter"
    assert database.query(f"select from pg_replication_slots where slot_name = '{pipeline.source.slot}'") == []
    assert states_of(load_tables(write_pipeline(tmp_path, database, PEOPLE))) == {PEOPLE: "catching up"}


def test_a_virtual_column_is_none_that_a_column_list_lacks(
    database: Database, spark: SparkSession, tmp_path: Path
) -> None:
    if int(database.query("show server_version_num")[0][0]) < 180000:
        pytest.skip("virtual generated columns came with 18")
    database.allow_publishing()
    database.execute("create table t (id int primary key, n int, secret text)", "insert into t values (1, 1, 's')")
    pipeline = loaded_pipeline(tmp_path, database, {"name": "public.t", "columns": {"exclude": ["secret"]}})
    database.execute(
        "alter table t add double int generated always as (n * 2) virtual", "insert into t values (2, 2, 's')"
    )
    catch_up(pipeline)
    assert record_of(pipeline, "public.t").reason == ""
    assert lake_rows(pipeline, "public.t", ["id", "n"]) == [(1, 1), (2, 2)]
    database.execute("alter table t drop double", "alter table t rename n to m", "insert into t values (3, 3, 's')")
    catch_up(pipeline)
    assert record_of(pipeline, "public.t").reason == ""
    assert lake_rows(pipeline, "public.t", ["id", "m"]) == [(1, 1), (2, 2), (3, 3)]
    database.execute("alter table t add more int")
    catch_up(pipeline)
    assert "more was added, which its column list does not publish" in record_of(pipeline, "public.t").reason


def test_the_partitions_of_a_table_cannot_be_published_in_part(database: Database, tmp_path: Path) -> None:
    database.allow_publishing()
    database.execute(
        "create table parts (id int primary key, secret text) partition by range (id)",
        "create table parts_1 partition of parts for values from (1) to (10)",
    )
    wanted = {"name": "public.parts", "columns": {"exclude": ["secret"]}}
    (problem,) = [p for p in check(write_pipeline(tmp_path, database, wanted)).problems if p.is_error]
    assert problem.code == "part_of_partitioned"
    assert check(write_pipeline(tmp_path, database, {**wanted, "name": "public.parts_1"})).ok


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"where": "true; drop table people"}, r"tables\[0\].where: expected one SQL condition"),
        ({"where": "true -- all"}, r"tables\[0\].where: expected one SQL condition"),
        ({"columns": {"hush": ["name"]}}, r"tables\[0\].columns.hush: unknown key; possible here: exclude, hash, mask"),
        (
            {"columns": {"hash": ["a"], "mask": {"a": "*"}}},
            r"columns.mask: names a column that columns.hash names, too",
        ),
        ({"columns": {"mask": {"a": 5}}}, r"columns.mask.a: expected the text that stands in place of each value"),
        ({"columns": {"hash": ["a"]}, "types": {"a": "string"}}, r"types: names a column that columns.hash names"),
        ({"columns": ["secret"]}, r"tables\[0\].columns: expected a mapping with the keys exclude, hash, mask"),
        ({"name": "public.*", "where": "true"}, "not possible for a pattern"),
        ({"name": "public.*", "columns": {"exclude": ["secret"]}}, "not possible for a pattern"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_place(
    database: Database, tmp_path: Path, options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(BadPipelineFile, match=fault):
        write_pipeline(tmp_path, database, {"name": PEOPLE, **options})
