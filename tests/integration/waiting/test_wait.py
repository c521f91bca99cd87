"""`wait` against a real source: it never succeeds early, it ends on a quiet source, and it says why it did not."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import time_machine

import headwater
from fixtures.lake_waits import request, wait
from fixtures.lake_waits import waiter as waiter_of
from fixtures.lakes import HandLake, LogFollower, as_published
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until
from headwater.errors import EXIT_NOT_FRESH, EXIT_REFUSED, EXIT_SUSPENDED, Refused
from headwater.lake.cuts import list_pins
from headwater.lake.freshness import Outcome
from headwater.lake.ledger import read_epoch
from headwater.lake.look import NOT_YET_SHOWN
from headwater.lake.looks import often
from headwater.lake.position_file import PositionFile, read_position_file, write_position_file
from headwater.lake.requirements import Target
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn, parse_lsn
from headwater.source.catalog.catalog import read_catalog
from headwater.source.connection import connect
from headwater.waiting.on_timeout import instead_of_cut
from headwater.waiting.progress import progress
from headwater.waiting.result import NotFresh, WaitResult
from headwater.waiting.source_state import ask_source

pytestmark = pytest.mark.postgres

ORDERS, QUIET = "public.orders", "public.quiet"


@dataclass
class Shop:
    """A source with two tables, a slot and a lake that stands at the source's present end."""

    database: Database
    pipeline: Pipeline
    lake: HandLake

    def follow(self, pace: float = 0.02) -> LogFollower:
        source = self.pipeline.source
        return LogFollower(self.database, self.lake, source.slot, source.publication, pace)

    def wait(self, require: object = "now", timeout: float = 20, **options: Any) -> WaitResult:
        return wait(self.pipeline, None, require, timeout, **options)

    def with_source_down(self, folder: Path) -> Pipeline:
        """The same pipeline, with an address where nobody listens."""
        source = {"connection": "postgresql://nobody@127.0.0.1:1/none", "slot": self.pipeline.source.slot}
        return write_pipeline(folder, self.database, ORDERS, QUIET, source=source)


@pytest.fixture
def shop(each_store: str, database: Database, tmp_path: Path) -> Shop:
    database.execute("create table orders (id int primary key)", "create table quiet (id int primary key)")
    database.publish("headwater_shop", "orders", "quiet")
    pipeline = write_pipeline(tmp_path, database, ORDERS, QUIET)
    with database.superuser() as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (pipeline.source.slot,))
    start = ask_source(pipeline).position
    lake = HandLake(pipeline.lake_path(), start, [ORDERS, QUIET])
    lake.publish(start.lsn)
    return Shop(database, pipeline, lake)


def _file(shop: Shop) -> PositionFile:
    file = read_position_file(shop.lake.root)
    assert file is not None
    return file


def test_waiting_for_now_on_an_idle_source_ends_with_a_pinned_cut(shop: Shop) -> None:
    with shop.database.connect() as connection:
        connection.execute("insert into orders values (1)")
        committed = headwater.commit_position(connection)
    with shop.follow():
        result = shop.wait()
    assert (result.outcome, result.exit_status) == (Outcome.SATISFIED, 0)
    cut = result.to_json()
    assert parse_lsn(cut["target"]) >= committed.lsn
    assert parse_lsn(cut["position"]["lsn"]) >= parse_lsn(cut["target"])
    assert cut["tables"][ORDERS]["state"] == "in step"
    assert [pin.cut for pin in list_pins(shop.pipeline.lake_path())] == [result.cut]


def test_a_table_that_no_epoch_shows_in_step_yet_is_waited_for(shop: Shop) -> None:
    """Its driver died between the registry's word and the ledger's row."""
    lake = shop.lake
    lake.succeed(ORDERS)
    lake.publish(lake.position.lsn)
    lake.enter(ORDERS, "active")
    lake.read_to(lake.position.lsn + 0x1000)
    result = shop.wait(lake.position.to_json()["lsn"], timeout=0.5)
    assert (result.outcome, NOT_YET_SHOWN in result.verdict.reason) == (Outcome.NOT_RUNNING, True), result
    lake.publish(lake.position.lsn, ORDERS)
    assert shop.wait(lake.position.to_json()["lsn"]).outcome is Outcome.SATISFIED


def test_a_source_that_was_put_back_to_before_what_the_lake_holds_ends_every_wait(shop: Shop) -> None:
    """By a copied folder, on the same timeline: what is committed now gets positions that the lake passed long ago."""
    end = ask_source(shop.pipeline).position
    lake = shop.lake
    lake.publish(end.lsn + 0x1000_0000, ORDERS, sample=(datetime.now(UTC) - timedelta(hours=1), end.lsn))
    with shop.database.connect() as connection:
        connection.execute("insert into orders values (1)")
    for require in ("now", "1h", datetime.now(UTC).isoformat(), format_lsn(end.lsn)):
        result = shop.wait(require, timeout=5)
        assert (result.outcome, result.exit_status) == (Outcome.TIMELINE_CHANGED, 2), (require, result)
        assert "it was restored from an older state" in result.verdict.reason
        assert "--new-source" in result.verdict.remedy
    assert status(shop.pipeline)["lag_seconds"] >= 3600
    cut = instead_of_cut(shop.pipeline, {"outcome": "timed_out"}, "continue", request())
    assert cut is not None
    assert cut["staleness_seconds"] is None


@pytest.mark.parametrize("writing", [0, 2])
def test_a_wait_never_succeeds_before_the_commits_that_preceded_it(shop: Shop, writing: int) -> None:
    stop = threading.Event()

    def write(first: int) -> None:
        with shop.database.connect() as connection:
            for number in range(first, first + 1_000_000):
                if stop.is_set():
                    return
                connection.execute("insert into orders values (%s)", (number,))

    writers = [threading.Thread(target=write, args=(first * 1_000_000,)) for first in range(writing)]
    # Slower than a look: a wait that ended too early would be seen.
    with shop.follow(pace=0.2) as follower, shop.database.connect() as connection:
        for writer in writers:
            writer.start()
        try:
            for marker in range(10):
                connection.execute("insert into quiet values (%s)", (marker,))
                committed = connection.execute("select count(*) from orders").fetchone()
                assert committed is not None
                cut = shop.wait().to_json()
                assert cut["outcome"] == "satisfied"
                published = follower.published[cut["epoch"]]
                assert published[QUIET] == marker + 1
                assert published.get(ORDERS, 0) >= committed[0]
        finally:
            stop.set()
            for writer in writers:
                writer.join()


def test_of_six_transactions_around_a_wait_it_sees_those_committed_before_and_waits_for_none(shop: Shop) -> None:
    with contextlib.ExitStack() as stack, shop.follow(pace=0.2) as follower:
        sessions = [stack.enter_context(shop.database.connect(autocommit=False)) for _ in range(6)]
        before, unflushed, across, undone, still_open, after = sessions
        unflushed.execute("set synchronous_commit = off")
        for number, session in enumerate(sessions[:5]):
            session.execute("insert into orders values (%s)", (number,))
        before.commit()
        unflushed.commit()
        waiter = waiter_of(shop.pipeline)
        result = waiter.look()  # the target is taken here
        # Three are open, one of them for good.
        while result is None:
            threading.Event().wait(0.05)
            result = waiter.look()
        assert result.cut is not None
        assert follower.published[result.cut["epoch"]][ORDERS] == 2
        after.execute("insert into orders values (5)")
        after.commit()
        across.commit()
        undone.rollback()
        cut = shop.wait().to_json()
        assert follower.published[cut["epoch"]][ORDERS] == 4
        still_open.rollback()


def test_a_wait_ends_after_the_log_was_switched_to_a_new_segment(shop: Shop) -> None:
    with shop.follow(), shop.database.superuser() as connection:
        connection.execute("select pg_switch_wal()")
        assert shop.wait().outcome is Outcome.SATISFIED


def test_a_wait_ends_where_only_another_database_writes(shop: Shop) -> None:
    with shop.follow(), shop.database.server.connect() as elsewhere:
        elsewhere.execute("create table if not exists noise (id int)")
        try:
            elsewhere.execute("insert into noise select generate_series(1, 1000)")
            assert shop.wait().outcome is Outcome.SATISFIED
        finally:
            elsewhere.execute("drop table noise")


def test_the_position_of_a_commit_can_be_waited_for_elsewhere(shop: Shop) -> None:
    with shop.follow() as follower, shop.database.connect() as connection:
        connection.execute("insert into quiet values (7)")
        position = headwater.commit_position(connection)
        cut = headwater.wait(shop.pipeline.file, tables=[QUIET], require=position.to_json(), timeout="20s")
        assert follower.published[cut["epoch"]][QUIET] == 1
    assert set(cut["tables"]) == {QUIET}


def test_a_position_that_the_lake_has_passed_needs_neither_driver_nor_source(shop: Shop, tmp_path: Path) -> None:
    position = shop.lake.position
    assert shop.wait(position, timeout=0).outcome is Outcome.SATISFIED
    down = shop.with_source_down(tmp_path)
    assert wait(down, None, format_lsn(position.lsn), 0).outcome is Outcome.SATISFIED


def test_now_is_not_known_without_the_source(shop: Shop, tmp_path: Path) -> None:
    for requirement, target in (("now", None), ("30s", "30s")):
        result = wait(shop.with_source_down(tmp_path), None, requirement, 0.3)
        assert (result.outcome, result.exit_status) == (Outcome.SOURCE_UNREACHABLE, EXIT_NOT_FRESH)
        shown = result.to_json()
        assert shown["target"] == target
        assert shown["reason"].startswith("the source does not answer: ")
        assert result.progress is not None
        assert result.progress.blocker.startswith("the source does not answer: ")


@pytest.mark.parametrize("requirement", ["now", "60s", "default"])
def test_a_wait_that_began_while_the_source_was_down_is_satisfied_by_what_it_says_afterwards(
    shop: Shop, requirement: str
) -> None:
    shop.database.execute("insert into orders values (1)")  # committed before the wait, and not in the lake
    shop.database.server.stop()
    waiter = waiter_of(shop.pipeline, requirement)
    assert waiter.look() is None
    assert waiter.target is not None
    assert "does not answer" in str(waiter.progress)
    # In another process, as after a deferral, the wait is the same.
    target = Target.from_json(json.loads(json.dumps(waiter.target.to_json())))
    assert target == waiter.target
    other = waiter_of(shop.pipeline, target)
    assert other.look() is None
    shop.database.server.start()
    with shop.follow() as follower:
        for one in (waiter, other):
            while (result := one.look()) is None:
                threading.Event().wait(0.05)
            cut = result.to_json()
            assert cut["outcome"] == "satisfied"
            if requirement != "60s":
                assert follower.published[cut["epoch"]][ORDERS] == 1


def test_a_position_beyond_the_sources_log_is_refused(shop: Shop) -> None:
    result = shop.wait("FFFFFFFF/0")
    assert (result.outcome, result.exit_status) == (Outcome.FUTURE_POSITION, EXIT_REFUSED)
    assert result.to_json()["error"]["code"] == "future_position"


def test_a_position_of_another_timeline_is_refused(shop: Shop) -> None:
    result = shop.wait(replace(shop.lake.position, timeline=9))
    assert (result.outcome, result.exit_status) == (Outcome.TIMELINE_CHANGED, EXIT_REFUSED)


def test_a_lake_of_another_timeline_than_the_source_is_not_waited_for(shop: Shop) -> None:
    assert shop.lake.file is not None
    position = replace(shop.lake.position, timeline=shop.lake.position.timeline + 1)
    write_position_file(shop.lake.root, replace(shop.lake.file, position=position))
    assert shop.wait().outcome is Outcome.TIMELINE_CHANGED


def test_without_a_driver_the_wait_ends_at_its_deadline_as_not_running(shop: Shop) -> None:
    shop.database.execute("insert into orders values (1)")
    result = shop.wait(timeout=0.3)
    assert (result.outcome, result.exit_status) == (Outcome.NOT_RUNNING, EXIT_NOT_FRESH)
    shown = result.to_json()
    assert shown["remedy"] == f"headwater replicate {shop.pipeline.file}"
    assert shown["tables"][ORDERS]["gap_bytes"] > 0
    assert shown["tables"][ORDERS]["applied_lsn"] == format_lsn(shop.lake.versions[ORDERS].applied_lsn)
    assert 0.3 <= shown["waited_seconds"] < 5


def test_a_driver_that_lives_but_cannot_publish_makes_it_timed_out(shop: Shop) -> None:
    with shop.follow() as follower:
        follower.held.add(ORDERS)
        shop.database.execute("insert into orders values (1)")
        until(lambda: ORDERS in _file(shop).pending, "the row has been read")
        result = shop.wait(timeout=3)
        assert (result.outcome, result.exit_status) == (Outcome.TIMED_OUT, EXIT_NOT_FRESH)
        assert "has been read and is not published yet" in result.verdict.reason
        # Nothing of the other table is missing: its readers go on.
        assert headwater.wait(shop.pipeline, tables=[QUIET])["tables"][QUIET]["state"] == "in step"
        with pytest.raises(NotFresh) as late:
            headwater.wait(shop.pipeline, tables=[ORDERS], timeout=3)
        assert (late.value.code, late.value.exit_status) == ("timed_out", EXIT_NOT_FRESH)


def test_a_suspended_table_ends_the_wait_unless_it_is_left_out(shop: Shop) -> None:
    shop.lake.enter(ORDERS, "suspended", "column x was dropped", "headwater load --table public.orders --again")
    result = shop.wait()
    assert (result.outcome, result.exit_status) == (Outcome.SUSPENDED, EXIT_SUSPENDED)
    assert result.to_json()["remedy"] == "headwater load --table public.orders --again"
    with shop.follow():
        cut = shop.wait(ignore_suspended=True).to_json()
    assert (cut["outcome"], cut["ignored"]) == ("satisfied", [ORDERS])
    assert (cut["tables"][ORDERS]["state"], cut["tables"][QUIET]["state"]) == ("behind", "in step")


def test_a_table_that_catches_up_is_waited_for_and_one_that_loads_is_not(shop: Shop) -> None:
    shop.lake.enter(ORDERS, "loading")
    assert shop.wait().outcome is Outcome.LOADING
    shop.lake.enter(ORDERS, "catching up")
    before = _file(shop)
    with shop.follow():
        until(lambda: _file(shop) != before, "the follower works")
        assert shop.wait(timeout=3).outcome is Outcome.TIMED_OUT


SILENCED = [
    (["alter publication headwater_shop drop table orders"], "is not in the publication"),
    (
        [f"alter publication headwater_shop {change} table orders" for change in ("drop", "add")],
        "left the publication headwater_shop and came back",
    ),
    (["drop table orders", "create table orders (id int primary key)"], "was dropped and created again"),
    (["alter table orders rename to sold", "create table orders (id int primary key)"], "was renamed to public.sold"),
]


def _register(shop: Shop) -> None:
    """Enter the tables of now into the registry, as a load does."""
    shop.database.grant("orders", "quiet")
    with connect(shop.pipeline.conninfo()) as connection:
        for table in read_catalog(connection, shop.pipeline).tables:
            record = shop.lake.registry.record(str(table.name))
            record = replace(record, schemas=((0, table.schema),))
            shop.lake.registry.write(*as_published(connection, shop.pipeline.source.publication, record))


@pytest.mark.parametrize(("statements", "reason"), SILENCED)
def test_a_wait_never_succeeds_on_a_table_that_fell_silent_at_the_source(
    shop: Shop, statements: list[str], reason: str
) -> None:
    _register(shop)
    with shop.follow():
        assert shop.wait().outcome is Outcome.SATISFIED
        # Nobody but the source knows it: the log of a table that does not reach it looks complete.
        shop.database.execute(*statements, "insert into orders values (1)")
        for requirement in ("now", format_lsn(ask_source(shop.pipeline).position.lsn), "60s"):
            result = shop.wait(requirement)
            assert (result.outcome, result.exit_status) == (Outcome.SUSPENDED, EXIT_SUSPENDED)
            assert reason in result.verdict.reason
            again = f"headwater load {shop.pipeline.file} --table public.orders --again"
            assert result.to_json()["remedy"] == again
        assert headwater.wait(shop.pipeline, tables=[QUIET])["tables"][QUIET]["state"] == "in step"
        cut = shop.wait(ignore_suspended=True).to_json()
        assert (cut["outcome"], cut["ignored"], cut["tables"][ORDERS]["state"]) == ("satisfied", [ORDERS], "behind")
    shown = status(shop.pipeline)["tables"]
    assert (shown[ORDERS]["state"], shown[QUIET]["state"]) == ("suspended", "active")
    assert reason in shown[ORDERS]["reason"]


def test_a_table_that_falls_silent_during_the_wait_ends_it_and_a_load_makes_it_whole(shop: Shop) -> None:
    _register(shop)
    shop.database.execute("insert into quiet values (1)")
    waiter = waiter_of(shop.pipeline)
    assert waiter.look() is None
    shop.database.execute("drop table orders", "create table orders (id int primary key)")
    while (result := waiter.look()) is None:
        threading.Event().wait(0.05)
    assert result.outcome is Outcome.SUSPENDED
    shop.database.execute("alter publication headwater_shop add table orders")
    _register(shop)
    with shop.follow():
        assert shop.wait().outcome is Outcome.SATISFIED


def test_a_lake_of_another_timeline_than_the_source_is_not_fresh_by_the_sources_clock(shop: Shop) -> None:
    # A promoted server may stand below what the lake has of the old one, and hold commits that the lake lacks.
    position = replace(shop.lake.position, timeline=shop.lake.position.timeline + 1)
    far = ask_source(shop.pipeline).position.lsn + (1 << 20)
    shop.lake.publish(shop.lake.position.lsn, read=far)
    assert shop.lake.file is not None
    write_position_file(shop.lake.root, replace(shop.lake.file, position=position))
    shop.database.execute("insert into orders values (1)")
    result = shop.wait("1h", timeout=0.5)
    assert (result.cut, result.outcome) == (None, Outcome.NOT_RUNNING)
    assert "the source's log is not the one that the lake follows" in result.verdict.reason
    instead = instead_of_cut(shop.pipeline, result.to_json(), "continue", request())
    assert instead is not None
    assert instead["staleness_seconds"] is None


def test_a_table_that_is_not_replicated_is_refused(shop: Shop) -> None:
    result = wait(shop.pipeline, [TableName("public", "other")], "now", 5)
    assert (result.outcome, result.exit_status) == (Outcome.NOT_REPLICATED, EXIT_REFUSED)
    file = shop.pipeline.file
    assert result.verdict.remedy == f"name public.other under `tables` in {file}, then headwater load {file}"


def test_staleness_is_measured_by_the_sources_clock_alone(shop: Shop) -> None:
    # Read to its end, an idle source is fresh, whoever runs or not.
    end = ask_source(shop.pipeline)
    shop.lake.publish(shop.lake.position.lsn, read=end.position.lsn + (1 << 20))
    assert shop.wait("1s", timeout=0).outcome is Outcome.SATISFIED


def test_a_lake_that_is_too_stale_is_waited_for_until_it_no_longer_is(shop: Shop) -> None:
    shop.database.execute("insert into orders values (1)")
    assert shop.wait("100ms", timeout=0.2).outcome is Outcome.NOT_RUNNING
    with shop.follow() as follower:
        cut = shop.wait("5s").to_json()
        assert follower.published[cut["epoch"]][ORDERS] == 1


def _clock(shop: Shop) -> datetime:
    with shop.database.connect() as connection:
        row = connection.execute("select clock_timestamp()").fetchone()
    assert row is not None
    found: datetime = row[0]
    return found


def test_everything_committed_before_a_moment_of_the_sources_clock_is_in_the_cut(shop: Shop) -> None:
    shop.database.execute("insert into orders values (1)")
    moment = _clock(shop)
    shop.database.execute("insert into orders values (2)")
    assert shop.wait(moment, timeout=0.3).outcome is Outcome.NOT_RUNNING
    with shop.follow() as follower:
        cut = shop.wait(moment).to_json()
        assert cut["outcome"] == "satisfied"
        assert follower.published[cut["epoch"]][ORDERS] >= 1
        # The lake has it by now; nobody has to look at the clock again.
        assert shop.wait(moment.isoformat()).outcome is Outcome.SATISFIED


def test_a_moment_still_to_come_is_waited_for_by_the_sources_clock(shop: Shop) -> None:
    with shop.follow() as follower:
        for row, seconds in enumerate((1.5, 5, 60), start=1):
            moment = _clock(shop) + timedelta(seconds=seconds)
            waiter = waiter_of(shop.pipeline, moment)
            result = waiter.look()
            shop.database.execute(f"insert into orders values ({row})")
            if _clock(shop) < moment:  # else all this took too long, and says nothing
                break
        assert result is None
        assert "not known to have reached" in waiter.waiting.reason
        while (result := waiter.look()) is None:
            threading.Event().wait(0.05)
        assert _clock(shop) > moment
        assert result.outcome is Outcome.SATISFIED
        assert result.cut is not None
        assert follower.published[result.cut["epoch"]][ORDERS] == row


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_clock_of_ours_that_is_minutes_off_decides_nothing(shop: Shop, minutes: int) -> None:
    ours = datetime.now(UTC) + timedelta(minutes=minutes)
    with time_machine.travel(ours):
        assert abs(datetime.now(UTC) - _clock(shop)) > timedelta(minutes=9)
        shop.database.execute("insert into orders values (1)")
        moment = _clock(shop)
        threading.Event().wait(0.3)
        # The lake lacks the row; a moment that our clock has passed, or the source's has not, is as far away as it is.
        for requirement in ("now", "250ms", moment, moment + timedelta(minutes=5)):
            assert shop.wait(requirement, timeout=0.2).outcome is Outcome.NOT_RUNNING
        with shop.follow() as follower:
            for requirement in ("now", "5s", moment):
                cut = shop.wait(requirement).to_json()
                assert cut["outcome"] == "satisfied"
                assert follower.published[cut["epoch"]][ORDERS] == 1
            late = shop.wait(moment + timedelta(minutes=5), timeout=1)
            assert late.outcome is Outcome.TIMED_OUT
            assert "not known to have reached" in late.verdict.reason


def test_each_table_is_waited_for_as_its_own_freshness_in_the_file_says(shop: Shop, tmp_path: Path) -> None:
    lax = [{"name": ORDERS, "freshness": "1h"}, {"name": QUIET, "freshness": "200ms"}]
    slot = {"slot": shop.pipeline.source.slot}
    file = partial(write_pipeline, tmp_path, shop.database, source=slot)
    own = ask_source(shop.pipeline).sample
    shop.lake.publish(shop.lake.position.lsn, read=own[1], sample=own)
    shop.database.execute("insert into orders values (1)")
    threading.Event().wait(0.3)
    assert wait(file(lax[0]), [TableName.parse(ORDERS)], "default", 0).outcome is Outcome.SATISFIED
    late = wait(file(*lax), None, "default", 0)
    assert late.outcome is Outcome.NOT_RUNNING
    assert "; public.quiet is known complete up to " in late.verdict.reason
    assert late.verdict.reason.endswith(" s ago; wanted: 0.2 s")
    shown = status(file(*lax))["tables"]
    assert [(shown[name]["freshness_seconds"], shown[name]["late"]) for name in (ORDERS, QUIET)] == [
        (3600, False),
        (0.2, True),
    ]
    assert status(shop.pipeline)["tables"][ORDERS]["late"] is None
    # A table of which the file says nothing is wanted as of now.
    mixed = wait(file(lax[0], QUIET), None, "default", 0)
    assert mixed.outcome is Outcome.NOT_RUNNING
    assert (mixed.target is not None, mixed.verdict.tables[ORDERS].gap_bytes) == (True, None)
    assert (mixed.verdict.tables[QUIET].gap_bytes or 0) > 0
    with shop.follow():
        assert wait(file(lax[0], QUIET), None, "default", 20).outcome is Outcome.SATISFIED


def test_a_wait_says_how_far_it_is_and_who_holds_a_loaded_table_up(shop: Shop) -> None:
    shop.lake.enter(ORDERS, "catching up")
    with shop.database.connect(autocommit=False) as open_one:
        open_one.execute("insert into quiet values (1)")
        waiter = waiter_of(shop.pipeline)
        assert waiter.look() is None
        assert waiter.look() is None
        assert waiter.progress is not None
        # Without a driver no table catches up, whatever is open.
        assert waiter.progress.blocker.startswith("replication is stopped, no driver since ")
        source = waiter._lookout.source
        assert source is not None
        assert source.slot is not None
        assert waiter.target is not None
        read = replace(source, slot=replace(source.slot, active=True))
        with_driver = progress(waiter.target, waiter.waiting, waiter._lookout.look(), read)
        held = f"public.orders is catching up; transactions open at the source: process {open_one.info.backend_pid} "
        assert with_driver.blocker.startswith(held)
        open_one.rollback()
    shop.lake.enter(ORDERS, "active")
    late = shop.wait(timeout=0).to_json()
    assert late["progress"]["blocker"].startswith("replication is stopped, no driver since ")
    assert (late["progress"]["bytes_per_second"], late["eta_seconds"]) == (None, None)
    assert late["progress"]["gap_bytes"] > 0
    assert str(waiter.progress).startswith("waiting for ")


def test_going_on_with_what_is_there_says_how_old_it_is_by_the_sources_clock(shop: Shop) -> None:
    own = ask_source(shop.pipeline).sample
    shop.lake.publish(shop.lake.position.lsn, read=own[1], sample=own)
    shop.database.execute("insert into orders values (1)")
    cut = headwater.wait(shop.pipeline, timeout=0.2, on_timeout="continue")
    assert cut["outcome"] == "not_running"
    assert 0.2 <= cut["staleness_seconds"] < 20
    assert datetime.fromisoformat(cut["complete_until"]) == own[0]
    assert [pin.id for pin in list_pins(shop.pipeline.lake_path())] == [cut["pin"]["id"]]
    shop.lake.enter(QUIET, "suspended", "why", "remedy")
    with pytest.raises(NotFresh):
        headwater.wait(shop.pipeline, timeout=0.2, on_timeout="continue")
    with pytest.raises(Refused, match="none of fail, continue, fallback"):
        headwater.wait(shop.pipeline, on_timeout="skip")  # type: ignore[arg-type]


@pytest.mark.usefixtures("airflow_home")
def test_the_commit_of_an_operator_is_what_its_reader_waits_for(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowException

    from headwater_airflow.operators.source import CommitAtSourceOperator

    # The role that writes is another one than the pipeline's.
    monkeypatch.setenv("AIRFLOW_CONN_WRITER", shop.database.owner.replace("postgresql:", "postgres:", 1))
    write = CommitAtSourceOperator(
        task_id="write",
        conn_id="writer",
        sql=["insert into quiet values (%(id)s)", "insert into quiet select %(id)s + 1"],
        parameters={"id": 7},
    )
    position = write.execute({})
    with shop.follow() as follower:
        cut = headwater.wait(shop.pipeline, tables=[QUIET], require=position, timeout="20s")
        assert follower.published[cut["epoch"]][QUIET] == 2
    # One transaction: what fails leaves nothing.
    again = CommitAtSourceOperator(task_id="w", conn_id="writer", sql=["insert into quiet values (9)", "select 1/0"])
    with pytest.raises(psycopg.errors.DivisionByZero):
        again.execute({})
    with shop.database.connect() as connection:
        assert connection.execute("select id from quiet order by id").fetchall() == [(7,), (8,)]
    monkeypatch.setenv("AIRFLOW_CONN_WRITER", "postgres://nobody:s3cr3t@127.0.0.1:1/none")
    with pytest.raises(AirflowException, match="check that the server runs") as failed:
        write.execute({})
    assert "s3cr3t" not in str(failed.value)


@pytest.mark.usefixtures("airflow_home")
@pytest.mark.parametrize("end", ["time-out", "kill"])
def test_a_statement_of_an_operator_ends_with_its_task(
    database: Database, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A connection that is closed would not end it before the server has something to send."""
    from airflow.sdk.exceptions import AirflowTaskTimeout

    from headwater_airflow.operators.source import CommitAtSourceOperator

    def timed_out(*of_signal: object) -> None:
        raise AirflowTaskTimeout

    database.execute("create table slow (id int)")
    monkeypatch.setenv("AIRFLOW_CONN_WRITER", database.owner.replace("postgresql:", "postgres:", 1))
    slow = "insert into slow select 1 from pg_sleep(70)"
    write = CommitAtSourceOperator(task_id="write", conn_id="writer", sql=slow)

    def running() -> bool:
        return (slow,) in database.query("select query from pg_stat_activity where state = 'active'")

    def end_it() -> None:
        until(running, "the statement runs", seconds=30)
        if end == "kill":
            write.on_kill()
        else:
            signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, timed_out)
    ending = threading.Thread(target=end_it)
    ending.start()
    try:
        with pytest.raises(AirflowTaskTimeout if end == "time-out" else psycopg.errors.QueryCanceled):
            write.execute({})
    finally:
        ending.join()
        signal.signal(signal.SIGALRM, before)
    until(lambda: not running(), "the statement has ended at the source", seconds=60)
    assert database.query("select count(*) from slow") == [(0,)]


def test_a_loaded_lake_without_any_epoch_is_waited_for(database: Database, tmp_path: Path) -> None:
    database.execute("create table orders (id int primary key)")
    pipeline = write_pipeline(tmp_path, database, ORDERS)
    assert wait(pipeline, None, "now", 0).outcome is Outcome.NOT_REPLICATED
    start = ask_source(pipeline).position
    HandLake(pipeline.lake_path(), start, [ORDERS])
    result = wait(pipeline, None, "now", 0)
    assert result.outcome is Outcome.NOT_RUNNING
    assert "no epoch has been published yet" in result.verdict.reason


def test_a_source_where_no_marker_can_be_written_is_still_waited_for(shop: Shop) -> None:
    with shop.database.superuser() as connection:
        for arguments in ("boolean, text, text, boolean", "boolean, text, text"):
            exists = connection.execute(
                "select to_regprocedure(%s) is not null", (f"pg_logical_emit_message({arguments})",)
            ).fetchone()
            if exists == (True,):
                # In this database alone: the fixture drops it.
                connection.execute(f"revoke execute on function pg_logical_emit_message({arguments}) from public")
    with shop.follow(), shop.database.connect() as writer:
        stop = threading.Event()
        pulse = threading.Thread(target=_pulse, args=(stop, writer.execute))
        pulse.start()
        try:
            assert shop.wait().outcome is Outcome.SATISFIED
        finally:
            stop.set()
            pulse.join()


def _pulse(stop: threading.Event, execute: Callable[[str], object]) -> None:
    number = 0
    while not stop.wait(0.05):
        number += 1
        execute(f"insert into quiet values ({number})")


def test_status_shows_states_lags_and_the_slot(shop: Shop) -> None:
    shop.lake.enter(QUIET, "suspended", "why", "remedy")
    shop.database.execute("insert into orders values (1)")
    shown = status(shop.pipeline)
    assert shown["running"] is False
    assert shown["epoch"] == 1
    assert shown["lag_bytes"] > 0
    assert shown["tables"][ORDERS]["state"] == "active"
    assert shown["tables"][QUIET]["remedy"] == "remedy"
    assert shown["slot"]["active"] is False
    assert shown["slot"]["retained_wal_bytes"] > 0
    with shop.follow():
        shop.wait(ignore_suspended=True)
    later = status(shop.pipeline)
    assert later["tables"][ORDERS]["applied_lsn"] == format_lsn(shop.lake.versions[ORDERS].applied_lsn)
    newest = read_epoch(shop.lake.root)
    assert newest is not None
    assert later["epoch"] == newest.epoch


def test_status_lists_tables_that_a_pattern_matches_as_new(database: Database, tmp_path: Path) -> None:
    database.execute("create table log_a (id int primary key)", "create table other (id int primary key)")
    shown = status(write_pipeline(tmp_path, database, "public.log_*", ORDERS))
    assert {name: table["state"] for name, table in shown["tables"].items()} == {
        "public.log_a": "new",
        ORDERS: "new",
    }
    assert shown["tables"]["public.log_a"]["remedy"].startswith("headwater load ")


@pytest.mark.parametrize("ended", [False, True])
def test_status_works_with_the_source_down(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """A position file that no driver has ended is watched for a while, here not so long as in a store."""
    root = shop.pipeline.lake_path()
    longest = 3600.0 if ended else 0.0
    monkeypatch.setattr("headwater.monitor.status.often", lambda root: replace(often(root), file=longest))
    file = read_position_file(root)
    assert file is not None
    write_position_file(root, replace(file, ended=ended))
    shown = status(shop.with_source_down(tmp_path))
    assert (shown["running"], shown["lag_bytes"], shown["lag_seconds"]) == (False, None, None)
    assert shown["slot"]["active"] is None
    assert "does not answer" in shown["slot"]["reason"]
    assert shown["tables"][ORDERS]["state"] == "active"
