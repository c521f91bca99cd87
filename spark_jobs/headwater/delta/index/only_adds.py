"""Proof that a batch only adds rows, from the statistics of the table's files: no row needs to be looked for.

All of the batch's rows are inserts, and its least key lies above the greatest of every live file, as with a key that is
counted up. Statistics are bounds, so the proof is never wrong; where one file has none there is no proof, and the rows
are looked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.delta.delta_log import DataFile
from headwater.delta.layout import PLAIN, Layout
from headwater.net_changes import NetChanges
from headwater.schema import TableSchema


def only_adds(changes: NetChanges) -> bool:
    """Whether the log says of every row that none is stored under its key."""
    gone = changes.removed.num_rows or changes.truncated_leaves or changes.emptied or changes.replaced
    return not (changes.stored.any() or changes.unchanged or gone)


def lie_above(schema: TableSchema, rows: pa.Table, files: Iterable[DataFile], layout: Layout = PLAIN) -> bool:
    """Whether every key of `rows` is greater than all that `files` hold."""
    if len(schema.key) != 1 or not rows.num_rows:
        return False
    (name,) = schema.key
    kind = rows.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_date32(kind)):
        return False
    least = pc.min(rows[name]).as_py()
    return all((most := _greatest(file, layout.in_files(name))) is not None and most < least for file in files)


def _greatest(file: DataFile, name: str) -> Any:
    found = json.loads(file.stats or "{}").get("maxValues", {}).get(name)
    return date.fromisoformat(found) if isinstance(found, str) else found
