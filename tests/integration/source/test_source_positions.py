"""Which server it is, where its log stands, and what its clock says: on a real server, as the least-privileged role."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from fixtures.postgres import Database
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import Refused, SourceUnreachable
from headwater.position import parse_lsn
from headwater.source.connection import connect, identify
from headwater.source.samples import commit_position, emit_marker, insert_position, take_sample
from headwater.source.slot import create_slot
from headwater.source.snapshots import capture_point

pytestmark = pytest.mark.postgres


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
        with pytest.raises(Refused) as refused:
            emit_marker(connection)
        assert refused.value.code == "cannot_mark"
        # What it has replayed is less than what was committed: neither a position to wait for nor a state to load.
        for ask in (take_sample, insert_position, commit_position):
            with pytest.raises(SourceUnreachable) as not_there:
                ask(connection)
            assert (not_there.value.code, not_there.value.remedy) == (
                "in_recovery",
                "name the primary in source.connection; with several hosts add target_session_attrs=read-write",
            )
        with pytest.raises(SourceUnreachable, match="only its primary knows"), capture_point(standby.conninfo()):
            pass
        connection.execute("select pg_promote(true, 30)")
        # At once, though the last checkpoint is still one of the old timeline.
        assert identify(connection).timeline == 2
        assert not identify(connection).in_recovery
        assert take_sample(connection).lsn <= insert_position(connection).lsn


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
