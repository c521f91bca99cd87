"""Whose the changes of a relation are that the driver has not met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deltalake import DeltaTable

from fixtures.lakes import HandLake
from headwater.errors import SourceUnreachable
from headwater.lake.ledger import TableVersion
from headwater.lake.paths import registry_path
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Block, Chunk, Ddl, Relation, RelationColumn, Transactions
from headwater.names import TableName
from headwater.position import Position
from headwater.replicate.batches.batch import Batch
from headwater.replicate.tables.owners import Owners
from headwater.replicate.tables.shares import Shares
from headwater.replicate.tables.states import TableStates
from headwater.schema import Leaf, TableSchema

NAME = "public.a"
FOREIGN = Relation(12, "public", "b", "d", ())
SCHEMA = TableSchema(1, "public", "a", (), ("id",), (Leaf(11, "public", "a_1", 1),), partitioned=True)
NONE = np.array([], dtype=np.int64)


def described(relation: Relation) -> Ddl:
    return Ddl(is_told=False, described=frozenset({relation.relation_id}))


class Source:
    """A session whose catalog knows no partition."""

    def __init__(self) -> None:
        self.asked, self.is_sure = 0, True

    def ask(self, question: Any) -> tuple[None, bool]:
        self.asked += 1
        return None, self.is_sure


class Driver:
    def __init__(self, folder: Path, *more: str) -> None:
        lake = HandLake(folder, Position("7", 1, 0x100), [NAME, *more])
        self.root = lake.root
        self.states = TableStates(lake.root, lake.registry, lake.ledger)
        self.source = Source()
        session: Any = self.source
        self.owners = Owners(self.states, session)
        rest: Any = None
        self.shares = Shares(self.states, self.owners, rest, rest, rest, rest)

    def share(self, relation: Relation, ddl: Ddl | None = None) -> int:
        """How often the source has been asked, behind a batch with three blocks of the relation."""
        content: Any = SimpleNamespace(size=1, changes=1)
        block = Block(relation, content)
        chunk = Chunk(Transactions(NONE, NONE, NONE, NONE), (block, block, block), (), 0x200, 1, ddl=ddl)
        assert self.shares.of(Batch([chunk])) == {}
        return self.source.asked

    def record(self) -> TableRecord:
        return replace(self.states.records[NAME], schemas=((0, SCHEMA),))


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def test_of_a_relation_that_is_none_of_ours_the_source_is_asked_once(driver: Driver) -> None:
    assert driver.share(FOREIGN) == 1
    assert driver.share(FOREIGN) == 1


def test_it_is_asked_again_when_the_log_describes_it_again_or_a_table_is_met(driver: Driver) -> None:
    assert driver.share(FOREIGN) == 1
    assert driver.share(FOREIGN, described(FOREIGN)) == 2
    assert driver.share(replace(FOREIGN, replica_identity="f")) == 3
    driver.owners.adopt(driver.record())
    assert driver.share(FOREIGN) == 4
    assert driver.share(FOREIGN) == 4
    assert driver.share(FOREIGN, Ddl()) == 5


def test_it_is_not_asked_again_when_the_log_describes_another_one(driver: Driver) -> None:
    """Behind a new connection there are thousands, each described once."""
    other = replace(FOREIGN, relation_id=13)
    assert driver.share(FOREIGN, described(FOREIGN)) == 1
    assert driver.share(other, described(other)) == 2
    assert driver.share(FOREIGN) == 2
    wider = replace(FOREIGN, columns=(RelationColumn("n", 20, -1, False),))
    assert (driver.share(wider), driver.share(FOREIGN)) == (3, 4), "whatever it has become in between"


def test_it_is_asked_again_while_the_catalog_does_not_show_what_is_in_the_log(driver: Driver) -> None:
    driver.source.is_sure = False
    assert driver.share(FOREIGN) == 3
    driver.source.is_sure = True
    assert driver.share(FOREIGN) == 4
    assert driver.share(FOREIGN) == 4


def test_what_a_load_has_taken_over_stays_with_its_table_whatever_is_entered_of_the_former_one(driver: Driver) -> None:
    """Until the catalog watch finds it with both of them."""
    relations, former = driver.states.relations, driver.record()
    relations.adopt(former)
    relations.adopt(replace(former, name="public.loaded", schemas=((0, replace(SCHEMA, relation_id=2)),)))
    relations.adopt(former.entered("suspended"), former)
    assert relations.owner(11) == "public.loaded"
    came = SCHEMA.with_leaves((*SCHEMA.leaves, Leaf(14, "public", "a_2", 1)))
    relations.adopt(replace(former, schemas=((0, came),)), former)
    assert (relations.owner(11), relations.owner(14), relations.owner(1)) == ("public.loaded", NAME, NAME)


def test_only_changes_that_the_table_lacks_tell_that_it_was_created_again(driver: Driver) -> None:
    """Its load has read it as it is: the log still brings what was done to the one before."""
    states = driver.states
    itself = replace(SCHEMA, leaves=(Leaf(1, "public", "a", 1),), partitioned=False)
    states.records[NAME] = replace(driver.record(), schemas=((0, itself),))
    states.versions[NAME] = TableVersion(1, 0x300, "active")
    older = Relation(99, "public", "a", "d", ())
    assert driver.states.relations.owner(older.relation_id) is None
    first = np.array([0, 10], dtype=np.int64)
    transactions = Transactions(first, np.array([0x250, 0x350], dtype=np.int64), first, first)

    def batch(*sequence: int) -> Batch:
        content: Any = SimpleNamespace(size=1, changes=len(sequence))
        content.load = lambda: SimpleNamespace(sequence=np.array(sequence, dtype=np.int64))
        return Batch([Chunk(transactions, (Block(older, content),), (), 0x400, 20)])

    assert driver.shares.of(batch(0, 9)) == {}
    assert states.records[NAME].state == "active"
    assert driver.owners.of([older.relation_id]) == {NAME}, "a later change of it may still count"
    assert driver.source.asked == 0
    assert driver.shares.of(batch(9, 10)) == {}
    assert states.records[NAME].state == "suspended"
    assert "dropped and created again" in states.records[NAME].reason
    assert driver.source.asked == 1, "whether it is a partition of another table"


@pytest.mark.parametrize(
    ("end_lsn", "link", "is_adopted"),
    [
        (0x260, 7, True),
        (0x250, 7, False),  # perhaps from before it was attached
        (0x260, 8, False),  # it was attached once more since
    ],
)
def test_changes_behind_the_look_that_saw_an_attached_partition_empty_are_its_tables(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, end_lsn: int, link: int, is_adopted: bool
) -> None:
    """Also before all is read that came below it."""
    states, leaf = driver.states, Leaf(FOREIGN.relation_id, "public", "b", 5, link=7)
    states.change(NAME, lambda _: driver.record())
    answers = iter([((SCHEMA.relation_id, replace(leaf, link=link), False), True), []])
    monkeypatch.setattr(driver.source, "ask", lambda question: next(answers))
    driver.owners.saw_empty([(driver.record(), leaf, 0x250)])
    driver.owners.meet_empty(0x200)
    assert driver.owners.owner(leaf.relation_id) is None
    first = np.array([0], dtype=np.int64)
    transactions = Transactions(first, np.array([end_lsn], dtype=np.int64), first, first)
    content: Any = SimpleNamespace(size=1, changes=1)
    content.load = lambda: SimpleNamespace(sequence=first)
    shares = driver.shares.of(Batch([Chunk(transactions, (Block(FOREIGN, content),), (), 0x400, 20)]))
    assert list(shares) == [NAME] * is_adopted
    assert states.records[NAME].state == ("active" if is_adopted else "suspended")


def test_a_partition_that_was_attached_empty_belongs_to_its_table_when_all_before_it_is_read(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf, states = Leaf(12, "public", "b", 5, link=7), driver.states
    states.change(NAME, lambda _: driver.record())
    another_load = replace(driver.record(), incarnation=driver.record().incarnation - 1)
    driver.owners.saw_empty([(driver.record(), leaf, 0x250)])
    driver.owners.meet_empty(0x24F)
    assert driver.owners.owner(12) is None
    driver.owners.saw_empty([(another_load, replace(leaf, relation_id=13), 0x250)])
    driver.owners.meet_empty(0x250)
    assert (driver.owners.owner(12), driver.owners.owner(13)) == (NAME, None)
    swapped = replace(leaf, relation_id=14, name="a_1")
    monkeypatch.setattr(driver.source, "ask", lambda question: {})
    driver.owners.saw_empty([(driver.record(), swapped, 0x250)])
    driver.owners.meet_empty(0x250)
    assert driver.owners.owner(14) is None, "it has taken the place of one of that name"


def test_a_partition_that_was_seen_empty_and_is_attached_once_more_with_rows_is_no_empty_one(driver: Driver) -> None:
    """Once it belongs to its table it is a known one."""
    leaf, states = Leaf(12, "public", "b", 5, link=7), driver.states
    states.change(NAME, lambda _: driver.record())
    driver.owners.saw_empty([(driver.record(), leaf, 0x250)])
    driver.owners.meet_empty(0x200)
    assert driver.owners.meet_attached({NAME: [replace(leaf, link=0)]})
    driver.owners.meet_empty(0x300)
    assert (states.records[NAME].state, states.records[NAME].unread) == ("suspended", (12,))
    assert not driver.owners.meet_attached({NAME: [replace(leaf, link=0)]}), "it is known by now"


def test_partitions_that_were_seen_empty_are_taken_over_in_one_commit(driver: Driver) -> None:
    driver.states.change(NAME, lambda _: driver.record())
    version = DeltaTable(registry_path(driver.root)).version()
    driver.owners.saw_empty([(driver.record(), Leaf(n, "public", f"b_{n}", 5, link=7), 0x250) for n in range(20, 40)])
    driver.owners.meet_empty(0x250)
    assert [driver.owners.owner(n) for n in range(20, 40)] == [NAME] * 20
    assert DeltaTable(registry_path(driver.root)).version() == version + 1


def test_while_the_source_is_away_what_was_seen_of_partitions_is_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that has the name of another one the source is asked what has become of that."""
    states = driver.states
    states.change(NAME, lambda _: driver.record())

    def away(question: Any) -> Any:
        raise SourceUnreachable("the source is away", where="source")

    empty, brought = Leaf(12, "public", "a_1", 5, link=7), Leaf(13, "public", "a_1", 5)
    with monkeypatch.context() as patch:
        patch.setattr(driver.source, "ask", away)
        driver.owners.saw_empty([(driver.record(), empty, 0x250)])
        with pytest.raises(SourceUnreachable):
            driver.owners.meet_empty(0x250)
        with pytest.raises(SourceUnreachable):
            driver.owners.meet_attached({NAME: [brought]})
    monkeypatch.setattr(driver.source, "ask", lambda question: {n: TableName("public", f"a_{n}") for n in (11, 12)})
    driver.owners.meet_empty(0x250)
    assert driver.owners.owner(12) == NAME
    assert driver.owners.meet_attached({})
    assert states.records[NAME].unread == (13,)


def test_a_table_that_the_driver_has_not_met_yet_is_waited_for(driver: Driver) -> None:
    """Any write into the registry may read what another job has entered there."""
    driver.states.change(NAME, lambda _: driver.record())
    driver.owners.meet_names("public.new", {11: TableName("public", "other")})
    assert not driver.owners.meet_attached({"public.new": [Leaf(12, "public", "b", 5)]})
    assert not driver.owners.meet_moved(11, NAME, "public.new")
    assert not driver.owners.meet_moved(11, "public.new", NAME)
    assert driver.states.records[NAME].state == "active"


@pytest.mark.parametrize(("state", "expected"), [("removed", "active"), ("suspended", "suspended")])
def test_a_table_that_has_left_the_pipeline_file_takes_nothing_from_the_one_that_it_is_a_partition_of_now(
    tmp_path: Path, state: Any, expected: str
) -> None:
    driver, plain = (
        Driver(tmp_path, "public.t"),
        TableSchema(12, "public", "t", (), ("id",), (Leaf(12, "public", "t", 1),)),
    )
    read = replace(SCHEMA, leaves=(*SCHEMA.leaves, *plain.leaves))
    driver.states.change(NAME, lambda record: replace(record, schemas=((0, read),)))
    driver.states.change("public.t", lambda record: replace(record, schemas=((0, plain),)).entered(state, "because"))
    assert driver.owners.meet_moved(12, "public.t", NAME)
    assert driver.states.records[NAME].state == expected
    assert driver.owners.owner(12) == NAME
    assert not driver.owners.meet_moved(12, "public.t", NAME)


def test_changes_that_still_say_a_partitions_former_name_are_its_own(driver: Driver) -> None:
    """Whatever has become of it since: it may be no partition any more."""
    driver.states.change(NAME, lambda _: driver.record())
    driver.owners.meet_names(NAME, {11: TableName("public", "a_old")})
    (leaf,) = driver.states.records[NAME].schema.leaves
    assert leaf.name == "a_old"
    relations = driver.states.relations
    assert relations.was_named(Relation(11, "public", "a_1", "d", ()))
    assert not relations.was_named(Relation(11, "public", "a_old", "d", ()))
    assert not relations.was_named(Relation(12, "public", "a_1", "d", ()))
