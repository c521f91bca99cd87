"""Deleted rows as marked rows: what `soft_delete` makes of the net effect of a batch.

A key that is removed becomes a row under that key whose other values are all the stored row's, with the marks: so the
apply paths put rows and remove none. Commit ends and commit times come from the batch's transactions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.arrow_types import MARKS, lake_schema
from headwater.log.blocks import Transactions
from headwater.net_changes import NetChanges
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]

SINCE_1970: Final = 946_684_800_000_000
"""Microseconds from 1970 to 2000, where PostgreSQL's times begin."""


def marked(schema: TableSchema, changes: NetChanges, transactions: Transactions) -> NetChanges:
    """`changes` of a table with `soft_delete`, with its marks, and nothing left in `removed`."""
    deletions = changes.deletions
    assert deletions is not None, "a table without soft_delete"
    rows, gone = changes.rows, changes.removed.num_rows
    by = np.concatenate([deletions.rows, deletions.removed])
    kept = {
        name: np.concatenate(
            [changes.unchanged.get(name, np.zeros(rows.num_rows, np.bool_)), np.full(gone, name not in schema.key)]
        )
        for name in (rows.column_names if gone else changes.unchanged)
    }
    return replace(
        changes,
        rows=_with_marks(schema, _with_keys(rows, changes.removed), by, transactions),
        stored=np.concatenate([changes.stored, np.ones(gone, np.bool_)]),
        unchanged={name: mask for name, mask in kept.items() if mask.any()},
        origins=_extended(changes.origins, gone),
        removed=changes.removed.slice(0, 0),
        deletions=None,
        emptied={leaf: _moment(sequence, transactions) for leaf, sequence in deletions.leaves.items()},
    )


def _with_keys(rows: pa.Table, removed: pa.Table) -> pa.Table:
    if not removed.num_rows:
        return rows
    known = set(removed.column_names)
    fields = [
        removed[field.name].cast(field.type) if field.name in known else pa.nulls(removed.num_rows, field.type)
        for field in rows.schema
    ]
    return pa.concat_tables([rows, pa.table(fields, schema=rows.schema)])


def _with_marks(schema: TableSchema, rows: pa.Table, by: Int64, transactions: Transactions) -> pa.Table:
    """`by`: per row the change that deleted it, -1 for rows that live."""
    lives = by < 0
    index = transactions.index_of(np.where(lives, 0, by))
    columns = (
        pa.array(~lives),
        pa.array(transactions.end_lsn[index], mask=lives),
        pa.array(transactions.commit_time[index] + SINCE_1970, mask=lives).cast(MARKS.types[-1]),
    )
    for field, column in zip(MARKS, columns, strict=True):
        rows = rows.append_column(field, column)
    return rows.cast(lake_schema(schema))


def _extended(origins: pa.Table | None, count: int) -> pa.Table | None:
    if origins is None or not count:
        return origins
    nulls = pa.Table.from_arrays([pa.nulls(count, kind) for kind in origins.schema.types], schema=origins.schema)
    return pa.concat_tables([origins, nulls])


def _moment(sequence: int, transactions: Transactions) -> tuple[int, int]:
    index = int(transactions.index_of(np.array([sequence]))[0])
    return int(transactions.end_lsn[index]), int(transactions.commit_time[index]) + SINCE_1970
