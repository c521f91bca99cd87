"""The changes of a table as columns: operations and numbers, rows of the lake, keys of old tuples.

Every block is decoded by columns; a change must end where its message ends, and have the tuples that its operation has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.arrow_types import arrow_type, lake_schema
from headwater.errors import BadValue, HeadwaterError
from headwater.log.blocks import BLOCK_BYTES, BLOCK_CHANGES, DELETE, INSERT, UPDATE, Block, Held, Relation
from headwater.log.messages import SHOWN_OF_VALUES
from headwater.log.values.decode import (
    DecodedTuples,
    MalformedMessage,
    decode_tuples,
    mark_lost_in_partitions,
    older_values,
)
from headwater.log.values.wire import fixed
from headwater.names import yaml_key
from headwater.schema import TableSchema
from headwater.stage_clock import stage

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(slots=True)
class DecodedChanges:
    """All changes of the table in commit order; `new`/`old` are row numbers in the tables below, -1 for none."""

    operation: npt.NDArray[np.uint8]
    sequence: Int64
    relation: Int64
    new: Int64
    old: Int64
    rows: pa.Table
    old_keys: pa.Table
    unchanged: dict[str, Bool] = field(default_factory=dict)

    def at(self, which: Int64 | Bool) -> DecodedChanges:
        """These changes only, or in this order; the rows stay where they are."""
        return replace(
            self,
            operation=self.operation[which],
            sequence=self.sequence[which],
            relation=self.relation[which],
            new=self.new[which],
            old=self.old[which],
        )


@dataclass(frozen=True, slots=True)
class Tuples:
    """The tuples of one block's changes. `has_old`, `has_new`: which changes have one; an old one is decoded for its
    key only."""

    operation: npt.NDArray[np.uint8]
    has_old: Bool
    old: DecodedTuples
    has_new: Bool
    new: DecodedTuples


def read_tuples(
    schema: TableSchema, relation: Relation, held: Held, describe: Callable[[int], str], *, keys_only: bool = False
) -> Tuples:
    """Every tuple of the changes, each ending where its message ends. Columns unknown to `schema` are stepped over.

    Bytes that no server writes are an error with code `protocol_error`, which names the change.
    """
    try:
        return _read_tuples(schema, relation, held, keys_only)
    except MalformedMessage as bad:
        raise _protocol_error(schema, held, bad, describe) from bad


def _read_tuples(schema: TableSchema, relation: Relation, held: Held, keys_only: bool) -> Tuples:
    columns = {column.name: column for column in schema.columns}
    layout = [columns[c.name].sent_as(c.type_oid, c.typmod) if c.name in columns else None for c in relation.columns]
    key_layout = [column if column is not None and column.name in schema.key else None for column in layout]
    buffer = held.data
    new_starts = held.starts + 6
    operation, tuple_kind = buffer[held.starts], buffer[new_starts - 1]
    _refuse_unknown_tuples(operation, tuple_kind, held.starts)
    has_old, has_new = tuple_kind != ord("N"), operation != DELETE
    old = _as_wide(schema, decode_tuples(buffer, new_starts[has_old], key_layout))
    new_starts[has_old] = old.ends + 1
    _refuse_no_new_tuple(buffer, old.ends[has_new[has_old]], held.ends[has_new & has_old])
    new = _as_wide(schema, decode_tuples(buffer, new_starts[has_new], key_layout if keys_only else layout))
    _refuse_other_end(new.ends, held.ends[has_new])
    _fill_large_keys(schema, Tuples(operation, has_old, old, has_new, new), held.starts)
    if not keys_only:
        mark_lost_in_partitions(schema, new)
    _refuse_other_end(old.ends[~has_new[has_old]], held.ends[~has_new])
    return Tuples(operation, has_old, old, has_new, new)


@stage("decode")
def decode_changes(
    schema: TableSchema, blocks: Iterable[tuple[Block, Bool]], describe: Callable[[int], str]
) -> DecodedChanges:
    """The changes of `blocks` that their masks name. BadValue for a value that the lake cannot hold."""
    rows_parts: list[pa.Table] = []
    old_parts: list[pa.Table] = []
    unchanged_parts: list[tuple[int, dict[str, Bool]]] = []
    parts: list[tuple[npt.NDArray[np.uint8], Int64, Int64, Int64, Int64]] = []
    row_count = old_count = 0
    kind = lake_schema(schema.without_marks())
    for relation, held in _joined(blocks):
        sequence, count = held.sequence, held.changes
        tuples = read_tuples(schema, relation, held, describe)
        old, new = tuples.old, tuples.new
        _refuse_bad(schema, new, sequence[tuples.has_new], describe)
        _refuse_bad(schema, old, sequence[tuples.has_old], describe)
        new_index = np.full(count, -1, dtype=np.int64)
        new_index[tuples.has_new] = row_count + np.arange(new.rows)
        old_index = np.full(count, -1, dtype=np.int64)
        old_index[tuples.has_old] = old_count + np.arange(old.rows)
        rows_parts.append(_lake_rows(kind, schema, new, relation.relation_id))
        old_parts.append(key_rows(schema, old))
        unchanged_parts.append((new.rows, new.unchanged))
        relation_ids = np.full(count, relation.relation_id, dtype=np.int64)
        parts.append((tuples.operation, sequence, relation_ids, new_index, old_index))
        row_count += new.rows
        old_count += old.rows
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        no_rows = kind.empty_table()
        return DecodedChanges(
            empty.astype(np.uint8), empty, empty, empty, empty, no_rows, no_rows.select(list(schema.key))
        )
    operation, sequence, relation_ids, new_index, old_index = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    unchanged: dict[str, Bool] = {}
    for name in {name for _, part in unchanged_parts for name in part}:
        unchanged[name] = np.concatenate(
            [part.get(name, np.zeros(count, dtype=np.bool_)) for count, part in unchanged_parts]
        )
    rows, old_keys = pa.concat_tables(rows_parts), pa.concat_tables(old_parts)
    decoded = DecodedChanges(operation, sequence, relation_ids, new_index, old_index, rows, old_keys, unchanged)
    return decoded.at(np.argsort(sequence, kind="stable")) if (np.diff(sequence) < 0).any() else decoded


def _joined(blocks: Iterable[tuple[Block, Bool]]) -> Iterator[tuple[Relation, Held]]:
    """The changes that count; those of blocks that follow each other together, up to the size of a full block.

    Many tables give many small blocks, and each one decoded on its own costs as much as a thousand changes.
    """
    pieces: list[Held] = []
    relation: Relation | None = None
    for block, mask in blocks:
        if not mask.any():
            continue
        room = BLOCK_CHANGES - sum(p.changes for p in pieces), BLOCK_BYTES - sum(p.size for p in pieces)
        if relation is not None and (block.relation != relation or block.changes > room[0] or block.size > room[1]):
            yield relation, Held.joined(pieces)
            pieces = []
        relation = block.relation
        pieces.append(block.load().part(mask))
    if relation is not None:
        yield relation, Held.joined(pieces)


def _protocol_error(
    schema: TableSchema, held: Held, bad: MalformedMessage, describe: Callable[[int], str]
) -> HeadwaterError:
    change = max(int(np.searchsorted(held.starts, bad.position, side="right")) - 1, 0)
    begins = held.data[held.starts[change] :][:SHOWN_OF_VALUES].tobytes().hex()
    return HeadwaterError(
        f"{describe(int(held.sequence[change]))}: {bad.message}; first bytes of the change {begins}",
        code="protocol_error",
        where=f"{schema.schema}.{schema.name}",
        remedy="report this as a bug",
    )


def _refuse_unknown_tuples(operation: npt.NDArray[np.uint8], kind: npt.NDArray[np.uint8], starts: Int64) -> None:
    """Insert has a new tuple, Delete an old one or its key, Update may have all three."""
    new, old = kind == ord("N"), (kind == ord("K")) | (kind == ord("O"))
    known = ((operation == INSERT) & new) | ((operation == DELETE) & old) | ((operation == UPDATE) & (new | old))
    if not known.all():
        raise MalformedMessage("a change without the tuple that its operation has", int(starts[np.argmin(known)]))


def _refuse_no_new_tuple(buffer: npt.NDArray[np.uint8], at: Int64, ends: Int64) -> None:
    """Behind an Update's old tuple stands the mark of its new one."""
    there = at < ends
    there[there] = buffer[at[there]] == ord("N")
    if not there.all():
        raise MalformedMessage("an update without a new tuple", int(at[np.argmin(there)]))


def _refuse_other_end(ends: Int64, expected: Int64) -> None:
    if not np.array_equal(ends, expected):
        row = int(np.argmax(ends != expected))
        raise MalformedMessage(f"a change that ends {ends[row] - expected[row]} bytes off", int(ends[row]))


def _fill_large_keys(schema: TableSchema, tuples: Tuples, starts: Int64) -> None:
    """A key so large that it is TOASTed, and kept by an update, is only in the old tuple, which the server then always
    sends (heapam.c, ExtractReplicaIdentity). What a move between parts has made an insert of stays unchanged here."""
    new, old = tuples.new, tuples.old
    for name in schema.key:
        unchanged = new.unchanged.pop(name, None)
        if unchanged is None:
            continue
        old_row = np.where(tuples.has_old, np.cumsum(tuples.has_old) - 1, -1)[tuples.has_new]
        left = unchanged & (old_row < 0)
        lacking = left & (tuples.operation[tuples.has_new] == UPDATE)
        if lacking.any():
            at = int(starts[tuples.has_new][np.argmax(lacking)])
            raise MalformedMessage(f"an update that keeps {name} of its key, without the old key", at)
        places = np.where(unchanged & ~left, new.rows + old_row, np.arange(new.rows))
        new.columns[name] = pa.concat_arrays([new.columns[name], old.columns[name]]).take(pa.array(places))
        if left.any():
            new.unchanged[name] = left


def _as_wide(schema: TableSchema, decoded: DecodedTuples) -> DecodedTuples:
    """Values of changes that are older than a wider type, as they would be sent now."""
    for column in schema.columns:
        if column.narrower and column.name in decoded.columns:
            decoded.columns[column.name] = decoded.columns[column.name].cast(arrow_type(column.value))
    return decoded


def _lake_rows(kind: pa.Schema, schema: TableSchema, decoded: DecodedTuples, relation_id: int) -> pa.Table:
    # A change that is older than a column has it as all rows had that were there when it was added.
    arrays = [
        decoded.columns[column.name] if column.name in decoded.columns else older_values(column, decoded.rows)
        for column in schema.columns
    ]
    if schema.partitioned:
        arrays.append(fixed(pa.int64(), np.full(decoded.rows, relation_id, dtype=np.int64), None))
    return pa.Table.from_arrays(arrays, schema=kind)


def key_rows(schema: TableSchema, decoded: DecodedTuples) -> pa.Table:
    return pa.Table.from_arrays([decoded.columns[name] for name in schema.key], names=list(schema.key))


def _refuse_bad(schema: TableSchema, decoded: DecodedTuples, sequence: Int64, describe: Callable[[int], str]) -> None:
    if not decoded.bad:
        return
    name, row = decoded.bad[0]
    raise BadValue(
        f"column {name} holds a value that the lake's type {schema.column(name).value.lake} cannot hold "
        f"({describe(int(sequence[row]))})",
        where=f"{schema.schema}.{schema.name}",
        remedy=f'set on_bad_value: {{{yaml_key(name)}: "null"}} or string in the pipeline file, '
        "then load the table again",
    )
