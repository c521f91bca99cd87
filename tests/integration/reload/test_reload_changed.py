"""`reload --changed`: what the log does not tell is found, compared, and put right; the rest is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from psycopg import errors as pg

from fixtures.jobs import assert_equal, catch_up, following, lake_path_of, lake_rows, load_tables, record_of
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.cli import main
from headwater.errors import EXIT_DONE, EXIT_REFUSED, EXIT_SUSPENDED, Refused
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload
from headwater.verify import verify as verify_module
from headwater.verify.changed import reload_changed
from headwater.verify.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

PLAIN, PARTED, EVENTS, MARKED = "public.plain", "public.parted", "public.events", "public.marked"
SOURCE = [
    "create table plain (id int primary key, n int)",
    "insert into plain select g, g from generate_series(1, 50) g",
    "create table parted (id int, region text, primary key (id, region)) partition by list (region)",
    "create table parted_eu partition of parted for values in ('eu')",
    "create table parted_us partition of parted for values in ('us')",
    "insert into parted select g, case when g % 2 = 0 then 'eu' else 'us' end from generate_series(1, 20) g",
    "create table events (n int)",
    "insert into events select generate_series(1, 9)",
    "create table marked (id int primary key, n int)",
    "insert into marked values (1, 1), (2, 2)",
]


@pytest.fixture
def pipeline(database: Database, spark: SparkSession, tmp_path: Path) -> Pipeline:
    database.allow_publishing()
    database.execute(*SOURCE)
    events, marked = {"name": EVENTS, "insert_only": True}, {"name": MARKED, "soft_delete": True}
    return pipeline_in_step(tmp_path, database, PLAIN, PARTED, events, marked)


def changed(pipeline: Pipeline, *names: str, propose: bool = False) -> dict[str, dict[str, Any]]:
    tables = [TableName.parse(name) for name in names]
    found: dict[str, dict[str, Any]] = reload_changed(pipeline, tables, print, propose=propose)["tables"]
    return found


def differing(found: dict[str, Any]) -> tuple[int, int, int]:
    return found["missing"], found["extra"], found["different"]


def test_values_that_were_rewritten_without_the_log_are_found_and_only_they_are_written(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    assert changed(pipeline) == {}
    capfd.readouterr()
    database.execute(
        "alter table plain alter n type int using case when id < 4 then n * 10 else n end",
        "vacuum full parted_eu",
        "insert into plain values (100, 100)",
    )
    catch_up(pipeline)
    version = DeltaTable(lake_path_of(pipeline, PARTED)).version()
    assert main(["reload", pipeline.file, "--propose", "--json"]) == EXIT_DONE
    proposed = json.loads(capfd.readouterr().out)["tables"]
    assert {name: found["reasons"] for name, found in proposed.items()} == {
        PLAIN: ["public.plain has new files: it was rewritten or truncated"],
        PARTED: ["public.parted_eu has new files: it was rewritten or truncated"],
    }
    assert main(["reload", pipeline.file, "--changed", "--json"]) == EXIT_DONE
    found = json.loads(capfd.readouterr().out)["tables"]
    assert (differing(found[PLAIN]), found[PLAIN]["replaced_rows"]) == ((0, 0, 3), 3)
    assert (differing(found[PARTED]), found[PARTED]["replaced_rows"]) == ((0, 0, 0), 0)
    assert {"bytes", "seconds", "capture_lsn"} <= found[PARTED].keys()
    assert DeltaTable(lake_path_of(pipeline, PARTED)).version() == version
    assert_equal(database, pipeline, PLAIN)
    assert changed(pipeline) == {}
    database.execute("update plain set n = 7", "truncate parted_us", "insert into parted values (500, 'us')")
    catch_up(pipeline)
    assert list(changed(pipeline, propose=True)) == [PARTED]
    assert differing(changed(pipeline)[PARTED]) == (0, 0, 0)
    assert_equal(database, pipeline, PLAIN)


def test_partitions_that_come_and_go_are_put_right_beside_the_driver(database: Database, pipeline: Pipeline) -> None:
    with following(pipeline) as running:
        until(lambda: status(pipeline)["running"] or running.done(), "the driver runs")
        database.execute(
            "create table more (id int, region text, primary key (id, region))",
            "insert into more select g, 'asia' from generate_series(100, 110) g",
            "alter table parted attach partition more for values in ('asia')",
            "alter table parted detach partition parted_us",
            "create table parted_new partition of parted for values in ('new')",
        )
        found = changed(pipeline, PARTED)[PARTED]
        # The driver may have suspended it before.
        assert [reason for reason in found["reasons"] if not reason.startswith("it is suspended")] == [
            "the partition public.more was attached",
            "the partition public.parted_us was detached or dropped",
        ]
        assert found["replaced_rows"] == 11 + 10
        assert found["bytes"] > 0
        assert found["seconds"] > 0
        assert found["capture_lsn"]
        assert found["state"] == "active"
        database.execute("insert into parted values (111, 'asia'), (1, 'new')")
        database.execute("update parted set id = 112 where id = 2")
        assert not running.done()
    catch_up(pipeline)
    for seen in verify(pipeline, [TableName.parse(PARTED)])["tables"].values():
        assert differing(seen) == (0, 0, 0)
    assert record_of(pipeline, PARTED).state == "active"
    assert changed(pipeline) == {}


def test_rows_that_came_below_a_tree_or_changed_out_of_sight_are_found(database: Database, pipeline: Pipeline) -> None:
    database.execute(
        "create table tree (id int, region text, primary key (id, region)) partition by list (region)",
        "create table tree_asia partition of tree for values in ('asia')",
        "insert into tree values (300, 'asia'), (301, 'asia')",
        "alter table parted attach partition tree for values in ('asia', 'africa')",
        "create table tree_africa partition of tree for values in ('africa')",
        "alter table parted detach partition parted_us",
        "delete from parted_us where id = 1",
        "insert into parted_us values (400, 'us')",
        "alter table parted attach partition parted_us for values in ('us')",
    )
    catch_up(pipeline)
    found = changed(pipeline)[PARTED]
    assert found["reasons"][0].startswith("it is suspended: the partition public.tree_asia was attached")
    assert found["reasons"][1:] == [
        "the partition public.parted_us was attached",
        "the partition public.tree_asia was attached",
    ]
    assert found["state"] == "active"
    database.execute("insert into parted values (302, 'asia'), (303, 'africa'), (401, 'us')")
    catch_up(pipeline)
    assert record_of(pipeline, PARTED).state == "active"
    for seen in verify(pipeline, [TableName.parse(PARTED)])["tables"].values():
        assert differing(seen) == (0, 0, 0)
    assert changed(pipeline) == {}


def test_the_first_change_below_a_tree_that_was_attached_suspends_the_table(
    database: Database, pipeline: Pipeline
) -> None:
    database.execute(
        "create table tree (id int, region text, primary key (id, region)) partition by list (region)",
        "create table tree_asia partition of tree for values in ('asia')",
        "insert into tree values (300, 'asia')",
        "alter table parted attach partition tree for values in ('asia')",
        "insert into parted values (301, 'asia')",
    )
    catch_up(pipeline)
    assert "tree_asia was attached" in record_of(pipeline, PARTED).reason


def test_one_table_that_cannot_be_compared_keeps_no_other(database: Database, pipeline: Pipeline) -> None:
    database.execute("alter table plain alter n type int using n + 1", "drop table events")
    found = changed(pipeline)
    assert (found[EVENTS]["compared"], found[PLAIN]["replaced_rows"]) == (False, 50)
    assert main(["reload", pipeline.file, "--changed"]) == EXIT_SUSPENDED


def test_more_than_a_repair_takes_is_reloaded(
    database: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "_CANDIDATES", 5)
    database.execute("alter table plain alter n type int using n + 1")
    assert changed(pipeline)[PLAIN]["unsettled"] == 0
    catch_up(pipeline)
    assert_equal(database, pipeline, PLAIN)
    assert changed(pipeline) == {}


def test_what_cannot_be_repaired_by_key_is_reloaded_or_said(database: Database, pipeline: Pipeline) -> None:
    for table in ("events", "marked"):
        database.execute(f"alter table {table} alter n type int using n + 1")
    catch_up(pipeline)
    found = changed(pipeline)
    assert found[EVENTS]["replaced_rows"] == 9
    assert "load PIPELINE.yaml --table public.marked --again" in found[MARKED]["not_repaired"]
    assert_equal(database, pipeline, EVENTS)
    assert list(changed(pipeline, propose=True)) == [MARKED]
    load_tables(pipeline, MARKED, again=True)
    assert changed(pipeline) == {}


def test_a_suspended_table_is_a_candidate_and_comes_back(database: Database, pipeline: Pipeline) -> None:
    database.execute("alter table plain alter n type text using 'n' || n", "insert into plain values (200, 'x')")
    catch_up(pipeline)
    assert record_of(pipeline, PLAIN).state == "suspended"
    found = changed(pipeline)[PLAIN]
    assert found["reasons"][0].startswith("it is suspended: ")
    assert found["state"] in ("active", "catching up")
    catch_up(pipeline)
    assert_equal(database, pipeline, PLAIN)


def test_deleted_rows_that_are_kept_are_not_forgotten(database: Database, pipeline: Pipeline) -> None:
    database.execute("delete from marked where id = 2")
    catch_up(pipeline)
    database.execute("alter table marked alter n type text using 'n' || n", "insert into marked values (3, 'x')")
    catch_up(pipeline)
    assert record_of(pipeline, MARKED).state == "suspended"
    found = changed(pipeline)[MARKED]
    assert "--table public.marked --again" in found["not_repaired"]
    assert len(lake_rows(pipeline, MARKED)) == 2
    for where in ("", "id < 3"):
        with pytest.raises(Refused) as refused:
            reload(pipeline, TableName.parse(MARKED), where=where)
        assert refused.value.code == "not_reloadable"
        assert "--table public.marked --again" in refused.value.remedy
    assert len(lake_rows(pipeline, MARKED)) == 2


@pytest.mark.parametrize(
    "arguments", [["--changed", "--partition", "parted_eu"], [], ["--table", PLAIN, "--table", PARTED]]
)
def test_what_makes_no_sense_is_refused(
    database: Database, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    pipeline = write_pipeline(tmp_path, database, PLAIN, PARTED)
    assert main(["reload", pipeline.file, *arguments]) == EXIT_REFUSED
    assert "headwater reload --help" in capfd.readouterr().err


def mark(pipeline: Pipeline, database: Database, capfd: pytest.CaptureFixture[str]) -> None:
    """A DBA runs what is printed."""
    capfd.readouterr()
    assert main(["check", pipeline.file, "--install-ddl-markers"]) == EXIT_DONE
    with database.superuser() as superuser:
        superuser.execute(capfd.readouterr().out.encode())


def test_markers_are_printed_and_installed_only_when_told_by_who_may(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    installed = "select evtname::text from pg_event_trigger where evtname like 'headwater%' order by 1"
    assert main(["check", pipeline.file, "--install-ddl-markers", "--json"]) == EXIT_DONE
    printed = json.loads(capfd.readouterr().out)
    assert printed["installed"] is False
    assert printed["sql"].startswith("BEGIN;\n")  # a client that goes on behind an error makes no trigger either
    assert printed["sql"].endswith("COMMIT;\n")
    assert main(["check", pipeline.file, "--install-ddl-markers", "--yes"]) == EXIT_REFUSED
    assert "a superuser runs what" in capfd.readouterr().err
    assert main(["check", pipeline.file, "--yes"]) == EXIT_REFUSED
    assert database.query(installed) == []
    with database.superuser() as superuser:
        superuser.execute(f"alter role {database.role} superuser")
    assert main(["check", pipeline.file, "--install-ddl-markers", "--yes"]) == EXIT_DONE
    assert main(["check", pipeline.file, "--install-ddl-markers", "--yes"]) == EXIT_DONE
    assert database.query(installed) == [("headwater_ddl",), ("headwater_rewrite",)]


def test_who_made_schema_and_function_before_does_not_own_what_every_ddl_runs(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its owner could replace the function by one that makes a superuser of him."""
    mine = (
        "create or replace function headwater_ddl.mark() returns event_trigger language plpgsql as "
        "$$ begin raise exception 'mine'; end $$"
    )
    database.execute("create schema headwater_ddl", mine)
    mark(pipeline, database, capfd)
    with pytest.raises(pg.InsufficientPrivilege):
        database.execute(mine)
    owners = (
        "select r.rolsuper from pg_namespace n join pg_roles r on r.oid = n.nspowner where nspname = 'headwater_ddl' "
        "union all select r.rolsuper from pg_proc p join pg_roles r on r.oid = p.proowner where proname = 'mark'"
    )
    assert database.query(owners) == [(True,), (True,)]
    database.execute("alter table plain add later int")


def test_with_markers_rewritten_values_suspend_the_table_before_anything_behind_them_is_applied(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    mark(pipeline, database, capfd)
    with database.connect(autocommit=False) as rolled_back:
        rolled_back.execute("alter table plain alter n type int using n + 1")
        rolled_back.rollback()
    database.execute(
        "vacuum full parted_eu",
        "alter table marked alter n type bigint",  # written anew, too: the lake follows
        "insert into marked values (3, 5000000000)",
    )
    catch_up(pipeline)
    assert {record_of(pipeline, name).state for name in (PLAIN, PARTED, MARKED)} == {"active"}
    database.execute("alter table plain alter n type int using n * 10", "insert into plain values (100, 100)")
    database.execute("alter table parted add more int default 5")  # no rewrite
    catch_up(pipeline)
    record = record_of(pipeline, PLAIN)
    assert (record.state, record.remedy) == ("suspended", "headwater reload PIPELINE.yaml --changed")
    assert "was rewritten by ALTER TABLE" in record.reason
    assert (100, 100) not in lake_rows(pipeline, PLAIN, ["id", "n"])
    assert {record_of(pipeline, name).state for name in (PARTED, MARKED)} == {"active"}
    changed(pipeline)
    catch_up(pipeline)
    assert record_of(pipeline, PLAIN).state == "active"
    assert_equal(database, pipeline, PLAIN)


def test_with_markers_a_partition_that_was_unlogged_for_a_moment_suspends_its_table(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server refuses it for the table that is published, and not for the partitions of that."""
    mark(pipeline, database, capfd)
    database.execute(
        "alter table parted_us set unlogged",
        "insert into parted_us values (99, 'us')",
        "alter table parted_us set logged",
    )
    catch_up(pipeline)
    record = record_of(pipeline, PARTED)
    assert (record.state, record.remedy) == ("suspended", "headwater reload PIPELINE.yaml --changed")
    changed(pipeline)
    catch_up(pipeline)
    assert record_of(pipeline, PARTED).state == "active"
    assert_equal(database, pipeline, PARTED)


def test_an_outage_of_the_catalog_behind_ddl_is_waited_out_and_nothing_is_applied_unlooked(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    mark(pipeline, database, capfd)
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'headwater replicate'"
    with database.superuser() as superuser, database.connect() as owner, following(pipeline) as running:
        owner.execute("insert into plain values (98, 98)")
        until(lambda: (98, 98) in lake_rows(pipeline, PLAIN, ["id", "n"]), "the driver follows the log")
        superuser.execute(f"alter role {database.role} connection limit 0")
        superuser.execute(end)
        owner.execute("alter table plain alter n type int using n * 10")
        owner.execute("insert into plain values (99, 99)")
        until(lambda: "could not be read behind DDL" in caplog.text, "the catalog cannot be read")
        assert not running.done()
        superuser.execute(f"alter role {database.role} connection limit -1")
        until(lambda: record_of(pipeline, PLAIN).state == "suspended", "the look was made")
        assert (99, 99) not in lake_rows(pipeline, PLAIN, ["id", "n"])
    assert running.result()["stopped_by"] == "signal"


def test_ddl_that_a_replicas_role_runs_tells_of_itself_too(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    mark(pipeline, database, capfd)
    with database.superuser() as superuser:
        superuser.execute("set session_replication_role = replica")
        superuser.execute("alter table plain alter n type int using n * 10")
    catch_up(pipeline)
    assert record_of(pipeline, PLAIN).state == "suspended"


@pytest.mark.parametrize("markers", [False, True])
def test_a_crash_of_the_server_loses_no_candidate(
    database: Database, pipeline: Pipeline, capfd: pytest.CaptureFixture[str], markers: bool
) -> None:
    if markers:
        mark(pipeline, database, capfd)
    database.execute("alter table plain alter n type int using n * 10", "alter table parted detach partition parted_us")
    database.server.crash()
    database.server.start()
    assert set(changed(pipeline, propose=True)) == {PLAIN, PARTED}
    catch_up(pipeline)
    assert record_of(pipeline, PLAIN).state == ("suspended" if markers else "active")
    changed(pipeline)
    catch_up(pipeline)
    assert record_of(pipeline, PLAIN).state == "active"
    assert_equal(database, pipeline, PLAIN, PARTED)


def counted(database: Database, *statements: str) -> None:
    """Run by a session each that has ended: what it has done is counted by then."""
    for statement in statements:
        with database.superuser() as superuser:
            superuser.execute(statement)


def test_changes_that_the_publication_left_out_for_a_while_are_found_by_what_the_source_has_counted(
    database: Database, pipeline: Pipeline
) -> None:
    publication = pipeline.source.publication
    assert changed(pipeline) == {}  # notes what is counted by now
    # While no driver looks: to the next one the publication is as it was.
    counted(
        database,
        f"alter publication {publication} set (publish = 'insert')",
        "update plain set n = -n where id < 4",
        "delete from parted where id = 2",
        f"alter publication {publication} set (publish = 'insert, update, delete, truncate')",
        "update marked set n = 7 where id = 1",
    )
    assert changed(pipeline) == {}, "nobody knows yet whether the log brings it"
    with following(pipeline):
        until(lambda: status(pipeline)["running"], "the driver runs")
        reasons = {name: found["reasons"] for name, found in changed(pipeline, propose=True).items()}
        assert {name: [re.sub(r"20\S+Z", "then", why) for why in known] for name, known in reasons.items()} == {
            PLAIN: ["the source has counted 3 changed rows since then, and the log has brought none"],
            PARTED: ["the source has counted 1 changed rows since then, and the log has brought none"],
        }
        found = changed(pipeline)
        assert (differing(found[PLAIN]), found[PLAIN]["replaced_rows"]) == ((0, 0, 3), 3)
        assert (differing(found[PARTED]), found[PARTED]["replaced_rows"]) == ((0, 1, 0), 1)
        assert changed(pipeline) == {}
    catch_up(pipeline)
    assert_equal(database, pipeline, PLAIN, PARTED)


def test_what_is_counted_and_was_rolled_back_costs_a_comparison_and_what_the_log_brings_costs_nothing(
    database: Database, pipeline: Pipeline
) -> None:
    with following(pipeline):
        until(lambda: status(pipeline)["running"], "the driver runs")
        assert changed(pipeline) == {}
        with database.connect() as connection, pytest.raises(pg.RaiseException):
            connection.execute("do $$ begin update plain set n = 0; raise 'no'; end $$")
        counted(database, "update events set n = 3", "update marked set n = 5 where id = 2")
        found = changed(pipeline)
        assert differing(found.pop(PLAIN)) == (0, 0, 0)
        assert found == {}, "an update of rows that are never updated in the lake, and one that the log has brought"
        assert changed(pipeline) == {}
