"""Names of tables and columns are SQL, in and out."""

from __future__ import annotations

import pytest
import yaml

from headwater.names import (
    BadName,
    TableName,
    TablePattern,
    parse_identifier,
    parse_name_or_pattern,
    quote_ident,
    yaml_key,
)


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("public.orders", "public", "orders"),
        ("Public.ORDERS", "public", "orders"),
        ('public."Order Lines"', "public", "Order Lines"),
        ('"my.schema"."a""b"', "my.schema", 'a"b'),
        (" public . orders ", "public", "orders"),
        ("public.größe", "public", "größe"),
        ("public.GRÖSSE", "public", "grÖsse"),  # the server folds ASCII only, in UTF-8
        ("public.a$1", "public", "a$1"),
        ('public."a*b"', "public", "a*b"),
        ("public.order", "public", "order"),
    ],
)
def test_a_name_is_read_as_sql_reads_it(text: str, schema: str, name: str) -> None:
    assert TableName.parse(text) == TableName(schema, name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("orders", "the schema is missing"),
        ("db.public.orders", "expected schema.table"),
        ("public.", "a name is missing"),
        ("", "a name is missing"),
        (".orders", "double quotes"),
        ("public.order lines", "a blank needs double quotes"),
        ("public.order-lines", "'-' needs double quotes"),
        ("public.1st", "'1' needs double quotes"),
        ('public."orders', "not closed"),
        ('public.or"ders"', "in the middle"),
        ('public.""', "must not be empty"),
        ("public.log_*", "patterns stand only"),
        ("public.*", "patterns stand only in the pipeline file"),
        ("public." + "x" * 64, "63 bytes"),
        ("public." + "é" * 32, "63 bytes"),
    ],
)
def test_text_that_is_no_name_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(BadName) as refused:
        TableName.parse(text)
    assert reason in refused.value.reason


def test_a_name_without_schema_takes_the_default_where_there_is_one() -> None:
    assert TableName.parse("Orders", default_schema="sales") == TableName("sales", "orders")
    assert TableName.parse("public.orders", default_schema="sales") == TableName("public", "orders")


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        # As printed by quote_ident of PostgreSQL 18.
        ("a$b", '"a$b"'),
        ("_a1", "_a1"),
        ("1a", '"1a"'),
        ("é", '"é"'),
        ('a"b', '"a""b"'),
        ("between", '"between"'),
        ("user", '"user"'),
        ("json_table", '"json_table"'),
        ("abort", "abort"),
        ("name", "name"),
        ("A", '"A"'),
        ("", '""'),
        ("a\n", '"a\n"'),
    ],
)
def test_names_are_quoted_exactly_as_quote_ident_quotes_them(name: str, printed: str) -> None:
    assert quote_ident(name) == printed


@pytest.mark.parametrize("name", ["orders", "Order Lines", 'a"b', "a.b", "order", "größe", "x$y", "*", "a'b\\c"])
def test_what_is_printed_is_read_back_as_the_same_table(name: str) -> None:
    table = TableName("My Schema", name)
    assert TableName.parse(str(table)) == table


def test_a_path_holds_every_other_byte_as_upper_case_hex() -> None:
    assert TableName("public", "Order Lines").path == "public/Order~20Lines"
    assert TableName("a.b", "é~/x-y_Z9").path == "a~2Eb/~C3~A9~7E~2Fx-y_Z9"


def test_a_star_stands_for_any_text_of_its_part_only() -> None:
    pattern = TablePattern.parse("public.Log_*")
    assert pattern.matches(TableName("public", "log_"))
    assert pattern.matches(TableName("public", "log_a.b\nc"))
    assert not pattern.matches(TableName("public", "catalog_x"))
    assert not pattern.matches(TableName("other", "log_a"))
    assert str(pattern) == "public.log_*"


def test_a_quoted_star_is_a_star() -> None:
    pattern = TablePattern.parse('"a*b".*_log')
    assert pattern.matches(TableName("a*b", "x_log"))
    assert not pattern.matches(TableName("axb", "x_log"))
    assert TablePattern.parse(str(pattern)) == pattern


def test_regular_expressions_mean_nothing_in_a_pattern() -> None:
    assert not TablePattern.parse("public.a$*").matches(TableName("public", "a"))
    assert TablePattern.parse("public.a$*").matches(TableName("public", "a$b"))


def test_a_star_for_the_schema_leaves_the_system_alone() -> None:
    assert TablePattern.parse("*.*").matches(TableName("public", "orders"))
    assert not TablePattern.parse("*.*").matches(TableName("pg_catalog", "pg_class"))
    assert not TablePattern.parse("*.*").matches(TableName("information_schema", "tables"))


def test_an_entry_is_a_pattern_only_with_an_unquoted_star() -> None:
    assert parse_name_or_pattern('public."a*"') == TableName("public", "a*")
    assert isinstance(parse_name_or_pattern("public.a*"), TablePattern)


def test_a_column_name_follows_the_same_rules() -> None:
    assert parse_identifier("Id") == "id"
    assert parse_identifier('"Id.1"') == "Id.1"
    with pytest.raises(BadName):
        parse_identifier("a.b")


@pytest.mark.parametrize("column", ["created", "Created", "order", "it's", 'a"b', "größe", "null", "Order Lines"])
def test_a_column_in_a_remedy_is_read_from_the_pipeline_file_as_that_column(column: str) -> None:
    [key] = yaml.safe_load(f'on_bad_value: {{{yaml_key(column)}: "null"}}')["on_bad_value"]
    assert parse_identifier(key) == column


def test_a_plain_column_is_written_plainly() -> None:
    assert yaml_key("created") == "created"
    assert yaml_key("Created") == "'\"Created\"'"
