"""A connection that leads to a standby: what waits may take from it, and what they may not.

Its replay is paused here, as a standby's that lags: what the primary commits meanwhile is not seen there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

import headwater
from fixtures.lake_waits import wait
from fixtures.lakes import HandLake
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, has_received
from fixtures.waiting import until
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import EXIT_NOT_FRESH
from headwater.lake.freshness import Outcome
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position, format_lsn
from headwater.waiting.result import WaitResult
from headwater.waiting.source_state import ask_source

pytestmark = pytest.mark.postgres

ORDERS = "public.orders"
REASON = "the source does not answer: what answers is a standby, and only its primary knows where the log ends"
REMEDY = "name the primary in source.connection; with several hosts add target_session_attrs=read-write"


@dataclass
class Pair:
    """A primary, a standby of it that stands still, and a lake that holds all that the standby has."""

    database: Database
    standby: EmbeddedServer
    primary_pipeline: Pipeline
    pipeline: Pipeline
    """The same lake, by the standby."""
    lake: HandLake

    def commit(self) -> Position:
        with self.database.connect() as connection:
            connection.execute("insert into orders select coalesce(max(id), 0) + 1 from orders")
            return headwater.commit_position(connection)

    def wait(self, require: object, timeout: float = 0.3) -> WaitResult:
        return wait(self.pipeline, None, require, timeout)


@pytest.fixture
def pair(database: Database, make_standby: Callable[[EmbeddedServer], EmbeddedServer], tmp_path: Path) -> Pair:
    database.execute("create table orders (id int primary key)")
    database.publish("headwater_shop", "orders")
    primary_pipeline = write_pipeline(tmp_path, database, ORDERS)
    with database.superuser() as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (primary_pipeline.source.slot,))
    standby = make_standby(database.server)
    has_received(standby, database.server)
    with standby.connect() as other:
        other.execute("select pg_wal_replay_pause()")
        paused = "select from pg_get_wal_replay_pause_state() as state where state = 'paused'"
        until(lambda: other.execute(paused).rowcount == 1, "the replay is paused")
    start = ask_source(primary_pipeline).position
    lake = HandLake(primary_pipeline.lake_path(), start, [ORDERS])
    lake.publish(start.lsn)
    (tmp_path / "standby").mkdir()
    there = re.sub(rf":{database.server.port}\b", f":{standby.port}", database.conninfo)
    assert there != database.conninfo
    source = {"connection": there, "slot": primary_pipeline.source.slot}
    pipeline = write_pipeline(
        tmp_path / "standby", database, ORDERS, source=source, lake={"root": (tmp_path / "lake").as_uri()}
    )
    return Pair(database, standby, primary_pipeline, pipeline, lake)


def _clock(pair: Pair) -> datetime:
    with pair.database.connect() as connection:
        row = connection.execute("select clock_timestamp()").fetchone()
    assert row is not None
    found: datetime = row[0]
    return found


def test_what_only_the_primary_knows_is_not_taken_from_a_standby(pair: Pair) -> None:
    pair.commit()  # nobody has read it: the lake lacks it, and the standby knows nothing of it
    for requirement, target in (("now", None), ("1h", "3600s"), ("default", None)):
        result = pair.wait(requirement)
        shown = result.to_json()
        assert (result.outcome, result.exit_status) == (Outcome.SOURCE_UNREACHABLE, EXIT_NOT_FRESH)
        assert (shown["target"], shown["reason"], shown["remedy"]) == (target, REASON, REMEDY)
    cut = headwater.wait(pair.pipeline, timeout=0.3, on_timeout="continue")
    assert (cut["outcome"], cut["staleness_seconds"]) == ("source_unreachable", None)
    slot = status(pair.pipeline)["slot"]
    assert (slot["active"], slot["reason"]) == (None, REASON)


def test_a_position_is_waited_for_by_the_lake_alone(pair: Pair) -> None:
    assert pair.wait(pair.lake.position).outcome is Outcome.SATISFIED
    committed = pair.commit()
    # Without its timeline, too: it is then one of the log that the lake follows. Nor is it in the future because the
    # standby has not come so far.
    for requirement in (committed, format_lsn(committed.lsn)):
        assert pair.wait(requirement).outcome is Outcome.NOT_RUNNING
    pair.lake.publish(committed.lsn)
    for requirement in (committed, format_lsn(committed.lsn)):
        assert pair.wait(requirement).outcome is Outcome.SATISFIED


def test_a_moment_is_found_by_the_drivers_samples_alone(pair: Pair) -> None:
    committed = pair.commit()
    moment = _clock(pair)
    # A sample of the standby would be later than the moment, at a position that the lake has.
    assert pair.wait(moment).outcome is Outcome.SOURCE_UNREACHABLE
    sample = ask_source(pair.primary_pipeline).sample
    assert sample[0] > moment
    pair.lake.publish(pair.lake.position.lsn, sample=sample)
    assert pair.wait(moment).outcome is Outcome.NOT_RUNNING
    pair.lake.publish(max(committed.lsn, sample[1]), sample=sample)
    assert pair.wait(moment).outcome is Outcome.SATISFIED
