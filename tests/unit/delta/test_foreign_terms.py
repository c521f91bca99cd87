"""What another program may change about a table so that what Headwater writes still fits. The rest is in
tests/integration/replicate/test_foreign_writes.py, with the programs themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from headwater.delta.delta_log import Snapshot
from headwater.delta.foreign_terms import why_unfit

NOTHING: Mapping[str, str] = MappingProxyType({})


def field(name: str, *, nullable: bool = True, more: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    return {"name": name, "type": "integer", "nullable": nullable, "metadata": dict(more)}


def table(
    *fields: dict[str, Any], by: tuple[str, ...] = (), name: str = "t", properties: Mapping[str, str] = NOTHING
) -> Snapshot:
    metadata = {
        "id": name,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": list(fields or (field("id"), field("n")))}),
        "partitionColumns": list(by),
        "configuration": {f"delta.{key}": value for key, value in properties.items()},
    }
    protocol = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors", "invariants"]}
    return Snapshot("/nowhere", 1, {}, {}, protocol, metadata, {})


BEFORE = table()
MAPPED = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (table(by=("n",)), "changes its partitioning"),
        (table(name="another"), "makes it another table"),
        (table(field("id"), field("n", nullable=False)), "columns (other: n)"),
        (table(field("id"), field("n", more={"delta.invariants": "n > 0"})), "columns (other: n)"),
        (table(field("id"), field("N")), "columns (without n; with N)"),
        (
            table(properties={"setTransactionRetentionDuration": "interval 1 days"}),
            "sets delta.setTransactionRetentionDuration",
        ),
        (table(properties={"enableIcebergCompatV2": "true"}), "sets delta.enableIcebergCompatV2 to true"),
        (replace(BEFORE, protocol={"writerFeatures": ["catalogManaged"]}), "the features catalogManaged"),
        (replace(BEFORE, domains={"delta.unheard": {"configuration": "1"}}), "changes its delta.unheard"),
        (replace(BEFORE, domains={"a user's": {"configuration": "1"}}), ""),
        (table(field("n"), field("id", more={"comment": "known"})), ""),
        (replace(BEFORE, protocol={"writerFeatures": ["deletionVectors", "changeDataFeed"]}), ""),
    ],
)
def test_what_does_not_fit_any_more_is_named(after: Snapshot, why: str) -> None:
    found = why_unfit(BEFORE, after, appended_to=False)
    assert why in found
    assert bool(found) == bool(why)


def test_a_property_that_is_taken_away_counts_like_one_that_is_set() -> None:
    assert "takes delta.unheard away" in why_unfit(table(properties={"unheard": "1"}), BEFORE, appended_to=False)


def test_only_a_table_that_is_appended_to_may_be_append_only() -> None:
    after = table(properties={"appendOnly": "true"})
    assert "sets delta.appendOnly" in why_unfit(BEFORE, after, appended_to=False)
    assert why_unfit(BEFORE, after, appended_to=True) == ""
    assert why_unfit(after, BEFORE, appended_to=False) == ""


def test_names_in_files_decide_and_not_the_mapping() -> None:
    """A column that is dropped and added again has another name in files: its values are gone."""
    mode = {"columnMapping.mode": "name"}
    mapped = table(field("id", more=MAPPED), properties=mode)
    other = table(field("id", more={**MAPPED, "delta.columnMapping.physicalName": "col-2"}), properties=mode)
    plain = table(field("id"))
    same = table(field("id", more={**MAPPED, "delta.columnMapping.physicalName": "id"}), properties=mode)
    assert "columns (other: id)" in why_unfit(mapped, other, appended_to=False)
    assert "columns (other: id)" in why_unfit(plain, mapped, appended_to=False)
    assert why_unfit(plain, same, appended_to=False) == ""
