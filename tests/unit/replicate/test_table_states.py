"""Into which state a driver may bring a table, and when it may commit to one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.lakes import HandLake
from headwater.apply.plan import Applied, PlanAgain
from headwater.errors import Fenced, ForeignWrite, TableError
from headwater.lake.ledger import Ledger, TableVersion
from headwater.lake.registry import Registry, TableRecord
from headwater.position import Position
from headwater.replicate.tables.commits import TableCommits
from headwater.replicate.tables.joining import Joining
from headwater.replicate.tables.owners import awaiting
from headwater.replicate.tables.states import TableStates
from headwater.schema import Leaf, TableSchema

NAME = "public.a"
START = Position("7", 1, 0x100)
KNOWN, CAME = Leaf(11, "public", "a_1", 1), Leaf(12, "public", "a_2", 2)
ERROR = TableError("it fails", code="broken", where=NAME, remedy="mend it")


@dataclass
class Driver:
    lake: HandLake
    states: TableStates

    @property
    def record(self) -> TableRecord:
        return self.states.records[NAME]

    @property
    def stored(self) -> TableRecord:
        registry = Registry.open(self.lake.root, "shop")
        assert registry is not None
        return registry.record(NAME)

    def await_partition(self) -> None:
        self.states.suspend(NAME, ERROR, lambda record: awaiting(record, [CAME]))


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    lake = HandLake(tmp_path, START, [NAME])
    schema = TableSchema(1, "public", "a", (), ("id",), (KNOWN,), partitioned=True)
    lake.registry.write(replace(lake.registry.record(NAME), schemas=((0, schema),)))
    registry = Registry.open(lake.root, "shop")
    assert registry is not None
    states = TableStates(lake.root, registry, lake.ledger)
    states.versions[NAME] = TableVersion(3, 0x100, "active")
    states.next_row.found(states.versions.of(NAME), news=False)
    return Driver(lake, states)


def test_who_suspends_a_table_first_says_why_and_the_next_row_says_so(driver: Driver) -> None:
    states = driver.states
    assert states.suspend(NAME, ERROR)
    assert (driver.stored.state, driver.stored.reason, driver.stored.remedy) == ("suspended", "it fails", "mend it")
    assert driver.record == driver.stored
    assert states.next_row.touched()[NAME].state == "suspended"
    gone = ForeignWrite("it is gone", where=NAME)
    assert not states.suspend(NAME, gone)
    assert driver.stored.reason == "it fails"
    assert states.suspend(NAME, gone, again=True), "where nothing is left the first reason helps nobody"
    assert driver.stored.reason == "it is gone"


def test_a_table_that_awaits_a_partition_is_followed_and_may_be_suspended_as_a_whole(driver: Driver) -> None:
    driver.await_partition()
    assert driver.stored.state == "suspended"
    assert driver.states.is_followed(NAME)
    assert driver.states.relations.owner(CAME.relation_id) == NAME
    assert driver.states.suspend(NAME, ERROR)
    assert not driver.states.is_followed(NAME)
    assert (driver.stored.reason, driver.stored.unread) == ("it fails", ())


def test_a_driver_that_was_fenced_suspends_nothing(driver: Driver) -> None:
    Ledger(driver.lake.root, "shop").begin_generation(START)
    with pytest.raises(Fenced):
        driver.states.suspend(NAME, ERROR)
    assert driver.stored.state == "active"


def test_a_load_that_has_taken_the_table_keeps_it(driver: Driver) -> None:
    driver.lake.enter(NAME, "loading")
    assert driver.states.suspend(NAME, ERROR)
    assert driver.stored.state == "loading"
    assert driver.record.state == "suspended", "until the load is followed"


def test_a_table_that_is_suspended_while_it_is_to_join_the_cuts_does_not_join_them(driver: Driver) -> None:
    driver.states.change(NAME, lambda record: record.entered("catching up"))
    driver.states.suspend(NAME, ERROR)
    driver.states.activate([NAME])
    assert driver.stored.state == "suspended"


def test_a_reload_puts_a_table_right_unless_something_else_is_wrong_with_it(driver: Driver) -> None:
    joining = Joining(driver.states)
    driver.await_partition()
    assert joining.put_right(NAME, [CAME.relation_id])
    assert driver.stored.state == "catching up"
    joining.join_cuts(0x200)
    assert driver.stored.state == "catching up", "no row knows of it yet"


@pytest.mark.parametrize(("followed", "expected"), [(True, 2), (False, 1)])
def test_a_lost_race_loses_no_share_of_a_table_that_is_followed_though_it_awaits_a_partition(
    driver: Driver, followed: bool, expected: int
) -> None:
    driver.await_partition()
    tried: list[object] = []

    def apply(plan: object) -> Applied:
        tried.append(plan)
        if len(tried) == 1:
            raise PlanAgain("another commit came first")
        return Applied(version=5)

    def look_again(record: TableRecord) -> None:
        if not followed:
            driver.states.suspend(NAME, ERROR)

    foreign: Any = SimpleNamespace(look_again=look_again)
    applier: Any = SimpleNamespace(commit=apply)
    columns: Any = SimpleNamespace(finish=lambda name, still_alive: None)
    nothing: Any = None
    commits = TableCommits(driver.states, foreign, nothing, applier, columns, nothing, nothing)
    plan: Any = SimpleNamespace(apply_path="merge", changes=SimpleNamespace(changes=1), to_lsn=0x200)
    done = commits.commit(driver.record, lambda version: plan, lambda: None)
    assert len(tried) == expected
    assert (done is not None) == followed
    assert driver.states.versions[NAME].version == (5 if followed else 3)
