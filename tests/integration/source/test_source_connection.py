"""Connections to a real server: refused, unreachable or lost, each has its name, and no message holds the password."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from fixtures.postgres import Database
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import HeadwaterError, Refused, SourceUnreachable, Transient
from headwater.source.connection import Connection, Session, connect, errors_named, identify
from headwater.source.samples import emit_marker, insert_position, take_sample

pytestmark = pytest.mark.postgres

SECRET = "S3cr3t-w0rd"


def failure_of(conninfo: str) -> HeadwaterError:
    """The error of a connection, of which nothing may hold the password."""
    with pytest.raises(HeadwaterError) as caught:
        connect(conninfo)
    error = caught.value
    told = "".join(traceback.format_exception(error)) + repr(error) + str(error.to_json()) + repr(error.__reduce__())
    assert SECRET not in told
    assert error.__context__ is None
    assert error.__cause__ is None
    return error


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_wrong_password_is_refused_without_being_told(database: Database) -> None:
    error = failure_of(database.server.conninfo(database.name, database.role, SECRET))
    assert isinstance(error, Refused)
    assert error.code == "wrong_password"
    assert database.role in error.where


def test_an_unknown_role_and_an_unknown_database_are_refused(database: Database) -> None:
    assert failure_of(database.server.conninfo(database.name, "nobody_here", SECRET)).code == "wrong_password"
    with database.superuser() as connection:
        connection.execute(f"alter role {database.role} password '{SECRET}'")
    unknown = failure_of(database.server.conninfo("no_such_database", database.role, SECRET))
    assert isinstance(unknown, Refused)
    assert unknown.code == "unknown_database"


def test_a_role_that_may_not_connect_is_refused(database: Database) -> None:
    with database.superuser() as connection:
        connection.execute(f"alter role {database.role} password '{SECRET}'")
        connection.execute(f"revoke connect on database {database.name} from {database.role}")
    error = failure_of(database.server.conninfo(database.name, database.role, SECRET))
    assert isinstance(error, Refused)
    assert error.code == "not_authorised"
    with database.superuser() as connection:
        connection.execute(f"alter role {database.role} nologin")
    assert failure_of(database.server.conninfo(database.name, database.role, SECRET)).code == "not_authorised"


def test_a_server_that_is_not_there_is_unreachable() -> None:
    error = failure_of(f"postgresql://me:{SECRET}@127.0.0.1:{closed_port()}/shop")
    assert isinstance(error, SourceUnreachable)
    assert "refused" in error.message
    assert isinstance(failure_of(f"postgresql://me:{SECRET}@no-such-host.invalid/shop"), SourceUnreachable)


def test_a_server_that_does_not_answer_is_unreachable_after_the_time_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        address = f"host=127.0.0.1 port={silent.getsockname()[1]} password={SECRET} connect_timeout=2"
        assert isinstance(failure_of(address), SourceUnreachable)
        assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://me:{SECRET}@x@host/shop",
        f"postgresql://me:x/{SECRET}@host/shop",
        f"postgresql://me:12/{SECRET}@host/shop",
        f"postgresql://me:{SECRET}/x@host/shop",
        f"postgresql://me:1?{SECRET}@host/shop",
        f"host=h passwort={SECRET}",
        f"{SECRET}",
        f"password='{SECRET}",
    ],
)
def test_a_connection_text_that_cannot_be_read_is_refused_without_being_shown(text: str) -> None:
    error = failure_of(text)
    assert isinstance(error, Refused)
    assert error.code == "bad_connection"


@pytest.mark.parametrize("options", ["sslmode=verifyfull", "sslmode=require", "target_session_attrs=any&port=70000"])
def test_an_option_that_cannot_be_right_is_no_outage(database: Database, options: str) -> None:
    """The servers of the wheels are built without TLS."""
    error = failure_of(f"{database.conninfo}?{options}")
    assert isinstance(error, Refused)
    assert error.code == "bad_connection"
    assert "in the connection" in error.remedy


def test_an_at_sign_behind_the_question_mark_is_the_option_s(database: Database) -> None:
    with connect(f"{database.conninfo}?application_name=etl&passfile=/no/such@corp") as connection:
        assert connection.info.dbname == database.name


def test_a_session_has_fixed_settings_whatever_the_role_says(database: Database) -> None:
    with database.superuser() as connection:
        for setting in (
            "datestyle = 'German'",
            "timezone = 'Asia/Tokyo'",
            "bytea_output = 'escape'",
            "extra_float_digits = 0",
            "statement_timeout = '1s'",
            "row_security = on",
            "intervalstyle = 'iso_8601'",
            "default_transaction_isolation = 'repeatable read'",
            "default_transaction_deferrable = on",
            "default_transaction_read_only = on",
            "standard_conforming_strings = off",
        ):
            connection.execute(f"alter role {database.role} set {setting}")
    with connect(database.conninfo, lock_timeout=1.5) as connection:
        row = connection.execute(
            "select date '2024-02-01'::text, timestamptz '2024-02-01 00:00Z'::text, '\\x01'::bytea::text,"
            " (0.1::float8 + 0.2)::text, interval '1 day 2h'::text, current_setting('statement_timeout'),"
            " current_setting('lock_timeout'), current_setting('row_security'), current_setting('client_encoding'),"
            " current_setting('transaction_isolation'), current_setting('transaction_deferrable'),"
            " current_setting('transaction_read_only'), length('\\\\')"
        ).fetchone()
    assert row == (
        *("2024-02-01", "2024-02-01 00:00:00+00", "\\x01", "0.30000000000000004", "1 day 02:00:00"),
        *("0", "1500ms", "off", "UTF8"),
        *("read committed", "off", "off", 2),
    )


def test_errors_of_a_query_get_their_names(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    with connect(database.conninfo, statement_timeout=1.0) as connection:
        with pytest.raises(Refused) as refused, errors_named("table t"):
            connection.execute("select * from public.t")
        assert (refused.value.code, refused.value.where) == ("not_authorised", "table t")
        with pytest.raises(Transient) as late, errors_named("here"):
            connection.execute("select pg_sleep(10)")
        assert late.value.code == "timeout"
        with pytest.raises(psycopg.errors.UndefinedTable), errors_named("here"):
            connection.execute("select * from no_such_table")
        with database.superuser() as other:
            other.execute("select pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
        with pytest.raises(SourceUnreachable), errors_named("here"):
            connection.execute("select 1")


def test_a_lost_server_is_named_wherever_it_is_asked(server_folder: Callable[[], Path], server_binaries: Path) -> None:
    with EmbeddedServer(server_folder(), server_binaries, durable=False) as server:
        connection = connect(server.conninfo())
        server.crash()
        for question in (identify, insert_position, take_sample, emit_marker):
            with pytest.raises((SourceUnreachable, ValueError)):
                question(connection)


def test_a_session_that_was_ended_is_made_again_and_the_question_asked_once_more(shared_database: Database) -> None:
    def pid(connection: Connection) -> int:
        row = connection.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        return int(row[0])

    first = connect(shared_database.conninfo)
    with contextlib.closing(Session(lambda: shared_database.conninfo, first, "headwater replicate")) as session:
        before = session.ask(pid)
        assert session.ask(pid) == before
        with contextlib.suppress(psycopg.OperationalError):
            first.execute("select pg_terminate_backend(pg_backend_pid())")
        after = session.ask(pid)
        assert after != before
        with pytest.raises(psycopg.errors.UndefinedTable):
            session.ask(lambda connection: connection.execute("select * from nowhere"))
        assert session.ask(pid) == after, "an error that is not the connection's ends nothing"


def test_a_password_that_was_right_before_and_is_refused_now_is_worth_another_try(database: Database) -> None:
    def set_password(password: str) -> str:
        with database.superuser() as admin:
            admin.execute(f"alter role {database.role} password '{password}'")
        return database.server.conninfo(database.name, database.role, password)

    given = [set_password("first-S3cret")]
    first = connect(given[-1])
    with contextlib.closing(Session(lambda: given[-1], first, "headwater replicate")) as session:
        second = set_password("second-S3cret")
        with contextlib.suppress(psycopg.OperationalError):
            first.execute("select pg_terminate_backend(pg_backend_pid())")
        with pytest.raises(SourceUnreachable) as found:
            session.ask(lambda connection: connection.execute("select 1"))
        assert (found.value.code, found.value.exit_status) == ("password_changed", 1)
        assert "S3cret" not in str(found.value)
        given.append(second)
        assert session.ask(lambda connection: connection.execute("select 1").fetchone()) == (1,)
