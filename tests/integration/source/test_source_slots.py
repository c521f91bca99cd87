"""Replication slots on a real server, as the least-privileged role."""

from __future__ import annotations

import psycopg
import pytest

from fixtures.postgres import Database
from headwater.errors import LostLease, Refused, Transient
from headwater.source.connection import connect
from headwater.source.samples import emit_marker, insert_position
from headwater.source.slot import create_slot, drop_slot, read_slot

pytestmark = pytest.mark.postgres


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
