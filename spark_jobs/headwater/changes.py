"""The net effect of a batch on one table: the value that `log` computes and `lake` applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NetChanges:
    """What one batch does to one table.

    `rows`: the rows to stand under their keys afterwards, in the table's column order. `stored[i]`: a row with that
    key must be stored already (False: must not). `unchanged`: per column, rows whose value is the stored row's.
    `origins`: key columns of the stored row for rows that take values from it, in row order, null where none is
    needed; None when no row moved. `removed`: keys of stored rows that go. `changes`: log changes behind all this.
    """

    rows: pa.Table
    stored: Bool
    unchanged: dict[str, Bool]
    origins: pa.Table | None
    removed: pa.Table
    changes: int
    truncated: bool = False
    truncated_leaves: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.rows.num_rows or self.removed.num_rows or self.truncated or self.truncated_leaves)
