"""Every change of the log as a row, in the log's order: what the table beside a table with `history` receives.

Nothing is netted. A value that the log does not carry (an unchanged TOAST value) is NULL and its column is named in
`_hw_unchanged`. Blocks are decoded one by one; of large transactions, which lie on disk, the rows go back to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.arrow_types import lake_schema
from headwater.history_columns import BEFORE, COMMITTED_AT, INCARNATION, LSN, OPERATION, SEQUENCE, UNCHANGED, XID
from headwater.log.blocks import DELETE, INSERT, UPDATE, Block, Rows, Transactions, Truncate
from headwater.log.net.decoded import DecodedChanges, decode_changes
from headwater.log.net.on_disk import on_disk
from headwater.log.net.soft_delete import SINCE_1970
from headwater.log.spill import Spilled, SpillStore
from headwater.schema import PARTITION_COLUMN, TableSchema

Int64 = npt.NDArray[np.int64]

_PART_BYTES: Final = 64 << 20
"""So much of a large transaction's rows waits in memory for a file."""
_WORDS = {INSERT: "insert", UPDATE: "update", DELETE: "delete"}


def every_change(
    schema: TableSchema,
    history: TableSchema,
    incarnation: int,
    blocks: Sequence[tuple[Block, Rows]],
    truncates: Sequence[Truncate],
    transactions: Transactions,
    describe: Callable[[int], str],
) -> pa.Table:
    """The changes of `blocks` that their masks name and `truncates`, as rows of `history`, the schema of the table
    beside the one of `schema`. BadValue for a value that the lake cannot hold.

    In the log's order, but where a table with leaves or a TRUNCATE has changes on disk: `_hw_lsn` and `_hw_sequence`
    say the order.
    """
    source, wanted = schema.without_marks(), lake_schema(history)
    file = next((block.content.file for block, _ in blocks if isinstance(block.content, Spilled)), None)
    store = SpillStore.beside(file) if file is not None else None
    done: list[pa.Table] = []
    waiting: list[pa.Table] = []
    numbers: list[Int64] = []
    for number, columns in _parts(source, blocks, truncates, describe):
        columns |= _of_transactions(number, transactions)
        columns[INCARNATION] = pa.array(np.full(len(number), incarnation, dtype=np.int64))
        arrays = [columns[f.name].cast(f.type) if f.name in columns else pa.nulls(len(number), f.type) for f in wanted]
        waiting.append(pa.table(arrays, schema=wanted))
        numbers.append(number)
        if store is not None and sum(part.nbytes for part in waiting) >= _PART_BYTES:
            done.append(on_disk(pa.concat_tables(waiting), store))
            waiting = []
    table = pa.concat_tables([*done, *waiting]) if numbers else wanted.empty_table()
    order = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)
    in_order = bool(done) or not (np.diff(order) < 0).any()
    return table if in_order else table.take(pa.array(np.argsort(order, kind="stable")))


def _parts(
    schema: TableSchema,
    blocks: Sequence[tuple[Block, Rows]],
    truncates: Sequence[Truncate],
    describe: Callable[[int], str],
) -> Iterator[tuple[Int64, dict[str, pa.Array]]]:
    """Per block, and at the end for the truncates: the changes' numbers and their columns."""
    for block, mask in blocks:
        if mask.any():
            decoded = decode_changes(schema, [(block, mask)], describe)
            yield decoded.sequence, _of_rows(schema, decoded)
    emptied = [(t.sequence, leaf) for t in truncates for leaf in _emptied(schema, t)]
    if emptied:
        columns = {OPERATION: pa.array(["truncate"] * len(emptied))}
        if schema.partitioned:
            columns[PARTITION_COLUMN] = pa.array([leaf for _, leaf in emptied], pa.int64())
        yield np.array([sequence for sequence, _ in emptied], dtype=np.int64), columns


def _emptied(schema: TableSchema, truncate: Truncate) -> list[int | None]:
    """The leaves that it emptied, None for the whole table."""
    leaves, ids = {leaf.relation_id for leaf in schema.leaves}, set(truncate.relation_ids)
    if schema.relation_id in ids or leaves <= ids:
        return [None]
    return [*sorted(leaves & ids)]


def _of_transactions(sequence: Int64, transactions: Transactions) -> dict[str, pa.Array]:
    index = transactions.index_of(sequence)
    return {
        LSN: pa.array(transactions.end_lsn[index]),
        SEQUENCE: pa.array(sequence - transactions.first_sequence[index]),
        COMMITTED_AT: pa.array(transactions.commit_time[index] + SINCE_1970),
        XID: pa.array(transactions.xid[index]),
    }


def _of_rows(schema: TableSchema, decoded: DecodedChanges) -> dict[str, pa.Array]:
    """The rows' own columns, the keys from before, and what the log did not carry."""
    operation, new, old = decoded.operation, decoded.new, decoded.old
    rows = decoded.rows
    if len(new) != rows.num_rows or (np.diff(new) != 1).any():
        rows = rows.take(pa.array(np.maximum(new, 0), mask=new < 0))
    columns = {name: _flat(rows[name]) for name in rows.column_names}
    for name in schema.key:
        both = pa.concat_arrays([_flat(decoded.rows[name]), _flat(decoded.old_keys[name])])
        at = np.where(old >= 0, decoded.rows.num_rows + old, new)
        before = both.take(pa.array(np.maximum(at, 0), mask=(operation == INSERT) | (at < 0)))
        columns[BEFORE + name] = before
        # A deleted row's key stands where keys are looked for.
        columns[name] = pc.if_else(pa.array(operation == DELETE), before, columns[name])
    if schema.partitioned:
        columns[PARTITION_COLUMN] = pa.array(decoded.relation)
    columns[OPERATION] = pa.array([_WORDS[int(one)] for one in operation])
    columns[UNCHANGED] = _unchanged(decoded)
    return columns


def _unchanged(decoded: DecodedChanges) -> pa.Array:
    """Per change the columns that the log left out; null where there is no new row."""
    names, new = sorted(decoded.unchanged), decoded.new
    absent = np.zeros((len(new), len(names)), dtype=np.bool_)
    for place, name in enumerate(names):
        absent[:, place] = decoded.unchanged[name][np.maximum(new, 0)] & (new >= 0)
    offsets = np.concatenate([[0], np.cumsum(absent.sum(axis=1))]).astype(np.int32)
    values = pa.array([names[place] for place in np.nonzero(absent)[1]], pa.string())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(new < 0))


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
