"""How a driver begins to follow loads and reloads, while these go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.lakes import HandLake
from headwater.delta import storage
from headwater.errors import Fenced, Refused, Transient
from headwater.lake.ledger import TableVersion
from headwater.lake.paths import kept_path
from headwater.lake.registry import Lease, Registry
from headwater.lake.reload_records import Keeping, Reload, load_name
from headwater.load.driver_answers import await_keeping
from headwater.position import Position
from headwater.replicate.batches.lanes import Result
from headwater.replicate.beside.answers import Answers
from headwater.replicate.beside.following import Following
from headwater.replicate.tables.joining import Joining
from headwater.replicate.tables.keeper import Keeper
from headwater.replicate.tables.owners import Owners
from headwater.replicate.tables.states import TableStates

NAME = "public.a"
NO_SPILL: Any = None


class _Tables(SimpleNamespace):
    """As much of the driver's tables as beginning asks for."""

    def __init__(self, lake: HandLake, registry: Registry, keeper: Keeper) -> None:
        states = TableStates(lake.root, registry, lake.ledger)
        nobody: Any = None
        owners: Any = Owners(states, nobody)
        owners.meet_leaves = lambda table, unknown: None
        super().__init__(
            states=states,
            records=states.records,
            owners=owners,
            joining=Joining(states),
            keeper=keeper,
            forget=lambda name: None,
        )
        stands = TableVersion(1, 0x100, "active")
        states.versions.update(dict.fromkeys(registry.tables, stands))

    def attempt(self, name: str, work: Any) -> Result:
        work()
        return Result()


@pytest.mark.parametrize("what", ["a load", "a reload"])
def test_what_ends_while_a_driver_begins_to_keep_for_it_keeps_its_place(tmp_path: Path, what: str) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    record = lake.registry.record(NAME)
    reload = Reload("r1", NAME, record.incarnation, (), f"{NAME} (all)", "nobody", "asked", record.since)
    lake.registry.write(replace(record, state="loading") if what == "a load" else reload)
    registry, keeper = Registry.open(lake.root, "shop"), Keeper(lake.root, 2)
    assert registry is not None
    name = load_name(record) if what == "a load" else reload.name

    def ends() -> None:
        if what == "a load":
            lake.enter(NAME, "suspended", "its load failed")
        else:
            lake.registry.write(replace(reload, state="given up"))
        registry.refresh()  # as any write does that another job has overtaken

    tables: Any = _Tables(lake, registry, keeper)
    following = Following(lake.root, registry, tables, _answers(registry), NO_SPILL, ends, lambda: None)
    if what == "a reload":
        tables.owners.meet_leaves = lambda *_: ends()
    left = kept_path(lake.root, "load.of_another_time.1")
    storage.make_folder(left)
    following.begin(0x100)
    assert keeper.names(NAME) == {name}
    assert storage.is_folder(kept_path(lake.root, name)), (
        "the next change is kept there, until it is followed that it ends"
    )
    assert not storage.is_folder(left)


@pytest.mark.parametrize("what", ["a load", "a reload"])
def test_a_job_that_got_through_before_it_was_gone_is_not_given_up(tmp_path: Path, what: str) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    record = lake.registry.record(NAME)
    reload = Reload("r1", NAME, record.incarnation, (), f"{NAME} (all)", "nobody", "asked", record.since)
    lake.registry.write(replace(record, state="loading") if what == "a load" else reload)
    registry, keeper = Registry.open(lake.root, "shop"), Keeper(lake.root, 2)
    assert registry is not None
    held = Lease("load", "h", "nobody", "here", 1, record.since)
    lake.registry.write(held)
    registry.refresh()
    name = load_name(record) if what == "a load" else reload.name

    def is_alive(_: object) -> bool:
        """It ends between the driver's look at the registry and this question."""
        if what == "a load":
            lake.enter(NAME, "catching up")
            lake.registry.write(replace(held, session=""))
        else:
            lake.registry.write(replace(reload, state="read"))
        return False

    tables: Any = _Tables(lake, registry, keeper)
    session: Any = SimpleNamespace(ask=is_alive)
    following = Following(
        lake.root, registry, tables, _answers(registry, session), NO_SPILL, lambda: None, lambda: None
    )
    following.begin(0x100)
    lanes: Any = SimpleNamespace(behind=lambda _, errand: errand())
    following.start(lanes, lambda: 0x100)
    following._loads.give_up_for_the_dead()
    following._reloads.give_up_for_the_dead()
    assert keeper.names(NAME) == {name}, "what was kept is needed"
    assert registry.kept[name].state == "keeping"


def test_what_is_kept_for_a_load_of_a_table_that_was_just_catching_up_stays_until_that_load_is_through(
    tmp_path: Path,
) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    lake.enter(NAME, "catching up")
    first = lake.registry.record(NAME)
    lake.registry.write(Keeping(load_name(first), NAME, "keeping", 1, 0x100, first.since))
    registry, keeper = Registry.open(lake.root, "shop"), Keeper(lake.root, 2)
    assert registry is not None
    tables: Any = _Tables(lake, registry, keeper)
    following = Following(lake.root, registry, tables, _answers(registry), NO_SPILL, lambda: None, lambda: None)
    following.begin(0x100)
    waiting: list[Any] = []
    following.start(_lanes(waiting), lambda: 0x100)
    again = replace(first.entered("loading"), incarnation=first.incarnation + 1)
    lake.registry.write(again)
    following._looks._last -= 2
    following.follow_if_due()
    assert len(waiting) == 2, "the one before catches up, then changes are kept for the new one"
    # The lane has done both before the main thread learns of the first.
    for errand in waiting[:2]:
        errand()
    for _ in range(2):
        following.settled(NAME, Result())
    for errand in waiting[2:]:
        errand()
    assert keeper.names(NAME) == {load_name(again)}, "that load still reads"
    assert keeper.holds_back(NAME)
    assert NAME not in tables.joining.catching_up


def test_a_load_whose_values_the_driver_cannot_hide_hears_so(tmp_path: Path) -> None:
    """It waits for as long as the driver lives."""
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    record = lake.registry.record(NAME)
    lake.registry.write(replace(record, state="loading"))
    registry, keeper = Registry.open(lake.root, "shop"), Keeper(lake.root, 2)
    assert registry is not None

    def cannot() -> None:
        raise Refused("HASH_KEY is not set", code="bad_configuration", where="source.hash_key", remedy="set it")

    tables: Any = _Tables(lake, registry, keeper)
    Following(lake.root, registry, tables, _answers(registry), NO_SPILL, cannot, lambda: None).begin(0x100)
    assert not keeper.names(NAME)
    pipeline: Any = SimpleNamespace(name="shop", lake_path=lambda: lake.root)
    with pytest.raises(Transient, match="HASH_KEY is not set") as refused:
        await_keeping(NO_SPILL, pipeline, registry, record)
    assert refused.value.code == "no_answer"


def test_a_driver_that_begins_answers_no_rebuild_of_a_table_that_has_yet_to_catch_up(tmp_path: Path) -> None:
    """Its job would read the lake as it is now, and what the lane applies until then is kept for nobody."""
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    lake.enter(NAME, "catching up")
    record = lake.registry.record(NAME)
    asked = Reload("r1", NAME, record.incarnation, (), f"{NAME} (all)", "nobody", "asked", record.since)
    lake.registry.write(Keeping(load_name(record), NAME, "keeping", 1, 0x50, record.since), asked)
    registry, keeper = Registry.open(lake.root, "shop"), Keeper(lake.root, 2)
    assert registry is not None
    tables: Any = _Tables(lake, registry, keeper)
    following = Following(lake.root, registry, tables, _answers(registry), NO_SPILL, lambda: None, lambda: None)
    following.begin(0x100)
    assert asked.name not in registry.kept
    waiting: list[Any] = []
    following.start(_lanes(waiting), lambda: 0x100)
    [catch_up] = waiting
    catch_up()
    following.settled(NAME, Result())
    following._looks._last -= 2
    following.follow_if_due()
    for errand in waiting[1:]:
        errand()
    assert registry.kept[asked.name].state == "keeping", "now its lane stands where everybody else does"


def test_what_is_kept_for_a_reload_goes_when_a_driver_before_says_late_that_it_is_done(tmp_path: Path) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    record = lake.registry.record(NAME)
    answer = Keeping("r1", NAME, "keeping", 1, 0x50, record.since)
    lake.registry.write(Reload("r1", NAME, record.incarnation, (), NAME, "nobody", "read", record.since), answer)
    registry, keeper = Registry.open(lake.root, "shop"), Keeper(lake.root, 2)
    assert registry is not None
    tables: Any = _Tables(lake, registry, keeper)
    following = Following(lake.root, registry, tables, _answers(registry), NO_SPILL, lambda: None, lambda: None)
    following.begin(0x100)
    assert keeper.names(NAME) == {"r1"}
    waiting: list[Any] = []
    following.start(_lanes(waiting), lambda: 0x100)
    lake.registry.write(answer.ended("done", record.since))
    following._looks._last -= 2
    following.follow_if_due()
    for errand in waiting:
        errand()
    assert keeper.names(NAME) == set()


def test_a_table_that_is_loaded_while_a_driver_looks_at_its_tables_is_read_before_it_is_written(tmp_path: Path) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    before = lake.registry.record(NAME)
    registry, keeper = Registry.open(lake.root, "shop"), Keeper(lake.root, 2)
    assert registry is not None
    tables: Any = _Tables(lake, registry, keeper)
    forgotten: list[str] = []
    tables.forget = forgotten.append
    following = Following(lake.root, registry, tables, _answers(registry), NO_SPILL, lambda: None, lambda: None)
    # A small table takes a load less time than the driver: no driver ran when it looked, so none has answered.
    lake.registry.write(replace(before.entered("catching up"), incarnation=before.incarnation + 1))
    registry.refresh()
    following.begin(0x100)
    assert forgotten == [NAME], "where it stood is of before the load"
    assert NAME in tables.joining.catching_up, "its lane reads where it stands, before the first share"
    assert keeper.holds_back(NAME)


def test_a_driver_behind_its_successors_generation_answers_nobody(tmp_path: Path) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])

    def fenced() -> None:
        raise Fenced("generation 3 has taken over from generation 2", where="pipeline shop", remedy="nothing")

    answers = _answers(lake.registry, check_fence=fenced)
    with pytest.raises(Fenced):
        answers.keep("a reload", NAME, 0x100)
    assert not lake.registry.kept


def test_what_a_successor_keeps_stays_when_the_driver_before_it_ends_its_keeping(tmp_path: Path) -> None:
    older, newer = Keeper(str(tmp_path), 2), Keeper(str(tmp_path), 3)
    folder = Path(kept_path(str(tmp_path), "a load"))
    for keeper in (older, newer):
        keeper.begin("a load", NAME)
    (folder / "000000000002-000000001-000000.kept").write_bytes(b"")
    kept = folder / "000000000003-000000001-000000.kept"
    kept.write_bytes(b"")
    older.end("a load", NAME)
    assert kept.exists()
    newer.end("a load", NAME)
    assert not folder.exists()


def _answers(registry: Registry, session: Any = None, check_fence: Callable[[], None] = lambda: None) -> Answers:
    return Answers(registry, session, 2, check_fence)


def _lanes(waiting: list[Any]) -> Any:
    return SimpleNamespace(behind=lambda _, errand: waiting.append(errand))
