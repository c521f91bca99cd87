"""Whoever mends the lake does it alone: what a driver has just written is never taken for what a power cut has left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.jobs import beside, following, in_thread, lake_rows, registry_of
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.errors import LostLease, Transient
from headwater.gate import recovery
from headwater.gate.drivers import drivers_lock, without_driver
from headwater.lake.ledger import Ledger, read_epoch
from headwater.load.driver_answers import is_running
from headwater.maintain import maintain as caring
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate import start
from headwater.replicate.replicate import replicate
from headwater.source.connection import Connection, connect, identify
from headwater.source.slot import SlotState, read_slot
from headwater.source.stream import LogStream

pytestmark = pytest.mark.postgres


@pytest.fixture
def pipeline(database: Database, tmp_path: Path) -> Pipeline:
    database.allow_publishing()
    database.execute("create table plain (id int primary key)", "insert into plain select generate_series(1, 5)")
    return pipeline_in_step(tmp_path, database, "public.plain")


@pytest.fixture
def connection(pipeline: Pipeline) -> Iterator[Connection]:
    with contextlib.closing(connect(pipeline.conninfo())) as made:
        yield made


def _epoch(pipeline: Pipeline) -> int:
    newest = read_epoch(pipeline.lake_path())
    assert newest is not None
    return newest.epoch


def test_nothing_is_mended_beside_a_driver_whose_slot_is_free_for_a_moment(
    pipeline: Pipeline, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(*of: Any) -> SlotState:
        slot = read_slot(*of)
        assert slot is not None
        return replace(slot, active=False)

    with following(pipeline) as driver:
        until(lambda: is_running(connection, pipeline) or driver.done(), "the driver runs")
        monkeypatch.setattr(recovery, "read_slot", free)
        monkeypatch.setattr(recovery, "mend", lambda *_: pytest.fail("it was mended beside a driver"))
        assert recovery.mend_lake(connection, pipeline, registry_of(pipeline)) is None
        assert recovery.mended_lake(connection, pipeline, registry_of(pipeline)) == {}
    monkeypatch.setattr(recovery, "mend", lambda *_: {"public.plain": "looked at"})
    assert recovery.mend_lake(connection, pipeline, registry_of(pipeline)) == {"public.plain": "looked at"}


def test_a_driver_writes_nothing_while_a_job_mends(
    pipeline: Pipeline, connection: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    mending, over = threading.Event(), threading.Event()

    def slowly(*_: Any) -> dict[str, str]:
        mending.set()
        assert over.wait(60)
        return {}

    lock = Path(drivers_lock(pipeline.lake_path()))
    monkeypatch.setattr(recovery, "mend", slowly)
    job = in_thread(lambda: recovery.mend_lake(connection, pipeline, registry_of(pipeline)))
    assert mending.wait(60)
    before = _epoch(pipeline)
    monkeypatch.setattr(start, "mended_lake", lambda *_: {})  # it has looked just before the job did
    with following(pipeline) as driver:
        waits = f":{lock.stat().st_ino} "
        until(
            lambda: driver.done() or any("->" in line and waits in line for line in _locks()),
            "the driver waits for the job",
        )
        database.execute("insert into plain values (6)")
        assert _epoch(pipeline) == before
        over.set()
        assert job.result(60) == {}
        until(lambda: _epoch(pipeline) > before or driver.done(), "the driver goes on")


def test_who_takes_over_behind_a_power_cut_mends_first(
    pipeline: Pipeline, connection: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source still serves the connection of the driver that is gone."""
    waited, begun = recovery.await_lost_driver, threading.Event()
    mended = _mended(pipeline, connection, monkeypatch)
    gone = _gone_driver(pipeline, connection, database)

    def begins(*of: Any) -> None:
        begun.set()
        waited(*of)

    monkeypatch.setattr(start, "await_lost_driver", begins)
    with beside(lambda stop: replicate(pipeline, None, None, stop, True)) as driver:
        assert begun.wait(60)
        assert not mended
        gone.close()
        database.execute("insert into plain values (7)")
        until(lambda: len(lake_rows(pipeline, "public.plain")) == 6 or driver.done(), "the driver goes on")
    assert mended == [False]


@pytest.mark.parametrize("take_over", [False, True])
def test_who_finds_the_lost_driver_still_there_mends_when_the_slot_is_free(
    pipeline: Pipeline,
    connection: Connection,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    take_over: bool,
) -> None:
    """Else it would tell the source the position of a row that never reached the disk."""
    mended = _mended(pipeline, connection, monkeypatch)
    gone = _gone_driver(pipeline, connection, database)
    monkeypatch.setattr(recovery, "_LOST_SECONDS", 0.1)
    mended_at_first = list[bool]()

    class Opened(Ledger):
        def __init__(self, *of: Any) -> None:
            if not mended_at_first:
                mended_at_first.append(bool(mended))
                with without_driver(pipeline.lake_path()) as no_driver:
                    assert no_driver, "who has not mended tells nobody that the lake is"
                gone.close()
                until(lambda: take_over or not is_running(connection, pipeline), "the source gives the lost driver up")
            super().__init__(*of)

    monkeypatch.setattr(start, "Ledger", Opened)
    with beside(lambda stop: replicate(pipeline, None, None, stop, take_over)) as driver:
        database.execute("insert into plain values (7)")
        until(lambda: len(lake_rows(pipeline, "public.plain")) == 6 or driver.done(), "the driver goes on")
    assert (mended_at_first, mended) == ([False], [False])


def test_who_finds_the_slot_taken_by_a_driver_of_no_lake_is_refused(
    pipeline: Pipeline, connection: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = _gone_driver(pipeline, connection, database)
    with contextlib.closing(gone), pytest.raises(LostLease, match="in use by server process"):
        replicate(pipeline, "now", None, threading.Event())
    until(lambda: not is_running(connection, pipeline), "the slot is free")
    looks = [None, None]
    mended_lake = recovery.mended_lake
    # It came free between two looks.
    monkeypatch.setattr(start, "mended_lake", lambda *of: looks.pop() if looks else mended_lake(*of))
    assert replicate(pipeline, "now", None, threading.Event())["stopped_by"] == "until"
    assert not looks


def test_a_lake_that_nobody_could_mend_is_not_maintained(
    pipeline: Pipeline, connection: Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as torn:
        torn.setattr(caring, "ledger_is_whole", lambda root: False)
        torn.setattr(caring, "keep_ledger", lambda *_: pytest.fail("a checkpoint would stand above what is torn"))
        with contextlib.closing(_gone_driver(pipeline, connection, database)):
            with pytest.raises(Transient, match="power cut"):
                caring.maintain(pipeline)
            torn.undo()
            assert caring.maintain(pipeline)["ledger"] is not None


def test_a_driver_that_works_is_not_waited_for(pipeline: Pipeline, connection: Connection) -> None:
    with following(pipeline) as driver:
        until(lambda: is_running(connection, pipeline) or driver.done(), "the driver runs")
        recovery.await_lost_driver(connection, pipeline, threading.Event())
        assert is_running(connection, pipeline)


def _mended(pipeline: Pipeline, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that the lake is mended: whether the source shows a driver."""
    found, mend = list[bool](), recovery.mend

    def noted(*of: Any) -> dict[str, str]:
        found.append(is_running(connection, pipeline))
        return mend(*of)

    monkeypatch.setattr(recovery, "mend", noted)
    return found


def _gone_driver(pipeline: Pipeline, connection: Connection, database: Database) -> LogStream:
    """What the source shows of a driver whose host has lost power."""
    gone = LogStream(database.conninfo)
    publication = pipeline.source.publication
    gone.start(pipeline.source.slot, (publication, f"{publication}_inserts"), 0, identify(connection).version)
    return gone


def _locks() -> list[str]:
    return Path("/proc/locks").read_text().splitlines()
