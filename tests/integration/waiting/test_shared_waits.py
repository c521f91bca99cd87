"""Many deferred sensors on one pipeline look together: what the source is asked, and that none is told wrong."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql

from fixtures.lake_waits import request
from fixtures.lakes import HandLake
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from fixtures.waiting import until as wait_until
from headwater.lake import reader as status
from headwater.lake.cuts import list_pins
from headwater.lake.look import Look
from headwater.lake.position_file import PositionFile, read_position_file
from headwater.lake.requirements import Target
from headwater.pipeline_file.pipeline import Pipeline
from headwater.waiting import visits
from headwater.waiting import waiter as waiter_module
from headwater.waiting.lookout import Question, SharedLookout
from headwater.waiting.result import WaitResult
from headwater.waiting.source_state import ask_source
from headwater.waiting.waiter import Waiter

if TYPE_CHECKING:
    from headwater_airflow.triggers.freshness import FreshnessTrigger
    from headwater_airflow.triggers.waits import Wait, Waits

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("airflow_home")]

A, B = "public.a", "public.b"
MANY = 200
Events = list[dict[str, Any]]


@pytest.fixture
def pipeline(database: Database, tmp_path: Path) -> Pipeline:
    database.execute("create table a (id int primary key)", "create table b (id int primary key)")
    database.publish("headwater_shop", "a", "b")
    pipeline = write_pipeline(tmp_path, database, A, B)
    with database.superuser() as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (pipeline.source.slot,))
    return pipeline


@pytest.fixture
def lake(pipeline: Pipeline) -> HandLake:
    start = ask_source(pipeline).position
    lake = HandLake(pipeline.lake_path(), start, [A, B])
    lake.publish(start.lsn)
    return lake


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that the position file was read."""
    found: list[str] = []

    def counted(root: str) -> PositionFile | None:
        found.append(root)
        return read_position_file(root)

    monkeypatch.setattr(status, "read_position_file", counted)
    return found


def trigger(pipeline: Pipeline, target: Target, number: int = 0, seconds: float = 120) -> FreshnessTrigger:
    from headwater_airflow.triggers.freshness import FreshnessTrigger

    return FreshnessTrigger(
        pipeline=pipeline.file,
        tables=[A, B][: 1 + number % 2],
        target=target.to_json(),
        deadline=(datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(),
        keep_seconds=60,
        owner=f"sensor {number}",
    )


def target_now(pipeline: Pipeline) -> Target:
    position = ask_source(pipeline).position
    return Target(position.lsn, position.timeline, position.system_id)


async def event_of(waiting: FreshnessTrigger) -> dict[str, Any]:
    (event,) = [event.payload async for event in waiting.run()]
    assert isinstance(event, dict)
    return event


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def sessions(database: Database) -> int:
    """How many the server has had in this database, those that have ended and reported it."""
    with database.superuser() as connection:
        row = connection.execute("select sessions from pg_stat_database where datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


def await_no_session(database: Database) -> None:
    """Of the role."""
    with database.superuser() as watcher:
        theirs = "select from pg_stat_activity where usename = %s"
        wait_until(lambda: watcher.execute(theirs, [database.role]).rowcount == 0, "its sessions have ended")


def test_many_waits_cost_the_source_and_the_lake_what_a_few_do_and_each_gets_its_own_cut(
    pipeline: Pipeline, lake: HandLake, database: Database, reads: list[str]
) -> None:
    target = target_now(pipeline)
    before = sessions(database)
    reads.clear()

    async def scenario() -> Events:
        waiting = [asyncio.create_task(event_of(trigger(pipeline, target, number))) for number in range(MANY)]
        await until(lambda: len(reads) > 12)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(lake.publish, target.lsn or 0, A)
        return await asyncio.gather(*waiting)

    events = asyncio.run(scenario())
    assert [event["outcome"] for event in events] == ["satisfied"] * MANY
    assert {pin.owner for pin in list_pins(lake.root)} == {f"sensor {number}" for number in range(MANY)}
    assert {tuple(sorted(event["tables"])) for event in events} == {(A,), (A, B)}
    assert len(reads) < MANY / 4
    assert sessions(database) - before <= len(reads)


def test_a_question_is_so_many_statements_at_the_server_whether_two_wait_or_two_hundred(
    pipeline: Pipeline, lake: HandLake, database: Database, reads: list[str]
) -> None:
    with database.superuser() as connection:
        connection.execute(sql.SQL("alter role {} set log_statement = 'all'").format(sql.Identifier(database.role)))
    log = database.server.log

    def asked(count: int) -> dict[str, list[str]]:
        """By session what it asked, of as many waits."""
        target, began = target_now(pipeline), log.stat().st_size

        async def scenario() -> Events:
            reads.clear()
            waiting = [asyncio.create_task(event_of(trigger(pipeline, target, number))) for number in range(count)]
            await until(lambda: len(reads) > 12)
            await asyncio.to_thread(lake.publish, target.lsn or 0, A)
            return await asyncio.gather(*waiting)

        assert {event["outcome"] for event in asyncio.run(scenario())} == {"satisfied"}
        await_no_session(database)  # a question that the last wait left behind is asked to its end
        found: dict[str, list[str]] = {}
        for line in log.read_bytes()[began:].decode().splitlines():
            said = re.match(rf".* \[(\d+)\] {database.role}@\S+ LOG:  (?:statement|execute [^:]*): (.*)", line)
            if said is not None:
                found.setdefault(said[1], []).append(said[2])
        return found

    few, many = asked(2), asked(MANY)
    assert few
    assert {tuple(each) for each in many.values()} == {tuple(each) for each in few.values()}
    assert len(many) <= len(reads)


def test_an_answer_from_before_a_target_was_taken_does_not_put_it_into_the_future(
    pipeline: Pipeline, lake: HandLake, database: Database, reads: list[str]
) -> None:
    async def scenario() -> Events:
        first = asyncio.create_task(event_of(trigger(pipeline, await asyncio.to_thread(target_now, pipeline))))
        await until(lambda: len(reads) > 3)
        later = []
        for number in range(5):  # each has a target that no answer so far has known of
            await asyncio.to_thread(database.execute, f"insert into a values ({number})")
            target = await asyncio.to_thread(target_now, pipeline)
            later.append(asyncio.create_task(event_of(trigger(pipeline, target))))
            count = len(reads)
            await until(lambda count=count: len(reads) > count + 1)  # type: ignore[misc]
        assert not any(task.done() for task in (first, *later))
        await asyncio.to_thread(lake.publish, target.lsn or 0, A)
        return await asyncio.gather(first, *later)

    assert [event["outcome"] for event in asyncio.run(scenario())] == ["satisfied"] * 6


def test_a_wait_is_judged_again_when_its_target_was_read_or_a_table_fell_out_of_step(
    pipeline: Pipeline, lake: HandLake, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter_module, "_TRUSTED_SECONDS", 600.0)
    monkeypatch.setattr(visits, "_VISIT_SECONDS", (600.0,))
    begin = target_now(pipeline).lsn
    database.execute("insert into a select generate_series(1, 100)")
    target, lookout = target_now(pipeline), SharedLookout(pipeline)
    assert begin is not None
    assert target.lsn is not None
    waiter = Waiter(pipeline, request(target, timeout=600, ignore_suspended=True), lookout)

    def is_judged() -> bool:
        lookout.refresh()
        if waiter.is_far:
            return False
        assert waiter.look() is None
        return True

    assert is_judged()
    question = lookout.question()
    assert question is not None
    lookout.answer(question, pipeline)
    assert is_judged(), "the source has answered"
    assert not is_judged()
    lake.publish(begin, A)
    assert not is_judged(), "another epoch, and the target lies behind it"
    lake.enter(B, "suspended")
    assert is_judged()
    assert not is_judged()
    lake.read_to(target.lsn, {A: target.lsn})
    assert is_judged()
    lake.publish(target.lsn, A)
    lookout.refresh()
    assert not waiter.is_far
    result = waiter.look()
    assert result is not None
    assert result.exit_status == 0


def test_each_deadline_holds_and_a_wait_that_goes_away_leaves_the_others(
    pipeline: Pipeline, lake: HandLake, reads: list[str]
) -> None:
    target = target_now(pipeline)

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        cancelled = asyncio.create_task(event_of(trigger(pipeline, target)))
        patient = asyncio.create_task(event_of(trigger(pipeline, target)))
        hasty = await event_of(trigger(pipeline, target, seconds=0.3))
        cancelled.cancel()
        count = len(reads)
        await until(lambda: len(reads) > count + 2)
        assert not patient.done()
        await asyncio.to_thread(lake.publish, target.lsn or 0, A)
        return hasty, await patient

    hasty, patient = asyncio.run(scenario())
    assert (hasty["outcome"], patient["outcome"]) == ("not_running", "satisfied")


def test_a_pipeline_file_that_changes_is_read_by_the_waits_that_begin_then(
    pipeline: Pipeline, lake: HandLake, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, answers, answer = target_now(pipeline), list[object](), SharedLookout.answer

    def counted(self: SharedLookout, question: Question, now: Pipeline) -> None:
        answers.append(question)
        answer(self, question, now)

    monkeypatch.setattr(SharedLookout, "answer", counted)

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        before = asyncio.create_task(event_of(trigger(pipeline, target)))
        await until(lambda: len(reads) > 2)
        file = Path(pipeline.file)
        text = file.read_text()
        file.write_text(text + "unknown: 1\n")
        refused = await event_of(trigger(pipeline, target))
        asked = len(answers)
        await until(lambda: before.done() or len(answers) > asked)
        assert not before.done(), "the source is asked as the file was"
        file.write_text(text)
        await asyncio.to_thread(lake.publish, target.lsn or 0, A)
        return refused, await before

    refused, satisfied = asyncio.run(scenario())
    assert (refused["exit_status"], satisfied["outcome"]) == (2, "satisfied")


def test_a_source_that_does_not_answer_holds_no_wait_up_that_the_lake_can_end(
    pipeline: Pipeline, lake: HandLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, over = target_now(pipeline), threading.Event()

    def silent(self: SharedLookout, question: object, now: object) -> None:
        over.wait(60)

    monkeypatch.setattr(SharedLookout, "answer", silent)
    monkeypatch.setattr(visits, "_ANSWER_SECONDS", 0.3)

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        patient = asyncio.create_task(event_of(trigger(pipeline, target)))
        hasty = await asyncio.wait_for(event_of(trigger(pipeline, target, seconds=0.3)), 60)
        assert not patient.done()
        await asyncio.to_thread(lake.publish, target.lsn or 0, A)
        try:
            return hasty, await asyncio.wait_for(patient, 60)
        finally:
            over.set()

    hasty, patient = asyncio.run(scenario())
    assert (hasty["outcome"], patient["outcome"]) == ("not_running", "satisfied")


def test_a_lake_that_does_not_answer_ends_the_wait_behind_its_deadline(
    pipeline: Pipeline, lake: HandLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, over = target_now(pipeline), threading.Event()

    def silent(self: status.LakeReader) -> Look:
        over.wait(60)
        raise OSError("it was silent")

    from headwater_airflow.triggers import waits

    monkeypatch.setattr(status.LakeReader, "look", silent)
    monkeypatch.setattr(waits, "_ANSWER_SECONDS", 0.3)

    async def scenario() -> dict[str, Any]:
        try:
            return await asyncio.wait_for(event_of(trigger(pipeline, target, seconds=0.3)), 60)
        finally:
            over.set()

    event = asyncio.run(scenario())
    assert event["exit_status"] == 1
    assert "does not answer" in event["error"]["message"]


def test_a_satisfied_wait_is_told_so_while_the_look_of_another_one_hangs(
    pipeline: Pipeline, lake: HandLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater_airflow.triggers.waits import Waits

    target, over = target_now(pipeline), threading.Event()
    lake.publish(target.lsn or 0, A)
    look, tick, looks = Waiter.look, Waits._tick, count()

    def both(self: Waits, waits: Sequence[Wait]) -> tuple[Question | None, bool]:
        return tick(self, waits) if len(waits) == 2 else (None, False)

    def hanging(self: Waiter) -> WaitResult | None:
        if next(looks):
            over.wait(60)
        return look(self)

    monkeypatch.setattr(Waits, "_tick", both)
    monkeypatch.setattr(Waiter, "look", hanging)

    async def scenario() -> Events:
        waiting = {asyncio.create_task(event_of(trigger(pipeline, target))) for _ in range(2)}
        try:
            done, hangs = await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert (len(done), len(hangs)) == (1, 1)
        finally:
            over.set()
        return await asyncio.gather(*waiting)

    assert [event["outcome"] for event in asyncio.run(scenario())] == ["satisfied"] * 2


def test_what_nobody_expects_ends_the_waits_that_met_it_and_the_next_ones_work(
    pipeline: Pipeline, lake: HandLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_now(pipeline)
    lake.publish(target.lsn or 0, A)

    async def scenario() -> dict[str, Any]:
        with monkeypatch.context() as patched:
            patched.setattr(SharedLookout, "question", lambda self: 1 / 0)
            waiting = [asyncio.create_task(event_of(trigger(pipeline, later))) for _ in range(2)]
            for one in waiting:
                with pytest.raises(ZeroDivisionError):
                    await asyncio.wait_for(one, 60)
        return await asyncio.wait_for(event_of(trigger(pipeline, target)), 60)

    later = Target((target.lsn or 0) + 1, target.timeline, target.system_id)
    assert asyncio.run(scenario())["outcome"] == "satisfied"
