"""A log connection that drops is made again: nothing comes twice, nothing is missing, and what cannot go on says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from fixtures.jobs import in_thread, until
from fixtures.log_of import SLOT, Committed, Source, read_to, source_of, transactions
from fixtures.postgres import Database, new_database
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import SlotGap, SourceUnreachable, Transient
from headwater.log.blocks import Chunk
from headwater.log.hiding import Hiding
from headwater.position import format_lsn
from headwater.replicate.reader import silence
from headwater.replicate.reader.child import ReaderProcess
from headwater.replicate.reader.handle import LogReader
from headwater.replicate.reader.silence import Silence, silence_limit
from headwater.source.connection import Session, connect
from headwater.source.slot import create_slot, drop_slot
from headwater.source.stream import LogStream

pytestmark = pytest.mark.postgres

FILL = "insert into t select g, repeat('x', 700) from generate_series(%s::bigint, %s::bigint) g"


@pytest.fixture(scope="module")
def server(server_binaries: Path, server_folder: Callable[[], Path]) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(server_folder(), server_binaries, durable=False) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedServer) -> Iterator[Database]:
    with new_database(server) as made:
        yield made


@pytest.fixture
def source(database: Database) -> Iterator[Source]:
    database.execute("create table t (id bigint primary key, note text)")
    with source_of(database, "t") as made:
        yield made


def ids(chunks: list[Chunk]) -> list[int]:
    return [n for transaction in transactions(chunks) for n in _inserted(transaction)]


def _inserted(transaction: Committed) -> list[int]:
    return [change.new["id"] for change in transaction.changes if change.new is not None]


def walsender(source: Source) -> int | None:
    """Its process, if somebody reads the slot."""
    with connect(source.database.conninfo) as connection:
        row = connection.execute("select active_pid from pg_replication_slots where slot_name = %s", [SLOT]).fetchone()
    return row[0] if row else None


def cut_off(source: Source) -> None:
    """End the log connection as an administrator or a broken network does."""
    pid = walsender(source)
    with source.database.superuser() as admin:
        admin.execute("select pg_terminate_backend(%s, 10000)", [pid])


@contextmanager
def writing(source: Source) -> Iterator[Callable[[], list[int]]]:
    """Small transactions all the time; gives what has committed when called, which ends it."""
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        number = 0
        while not stop.wait(0.002):
            number += 1
            try:
                with source.database.connect() as connection:
                    while not stop.is_set():
                        connection.execute("insert into t values (%s, 'x')", [number])
                        written.append(number)
                        number += 1
            except psycopg.Error:
                pass  # the server is away; whether the last one committed is for the table to say

    thread = threading.Thread(target=write, daemon=True)
    thread.start()

    def end() -> list[int]:
        stop.set()
        thread.join(30)
        return [row[0] for row in source.database.query("select id from t order by id")]

    yield end
    stop.set()
    thread.join(30)


def test_nothing_is_lost_or_doubled_when_the_connection_is_ended_again_and_again(source: Source) -> None:
    chunks: list[Chunk] = []
    with LogReader(source.options()) as reader, writing(source) as end:
        for _ in range(4):
            chunks += read_to(reader, source.position())
            before = walsender(source)
            cut_off(source)
            until(lambda before=before: walsender(source) not in (None, before), "the slot is read again")  # type: ignore[misc]
        written = end()
        chunks += read_to(reader, source.position())
    assert ids(chunks) == written


def restart(source: Source, reader: LogReader, mode: str) -> list[Chunk]:
    """A server that shuts down waits until everything is confirmed: the driver's part, which is played here."""
    chunks: list[Chunk] = []
    restarting = in_thread(lambda: source.database.server.restart(mode))  # type: ignore[arg-type]
    while not restarting.done():
        reader.wait(0.05)
        chunks += read_to(reader, 0)
        if reader.reply_wanted:
            reader.confirm(reader.read_position)
    restarting.result()
    return chunks


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_of_the_server_loses_and_doubles_nothing(source: Source, mode: str) -> None:
    chunks: list[Chunk] = []
    with LogReader(source.options()) as reader, writing(source) as end:
        lost = source.database.connect(autocommit=False)
        lost.execute(FILL, [1_000_000, 1_012_000])
        chunks += read_to(reader, source.position())
        chunks += restart(source, reader, mode)
        lost.close()
        until(lambda: walsender(source), "the slot is read again")
        written = end()
        source.database.execute("insert into t values (-1, 'after')")
        chunks += read_to(reader, source.position())
    assert ids(chunks) == [*written, -1]


def test_a_transaction_in_progress_begins_anew_on_the_next_connection(source: Source) -> None:
    with LogReader(source.options()) as reader, source.database.connect(autocommit=False) as writer:
        writer.execute(FILL, [1, 12_000])
        source.database.execute("insert into t values (0, 'x')")
        chunks = read_to(reader, source.position())
        before = walsender(source)
        cut_off(source)
        writer.execute(FILL, [12_001, 24_000])
        until(lambda: walsender(source) not in (None, before), "the slot is read again")
        writer.commit()
        chunks += read_to(reader, source.position())
    assert ids(chunks) == list(range(24_001))


def test_on_another_connection_nothing_is_read_before_the_driver_says_so(source: Source) -> None:
    """A job that began while there was none saw no driver."""
    with LogReader(replace(source.options(), hiding=None)) as reader, source.database.superuser() as admin:

        def leaves_what_was_sent() -> bool:
            position, sender = source.position(), walsender(source)
            sent = "select sent_lsn >= %s::pg_lsn, now() from pg_stat_replication where pid = %s"
            found = (False, None)

            def is_sent() -> bool:
                nonlocal found
                found = admin.execute(sent, [format_lsn(position), sender]).fetchone() or found
                return found[0]

            until(is_sent, "the server has sent it")
            later = "select reply_time > %s from pg_stat_replication where pid = %s"
            until(lambda: admin.execute(later, [found[1], sender]).fetchone() == (True,), "the reader is awake")
            return not reader.waiting() and reader.read_position < position

        reader.hide(Hiding())
        source.database.execute("insert into t values (1, 'x')")
        chunks = read_to(reader, source.position())
        cut_off(source)
        until(lambda: reader.started_again, "the slot is read again")
        source.database.execute("insert into t values (2, 'x')")
        assert leaves_what_was_sent()
        before = reader.started_again
        cut_off(source)
        until(lambda: reader.started_again > before, "the slot is read once more")
        reader.read_on(before)  # what was asked for between the two connections is not known by then
        reader.hide(Hiding())  # answered in their order
        assert leaves_what_was_sent()
        reader.read_on(reader.started_again)
        chunks += read_to(reader, source.position())
    assert ids(chunks) == [1, 2]


def test_a_new_password_is_asked_for_when_the_connection_has_dropped(source: Source) -> None:
    database = source.database
    with database.superuser() as admin:
        admin.execute(f"alter role {database.role} password 'first-S3cret'")
        first = database.server.conninfo(database.name, database.role, "first-S3cret")
        second = database.server.conninfo(database.name, database.role, "second-S3cret")
        with LogReader(source.options(conninfo=first), conninfo=lambda: second) as reader:
            admin.execute(f"alter role {database.role} password 'second-S3cret'")
            pid = admin.execute("select active_pid from pg_replication_slots where slot_name = %s", [SLOT]).fetchone()
            assert pid is not None
            admin.execute("select pg_terminate_backend(%s, 10000)", [pid[0]])
            database.execute("insert into t values (1, 'x')")
            chunks = read_to(reader, source.position())
    assert ids(chunks) == [1]


def test_a_slot_that_was_moved_meanwhile_is_a_gap(source: Source) -> None:
    database = source.database
    with LogReader(source.options()) as reader, database.superuser() as admin:
        database.execute("insert into t values (1, 'x')")
        read_to(reader, source.position())
        admin.execute(f"alter role {database.role} nologin")
        cut_off_as(admin, SLOT)
        database.execute("insert into t values (2, 'missed')")
        admin.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", [SLOT])
        admin.execute(f"alter role {database.role} login")
        error = ending(reader)
    assert isinstance(error, SlotGap), error


def test_a_slot_that_was_made_anew_meanwhile_is_a_gap(source: Source) -> None:
    database = source.database
    with LogReader(source.options()) as reader, database.superuser() as admin:
        admin.execute(f"alter role {database.role} nologin")
        cut_off_as(admin, SLOT)
        with connect(database.server.conninfo(database.name)) as connection:
            drop_slot(connection, SLOT)
            database.execute("insert into t values (2, 'missed')")
            create_slot(connection, SLOT)
        admin.execute(f"alter role {database.role} login")
        error = ending(reader)
    assert isinstance(error, SlotGap), error


def test_a_server_that_stays_away_ends_the_reader(source: Source) -> None:
    options = replace(source.options(), patience=1.0)
    with LogReader(options) as reader:
        source.database.server.stop("immediate")
        error = ending(reader)
        source.database.server.start()
    assert isinstance(error, SourceUnreachable), error
    assert source.database.name not in str(error.remedy)


def refuse_silence(source: Source, reader: LogReader) -> None:
    """As a driver does before a commit; it has heard nothing for longer than it may."""
    with connect(source.database.conninfo) as connection:
        limit = silence_limit(connection)
        assert time.monotonic() - reader.heard > limit
        session = Session(lambda: source.database.conninfo, connection, "headwater replicate")
        Silence(reader, session, SLOT, limit, threading.Event()).refuse()


def test_a_driver_that_takes_nothing_stalls_the_reader_and_not_the_connection(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than wal_sender_timeout (3 s here), with more log than the budget. It hears nothing meanwhile, and may
    commit while the slot is its own."""
    with source.database.superuser() as admin:
        admin.execute(f"alter role {source.database.role} set wal_sender_timeout = '3s'")
    memory = 1 << 20
    with LogReader(source.options(memory=memory)) as reader:
        before = walsender(source)
        for first in range(0, 40_000, 1000):
            with source.database.connect() as connection:
                connection.execute(FILL, [first, first + 999])
        until(lambda: sum(chunk.size for chunk in reader.waiting()) >= memory, "the budget is used up")
        with source.database.superuser() as admin:
            row = admin.execute("select now() + interval '4 s'").fetchone()
            assert row is not None
            answered = "select reply_time > %s from pg_stat_replication where pid = %s"
            until(lambda: admin.execute(answered, [row[0], before]).fetchone() == (True,), "it answers for 4 s")
        held = sum(chunk.size for chunk in reader.waiting())
        assert held < memory + (8 << 20)
        refuse_silence(source, reader)
        monkeypatch.setattr(silence, "RECONNECT_SECONDS", 0.5)
        monkeypatch.setattr(reader, "walsender", 0)
        with pytest.raises(Transient, match="the server has not answered for"):
            refuse_silence(source, reader)
        chunks = read_to(reader, source.position())
        assert walsender(source) == before
    assert ids(chunks) == list(range(40_000))


def cut_off_as(admin: psycopg.Connection[tuple[object, ...]], slot: str) -> None:
    admin.execute(
        "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where slot_name = %s", [slot]
    )
    inactive = "select not active from pg_replication_slots where slot_name = %s"
    until(lambda: admin.execute(inactive, [slot]).fetchone() == (True,), "nobody reads the slot")


def ending(reader: LogReader) -> Exception:
    """What the reader ends with."""
    until(lambda: reader.ended, "the reader ends", 60)
    with pytest.raises(Exception) as ended:
        reader.wait(0)
    return ended.value


def test_a_driver_that_was_silent_finds_the_slot_free_for_others_and_then_its_own_again(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake = threading.Event()
    awake.set()
    tell = ReaderProcess.tell

    def tell_awake(process: ReaderProcess, word: str, value: object = None) -> None:
        if awake.is_set() or word != "alive":
            tell(process, word, value)

    monkeypatch.setattr(ReaderProcess, "tell", tell_awake)
    with LogReader(replace(source.options(), driver_silence=2.0)) as reader:
        source.database.execute("insert into t values (1, 'before')")
        found = read_to(reader, source.position())
        awake.clear()
        until(lambda: walsender(source) is None, "the slot is given back")
        source.database.execute("insert into t values (2, 'meanwhile')")
        awake.set()
        found += read_to(reader, source.position())
        assert walsender(source) is not None
    assert ids(found) == [1, 2]


def test_a_log_connection_has_no_transaction_timeout_whatever_its_roles_is(database: Database) -> None:
    with database.superuser() as superuser:
        if superuser.info.server_version < 170000:
            pytest.skip("the server has no transaction_timeout")
        superuser.execute(f"alter role {database.role} set transaction_timeout = '7s'")
    stream = LogStream(database.conninfo)
    assert stream._query("show transaction_timeout") == [["0"]]
    stream.close()
