"""`check` and `drop` against real servers: everything wrong is found at once, and nothing is changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headwater
from fixtures.lakes import HandLake
from fixtures.pipelines import write_pipeline
from fixtures.pooler import pooler
from fixtures.postgres import Database
from fixtures.store_faults import answering
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import Refused, SourceUnreachable, Transient
from headwater.gate.check import CheckReport, check, lake_problems, require_ok
from headwater.lake import registry
from headwater.lake.registry import PipelineRecord, Registry, TableRecord
from headwater.load.load import load
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.setup.drop import drop
from headwater.source.connection import connect, identify
from headwater.source.publication.publication import add_tables, ensure_publications, read_publication
from headwater.source.settings import standby_names

pytestmark = pytest.mark.postgres


def _errors(report: CheckReport) -> set[str]:
    return {problem.code for problem in report.problems if problem.is_error}


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> Pipeline:
    """A pipeline that `check` has nothing against: two tables, published by the owner."""
    database.execute("create table a (id int primary key)", "create table b (v int)")
    database.grant("a", "b")
    database.publish("headwater_shop", "a", inserts=("b",))
    return write_pipeline(tmp_path, database, "public.a", {"name": "public.b", "insert_only": True})


def test_a_least_privileged_role_with_prepared_publications_passes(shop: Pipeline) -> None:
    report = check(shop)
    assert report.ok
    assert _errors(report) == set()
    require_ok(report)
    body = report.to_json()
    assert body["ok"] is True
    assert [problem["code"] for problem in body["problems"]] == ["slot_wal_unlimited"]
    assert set(body["problems"][0]) == {"code", "severity", "where", "message", "remedy"}


def test_a_role_that_may_publish_passes_without_publications_and_nothing_is_made(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table a (id int primary key)")
    database.allow_publishing()
    pipeline = write_pipeline(tmp_path, database, "public.a")
    assert check(pipeline).ok
    assert database.query("select count(*) from pg_publication") == [(0,)]
    assert database.query(f"select count(*) from pg_replication_slots where database = '{database.name}'") == [(0,)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["shop.yaml"]


def test_all_errors_come_at_once_and_refuse_in_one_message(database: Database, tmp_path: Path) -> None:
    database.execute("create table a (id int)", "create unlogged table b (id int primary key)")
    with database.superuser() as superuser:
        superuser.execute(f"alter role {database.role} noreplication")
    pipeline = write_pipeline(tmp_path, database, "public.a", "public.b", "public.c")
    report = check(pipeline)
    assert not report.ok
    assert _errors(report) == {
        *("no_replication_right", "no_key", "no_select", "unlogged_table", "table_missing", "missing_rights"),
    }
    with pytest.raises(Refused) as refusal:
        require_ok(report)
    for code in _errors(report):
        assert f"[{code}]" in str(refusal.value)


def test_missing_publications_and_missing_members_come_with_statements_that_cure_them(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table a (id int primary key)", "create table b (id int primary key)")
    database.grant("a", "b")
    one, both = (
        write_pipeline(tmp_path, database, "public.a"),
        write_pipeline(tmp_path, database, "public.a", "public.b"),
    )
    for pipeline in (one, both):
        report = check(pipeline)
        assert _errors(report) == {"missing_rights"}
        for problem in report.problems:
            if problem.is_error:
                database.execute(problem.remedy.removeprefix("a DBA can run: "))
        assert check(pipeline).ok


def test_an_insert_only_table_whose_updates_are_published_is_an_error(
    database: Database, shop: Pipeline, tmp_path: Path
) -> None:
    database.execute("alter publication headwater_shop add table b")
    report = check(shop)
    assert _errors(report) == {"insert_only_published"}
    database.execute(*(problem.remedy for problem in report.problems if problem.is_error))
    assert check(shop).ok


@pytest.mark.parametrize(
    ("creation", "code"),
    [
        ("create publication headwater_shop for all tables", "publication_too_wide"),
        ("create publication headwater_shop for table a with (publish = 'insert')", "publication_operations"),
    ],
)
def test_a_publication_that_cannot_serve_is_an_error(
    database: Database, tmp_path: Path, creation: str, code: str
) -> None:
    database.execute("create table a (id int primary key)")
    database.allow_publishing()
    with database.superuser() as superuser:
        superuser.execute(creation)
    assert _errors(check(write_pipeline(tmp_path, database, "public.a"))) == {code}


def test_a_slot_of_another_database_or_plugin_or_of_two_phases_is_an_error(
    database: Database, shop: Pipeline, server_binaries: Path
) -> None:
    slot = shop.source.slot
    with database.superuser() as inside:
        inside.execute("select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", [slot])
        try:
            assert _errors(check(shop)) == {"foreign_slot"}
        finally:
            inside.execute("select pg_drop_replication_slot(%s)", [slot])
    with database.server.connect() as elsewhere:
        elsewhere.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        try:
            assert _errors(check(shop)) == {"foreign_slot"}
        finally:
            elsewhere.execute("select pg_drop_replication_slot(%s)", [slot])
        elsewhere.execute("select pg_create_physical_replication_slot(%s)", [slot])
        try:
            assert _errors(check(shop)) == {"foreign_slot"}
        finally:
            elsewhere.execute("select pg_drop_replication_slot(%s)", [slot])
    with database.superuser() as superuser:
        superuser.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    assert check(shop).ok


def test_a_slot_that_is_older_than_its_publication_is_an_error_where_the_server_cannot_read_it(
    database: Database, shop: Pipeline
) -> None:
    with database.superuser() as superuser:
        superuser.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [shop.source.slot])
        before = superuser.info.server_version < 180000
        superuser.execute("drop publication headwater_shop, headwater_shop_inserts")
    database.execute("insert into a values (1)")
    database.publish("headwater_shop", "a", inserts=("b",))
    confirmed = database.query("select confirmed_flush_lsn from pg_replication_slots")
    assert _errors(check(shop)) == ({"slot_before_publication"} if before else set())
    assert database.query("select confirmed_flush_lsn from pg_replication_slots") == confirmed
    with database.superuser() as superuser:
        superuser.execute("select pg_drop_replication_slot(%s)", [shop.source.slot])
        superuser.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [shop.source.slot])
    database.execute("insert into a values (2)")
    assert check(shop).ok


def test_a_pooler_between_us_and_the_server_is_an_error(database: Database, tmp_path: Path, shop: Pipeline) -> None:
    with pooler(database.conninfo) as conninfo:
        pipeline = write_pipeline(
            tmp_path, database, "public.a", source={"connection": conninfo, "slot": shop.source.slot}
        )
        assert _errors(check(pipeline)) == {"connection_pooler"}


def test_an_unreachable_source_is_transient_and_a_wrong_password_is_refused_and_not_shown(
    database: Database, tmp_path: Path
) -> None:
    secret = re.sub(r".*//[^:]*:([^@]*)@.*", r"\1", database.conninfo)
    wrong = database.conninfo.replace(secret, "wr0ng")
    with pytest.raises(Refused) as refusal:
        check(write_pipeline(tmp_path, database, "public.a", source={"connection": wrong}))
    assert "wr0ng" not in str(refusal.value)
    nobody = database.conninfo.replace(f":{database.server.port}/", ":1/")
    with pytest.raises(SourceUnreachable):
        check(write_pipeline(tmp_path, database, "public.a", source={"connection": nobody}))


@pytest.fixture
def unfit(server_binaries: Path, server_folder: Callable[[], Path]) -> Iterator[EmbeddedServer]:
    """A server whose settings are all wrong. Commits do not wait: nobody is the synchronous standby."""
    settings: dict[str, str | int | bool] = {
        "wal_level": "replica",
        "max_wal_senders": 0,
        "max_replication_slots": 0,
        "synchronous_standby_names": "FIRST 1 (other, *)",
        "synchronous_commit": "off",
    }
    with EmbeddedServer(server_folder(), server_binaries, settings, durable=False) as server:
        yield server


def test_settings_of_the_server_that_cannot_work_are_errors(
    unfit: EmbeddedServer, database: Database, tmp_path: Path
) -> None:
    with unfit.connect() as superuser:
        superuser.execute("create table a (id int primary key)")
    pipeline = write_pipeline(tmp_path, database, "public.a", source={"connection": unfit.conninfo()})
    settings = {"wal_level", "max_replication_slots", "max_wal_senders", "synchronous_standby"}
    assert _errors(check(pipeline)) == settings
    unfit.stop()
    (unfit.data / "standby.signal").touch()
    unfit.start()
    assert _errors(check(pipeline)) == settings | {"in_recovery"}


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("", []),
        ("*", ["*"]),
        ("a, b", ["a", "b"]),
        ('2 ("a b", c)', ["a b", "c"]),
        ("FIRST 1 (a, *)", ["a", "*"]),
        ('any 2(headwater,"He said ""x""")', ["headwater", 'He said "x"']),
        ("first, any", ["first", "any"]),
    ],
)
def test_the_names_in_synchronous_standby_names_are_read_as_the_server_reads_them(
    setting: str, names: list[str]
) -> None:
    assert standby_names(setting) == names


def test_a_lake_that_cannot_be_written_is_an_error_and_nothing_is_created(
    database: Database, shop: Pipeline, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    (tmp_path / "file").touch()
    for root in (closed / "deep" / "lake", tmp_path / "file", tmp_path / "file" / "lake"):
        pipeline = write_pipeline(
            tmp_path, database, "public.a", source={"slot": shop.source.slot}, lake={"root": root.as_uri()}
        )
        assert _errors(check(pipeline)) == {"lake_not_writable"}
    for below in ("_headwater/tables/_delta_log", "public/a/_delta_log"):  # loaded by another user
        folder = tmp_path / "others" / below
        folder.mkdir(parents=True)
        folder.chmod(0o555)
        (problem,) = lake_problems(str(tmp_path / "others"), [TableName("public", "a")])
        assert (problem.code, str(folder) in problem.message) == ("lake_not_writable", True)
        folder.chmod(0o755)
    assert not lake_problems(str(tmp_path / "others"), [TableName("public", "a")])
    assert not lake_problems(str(tmp_path / "new" / "lake"))
    assert not (tmp_path / "new").exists()


def test_a_store_that_lets_nobody_in_is_an_error_of_the_lake(
    database: Database, shop: Pipeline, tmp_path: Path
) -> None:
    keys = {"access_key_id": "a", "secret_access_key": "b"}
    denied = "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    with answering(lambda method, target: (403, {}, denied)) as (address, _):
        lake = {"root": "s3://bucket/lake", "storage": {"endpoint": f"http://{address}", **keys}}
        pipeline = write_pipeline(tmp_path, database, "public.a", source={"slot": shop.source.slot}, lake=lake)
        assert _errors(check(pipeline)) == {"lake_not_writable"}
        with pytest.raises(Refused, match="AccessDenied: no"):
            load(pipeline)


def test_a_lake_of_another_pipeline_or_a_newer_format_is_a_problem_in_the_list(
    shop: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(shop).ok
    server = Position("7", 1, 1)
    HandLake(shop.lake_path(), server, ["public.orders"], pipeline="billing")
    [foreign] = [problem for problem in check(shop).problems if problem.code == "foreign_root"]
    assert (foreign.severity, "'billing'" in foreign.message, foreign.where) == (
        "error",
        True,
        "pipeline shop, key lake.root",
    )
    with pytest.raises(Refused) as refused:
        load(shop)
    assert refused.value.code == "foreign_root"
    shutil.rmtree(shop.lake_path())
    with monkeypatch.context() as newer:
        newer.setattr(registry, "FORMAT_VERSION", registry.FORMAT_VERSION + 1)
        HandLake(shop.lake_path(), server, ["public.orders"])
    [later] = [problem for problem in check(shop).problems if problem.is_error]
    assert (later.code, later.severity) == ("newer_format", "error")
    assert "upgrade Headwater" in later.remedy


def test_check_and_drop_import_no_engine() -> None:
    program = (
        "import sys, headwater.gate.check, headwater.setup.drop\n"
        "print(sorted({'pyspark', 'pyarrow', 'pandas', 'numpy', 'deltalake', 'airflow'} & set(sys.modules)))"
    )
    roots = os.pathsep.join([str(Path(str(headwater.__file__)).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": roots},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def _set_up(database: Database, pipeline: Pipeline) -> None:
    """What a first load leaves at the source."""
    with connect(pipeline.conninfo()) as connection:
        ensure_publications(connection, pipeline.source.publication, pipeline=pipeline.name)
        add_tables(connection, pipeline.source.publication, [table.name for table in check(pipeline).catalog.tables])
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [pipeline.source.slot])


def _slots(database: Database) -> list[tuple[Any, ...]]:
    return database.query(f"select slot_name from pg_replication_slots where database = '{database.name}'")


def test_drop_takes_slot_and_publications_that_headwater_made_and_can_be_repeated(
    database: Database, tmp_path: Path
) -> None:
    database.execute("create table a (id int primary key)")
    database.allow_publishing()
    pipeline = write_pipeline(tmp_path, database, "public.a")
    _set_up(database, pipeline)
    assert drop(pipeline) == {
        "dropped": [
            f"slot {pipeline.source.slot}",
            "publication headwater_shop",
            "publication headwater_shop_inserts",
        ],
        "kept": [],
    }
    assert _slots(database) == []
    assert database.query("select count(*) from pg_publication") == [(0,)]
    assert drop(pipeline) == {"dropped": [], "kept": []}


def test_drop_keeps_what_somebody_else_made(database: Database, shop: Pipeline) -> None:
    with database.superuser() as superuser:
        superuser.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [shop.source.slot])
    with pytest.raises(Refused) as refused:
        drop(shop)
    assert (refused.value.code, refused.value.where) == ("slot_kept", f"slot {shop.source.slot}")
    assert "no load of this pipeline is known to have made it" in refused.value.message
    assert f"SELECT pg_drop_replication_slot('{shop.source.slot}')" in refused.value.remedy
    assert _slots(database) == [(shop.source.slot,)]
    with database.superuser() as superuser:
        superuser.execute("select pg_drop_replication_slot(%s)", [shop.source.slot])
    assert drop(shop) == {
        "dropped": [],
        "kept": ["publication headwater_shop", "publication headwater_shop_inserts"],
    }


def test_behind_a_load_a_slot_that_is_gone_or_moved_and_another_source_are_errors(
    database: Database, shop: Pipeline
) -> None:
    def loaded_from(system_id: str, start: int) -> None:
        shutil.rmtree(shop.lake_path(), ignore_errors=True)
        record = PipelineRecord(system_id, 1, shop.source.slot, "headwater_shop", start, True, False)
        registry = Registry.create(shop.lake_path(), shop.name)
        registry.write(record)
        assert check(shop).ok, "no table has rows: a first load makes what it needs"
        registry.write(TableRecord("public.unknown", "public/unknown", "active"))

    with connect(shop.conninfo()) as connection:
        here = identify(connection).system_id
        loaded_from(here, 1)
        assert _errors(check(shop)) == {"slot_gap"}
        repairing = shop.model_copy(update={"source": shop.source.model_copy(update={"on_slot_loss": "repair"})})
        assert check(repairing).ok
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [shop.source.slot])
        try:
            assert _errors(check(shop)) == {"slot_gap"}
            loaded_from(here, 1 << 60)
            assert check(shop).ok
            loaded_from("7", 1)
            assert _errors(check(shop)) == {"source_changed"}
        finally:
            connection.execute("select pg_drop_replication_slot(%s)", [shop.source.slot])


@pytest.mark.parametrize("made", [True, False])
def test_drop_takes_a_slot_that_a_load_made_beside_publications_of_an_administrator(
    database: Database, shop: Pipeline, made: bool
) -> None:
    """What the load left in the registry is judged here; a load itself in test_load_beside."""
    with connect(shop.conninfo()) as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [shop.source.slot])
        system_id = identify(connection).system_id
    registry = Registry.create(shop.lake_path(), shop.name)
    registry.write(PipelineRecord(system_id, 1, shop.source.slot, "headwater_shop", 0, made, False))
    if made:
        assert drop(shop)["dropped"] == [f"slot {shop.source.slot}"]
        assert _slots(database) == []
    else:
        with pytest.raises(Refused, match="known to have made it"):
            drop(shop)
        assert _slots(database) == [(shop.source.slot,)]


def test_drop_is_transient_and_takes_nothing_while_the_slot_is_read(database: Database, tmp_path: Path) -> None:
    from headwater.source.stream import LogStream

    database.execute("create table a (id int primary key)")
    database.allow_publishing()
    pipeline = write_pipeline(tmp_path, database, "public.a")
    _set_up(database, pipeline)
    with connect(pipeline.conninfo()) as connection:
        version = connection.info.server_version
        stream = LogStream(pipeline.conninfo())
        try:
            stream.start(pipeline.source.slot, ("headwater_shop", "headwater_shop_inserts"), 0, version)
            with pytest.raises(Transient) as busy:
                drop(pipeline)
            assert busy.value.code == "already_running"
            assert read_publication(connection, "headwater_shop") is not None
            assert check(pipeline).ok
        finally:
            stream.close()
    assert _slots(database) == [(pipeline.source.slot,)]
