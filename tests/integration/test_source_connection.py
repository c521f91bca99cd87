"""Connections, positions, markers, capture points and slots on a real server, as the least-privileged role."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fixtures.postgres import Database, until_commits_are_held
from headwater.embedded import EmbeddedServer
from headwater.errors import HeadwaterError, LostLease, Refused, SourceUnreachable, Transient
from headwater.position import parse_lsn
from headwater.source.connection import connect, errors_named, identify
from headwater.source.samples import commit_position, emit_marker, insert_position, take_sample
from headwater.source.slot import create_slot, drop_slot, read_slot
from headwater.source.snapshots import (
    VisibilitySnapshot,
    capture_point,
    handover_end,
    next_transaction_id,
    open_transactions,
    wait_for_old_transactions,
)

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


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


# Connections


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


def test_a_session_has_fixed_settings_whatever_the_role_says(database: Database) -> None:
    with database.superuser() as connection:
        for setting in (
            "datestyle = 'German'",
            "timezone = 'Asia/Tokyo'",
            "bytea_output = 'escape'",
            "extra_float_digits = 0",
            "statement_timeout = '1ms'",
            "row_security = on",
            "intervalstyle = 'iso_8601'",
        ):
            connection.execute(f"alter role {database.role} set {setting}")
    with connect(database.conninfo, lock_timeout=1.5) as connection:
        row = connection.execute(
            "select date '2024-02-01'::text, timestamptz '2024-02-01 00:00Z'::text, '\\x01'::bytea::text,"
            " (0.1::float8 + 0.2)::text, interval '1 day 2h'::text, current_setting('statement_timeout'),"
            " current_setting('lock_timeout'), current_setting('row_security'), current_setting('client_encoding')"
        ).fetchone()
    assert row == (
        *("2024-02-01", "2024-02-01 00:00:00+00", "\\x01", "0.30000000000000004", "1 day 02:00:00"),
        *("0", "1500ms", "off", "UTF8"),
    )


def test_errors_of_a_query_get_their_names(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    with connect(database.conninfo, statement_timeout=0.05) as connection:
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


# Positions and samples


def test_a_server_is_known_by_its_identifier_timeline_and_version(database: Database) -> None:
    with connect(database.conninfo) as connection:
        identity = identify(connection)
        with database.superuser() as other:
            row = other.execute(
                "select system_identifier::text, current_setting('server_version_num')::int from pg_control_system()"
            ).fetchone()
        assert row == (identity.system_id, identity.version)
        assert (identity.timeline, identity.in_recovery) == (1, False)


def test_a_standby_is_known_as_such_and_its_timeline_rises_with_its_promotion(
    postgres: EmbeddedServer, make_standby: Callable[[EmbeddedServer], EmbeddedServer]
) -> None:
    standby = make_standby(postgres)
    with connect(postgres.conninfo()) as primary, connect(standby.conninfo()) as connection:
        identity = identify(connection)
        assert identity.in_recovery
        assert (identity.system_id, identity.timeline) == (identify(primary).system_id, 1)
        assert take_sample(connection).lsn > 0
        with pytest.raises(Refused) as refused:
            emit_marker(connection)
        assert refused.value.code == "cannot_mark"
        with capture_point(standby.conninfo()) as point:
            assert point.position.timeline == 1
        connection.execute("select pg_promote(true, 30)")
        # At once, though the last checkpoint is still one of the old timeline.
        assert identify(connection).timeline == 2
        assert not identify(connection).in_recovery


def test_a_commit_position_lies_at_or_above_the_commit_in_the_log(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    database.publish("p", "t")
    with connect(database.conninfo) as reader, database.connect(autocommit=False) as writer:
        create_slot(reader, f"{database.name}_s")
        writer.execute("insert into t values (1)")
        with pytest.raises(ValueError, match="commit it"):
            commit_position(writer)
        writer.commit()
        position = commit_position(writer)
        assert writer.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        seen = peek(reader, database, upto=position.lsn)
        assert [kind for _, kind, _ in seen] == ["B", "R", "I", "C"]
        assert seen[-1][2] <= position.lsn


def test_a_sample_is_above_everything_committed_before_its_time(database: Database) -> None:
    database.execute("create table t (id int)")
    with connect(database.conninfo) as connection, database.connect() as writer:
        before = take_sample(connection)
        writer.execute("insert into t values (1)")
        position = commit_position(writer)
        after = take_sample(connection)
    assert before.time < after.time
    assert before.time.tzinfo is datetime.UTC
    assert before.lsn < position.lsn <= after.lsn


def peek(connection: psycopg.Connection[tuple[Any, ...]], database: Database, upto: int) -> list[tuple[int, str, int]]:
    """Messages in the slot: (their LSN, kind, of a commit its end)."""
    rows = connection.execute(
        "select lsn::text, data from pg_logical_slot_peek_binary_changes(%s, %s::pg_lsn, null, 'proto_version', '1',"
        " 'publication_names', 'p', 'messages', 'true')",
        (f"{database.name}_s", f"{upto >> 32:X}/{upto & 0xFFFFFFFF:X}"),
    ).fetchall()
    messages = []
    for lsn, data in rows:
        assert isinstance(lsn, str)
        assert isinstance(data, bytes)
        end = int.from_bytes(data[10:18], "big") if data[:1] == b"C" else 0
        messages.append((parse_lsn(lsn), data[:1].decode(), end))
    return messages


def test_a_marker_is_flushed_and_met_by_a_reader_above_what_was_asked_before(database: Database) -> None:
    database.publish("p")
    with connect(database.conninfo) as connection:
        create_slot(connection, f"{database.name}_s")
        asked = insert_position(connection)
        marker = emit_marker(connection)
        flushed = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        assert flushed is not None
        assert parse_lsn(flushed[0]) >= marker > asked.lsn
        seen = peek(connection, database, upto=parse_lsn(flushed[0]))
        assert [kind for _, kind, _ in seen] in (["M"], ["B", "M", "C"])
        # Once a reader has read this far, it has passed what was asked: with the message itself, or, before 17, with
        # the end of the transaction that the message is.
        lsn, _, commit_end = seen[-1]
        assert next(at for at, kind, _ in seen if kind == "M") == marker
        assert max(lsn, commit_end) >= marker, (seen, marker)


def test_a_marker_needs_no_transaction_of_the_caller(database: Database) -> None:
    with database.connect_as_headwater(autocommit=False) as connection, pytest.raises(ValueError, match="autocommit"):
        emit_marker(connection)


@contextlib.contextmanager
def missing_synchronous_standby(server: EmbeddedServer) -> Iterator[None]:
    """Commits end in the log but are held back from being visible, until the block ends."""
    with server.connect() as connection:
        connection.execute("alter system set synchronous_standby_names = 'missing'")
        connection.execute("select pg_reload_conf()")
        try:
            until_commits_are_held(server)
            yield
        finally:
            connection.execute("alter system reset synchronous_standby_names")
            connection.execute("select pg_reload_conf()")


def test_neither_a_marker_nor_a_capture_point_waits_for_a_synchronous_standby(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    database.grant("t")
    with connect(database.conninfo, statement_timeout=20) as connection, database.connect() as writer:
        with missing_synchronous_standby(database.server):
            assert emit_marker(connection) > 0
            held = threading.Thread(target=writer.execute, args=("insert into t values (1)",))
            held.start()
            waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep' and pid = %s"
            with database.superuser() as watcher:
                until(lambda: watcher.execute(waiting, (writer.info.backend_pid,)).fetchone() == (1,))
            next_transaction_id(connection)  # so that the snapshot ends above it and has to name it
            with capture_point(database.conninfo) as point:
                # Its commit is in the log below the position, and yet the snapshot does not see it.
                assert point.connection.execute("select count(*) from public.t").fetchone() == (0,)
                (running,) = open_transactions(connection, point.snapshot.xmax)
                assert not point.snapshot.visible(running.xid)
                assert handover_end(connection, point.snapshot) is None
        held.join(20)
        assert not held.is_alive()
        end = handover_end(connection, point.snapshot)
        assert end is not None
        assert end >= point.position.lsn


# Snapshots


def test_a_capture_point_is_one_view_that_other_sessions_share(database: Database) -> None:
    database.execute("create table t (id int primary key)", "insert into t values (1)")
    database.grant("t")
    with database.connect(autocommit=False) as open_writer:
        open_writer.execute("insert into t values (2)")
        before = open_writer.execute("select pg_current_xact_id()::text::bigint").fetchone()
        assert before is not None
        with capture_point(database.conninfo) as point, connect(database.conninfo) as other:
            database.execute("insert into t values (3)")
            other.execute("begin isolation level repeatable read")
            other.execute(f"set transaction snapshot '{point.snapshot_id}'")
            assert other.execute("select id from public.t").fetchall() == [(1,)]
            assert not point.snapshot.visible(before[0])
            assert VisibilitySnapshot.parse(str(point.snapshot)) == point.snapshot
            assert point.snapshot.visible_mask([before[0] & 0xFFFFFFFF]) == [False]
    assert other.closed


def test_old_transactions_are_named_when_they_outlast_the_wait(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    with (
        connect(database.conninfo) as connection,
        database.connect(autocommit=False) as writer,
        database.connect(autocommit=False) as preparer,
    ):
        writer.execute("insert into t values (1)")
        preparer.execute("insert into t values (2)")
        preparer.execute(f"prepare transaction '{database.name} prepared'")
        row = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
        assert row is not None
        with pytest.raises(Transient) as late:
            wait_for_old_transactions(connection, row[0], 0.1, where="table t")
        assert late.value.code == "old_transactions"
        for part in (
            f"process {writer.info.backend_pid}",
            database.owner_role,
            f"prepared transaction '{database.name} prepared'",
            f"database {database.name}",
        ):
            assert part in late.value.message
        assert wait_for_old_transactions(connection, row[0], 10, stopped=lambda: True) is False
        writer.rollback()
        database.execute(f"rollback prepared '{database.name} prepared'")
        assert wait_for_old_transactions(connection, row[0], 10)


def test_a_running_transaction_is_waited_for_although_its_id_is_not_below_the_snapshots_end(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    with connect(database.conninfo) as connection, database.connect(autocommit=False) as writer:
        with database.connect(autocommit=False) as older:
            older.execute("select pg_current_xact_id()")
            writer.execute("insert into t values (1)")
            older.commit()
        # As after ALTER PUBLICATION: the newest ended transaction is older than one that is still open.
        row = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
        (open_id,) = writer.execute("select pg_current_xact_id()::text::bigint").fetchall()
        assert row is not None
        assert open_id[0] >= row[0]
        with pytest.raises(Transient, match=f"process {writer.info.backend_pid} "):
            wait_for_old_transactions(connection, row[0], 0.1)


# Slots


def test_a_slot_is_created_read_and_dropped_by_the_least_privileged_role(database: Database) -> None:
    name = f"{database.name}_slot"
    with connect(database.conninfo) as connection:
        assert read_slot(connection, name) is None
        slot = create_slot(connection, name)
        assert (slot.name, slot.plugin, slot.database) == (name, "pgoutput", database.name)
        assert (slot.active, slot.active_pid, slot.two_phase, slot.invalidation_reason) == (False, None, False, None)
        assert slot.failover is (True if connection.info.server_version >= 170000 else None)
        assert slot.wal_status == "reserved"
        emit_marker(connection)
        later = read_slot(connection, name)
        assert later is not None
        assert later.confirmed_lsn is not None
        assert later.restart_lsn is not None
        assert later.restart_lsn <= later.confirmed_lsn <= insert_position(connection).lsn
        assert later.retained_wal_bytes is not None
        assert later.retained_wal_bytes > 0
        with pytest.raises(Refused) as twice:
            create_slot(connection, name)
        assert twice.value.code == "slot_exists"
        with pytest.raises(Refused) as named:
            create_slot(connection, "Bad Name")
        assert named.value.code == "bad_slot_name"
        assert drop_slot(connection, name) is True
        assert drop_slot(connection, name) is False


def test_failover_is_on_where_asked_for_and_refused_where_the_server_cannot(database: Database) -> None:
    with connect(database.conninfo) as connection:
        off = create_slot(connection, f"{database.name}_off", "off")
        assert not off.failover
        if connection.info.server_version >= 170000:
            assert create_slot(connection, f"{database.name}_on", "on").failover is True
        else:
            with pytest.raises(Refused) as refused:
                create_slot(connection, f"{database.name}_on", "on")
            assert refused.value.code == "no_failover_slots"


def test_a_slot_that_waits_for_an_open_transaction_gives_up_in_time_and_leaves_nothing(database: Database) -> None:
    database.execute("create table t (id int)")
    name = f"{database.name}_slot"
    with (
        connect(database.conninfo, statement_timeout=0.3) as connection,
        database.connect(autocommit=False) as writer,
    ):
        writer.execute("insert into t values (1)")
        with pytest.raises(Transient) as late:
            create_slot(connection, name)
        assert late.value.code == "timeout"
        assert read_slot(connection, name) is None


def test_a_slot_that_somebody_reads_is_not_dropped(database: Database) -> None:
    name = f"{database.name}_s"
    database.publish("p")
    with connect(database.conninfo) as connection:
        create_slot(connection, name)
        reader = psycopg.pq.PGconn.connect(f"{database.conninfo}?replication=database".encode())
        try:
            start = f"START_REPLICATION SLOT {name} LOGICAL 0/0 (proto_version '1', publication_names 'p')"
            started = reader.exec_(start.encode())
            assert started.status == psycopg.pq.ExecStatus.COPY_BOTH, started.error_message
            active = read_slot(connection, name)
            assert active is not None
            assert (active.active, active.active_pid) == (True, reader.backend_pid)
            with pytest.raises(LostLease):
                drop_slot(connection, name)
        finally:
            reader.finish()
