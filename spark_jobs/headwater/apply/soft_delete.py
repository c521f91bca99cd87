"""Marked rows on the direct path: a row that the source has deleted stays where its key is found, with its marks.

To the log such a row is not there: an update or delete that meets it has diverged, an insert makes the key live again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.apply.live_table import LiveTable
from headwater.arrow_types import MARKS, lake_schema
from headwater.delta.data_files import live_batches
from headwater.net_changes import NetChanges
from headwater.schema import DELETED, TableSchema

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def are_marked(state: LiveTable, schema: TableSchema, places: Int64) -> Bool:
    """Which of the rows at `places` are deleted at the source."""
    found = np.zeros(len(places), dtype=np.bool_)
    if schema.soft_delete:
        for here, rows in state.rows_at(places, pa.schema([MARKS.field(DELETED)])):
            found[here] = np.array(rows[DELETED], dtype=np.bool_)
    return found


def end_deleted(changes: NetChanges) -> Bool:
    """Which of the batch's rows are deleted at its end."""
    if DELETED not in changes.rows.column_names:
        return np.zeros(changes.rows.num_rows, dtype=np.bool_)
    return np.array(changes.rows[DELETED], dtype=np.bool_)


def others_marked(state: LiveTable, schema: TableSchema, places: Int64, moment: tuple[int, int]) -> Iterator[pa.Table]:
    """Every row that is not at `places`, deleted at `moment` (LSN, us since 1970) unless it was before; in parts."""
    taken = state.deletions(places)
    for name, file in state.snapshot.files.items():
        gone = taken[name] if name in taken else state.deleted_rows(name)
        for rows in live_batches(state.snapshot.folder, file, gone, lake_schema(schema), state.layout):
            yield _marked(rows, moment)


def _marked(rows: pa.Table, moment: tuple[int, int]) -> pa.Table:
    before = rows[DELETED]
    for field, value in zip(MARKS, (True, *moment), strict=True):
        mark = pa.scalar(value, pa.int64()).cast(field.type) if field.name != DELETED else pa.scalar(True)
        column = pc.if_else(before, rows[field.name], mark)
        rows = rows.set_column(rows.column_names.index(field.name), field, column)
    return rows
