"""Why a table cannot be followed any more, judged by what the source's catalog showed before and shows now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headwater.lake.registry import TableRecord
from headwater.names import TableName
from headwater.replicate.catalog_watch.facts import CatalogFacts
from headwater.replicate.catalog_watch.judge import Keyless, key_problem, silence
from headwater.replicate.catalog_watch.learned import Learned
from headwater.replicate.catalog_watch.rewrites import Rewrites
from headwater.schema import Column, Leaf, TableSchema, ValueType
from headwater.source.catalog.relations import Attribute, CatalogRelation, Index
from headwater.source.catalog.standing import Registered, Standing
from headwater.source.publication.publication import Publication

NAME = TableName("public", "t")
AGAIN = "headwater load PIPELINE.yaml --table public.t --again"
INTEGER, MOOD = 23, 20000
ALL = frozenset({"insert", "update", "delete", "truncate"})


def _column(name: str, attnum: int, type_oid: int = INTEGER) -> Column:
    return Column(name, attnum, type_oid, -1, ValueType("int4", "int"))


def _relation(number: int, name: str, kind: str = "r") -> CatalogRelation:
    """With the columns (id, n, m), of which id is the primary key; its files have its own number."""
    return CatalogRelation(
        relation_id=number,
        name=TableName("public", name),
        attributes=(
            Attribute("id", 1, INTEGER, -1, True, ""),
            Attribute("n", 2, INTEGER, -1, False, ""),
            Attribute("m", 3, MOOD, -1, False, ""),
        ),
        indexes=(Index(number + 1000, f"{name}_pkey", ("id",), True, True, False, False, True, False),),
        kind=kind,
        persistence="p",
        owner="owner",
        filenode=number,
        replica_identity="d",
        is_partition=kind == "r" and name != "t",
        row_security=False,
        row_security_forced=False,
        row_security_active=False,
        may_select=True,
        selectable=(),
        may_use_schema=True,
        owned=True,
        last_attnum=3,
    )


def _plain() -> tuple[TableSchema, dict[int, CatalogRelation], dict[int, tuple[int, ...]]]:
    columns = (_column("id", 1), _column("n", 2), _column("m", 3, MOOD))
    schema = TableSchema(1, "public", "t", columns, ("id",), (Leaf(1, "public", "t", 1),), last_attnum=3)
    return schema, {1: _relation(1, "t")}, {}


def _partitioned() -> tuple[TableSchema, dict[int, CatalogRelation], dict[int, tuple[int, ...]]]:
    schema, _, _ = _plain()
    leaves = (Leaf(11, "public", "t_1", 11), Leaf(12, "public", "t_2", 12))
    relations = {1: _relation(1, "t", "p"), 11: _relation(11, "t_1"), 12: _relation(12, "t_2")}
    return replace(schema, relation_id=1, leaves=leaves, partitioned=True), relations, {1: (11, 12)}


@dataclass
class Look:
    """What is known of a table, and what one look finds."""

    schema: TableSchema
    relations: dict[int, CatalogRelation]
    below: dict[int, tuple[int, ...]]
    standing: Standing = field(default=Standing(Registered(NAME, 1, "shop"), NAME, False, 5))
    publication: Publication = field(
        default=Publication("shop", True, False, False, ALL, False, False, "shop", members={})
    )
    meanings: dict[int, dict[str, str]] = field(default_factory=lambda: {MOOD: {"label 1": "glad"}})

    @property
    def record(self) -> TableRecord:
        return TableRecord("public.t", "public/t", "active", schemas=((0, self.schema),))

    @property
    def facts(self) -> CatalogFacts:
        publications: dict[str, Publication | None] = {"shop": self.publication}
        return CatalogFacts(180000, (self.standing,), self.relations, self.below, publications, {}, self.meanings)

    def silence(self, *rewritten: int, known: dict[str, str] | None = None) -> tuple[str, str] | None:
        found = silence(self.record, self.standing, self.facts, rewritten, known or {"label 1": "glad"})
        return (found.message, found.remedy) if found is not None else None

    def key_problem(self) -> Keyless | None:
        return key_problem(self.record, self.standing, self.facts)

    def alter(self, number: int, **changes: Any) -> None:
        self.relations[number] = replace(self.relations[number], **changes)

    def columns(self, number: int, *columns: Attribute) -> None:
        self.alter(number, attributes=columns, last_attnum=max(column.attnum for column in columns))


@pytest.fixture(params=[_plain, _partitioned], ids=["plain", "partitioned"])
def look(request: pytest.FixtureRequest) -> Look:
    return Look(*request.param())


ID, N, M = _relation(1, "t").attributes


def test_a_table_as_it_was_is_followed(look: Look) -> None:
    assert look.silence() is None
    assert look.key_problem() is None


@pytest.mark.parametrize(
    ("now", "reason", "remedy"),
    [
        ({"now": None}, "was dropped at the source", "take public.t out of the pipeline file"),
        ({"now": None, "replaced": True}, "dropped and created again", AGAIN),
        ({"membership": None}, "not in the publication shop any more", AGAIN),
        ({"now": TableName("public", "sold")}, "renamed to public.sold", "name public.sold in the pipeline file"),
    ],
)
def test_a_table_that_is_not_where_it_was(look: Look, now: dict[str, Any], reason: str, remedy: str) -> None:
    look.standing = replace(look.standing, **now)
    look.relations.clear()  # a table that is gone is in no catalog
    found = look.silence()
    assert found is not None
    assert reason in found[0]
    assert remedy in found[1]


def test_a_publication_that_carries_less_silences_and_one_that_carries_more_does_not(look: Look) -> None:
    look.publication = replace(look.publication, for_all_tables=True)
    assert look.silence() is None
    look.publication = replace(look.publication, operations=frozenset({"insert"}))
    found = look.silence()
    assert found is not None
    assert "it publishes insert; needed is" in found[0]
    assert found[1].endswith(f"then {AGAIN}")


def test_columns_that_are_new_or_renamed_are_the_logs_business(look: Look) -> None:
    for number, relation in look.relations.items():
        look.columns(number, replace(ID, name="number"), N, M, Attribute("more", 4, INTEGER, -1, False, ""))
        look.alter(number, indexes=(replace(relation.indexes[0], columns=("number",)),))
    assert look.silence() is None
    assert look.key_problem() is None, "a renamed key column is still the key"


def test_a_column_that_took_the_place_of_another_one_is_found(look: Look) -> None:
    look.columns(1, ID, replace(N, attnum=4), M)
    assert look.silence() == ("its column n was dropped and added again", AGAIN)


def test_columns_that_changed_names_are_found_where_the_log_cannot_tell() -> None:
    for made, found in ((_plain, None), (_partitioned, ("its column n took the name of another one, m", AGAIN))):
        look = Look(*made())
        look.columns(1, ID, replace(N, name="m"), replace(M, name="n"))
        assert look.silence() == found


def test_a_new_column_beside_excluded_ones_is_in_no_column_list(look: Look) -> None:
    look.schema = replace(look.schema, excluded=("secret",))
    look.columns(1, ID, N, M, Attribute("more", 4, INTEGER, -1, False, ""))
    found = look.silence()
    assert found is not None
    assert "more was added, which its column list does not publish" in found[0]


def test_a_label_that_was_renamed_is_found_and_a_new_one_is_not(look: Look) -> None:
    look.meanings[MOOD]["label 2"] = "odd"
    assert look.silence() is None
    look.meanings[MOOD]["label 1"] = "merry"
    found = look.silence()
    assert found is not None
    assert "the label 'glad' is 'merry' now" in found[0]
    assert found[1] == "headwater verify PIPELINE.yaml --table public.t --repair"


@pytest.mark.parametrize(
    ("alter", "remedy"),
    [
        (lambda look: None, "headwater reload PIPELINE.yaml --changed"),
        (lambda look: look.columns(1, ID, replace(N, name="k"), M), AGAIN),
        (lambda look: look.columns(1, ID, N, M, Attribute("more", 4, INTEGER, -1, False, "")), AGAIN),
        (
            lambda look: look.columns(1, ID, N, M, Attribute("made", 4, INTEGER, -1, False, "s")),
            "headwater reload PIPELINE.yaml --changed",
        ),
        (lambda look: look.columns(1, ID, replace(N, type_oid=20), M), None),
    ],
    ids=["alone", "beside a rename", "beside a new column", "beside a generated column", "of a type the log shows"],
)
def test_values_that_were_made_anew_are_compared_where_they_can_be(
    look: Look, alter: Callable[[Look], None], remedy: str | None
) -> None:
    alter(look)
    holder = look.schema.leaves[-1].relation_id
    found = look.silence(holder)
    assert (found[1] if found is not None else None) == remedy
    assert found is None or "was rewritten by ALTER TABLE" in found[0]
    assert look.silence(77) is None, "that is no relation of the table"


@pytest.mark.parametrize("kept", [{"soft_delete": True}, {"history": True}], ids=["soft_delete", "history"])
def test_a_table_that_a_compare_does_not_repair_is_loaded_again(look: Look, kept: dict[str, Any]) -> None:
    look.schema = replace(look.schema, **kept)
    found = look.silence(look.schema.leaves[-1].relation_id)
    assert found is not None
    assert found[1] == AGAIN


def test_of_columns_that_a_column_list_lacks_only_those_count_that_a_load_would_bring(look: Look) -> None:
    look.schema = replace(look.schema, excluded=("secret",))
    for kind, publishes, is_found in (("", False, True), ("v", True, False), ("s", False, False), ("s", True, True)):
        look.columns(1, ID, N, M, Attribute("new", 4, INTEGER, -1, False, kind))
        look.publication = replace(look.publication, publishes_generated=publishes)
        found = look.silence()
        assert (found is not None and "which its column list does not publish" in found[0]) is is_found, kind


def test_one_unlogged_partition_silences_its_table(look: Look) -> None:
    holder = look.schema.leaves[-1].relation_id
    look.alter(holder, persistence="u")
    name = look.relations[holder].name
    assert look.silence() == (
        f"{name} was set UNLOGGED: its changes are not in the log",
        f"ALTER TABLE {name} SET LOGGED; then {AGAIN}",
    )


def test_without_its_key_the_sources_writers_fail(look: Look) -> None:
    holder = look.schema.leaves[-1].relation_id
    for number in {1, holder}:
        look.alter(number, indexes=())
    found = look.key_problem()
    assert found is not None
    assert found.writers_fail
    assert "ADD PRIMARY KEY (id)" in found.cure
    assert found.error("public.t").remedy == f"{found.cure}; then {AGAIN}"
    assert look.silence() is None, "what still comes is not lost"


def test_with_another_identity_writers_go_on_and_the_table_is_not_followed(look: Look) -> None:
    for number in {1, *(leaf.relation_id for leaf in look.schema.leaves)}:
        look.alter(number, indexes=(), replica_identity="f")
    found = look.key_problem()
    assert found is not None
    assert not found.writers_fail
    assert "nothing guarantees its key any more" in found.message


def test_nobody_judges_the_key_of_a_table_that_is_not_published(look: Look) -> None:
    look.alter(look.schema.leaves[0].relation_id, indexes=())
    look.standing = replace(look.standing, membership=None)
    assert look.key_problem() is None


def test_a_rewrite_is_remembered_by_its_files_until_these_are_registered(look: Look) -> None:
    rewrites, leaf = Rewrites(), look.schema.leaves[0]
    rewrites.told([leaf.relation_id])
    look.alter(leaf.relation_id, filenode=500)
    rewrites.mark({"public.t": look.record}, look.facts)
    assert set(rewrites.marked) == {leaf.relation_id}
    look.alter(leaf.relation_id, filenode=600)  # a TRUNCATE
    rewrites.mark({"public.t": look.record}, look.facts)
    assert set(rewrites.marked) == {leaf.relation_id}
    others = look.schema.leaves[1:]
    look.schema = look.schema.with_leaves((replace(leaf, relfilenode=500), *others))
    rewrites.mark({"public.t": look.record}, look.facts)
    assert not rewrites.marked


def test_what_a_rewrite_is_told_of_while_a_load_runs_waits_for_its_record(look: Look) -> None:
    rewrites, leaf = Rewrites(), look.schema.leaves[0]
    rewrites.told([leaf.relation_id])
    look.alter(leaf.relation_id, filenode=500)
    rewrites.mark({"public.t": replace(look.record, state="loading")}, look.facts)
    assert not rewrites.marked
    rewrites.mark({"public.t": look.record}, look.facts)
    assert set(rewrites.marked) == {leaf.relation_id}


def test_what_later_looks_compare_with_is_learned_once_and_kept_by_incarnation(look: Look) -> None:
    learned, tables = Learned(), {"public.t": look.record}
    learned.learn(tables, look.facts)
    assert learned.take() == {"public.t": (("label 1", "glad"),)}
    look.meanings[MOOD]["label 1"] = "merry"
    learned.learn(tables, look.facts)
    assert learned.take() == {}, "the first meaning is what its rows were written under"
    assert learned.meanings(look.record) == {"label 1": "glad"}
    assert learned.meanings(replace(look.record, incarnation=1)) == {}
    holders = {leaf.relation_id for leaf in look.schema.leaves}
    assert learned.files_seen == {number: number for number in holders}
    look.columns(1, ID, N, M, Attribute("more", 4, INTEGER, -1, False, ""))
    look.alter(look.schema.leaves[0].relation_id, filenode=700)
    learned.learn(tables, look.facts)
    assert learned.files_seen == {number: number for number in holders}, "under columns that nobody has registered yet"


VIRTUAL, STORED, ORDINARY = (
    Attribute(name, 4, INTEGER, -1, False, how) for name, how in (("v", "v"), ("s", "s"), ("o", ""))
)


def test_a_virtual_column_that_came_is_known_and_no_other_one_is(look: Look) -> None:
    """Also not one that went, before a virtual one came: its values may still come with the log."""
    tables = {"public.t": look.record}
    some = {leaf.relation_id: leaf.relation_id for leaf in look.schema.leaves}
    for columns, known in (
        ((VIRTUAL,), {1: 4}),
        ((VIRTUAL, replace(VIRTUAL, name="v2", attnum=5)), {1: 5}),
        ((VIRTUAL, replace(ORDINARY, attnum=5)), {1: 4}),
        ((VIRTUAL, replace(VIRTUAL, name="v2", attnum=6)), {1: 4}),
        ((replace(VIRTUAL, attnum=5),), {}),
        ((ORDINARY, replace(VIRTUAL, attnum=5)), {}),
        ((STORED,), {}),
    ):
        learned = Learned()
        look.columns(1, ID, N, M, *columns)
        learned.learn(tables, look.facts)
        assert learned.columns_seen == known
        assert learned.files_seen == (some if known and known[1] == columns[-1].attnum else {})
        assert set(learned.take()) == {"public.t"}, "its meanings are new"
        learned.learn(tables, look.facts)
        assert learned.take() == {}
    learned, excluding = Learned(), replace(look.schema, excluded=("secret",))
    look.columns(1, ID, N, M, VIRTUAL)
    learned.learn({"public.t": replace(look.record, schemas=((0, excluding),))}, look.facts)
    assert learned.columns_seen == {1: 4}, "no column list names it, and none has to"
