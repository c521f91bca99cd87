"""`verify` against a real source and a real lake: it finds what is there, and nothing that only looks so."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import beside, following, in_thread, lake_path_of, until
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import copy_lake, write_pipeline
from fixtures.postgres import Database, new_database
from headwater.cli import main
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import EXIT_DIFFERENCES, EXIT_DONE, EXIT_FAILED, EXIT_SUSPENDED, Refused, Transient
from headwater.gate.check import check, require_ok
from headwater.lake.cuts import list_pins
from headwater.load.load import load
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload
from headwater.replicate.replicate import replicate
from headwater.spark import session
from headwater.verify.verify import _Table, verify
from headwater.verify.version import Patience

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

PEOPLE, PAIRS, EVENTS, PARTED = "public.people", "public.pairs", "public.events", "public.parted"
ODD = "public.odd"
CLEAN = {"missing": 0, "extra": 0, "different": 0, "unsettled": 0, "keys": []}
SOURCE = [
    "create table people (id bigint primary key, name text, score float8, amount numeric(12,2), tags text[],"
    " seen timestamptz, raw bytea)",
    "insert into people select i, 'name ' || i, i / 3.0, i / 7.0, array['a', null, i::text],"
    " '2020-01-01 00:00:00.123456+00'::timestamptz + i * interval '1 day', int4send(i) from generate_series(1, 50) i",
    "insert into people values (101, null, '-0', null, '{}', null, null), (102, '', 'NaN', 0, null, null, '')",
    "create table pairs (a int, b text, note text, primary key (a, b))",
    "insert into pairs select i % 5, 'k' || i, 'note' from generate_series(1, 20) i",
    "create table events (kind text, number int)",
    "insert into events select 'tick', i % 3 from generate_series(1, 9) i",
    "create table odd (d int primary key, k0 text, s int, f text, o int)",  # names that the comparison uses, too
    "insert into odd select i, 'k' || i, -i, 'f', 7 from generate_series(1, 6) i",
    "create table parted (id int, region text, primary key (id, region)) partition by list (region)",
    "create table parted_eu partition of parted for values in ('eu')",
    "create table parted_us partition of parted for values in ('us')",
    "insert into parted select i, case when i % 2 = 0 then 'eu' else 'us' end from generate_series(1, 10) i",
]
TABLES: list[str | dict[str, Any]] = [PEOPLE, PAIRS, {"name": EVENTS, "insert_only": True}, PARTED, ODD]
PATIENCE = Patience(timeout=60, without_driver=0.5)


@dataclass
class Shop:
    """A database whose tables have all been loaded and replicated; nobody replicates now."""

    database: Database
    pipeline: Pipeline
    spark: SparkSession

    def path(self, table: str) -> str:
        return lake_path_of(self.pipeline, table)

    def damage(self, table: str, statement: str) -> None:
        self.spark.sql(statement.replace("TABLE", f"delta.`{self.path(table)}`"))

    def verify(self, *tables: str) -> dict[str, Any]:
        found = verify(self.pipeline, [TableName.parse(t) for t in tables], patience=PATIENCE)
        return dict(found["tables"])


def until_now(pipeline: Pipeline) -> None:
    replicate(pipeline, "now", None, threading.Event())


@pytest.fixture(scope="module")
def origin(
    postgres: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Iterator[tuple[Database, str]]:
    folder = tmp_path_factory.mktemp("origin")
    with new_database(postgres) as database:
        database.execute(*SOURCE)
        database.allow_publishing()
        pipeline = pipeline_in_step(folder, database, *TABLES)
        yield database, pipeline.lake_path()


@pytest.fixture
def shop(origin: tuple[Database, str], tmp_path: Path, spark: SparkSession) -> Shop:
    """A copy of the lake: each test damages its own."""
    database, lake = origin
    pipeline = write_pipeline(tmp_path, database, *TABLES)
    copy_lake(lake, pipeline.lake_path())
    return Shop(database, pipeline, spark)


def shown(table: dict[str, Any]) -> dict[str, Any]:
    return {name: table[name] for name in CLEAN}


def test_a_lake_in_step_has_no_differences_and_no_pin_stays_behind(
    shop: Shop, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", shop.pipeline.file, "--json"]) == EXIT_DONE
    result = json.loads(capfd.readouterr().out)
    assert {name: table["rows"] for name, table in result["tables"].items()} == {
        PEOPLE: 52,
        PAIRS: 20,
        EVENTS: 9,
        PARTED: 10,
        ODD: 6,
    }
    for table in result["tables"].values():
        assert (shown(table), table["compared"], table["state"]) == (CLEAN, True, "active")
    assert result["epoch"] >= 1
    assert result["position"]["timeline"] == 1
    assert list_pins(shop.pipeline.lake_path()) == []


@pytest.mark.usefixtures("each_comparison")
def test_missing_extra_and_different_rows_are_found_with_their_keys(
    shop: Shop, capfd: pytest.CaptureFixture[str]
) -> None:
    shop.damage(PEOPLE, "delete from TABLE where id = 7")
    shop.damage(PEOPLE, "update TABLE set name = 'other' where id = 8")
    shop.damage(PEOPLE, "insert into TABLE (id, name) values (900, 'nobody')")
    shop.damage(PAIRS, "insert into TABLE select * from TABLE where a = 1 and b = 'k1'")
    shop.damage(ODD, "update TABLE set k0 = 'other' where d = 2")
    assert main(["verify", shop.pipeline.file, "--json"]) == EXIT_DIFFERENCES
    tables = json.loads(capfd.readouterr().out)["tables"]
    assert shown(tables[PEOPLE]) == {
        **CLEAN,
        "missing": 1,
        "extra": 1,
        "different": 1,
        "keys": tables[PEOPLE]["keys"],
    }
    found = {(key["key"]["id"], key["kind"]) for key in tables[PEOPLE]["keys"]}
    assert found == {(7, "missing"), (8, "different"), (900, "extra")}
    assert shown(tables[PAIRS]) == {**CLEAN, "extra": 1, "keys": [{"key": {"a": 1, "b": "k1"}, "kind": "extra"}]}
    assert shown(tables[ODD]) == {**CLEAN, "different": 1, "keys": [{"key": {"d": 2}, "kind": "different"}]}
    assert shown(tables[PARTED]) == CLEAN


@pytest.mark.usefixtures("each_comparison")
def test_values_are_compared_exactly(shop: Shop) -> None:
    changes = {
        1: "score = score + 1e-15",
        2: "tags = null",
        3: "tags = array('a', '', '3')",
        4: "seen = seen + interval 1 microsecond",
        5: "amount = amount + 0.01",
        6: "raw = X'0006'",
        7: "name = null",
        101: "score = 0.0",
        102: "name = null",
    }
    cases = {
        column: " ".join(
            f"when {key} then {change.split(' = ')[1]}" for key, change in changes.items() if change.startswith(column)
        )
        for column in {change.split(" = ")[0] for change in changes.values()}
    }
    assignments = ", ".join(f"{column} = case id {whens} else {column} end" for column, whens in cases.items())
    shop.damage(PEOPLE, f"update TABLE set {assignments}")
    table = shop.verify(PEOPLE)[PEOPLE]
    assert table["different"] == len(changes)
    assert {key["key"]["id"] for key in table["keys"]} == set(changes)


def test_a_row_under_the_wrong_leaf_is_different(shop: Shop) -> None:
    shop.damage(PARTED, "update TABLE set _hw_partition = 1 where id = 3")
    table = shop.verify(PARTED)[PARTED]
    assert shown(table) == {
        **CLEAN,
        "different": 1,
        "keys": [{"key": {"id": 3, "region": "us"}, "kind": "different"}],
    }


@pytest.mark.usefixtures("each_comparison")
def test_insert_only_tables_are_compared_as_multisets(shop: Shop) -> None:
    shop.damage(EVENTS, "delete from TABLE where number = 2")
    shop.damage(EVENTS, "insert into TABLE values ('tick', 0), ('tick', 0)")
    table = shop.verify(EVENTS)[EVENTS]
    assert (table["rows"], table["missing"], table["extra"], table["different"]) == (9, 3, 2, 0)
    found = sorted((key["kind"], key["key"]["kind"], key["key"]["number"]) for key in table["keys"])
    assert found == [("extra", "tick", "0"), ("missing", "tick", "2")]


def test_small_tables_are_compared_without_java_and_one_that_is_damaged_keeps_no_other(
    shop: Shop, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_java(*_: str) -> None:
        raise Refused("there is no Java", code="no_java")

    monkeypatch.setattr(session, "job_session", without_java)
    (lost,) = Path(shop.path(PAIRS)).glob("*.parquet")
    lost.unlink()
    (other,) = Path(shop.path(EVENTS)).glob("*.parquet")
    content = bytearray(other.read_bytes())
    content[4:60] = bytes(56)  # of a page
    other.write_bytes(content)
    assert main(["verify", shop.pipeline.file, "--json"]) == EXIT_SUSPENDED
    tables = json.loads(capfd.readouterr().out)["tables"]
    damaged = {name: tables.pop(name) for name in (PAIRS, EVENTS)}
    for name, table in damaged.items():
        assert (table["compared"], table["rows"]) == (False, None)
        assert "its Delta table cannot be read" in table["reason"]
        assert f"headwater load PIPELINE.yaml --table {name} --again" in table["reason"]
    assert lost.name in damaged[PAIRS]["reason"]
    for table in tables.values():
        assert (shown(table), table["compared"]) == (CLEAN, True)


@pytest.mark.usefixtures("each_comparison")
def test_a_table_that_misses_a_file_keeps_no_other_from_being_compared(shop: Shop) -> None:
    (lost,) = Path(shop.path(PAIRS)).glob("*.parquet")
    lost.unlink()
    tables = shop.verify(PAIRS, ODD)
    assert (tables[PAIRS]["compared"], lost.name in tables[PAIRS]["reason"]) == (False, True)
    assert (shown(tables[ODD]), tables[ODD]["compared"]) == (CLEAN, True)


def test_a_partition_that_may_not_be_read_is_named_with_the_statement_that_helps(shop: Shop) -> None:
    with shop.database.superuser() as dba:
        dba.execute("create table parted_new partition of parted for values in ('new')")
        grant = f"GRANT SELECT ON TABLE public.parted_new TO {shop.database.role}"
        try:
            assert grant in shop.verify(PARTED)[PARTED]["reason"]
            with pytest.raises(Refused) as refused:
                reload(shop.pipeline, TableName.parse(PARTED), [TableName.parse("public.parted_eu")])
            assert (refused.value.code, refused.value.remedy) == ("no_select", grant)
            report = check(shop.pipeline)
            assert report.faulty().keys() == {PARTED}
            require_ok(report, [TableName.parse(PEOPLE)])  # it keeps no other table from its load or repair
        finally:
            dba.execute("drop table parted_new")


@pytest.mark.usefixtures("each_comparison")
def test_somebody_else_s_column_of_any_type_is_not_looked_at(shop: Shop) -> None:
    shop.damage(PAIRS, "alter table TABLE add columns (extra struct<a: int, b: array<map<string, int>>>)")
    table = shop.verify(PAIRS)[PAIRS]
    assert (shown(table), table["compared"]) == (CLEAN, True)


def test_at_most_twenty_keys_are_listed_and_all_are_counted(shop: Shop) -> None:
    shop.damage(PEOPLE, "delete from TABLE where id <= 30")
    table = shop.verify(PEOPLE)[PEOPLE]
    assert (table["missing"], len(table["keys"])) == (30, 20)


def test_what_the_lake_has_not_got_yet_is_late_and_not_different(
    database: Database, tmp_path: Path, spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    database.execute("create table people (id int primary key, name text)", "insert into people values (1, 'a')")
    database.allow_publishing()
    pipeline = write_pipeline(tmp_path, database, PEOPLE)
    with pytest.raises(Refused, match="no table is loaded"):
        verify(pipeline)
    load(pipeline)
    with pytest.raises(Transient, match="no replicate is running"):
        verify(pipeline, patience=PATIENCE)
    until_now(pipeline)
    assert shown(verify(pipeline, patience=PATIENCE)["tables"][PEOPLE]) == CLEAN
    database.execute("insert into people values (2, 'b')")
    with pytest.raises(Transient, match="--until now") as late:
        verify(pipeline, patience=PATIENCE)
    assert late.value.exit_status == EXIT_FAILED
    until_now(pipeline)
    assert shown(verify(pipeline, patience=PATIENCE)["tables"][PEOPLE]) == CLEAN
    database.execute("drop table people")
    table = verify(pipeline, patience=PATIENCE)["tables"][PEOPLE]
    assert (table["compared"], table["rows"]) == (False, None)
    assert "no such table" in table["reason"]


def test_one_row_of_many_is_found_with_its_key_and_no_row_is_read_twice_at_the_source(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    database.allow_publishing()
    database.execute(
        "create table people (name text primary key, n int)",
        "insert into people select md5(i::text), i from generate_series(1, 30000) i",
        "analyze people",
    )
    pipeline = pipeline_in_step(tmp_path, database, PEOPLE)
    lake = f"delta.`{pipeline.lake_path()}/public/people`"
    spark.sql(f"update {lake} set n = -n where n = 17")
    spark.sql(f"update {lake} set n = 19 - n where n in (9, 10)")  # as if the two had changed places
    before = _read_by_scans(database)
    table = verify(pipeline, patience=PATIENCE)["tables"][PEOPLE]
    assert (table["rows"], table["missing"], table["extra"], table["different"]) == (30000, 0, 0, 3)
    names = {hashlib.md5(str(n).encode()).hexdigest() for n in (9, 10, 17)}
    assert {key["key"]["name"] for key in table["keys"]} == names
    # Statistics of a session that has ended come a moment later.
    until(lambda: _read_by_scans(database) >= before + 30000, "the scan is counted")
    assert _read_by_scans(database) == before + 30000


def _read_by_scans(database: Database) -> int:
    """Rows of people that were not looked up by an index."""
    ((read,),) = database.query("select seq_tup_read from pg_stat_user_tables where relname = 'people'")
    return int(read)


def test_the_server_ends_a_snapshot_that_was_held_too_long_and_verify_takes_another_one(
    database: Database, tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headwater")
    database.allow_publishing()
    database.execute("create table people (id int primary key)", "insert into people values (1)")
    pipeline = pipeline_in_step(tmp_path, database, PEOPLE, load={"max_snapshot_age": "5s"})
    database.execute("insert into people values (2)")
    # It waits for the lake, and holds a snapshot.
    job = in_thread(lambda: verify(pipeline, patience=Patience(timeout=120, without_driver=120)))
    with database.superuser() as watcher:
        held = "from pg_stat_activity where application_name = 'headwater capture point'"
        until(lambda: watcher.execute(f"select {held}").rowcount == 1 or job.done(), "it is held")
        until(lambda: watcher.execute(f"select {held}").rowcount == 0 or job.done(), "the server has ended it")
    until_now(pipeline)
    table = job.result(300)["tables"][PEOPLE]
    if table["compared"]:
        assert (table["rows"], shown(table)) == (2, CLEAN)
    else:  # on a machine where each look takes longer than that
        assert "the last one because its snapshot is gone" in table["reason"]
    assert "held for load.max_snapshot_age, or its session was ended; taking another capture point" in caplog.text


def test_small_tables_are_compared_side_by_side_beside_a_driver(
    database: Database, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"public.t{number}" for number in range(4)]
    for number, name in enumerate(names):
        database.execute(
            f"create table {name} (id int primary key)",
            f"insert into {name} select i from generate_series(1, {number + 1}) i",
        )
    database.allow_publishing()
    pipeline = pipeline_in_step(tmp_path, database, *names)
    together, run = threading.Barrier(len(names), timeout=60), _Table.run

    def all_at_once(check: _Table) -> dict[str, Any]:
        together.wait()
        return run(check)

    monkeypatch.setattr(_Table, "run", all_at_once)
    with following(pipeline) as driver:
        until(lambda: status(pipeline)["running"] or driver.done(), "the driver runs")
        found = verify(pipeline)
    assert {name: (table["rows"], table["compared"]) for name, table in found["tables"].items()} == {
        name: (number + 1, True) for number, name in enumerate(names)
    }
    assert list(found["tables"]) == names
    assert list_pins(pipeline.lake_path()) == []


def test_keys_that_change_at_each_look_are_warned_of_and_fail_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy source they are a few rows that are written all the time."""
    shop.damage(PEOPLE, "update TABLE set name = 'other' where id = 8")
    monkeypatch.setattr("headwater.verify.verify.ROUNDS", 0)
    assert main(["verify", shop.pipeline.file, "--json", "--table", PEOPLE]) == EXIT_DONE
    assert f"{PEOPLE}: keys not known to be equal, since each look found them changed: 1" in caplog.text
    assert shown(json.loads(capfd.readouterr().out)["tables"][PEOPLE]) == {**CLEAN, "unsettled": 1}


@pytest.mark.usefixtures("each_comparison")
def test_it_works_while_the_source_writes_and_still_sees_a_true_difference(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    database.execute(
        "create table people (id int primary key, name text, n int)",
        "insert into people select i, 'name', 0 from generate_series(1, 300) i",
        "create table events (kind text, number int)",
    )
    database.allow_publishing()
    pipeline = pipeline_in_step(tmp_path, database, PEOPLE, {"name": EVENTS, "insert_only": True})
    numbers = itertools.count()

    def write(stop: threading.Event) -> None:
        with database.connect() as connection:
            while not stop.wait(0.05):
                number = next(numbers)
                # Toggling values and a key that comes and goes: equal at two moments does not mean unchanged.
                connection.execute("update people set n = 1 - n where id = %s", (number % 20,))
                connection.execute("insert into people values (1000, 'x', 0) on conflict do nothing")
                connection.execute("delete from people where id = 1000")
                connection.execute("insert into people values (%s, 'new', 0)", (2000 + number,))
                connection.execute("insert into events values ('tick', %s)", (number % 5,))

    with following(pipeline), beside(write):
        clean = verify(pipeline)["tables"]
        for table in clean.values():
            assert (table["missing"], table["extra"], table["different"], table["keys"]) == (0, 0, 0, [])
    spark.sql(f"update delta.`{pipeline.lake_path()}/public/people` set name = 'wrong' where id = 250")
    with beside(write):
        until_now(pipeline)  # the driver meets the foreign commit: the table is suspended and stands still
        table = verify(pipeline, [TableName.parse(PEOPLE)])["tables"][PEOPLE]
    assert table["state"] == "suspended"
    assert table["different"] >= 1
