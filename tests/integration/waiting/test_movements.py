"""What the watcher behind an asset tells: an event with the cut when tables have moved, one for all that came
meanwhile, none for files that were only rearranged or while a table is not in step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.jobs import catch_up, following, lake_rows, load_tables
from fixtures.loaded import pipeline_in_step
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.lake.cuts import list_pins
from headwater.maintain.maintain import maintain
from headwater.monitor.lateness import Lateness
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.pausing import pause
from headwater.waiting.movements import Movements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater_airflow.triggers.lateness import LatenessTrigger
    from headwater_airflow.triggers.moments import MomentTrigger
    from headwater_airflow.triggers.movement import MovementTrigger

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ONE, OTHER = "public.one", "public.other"


@dataclass
class Store:
    """Of an asset, in Airflow's database: test_airflow has the real one."""

    values: dict[str, Any] = field(default_factory=dict)

    async def aget(self, key: str) -> Any:
        return self.values.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = value


@pytest.fixture(autouse=True)
def surely_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow has every event at the next look."""
    monkeypatch.setattr("headwater_airflow.triggers.movement.SURE_SECONDS", 0.0)


@pytest.fixture
def pipeline(database: Database, spark: SparkSession, tmp_path: Path) -> Pipeline:
    database.allow_publishing()
    for name in (ONE, OTHER):
        database.execute(f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1)")
    return pipeline_in_step(tmp_path, database, ONE, OTHER)


def alarm(pipeline: Pipeline, *tables: str, store: Store, remind_every: float = 0) -> LatenessTrigger:
    from headwater_airflow.triggers.lateness import LatenessTrigger

    found = LatenessTrigger(pipeline=pipeline.file, tables=tables, remind_every=remind_every)
    found.asset_state_store = store  # type: ignore[assignment]
    return found


def trigger(pipeline: Pipeline, *tables: str, store: Store) -> MovementTrigger:
    from headwater_airflow.triggers.movement import MovementTrigger

    found = MovementTrigger(pipeline=pipeline.file, tables=tables, at_most_every=0, keep_seconds=600)
    found.asset_state_store = store  # type: ignore[assignment]
    return found


def moments(pipeline: Pipeline, *tables: str, store: Store) -> MomentTrigger:
    from headwater_airflow.triggers.moments import MomentTrigger

    found = MomentTrigger(
        pipeline=pipeline.file, tables=tables, cron="* * * * * *", timezone="Asia/Kolkata", keep_seconds=600
    )
    found.asset_state_store = store  # type: ignore[assignment]
    return found


async def told(
    watcher: MovementTrigger | LatenessTrigger | MomentTrigger, happens: Callable[[], object] = lambda: None
) -> list[Any]:
    """The events of three looks, before the second of which `happens`."""

    async def looks() -> AsyncIterator[Any]:
        stream = watcher.open_shared_stream(watcher.serialize()[1])
        for number in range(3):
            if number == 1:
                await asyncio.to_thread(happens)
            yield await anext(stream)

    return [event.payload async for event in watcher.filter_shared_stream(looks())]


def test_an_event_comes_at_first_and_when_a_table_has_moved(database: Database, pipeline: Pipeline) -> None:
    store = Store()

    def write() -> None:
        database.execute("update one set n = 2", "update one set n = 3")
        catch_up(pipeline)

    first, second = asyncio.run(told(trigger(pipeline, ONE, OTHER, store=store), write))
    assert first["moved"] == [ONE, OTHER]
    assert second["moved"] == [ONE]
    assert set(second["cut"]["tables"]) == {ONE, OTHER}
    assert second["cut"]["epoch"] > first["cut"]["epoch"]
    assert {pin.id for pin in list_pins(pipeline.lake_path())} == {one["cut"]["pin"]["id"] for one in (first, second)}
    for event, n in ((first, 1), (second, 3)):
        version = event["cut"]["tables"][ONE]["version"]
        assert lake_rows(pipeline, ONE, ["n"], version) == [(n,)]


def test_an_event_comes_when_everything_before_a_moment_is_there_by_the_source_s_clock(
    database: Database, pipeline: Pipeline
) -> None:
    """Every second is a moment. Nothing that was committed before it may be missing in the event's cut."""
    store, known = Store(), Movements(pipeline)
    begun, committed = datetime.now(UTC), list[datetime]()

    def passed() -> bool:
        """Whether the lake shows that two moments have passed: a driver takes a sample about once a second."""
        sight = known.look()
        complete = sight.complete_until([ONE]) if sight is not None else None
        return complete is not None and complete > begun + timedelta(seconds=2)

    def write() -> None:
        deadline = time.monotonic() + 60
        with following(pipeline):
            while not passed():
                assert time.monotonic() < deadline
                database.execute(f"insert into one values ({len(committed) + 2}, 1)")
                committed.append(database.query("select clock_timestamp()")[0][0])  # the commit came before

    (event,) = asyncio.run(told(moments(pipeline, ONE, OTHER, store=store), write))
    moment = datetime.fromisoformat(event["moment"])
    assert moment > begun
    assert moment.utcoffset() == timedelta(hours=5, minutes=30)
    there = {id for (id,) in lake_rows(pipeline, ONE, ["id"], event["cut"]["tables"][ONE]["version"])}
    before = [number + 2 for number, at in enumerate(committed) if at < moment]
    assert before
    assert set(before) <= there
    assert asyncio.run(told(moments(pipeline, ONE, OTHER, store=store))) == [], "no moment twice, after a restart"


def test_a_table_is_late_that_is_further_behind_than_the_file_allows(
    database: Database, pipeline: Pipeline, tmp_path: Path
) -> None:
    entries: list[dict[str, Any]] = [{"name": ONE, "freshness": "10ms"}, {"name": OTHER, "freshness": "1d"}]
    limited, lateness = write_pipeline(tmp_path, database, *entries), Lateness()
    database.execute("update one set n = 2", "update other set n = 2")
    lateness.look(limited)  # the driver was too short-lived to take a sample of its own
    with database.connect() as connection:
        connection.execute("select pg_sleep(0.05)")
    late = lateness.look(limited)
    assert set(late) == {ONE}
    assert late[ONE]["lag_seconds"] > late[ONE]["freshness_seconds"] == 0.01
    assert lateness.look(pipeline) == {}, "a file that allows nothing of the sort"


def test_an_alarm_comes_once_for_each_table_that_has_become_late(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater_airflow.triggers.lateness._LOOK_SECONDS", 0.01)
    store, late = Store(), dict[str, Any]()
    monkeypatch.setattr(Lateness, "look", lambda self, pipeline: dict(late))

    def alarms(*tables: str, store: Store = store, remind_every: float = 0, then: dict[str, Any]) -> list[Any]:
        """Of three looks, before the second of which the late tables are `then`."""

        def change() -> None:
            late.clear()
            late.update(then)

        found = asyncio.run(told(alarm(pipeline, *tables, store=store, remind_every=remind_every), change))
        return [(event["new"], sorted(event["late"])) for event in found]

    assert alarms(then={ONE: {}}) == [([ONE], [ONE])]
    assert alarms(then={ONE: {}}) == [], "a triggerer that takes over does not say it again"
    assert alarms(OTHER, store=Store(), then={ONE: {}}) == []
    assert alarms(then={ONE: {}, OTHER: {}}) == [([OTHER], [ONE, OTHER])]
    assert alarms(remind_every=1e-9, then={OTHER: {}})[-1] == ([], [OTHER])
    assert alarms(then={}) == []
    assert alarms(then={ONE: {}}) == [([ONE], [ONE])], "late anew"


def test_an_alarm_needs_a_file_that_allows_some_staleness(pipeline: Pipeline) -> None:
    from headwater_airflow.assets import late

    with pytest.raises(ValueError, match=r"says nowhere how stale public\.one may be"):
        late(pipeline.file, [ONE])


def test_what_moves_while_nobody_looks_is_told_by_one_event(database: Database, pipeline: Pipeline) -> None:
    store = Store()
    assert len(asyncio.run(told(trigger(pipeline, ONE, store=store)))) == 1
    assert asyncio.run(told(trigger(pipeline, ONE, store=store))) == []
    for n in range(3):
        database.execute(f"update one set n = {n}", "update other set n = n + 1")
        catch_up(pipeline)
    (event,) = asyncio.run(told(trigger(pipeline, ONE, store=store)))
    assert event["moved"] == [ONE]
    assert lake_rows(pipeline, ONE, ["n"], event["cut"]["tables"][ONE]["version"]) == [(2,)]


def test_another_table_and_rearranged_files_are_no_event(database: Database, pipeline: Pipeline) -> None:
    store = Store()
    for n in range(3):
        database.execute(f"insert into one values ({n + 10}, 1)")
        catch_up(pipeline)
    asyncio.run(told(trigger(pipeline, ONE, store=store)))

    def rearrange() -> None:
        assert ONE in str(maintain(pipeline))
        database.execute("update other set n = n + 1")
        catch_up(pipeline)

    assert asyncio.run(told(trigger(pipeline, ONE, store=store), rearrange)) == []


def test_there_is_no_event_while_a_table_is_not_in_step(database: Database, pipeline: Pipeline) -> None:
    pause(pipeline, [TableName.parse(OTHER)])
    database.execute("update one set n = 2")
    catch_up(pipeline)
    assert asyncio.run(told(trigger(pipeline, ONE, OTHER, store=Store()))) == []
    (event,) = asyncio.run(told(trigger(pipeline, ONE, store=Store())))
    assert event["moved"] == [ONE]


def test_a_lake_that_is_not_there_yet_is_waited_for(database: Database, spark: SparkSession, tmp_path: Path) -> None:
    database.allow_publishing()
    database.execute("create table one (id int primary key, n int)", "insert into one values (1, 1)")
    pipeline = write_pipeline(tmp_path, database, ONE)

    async def watched() -> Any:
        events = trigger(pipeline, ONE, store=Store()).run()
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(1.5)
        assert not first.done()
        await asyncio.to_thread(load_tables, pipeline)
        await asyncio.to_thread(catch_up, pipeline)
        return (await asyncio.wait_for(first, 60)).payload

    assert asyncio.run(watched())["moved"] == [ONE]
