"""What each type of the source becomes in the lake, and which wishes under `types:` are refused."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from headwater.arrow_types import arrow_type
from headwater.errors import Refused
from headwater.schema import SERVER_TEXT, ValueType
from headwater.source.catalog.types import PgType, value_type


def _pg(name: str, typmod: int = -1) -> PgType:
    return PgType(1, name, typmod=typmod)


def _numeric(precision: int, scale: int) -> PgType:
    return _pg("numeric", ((precision << 16) | (scale & 0x7FF)) + 4)


def _array(element: PgType, typmod: int = -1) -> PgType:
    return PgType(2, f"_{element.name}", category="A", element_oid=element.oid, typmod=typmod, element=element)


@pytest.mark.parametrize(
    ("precision", "scale", "lake"),
    [
        (10, 2, "decimal(10,2)"),
        (38, 0, "decimal(38,0)"),
        (38, 38, "decimal(38,38)"),
        (39, 0, "string"),
        (2, 4, "decimal(4,4)"),
        (3, -2, "decimal(5,0)"),
        (37, -2, "string"),
        (1, 39, "string"),
    ],
)
def test_a_numeric_becomes_the_decimal_that_holds_it_or_text(precision: int, scale: int, lake: str) -> None:
    value = value_type(_numeric(precision, scale))
    assert value.lake == lake
    assert arrow_type(value) is not None


def test_a_bare_numeric_is_text_unless_the_pipeline_file_says_decimal() -> None:
    assert value_type(_pg("numeric")).lake == "string"
    assert value_type(_pg("numeric"), "decimal(38, 9)") == ValueType("numeric", "decimal(38,9)", 38, 9)


@pytest.mark.parametrize(
    ("pg", "override", "lake"),
    [
        (_pg("int4"), "bigint", "bigint"),
        (_pg("int4"), "INT", "int"),
        (_pg("int2"), "integer", "int"),
        (_pg("float4"), "double", "double"),
        (_numeric(10, 2), "decimal(12,2)", "decimal(12,2)"),
        (_numeric(10, 2), "decimal(38,9)", "decimal(38,9)"),
        (_numeric(50, 10), "decimal(38,9)", "decimal(38,9)"),
        (_pg("timestamptz"), "string", "string"),
        (_array(_pg("int4")), "string", "string"),
        (_array(_pg("int4")), "array<int>", "array<int>"),
    ],
)
def test_an_override_that_loses_nothing_is_taken(pg: PgType, override: str, lake: str) -> None:
    assert value_type(pg, override).lake == lake


@pytest.mark.parametrize(
    ("pg", "override"),
    [
        (_pg("int8"), "int"),
        (_pg("float8"), "float"),
        (_pg("text"), "int"),
        (_pg("int4"), "decimal(10,0)"),
        (_numeric(10, 2), "decimal(10,1)"),
        (_numeric(10, 2), "decimal(10,3)"),
        (_pg("numeric"), "decimal(39,2)"),
        (_pg("numeric"), "decimal(5,6)"),
        (_pg("numeric"), "double"),
        (_pg("timestamp"), "timestamp"),
        (_array(_pg("int4")), "array<bigint>"),
        (_pg("int4"), "nonsense"),
    ],
)
def test_an_override_that_could_lose_something_is_refused_with_what_is_allowed(pg: PgType, override: str) -> None:
    with pytest.raises(Refused) as refusal:
        value_type(pg, override, where="public.t, column c")
    assert refusal.value.where == "public.t, column c"
    assert override in refusal.value.message
    assert refusal.value.remedy


@pytest.mark.parametrize("name", ["date", "timestamp", "timestamptz"])
def test_bad_values_as_strings_make_the_whole_column_text(name: str) -> None:
    assert value_type(_pg(name), None, "string") == ValueType(name, "string")
    assert value_type(_array(_pg(name)), None, "string") == ValueType(
        "array", "string", element=ValueType(name, "string")
    )
    assert value_type(_pg(name), "string", "string").lake == "string"


def test_bad_values_as_strings_leave_types_alone_that_have_none() -> None:
    assert value_type(_pg("int4"), None, "string").lake == "int"
    assert value_type(_pg("float8"), "double", "string").lake == "double"
    assert value_type(_numeric(10, 2), None, "string").lake == "string"


def test_a_decimal_asked_for_and_text_for_bad_values_contradict_each_other() -> None:
    with pytest.raises(Refused, match="a column has one type"):
        value_type(_pg("numeric"), "decimal(10,2)", "string")


def test_a_domain_is_its_base_type_with_the_domains_modifier() -> None:
    inner = PgType(3, "amount", "public", "d", "N", base_oid=1, base=_numeric(6, 2))
    outer = PgType(4, "price", "public", "d", "N", base_oid=3, base=inner)
    assert value_type(outer).lake == "decimal(6,2)"
    assert value_type(_array(outer)).lake == "array<decimal(6,2)>"


def test_an_arrays_modifier_is_that_of_its_elements() -> None:
    modifier = _numeric(7, 3).typmod
    assert value_type(_array(_pg("numeric"), modifier)).lake == "array<decimal(7,3)>"
    assert value_type(_array(_pg("numeric"))).lake == "array<string>"


def test_arrays_of_what_is_not_simple_are_text() -> None:
    assert value_type(_array(_pg("inet"))).lake == "string"
    assert value_type(_array(PgType(5, "mood", "public", "e", "E"))).lake == "array<string>"


def test_a_value_type_survives_the_registrys_json() -> None:
    value = value_type(_array(_numeric(7, 3), _numeric(7, 3).typmod))
    assert ValueType.from_json(asdict(value)) == value


def test_a_type_of_the_same_name_in_another_schema_is_another_type() -> None:
    assert value_type(_pg("text")).wire == "text"
    assert value_type(PgType(6, "text", "mine")) == ValueType(SERVER_TEXT, "string")


@pytest.mark.parametrize("kind", ["b", "c", "r", "m"])
def test_what_the_table_does_not_have_is_the_servers_own_text_in_an_array_and_behind_a_domain_too(kind: str) -> None:
    unknown = PgType(6, "odd", "public", kind)
    text = ValueType(SERVER_TEXT, "string")
    domain = PgType(7, "odder", "public", "d", base_oid=6, base=unknown)
    for pg in (unknown, domain, _array(unknown), _array(domain)):
        assert value_type(pg) == value_type(pg, "string") == value_type(pg, None, "string") == text
    assert value_type(_array(PgType(8, "ints", "public", "d", base=_array(_pg("int4"))))) == text
    with pytest.raises(Refused, match="without loss"):
        value_type(unknown, "int")
