"""A lease has one holder at a time, however the jobs that want it meet. Its life is the holder's session."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fixtures.jobs import until
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Connection, Database
from headwater.errors import LostLease
from headwater.gate import lease
from headwater.lake.registry import Lease, Registry, now_text
from soak.drivers_together import LeaseWatch

pytestmark = pytest.mark.postgres

DEAD = Lease(lease.LOAD, "dead", "headwater load dead", "host", 1, "2026-01-01T00:00:00Z")


def _registry(root: Path) -> Registry:
    return Registry.open(str(root), "shop") or Registry.create(str(root), "shop")


def _cut(database: Database, session: str) -> None:
    with database.superuser() as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = %s", [session]
        )


def test_of_two_that_find_a_lease_free_at_once_one_takes_it_and_the_other_is_told_who(
    shared_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _registry(tmp_path).write(DEAD)
    look, both_looked, ended = lease.is_alive, threading.Barrier(2), threading.Barrier(2)

    def look_at_once(connection: Connection, session: str) -> bool:
        found = look(connection, session)
        if session == DEAD.session:
            both_looked.wait(60)
        return found

    monkeypatch.setattr(lease, "is_alive", look_at_once)

    def take() -> str:
        try:
            with lease.hold(shared_database.conninfo, _registry(tmp_path), lease.LOAD) as mine:
                ended.wait(60)
                return mine.holder
        except LostLease as lost:
            ended.wait(60)
            return f"{lost.code}: {lost}"

    with ThreadPoolExecutor(2) as pool:
        told = sorted([future.result() for future in [pool.submit(take), pool.submit(take)]], key=len)
    assert told[1].startswith("lease_held: "), told
    assert "a load is running since" in told[1]
    assert _registry(tmp_path).leases[lease.LOAD].holder == told[0]


def test_a_holder_whose_session_was_cut_leaves_the_lease_to_the_next_one_when_it_ends(
    shared_database: Database, tmp_path: Path
) -> None:
    conninfo = shared_database.conninfo
    with contextlib.ExitStack() as first:
        registry = _registry(tmp_path)
        cut = first.enter_context(lease.hold(conninfo, registry, lease.LOAD))
        _cut(shared_database, cut.session)
        with lease.hold(conninfo, _registry(tmp_path), lease.LOAD) as second:
            registry.refresh()
            first.close()
            assert _registry(tmp_path).leases[lease.LOAD] == second
            with pytest.raises(LostLease), lease.hold(conninfo, _registry(tmp_path), lease.LOAD):
                pass
    assert _registry(tmp_path).leases[lease.LOAD].session == ""


@pytest.mark.parametrize("who", ["a second holder beside the first", "one who lets go for another"])
def test_the_soak_notices(database: Database, tmp_path: Path, who: str) -> None:
    pipeline = write_pipeline(tmp_path, database, "public.orders")
    registry = Registry.create(pipeline.lake_path(), pipeline.name)
    registry.write(DEAD)
    with LeaseWatch(database, pipeline) as watch, lease.hold(database.conninfo, registry, lease.LOAD) as first:
        until(lambda: first.session in watch.seen, "the watch has seen the session")
        watch.refuse_two_holders()
        session = "headwater load another" if who.startswith("a second") else ""
        registry.write(replace(first, holder="another", session=session, taken_at=now_text()))
        looked = datetime.now(UTC)  # a look that had begun before the write says nothing
        until(lambda: watch.seen[first.session] > looked, "the watch has seen it again")
    with pytest.raises(AssertionError, match="the holder lived at" if session else "another than the holder"):
        watch.refuse_two_holders()


def test_a_lease_that_was_let_go_has_no_session_that_could_live(shared_database: Database) -> None:
    with shared_database.connect() as connection:
        nameless = connection.execute("select from pg_stat_activity where application_name = ''").rowcount
        assert nameless, "the server's own processes"
        assert not lease.is_alive(connection, "")
