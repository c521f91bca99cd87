"""What watches lakes in a triggerer, where a lake hangs, is made anew, or cannot be written for a moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fixtures.lakes import HandLake, position_at
from headwater.lake.cuts import list_pins
from headwater.lake.look import Look
from headwater.lake.reader import LakeReader
from headwater.lake.requirements import Target
from headwater.waiting.movements import Sight
from headwater.waiting.request import asked

if TYPE_CHECKING:
    from headwater_airflow.triggers.freshness import FreshnessTrigger

A = "public.a"

pytestmark = pytest.mark.usefixtures("airflow_home")


def made(folder: Path, name: str) -> tuple[HandLake, Path]:
    """A lake with an epoch, and its pipeline file."""
    lake = HandLake(folder / name, position_at(lsn=0x100), [A])
    lake.publish(0x200, A)
    return lake, described(folder / f"{name}.yaml", lake)


def described(file: Path, lake: HandLake) -> Path:
    source = {"connection": "postgresql://nobody@127.0.0.1:1/none"}
    document = {"pipeline": "shop", "source": source, "lake": {"root": Path(lake.root).as_uri()}, "tables": [A]}
    file.write_text(yaml.safe_dump(document))
    return file


def trigger(lake: HandLake, file: Path, lsn: int, seconds: float = 60) -> FreshnessTrigger:
    from headwater_airflow.triggers.freshness import FreshnessTrigger

    request = asked(lake.position.at(lsn).to_json(), seconds, [A], keep=60, owner="a test")
    return FreshnessTrigger(pipeline=str(file), **request.pinned(Target(lsn, 1, "7"), [A]).to_json())


async def told(watcher: Any, file: Path, looks: int) -> list[Any]:
    """The events of so many looks at a lake that stays as it is."""
    async with contextlib.aclosing(_sights(file)) as sights:
        sight = await anext(sights)

    async def same() -> AsyncIterator[Sight]:
        for _ in range(looks):
            yield sight

    return [event.payload async for event in watcher.filter_shared_stream(same())]


async def events(waiting: FreshnessTrigger) -> list[Any]:
    return [event.payload async for event in waiting.run()]


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, lakes in a folder with `hung` in its name do not answer."""
    event, look = threading.Event(), LakeReader.look

    def hanging(self: LakeReader) -> Look:
        if "hung" in self._root:
            event.wait(120)
        return look(self)

    monkeypatch.setattr(LakeReader, "look", hanging)
    yield event
    event.set()


def test_lakes_that_hang_keep_no_wait_for_another_one_waiting(
    tmp_path: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each of many tries finds the same lake hanging."""
    from headwater_airflow.triggers import waits

    monkeypatch.setattr(waits, "_ANSWER_SECONDS", 0.1)
    hung = [made(tmp_path, f"hung_{number}") for number in range(40)]
    good = made(tmp_path, "good")

    async def scenario() -> list[Any]:
        waiting = [asyncio.ensure_future(events(trigger(*one, 0x300))) for one in hung[1:]]
        for _ in range(10):
            (ended,) = await events(trigger(*hung[0], 0x180, seconds=0.1))
            assert "does not answer" in ended["error"]["message"]
        monkeypatch.setattr(waits, "_ANSWER_SECONDS", 60)
        try:
            return await asyncio.wait_for(events(trigger(*good, 0x180)), 60)
        finally:
            over.set()
            for one in waiting:
                one.cancel()

    (event,) = asyncio.run(scenario())
    assert event["outcome"] == "satisfied"


def test_pipeline_files_that_hang_take_no_threads_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow's own work in a triggerer uses the event loop's threads."""
    from headwater_airflow.triggers import waits

    over, stamp_of = threading.Event(), waits.stamp_of

    def hanging(path: str) -> Any:
        if "hung" in path:
            over.wait(120)
        return stamp_of(path)

    monkeypatch.setattr(waits, "stamp_of", hanging)
    hung = [made(tmp_path, f"hung_{number}") for number in range(3)]
    good = made(tmp_path, "good")

    async def scenario() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        waiting = [asyncio.ensure_future(events(trigger(*one, 0x300))) for one in hung]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(30):
                await asyncio.to_thread(str)
                return await events(trigger(*good, 0x180))
        finally:
            over.set()
            for one in waiting:
                one.cancel()

    (event,) = asyncio.run(scenario())
    assert event["outcome"] == "satisfied"


def test_nothing_is_pinned_for_a_wait_that_ended_while_its_lake_hung(
    tmp_path: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater_airflow.triggers import waits

    monkeypatch.setattr(waits, "_ANSWER_SECONDS", 0.1)
    lake, file = made(tmp_path, "hung")
    ticks, tick = [], waits.Waits._tick

    def counted(self: waits.Waits, those: Any) -> Any:
        found = tick(self, those)
        ticks.append(found)
        return found

    monkeypatch.setattr(waits.Waits, "_tick", counted)

    async def scenario() -> None:
        (ended,) = await events(trigger(lake, file, 0x180, seconds=0.1))
        assert ended["exit_status"] == 1
        over.set()
        async with asyncio.timeout(60):
            while not ticks:
                await asyncio.sleep(0.02)

    asyncio.run(scenario())
    assert list_pins(lake.root) == []


async def _sights(file: Path) -> AsyncGenerator[Sight]:
    from headwater_airflow.triggers.movement import MovementTrigger

    async with asyncio.timeout(60):
        async for sight in MovementTrigger.open_shared_stream({"pipeline": str(file)}):
            yield sight


def test_a_lake_made_anew_is_seen_though_its_positions_are_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater_airflow.triggers.movement._ANEW_SECONDS", 0.0)
    lake, file = made(tmp_path, "lake")
    lake.publish(0x900, A)

    async def scenario() -> None:
        async with contextlib.aclosing(_sights(file)) as sights:
            assert (await anext(sights)).epoch.position.lsn == 0x900
            shutil.rmtree(lake.root)
            HandLake(Path(lake.root), position_at(lsn=0x100), [A]).publish(0x400, A)
            while (await anext(sights)).epoch.position.lsn != 0x400:
                pass

    asyncio.run(scenario())


def test_a_pipeline_file_that_names_another_lake_is_followed(tmp_path: Path) -> None:
    _, file = made(tmp_path, "one")
    other, _ = made(tmp_path, "other")
    other.publish(0x700, A)

    async def scenario() -> None:
        async with contextlib.aclosing(_sights(file)) as sights:
            assert (await anext(sights)).epoch.position.lsn == 0x200
            described(file, other)
            while (await anext(sights)).epoch.position.lsn != 0x700:
                pass

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"cron": "* * * * *", "timezone": "Mars/Base"}, "knows no time zone 'Mars/Base'"),
        ({"cron": "0 0 30 2 *", "timezone": "UTC"}, "no moment of '0 0 30 2 *' is known"),
    ],
)
def test_a_triggerer_that_cannot_know_the_moments_says_so_and_goes_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, str],
    what: str,
) -> None:
    """An exception from a trigger's constructor would end the triggerer, and all that wait in it."""
    from headwater_airflow.triggers.moments import MomentTrigger

    _, file = made(tmp_path, "lake")
    monkeypatch.setattr(Sight, "complete_until", lambda self, tables: datetime.now(UTC))
    watcher = MomentTrigger(pipeline=str(file), tables=[], keep_seconds=60, **arguments)
    monkeypatch.setattr(MomentTrigger, "log", logging.getLogger("a watcher"))

    assert asyncio.run(told(watcher, file, 2)) == []
    (said,) = [record.getMessage() for record in caplog.records if record.name == "a watcher"]
    assert what in said


def test_a_moment_of_a_clock_that_was_wrong_silences_no_moment_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source boots a year ahead, and is set right a moment later."""
    from headwater_airflow.triggers import movement

    _, file = made(tmp_path, "lake")
    monkeypatch.setattr(movement, "SURE_SECONDS", 0.0)
    begun, year = datetime(2026, 3, 1, 5, 59, tzinfo=UTC), timedelta(days=365)
    clock = [begun + year, begun, begun + timedelta(minutes=2), begun + timedelta(minutes=3)]
    # A driver that begins again has read no further than its lake is, for a while.
    behind = iter([clock[0], clock[1], clock[2], begun - timedelta(minutes=30)])
    now = iter(clock)
    monkeypatch.setattr(Sight, "complete_until", lambda self, tables: next(behind))
    monkeypatch.setattr(Sight, "source_clock", property(lambda self: next(now)))
    store = Store()
    store.values["headwater_moment"] = begun.isoformat()
    watching = watcher("fresh", file, store, cron="0 6 * * *", timezone="UTC")

    moments = [payload["moment"] for payload in asyncio.run(told(watching, file, 4))]
    assert moments == ["2027-02-28T06:00:00+00:00", "2026-03-01T06:00:00+00:00"]
    assert store.values["headwater_moment"] == moments[-1]


def test_the_threads_of_a_path_that_nobody_uses_any_more_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater_airflow.triggers import threads

    pools: dict[str, ThreadPoolExecutor] = {}
    monkeypatch.setattr(threads, "_of", pools)
    monkeypatch.setattr(threads, "_used_at", {})
    monkeypatch.setattr(threads, "_UNUSED_SECONDS", -1.0)
    assert asyncio.run(threads.in_thread("version 1", lambda: 1)) == 1
    former = pools["version 1"]
    assert asyncio.run(threads.in_thread("version 2", lambda: 2)) == 2
    assert list(pools) == ["version 2"]
    with pytest.raises(RuntimeError, match="shutdown"):
        former.submit(print)


class Store:
    """Of an asset, in Airflow's database."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def aget(self, key: str) -> Any:
        return self.values.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = json.loads(json.dumps(value))


def watcher(kind: str, file: Path, store: Store, **options: Any) -> Any:
    from headwater_airflow.triggers.lateness import LatenessTrigger
    from headwater_airflow.triggers.moments import MomentTrigger
    from headwater_airflow.triggers.movement import MovementTrigger

    every_second = {"cron": "* * * * * *", "timezone": "UTC"}
    kinds: dict[str, Any] = {
        "moved": partial(MovementTrigger, at_most_every=0, keep_seconds=60),
        "fresh": partial(MomentTrigger, keep_seconds=60, **every_second),
        "late": partial(LatenessTrigger, remind_every=0),
    }
    found = kinds[kind](**{"pipeline": str(file), "tables": [], **options})
    found.asset_state_store = store
    return found


@pytest.mark.parametrize("kind", ["moved", "fresh", "late"])
def test_an_event_that_goes_with_a_triggerer_that_stops_is_told_by_the_next_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow keeps it in memory until its next round, and resumes the watcher at once."""
    from headwater.pipeline_file.pipeline import load_pipeline
    from headwater.waiting.movements import Movements
    from headwater_airflow.triggers import movement

    _, file = made(tmp_path, "lake")
    store, complete = Store(), datetime.now(UTC) + timedelta(hours=1)
    monkeypatch.setattr(Sight, "complete_until", lambda self, tables: complete)
    seen: Any = {A: {"lag_seconds": 9.0}} if kind == "late" else Movements(load_pipeline(file)).look()

    async def told() -> int:
        async def looks() -> AsyncIterator[Any]:
            for _ in range(3):  # and then the triggerer stops
                yield seen

        return len([event async for event in watcher(kind, file, store).filter_shared_stream(looks())])

    assert asyncio.run(told()) == 1
    assert asyncio.run(told()) == 1, "the first one is lost: twice rather than never"
    monkeypatch.setattr(movement, "SURE_SECONDS", 0.0)
    assert asyncio.run(told()) == 1
    assert asyncio.run(told()) == 0, "the one before stopped when Airflow had its event"


def test_a_table_that_is_late_anew_is_told_of_by_the_next_triggerer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater_airflow.triggers import movement

    _, file = made(tmp_path, "lake")
    store, late = Store(), {A: {"lag_seconds": 9.0}}

    async def told(*looks: Any) -> list[Any]:
        async def stream() -> AsyncIterator[Any]:
            for look in looks:
                yield look

        found = watcher("late", file, store).filter_shared_stream(stream())
        return [event.payload["new"] async for event in found]

    monkeypatch.setattr(movement, "SURE_SECONDS", 0.0)
    assert asyncio.run(told(late, late)) == [[A]]
    monkeypatch.setattr(movement, "SURE_SECONDS", 10.0)
    assert asyncio.run(told(late, {})) == []
    assert asyncio.run(told(late)) == [[A]]


@pytest.mark.parametrize("change", [{"deadline": "soon"}, {"tables": ["a.b.c.d"]}, {"target": None}, {"owner": ...}])
def test_a_stored_wait_that_cannot_be_read_fails_its_own_task(tmp_path: Path, change: dict[str, Any]) -> None:
    from headwater_airflow.triggers.freshness import FreshnessTrigger

    stored = trigger(*made(tmp_path, "lake"), 0x180).serialize()[1] | change
    (event,) = asyncio.run(events(FreshnessTrigger(**{name: one for name, one in stored.items() if one is not ...})))
    assert event["exit_status"] == 2
    assert "the stored wait cannot be read" in event["error"]["message"]


def test_an_asset_s_watcher_outlives_a_store_that_takes_no_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.pipeline_file.pipeline import load_pipeline
    from headwater.waiting.movements import Movements
    from headwater_airflow.triggers.movement import MovementTrigger

    lake, file = made(tmp_path, "lake")
    sight = Movements(load_pipeline(file)).look()
    assert sight is not None
    pins, pinned = [], Sight.pinned

    def at_second(self: Sight, *given: Any) -> dict[str, Any]:
        pins.append(given)
        if len(pins) == 1:
            raise OSError(5, "the store is away")
        return pinned(self, *given)

    async def thrice() -> AsyncIterator[Sight]:
        for _ in range(3):
            yield sight

    async def told() -> list[Any]:
        watcher = MovementTrigger(pipeline=str(file), tables=[], at_most_every=0, keep_seconds=60)
        return [event.payload async for event in watcher.filter_shared_stream(thrice())]

    monkeypatch.setattr(Sight, "pinned", at_second)
    (event,) = asyncio.run(told())
    assert event["moved"] == [A]
    assert len(list_pins(lake.root)) == 1
