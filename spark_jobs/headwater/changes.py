"""The net effect of a batch on one table: the value that `log` computes and `lake` applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Bool = npt.NDArray[np.bool_]
    Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Deletions:
    """Of a table with `soft_delete`: the numbers of the changes that deleted rows.

    `rows`: per row of `NetChanges.rows` the change that deleted it again, -1 while it lives. `removed`: per key of
    `NetChanges.removed`. `leaves`: per truncated leaf its first TRUNCATE.
    """

    rows: Int64
    removed: Int64
    leaves: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NetChanges:
    """What one batch does to one table.

    `rows`: the rows to stand under their keys afterwards, in the table's column order. `stored[i]`: a row with that
    key must be stored already (False: must not). `unchanged`: per column, rows whose value is the stored row's.
    `origins`: key columns of the stored row for rows that take values from it, in row order, null where none is
    needed; None when no row moved. `removed`: keys of stored rows that go. `changes`: log changes behind all this.

    With `soft_delete` no row goes. `deletions`: what the log says of deleted rows, until these have become marked rows
    (`headwater.log.marks`); `emptied`: per truncated leaf LSN and commit time (us since 1970) of its first TRUNCATE:
    every stored row in it that is not among `rows` is marked with these.
    """

    rows: pa.Table
    stored: Bool
    unchanged: dict[str, Bool]
    origins: pa.Table | None
    removed: pa.Table
    changes: int
    truncated: bool = False
    truncated_leaves: tuple[int, ...] = ()
    deletions: Deletions | None = None
    emptied: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.rows.num_rows or self.removed.num_rows or self.truncated or self.truncated_leaves)
