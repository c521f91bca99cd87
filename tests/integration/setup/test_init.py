"""A first pipeline file from what the source holds, and the SQL that gives it what it needs there and nothing more."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from fixtures.jobs import assert_equal, following, lake_rows, load_tables, source_rows, states_of
from fixtures.lake_waits import wait
from fixtures.postgres import Database, server_setting
from fixtures.waiting import until
from headwater.cli import main
from headwater.gate.check import check
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.setup.drop import drop

pytestmark = pytest.mark.postgres

TABLES = [
    "create table orders (id int primary key, paid numeric, at timestamptz, note jsonb)",
    "insert into orders values (1, 1.5, now(), '{}'), (2, 2.5, now(), null)",
    'create schema "Shop"',
    'create table "Shop"."Order ${Lines}" (code text not null unique, n int)',
    'alter table "Shop"."Order ${Lines}" replica identity using index "Order ${Lines}_code_key"',
    """insert into "Shop"."Order ${Lines}" values ('a', 1)""",
    "create table people (id int, region text, secret text, primary key (id, region))",
    "insert into people values (1, 'eu', 'x'), (2, 'us', 'y')",
    "create table measures (at date, n int, primary key (at, n)) partition by range (at)",
    "create table measures_2026 partition of measures for values from ('2026-01-01') to ('2027-01-01')",
    "insert into measures values ('2026-03-01', 1)",
    "create table private (id int primary key, n int)",
    "insert into private values (1, 1)",
    "alter table private enable row level security",
    "create table events (at int, what text)",
    "insert into events values (1, 'seen')",
    "create unlogged table scratch (id int primary key)",
    "analyze",
]
REPLICATED = ["public.orders", '"Shop"."Order ${Lines}"', "public.measures", "public.private"]


@pytest.fixture
def source(database: Database) -> str:
    """The superuser's connection string of a database with tables of every kind: a secret."""
    database.execute(*TABLES)
    return database.server.conninfo(database.name)


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """The name of a role that is not there yet, and what is left of it and of the settings goes at the end."""
    name = f"{database.name}_made"
    yield name
    with database.superuser() as connection:
        connection.execute("alter system reset max_slot_wal_keep_size")
        connection.execute("select pg_reload_conf()")
        until(lambda: server_setting(database.server, "max_slot_wal_keep_size") == "-1", "the setting is as it was")
        if connection.execute("select from pg_roles where rolname = %s", [name]).rowcount:
            connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)).as_string())


def init(capsys: pytest.CaptureFixture[str], *arguments: str, expected: int = 0) -> str:
    assert main(["init", *arguments]) == expected, capsys.readouterr().err
    return capsys.readouterr().out


def statements(script: str) -> list[str]:
    return [line for line in script.splitlines() if line and not line.startswith("--")]


def run(database: Database, script: str) -> None:
    """As a DBA does, each statement on its own."""
    with database.superuser() as connection:
        for statement in statements(script):
            connection.execute(statement.encode())


def test_a_role_made_by_the_printed_sql_and_nothing_more_can_check_load_replicate_and_wait(
    database: Database,
    source: str,
    role: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "shop.yaml"
    options = ["--source", source, "--role", role]
    init(capsys, str(file), *options, "--lake", f"{tmp_path}/lake", "--name", database.name, "--yes")
    text = file.read_text()
    # What a person does then: takes in a table whose rows never change, and leaves out what must stay at the source.
    text = text.replace("  # - name: public.events\n  #   insert_only", "  - name: public.events\n    insert_only")
    part = (
        "  - {name: public.people, columns: {exclude: [secret]}, where: \"region::text = 'eu' or region = ':cat:'\"} #"
    )
    file.write_text(re.sub(r"(?m)^  - public\.people ", part, text))

    script = init(capsys, str(file), *options, "--sql")
    assert not any("max_slot_wal_keep_size" in one for one in statements(script)), "a DBA decides"
    run(database, script.replace("-- ALTER SYSTEM", "ALTER SYSTEM").replace("-- SELECT pg_reload", "SELECT pg_reload"))

    with database.superuser() as connection:
        connection.execute(f"alter role {role} password 'of-the-test'")  # as \\password does
        may = "select rolsuper, rolcreatedb, rolcreaterole, rolreplication from pg_roles where rolname = %s"
        assert connection.execute(may, [role]).fetchone() == (False, False, False, True)
        owned = "select from pg_shdepend where deptype = 'o' and refobjid = %s::regrole"
        assert connection.execute(owned, [role]).rowcount == 0
    monkeypatch.setenv("HEADWATER_SOURCE", database.server.conninfo(database.name, role, "of-the-test"))
    pipeline = load_pipeline(file)
    assert check(pipeline).problems == ()
    assert set(states_of(load_tables(pipeline)).values()) == {"catching up"}
    database.execute(
        "update orders set paid = 7 where id = 1",
        "insert into measures values ('2026-04-01', 2)",
        "insert into events values (2, 'again')",
        "update people set secret = 'z'",
        "update private set n = 2",
    )
    with following(pipeline):
        assert wait(pipeline, None, "now", 60).outcome == "satisfied"
    assert lake_rows(pipeline, "public.orders", ["id", "paid"]) == [(1, "7"), (2, "2.5")]
    assert_equal(database, pipeline, '"Shop"."Order ${Lines}"', "public.private", "public.events")
    assert lake_rows(pipeline, "public.people") == [(1, "eu")]
    assert lake_rows(pipeline, "public.measures", ["at", "n"]) == source_rows(database, "measures")[1]
    again = statements(init(capsys, str(file), "--sql"))
    assert again, "grants may be run twice"
    assert all(statement.startswith("GRANT ") for statement in again)
    # What the script made `drop` knows again: as the role what it may, as the DBA the rest.
    slot, publications = pipeline.source.slot, [pipeline.source.publication, f"{pipeline.source.publication}_inserts"]
    assert drop(pipeline) == {"dropped": [f"slot {slot}"], "kept": [f"publication {name}" for name in publications]}
    monkeypatch.setenv("HEADWATER_SOURCE", source)
    dropped = drop(load_pipeline(file))
    assert dropped == {"dropped": [f"publication {name}" for name in publications], "kept": []}


def test_tables_are_listed_with_what_tells_their_rows_apart_and_why_some_cannot_be_replicated(
    database: Database, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shop.yaml"
    found = json.loads(init(capsys, str(file), "--source", source, "--lake", f"{tmp_path}/lake", "--json"))
    tables = found["tables"]
    assert [name for name, table in tables.items() if not table["replicated"]] == ["public.events", "public.scratch"]
    assert tables["public.orders"]["identity"] == "primary key (id)"
    assert (tables["public.orders"]["rows"], tables["public.measures"]["rows"]) == (2, 1)
    assert tables["public.orders"]["bytes"] > 0
    assert tables["public.orders"]["as_text"].keys() == {"paid", "note"}
    assert "decimal(p,s)" in tables["public.orders"]["as_text"]["paid"]
    assert tables["public.orders"]["may_not_fit"] == ["at"]
    assert tables['"Shop"."Order ${Lines}"']["identity"] == 'index "Order ${Lines}_code_key" (code)'
    assert tables["public.events"]["identity"] == "none"
    assert "no primary key" in tables["public.events"]["reason"]
    assert "insert_only: true" in tables["public.events"]["remedy"]
    assert tables["public.scratch"]["remedy"] == "ALTER TABLE public.scratch SET LOGGED"
    pipeline = load_pipeline(file, {"HEADWATER_SOURCE": source})
    assert [str(entry.name) for entry in pipeline.tables] == sorted([*REPLICATED, "public.people"])
    text = file.read_text()
    assert "#   insert_only: true" in text
    assert "# public.scratch: it is unlogged" in text
    # The source needs publications, rights and a slot; nothing else keeps the pipeline from running.
    assert {problem.code for problem in check(pipeline).problems} <= {"slot_wal_unlimited"}


def test_the_password_is_neither_in_the_file_nor_printed(
    database: Database, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    password = psycopg.conninfo.conninfo_to_dict(source)["password"]
    assert password
    file = tmp_path / "shop.yaml"
    assert main(["init", str(file), "--source", source, "--lake", f"{tmp_path}/lake", "--yes"]) == 0
    said = capsys.readouterr()
    assert "connection: ${HEADWATER_SOURCE}" in file.read_text()
    assert "export HEADWATER_SOURCE=" in file.read_text()
    assert "user=headwater" in said.out
    assert "password=..." in said.out
    for text in (file.read_text(), said.out, said.err):
        assert str(password) not in text


def test_a_pattern_stays_one_and_leaves_out_what_cannot_be_replicated(
    database: Database, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shop.yaml"
    arguments = ["--source", source, "--lake", f"{tmp_path}/lake", "--table", "public.*", "--exclude", "public.p*"]
    init(capsys, str(file), *arguments, "--yes")
    [entry] = load_pipeline(file, {"HEADWATER_SOURCE": source}).tables
    assert str(entry.name) == "public.*"
    assert [str(name) for name in entry.exclude] == ["public.p*", "public.events", "public.scratch"]


def test_a_file_is_written_over_only_when_told(
    database: Database, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text("mine")
    arguments = [str(file), "--source", source, "--lake", f"{tmp_path}/lake", "--json"]
    refusal = json.loads(init(capsys, *arguments, expected=2))
    assert refusal["error"]["code"] == "file_exists"
    assert file.read_text() == "mine"
    init(capsys, *arguments, "--force")
    assert "pipeline:" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], "usage"),  # no lake, and nobody to ask
        (["--lake", "/lake", "--table", "public.nowhere"], "table_missing"),
        (["--lake", "/lake", "--table", "public.events"], "nothing_to_replicate"),
    ],
)
def test_what_cannot_become_a_pipeline_is_refused_and_writes_nothing(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str
) -> None:
    file = tmp_path / "shop.yaml"
    refusal = json.loads(init(capsys, str(file), "--source", source, *arguments, "--json", expected=2))
    assert refusal["error"]["code"] == code
    assert not file.exists()


def test_a_database_without_a_table_is_refused(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "shop.yaml"), "--source", database.owner, "--lake", "/lake", "--json"]
    assert json.loads(init(capsys, *arguments, expected=2))["error"]["code"] == "nothing_to_replicate"


def test_a_person_at_a_terminal_is_asked_until_the_answers_will_do(database: Database, tmp_path: Path) -> None:
    database.execute("create table orders (id int primary key)", "create table other (id int primary key)")
    options = psycopg.conninfo.conninfo_to_dict(database.owner)
    secret = str(options.pop("password"))
    answers = [
        ("Source (", psycopg.conninfo.make_conninfo("", **options)),
        ("Password", secret),
        ("Name of the pipeline", "No Name"),
        ("Name of the pipeline", "shop"),
        ("Lake (", f"file://{tmp_path}/lake"),
        ("Tables, ", "public.orders"),
        ("Write ", "y"),
    ]
    said = at_a_terminal(["init", str(tmp_path / "shop.yaml")], answers)
    assert secret not in said
    assert "begins with a letter" in said
    pipeline = load_pipeline(tmp_path / "shop.yaml", {"HEADWATER_SOURCE": database.owner})
    assert (pipeline.name, [str(entry.name) for entry in pipeline.tables]) == ("shop", ["public.orders"])


def at_a_terminal(arguments: list[str], answers: list[tuple[str, str]]) -> str:
    """What `headwater` says at a terminal of its own, where each question that appears is answered in turn."""
    ours, theirs = pty.openpty()
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}
    environment.pop("HEADWATER_SOURCE", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "headwater.cli", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    said = ""

    def read() -> str:
        nonlocal said
        with contextlib.suppress(OSError):  # nothing yet, or nobody writes any more
            said += os.read(ours, 65536).decode()
        return said

    def asks(question: str, since: int) -> Callable[[], bool]:
        return lambda: question in read()[since:] or process.poll() is not None

    seen = 0
    for question, answer in answers:
        until(asks(question, seen), f"the question {question!r}; so far: {said}")
        assert question in said[seen:], said
        seen = len(said)
        os.write(ours, f"{answer}\n".encode())
    until(lambda: read() and process.poll() is not None, "the command ends")
    read()
    os.close(ours)
    assert process.returncode == 0, said
    return said
