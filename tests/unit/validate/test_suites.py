"""Suite files and the basics: what is expected of a table, and what is wrong with how somebody wrote it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.schema import Column, TableSchema, ValueType
from headwater.validate.expectations import is_row_wise
from headwater.validate.suites import BadSuite, Expectation, basics, read_suites

A, LINES = "public.a", 'public."Order Lines"'


def column(name: str, **options: Any) -> Column:
    return Column(name, 1, 20, -1, ValueType("int8", "bigint"), **options)


SCHEMA = TableSchema(
    1, "public", "a", (column("id", not_null=True), column("n", not_null=True), column("note")), ("id",)
)
CLASSES = {"id": "LongType", "n": "LongType", "note": "LongType"}


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return pipeline_in(tmp_path)


def pipeline_in(folder: Path) -> Pipeline:
    file = folder / "shop.yaml"
    file.write_text(
        "pipeline: shop\nsource: {connection: 'postgresql://u@h/d'}\nlake: {root: /nowhere}\n"
        f"tables: [{A}, '{LINES}']\n"
    )
    return load_pipeline(file)


def write(pipeline: Pipeline, name: str, content: str) -> Path:
    path = Path(pipeline.file).parent / "expectations" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def read(pipeline: Pipeline) -> Any:
    return read_suites(pipeline, {A: SCHEMA, LINES: SCHEMA})


def faults(pipeline: Pipeline) -> str:
    with pytest.raises(BadSuite) as refused:
        read(pipeline)
    assert (refused.value.code, refused.value.exit_status) == ("bad_suite", 2)
    return refused.value.message


def kinds(expectations: Any) -> list[tuple[str, tuple[str, ...], str]]:
    return [(e.kind.removeprefix("expect_"), e.columns, e.severity) for e in expectations]


def test_every_table_is_expected_to_have_its_types_its_key_and_no_null_where_the_source_has_none() -> None:
    found = basics(SCHEMA, classes=CLASSES)
    assert kinds(found.expectations) == [
        *(("column_values_to_be_of_type", (name,), "error") for name in ("id", "n", "note")),
        *(("column_values_to_not_be_null", (name,), "error") for name in ("id", "n")),
        ("column_values_to_be_unique", ("id",), "error"),
    ]
    several = basics(replace(SCHEMA, key=("id", "n")), classes={})
    assert kinds(several.expectations)[-1] == ("compound_columns_to_be_unique", ("id", "n"), "error")
    keyless = basics(replace(SCHEMA, key=(), insert_only=True), classes={})
    assert not [kind for kind, _, _ in kinds(keyless.expectations) if "unique" in kind]


def test_a_null_that_stands_for_a_bad_value_is_expected() -> None:
    schema = replace(SCHEMA, columns=(column("id"), column("n", not_null=True, on_bad_value="null")))
    nulls = [e.columns for e in basics(schema, classes={}).expectations if e.kind.endswith("not_be_null")]
    assert nulls == [("id",)]


def test_a_name_that_great_expectations_would_take_for_a_path_is_left_alone() -> None:
    schema = replace(SCHEMA, columns=(*SCHEMA.columns, column("a.b", not_null=True)), key=("id", "a.b"))
    found = basics(schema, classes={**CLASSES, "a.b": "LongType"}, labels={"a.b": ["x"]})
    assert not [e for e in found.expectations if "a.b" in e.columns]


def test_a_suite_that_asks_about_such_a_name_is_refused(pipeline: Pipeline) -> None:
    schema = replace(SCHEMA, columns=(*SCHEMA.columns, column("a.b")))
    asked = "{column_list: [id, a.b]}"
    path = write(pipeline, "public.a.yaml", f"expectations: [{{type: expect_x, kwargs: {asked}}}]")
    with pytest.raises(BadSuite) as refused:
        read_suites(pipeline, {A: schema})
    assert f"{path}: expectations[0].kwargs: Great Expectations cannot ask about 'a.b'" in refused.value.message


def test_labels_of_enums_and_the_drift_of_row_counts_are_warnings() -> None:
    found = basics(SCHEMA, classes={}, rows_before=1001, labels={"note": ["x", "y"]}).expectations[-2:]
    assert kinds(found) == [
        ("column_values_to_be_in_set", ("note",), "warning"),
        ("table_row_count_to_be_between", (), "warning"),
    ]
    assert [e.arguments for e in found] == [
        {"column": "note", "value_set": ["x", "y"]},
        {"min_value": 500, "max_value": 2002},
    ]
    assert basics(SCHEMA, classes={}, rows_before=99) == basics(SCHEMA, classes={})


def test_suites_are_yaml_or_json_and_found_by_the_tables_name(pipeline: Pipeline) -> None:
    assert read(pipeline) == {}
    write(
        pipeline,
        "public.a.yaml",
        "name: rules\nexpectations:\n"
        "  - {type: expect_x, kwargs: {column: n, mostly: 0.9}, meta: {severity: warning, owner: me}}\n"
        "  - {type: expect_y, severity: info}\n",
    )
    suite = {
        "name": "lines",
        "expectations": [{"type": "expect_z", "kwargs": {"batch_id": "b", "column_list": ["id", "n"]}, "id": "i"}],
        "meta": {"great_expectations_version": "1.24.1"},
        "id": None,
        "notes": None,
    }
    write(pipeline, "shop/public.Order~20Lines.json", json.dumps(suite, indent="\t"))
    write(pipeline, "other/public.nothing.yaml", "that is another pipeline's")
    write(pipeline, "README.md", "no suite")
    found = read(pipeline)
    assert list(found) == [A, LINES]
    assert kinds(found[A].expectations) == [("x", ("n",), "warning"), ("y", (), "info")]
    assert found[A].expectations[0].meta == {"severity": "warning", "owner": "me"}
    assert kinds(found[LINES].expectations) == [("z", ("id", "n"), "error")]
    assert found[LINES].expectations[0].arguments == {"column_list": ["id", "n"]}


def test_all_that_is_wrong_is_said_at_once_with_file_and_place(pipeline: Pipeline) -> None:
    bad = write(
        pipeline,
        "public.a.yaml",
        "surprise: 1\nexpectations:\n  - {type: 3}\n  - {type: expect_x, kwargs: {column: nope}}\n"
        "  - {type: expect_x, severity: fatal}\n  - {type: expect_x, kwarg: {}}\n  - text\n"
        "  - {type: expect_x, kwargs: {min_value: {$PARAMETER: p}}}\n",
    )
    broken = write(pipeline, "public.Order~20Lines.json", '{"expectations": [\n}')
    stray = write(pipeline, "public.b.yaml", "expectations: []")
    message = faults(pipeline)
    for fault in (
        f"{bad}: surprise: unknown key",
        f"{bad}: expectations[0].type: expected the name of an expectation",
        f"{bad}: expectations[1].kwargs: the table has no column 'nope' in the lake",
        f"{bad}: expectations[2].severity: 'fatal': expected error (or critical), warning or info",
        f"{bad}: expectations[3].kwarg: unknown key",
        f"{bad}: expectations[4]: expected a mapping",
        f"{bad}: expectations[5].kwargs: suite parameters have no values here",
        f"{broken}: not valid JSON",
        "(line 2)",
        f"{stray}: no table of the pipeline shop has its suite in a file of this name",
    ):
        assert fault in message, fault


@pytest.mark.parametrize("content", ["", "[]", "expectations: 3", "name: basics\nexpectations: []", "a: [b", "\xff: ["])
def test_what_is_no_suite_is_refused(pipeline: Pipeline, content: str) -> None:
    path = write(pipeline, "public.a.yaml", content)
    assert str(path) in faults(pipeline)


def test_a_table_has_one_suite_file(pipeline: Pipeline) -> None:
    write(pipeline, "public.a.yaml", "expectations: []")
    second = write(pipeline, "shop/public.a.json", '{"expectations": []}')
    assert f"{second}: public.a has another suite file" in faults(pipeline)


def test_the_columns_of_a_table_that_is_not_loaded_yet_are_not_known(pipeline: Pipeline) -> None:
    write(pipeline, "public.a.yaml", "expectations: [{type: expect_x, kwargs: {column: nope}}]")
    assert list(read_suites(pipeline, {})) == [A]


def test_only_what_each_row_meets_by_itself_needs_no_second_look_at_rows_that_stayed() -> None:
    def row_wise(kind: str, **arguments: Any) -> bool:
        return is_row_wise(Expectation(kind, arguments))

    assert row_wise("expect_column_values_to_be_between", column="n", min_value=0)
    assert row_wise("expect_column_values_to_be_between", column="n", min_value=0, mostly=1.0)
    assert row_wise("expect_column_pair_values_a_to_be_greater_than_b", column_A="n", column_B="id")
    for kind in (
        "expect_column_values_to_be_unique",
        "expect_compound_columns_to_be_unique",
        "expect_column_values_to_be_increasing",
        "expect_column_value_z_scores_to_be_less_than",
        "expect_column_values_to_not_be_outliers",
        "expect_column_mean_to_be_between",
        "expect_table_row_count_to_equal",
        "expect_my_own_thing",
    ):
        assert not row_wise(kind), kind
    assert not row_wise("expect_column_values_to_be_between", column="n", mostly=0.99)


def test_an_expectation_is_known_again_by_what_it_asks() -> None:
    one = Expectation("expect_x", {"a": 1, "b": 2})
    assert one.fingerprint == Expectation("expect_x", {"b": 2, "a": 1}, "warning", {"owner": "me"}).fingerprint
    assert one.fingerprint != Expectation("expect_x", {"a": 1, "b": 3}).fingerprint
