"""Capture points, and the transactions that are open around them: on a real server, as the least-privileged role."""

from __future__ import annotations

import threading

import pytest

from fixtures.postgres import Database, commits_held
from fixtures.waiting import until
from headwater.errors import Transient
from headwater.source import snapshots
from headwater.source.connection import connect
from headwater.source.samples import emit_marker
from headwater.source.snapshots import (
    VisibilitySnapshot,
    capture_point,
    handover_end,
    next_transaction_id,
    open_transactions,
    wait_for_old_transactions,
)

pytestmark = pytest.mark.postgres


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


def test_old_transactions_are_named_while_they_are_waited_for_and_when_they_outlast_it(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_FIRST_WORD_SECONDS", 0.0)
    caplog.set_level("INFO", "headwater")
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
            wait_for_old_transactions(connection, row[0], 1.0, where="table t")
        assert late.value.code == "old_transactions"
        for part in (
            f"process {writer.info.backend_pid}",
            database.owner_role,
            f"prepared transaction '{database.name} prepared'",
            f"database {database.name}",
        ):
            assert part in late.value.message
            assert part in caplog.text
        assert caplog.text.count("table t: waiting, for ") == 1
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


def test_neither_a_marker_nor_a_capture_point_waits_for_a_synchronous_standby(database: Database) -> None:
    database.execute("create table t (id int primary key)")
    database.grant("t")
    with connect(database.conninfo, statement_timeout=20) as connection, database.connect() as writer:
        with commits_held(database.server):
            assert emit_marker(connection) > 0
            held = threading.Thread(target=writer.execute, args=("insert into t values (1)",))
            held.start()
            waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep' and pid = %s"
            with database.superuser() as watcher:
                until(
                    lambda: watcher.execute(waiting, (writer.info.backend_pid,)).fetchone() == (1,),
                    "its commit is held",
                )
            next_transaction_id(connection)  # so that the snapshot ends above it and has to name it
            with capture_point(database.conninfo) as point:
                # Its commit is in the log below the position, and yet the snapshot does not see it.
                assert point.connection.execute("select count(*) from public.t").fetchone() == (0,)
                mine = writer.info.backend_pid  # others of this server may be open as well
                (running,) = (one for one in open_transactions(connection, point.snapshot.xmax) if one.pid == mine)
                assert not point.snapshot.visible(running.xid)
                assert handover_end(connection, point.snapshot) is None
        held.join(20)
        assert not held.is_alive()
        end = handover_end(connection, point.snapshot)
        assert end is not None
        assert end >= point.position.lsn
