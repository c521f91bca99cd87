"""A sensor that starts in the triggerer: the first look is taken there, and a restart resumes the same wait."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from fixtures.lakes import HandLake, utc
from headwater.lake.cuts import list_pins
from unit.airflow.test_sensor import A, B, in_run, lake, pipeline, sensor, task_states

if TYPE_CHECKING:
    from headwater_airflow.triggers.first_look import SensorTrigger

pytestmark = pytest.mark.usefixtures("airflow_home")
__all__ = ["lake", "pipeline", "task_states"]

XComs = dict[str, Any]


@pytest.fixture
def xcoms(monkeypatch: pytest.MonkeyPatch) -> XComs:
    """The task's XComs, as the API server keeps them."""
    from airflow.sdk.execution_time.xcom import XCom

    found: XComs = {}

    async def aset(key: str, value: Any, **place: Any) -> None:
        assert place == {"dag_id": "dag", "task_id": "fresh", "run_id": "run", "map_index": -1}
        found[key] = json.loads(json.dumps(value))

    async def aget_one(*, key: str, **place: Any) -> Any:
        return found.get(key)

    def delete(key: str, **place: Any) -> None:
        found.pop(key, None)

    monkeypatch.setattr(XCom, "delete", delete)
    monkeypatch.setattr(XCom, "aset", aset)
    monkeypatch.setattr(XCom, "aget_one", aget_one)
    return found


def started(pipeline: str, context: Any = None, try_number: int = 1, **arguments: Any) -> SensorTrigger:
    """As a triggerer makes it of what the scheduler read in the stored DAG."""
    from airflow.sdk import DAG
    from airflow.serialization.decoders import smart_decode_trigger_kwargs
    from airflow.serialization.serialized_objects import DagSerialization

    from headwater_airflow.triggers.first_look import SensorTrigger

    with DAG("dag") as dag:
        sensor(pipeline, start_from_trigger=True, **arguments)
    task: Any = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("fresh")
    assert task.start_from_trigger
    path, module = task.start_trigger_args.trigger_cls, SensorTrigger.__module__
    assert path == f"{module}.SensorTrigger"
    decoded: Any = smart_decode_trigger_kwargs
    trigger = SensorTrigger(**decoded(task.start_trigger_args.trigger_kwargs))
    instance = SimpleNamespace(
        dag_id="dag", task_id="fresh", run_id="run", map_index=-1, try_number=try_number, task=task
    )
    given = context or in_run()
    vars(instance)["get_template_context"] = lambda: {**given, "ti": instance}
    trigger.task_instance = cast("Any", instance)
    return trigger


async def last_event(trigger: SensorTrigger) -> Any:
    return [event async for event in trigger.run()][-1]


def is_success(event: Any) -> bool:
    from airflow.triggers.base import TaskSuccessEvent

    return isinstance(event, TaskSuccessEvent)


def test_a_lake_that_is_fresh_ends_the_task_without_a_worker(lake: HandLake, pipeline: str, xcoms: XComs) -> None:
    event = asyncio.run(last_event(started(pipeline, require="0/180", tables=[A])))
    assert is_success(event)
    assert set(xcoms) == {"return_value"}
    assert (xcoms["return_value"]["outcome"], set(xcoms["return_value"]["tables"])) == ("satisfied", {A})
    assert [pin.owner for pin in list_pins(lake.root)] == ["dag run fresh -1"]


def test_a_triggerer_that_takes_over_resumes_the_wait_and_another_try_begins_anew(
    lake: HandLake, pipeline: str, xcoms: XComs
) -> None:
    lake.publish(0x280, A, read=0x290, sample=(utc(10), 0x290))
    run = in_run(data_interval_end=utc(11))

    async def scenario() -> Any:
        first = asyncio.create_task(last_event(started(pipeline, run, require="data_interval_end")))
        while "headwater_wait" not in xcoms:
            await asyncio.sleep(0.02)
        kept = dict(xcoms["headwater_wait"])
        assert kept["target"]["since"] == utc(11).isoformat()
        first.cancel()
        second = started(pipeline, run, require="data_interval_end", max_wait=5)
        waiting = asyncio.create_task(last_event(second))
        while second._request is None:
            await asyncio.sleep(0.02)
        resumed = second.request.to_json()
        assert (resumed["deadline"], resumed["target"]) == (kept["deadline"], kept["target"])
        await asyncio.to_thread(lake.publish, 0x310, A, sample=(utc(11), 0x305))
        return await asyncio.wait_for(waiting, 20)

    assert is_success(asyncio.run(scenario()))
    assert xcoms["return_value"]["target"] == "0/305 (2023-11-14T22:13:31Z)"
    event = asyncio.run(last_event(started(pipeline, try_number=2, require="0/400", max_wait=0.5)))
    assert (event.payload["outcome"], event.payload["target"]) == ("not_running", "0/400")
    assert "return_value" not in xcoms, "the cut of an earlier run of the task"


def test_a_wait_that_is_resumed_is_for_the_tables_that_it_began_with(
    lake: HandLake, pipeline: str, xcoms: XComs
) -> None:
    later = "public.later"

    async def scenario() -> Any:
        first = asyncio.create_task(last_event(started(pipeline, require="0/380")))
        while "headwater_wait" not in xcoms:
            await asyncio.sleep(0.02)
        first.cancel()
        assert xcoms["headwater_wait"]["tables"] == [], "the page says: of all tables"
        # A pattern has brought it in: the target that was taken before says nothing of it.
        await asyncio.to_thread(lake.registry.write, replace(lake.registry.record(B), name=later, state="loading"))
        waiting = asyncio.create_task(last_event(started(pipeline, require="0/380", max_wait=5)))
        await asyncio.to_thread(lake.publish, 0x400, A)
        return await asyncio.wait_for(waiting, 20)

    assert is_success(asyncio.run(scenario()))
    assert set(xcoms["return_value"]["tables"]) == {A, B}


def test_a_triggerer_that_hung_while_another_one_ended_the_task_leaves_its_cut_alone(
    lake: HandLake, pipeline: str, xcoms: XComs, task_states: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is downstream has read that cut. Nor is it taken for one of an earlier run."""
    hung, rendered, looks = started(pipeline, require="0/180"), asyncio.Event(), asyncio.Event()
    begin = type(hung)._rendered

    async def rendering(self: SensorTrigger, context: Any) -> Any:
        found = await begin(self, context)
        if self is hung:
            rendered.set()
            await looks.wait()
        return found

    monkeypatch.setattr(type(hung), "_rendered", rendering)

    async def scenario() -> Any:
        waiting = asyncio.create_task(last_event(hung))
        await rendered.wait()
        assert is_success(await last_event(started(pipeline, require="0/180")))
        first = dict(xcoms)
        task_states["fresh"] = "success"
        await asyncio.to_thread(lake.publish, 0x300, A)
        looks.set()
        event = await asyncio.wait_for(waiting, 20)
        assert xcoms == first
        return event

    assert asyncio.run(scenario()).payload["epoch"] == 2, "Airflow knows no task that this event is for"


def test_the_pipeline_file_may_be_given_as_a_path(lake: HandLake, pipeline: str, xcoms: XComs) -> None:
    assert is_success(asyncio.run(last_event(started(cast("Any", Path(pipeline)), require="0/180"))))


def test_the_runs_conf_goes_over_the_arguments_there_too(lake: HandLake, pipeline: str, xcoms: XComs) -> None:
    conf = {"headwater": {"require": "0/180", "tables": [B], "max_wait": "2h"}}
    trigger = started(pipeline, in_run(conf), require="0/400")
    assert is_success(asyncio.run(last_event(trigger)))
    assert set(xcoms["return_value"]["tables"]) == {B}
    assert trigger.request.began is not None
    assert trigger.request.deadline - trigger.request.began == timedelta(hours=2)


def test_what_the_scheduler_stored_is_read_by_another_version(lake: HandLake, pipeline: str, xcoms: XComs) -> None:
    from headwater_airflow.triggers.first_look import SensorTrigger

    stored: dict[str, Any] = {
        "templates": {"pipeline": pipeline, "tables": [A], "require": "0/180", "partitions": None},
        "max_wait": 300.0,
        "on_timeout": "fail",
        "ignore_suspended": False,
        "keep_cut": 3600.0,
        "validated": False,
        "plain": True,
    }
    now = started(pipeline, tables=[A], require="0/180", keep_cut="1h")
    assert now.serialize()[1] == stored
    templates = {name: stored["templates"][name] for name in ("pipeline", "tables", "require")}
    older = SensorTrigger(**{**stored, "templates": templates, "given_up_since": "whatever it was"})
    older.task_instance = now.task_instance
    assert is_success(asyncio.run(last_event(older)))
    assert set(xcoms["return_value"]["tables"]) == {A}


@pytest.mark.parametrize(
    ("run", "arguments", "said"),
    [
        ({"conf": {"headwater": {"max_wait": "soon"}}}, {}, "max_wait='soon': expected a duration"),
        ({}, {"require": "data_interval_end"}, "this DAG run has no data interval"),
        ({}, {"require": "yesterday"}, "yesterday"),
        ({"conf": {"headwater": {"tables": ["a.b.c"]}}}, {}, r"a\.b\.c"),
    ],
)
def test_what_cannot_work_fails_the_task_for_good(
    pipeline: str, xcoms: XComs, run: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    event = asyncio.run(last_event(started(pipeline, in_run(**run), **arguments)))
    assert event.payload["exit_status"] == 2
    with pytest.raises(AirflowFailException, match=said):
        sensor(pipeline).execute_complete(in_run(), event.payload)


def test_what_a_worker_must_resolve_is_refused_when_the_dag_is_read(pipeline: str) -> None:
    from airflow.sdk import DAG, task

    @task
    def position() -> dict[str, Any]:
        return {}

    with DAG("dag"), pytest.raises(ValueError, match="no worker is there to resolve it"):
        sensor(pipeline, require=position(), start_from_trigger=True)
    with DAG("dag"), pytest.raises(ValueError, match="no worker is there to resolve it"):
        sensor(pipeline, tables=position(), start_from_trigger=True)
    with DAG("dag"), pytest.raises(ValueError, match=r"tables=.*no worker is there to resolve it"):
        sensor(pipeline, tables=[A, position()], start_from_trigger=True)
    with DAG("dag"), pytest.raises(ValueError, match=r"pipeline=.*no worker is there to resolve it"):
        sensor(cast("Any", position()), start_from_trigger=True)
    with pytest.raises(ValueError, match="xcom_pull needs map_indexes=-1"):
        sensor(pipeline, require="{{ ti.xcom_pull('write') }}", start_from_trigger=True)


def test_a_param_without_a_value_is_refused_since_it_would_end_the_triggerer(pipeline: str) -> None:
    from airflow.sdk import DAG, Param

    arguments = {"start_from_trigger": True, "require": "{{ params.since }}"}
    refused = pytest.raises(ValueError, match="the param since has no value")
    with DAG("dag", params={"since": Param(type="string")}), refused:
        sensor(pipeline, **arguments)
    with refused:
        sensor(pipeline, params={"since": Param(type="string")}, **arguments)
    with DAG("dag", params={"since": Param(None, type=["null", "string"])}):
        sensor(pipeline, **arguments)
    with DAG("dag", params={"since": Param(type="string")}):
        sensor(pipeline, require="{{ params.since }}")


def test_what_only_a_worker_does_at_the_end_is_left_to_one(pipeline: str) -> None:
    from airflow.sdk import DAG

    from headwater_airflow.operators.branch import FreshnessBranchOperator
    from headwater_airflow.sensors.freshness import FreshnessSensor

    class Own(FreshnessSensor):
        def _ended(self, event: dict[str, Any], context: Any) -> dict[str, Any]:
            return {}

    arguments: dict[str, Any] = {"task_id": "fresh", "pipeline": pipeline, "start_from_trigger": True}
    with DAG("dag") as dag:
        result = FreshnessSensor(**arguments)
        dag.add_result(result.output)
    sensors = [
        result,
        FreshnessBranchOperator(if_fresh=None, if_not_fresh=None, **arguments),
        Own(**arguments),
        FreshnessSensor(on_execute_callback=lambda context: None, **arguments),
    ]
    for one in sensors:
        assert one.start_trigger_args is not None
        assert (one.start_trigger_args.trigger_kwargs or {})["plain"] is False
    long = FreshnessSensor(require=timedelta(days=12), **arguments).start_trigger_args
    assert long is not None
    assert (long.trigger_kwargs or {})["templates"]["require"] == "1036800.000000s"


def test_a_sensor_that_is_mapped_begins_in_a_worker(pipeline: str) -> None:
    from airflow.sdk import DAG
    from airflow.serialization.serialized_objects import DagSerialization

    from headwater_airflow.sensors.freshness import FreshnessSensor

    with DAG("dag") as dag:
        FreshnessSensor.partial(task_id="fresh", start_from_trigger=True).expand(pipeline=[pipeline, pipeline])
    task: Any = DagSerialization.from_dict(DagSerialization.to_dict(dag)).get_task("fresh")
    assert task.start_trigger_args is None
