"""What the pipeline file says of a loaded table by now, and which job brings it about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater.columns.shape import is_rebuildable, options_for_a_rebuild, reshaped, ways_to_find_rows
from headwater.errors import Refused
from headwater.gate.check import registry_problems
from headwater.lake.registry import Registry, State, TableRecord
from headwater.names import TableName
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.schema import Column, Leaf, TableSchema, ValueType
from headwater.source.catalog.catalog import Catalog, CatalogTable

NAME = TableName("public", "Order Lines")
SCHEMA = TableSchema(
    7,
    NAME.schema,
    NAME.name,
    (Column("id", 1, 23, -1, ValueType("int4", "int")), Column("n", 2, 23, -1, ValueType("int4", "int"))),
    ("id",),
    (Leaf(7, NAME.schema, NAME.name, 4711),),
)
AGAIN = f"headwater load PIPELINE.yaml --table {NAME} --again"


def told(
    folder: Path, loaded: TableSchema, declared: TableSchema, state: State = "active", **entry: Any
) -> list[tuple[str, str, str]]:
    """Code, option and remedy of what `check` says of a table that was loaded as `loaded` and is now `declared`."""
    file = folder / "shop.yaml"
    source = {"connection": "postgresql://x@localhost/x"}
    tables = [{"name": str(NAME), **entry}]
    file.write_text(
        yaml.safe_dump({"pipeline": "shop", "source": source, "lake": {"root": str(folder / "lake")}, "tables": tables})
    )
    pipeline = load_pipeline(file)
    root = str(folder / "lake")
    Registry.create(root, "shop").write(TableRecord(str(NAME), NAME.path, state, schemas=((0, loaded),)))
    relation: Any = type("Relation", (), {"name": NAME})()
    catalog = Catalog((CatalogTable(declared, pipeline.tables[0], relation, ()),), ())
    found = registry_problems(root, pipeline, catalog)
    assert all((one.where, one.is_error) == (str(NAME), False) for one in found)
    return [(one.code, one.message.partition(" is another ")[0], one.remedy) for one in found]


def test_a_rebuild_that_is_refused_names_the_table_as_sql_does() -> None:
    with pytest.raises(Refused) as refused:
        reshaped(SCHEMA, replace(SCHEMA, where="n > 1"))
    assert refused.value.where == str(NAME) == 'public."Order Lines"'
    assert AGAIN in refused.value.remedy


def test_a_table_as_it_was_loaded_has_nothing_that_waits(tmp_path: Path) -> None:
    renamed = replace(SCHEMA, columns=(replace(SCHEMA.columns[0], name="number"), SCHEMA.columns[1]), key=("number",))
    assert told(tmp_path, SCHEMA, renamed, key=["number"], on_divergence="suspend") == []


@pytest.mark.parametrize(
    ("changes", "entry", "option"),
    [
        ({"key": ("n",)}, {"key": ["n"]}, "key"),
        ({"insert_only": True, "key": ()}, {"insert_only": True}, "insert_only"),
        ({}, {"on_divergence": "repair"}, "on_divergence"),
        ({}, {"on_schema_change": "suspend"}, "on_schema_change"),
        ({"where": "n > 1"}, {"where": "n > 1"}, "where"),
    ],
)
def test_an_option_that_waits_for_the_next_load_is_told(
    tmp_path: Path, changes: dict[str, Any], entry: dict[str, Any], option: str
) -> None:
    assert told(tmp_path, SCHEMA, replace(SCHEMA, **changes), **entry) == [("option_waits_for_load", option, AGAIN)]


@pytest.mark.parametrize("of_many", [False, True])
def test_a_domain_over_cidr_is_as_an_older_registry_has_it(of_many: bool) -> None:
    """That calls it inet, which changes no value."""

    def domain(wire: str) -> TableSchema:
        kind = ValueType(wire, "string")
        many = ValueType("array", "array<string>", element=kind)
        return TableSchema(7, "public", "t", (Column("net", 1, 70_000, -1, many if of_many else kind),), ("net",))

    assert options_for_a_rebuild(domain("inet"), domain("cidr")) == []
    assert options_for_a_rebuild(domain("cidr"), domain("inet")) == ["types or on_bad_value of net"]


def test_a_rebuild_goes_on_with_the_key_that_the_table_has() -> None:
    declared = replace(SCHEMA, key=("n",), cluster_by=("n",))
    assert ways_to_find_rows(SCHEMA, declared) == ["key"]
    assert reshaped(SCHEMA, declared) == replace(SCHEMA, cluster_by=("n",))


REBUILD = f"headwater rebuild PIPELINE.yaml --table {NAME}, while readers go on with the table as it is"


def _retyped(schema: TableSchema) -> TableSchema:
    return replace(schema, columns=(schema.columns[0], replace(schema.columns[1], value=ValueType("int4", "bigint"))))


def test_a_rebuild_is_advised_where_it_is_enough(tmp_path: Path) -> None:
    declared = replace(_retyped(SCHEMA), cluster_by=("n",))
    assert told(tmp_path, SCHEMA, declared, cluster_by=["n"]) == [
        ("option_waits_for_rebuild", "cluster_by", REBUILD),
        ("option_waits_for_rebuild", "types or on_bad_value of n", REBUILD),
    ]


@pytest.mark.parametrize(
    ("before", "now", "state"),
    [
        ({}, {}, "suspended"),
        ({"soft_delete": True}, {"soft_delete": True}, "active"),
        ({}, {"where": "n > 1"}, "active"),
    ],
)
def test_a_load_is_advised_where_a_rebuild_is_refused(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], state: State
) -> None:
    declared = replace(SCHEMA, cluster_by=("n",), **now)
    found = told(tmp_path, replace(SCHEMA, **before), declared, state, cluster_by=["n"])
    assert ("option_waits_for_load", "cluster_by", AGAIN) in found
    assert {(code, remedy) for code, _, remedy in found} == {("option_waits_for_load", AGAIN)}


def test_a_table_with_a_history_is_rebuilt_for_its_layout_and_loaded_for_its_types() -> None:
    loaded = replace(SCHEMA, history=True)
    assert is_rebuildable(loaded, replace(loaded, cluster_by=("n",)))
    assert not is_rebuildable(loaded, replace(_retyped(loaded), cluster_by=("n",)))
    assert is_rebuildable(SCHEMA, _retyped(SCHEMA))
