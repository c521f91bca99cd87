"""What the reader hides of a block, by the bytes that are left of it; no value of the source may be among them."""

from __future__ import annotations

import pickle
import struct
import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.columns.hidden import hiding, key_of
from headwater.errors import Refused, with_file
from headwater.hidden import Hidden, hashed
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Block, Held, Relation, RelationColumn
from headwater.log.hiding import Hiding
from headwater.log.values.wire import MalformedMessage
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline, TableEntry
from headwater.pipeline_file.where_text import parse
from headwater.schema import Column, Leaf, TableSchema, ValueType

KEY = b"a key of some length"
INT, TEXT = ValueType("int4", "int"), ValueType("text", "string")
COLUMNS = (
    Column("id", 1, 23, -1, INT),
    Column("mail", 2, 25, -1, TEXT, hidden=Hidden("hash", "fingerprint")),
    Column("name", 3, 25, -1, TEXT, hidden=Hidden("mask", "***")),
    Column("note", 4, 25, -1, TEXT),
)
RELATION = Relation(
    7, "public", "people", "d", tuple(RelationColumn(c.name, c.type_oid, c.typmod, c.name == "id") for c in COLUMNS)
)
SECRETS = (b"ann@example.org", b"Ann")


def fields(*values: bytes | None) -> bytes:
    """A tuple as pgoutput sends it in binary form."""
    parts = [b"n" if value is None else b"b" + struct.pack(">i", len(value)) + value for value in values]
    return struct.pack(">h", len(values)) + b"".join(parts)


def block(*changes: bytes, relation: Relation = RELATION) -> Block:
    ends = np.cumsum([len(change) for change in changes])
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    data = np.frombuffer(b"".join(changes), dtype=np.uint8)
    return Block(relation, Held(data, starts, ends.astype(np.int64), np.arange(len(changes), dtype=np.int64)))


def change(operation: bytes, *tuples: bytes) -> bytes:
    return operation + struct.pack(">I", 7) + b"".join(tuples)


def left(found: Block) -> bytes:
    return found.load().data.tobytes()


ID = struct.pack(">i", 5)
ROW = fields(ID, SECRETS[0], SECRETS[1], b"seen")
CHANGES = (
    change(b"I", b"N", ROW),
    change(b"U", b"O", ROW, b"N", fields(ID, None, SECRETS[1], b"seen")),
    change(b"D", b"O", ROW),
)


def test_hashes_and_masks_stand_where_values_stood_and_nothing_else_has_moved() -> None:
    given = block(*CHANGES)
    found = Hiding(KEY, {7: COLUMNS}).block(given)
    assert not any(secret in left(found) for secret in SECRETS)
    digest = hashed(KEY, SECRETS[0]).encode()
    row = struct.pack(">h", 4) + b"b" + struct.pack(">i", 4) + ID
    shown = [b"t" + struct.pack(">i", len(text)) + text for text in (digest, b"***")]
    row += b"".join(shown) + b"b" + struct.pack(">i", 4) + b"seen"
    held = found.load()
    pieces = [left(found)[start:end] for start, end in zip(held.starts, held.ends, strict=True)]
    assert pieces[0] == change(b"I", b"N", row)
    assert pieces[2] == change(b"D", b"O", row)
    assert pieces[1].startswith(change(b"U", b"O", row))
    assert given.load().data.tobytes() == b"".join(CHANGES), "the block that was given stays as it was"


@pytest.mark.parametrize(
    "columns",
    [
        (RELATION.columns[0], RELATION.columns[1]._replace(name="name"), RELATION.columns[2]._replace(name="mail")),
        (*RELATION.columns, RelationColumn("added", 25, -1, False)),
        RELATION.columns[:2],
        (RELATION.columns[0], RELATION.columns[1]._replace(type_oid=1043), *RELATION.columns[2:]),
    ],
    ids=["names change places", "added", "dropped", "another type"],
)
def test_of_other_columns_than_those_that_are_known_nothing_is_left(columns: tuple[RelationColumn, ...]) -> None:
    found = Hiding(KEY, {7: COLUMNS}).block(block(*CHANGES, relation=replace(RELATION, columns=columns)))
    assert not any(secret in left(found) for secret in (*SECRETS, b"seen", ID))
    assert found.changes == len(CHANGES)


def test_an_error_over_a_hidden_value_does_not_quote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message goes to the driver, its log and the page."""

    def broken(column: Column, key: bytes, texts: pa.Array) -> pa.Array:
        raise ValueError(f"cannot read {texts.to_pylist()}")

    monkeypatch.setattr("headwater.log.hiding.hide", broken)
    with pytest.raises(MalformedMessage, match="a value of column mail") as malformed:
        Hiding(KEY, {7: COLUMNS}).block(block(*CHANGES))
    assert "ann@example.org" not in "".join(traceback.format_exception(malformed.value))


def test_another_relation_is_let_through() -> None:
    given = block(*CHANGES)
    assert Hiding(KEY, {8: COLUMNS}).block(given) is given


def test_nothing_is_shown_of_an_unknown_relation_whose_name_hides() -> None:
    given = block(*CHANGES)
    hides = Hiding(KEY, {8: COLUMNS}, frozenset({TableName("public", "people")}))
    found = hides.block(given)
    assert not any(secret in left(found) for secret in (*SECRETS, b"seen", ID))
    assert (found.changes, found.relation.columns) == (len(CHANGES), ())
    other = block(*CHANGES, relation=replace(RELATION, name="plain"))
    assert hides.block(other) is other
    assert replace(hides, shown=frozenset({7})).block(given) is given


SCHEMA = TableSchema(7, "public", "people", tuple(replace(c, hidden=None) for c in COLUMNS), ("id",))
OTHER = replace(SCHEMA, relation_id=9, columns=(*COLUMNS[:2], *COLUMNS[3:]))
HIDES = replace(SCHEMA, columns=(*COLUMNS[:1], replace(COLUMNS[1], hidden=None), *COLUMNS[2:]))


def record(name: str, state: str, schema: TableSchema) -> TableRecord:
    return TableRecord(name, name, state, schemas=((0, schema),))  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [1, -1])
def test_a_table_that_was_renamed_and_loaded_is_hidden_as_it_is_now(order: int) -> None:
    """Both records are of one relation, in whatever order they are read."""
    removed, live = record("public.people", "removed", HIDES), record("public.members", "active", HIDES)
    plain = record("public.members", "active", SCHEMA)
    pipeline: Pipeline = Pipeline.model_construct(tables=())  # type: ignore[call-arg]  # no key is asked for
    assert hiding(pipeline, [removed, live][::order]).relations == {7: HIDES.columns}
    assert hiding(pipeline, [removed, plain][::order]).relations == {}
    assert hiding(pipeline, [removed]).relations == {7: ()}


def test_names_hide_by_the_pipeline_file_and_as_they_were_loaded() -> None:
    """One that is loaded with its values as they are shows them until its next load."""
    entry = {"name": "public.hr_pay", "columns": {"mask": {"name": "***"}}}
    entries = tuple(map(TableEntry.model_validate, ("public.hr_*", entry)))
    pipeline: Pipeline = Pipeline.model_construct(tables=entries)  # type: ignore[call-arg]
    leaf = Leaf(7, "public", "hr_pay", 7)
    live, removed = record("public.hr_pay", "active", SCHEMA.with_leaves((leaf,))), record("old.t", "removed", HIDES)
    found = pickle.loads(pickle.dumps(hiding(pipeline, [live, replace(removed, schemas=((0, OTHER),))])))
    assert found == hiding(pipeline, [live, replace(removed, schemas=((0, OTHER),))])
    assert found.shown == {7}
    assert set(map(str, found.names)) == {"public.hr_pay", "old.t"}


def test_the_cure_of_another_key_can_be_typed() -> None:
    pipeline: Any = SimpleNamespace(hash_key=lambda: KEY, source=SimpleNamespace(hash_key="PEOPLE"))
    with pytest.raises(Refused) as refused:
        key_of(pipeline, replace(SCHEMA, name="Old people", columns=COLUMNS))
    assert refused.value.where == 'public."Old people"'
    assert """--again --table 'public."Old people"' and with""" in with_file(refused.value.remedy, "shop.yaml")


def test_a_predicate_over_a_hidden_column_is_refused() -> None:
    """The source would judge the value, and the lake its mask."""
    schema = replace(HIDES, partition_by=("name",))
    with pytest.raises(Refused, match="the column name is hidden in the lake"):
        parse("name = 'Ann'", schema)
    assert parse("id = 5", schema)
