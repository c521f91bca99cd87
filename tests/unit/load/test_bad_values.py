"""The cure of a bad value names the column as the pipeline file has to: its keys are SQL."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import psycopg
import pytest

from headwater.errors import HeadwaterError
from headwater.lake.registry import TableRecord
from headwater.load.units import BAD_VALUE, _unreadable, bad_value
from headwater.log.net.decoded import _refuse_bad
from headwater.log.values.decode import DecodedTuples
from headwater.reload.stored_rows import PartitionTexts
from headwater.replicate.tables.columns import _columns
from headwater.schema import Column, TableSchema, ValueType

INFINITY = "0001" + "00000004" + "7fffffff"  # a row of COPY with one date
CREATED = Column("Created", 2, 1082, -1, ValueType("date", "date"), missing=INFINITY)
BEFORE = TableSchema(7, "public", "t", (Column("id", 1, 23, -1, ValueType("int4", "int")),), ("id",))
SCHEMA = replace(BEFORE, columns=(*BEFORE.columns, CREATED))


def by_a_load() -> None:
    text = f"{BAD_VALUE}: {json.dumps({'column': 'Created', 'key': 'id 1'})}\n"
    raise bad_value(text, "public.t", SCHEMA)


def by_the_log() -> None:
    decoded = DecodedTuples(1, {}, {}, [("Created", 0)], np.zeros(1, dtype=np.int64))
    _refuse_bad(SCHEMA, decoded, np.zeros(1, dtype=np.int64), str)


def by_a_default() -> None:
    _columns(TableRecord("public.t", "public/t", "active"), BEFORE, SCHEMA, 1)


def by_a_rebuild() -> None:
    raise PartitionTexts("public.t", ()).refused("Created")


@pytest.mark.parametrize("refuse", [by_a_load, by_the_log, by_a_default, by_a_rebuild])
def test_the_column_in_the_remedy_keeps_its_double_quotes_in_yaml(refuse: Callable[[], None]) -> None:
    with pytest.raises(HeadwaterError) as caught:
        refuse()
    assert """set on_bad_value: {'"Created"': "null"}""" in caught.value.remedy


@pytest.mark.parametrize("state", ["XX001", "XX000", "58P01", "54000", "22012", "38000", "P0001"])
def test_what_is_wrong_with_rows_is_their_tables_own(state: str) -> None:
    assert state in _unreadable(failure(state))


@pytest.mark.parametrize("state", ["57P01", "58030", "53200", "40001", "42501", None])
def test_an_outage_is_no_fault_of_a_table(state: str | None) -> None:
    assert _unreadable(failure(state)) == ""


def failure(state: str | None) -> psycopg.Error:
    """As a server's error with this SQLSTATE is."""
    error = psycopg.Error()
    error.sqlstate = state
    return error
