"""The sensor looks once and defers; its trigger is its arguments, looks without blocking, and ends after one event."""

from __future__ import annotations

import asyncio
import importlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import yaml

from fixtures.lakes import HandLake, position_at
from headwater.lake.cuts import list_pins
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


def test_the_position_of_a_writer_comes_by_xcom_also_rendered_as_text(lake: HandLake, pipeline: str) -> None:
    position = Position.from_json(at(lake, 0x180))
    for require in (position, str(position.to_json()), json.dumps(position.to_json())):
        assert sensor(pipeline, require=require).execute(CONTEXT)["outcome"] == "satisfied"


def test_the_trigger_carries_the_pinned_target_and_no_secret(lake: HandLake, pipeline: str) -> None:
    _, arguments = deferred(sensor(pipeline, require=at(lake, 0x300))).serialize()
    assert arguments["target"] == {"lsn": "0/300", "timeline": 1, "system_id": "7", "max_staleness": None}
    assert arguments["tables"] == [A, B]
    assert SECRET not in json.dumps(arguments)


def test_the_deadline_is_enforced_inside_the_trigger(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

    task = sensor(pipeline, require=at(lake, 0x300), max_wait="500ms")
    (event,) = asyncio.run(events(stored_and_restored(deferred(task))))
    assert (event["outcome"], event["exit_status"]) == ("not_running", 3)
    with pytest.raises(AirflowException, match="not_running: no replicate driver was seen alive") as failed:
        task.execute_complete(CONTEXT, event)
    assert not isinstance(failed.value, AirflowFailException)  # a retry takes a new target
    with pytest.raises(AirflowSkipException):
        sensor(pipeline, on_timeout="skip").execute_complete(CONTEXT, event)


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


def test_now_without_the_source_fails_the_try_and_shows_no_secret(lake: HandLake, pipeline: str) -> None:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    with pytest.raises(AirflowException, match="source_unreachable") as failed:
        sensor(pipeline).execute(CONTEXT)
    assert not isinstance(failed.value, AirflowFailException)
    assert SECRET not in str(failed.value)


@pytest.mark.parametrize(
    "arguments", [{"on_timeout": "continue"}, {"max_wait": "soon"}, {"max_wait": -1}, {"keep_cut": "x"}]
)
def test_arguments_that_cannot_work_are_refused_when_the_dag_is_read(pipeline: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        sensor(pipeline, **arguments)


@pytest.mark.parametrize("arguments", [{"require": "soon"}, {"tables": ["no.such.name"]}])
def test_arguments_that_come_from_templates_are_refused_when_the_task_runs(
    pipeline: str, arguments: dict[str, Any]
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException):
        sensor(pipeline, **arguments).execute(CONTEXT)


def test_an_airflow_connection_is_resolved_where_the_wait_runs(
    lake: HandLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = write_pipeline(tmp_path, lake, "airflow: shop-source")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP-SOURCE", NOWHERE.replace("postgresql:", "postgres:"))
    trigger = stored_and_restored(deferred(sensor(pipeline, require=at(lake, 0x300))))
    assert trigger.conn_id == "shop-source"
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

    for host in ("/var/run/postgresql", "::1", "a.example,b.example"):
        connection = Connection(conn_id="source", conn_type="postgres", host=host, schema="shop")
        read = conninfo.conninfo_to_dict(libpq_uri(connection))
        assert (read["host"], read["dbname"]) == (host, "shop")
