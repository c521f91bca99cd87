"""What the pages show beside a real source: lags, retained WAL, open transactions. Asked seldom, never waited for."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.lakes import HandLake
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, server_setting
from fixtures.waiting import until
from headwater.lake.position_file import read_position_file, write_position_file
from headwater.monitor import source_watch
from headwater.monitor.lateness import Lateness
from headwater.monitor.overview import LOOK_SECONDS, PipelineWatch
from headwater.source.connection import Connection, connect, position_now
from headwater.source.samples import take_sample
from headwater_airflow.page.app import _samples

pytestmark = pytest.mark.postgres


class Watched:
    """A source with the table `a`, its lake published up to now, and a watch of both."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        database.execute("create table a (id int primary key)", "create table other (id int primary key)")
        database.grant("a", "other")
        database.publish("headwater_shop", "a")
        self.slot = f"slot_{database.name}"
        with database.superuser() as connection:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (self.slot,))
        self.pipeline = write_pipeline(folder, database, "public.a", "public.o*")
        with connect(database.conninfo) as connection:
            start = position_now(connection)
        self.lake = HandLake(folder / "lake", start, ["public.a"])
        self.watch = PipelineWatch(self.pipeline)

    def publish(self) -> None:
        with connect(self.database.conninfo) as connection:
            sample = take_sample(connection)
        self.lake.publish(sample.lsn, "public.a", sample=(sample.time, sample.lsn))

    def answered(self) -> dict[str, Any]:
        """The overview with an answer that was asked for after this call."""
        began = time.monotonic()
        found: dict[str, Any] = {}

        def new() -> bool:
            nonlocal found
            found = self.watch.overview()
            asked_at = self.watch._source._answer.asked_at
            return asked_at is not None and asked_at >= began

        until(new, "an answer of the source")
        # A look is kept for a second: the one that is shown may be of just before the answer.
        until(lambda: self.watch.overview()["at"] != found["at"], "another look")
        return self.watch.overview()


@pytest.fixture
def watched(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(source_watch, "ASK_SECONDS", 0.5)
    return Watched(database, tmp_path)


def test_lag_retained_wal_and_tables_to_load_come_from_the_source(watched: Watched) -> None:
    watched.publish()
    first = watched.answered()
    assert first["source"]["answers"] is True
    assert first["state"] == "stopped"  # nobody reads the slot
    assert first["slot"]["name"] == watched.slot
    assert first["slot"]["wal_bound_bytes"] is None
    assert first["tables"] == {"active": 1, "new": 1}  # `other` matches the pattern and was never loaded
    watched.database.execute("insert into a select generate_series(1, 20000)")
    second = watched.answered()
    assert second["lag_bytes"] > first["lag_bytes"] + 1_000_000
    assert second["slot"]["retained_wal_bytes"] > first["slot"]["retained_wal_bytes"] + 1_000_000
    assert second["lag_seconds"] > 0
    watched.publish()
    third = watched.answered()
    assert third["lag_bytes"] < second["lag_bytes"]
    (row,) = [row for row in watched.watch.table_rows() if row["table"] == "public.a"]
    assert row["lag_bytes"] == third["lag_bytes"]


def test_the_bound_on_retained_wal_is_the_servers(watched: Watched) -> None:
    watched.publish()
    with watched.database.superuser() as connection:
        connection.execute("alter system set max_slot_wal_keep_size = '3GB'")
        connection.execute("select pg_reload_conf()")
    try:
        until(lambda: server_setting(watched.database.server, "max_slot_wal_keep_size") == "3GB", "the setting holds")
        assert watched.answered()["slot"]["wal_bound_bytes"] == 3 << 30
    finally:
        with watched.database.superuser() as connection:
            connection.execute("alter system reset max_slot_wal_keep_size")
            connection.execute("select pg_reload_conf()")


def test_the_oldest_open_transaction_is_named(watched: Watched) -> None:
    watched.publish()
    with watched.database.connect(autocommit=False) as writer:
        writer.execute("insert into other values (1)")
        row = writer.execute("select pg_backend_pid()").fetchone()
        assert row is not None
        oldest = watched.answered()["oldest_transaction"]
        assert f"process {row[0]} " in oldest["what"]
        writer.rollback()
    found = watched.answered()["oldest_transaction"]
    assert found is None or f"process {row[0]} " not in found["what"]


def test_all_who_look_share_one_session_at_the_source(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_watch, "ASK_SECONDS", 60)
    watched.publish()
    visits: list[dict[str, Any]] = []

    def counted(conninfo: str, **options: Any) -> Connection:
        visits.append(options)
        return connect(conninfo, **options)

    monkeypatch.setattr(source_watch, "connect", counted)
    for _ in range(50):
        watched.watch.overview()
        watched.watch.details()
    until(lambda: watched.watch._source._answer.state is not None, "an answer")
    assert len(visits) == 1
    assert visits[0]["application_name"] == "headwater page"
    assert 0 < visits[0]["statement_timeout"] <= 5
    sessions = "select count(*) from pg_stat_activity where application_name = 'headwater page'"
    with watched.database.superuser() as connection:
        # A server's process ends a moment behind its client.
        until(lambda: connection.execute(sessions).fetchone() == (0,), "the session has ended")


def test_a_slot_that_is_gone_is_said(watched: Watched) -> None:
    watched.publish()
    with watched.database.superuser() as connection:
        connection.execute("select pg_drop_replication_slot(%s)", (watched.slot,))
    found = watched.answered()
    assert found["running"] is False
    assert found["slot"]["retained_wal_bytes"] is None
    assert found["slot"]["reason"] == "there is no such slot at the source"


@pytest.mark.parametrize("ended", [False, True])
def test_a_driver_that_has_ended_in_order_is_not_shown_as_running(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr("headwater.monitor.overview._ALIVE_SECONDS", 3600.0)
    watched.publish()
    watched.answered()
    watched.publish()
    root = watched.pipeline.lake_path()
    file = read_position_file(root)
    assert file is not None
    write_position_file(root, replace(file, ended=ended))
    assert watched.answered()["running"] is not ended


def test_who_looks_after_a_while_waits_for_a_new_answer(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_watch, "FIRST_SECONDS", 10)
    watched.publish()
    before = watched.answered()["slot"]["retained_wal_bytes"]
    watched.database.execute("insert into a select generate_series(1, 20000)")
    time.sleep(max(2 * source_watch.ASK_SECONDS, LOOK_SECONDS))
    assert watched.watch.overview()["slot"]["retained_wal_bytes"] > before + 1_000_000


def test_an_answer_of_long_ago_is_none(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()

    def conninfo() -> str:
        hold.wait(60)
        return watched.database.conninfo

    watched.publish()
    watched.answered()
    watched.watch._source._conninfo = conninfo
    monkeypatch.setattr(source_watch, "STALE_SECONDS", 1.5)
    try:
        until(lambda: not watched.watch.overview()["source"]["answers"], "the answer has gone stale")
        found = watched.watch.overview()
        assert found["source"]["reason"].startswith("the source is being asked; its last answer is ")
        assert found["lag_seconds"] is None
    finally:
        hold.set()


def test_a_scrape_waits_for_a_source_that_nobody_has_asked_for_a_while(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conninfo() -> str:
        time.sleep(1)
        return watched.database.conninfo

    watched.publish()
    watched.answered()
    watched.watch._source._conninfo = conninfo
    monkeypatch.setattr(source_watch, "STALE_SECONDS", 4.0)
    time.sleep(4.0)  # a busy machine needs its time behind the second of the connection
    assert watched.watch.overview()["source"]["answers"] is False, "a page does not wait"
    up = {metric.name: value for metric, _, value in _samples(watched.watch)}["headwater_source_up"]
    assert up == 1


def test_a_loaded_table_that_no_driver_has_ever_published_becomes_late(database: Database, tmp_path: Path) -> None:
    Watched(database, tmp_path)
    entries: list[dict[str, Any]] = [{"name": "public.a", "freshness": "50ms"}]
    limited, lateness = write_pipeline(tmp_path, database, *entries), Lateness()
    assert lateness.look(limited) == {}, "when it was loaded nobody has seen"
    time.sleep(0.1)
    assert lateness.look(limited)["public.a"]["lag_seconds"] > 0.05


def test_a_table_whose_source_has_another_log_becomes_late(database: Database, tmp_path: Path) -> None:
    watched = Watched(database, tmp_path)
    entries: list[dict[str, Any]] = [{"name": "public.a", "freshness": "50ms"}]
    limited, lateness = write_pipeline(tmp_path, database, *entries), Lateness()
    watched.publish()
    file = read_position_file(watched.lake.root)
    assert file is not None
    # The source was promoted, and no driver follows it.
    before = replace(file.position, timeline=file.position.timeline + 1)
    newest = datetime.now(UTC) - timedelta(hours=1)
    samples = tuple(((newest - timedelta(hours=back)).isoformat(), file.position.lsn - back) for back in (1, 0))
    write_position_file(watched.lake.root, replace(file, position=before, samples=samples))
    assert 3600 < lateness.look(limited)["public.a"]["lag_seconds"] < 3700
    # One of a driver that took no sample counts from the first look at that log.
    write_position_file(watched.lake.root, replace(file, position=before, samples=()))
    time.sleep(0.1)
    assert 0.05 < lateness.look(limited)["public.a"]["lag_seconds"] < 60


def test_a_table_that_is_still_loading_is_not_late(database: Database, tmp_path: Path) -> None:
    registry = Watched(database, tmp_path).lake.registry
    registry.write(replace(registry.tables["public.a"], state="loading"))
    entries: list[dict[str, Any]] = [{"name": "public.a", "freshness": "50ms"}]
    limited, lateness = write_pipeline(tmp_path, database, *entries), Lateness()
    lateness.look(limited)
    time.sleep(0.1)
    assert lateness.look(limited) == {}
