"""A table's content in another shape, on the table's own files: what is left when a commit does not come back well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from fixtures.jobs import queried
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.columns import ColumnChange, evolve
from headwater.apply.direct import Fence
from headwater.apply.reshape import rebuild
from headwater.arrow_types import lake_schema
from headwater.delta import delta_log
from headwater.delta.small_tables import LostRace
from headwater.schema import Column, TableSchema, ValueType

APP = "headwater/shop/public.t/1"
FENCE = Fence("headwater/shop/generation", 1)
SCHEMA = TableSchema(
    1,
    "public",
    "t",
    (
        Column("id", 1, 20, -1, ValueType("int8", "bigint")),
        Column("region", 2, 25, -1, ValueType("text", "string")),
    ),
    ("id",),
)


def no_spark() -> Any:
    pytest.fail("Spark was asked for")


ROWS: list[dict[str, Any]] = [{"id": 1, "region": "eu"}, {"id": 2, "region": None}]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "_delta_log").mkdir()
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}}
        for name, kind in (("id", "long"), ("region", "string"))
    ]
    metadata = {
        "id": "00000000-0000-0000-0000-000000000000",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {"delta.enableDeletionVectors": "true"},
    }
    features = ["deletionVectors"]
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": features,
        "writerFeatures": features,
    }
    delta_log.create(str(tmp_path), [{"protocol": protocol}, {"metaData": metadata}])
    assert rebuild(str(tmp_path), 0, "public.t", APP, SCHEMA, _rows(SCHEMA), 1, FENCE) == (1, 0)
    return str(tmp_path)


def _rows(schema: TableSchema) -> list[pa.Table]:
    return [pa.Table.from_pylist(ROWS, lake_schema(schema))]


def _stored(folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = queried(folder, "select * from t order by id").to_pylist(maps_as_pydicts="strict")
    return rows


def _files(folder: str) -> set[Path]:
    return {path for path in Path(folder).rglob("*.parquet") if "_delta_log" not in path.parts}


def _rebuild(folder: str) -> None:
    shape = replace(SCHEMA, partition_by=("region",))
    rebuild(folder, 1, "public.t", APP, shape, _rows(shape), 2, FENCE)


def _rename(folder: str) -> None:
    now = replace(SCHEMA, columns=(SCHEMA.columns[0], replace(SCHEMA.columns[1], name="area")))
    evolve(
        folder,
        1,
        "public.t",
        APP,
        ColumnChange(now, (), {"region": "area"}, number=2),
        FENCE,
        FileTasks(no_spark, folder),
    )


@pytest.mark.parametrize("change", [_rebuild, _rename])
def test_a_commit_that_is_there_although_its_write_failed_keeps_its_files(
    folder: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = delta_log.commit

    def unheard(folder: str, version: int, actions: Any) -> None:
        commit(folder, version, actions)
        raise OSError("the answer was lost")

    monkeypatch.setattr(delta_log, "commit", unheard)
    with pytest.raises(OSError, match="the answer was lost"):
        change(folder)
    assert DeltaTable(folder).version() == 2
    assert [[*row.values()] for row in _stored(folder)] == [[1, "eu"], [2, None]]


@pytest.mark.parametrize("change", [_rebuild, _rename])
def test_a_lost_race_leaves_no_files(folder: str, change: Any) -> None:
    delta_log.commit(folder, 2, [delta_log.commit_info("OTHER", {}, {}, 1)])
    before = _files(folder)
    with pytest.raises(LostRace):
        change(folder)
    assert _files(folder) == before
    assert _stored(folder) == ROWS
