"""The net effect of any sequence of changes is what a table that replays them one by one comes to.

Changes are written as pgoutput messages and framed by the real framer. The model is a dict that knows nothing of
batches; the net changes are applied to the rows that were stored before, as the lake's paths do it.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.soak import examples
from headwater.errors import BadValue, HeadwaterError
from headwater.log.blocks import Block, Chunk, Held
from headwater.log.framing import XLOG_HEADER, Framer
from headwater.log.net import decoded as decoded_changes_module
from headwater.log.net import hash_parts as partitions_module
from headwater.log.net import net_effect as net_effect_module
from headwater.log.net import superseded as superseded_module
from headwater.log.net.net_effect import net_effect
from headwater.log.net.on_disk import PartsOnDisk
from headwater.log.spill import SpillFolder, SpillStore
from headwater.log.values.decode import decode_tuples
from headwater.net_changes import NetChanges
from headwater.schema import PARTITION_COLUMN, Column, Leaf, TableSchema, ValueType

INT, TEXT = ValueType("int4", "int"), ValueType("text", "string")
COLUMNS = (
    Column("note", 1, 25, -1, TEXT),
    Column("id", 2, 23, -1, INT),
    Column("big", 3, 25, -1, TEXT),
    Column("code", 4, 25, -1, TEXT),
    Column("wide", 5, 25, -1, TEXT),
)
NAMES = tuple(column.name for column in COLUMNS)
TOASTED = ("big", "wide")
ROOT = 100

Key = tuple[Any, ...]
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A kind of table: its key, whether it has leaves, and which old tuples its updates carry."""

    key: tuple[str, ...]
    leaves: tuple[int, ...] = (1,)
    full: bool = False

    @property
    def schema(self) -> TableSchema:
        partitioned = len(self.leaves) > 1
        leaves = tuple(Leaf(i, "public", f"leaf_{i}", i) for i in self.leaves)
        root = ROOT if partitioned else self.leaves[0]
        return TableSchema(
            root, "public", "t", COLUMNS, self.key, leaves, partitioned=partitioned, insert_only=not self.key
        )


SHAPES = [
    Shape(("id",)),
    Shape(("id",), full=True),
    Shape(("code", "id")),
    Shape(("id",), leaves=(1, 2, 3)),
    Shape(("id", "code"), leaves=(1, 2), full=True),
]


@dataclass
class Log:
    """Writes pgoutput messages; `model` is the table's content after them, by key."""

    shape: Shape
    framer: Framer = field(default_factory=Framer)
    model: dict[Key, Row] = field(default_factory=dict)
    history: list[dict[Key, Row]] = field(default_factory=list)
    commits: int = 0

    def __post_init__(self) -> None:
        for leaf in self.shape.leaves:
            self._describe(leaf)

    def begin(self) -> None:
        self._send(b"B" + struct.pack(">qqI", 1000 * self.commits + 990, 0, 700 + self.commits))

    def commit(self) -> None:
        self.commits += 1
        end = 1000 * self.commits
        self._send(b"C" + struct.pack(">Bqqq", 0, end - 10, end, 0))

    def key_of(self, row: Row) -> Key:
        return tuple(row[name] for name in self.shape.key)

    def insert(self, row: Row) -> None:
        self.model[self.key_of(row)] = row
        self._change(b"I" + _relation(row["leaf"]) + b"N" + _tuple(row))

    def update(self, key: Key, new: Row, unchanged: tuple[str, ...]) -> None:
        before = self.model.pop(key)
        row = {**before, **new, **{name: before[name] for name in unchanged}, "leaf": before["leaf"]}
        self.model[self.key_of(row)] = row
        old = b""
        if self.shape.full:
            old = b"O" + _tuple(before)
        elif self.key_of(row) != key:
            old = b"K" + _tuple({name: before[name] if name in self.shape.key else None for name in NAMES})
        self._change(b"U" + _relation(row["leaf"]) + old + b"N" + _tuple(row, unchanged))

    def delete(self, key: Key) -> None:
        before = self.model.pop(key)
        kind = b"O" if self.shape.full else b"K"
        old = before if self.shape.full else {n: before[n] if n in self.shape.key else None for n in NAMES}
        self._change(b"D" + _relation(before["leaf"]) + kind + _tuple(old))

    def truncate(self, relation_ids: tuple[int, ...]) -> None:
        gone = set(self.shape.leaves) if ROOT in relation_ids else set(relation_ids)
        self.model = {key: row for key, row in self.model.items() if row["leaf"] not in gone}
        body = struct.pack(">IB", len(relation_ids), 0) + b"".join(map(_relation, relation_ids))
        self._change(b"T" + body)

    def cut(self) -> Chunk:
        return self.framer.cut()

    def _change(self, message: bytes) -> None:
        self._send(message)
        self.history.append(dict(self.model))

    def _describe(self, leaf: int) -> None:
        columns = b"".join(
            bytes([column.name in self.shape.key or self.shape.full])
            + column.name.encode()
            + b"\0"
            + struct.pack(">Ii", column.type_oid, -1)
            for column in COLUMNS
        )
        name = f"public\0leaf_{leaf}\0".encode()
        self._send(b"R" + _relation(leaf) + name + b"d" + struct.pack(">H", len(COLUMNS)) + columns)

    def _send(self, message: bytes) -> None:
        self.framer.feed(b"w" + bytes(XLOG_HEADER - 1) + message)


def _relation(leaf: int) -> bytes:
    return struct.pack(">I", leaf)


def _tuple(row: Row, unchanged: tuple[str, ...] = ()) -> bytes:
    parts = [struct.pack(">h", len(COLUMNS))]
    for column in COLUMNS:
        value = row[column.name]
        if column.name in unchanged:
            parts.append(b"u")
        elif value is None:
            parts.append(b"n")
        else:
            data = struct.pack(">i", value) if column.value is INT else value.encode()
            parts.append(b"b" + struct.pack(">i", len(data)) + data)
    return b"".join(parts)


def rows() -> st.SearchStrategy[Row]:
    text = st.one_of(st.none(), st.text("xyz", max_size=3))
    return st.fixed_dictionaries(
        {"id": st.integers(0, 4), "code": st.sampled_from("ab"), "note": text, "big": text, "wide": text}
    )


@st.composite
def logs(draw: st.DrawFn, shapes: list[Shape] = SHAPES) -> Log:
    """A valid log: inserts of absent keys, changes of present ones."""
    shape = draw(st.sampled_from(shapes))
    log = Log(shape)
    for _ in range(draw(st.integers(1, 6))):
        log.begin()
        for _ in range(draw(st.integers(0, 6))):
            _operation(draw, log)
        log.commit()
    return log


def _operation(draw: st.DrawFn, log: Log) -> None:
    shape = log.shape
    what = draw(st.sampled_from(["insert", "update", "key", "delete", "again", "move", "truncate", "insert", "update"]))
    row = draw(rows()) | {"leaf": draw(st.sampled_from(shape.leaves))}
    unchanged = tuple(name for name in TOASTED if draw(st.booleans()))
    if what == "truncate":
        if draw(st.integers(0, 2)):
            return
        ids = [(leaf,) for leaf in shape.leaves] + [shape.leaves]
        log.truncate(draw(st.sampled_from(ids + ([(ROOT, *shape.leaves)] if len(shape.leaves) > 1 else []))))
    elif what == "insert" or not log.model:
        if log.key_of(row) not in log.model:
            log.insert(row)
    else:
        key = draw(st.sampled_from(sorted(log.model)))
        same_key = dict(zip(shape.key, key, strict=True))
        if what == "update":
            log.update(key, row | same_key, unchanged)
        elif what == "key" and log.key_of(row) not in log.model:
            log.update(key, row, unchanged)
        elif what == "delete":
            log.delete(key)
        elif what in ("again", "move"):
            log.delete(key)
            log.insert(row | same_key)


def applied(shape: Shape, stored: dict[Key, Row], changes: NetChanges) -> dict[Key, Row]:
    """`changes` on top of `stored`, with every promise of NetChanges checked."""
    leaves = set(changes.truncated_leaves)
    before = {} if changes.truncated else stored
    result = {key: row for key, row in before.items() if row["leaf"] not in leaves}
    keys = list(shape.key)
    removed = [tuple(row[name] for name in keys) for row in changes.removed.select(keys).to_pylist()]
    assert len(set(removed)) == len(removed)
    for key in removed:
        assert key in before, "a removed key must be stored"
        result.pop(key, None)
    origins = changes.origins.to_pylist() if changes.origins is not None else [None] * changes.rows.num_rows
    assert len(origins) == changes.rows.num_rows == len(changes.stored)
    put = set()
    for index, row in enumerate(changes.rows.to_pylist()):
        key = tuple(row[name] for name in keys)
        assert key not in put
        assert key not in removed
        put.add(key)
        if changes.stored[index]:
            assert key in before, "a row to be put over a stored one must find it"
        else:
            assert key not in before or before[key]["leaf"] in leaves, "a new row must not find a stored one"
        origin = origins[index]
        moved = origin is not None and origin[keys[0]] is not None
        taken = [name for name, mask in changes.unchanged.items() if mask[index]]
        assert taken or not moved
        for name in taken:
            source = tuple(origin[k] for k in keys) if moved and origin is not None else key
            row[name] = before[source][name]
        leaf = row.pop(PARTITION_COLUMN, shape.leaves[0])
        result[key] = {**row, "leaf": leaf}
    return result


def net(shape: Shape, chunk: Chunk, above: int) -> NetChanges:
    """The net effect of the changes whose number is `above` or higher."""
    blocks = [(block, np.asarray(block.sequence >= above)) for block in chunk.blocks]
    truncates = [truncate for truncate in chunk.truncates if truncate.sequence >= above]
    return net_effect(shape.schema, blocks, truncates, str)


@settings(
    max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(logs(), st.data())
def test_applying_the_net_effect_gives_what_replaying_every_change_gives(log: Log, data: st.DataObject) -> None:
    above = data.draw(st.integers(0, len(log.history)))
    stored = log.history[above - 1] if above else {}
    chunk = log.cut()
    changes = net(log.shape, chunk, above)
    assert applied(log.shape, stored, changes) == log.model
    if changes.is_empty:
        assert stored == log.model


@contextlib.contextmanager
def in_parts(chunk: Chunk, changes: int = 3) -> Iterator[tuple[Chunk, list[int]]]:
    """The chunk on disk, netted in parts of `changes`; and, as they are netted, the rows of each part."""
    parts: list[int] = []

    class CountedParts(PartsOnDisk):
        def add(self, net: NetChanges) -> None:
            parts.append(net.rows.num_rows)
            super().add(net)

    with (
        tempfile.TemporaryDirectory() as parent,
        SpillFolder(parent) as folder,
        patch.object(net_effect_module, "PART_CHANGES", changes),
        patch.object(net_effect_module, "PartsOnDisk", CountedParts),
    ):
        store = SpillStore(folder.path, 1 << 30)
        file = store.new_file()
        yield replace(chunk, blocks=tuple(store.write(file, list(chunk.blocks)))), parts
        assert [str(path) for path in Path(folder.path).iterdir()] == [file.path]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(logs(), st.data())
def test_in_parts_on_disk_the_net_effect_is_the_same(log: Log, data: st.DataObject) -> None:
    above = data.draw(st.integers(0, len(log.history)))
    stored = log.history[above - 1] if above else {}
    with in_parts(log.cut()) as (chunk, _):
        assert applied(log.shape, stored, net(log.shape, chunk, above)) == log.model


@pytest.mark.parametrize("toasted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_changes_are_netted_in_even_parts_moves_between_them_included(shape: Shape, toasted: bool) -> None:
    log = Log(shape)
    leaves = len(shape.leaves)
    keys = [a_row(id=n, code="ab"[n % 2], leaf=shape.leaves[n % leaves]) for n in range(600)]
    log.begin()
    for row in keys:
        log.insert(row)
    for row in keys[::3]:
        log.update(log.key_of(row), {**row, "note": "changed"}, TOASTED if toasted else ())
    for row in keys[1::3]:
        log.update(log.key_of(row), {**row, "id": row["id"] + 1000}, TOASTED if toasted else ())
    for row in keys[2::30]:
        log.delete(log.key_of(row))
    log.commit()
    with in_parts(log.cut(), 200) as (chunk, parts):
        assert applied(shape, {}, net(shape, chunk, 0)) == log.model
    assert len(parts) == 6
    assert min(parts) > max(parts) / 3


def test_keys_that_begin_and_end_alike_are_dealt_out_evenly() -> None:
    log = Log(Shape(("code",)))
    log.begin()
    for number in range(2000):
        log.insert(a_row(id=number, code=f"customer-{number:08d}-eu-west-1"))
    log.commit()
    with in_parts(log.cut(), 200) as (chunk, parts):
        assert applied(log.shape, {}, net(log.shape, chunk, 0)) == log.model
    assert len(parts) == 10
    assert min(parts) > max(parts) / 2


def test_a_part_that_is_too_large_is_dealt_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(Shape(("id",)))
    log.begin()
    for number in range(1000):
        log.insert(a_row(id=number))
    for number in range(0, 1000, 10):
        log.update((number,), a_row(id=number + 5000), TOASTED)
    log.commit()
    hashed = partitions_module._hash
    monkeypatch.setattr(partitions_module, "_hash", lambda keys, seed: hashed(keys, seed) * np.uint64(seed))
    with in_parts(log.cut(), 200) as (chunk, parts):
        assert applied(log.shape, {}, net(log.shape, chunk, 0)) == log.model
    assert max(parts) < 400
    assert len(parts) > 5


def test_values_that_moved_rows_keep_are_in_memory_for_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(Shape(("id",)))
    rows, size = 400, 5000
    log.begin()
    for number in range(rows):
        log.insert(a_row(id=number, big=f"{number:05d}" * (size // 5)))
    for number in range(rows):
        log.update((number,), a_row(id=number + rows), TOASTED)
    log.commit()
    held: list[int] = []
    netted = net_effect_module._net

    def measured(*arguments: Any) -> NetChanges:
        held.append(pa.total_allocated_bytes())
        return netted(*arguments)

    monkeypatch.setattr(net_effect_module, "_net", measured)
    with in_parts(log.cut(), 80) as (chunk, parts):
        before = pa.total_allocated_bytes()
        changes = net(log.shape, chunk, 0)
        assert applied(log.shape, {}, changes) == log.model
        del changes
    assert len(parts) == 10
    assert max(held) - before < rows * size / 3


@contextlib.contextmanager
def decoded_at_a_time() -> Iterator[list[int]]:
    """How many changes are decoded at a time."""
    counts: list[int] = []

    def counted(*arguments: Any) -> Any:
        decoded = decoded_changes_module.decode_changes(*arguments)
        counts.append(len(decoded.sequence))
        return decoded

    with (
        patch.object(net_effect_module, "decode_changes", counted),
        patch.object(superseded_module, "decode_changes", counted),
    ):
        yield counts


@pytest.mark.parametrize("toasted", [False, True])
def test_a_row_that_is_changed_again_and_again_is_netted_in_bounded_memory(toasted: bool) -> None:
    """In place; removed and put back; moved away and back; its large values changed now and then."""
    log = Log(Shape(("id",), leaves=(1, 2)))
    log.begin()
    log.insert(a_row(id=2, leaf=2))
    log.insert(a_row(id=1, big="first", wide="first"))
    log.commit()
    before = len(log.history)
    stored = log.history[-1]
    log.begin()
    for number in range(1500):
        if number % 100 == 3:
            log.update((1,), a_row(id=1, note=str(number), big=f"big {number}", wide="x"), ("wide",))
        elif number % 100 == 50:
            log.update((1,), a_row(id=3, note=str(number), big="x", wide="x"), TOASTED)
            log.update((3,), a_row(id=1, note=str(number), big="x", wide="x"), TOASTED)
        elif number % 3 or toasted:
            log.update((1,), a_row(id=1, note=str(number), big="x", wide="x"), TOASTED if toasted else ())
        else:
            log.delete((1,))
            log.insert(a_row(id=1, note=str(number), big="x", wide="y"))
    log.commit()
    with in_parts(log.cut(), 100) as (chunk, _), decoded_at_a_time() as counts:
        assert applied(log.shape, stored, net(log.shape, chunk, before)) == log.model
    assert sum(counts) > 1500
    assert max(counts) <= 200


@settings(max_examples=200, deadline=None)
@given(logs(), st.data())
def test_batches_may_be_cut_anywhere(log: Log, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log.history)), max_size=3)))
    chunk = log.cut()
    table: dict[Key, Row] = {}
    for start, end in zip([0, *cuts], [*cuts, len(log.history)], strict=True):
        blocks = [(block, np.asarray((block.sequence >= start) & (block.sequence < end))) for block in chunk.blocks]
        truncates = [truncate for truncate in chunk.truncates if start <= truncate.sequence < end]
        table = applied(log.shape, table, net_effect(log.shape.schema, blocks, truncates, str))
        assert table == (log.history[end - 1] if end else {})


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(logs(), st.data())
def test_blocks_of_one_change_give_what_one_block_gives(log: Log, data: st.DataObject) -> None:
    """As many chunks bring them, each with a description of the table of its own; some have nothing that counts."""
    above = data.draw(st.integers(0, len(log.history)))
    chunk = log.cut()
    small = tuple(
        Block(pickle.loads(pickle.dumps(block.relation)), block.load().part(block.sequence == number))
        for block in chunk.blocks
        for number in block.sequence
    )
    stored = log.history[above - 1] if above else {}
    assert applied(log.shape, stored, net(log.shape, replace(chunk, blocks=small), above)) == log.model


def test_small_blocks_of_one_table_are_decoded_together() -> None:
    log = Log(Shape(("id",)))
    blocks: list[Block] = []
    for number in range(40):
        log.begin()
        log.insert(a_row(id=number))
        log.commit()
        blocks += pickle.loads(pickle.dumps(log.cut())).blocks
    with patch.object(decoded_changes_module, "decode_tuples", wraps=decode_tuples) as decoded:
        masks = [(block, np.ones(1, dtype=np.bool_)) for block in blocks]
        assert net_effect(log.shape.schema, masks, [], str).rows.num_rows == 40
    assert [len(call.args[1]) for call in decoded.call_args_list] == [0, 40]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([Shape(()), Shape((), leaves=(1, 2))]), st.data())
def test_an_insert_only_table_is_the_multiset_of_its_inserts_since_its_truncates(
    shape: Shape, data: st.DataObject
) -> None:
    log = Log(shape)
    expected: list[Row] = []
    log.begin()
    for row in data.draw(st.lists(st.one_of(rows(), st.none()), max_size=12)):
        leaf = data.draw(st.sampled_from(shape.leaves))
        if row is None:
            everything = data.draw(st.booleans())
            log.truncate(shape.leaves if everything else (leaf,))
            expected = [] if everything else [one for one in expected if one["leaf"] != leaf]
        else:
            log.insert(row | {"leaf": leaf})
            expected.append(row | {"leaf": leaf})
    log.commit()
    chunk = log.cut()
    changes = net(shape, chunk, 0)
    with in_parts(chunk) as (spilled, _):
        again = net(shape, spilled, 0).rows.to_pylist()
    assert _counted(again) == _counted(changes.rows.to_pylist())
    found = changes.rows.to_pylist()
    leaves = [row.pop(PARTITION_COLUMN, shape.leaves[0]) for row in found]
    assert _counted([{**row, "leaf": leaf} for row, leaf in zip(found, leaves, strict=True)]) == _counted(expected)
    assert not changes.stored.any()


def _counted(found: list[Row]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.get(name) for name in (*NAMES, "leaf", PARTITION_COLUMN)) for row in found)


def a_row(**values: Any) -> Row:
    return {"id": 1, "code": "a", "note": "n", "big": "B", "wide": "W", "leaf": 1, **values}


def test_a_key_swap_through_a_temporary_key_keeps_the_unchanged_values_of_both_rows() -> None:
    shape = Shape(("id",))
    stored = {(1,): a_row(), (2,): a_row(id=2, big="B2", wide="W2")}
    log = Log(shape, model=dict(stored))
    log.begin()
    for old, new in ((1, 9), (2, 1), (9, 2)):
        log.update((old,), a_row(id=new, note=f"was {old}"), TOASTED)
    log.commit()
    changes = net(shape, log.cut(), 0)
    assert changes.origins is not None
    assert applied(shape, stored, changes) == log.model
    assert log.model[(1,)]["big"] == "B2"


def test_insert_and_partial_update_in_one_batch_need_nothing_that_is_stored() -> None:
    log = Log(Shape(("id",)))
    log.begin()
    log.insert(a_row())
    log.update((1,), a_row(note="later"), TOASTED)
    log.update((1,), a_row(id=5), TOASTED)
    log.commit()
    changes = net(log.shape, log.cut(), 0)
    assert (changes.unchanged, changes.origins, changes.removed.num_rows) == ({}, None, 0)
    assert applied(log.shape, {}, changes) == log.model


def _large_key_kept(log: Log, new: Row, *, old: bool = True) -> None:
    """An update that leaves `code` of its key out of the new tuple, as the server does when it is TOASTed."""
    before = log.model.pop(("a", 1))
    key = b"K" + _tuple({name: before[name] if name in log.shape.key else None for name in NAMES})
    log.model[log.key_of(new)] = new
    log._change(b"U" + _relation(1) + (key if old else b"") + b"N" + _tuple(new, ("code", *TOASTED)))


@pytest.mark.parametrize("new_id", [1, 5])
def test_a_key_that_is_left_out_as_unchanged_is_taken_from_the_old_tuple(new_id: int) -> None:
    shape = Shape(("code", "id"))
    others = [a_row(id=number, code="b") for number in range(20)]
    stored = {("a", 1): a_row()}
    log = Log(shape, model=dict(stored))
    log.begin()
    for row in others:
        log.insert(row)
    _large_key_kept(log, a_row(id=new_id, note="later"))
    log.commit()
    chunk = log.cut()
    assert applied(shape, stored, net(shape, chunk, 0)) == log.model
    with in_parts(chunk) as (spilled, parts):
        assert applied(shape, stored, net(shape, spilled, 0)) == log.model
    assert len(parts) >= 7


def test_a_key_that_is_left_out_without_an_old_tuple_stops() -> None:
    log = Log(Shape(("code", "id")), model={("a", 1): a_row()})
    log.begin()
    _large_key_kept(log, a_row(note="later"), old=False)
    log.commit()
    with pytest.raises(HeadwaterError, match="keeps code of its key, without the old key") as stopped:
        net(log.shape, log.cut(), 0)
    assert stopped.value.code == "protocol_error"


def test_a_value_that_the_lake_cannot_hold_is_named_with_column_and_change() -> None:
    shape = Shape(("id",))
    log = Log(shape)
    log.begin()
    log.insert(a_row(note="ok"))
    log.commit()
    block = log.cut().blocks[0]
    held = block.load()
    data = np.frombuffer(held.data.tobytes().replace(b"ok", b"\xff\xfe"), dtype=np.uint8)
    block = Block(block.relation, Held(data, held.starts, held.ends, held.sequence))
    with pytest.raises(BadValue, match=r"column note .*change 0"):
        net_effect(shape.schema, [(block, np.ones(1, dtype=np.bool_))], [], lambda sequence: f"change {sequence}")
