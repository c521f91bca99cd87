"""The labels that the source knows of a table's enums."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.names import TableName
from headwater.source.catalog.catalog import read_catalog
from headwater.source.connection import connect
from headwater.validate.enum_labels import enum_labels

pytestmark = pytest.mark.postgres


def test_enums_have_labels_unless_the_lake_has_something_in_their_place(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABELS_KEY", "0123456789abcdef0123456789abcdef")
    database.execute(
        "create type mood as enum ('sad', 'glad')",
        "create domain state as mood",
        "create table people (id int primary key, plain mood, later state, hashed mood, masked mood)",
    )
    database.grant("public.people")
    entry = {"name": "public.people", "columns": {"hash": ["hashed"], "mask": {"masked": "***"}}}
    pipeline = write_pipeline(tmp_path, database, entry, source={"hash_key": "env:LABELS_KEY"})
    with contextlib.closing(connect(database.conninfo)) as connection:
        schema = read_catalog(connection, pipeline).table(TableName.parse("public.people")).schema
    labels = ["sad", "glad"]
    assert enum_labels(pipeline, {"public.people": schema}) == {"public.people": {"plain": labels, "later": labels}}
