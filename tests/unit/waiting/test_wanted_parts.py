"""Waits for some partitions of a table: reloads of them that are open are waited for, those of others are not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from fixtures.lake_waits import request
from fixtures.lakes import HandLake
from headwater.errors import Refused
from headwater.lake.cuts import list_pins
from headwater.lake.reload_records import Keeping, Reload
from headwater.lake.requirements import Target, WantedParts
from headwater.names import TableName
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.schema import Column, Leaf, TableSchema, ValueType
from headwater.waiting.on_timeout import instead_of_cut
from headwater.waiting.request import parse_partitions
from headwater.waiting.wait import wait_for_cut
from unit.airflow.test_first_look import XComs, is_success, last_event, started, xcoms
from unit.airflow.test_sensor import (
    CONTEXT,
    A,
    B,
    at,
    deferred,
    events,
    in_run,
    lake,
    pipeline,
    sensor,
    stored_and_restored,
    task_states,
)

pytestmark = pytest.mark.usefixtures("airflow_home")
__all__ = ["lake", "pipeline", "task_states", "xcoms"]

COLUMN = Column("id", 1, 0, -1, ValueType("int8", "bigint"))
LEAVES = (Leaf(11, "public", "a_1", 1), Leaf(12, "public", "a_2", 2))


@pytest.fixture
def parted(lake: HandLake) -> HandLake:
    """`lake` with A as a table of two partitions, the first of which is being reloaded."""
    schema = TableSchema(10, "public", "a", (COLUMN,), ("id",), LEAVES, partitioned=True)
    plain = replace(schema, name="b", leaves=(), partitioned=False)
    lake.registry.write(replace(lake.registry.record(A), schemas=((0, schema),)))
    lake.registry.write(replace(lake.registry.record(B), schemas=((0, plain),)))
    _ask(lake, "r1", 11)
    return lake


def _ask(lake: HandLake, name: str, *leaves: int) -> None:
    record = lake.registry.record(A)
    lake.registry.write(Reload(name, A, record.incarnation, leaves, f"{A} ({name})", "nobody", "asked", record.since))


def _answer(lake: HandLake, name: str, **said: Any) -> None:
    lake.registry.write(Keeping(name, A, said.pop("state"), 1, 0, "2026-01-01T00:00:00Z", **said))


def test_a_target_keeps_its_parts_from_one_process_to_the_next() -> None:
    target = Target(5, 1, "1", parts={A: WantedParts(("public.a_1",), {"public.a_1": 11}, ("r1",))})
    assert Target.from_json(json.loads(json.dumps(target.to_json()))) == target
    assert str(target) == f"0/5, public.a_1 of {A}"


def test_a_wait_for_a_partition_ends_when_what_its_reload_brings_is_published(parted: HandLake, pipeline: str) -> None:
    task = sensor(pipeline, require=at(parted, 0x180), partitions={A: "a_1"})
    trigger = stored_and_restored(deferred(task))
    _ask(parted, "r2", 11)  # later than the wait
    brought = parted.versions[A].version + 1

    async def scenario() -> list[dict[str, Any]]:
        waiting = asyncio.ensure_future(events(trigger))
        done, _ = await asyncio.wait({waiting}, timeout=0.7)
        assert not done
        await asyncio.to_thread(_answer, parted, "r1", state="done", version=brought, lsn=0x190)
        done, _ = await asyncio.wait({waiting}, timeout=0.7)
        assert not done, "no epoch holds it"
        await asyncio.to_thread(parted.publish, 0x200, A)
        return await asyncio.wait_for(waiting, 20)

    (event,) = asyncio.run(scenario())
    cut = task.execute_complete(CONTEXT, json.loads(json.dumps(event)))
    assert (cut["outcome"], cut["tables"][A]["version"], cut["tables"][A]["partitions"]) == (
        "satisfied",
        brought,
        {"public.a_1": 11},
    )
    assert "partitions" not in cut["tables"][B]


def test_reloads_of_other_partitions_and_failed_ones_are_not_waited_for(parted: HandLake, pipeline: str) -> None:
    cut = sensor(pipeline, require=at(parted, 0x180), partitions={A: ["a_2"]}).execute(CONTEXT)
    assert cut["tables"][A]["partitions"] == {"public.a_2": 12}
    _answer(parted, "r1", state="failed")
    assert sensor(pipeline, require=at(parted, 0x180), partitions={A: "a_1"}).execute(CONTEXT)["outcome"] == "satisfied"
    _ask(parted, "whole")
    conf = {"headwater": {"partitions": {A: ["a_2"]}, "max_wait": 0}}
    deferred(sensor(pipeline, require=at(parted, 0x180), partitions={A: ["a_2"]}))
    trigger = sensor(pipeline, require=at(parted, 0x180))
    with pytest.raises(Exception, match=r"a reload of .*whole.*, which began before this wait, is not done yet"):
        trigger.execute(in_run(conf))


def test_a_sensor_that_starts_in_the_triggerer_waits_for_partitions_as_well(
    parted: HandLake, pipeline: str, xcoms: XComs
) -> None:
    event = asyncio.run(last_event(started(pipeline, require="0/180", tables=[A], partitions={A: ["a_2"]})))
    assert is_success(event)
    assert xcoms["return_value"]["tables"][A]["partitions"] == {"public.a_2": 12}
    event = asyncio.run(last_event(started(pipeline, require="0/180", tables=[B], partitions={A: ["a_2"]})))
    assert event.payload["error"]["code"] == "bad_argument"
    with pytest.raises(ValueError, match="expected the names"):
        sensor(pipeline, partitions={A: [1]})


def test_partitions_that_only_the_source_knows_are_not_forgotten_while_it_is_down(
    parted: HandLake, pipeline: str
) -> None:
    task = sensor(pipeline, require=at(parted, 0x180), partitions={A: "a_3"}, max_wait=1)
    trigger = stored_and_restored(deferred(task))
    (event,) = asyncio.run(events(trigger))
    assert (event["outcome"], event["exit_status"]) == ("source_unreachable", 3)
    assert event["reason"].startswith("the source does not answer: ")


def test_a_partition_that_was_dropped_and_created_anew_before_the_wait_is_read_under_its_new_id(
    parted: HandLake, pipeline: str
) -> None:
    task = sensor(pipeline, require=at(parted, 0x380), partitions={A: ["a_2"]})
    trigger = stored_and_restored(deferred(task))
    record = parted.registry.record(A)
    # As the driver does when it meets the relation in the log, below the wait's target.
    schema = record.schema.with_leaves((*record.schema.leaves, Leaf(13, "public", "a_2", 3)))
    parted.registry.write(replace(record, schemas=((0, schema),)))
    parted.publish(0x400, A)
    (event,) = asyncio.run(events(trigger))
    assert (event["outcome"], event["tables"][A]["partitions"]) == ("satisfied", {"public.a_2": 13})


def test_partitions_of_a_table_that_the_pipeline_does_not_have_are_refused_and_not_forgotten(
    parted: HandLake, pipeline: str, xcoms: XComs
) -> None:
    with pytest.raises(Refused, match=r"partitions are named of public\.typo, which is not among the tables"):
        wait_for_cut(pipeline, require=at(parted, 0x180), partitions={"public.typo": "a_2"}, timeout=1)
    event = asyncio.run(last_event(started(pipeline, require="0/180", partitions={"public.typo": ["a_2"]})))
    assert event.payload["error"]["code"] == "bad_argument"
    assert not list_pins(parted.root)


def test_reloads_of_a_suspended_table_that_is_ignored_are_not_waited_for(parted: HandLake, pipeline: str) -> None:
    parted.enter(A, "suspended", "it fails")
    options: dict[str, Any] = {"ignore_suspended": True, "partitions": {A: "a_1"}, "timeout": 1}
    cut = wait_for_cut(pipeline, require=at(parted, 0x180), **options)
    assert {name: table["state"] for name, table in cut["tables"].items()} == {A: "behind", B: "in step"}


def test_what_goes_on_instead_is_of_these_partitions_too(parted: HandLake, pipeline: str) -> None:
    loaded = load_pipeline(pipeline)
    asked = request(tables=[TableName.parse(A)], partitions=parse_partitions({A: "a_1"}, ()))
    for on_timeout in ("continue", "fallback"):
        cut = instead_of_cut(loaded, {"outcome": "timed_out"}, on_timeout, asked)
        assert cut is not None
        assert cut["tables"][A]["partitions"] == {"public.a_1": 11}


def test_what_is_no_partition_of_a_wanted_table_is_refused(parted: HandLake, pipeline: str) -> None:
    refused_ones: list[tuple[Any, str]] = [
        ({B: "b_1"}, "not_partitioned"),
        ({A: "a b"}, "bad_name"),
        ({"x y": "a"}, "bad_name"),
        ("a_1", "bad_argument"),
    ]
    for partitions, code in refused_ones:
        with pytest.raises(Refused) as refused:
            wait_for_cut(pipeline, require=at(parted, 0x180), partitions=partitions, timeout=1)
        assert refused.value.code == code
