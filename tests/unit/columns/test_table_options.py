"""What the pipeline file says of a loaded table by now, and which job brings it about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.columns.shape import reshaped
from headwater.errors import Refused
from headwater.schema import Column, Leaf, TableSchema, ValueType

SCHEMA = TableSchema(
    7,
    "public",
    "Order Lines",
    (Column("id", 1, 23, -1, ValueType("int4", "int")), Column("n", 2, 23, -1, ValueType("int4", "int"))),
    ("id",),
    (Leaf(7, "public", "Order Lines", 4711),),
)


def test_a_rebuild_that_is_refused_names_the_table_as_sql_does() -> None:
    with pytest.raises(Refused) as refused:
        reshaped(SCHEMA, replace(SCHEMA, where="n > 1"))
    assert refused.value.where == 'public."Order Lines"'
    assert 'headwater load PIPELINE.yaml --table public."Order Lines" --again' in refused.value.remedy
