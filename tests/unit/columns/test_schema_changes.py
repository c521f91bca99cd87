"""Which columns a Relation message shows, by what registry and catalog say: where there are two readings, none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.columns.changes import described, evolved, has_columns
from headwater.errors import SchemaChanged
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Relation, RelationColumn
from headwater.log.values.decode import older_value
from headwater.schema import Column, Leaf, TableSchema, ValueType, is_widening, is_wider
from headwater.source.catalog.column_facts import ColumnFacts

INT, BIGINT, TEXT = ValueType("int4", "int"), ValueType("int8", "bigint"), ValueType("text", "string")
OIDS = {INT: 23, BIGINT: 20, TEXT: 25}
FIVE = "0001" + "00000004" + "00000005"


def column(name: str, attnum: int, value: ValueType = INT) -> Column:
    return Column(name, attnum, OIDS[value], -1, value)


def table(*columns: Column, filenode: int = 7, partitioned: bool = False) -> TableSchema:
    leaf = Leaf(1, "public", "t", filenode)
    return TableSchema(1, "public", "t", columns, ("id",), (leaf,), partitioned=partitioned, last_attnum=3)


ID, A, B = column("id", 1), column("a", 2), column("b", 3)
STORED = table(ID, A, B)


def shows(*columns: Column) -> Relation:
    shown = tuple(RelationColumn(c.name, c.type_oid, c.typmod, c.name == "id") for c in columns)
    return Relation(1, "public", "t", "d", shown)


def follow(
    relation: Relation,
    now: TableSchema,
    dropped: tuple[int, ...] = (),
    missing: dict[tuple[int, str], str] | None = None,
    stored: TableSchema = STORED,
) -> TableSchema:
    record = TableRecord("public.t", "public/t", "active", schemas=((0, stored),))
    return evolved(record, relation, now, ColumnFacts(frozenset(dropped), missing or {}))


def refused(relation: Relation, now: TableSchema, dropped: tuple[int, ...] = (), stored: TableSchema = STORED) -> str:
    with pytest.raises(SchemaChanged) as found:
        follow(relation, now, dropped, stored=stored)
    return found.value.message


def test_columns_are_told_apart_by_attnum() -> None:
    c = column("c", 4, BIGINT)
    after = follow(shows(ID, replace(A, name="x"), c), table(ID, replace(A, name="x"), c), (3,), {(1, "c"): FIVE})
    assert [(one.name, one.attnum, one.missing) for one in after.columns] == [
        ("id", 1, ""),
        ("x", 2, ""),
        ("c", 4, FIVE),
    ]
    assert described(STORED, after) == "column c added, column a renamed to x, column b dropped"
    assert after.last_attnum == 4


def test_a_column_that_came_under_the_name_of_one_that_went_is_not_taken_for_it() -> None:
    again = column("a", 4)
    assert "changed places" in refused(shows(ID, B, again), table(ID, B, replace(again, name="c")), (2,))


def test_a_new_column_in_the_place_of_one_that_went_may_be_that_one_under_another_name() -> None:
    c, wide = column("c", 4), column("c", 4, BIGINT)
    assert "may be a new column, or b under" in refused(shows(ID, A, c), table(ID, A, c), (3,))
    assert [one.attnum for one in follow(shows(ID, A, wide), table(ID, A, wide), (3,)).columns] == [1, 2, 4]
    assert [one.attnum for one in follow(shows(ID, B, c), table(ID, B, c), (2,)).columns] == [1, 3, 4]
    stored, now = (table(*columns, partitioned=True) for columns in ((ID, A, B), (ID, B, c)))
    assert [one.attnum for one in follow(shows(ID, B, c), now, (2,), stored=stored).columns] == [1, 3, 4]
    # A leaf in an order of its own: any place may have been that of the dropped one.
    assert "may be a new column, or a under" in refused(shows(B, ID, c), now, (2,), stored)


def test_names_that_changed_places_and_were_renamed_since_are_no_change_of_places() -> None:
    relation = shows(ID, replace(A, name="b"), replace(B, name="a"))
    assert "changed places" in refused(relation, table(ID, replace(A, name="x"), replace(B, name="y")))
    after = follow(relation, table(ID, replace(A, name="b"), replace(B, name="a")))
    assert [(one.name, one.attnum) for one in after.columns] == [("id", 1), ("b", 2), ("a", 3)]


def test_leaves_have_an_order_of_their_own_so_a_catalog_that_moved_on_is_no_help() -> None:
    c, d = column("c", 4), column("d", 5)
    stored = table(ID, A, B, partitioned=True)
    assert has_columns(stored, shows(B, A, ID))
    after = follow(shows(c, B, A, ID), table(ID, A, B, c, partitioned=True), stored=stored)
    assert [one.name for one in after.columns] == ["id", "a", "b", "c"]
    message = refused(shows(c, B, A, ID), table(ID, A, B, c, d, partitioned=True), stored=stored)
    assert "changed once more" in message


def test_what_the_pipeline_file_says_now_changes_no_column_that_stays() -> None:
    c, other = column("c", 4), ValueType("int4", "string")
    now = table(ID, replace(A, value=other, on_bad_value="string"), B, c)
    assert follow(shows(ID, A, B, c), now).column("a") == A
    retyped = replace(column("a", 2, BIGINT), on_bad_value="null")
    assert "on_bad_value" in refused(shows(ID, retyped, B), table(ID, retyped, B, filenode=8))


def test_a_widened_column_knows_what_it_was_and_the_value_of_older_rows() -> None:
    stored = table(ID, A, replace(B, missing=FIVE))
    wide = column("b", 3, BIGINT)
    after = follow(shows(ID, A, wide), table(ID, A, wide, filenode=8), stored=stored)
    assert after.column("b").narrower == (replace(B, missing=FIVE),)
    assert after.column("b").sent_as(23, -1).value == INT
    assert after.leaves[0].relfilenode == 8
    value, possible = older_value(after.column("b"))
    assert (value.to_pylist(), str(value.type), possible) == ([5], "int64", True)


def test_a_rewrite_that_is_no_widening_hides_what_older_rows_hold() -> None:
    c = column("c", 4)
    assert "rewritten" in refused(shows(ID, A, B, c), table(ID, A, B, c, filenode=8))
    after = follow(shows(ID, A, B, c), table(ID, A, B, c, filenode=8), missing={(1, "c"): FIVE})
    assert after.column("c").missing == FIVE


@pytest.mark.parametrize(
    ("wide", "narrow", "is_so"),
    [
        ("bigint", "int", True),
        ("int", "bigint", False),
        ("double", "float", True),
        ("double", "int", False),
        ("string", "int", False),
        ("decimal(12,3)", "decimal(10,2)", True),
        ("decimal(12,4)", "decimal(10,1)", False),
        ("decimal(12,1)", "decimal(10,2)", False),
        ("int", "int", False),
    ],
)
def test_a_wider_type_holds_every_number_of_the_narrower_one(wide: str, narrow: str, is_so: bool) -> None:
    assert is_wider(wide, narrow) is is_so


@pytest.mark.parametrize(
    ("before", "after", "is_so"),
    [
        (INT, BIGINT, True),
        (INT, ValueType("oid", "bigint"), False),
        (ValueType("oid", "bigint"), BIGINT, False),
        (ValueType("float4", "float"), ValueType("float8", "double"), True),
        (ValueType("int4", "bigint"), BIGINT, True),
        (ValueType("int2", "string"), ValueType("int8", "string"), True),
        (ValueType("float4", "double"), ValueType("float8", "double"), True),
        (ValueType("float4", "string"), ValueType("float8", "string"), False),
        (BIGINT, ValueType("int4", "bigint"), False),
        (ValueType("numeric", "decimal(8,2)", 8, 2), ValueType("numeric", "decimal(9,2)", 9, 2), True),
    ],
)
def test_a_type_is_widened_by_another_one_of_its_kind(before: ValueType, after: ValueType, is_so: bool) -> None:
    assert is_widening(before, after) is is_so


def test_a_registered_cidr_is_one_also_where_an_older_headwater_called_it_inet() -> None:
    inet, cidr = ValueType("inet", "string"), ValueType("cidr", "string")
    a = Column("a", 2, 650, -1, inet)
    several = Column("b", 3, 651, -1, ValueType("array", "string", element=inet))
    read = TableSchema.from_json(table(ID, a, several).to_json())
    assert [one.value for one in read.columns] == [INT, cidr, ValueType("array", "string", element=cidr)]
    now = replace(a, value=cidr), replace(several, value=ValueType("array", "string", element=cidr)), column("c", 4)
    after = follow(shows(ID, *now), table(ID, *now), stored=read)
    assert after.columns == (ID, *now)
    same = replace(a, name="x", type_oid=869, value=inet)
    assert "another type" in refused(shows(ID, same, several), table(ID, same, several), stored=read)
