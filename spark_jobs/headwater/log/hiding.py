"""Values that nobody may find in the lake or on disk: their hash or their mask, in their place, before anything else.

What a load reads is hidden when it has been decoded, in memory. What the log brings is hidden in the reader's own
process when a block is made, since a block may be spilled, staged, or kept in the lake: from there on a tuple holds
the hash as a text, and everything behind works on that. A table whose log shows other columns than those it was loaded
with is not guessed at, names may have changed places: its tuples are emptied, and it is suspended for its columns.
The same is done with an unknown relation that has the name of a table with hidden columns: a publication of a DBA may
hold the table before its load, or after it was made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.hidden import hashed
from headwater.log.blocks import DELETE, Block, Bytes, Held, Int64, Relation
from headwater.log.values.decode import DecodedTuples, MalformedMessage, tuple_fields
from headwater.log.values.wire import Mask
from headwater.names import TableName
from headwater.schema import Column

_NOT_TEXT: Final = b"\xff"
"""In place of bytes that are no text: nor is this, so that the value is as bad as it was."""
_HEADER: Final = 6
"""Operation, relation id, and the mark of the first tuple."""


@dataclass(frozen=True, slots=True)
class Hiding:
    """What is hidden of which relations: all columns of each that hides any, in the log's order. `key`: secret.

    `names`: nothing is shown of a relation with one of these that is neither in `relations` nor among `shown`.
    """

    key: bytes = field(default=b"", repr=False)
    relations: Mapping[int, tuple[Column, ...]] = field(default_factory=dict)
    names: frozenset[TableName] = frozenset()
    shown: frozenset[int] = frozenset()

    def block(self, block: Block) -> Block:
        """The block with nothing in it that is to be hidden. MalformedMessage for bytes that no server writes."""
        relation = block.relation
        columns = self.relations.get(relation.relation_id)
        if columns is None:
            if relation.relation_id in self.shown or TableName(relation.schema, relation.name) not in self.names:
                return block
            # Under no column: if it is a table's after all, the table is suspended, and the tuples are not read.
            return Block(replace(relation, columns=()), _emptied(block.load()))
        held = block.load()
        if not _shows(relation, columns):
            return replace(block, content=_emptied(held))
        edits = _Edits()
        ends = self._tuples(edits, held.data, held.starts + _HEADER, columns)
        is_old = held.data[held.starts + _HEADER - 1] != ord("N")
        second = is_old & (held.data[held.starts] != DELETE)
        self._tuples(edits, held.data, ends[second] + 1, columns)
        return replace(block, content=edits.applied(held))

    def _tuples(self, edits: _Edits, buffer: Bytes, at: Int64, columns: Sequence[Column]) -> Int64:
        """What replaces the hidden values of the tuples at `at`; where these end."""
        at = at + 2
        if not len(at):
            return at
        for column in columns:
            found = tuple_fields(buffer, at)
            if column.hidden is not None:
                there = np.flatnonzero(found.lengths >= 0)
                try:
                    texts, bad = found.converter(column)(column.value, buffer, found.starts, found.lengths)
                    shown = self._hidden(column, texts, bad)
                except Exception as error:  # its words may be the value's
                    where = error.position if isinstance(error, MalformedMessage) else int(at.min())
                    raise MalformedMessage(f"a value of column {column.name}", where) from None
                edits.add(found.at[there], found.ends[there], shown.take(pa.array(there)))
            at = found.ends
        return at

    def _hidden(self, column: Column, texts: pa.Array, bad: Mask | None) -> pa.Array:
        shown = hide(column, self.key, texts).cast(pa.binary())
        return shown if bad is None else pc.if_else(pa.array(bad), pa.scalar(_NOT_TEXT), shown)


def hide(column: Column, key: bytes, texts: pa.Array) -> pa.Array:
    """What the lake has in place of these texts of the column's values."""
    if column.hidden is None:
        return texts
    if column.hidden.way == "mask":
        return pc.if_else(pc.is_valid(texts), pa.scalar(column.hidden.text), pa.scalar(None, pa.string()))
    each = texts.dictionary_encode()
    digests = [hashed(key, text.encode()) for text in each.dictionary.to_pylist()]
    return pa.array(digests, pa.string()).take(each.indices)


def hide_columns(columns: Iterable[Column | None], key: bytes, decoded: DecodedTuples) -> None:
    """Of rows as a load reads them."""
    for column in columns:
        if column is not None and column.hidden is not None:
            decoded.columns[column.name] = hide(column, key, decoded.columns[column.name])


def _shows(relation: Relation, columns: Sequence[Column]) -> bool:
    seen = [(column.name, column.type_oid, column.typmod) for column in relation.columns]
    return seen == [(column.name, column.type_oid, column.typmod) for column in columns]


def _emptied(held: Held) -> Held:
    """The same changes, of tuples without a column."""
    operations = held.data[held.starts]
    changes = [bytes([operation, 0, 0, 0, 0]) + (b"K" if operation == DELETE else b"N") for operation in operations]
    data = b"".join(change + b"\0\0" for change in changes)
    starts = np.arange(len(changes), dtype=np.int64) * (_HEADER + 2)
    return Held(np.frombuffer(data, dtype=np.uint8), starts, starts + _HEADER + 2, held.sequence)


class _Edits:
    """Values that give way to texts: where each begins, with its kind byte, and ends."""

    def __init__(self) -> None:
        self._begins: list[Int64] = []
        self._ends: list[Int64] = []
        self._texts: list[bytes] = []

    def add(self, begins: Int64, ends: Int64, texts: pa.Array) -> None:
        self._begins.append(begins)
        self._ends.append(ends)
        self._texts += texts.to_pylist()

    def applied(self, held: Held) -> Held:
        if not self._texts:
            return held
        begins, ends = np.concatenate(self._begins), np.concatenate(self._ends)
        order = np.argsort(begins)
        begins, ends = begins[order], ends[order]
        values = [b"t" + len(text).to_bytes(4, "big") + text for text in (self._texts[i] for i in order.tolist())]
        pieces: list[bytes | memoryview] = []
        old, at = held.data.data, 0
        for begin, end, value in zip(begins.tolist(), ends.tolist(), values, strict=True):
            pieces += [old[at:begin], value]
            at = end
        pieces.append(old[at:])
        grown = np.fromiter(map(len, values), dtype=np.int64, count=len(values)) - (ends - begins)
        shifts = np.concatenate([[0], np.cumsum(grown)])
        starts, stops = (place + shifts[np.searchsorted(begins, place)] for place in (held.starts, held.ends))
        return Held(np.frombuffer(b"".join(pieces), dtype=np.uint8), starts, stops, held.sequence)
