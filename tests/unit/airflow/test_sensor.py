"""The sensor looks once and defers; its trigger is its arguments, looks without blocking, and ends after one event."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import yaml

import headwater
from fixtures.lakes import HandLake, position_at, utc
from headwater.lake import validations
from headwater.lake.cuts import list_pins
from headwater.lake.validations import SuiteResult, TableResult, Validation
from headwater.lake.wait_log import waits_since
from headwater.position import Position

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

    from headwater_airflow.sensors.freshness import FreshnessSensor
    from headwater_airflow.triggers.freshness import FreshnessTrigger

A, B = "public.a", "public.b"
SECRET = "s3cr3t-p4ss"
# Nobody listens there: what these tests wait for, they must find in the lake alone.
NOWHERE = f"postgresql://reader:{SECRET}@127.0.0.1:1/shop"
CONTEXT: Any = {"ti": SimpleNamespace(dag_id="dag", run_id="run", task_id="fresh", map_index=-1)}


pytestmark = pytest.mark.usefixtures("airflow_home")


@pytest.fixture(autouse=True)
def task_states(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What Airflow's API says of the task `fresh` in the run `run`."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    found = {"fresh": "deferred"}

    def states(dag_id: str, map_index: int, task_ids: list[str], *, run_ids: list[str]) -> dict[str, Any]:
        assert (dag_id, task_ids, run_ids) == ("dag", ["fresh"], ["run"])
        return {"run": {task if map_index < 0 else f"{task}_{map_index}": state for task, state in found.items()}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", states)
    return found


@pytest.fixture
def lake(tmp_path: Path) -> HandLake:
    lake = HandLake(tmp_path / "lake", position_at(lsn=0x100), [A, B])
    lake.publish(0x200, A)
    return lake


@pytest.fixture
def pipeline(lake: HandLake, tmp_path: Path) -> str:
    return write_pipeline(tmp_path, lake, NOWHERE)


def write_pipeline(folder: Path, lake: HandLake, connection: str) -> str:
    file = folder / "shop.yaml"
    document = {
        "pipeline": "shop",
        "source": {"connection": connection},
        "lake": {"root": Path(lake.root).as_uri()},
        "tables": [A, B],
    }
    file.write_text(yaml.safe_dump(document))
    return str(file)


def sensor(pipeline: str, **arguments: Any) -> FreshnessSensor:
    from headwater_airflow.sensors.freshness import FreshnessSensor

    return FreshnessSensor(task_id="fresh", pipeline=pipeline, **arguments)


def deferred(task: FreshnessSensor) -> FreshnessTrigger:
    from airflow.sdk.exceptions import TaskDeferred

    from headwater_airflow.triggers.freshness import FreshnessTrigger

    with pytest.raises(TaskDeferred) as deferral:
        task.execute(CONTEXT)
    assert deferral.value.method_name == "execute_complete"
    trigger = deferral.value.trigger
    assert isinstance(trigger, FreshnessTrigger)
    return trigger


def stored_and_restored(trigger: BaseTrigger) -> FreshnessTrigger:
    """As a triggerer gets it: from what `serialize` gave, by way of JSON."""
    path, arguments = trigger.serialize()
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)(**json.loads(json.dumps(arguments)))
    assert found.serialize() == trigger.serialize()
    return cast("FreshnessTrigger", found)


def target_of(trigger: FreshnessTrigger) -> dict[str, Any]:
    return cast("dict[str, Any]", trigger.serialize()[1]["target"])


async def events(trigger: BaseTrigger) -> list[dict[str, Any]]:
    return [event.payload async for event in trigger.run()]


def at(lake: HandLake, lsn: int) -> dict[str, Any]:
    return lake.position.at(lsn).to_json()


def test_a_lake_that_is_fresh_already_costs_one_look_and_no_trigger(lake: HandLake, pipeline: str) -> None:
    cut = sensor(pipeline, tables=[A], require=at(lake, 0x180)).execute(CONTEXT)
    assert (cut["outcome"], cut["epoch"], set(cut["tables"])) == ("satisfied", 1, {A})
    (pin,) = list_pins(lake.root)
    assert pin.owner == "dag run fresh -1"
    assert timedelta(hours=23) < pin.expiry - datetime.now(UTC) <= timedelta(hours=24)


def test_a_deferred_sensor_ends_when_the_lake_gets_there_and_not_before(lake: HandLake, pipeline: str) -> None:
    task = sensor(pipeline, require=at(lake, 0x300))
    trigger = stored_and_restored(deferred(task))

    async def scenario() -> list[dict[str, Any]]:
        waiting = asyncio.ensure_future(events(trigger))
        lake.read_to(0x300, {A: 0x280})  # read, and not published
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done
        await asyncio.to_thread(lake.publish, 0x280, A, read=0x300)
        return await asyncio.wait_for(waiting, 20)

    (event,) = asyncio.run(scenario())
    cut = task.execute_complete(CONTEXT, json.loads(json.dumps(event)))
    assert (cut["outcome"], cut["epoch"], cut["target"]) == ("satisfied", 2, "0/300")
    assert cut["position"] == at(lake, 0x300)
    assert [pin.cut["epoch"] for pin in list_pins(lake.root)] == [2]


def test_tables_may_come_by_xcom_and_be_templates_one_by_one(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk import DAG, task
    from airflow.sdk.exceptions import AirflowFailException

    @task
    def names() -> list[str]:
        return []

    with DAG("dag"):
        late = sensor(pipeline, tables=cast("Any", names()), require=at(lake, 0x180))
    late.tables = [A]
    assert set(late.execute(CONTEXT)["tables"]) == {A}
    late.tables = cast("Any", "public.a")
    with pytest.raises(AirflowFailException, match="expected a list of names"):
        late.execute(CONTEXT)
    one = sensor(pipeline, tables=["{{ name }}"], require=at(lake, 0x180))
    one.render_template_fields(CONTEXT | {"name": B})
    assert set(one.execute(CONTEXT)["tables"]) == {B}


def test_the_position_of_a_writer_comes_by_xcom_also_rendered_as_text(lake: HandLake, pipeline: str) -> None:
    position = Position.from_json(at(lake, 0x180))
    for require in (position, str(position.to_json()), json.dumps(position.to_json())):
        assert sensor(pipeline, require=require).execute(CONTEXT)["outcome"] == "satisfied"


def test_a_sensor_for_a_validated_cut_defers_until_one_has_passed(lake: HandLake, pipeline: str) -> None:
    from headwater_airflow.sensors.freshness import FreshnessSensor

    task = sensor(pipeline, require=at(lake, 0x180), validated=True)
    trigger = stored_and_restored(deferred(task))
    assert target_of(trigger)["validated"] == [A, B]

    async def scenario() -> list[dict[str, Any]]:
        waiting = asyncio.ensure_future(events(trigger))
        await asyncio.to_thread(record_validation, lake, False)
        await asyncio.to_thread(lake.publish, 0x300, A)
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done
        await asyncio.to_thread(record_validation, lake, True)
        return await asyncio.wait_for(waiting, 20)

    (event,) = asyncio.run(scenario())
    cut = task.execute_complete(CONTEXT, json.loads(json.dumps(event)))
    assert (cut["outcome"], cut["epoch"], cut["validated"]) == ("satisfied", 2, [A, B])
    with pytest.raises(ValueError, match="exclude each other"):
        FreshnessSensor(task_id="fresh", pipeline=pipeline, validated=True, on_timeout="fallback")


def record_validation(lake: HandLake, success: bool) -> None:
    newest = lake.ledger.newest
    assert newest is not None
    now = datetime.now(UTC)
    suite = SuiteResult("basics", 1, int(not success), 0, None if success else "error")
    tables = [TableResult(name, 0, lake.versions[name].version, 1, [suite]) for name in (A, B)]
    until = now + timedelta(hours=1)
    run = Validation(f"{now}", "shop", newest.epoch, lake.position, None, tables, now, now, until, "1.24")
    validations.record(lake.root, run)


def test_each_wait_is_in_the_log_of_waits_with_the_time_since_the_task_began(lake: HandLake, pipeline: str) -> None:
    for _ in range(2):
        sensor(pipeline, tables=[A], require=at(lake, 0x180)).execute(CONTEXT)
    task = sensor(pipeline, require=at(lake, 0x300), max_wait=60)
    trigger = stored_and_restored(deferred(task))
    trigger.request = replace(trigger.request, began=datetime.now(UTC) - timedelta(seconds=40))
    lake.publish(0x300, A)
    asyncio.run(events(trigger))
    asyncio.run(events(stored_and_restored(deferred(sensor(pipeline, require=at(lake, 0x400), max_wait="1s")))))
    found = waits_since(lake.root, datetime.now(UTC) - timedelta(hours=1))
    assert {(one.who, one.requirement) for one in found} == {("dag.fresh", "a position")}
    by_tables = {one.tables: one for one in found}
    assert (by_tables[A,].runs, by_tables[A,].satisfied) == (2, 2)
    assert (by_tables[A, B].runs, by_tables[A, B].satisfied, by_tables[A, B].last) == (2, 1, "not_running")
    assert (by_tables[A, B].longest or 0) >= 40


@pytest.mark.parametrize(
    "left",
    [
        "nothing",
        "an asset",
        "a task mapped over it",
        "no XCom",
        "a callback",
        "an API server that answers",
        "the result of the DAG",
    ],
)
def test_a_satisfied_wait_needs_no_worker_unless_something_is_left_for_one(
    lake: HandLake, pipeline: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk import DAG, Asset, task
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse
    from airflow.sdk.execution_time.xcom import XCom
    from airflow.triggers.base import TaskSuccessEvent

    stored = []

    async def store(key: str, value: Any, **place: Any) -> None:
        if left == "an API server that answers":
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR))
        stored.append((key, json.loads(json.dumps(value)), place))

    monkeypatch.setattr(XCom, "aset", store)

    @task
    def read(cut: dict[str, Any]) -> None:
        pass

    with DAG("dag") as dag:
        outlets = [Asset("orders")] if left == "an asset" else []
        callback = (lambda context: None) if left == "a callback" else None
        arguments = {"outlets": outlets, "on_success_callback": callback, "do_xcom_push": left != "no XCom"}
        waiting = sensor(pipeline, require=at(lake, 0x300), **arguments)
        if left == "the result of the DAG":
            dag.add_result(waiting.output)
        if left == "a task mapped over it":
            read.expand(cut=waiting.output)
        else:
            read(cast("dict[str, Any]", waiting.output))
    trigger = stored_and_restored(deferred(waiting))
    assert trigger.ends_task == (left in ("nothing", "an API server that answers"))
    instance: Any = SimpleNamespace(dag_id="dag", task_id="fresh", run_id="run", map_index=3)
    trigger.task_instance = instance
    lake.publish(0x300, A)

    async def last() -> Any:
        return [event async for event in trigger.run()][-1]

    event = asyncio.run(last())
    assert isinstance(event, TaskSuccessEvent) == (left == "nothing")
    if isinstance(event, TaskSuccessEvent):
        ((key, cut, place),) = stored
        assert (key, cut["outcome"], cut["epoch"], place) == ("return_value", "satisfied", 2, vars(instance))
    else:
        assert event.payload["outcome"] == "satisfied"


class Counted:
    """Airflow's metrics as a backend gets them; those that are not ours are for the one that was there."""

    def __init__(self, others: Any) -> None:
        self._others = others
        self.counters: list[tuple[str, dict[str, str]]] = []
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)

    def incr(self, stat: str, *arguments: Any, **tagged: Any) -> None:
        if not stat.startswith("headwater"):
            self._others.incr(stat, *arguments, **tagged)
            return
        self.counters.append((stat, tagged["tags"]))

    def timing(self, stat: str, dt: Any, **tagged: Any) -> None:
        if not stat.startswith("headwater"):
            self._others.timing(stat, dt, **tagged)
            return
        assert (stat, tagged) == ("headwater_wait.duration", {"tags": {"pipeline": "shop"}})
        self.seconds.append(dt.total_seconds())


def counted_in(package: str, monkeypatch: pytest.MonkeyPatch) -> Counted:
    stats = f"{package}._shared.observability.metrics.stats"
    backend = Counted(importlib.import_module(stats)._get_backend())
    monkeypatch.setattr(f"{stats}._backend", backend)
    return backend


def test_a_wait_is_counted_once_where_it_ends(lake: HandLake, pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException
    from airflow.sdk.execution_time.xcom import XCom

    in_task, in_triggerer = counted_in("airflow.sdk", monkeypatch), counted_in("airflow", monkeypatch)
    tags = {"pipeline": "shop"}
    sensor(pipeline, require=at(lake, 0x180)).execute(CONTEXT)
    assert (in_task.counters, len(in_task.seconds)) == ([("headwater_wait.satisfied", tags)], 1)
    late = sensor(pipeline, require=at(lake, 0x300), max_wait="500ms")
    (event,) = asyncio.run(events(stored_and_restored(deferred(late))))
    assert not in_triggerer.counters
    with pytest.raises(AirflowException):
        late.execute_complete(CONTEXT, event)
    assert in_task.counters[1:] == [("headwater_wait.not_running", tags)]
    assert in_task.seconds[1] >= 0.5
    with pytest.raises(AirflowFailException):
        sensor(pipeline, tables=["public.nobody"], require=at(lake, 0x180)).execute(CONTEXT)
    assert [stat for stat, _ in in_task.counters[2:]] == ["headwater_wait.not_replicated"]

    async def store(key: str, value: Any, **place: Any) -> None:
        pass

    monkeypatch.setattr(XCom, "aset", store)
    trigger = stored_and_restored(deferred(sensor(pipeline, require=at(lake, 0x300))))
    trigger.ends_task = True
    instance: Any = SimpleNamespace(dag_id="dag", task_id="fresh", run_id="run", map_index=-1)
    trigger.task_instance = instance
    lake.publish(0x300, A)
    asyncio.run(asyncio.wait_for(anext(trigger.run()), 20))
    assert (in_triggerer.counters, len(in_triggerer.seconds)) == ([("headwater_wait.satisfied", tags)], 1)
    assert len(in_task.counters) == 3


def test_a_wait_that_cannot_be_counted_ends_as_it_would(
    lake: HandLake, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow.sdk.observability.stats.incr", None)
    assert sensor(pipeline, require=at(lake, 0x180)).execute(CONTEXT)["outcome"] == "satisfied"


def test_the_trigger_carries_the_pinned_target_and_no_secret(lake: HandLake, pipeline: str) -> None:
    _, arguments = deferred(sensor(pipeline, require=at(lake, 0x300))).serialize()
    assert arguments["target"] == {"lsn": "0/300", "timeline": 1, "system_id": "7", "max_staleness": None}
    assert arguments["tables"] == [A, B]
    assert SECRET not in json.dumps(arguments)


STORED: dict[str, Any] = {
    "pipeline": "/etc/headwater/shop.yaml",
    "tables": [A, B],
    "target": {"lsn": "0/300", "timeline": 1, "system_id": "7", "max_staleness": None, "validated": [A]},
    "deadline": "2026-03-01T12:05:00+00:00",
    "keep_seconds": 86400.0,
    "owner": "dag run fresh -1",
    "ignore_suspended": True,
    "give_up_early": True,
    "validated": False,
    "look_seconds": 0.25,
    "ends_task": True,
    "who": "dag.fresh",
    "requirement": "now",
    "began": "2026-03-01T12:00:00+00:00",
    "partitions": {A: ["public.a_1"]},
}
"""As Airflow's database holds it: another version of Headwater reads what this one has stored, and the other way."""


def test_a_trigger_is_stored_in_the_form_that_every_version_reads() -> None:
    from headwater_airflow.triggers.freshness import FreshnessTrigger

    assert stored_and_restored(FreshnessTrigger(**STORED)).serialize()[1] == STORED
    written = FreshnessTrigger(**STORED | {"partitions": {A: "a_1"}})
    assert written.serialize()[1] == STORED, "as a person wrote it"


def test_what_an_older_version_has_stored_is_waited_for(lake: HandLake, pipeline: str) -> None:
    from headwater_airflow.triggers.freshness import FreshnessTrigger

    first = ("tables", "target", "keep_seconds", "owner", "ignore_suspended", "look_seconds")
    deadline = (datetime.now(UTC) + timedelta(seconds=20)).isoformat()
    old = {name: STORED[name] for name in first} | {
        "pipeline": pipeline,
        "deadline": deadline,
        "conn_id": "shop-source",
    }
    old["target"] = {"lsn": "0/300", "timeline": 1, "system_id": "7", "max_staleness": None}
    trigger = stored_and_restored(FreshnessTrigger(**old, given_up_since="whatever it was"))
    lake.publish(0x300, A)
    (event,) = asyncio.run(events(trigger))
    assert (event["outcome"], event["epoch"], set(event["tables"])) == ("satisfied", 2, {A, B})
    assert [pin.owner for pin in list_pins(lake.root)] == ["dag run fresh -1"]
    assert waits_since(lake.root, datetime.now(UTC) - timedelta(hours=1)) == [], "it does not know who asks"


def test_the_deadline_is_enforced_inside_the_trigger(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

    task = sensor(pipeline, require=at(lake, 0x300), max_wait="500ms")
    (event,) = asyncio.run(events(stored_and_restored(deferred(task))))
    assert (event["outcome"], event["exit_status"]) == ("not_running", 3)
    with pytest.raises(AirflowException, match="not_running: no driver was seen alive") as failed:
        task.execute_complete(CONTEXT, event)
    assert not isinstance(failed.value, AirflowFailException)  # a retry takes a new target
    with pytest.raises(AirflowSkipException):
        sensor(pipeline, on_timeout="skip").execute_complete(CONTEXT, event)


def test_a_paused_pipeline_skips_the_task_of_whoever_asked_for_that(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    task = sensor(pipeline, require=at(lake, 0x300), on_timeout="skip")
    trigger = deferred(task)
    assert lake.registry.pipeline is not None
    lake.registry.write(replace(lake.registry.pipeline, paused="2026-03-01T00:00:00Z"))
    (event,) = asyncio.run(events(trigger))
    assert event["outcome"] == "paused"
    with pytest.raises(AirflowSkipException):
        task.execute_complete(CONTEXT, event)


def test_a_table_suspended_while_waiting_fails_the_task_for_good(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    task = sensor(pipeline, require=at(lake, 0x300), on_timeout="skip")
    trigger = deferred(task)
    lake.enter(B, "suspended", "column x was dropped", "headwater load --table public.b --again")
    (event,) = asyncio.run(events(trigger))
    with pytest.raises(AirflowFailException, match=r"column x was dropped.*What to do: headwater load"):
        task.execute_complete(CONTEXT, event)
    with pytest.raises(AirflowFailException):
        task.execute(CONTEXT)


def test_a_refusal_inside_the_trigger_is_an_event_and_not_a_crash(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    task = sensor(pipeline, require=at(lake, 0x300))
    trigger = deferred(task)
    Path(pipeline).write_text("pipeline: shop\nunknown: 1\n")
    (event,) = asyncio.run(events(trigger))
    assert event["exit_status"] == 2
    with pytest.raises(AirflowFailException, match="bad_configuration"):
        task.execute_complete(CONTEXT, event)


def test_an_outage_of_the_store_is_waited_out(lake: HandLake, pipeline: str) -> None:
    trigger = deferred(sensor(pipeline, require=at(lake, 0x300)))
    file = Path(lake.root) / "_headwater" / "position.json"
    file.unlink()
    file.mkdir()  # reading it is now an error of the file system

    async def scenario() -> list[dict[str, Any]]:
        waiting = asyncio.ensure_future(events(trigger))
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        file.rmdir()
        await asyncio.to_thread(lake.publish, 0x300, A)
        return await asyncio.wait_for(waiting, 20)

    assert asyncio.run(scenario())[0]["outcome"] == "satisfied"


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        ({"require": "now"}, {"now": True}),
        ({"require": "2026-03-01T00:00:00Z"}, {"since": "2026-03-01T00:00:00+00:00"}),
        ({"require": "30s", "tables": [B, A], "validated": True}, {"max_staleness": 30.0, "validated": [A, B]}),
        ({"require": "now", "validated": True}, {"now": True}),
    ],
)
def test_an_outage_at_the_first_look_is_for_the_triggerer_to_wait_out(
    lake: HandLake, pipeline: str, asked: dict[str, Any], target: dict[str, Any]
) -> None:
    away = Path(lake.root) / "_headwater" / "position.json"
    away.unlink()
    away.mkdir()
    trigger = stored_and_restored(deferred(sensor(pipeline, **asked)))
    nothing = {"lsn": None, "timeline": None, "system_id": None, "max_staleness": None}
    assert target_of(trigger) == nothing | target
    assert trigger.serialize()[1]["tables"] == sorted(asked.get("tables", []))


def test_a_wait_whose_lake_was_away_at_first_is_satisfied_by_what_was_asked_for(lake: HandLake, pipeline: str) -> None:
    task = sensor(pipeline, require=at(lake, 0x300), validated=False)
    away = Path(lake.root) / "_headwater" / "position.json"
    kept = away.read_bytes()
    away.unlink()
    away.mkdir()
    trigger = stored_and_restored(deferred(task))

    async def scenario() -> list[dict[str, Any]]:
        waiting = asyncio.ensure_future(events(trigger))
        away.rmdir()
        away.write_bytes(kept)
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done
        await asyncio.to_thread(lake.publish, 0x300, A)
        return await asyncio.wait_for(waiting, 20)

    cut = task.execute_complete(CONTEXT, asyncio.run(scenario())[0])
    assert (cut["outcome"], cut["target"], set(cut["tables"])) == ("satisfied", "0/300", {A, B})


def test_keys_and_a_pipeline_file_that_are_away_for_a_moment_are_waited_for(
    lake: HandLake, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.errors import Transient

    def away(*arguments: Any) -> Any:
        raise Transient("it does not answer")

    for what in ("Pipeline.lake_path", "load_pipeline"):
        with monkeypatch.context() as patch:
            patch.setattr(f"headwater.pipeline_file.pipeline.{what}", away)
            assert target_of(deferred(sensor(pipeline)))["now"]


@pytest.mark.parametrize(
    "asked",
    [{"require": "default"}, {"require": "0/300"}, {"require": "default", "validated": True}, {"max_wait": 0}],
)
def test_where_the_lake_says_what_is_wanted_its_outage_fails_the_try(
    lake: HandLake, pipeline: str, asked: dict[str, Any]
) -> None:
    away = Path(lake.root) / "_headwater" / "position.json"
    away.unlink()
    away.mkdir()
    with pytest.raises(OSError, match="is a directory"):
        sensor(pipeline, **asked).execute(CONTEXT)


def test_now_without_the_source_is_waited_for_then_fails_the_try_and_shows_no_secret(
    lake: HandLake, pipeline: str
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    task = sensor(pipeline, max_wait=1)
    trigger = stored_and_restored(deferred(task))
    assert target_of(trigger)["now"]
    (event,) = asyncio.run(events(trigger))
    assert (event["outcome"], event["target"], event["exit_status"]) == ("source_unreachable", None, 3)
    ends: list[Callable[[], Any]] = [
        lambda: task.execute_complete(CONTEXT, event),
        lambda: sensor(pipeline, max_wait=0).execute(CONTEXT),
    ]
    for end in ends:
        with pytest.raises(AirflowException, match="source_unreachable") as failed:
            end()
        assert not isinstance(failed.value, AirflowFailException)
        assert SECRET not in str(failed.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tables": "public.a"},
        {"on_timeout": "wait"},
        {"ignore_suspended": "no"},
        {"max_wait": "soon"},
        {"max_wait": -1},
        {"keep_cut": "x"},
        {"soft_fail": True},
        {"never_fail": True},
        {"mode": "reschedule"},
    ],
)
def test_arguments_that_cannot_work_are_refused_when_the_dag_is_read(pipeline: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        sensor(pipeline, **arguments)


@pytest.mark.parametrize("name", ["soft_fail", "never_fail"])
def test_a_dag_s_default_args_are_refused_where_the_arguments_are(pipeline: str, name: str) -> None:
    from airflow.sdk import DAG

    with DAG("dag", default_args={name: True}), pytest.raises(ValueError, match=f"give this task {name}=False"):
        sensor(pipeline)
    with DAG("dag", default_args={name: True}):
        sensor(pipeline, **{name: False})


def test_a_dag_s_default_args_change_no_mode_and_no_branch(pipeline: str) -> None:
    from airflow.sdk import DAG

    from headwater_airflow.operators.branch import FreshnessBranchOperator

    with DAG("dag", default_args={"mode": "reschedule", "max_wait": "5m", "on_timeout": "fallback"}):
        task = sensor(pipeline)
        branch = FreshnessBranchOperator(task_id="branch", pipeline=pipeline, if_fresh=None, if_not_fresh=None)
    assert (task.mode, task.max_wait, task.on_timeout) == ("poke", timedelta(minutes=5), "fallback")
    assert (branch.mode, branch.on_timeout) == ("poke", "fail")


@pytest.mark.parametrize("arguments", [{"require": "soon"}, {"tables": ["no.such.name"]}])
def test_arguments_that_come_from_templates_are_refused_when_the_task_runs(
    pipeline: str, arguments: dict[str, Any]
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException):
        sensor(pipeline, **arguments).execute(CONTEXT)


def in_run(conf: Any = None, **context: Any) -> Any:
    return {**CONTEXT, "dag_run": SimpleNamespace(conf=conf), **context}


def test_the_conf_of_the_run_goes_over_the_arguments_and_that_of_the_task_over_both(
    lake: HandLake, pipeline: str
) -> None:
    from airflow.sdk.exceptions import AirflowSkipException, TaskDeferred

    task = sensor(pipeline, require=at(lake, 0x300), tables=[A, B])
    silent: list[Any] = [
        None,
        {},
        {"other": 1},
        {"headwater": {}},
        {"headwater": {"tasks": {"another": {"require": "0/1"}}}},
    ]
    for conf in silent:
        with pytest.raises(TaskDeferred):
            task.execute(in_run(conf))
    sooner = {"headwater": {"require": at(lake, 0x180), "tables": [A], "keep_cut": "1h"}}
    assert set(task.execute(in_run(sooner))["tables"]) == {A}
    with pytest.raises(TaskDeferred) as deferral:
        task.execute(in_run({"headwater": {"max_wait": "1h", "tasks": {"fresh": {"max_wait": "2h"}}}}))
    trigger = cast("FreshnessTrigger", deferral.value.trigger)
    assert timedelta(minutes=119) < trigger.request.deadline - datetime.now(UTC) <= timedelta(hours=2)
    late = {"outcome": "timed_out", "reason": "why", "exit_status": 3}
    with pytest.raises(AirflowSkipException):
        task.execute_complete(in_run({"headwater": {"on_timeout": "skip"}}), late)


@pytest.mark.parametrize(
    ("conf", "problem"),
    [
        (
            {"pipeline": "/other.yaml"},
            r"headwater\.pipeline is unknown; possible: ignore_suspended, keep_cut",
        ),
        ({"tasks": {"fresh": {"requires": "now"}}}, r"headwater\.tasks\.fresh\.requires is unknown"),
        ({"max_wait": "soon"}, "max_wait='soon': expected a duration"),
        ({"on_timeout": "wait"}, "on_timeout='wait'"),
        ({"tables": A}, "expected a list of names"),
        ({"tables": [1]}, "1 is no table's name"),
        ({"keep_cut": "4000000d"}, "at most a hundred years"),
        ({"require": "9999-12-31T23:59:59-05:00"}, "no freshness requirement"),
        ("now", "expected an object"),
    ],
)
def test_a_conf_that_cannot_work_fails_the_task_for_good(pipeline: str, conf: Any, problem: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException, match=problem):
        sensor(pipeline).execute(in_run({"headwater": conf}))


def test_the_end_of_the_data_interval_is_waited_for_by_the_sources_clock(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

    task = sensor(pipeline, require="data_interval_end")
    lake.publish(0x280, A, read=0x290, sample=(utc(10), 0x290))
    # Every sample at or after the moment bounds it, also when the source does not answer.
    cut = task.execute(in_run(data_interval_end=utc(10)))
    assert cut["outcome"] == "satisfied"
    assert cut["target"] == "0/290 (2023-11-14T22:13:30Z)"
    with pytest.raises(TaskDeferred) as deferral:
        task.execute(in_run(data_interval_end=utc(11)))
    trigger = stored_and_restored(cast("FreshnessTrigger", deferral.value.trigger))
    assert target_of(trigger)["since"] == utc(11).isoformat()

    async def scenario() -> list[dict[str, Any]]:
        waiting = asyncio.ensure_future(events(trigger))
        # As much as was ever read; but that was before the moment.
        lake.publish(0x300, A, sample=(utc(10.9), 0x300))
        done, _ = await asyncio.wait({waiting}, timeout=1)
        assert not done
        await asyncio.to_thread(lake.publish, 0x310, A, sample=(utc(11), 0x305))
        return await asyncio.wait_for(waiting, 20)

    (event,) = asyncio.run(scenario())
    assert (event["outcome"], event["target"]) == ("satisfied", "0/305 (2023-11-14T22:13:31Z)")
    for context in (in_run(), in_run(data_interval_end=None)):
        with pytest.raises(AirflowFailException, match="this DAG run has no data interval"):
            task.execute(context)


def test_a_moment_that_lies_far_back_is_found_in_the_ledger(lake: HandLake, pipeline: str) -> None:
    lake.publish(0x280, A, sample=(utc(10), 0x290))
    lake.publish(0x2A0, A, sample=(utc(20), 0x400))  # the file has this sample alone
    cut = sensor(pipeline, require=utc(5).isoformat()).execute(in_run())
    assert cut["outcome"] == "satisfied"
    assert cut["target"].startswith("0/290 ")


def test_one_mapped_task_waits_for_several_pipelines(tmp_path: Path) -> None:
    from airflow.sdk import DAG

    from headwater_airflow.sensors.freshness import FreshnessSensor

    wanted = []
    for number, name in enumerate((A, B)):
        folder = tmp_path / str(number)
        folder.mkdir()
        lake = HandLake(folder / "lake", position_at(lsn=0x100), [A, B])
        lake.publish(0x200 + number, name)
        wanted.append({"pipeline": write_pipeline(folder, lake, NOWHERE), "tables": [name], "require": at(lake, 0x180)})
    with DAG("several", schedule=None):
        mapped = FreshnessSensor.partial(task_id="fresh", max_wait="1m").expand_kwargs(wanted)
    cuts = [cast("FreshnessSensor", mapped.unmap(kwargs)).execute(CONTEXT) for kwargs in wanted]
    assert [(set(cut["tables"]), cut["position"]["lsn"]) for cut in cuts] == [({A}, "0/200"), ({B}, "0/201")]


def test_one_call_takes_the_cuts_of_several_pipelines(tmp_path: Path) -> None:
    wanted: list[dict[str, Any]] = []
    lakes: list[HandLake] = []
    for number, name in enumerate((A, B)):
        folder = tmp_path / str(number)
        folder.mkdir()
        lakes.append(HandLake(folder / "lake", position_at(lsn=0x100), [A, B]))
        lakes[-1].publish(0x200 + number, name)
        wanted.append({"pipeline": write_pipeline(folder, lakes[-1], NOWHERE), "tables": [name]})
    cuts = headwater.wait_all(wanted, require=at(lakes[0], 0x180), timeout="1m")
    assert [(set(cut["tables"]), cut["position"]["lsn"]) for cut in cuts] == [({A}, "0/200"), ({B}, "0/201")]
    assert [[pin.cut["epoch"] for pin in list_pins(lake.root)] for lake in lakes] == [[cut["epoch"]] for cut in cuts]
    wanted[1] |= {"require": at(lakes[1], 0x300), "timeout": 0.1}
    with pytest.raises(headwater.NotFresh, match="no driver was seen alive"):
        headwater.wait_all(wanted, require=at(lakes[0], 0x180), timeout="1m")
    (again,) = headwater.wait_all([wanted[0]["pipeline"]], require=at(lakes[0], 0x180))
    assert again["position"] == cuts[0]["position"]


def ended(outcome: str, exit_status: int = 3) -> dict[str, Any]:
    return {"outcome": outcome, "target": "0/300", "waited_seconds": 5.0, "reason": "why", "exit_status": exit_status}


@pytest.mark.parametrize("outcome", ["timed_out", "not_running", "source_unreachable"])
def test_continue_goes_on_with_the_newest_cut_and_says_how_stale_it_is(
    lake: HandLake, pipeline: str, outcome: str
) -> None:
    lake.publish(0x280, A, read=0x290, sample=(utc(10), 0x288))
    task = sensor(pipeline, on_timeout="continue", keep_cut="2h")
    cut = task.execute_complete(CONTEXT, ended(outcome))
    assert (cut["outcome"], cut["target"], cut["waited_seconds"], cut["reason"]) == (outcome, "0/300", 5.0, "why")
    assert (cut["epoch"], cut["position"]["lsn"], set(cut["tables"])) == (2, "0/290", {A, B})
    # How long ago that is, only the source's clock knows.
    assert (cut["complete_until"], cut["staleness_seconds"]) == ("2023-11-14T22:13:30Z", None)
    (pin,) = list_pins(lake.root)
    assert (pin.id, pin.owner) == (cut["pin"]["id"], "dag run fresh -1")
    assert timedelta(minutes=119) < pin.expiry - datetime.now(UTC) <= timedelta(hours=2)


def test_continue_takes_the_wanted_tables_alone(lake: HandLake, pipeline: str) -> None:
    lake.publish(0x280, A, read=0x2F0, pending={A: 0x2A0, B: 0x2B1})
    cut = sensor(pipeline, tables=[B], on_timeout="continue").execute_complete(CONTEXT, ended("timed_out"))
    assert (set(cut["tables"]), cut["position"]["lsn"]) == ({B}, "0/2B0")


@pytest.mark.parametrize("on_timeout", ["fail", "skip", "continue"])
def test_without_a_triggerer_the_wait_has_timed_out_as_any_other(
    lake: HandLake, pipeline: str, on_timeout: str
) -> None:
    from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
    from airflow.sdk.exceptions import (
        AirflowException,
        AirflowFailException,
        AirflowSensorTimeout,
        AirflowSkipException,
    )

    task = sensor(pipeline, on_timeout=on_timeout)
    failed = {"error": TriggerFailureReason.TRIGGER_TIMEOUT}
    if on_timeout == "continue":
        cut = task.resume_execution(TRIGGER_FAIL_REPR, failed, CONTEXT)
        assert (cut["outcome"], cut["epoch"]) == ("timed_out", 1)
        return
    expected = AirflowSkipException if on_timeout == "skip" else AirflowException
    with pytest.raises(expected, match="no triggerer") as end:
        task.resume_execution(TRIGGER_FAIL_REPR, failed, CONTEXT)
    assert not isinstance(end.value, AirflowSensorTimeout | AirflowFailException), "which are not tried again"


def test_a_wait_that_its_execution_timeout_has_ended_says_so(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason
    from airflow.sdk.exceptions import AirflowException

    def end(execution_timeout: timedelta, **arguments: Any) -> str:
        task = sensor(pipeline, max_wait="2m", execution_timeout=execution_timeout, **arguments)
        with pytest.raises(AirflowException) as found:
            task.resume_execution(TRIGGER_FAIL_REPR, {"error": TriggerFailureReason.TRIGGER_TIMEOUT}, CONTEXT)
        return str(found.value)

    short, long = timedelta(minutes=1), timedelta(minutes=3)
    assert "execution_timeout of 60 s is shorter than its max_wait" in end(short, start_from_trigger=True)
    assert "no triggerer has looked" in end(long, start_from_trigger=True)
    assert "no triggerer has looked" in end(short), "it counts only while a worker runs"


def test_a_branch_without_a_triggerer_is_the_one_for_what_is_not_fresh(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.bases.operator import TRIGGER_FAIL_REPR, TriggerFailureReason

    task, pushed, context = branch(pipeline, require=at(lake, 0x300), max_wait="1m")
    failed = {"error": TriggerFailureReason.TRIGGER_TIMEOUT}
    assert skipped(lambda: task.resume_execution(TRIGGER_FAIL_REPR, failed, context)) == ["report"]
    assert pushed["return_value"]["outcome"] == "timed_out"


@pytest.mark.parametrize(("require", "is_final"), [("now", False), ("30s", False), ("0/300", True)])
def test_another_timeline_is_tried_again_where_the_next_try_takes_a_target_of_its_own(
    lake: HandLake, pipeline: str, require: str, is_final: bool
) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    with pytest.raises(AirflowException, match="timeline_changed") as failed:
        sensor(pipeline, require=require).execute_complete(CONTEXT, ended("timeline_changed", 2))
    assert isinstance(failed.value, AirflowFailException) == is_final


@pytest.mark.parametrize("on_timeout", ["fail", "skip", "continue"])
def test_a_table_that_is_loading_is_waited_for_by_the_next_try(pipeline: str, on_timeout: str) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

    with pytest.raises(AirflowException, match="loading") as failed:
        sensor(pipeline, on_timeout=on_timeout).execute_complete(CONTEXT, ended("loading", 4))
    assert not isinstance(failed.value, AirflowFailException | AirflowSkipException)


@pytest.mark.parametrize(("outcome", "exit_status"), [("suspended", 4), ("future_position", 2)])
def test_continue_does_not_help_where_a_person_must_act(pipeline: str, outcome: str, exit_status: int) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException, match=outcome):
        sensor(pipeline, on_timeout="continue").execute_complete(CONTEXT, ended(outcome, exit_status))


@pytest.mark.parametrize(
    ("outcome", "exit_status"), [("timed_out", 3), ("not_running", 3), ("suspended", 4), ("loading", 4)]
)
def test_fallback_hands_on_the_source_and_says_that_it_cannot_be_repeated(
    lake: HandLake, pipeline: str, outcome: str, exit_status: int
) -> None:
    cut = sensor(pipeline, on_timeout="fallback").execute_complete(CONTEXT, ended(outcome, exit_status))
    assert (cut["outcome"], cut["reason"]) == (outcome, "why")
    assert cut["fallback"] == {"pipeline_file": pipeline, "repeatable": False}
    assert {name: table["state"] for name, table in cut["tables"].items()} == {A: "at the source", B: "at the source"}
    assert SECRET not in json.dumps(cut)
    assert list_pins(lake.root) == []


@pytest.mark.parametrize(("outcome", "exit_status"), [("source_unreachable", 3), ("not_replicated", 2)])
def test_fallback_does_not_help_without_the_source_or_against_a_mistake(
    pipeline: str, outcome: str, exit_status: int
) -> None:
    from airflow.sdk.exceptions import AirflowException

    with pytest.raises(AirflowException, match=outcome):
        sensor(pipeline, on_timeout="fallback").execute_complete(CONTEXT, ended(outcome, exit_status))


def test_fallback_is_taken_at_once_when_the_estimate_exceeds_the_wait(lake: HandLake, pipeline: str) -> None:
    assert lake.file is not None
    lake.file = replace(lake.file, rates={"apply_bytes_per_second": 1.0})
    lake.read_to(0x200)
    # 256 bytes at one a second.
    task = sensor(pipeline, require=at(lake, 0x300), on_timeout="fallback", max_wait=200)
    cut = task.execute(CONTEXT)
    assert cut["outcome"] == "timed_out"
    assert "it would take about 256.0 s" in cut["reason"]
    patient = sensor(pipeline, require=at(lake, 0x300), on_timeout="fallback", max_wait=600)
    trigger = stored_and_restored(deferred(patient))
    assert trigger.request.give_up_early
    assert not deferred(sensor(pipeline, require=at(lake, 0x300), max_wait=200)).request.give_up_early
    # Now it is slower.
    lake.file = replace(lake.file, rates={"apply_bytes_per_second": 0.1})
    lake.read_to(0x200)
    (event,) = asyncio.run(asyncio.wait_for(events(trigger), 20))
    assert (event["outcome"], event["waited_seconds"] < 20) == ("timed_out", True)


def branch(pipeline: str, **arguments: Any) -> tuple[Any, dict[str, Any], Any]:
    """The operator in a DAG, what it pushes, and the context it runs in."""
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.sdk import DAG

    from headwater_airflow.operators.branch import FreshnessBranchOperator

    with DAG("choice", schedule=None):
        task = FreshnessBranchOperator(
            task_id="fresh", pipeline=pipeline, if_fresh="report", if_not_fresh="apologise", **arguments
        )
        task >> [EmptyOperator(task_id="report"), EmptyOperator(task_id="apologise")]
    pushed: dict[str, Any] = {}
    instance = SimpleNamespace(
        **vars(CONTEXT["ti"]), task=task, xcom_push=lambda key, value: pushed.update({key: value})
    )
    return task, pushed, {"ti": instance}


def skipped(run: Callable[[], Any]) -> list[str]:
    from airflow.sdk.exceptions import DownstreamTasksSkipped

    with pytest.raises(DownstreamTasksSkipped) as choice:
        run()
    return [name if isinstance(name, str) else name[0] for name in choice.value.tasks]


def test_a_branch_is_chosen_by_freshness_and_gets_the_cut_or_the_reason(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    task, pushed, context = branch(pipeline, require=at(lake, 0x180))
    assert skipped(lambda: task.execute(context)) == ["apologise"]
    assert pushed["return_value"]["epoch"] == 1
    task, pushed, context = branch(pipeline, require=at(lake, 0x300))
    assert skipped(lambda: task.execute(context)) == ["report"]
    assert pushed["return_value"]["outcome"] == "not_running"
    for outcome, status in (("suspended", 4), ("timed_out", 3), ("source_unreachable", 3)):
        end = ended(outcome, status)
        assert skipped(partial(task.execute_complete, context, end)) == ["report"]
    with pytest.raises(AirflowFailException, match="future_position"):
        task.execute_complete(context, ended("future_position", 2))
    with pytest.raises(ValueError, match="on_timeout"):
        branch(pipeline, on_timeout="skip")


def test_a_branch_that_may_wait_is_deferred_as_a_sensor_is(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import TaskDeferred

    task, _, context = branch(pipeline, require=at(lake, 0x300), max_wait="1m")
    with pytest.raises(TaskDeferred):
        task.execute(context)


def test_the_log_of_the_wait_says_why_it_lasts_and_repeats_itself_seldom(
    lake: HandLake, pipeline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trigger = deferred(sensor(pipeline, require=at(lake, 0x400), max_wait="3s"))

    async def scenario() -> None:
        waiting = asyncio.ensure_future(events(trigger))
        for step in range(10):
            await asyncio.to_thread(lake.read_to, 0x300 + step)
            await asyncio.sleep(0.1)
        await waiting

    asyncio.run(scenario())
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if "waiting for 0/400" in line and "FreshnessTrigger" in line]
    assert 1 <= len(said) <= 3
    assert "public.a is complete up to 0/" in said[0]
    assert " B of the log" in said[0]


def test_inside_a_task_the_wait_takes_the_airflow_connection(
    lake: HandLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater import NotFresh
    from headwater_airflow import freshness

    pipeline = write_pipeline(tmp_path, lake, "airflow: shop-source")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP-SOURCE", NOWHERE.replace("postgresql:", "postgres:"))
    assert freshness.wait(pipeline, tables=[A], require=at(lake, 0x180))["epoch"] == 1
    with pytest.raises(NotFresh) as late:
        freshness.wait(pipeline, require=at(lake, 0x300), max_wait="200ms")
    assert late.value.code == "not_running"
    cut = freshness.wait(pipeline, require=at(lake, 0x300), max_wait="200ms", on_timeout="continue")
    assert (cut["outcome"], cut["epoch"]) == ("not_running", 1)


def test_an_airflow_connection_is_resolved_where_the_wait_runs(
    lake: HandLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = write_pipeline(tmp_path, lake, "airflow: shop-source")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP-SOURCE", NOWHERE.replace("postgresql:", "postgres:"))
    trigger = stored_and_restored(deferred(sensor(pipeline, require=at(lake, 0x300))))
    assert SECRET not in json.dumps(trigger.serialize()[1])
    lake.publish(0x300, A)
    (event,) = asyncio.run(events(trigger))
    assert event["outcome"] == "satisfied"


def test_a_connection_becomes_a_libpq_uri_that_keeps_every_character() -> None:
    from airflow.sdk import Connection
    from psycopg import conninfo

    from headwater_airflow.hooks.source import libpq_uri

    connection = Connection(
        conn_id="source",
        conn_type="postgres",
        host="db.example",
        port=5433,
        login="re@der",
        password="p:a/s?s@&%",
        schema="my shop",
        extra=json.dumps({"sslmode": "require", "cursor": "dictcursor"}),
    )
    assert conninfo.conninfo_to_dict(libpq_uri(connection)) == {
        "host": "db.example",
        "port": "5433",
        "user": "re@der",
        "password": "p:a/s?s@&%",
        "dbname": "my shop",
        "sslmode": "require",
    }


def test_a_connection_by_socket_or_ipv6_is_kept() -> None:
    from airflow.sdk import Connection
    from psycopg import conninfo

    from headwater_airflow.hooks.source import libpq_uri

    for host in ("/var/run/postgresql", "::1", "a.example,b.example", "a.example,::1,/run/pg"):
        for port in (None, 6432):
            connection = Connection(conn_id="source", conn_type="postgres", host=host, port=port, schema="shop")
            read = conninfo.conninfo_to_dict(libpq_uri(connection))
            assert (read["host"], read["dbname"]) == (host, "shop")
            # As one port by keyword is that of every host.
            assert str(read.get("port", "")).strip(",") == (",".join(["6432"] * len(host.split(","))) if port else "")


@pytest.mark.parametrize(
    ("host", "port", "hosts", "ports"),
    [
        ("db1:5433", None, "db1", "5433"),
        ("db1:5433", 6432, "db1", "5433"),
        ("db1:5433,db2:5434", None, "db1,db2", "5433,5434"),
        ("db1:5433,db2", 6432, "db1,db2", "5433,6432"),
        ("10.0.0.1:5433,[2001:db8::1]:5434", None, "10.0.0.1,2001:db8::1", "5433,5434"),
        ("2001:db8::5433,[::1]", 6432, "2001:db8::5433,::1", "6432,6432"),
        ("fe80::1%eth0", None, "fe80::1%eth0", None),
        ("/cloudsql/project:region:5433", None, "/cloudsql/project:region:5433", None),
    ],
)
def test_a_port_in_the_host_field_is_that_host_s(host: str, port: int | None, hosts: str, ports: str | None) -> None:
    from airflow.sdk import Connection
    from psycopg import conninfo

    from headwater_airflow.hooks.source import libpq_uri

    connection = Connection(conn_id="source", conn_type="postgres", host=host, port=port, schema="shop")
    read = conninfo.conninfo_to_dict(libpq_uri(connection))
    assert (read["host"], read.get("port")) == (hosts, ports)


def test_a_satisfied_wait_is_told_with_its_tables_first() -> None:
    from headwater_airflow.sensors.freshness import fresh

    tables: dict[str, Any] = {f"public.t{number}": {} for number in range(5)}
    event = {"epoch": 7, "position": {"lsn": "0/300"}, "waited_seconds": 1.2, "tables": tables}
    assert fresh(event) == "Fresh after 1.2 s: public.t0, public.t1, public.t2 and 2 more (epoch 7, position 0/300)"
