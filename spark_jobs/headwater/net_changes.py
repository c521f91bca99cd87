"""The net effect of a batch on one table: the value that `log` computes and `lake` applies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from headwater.predicate import Predicate

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


class Parts(Protocol):
    """A net effect too large for memory, in parts on local disk that are read anew by each iteration.

    No key is in two of the parts. `write_parquet` keeps what is made of one beside them, in the same private folder and
    budget, and returns its path: the caller removes it.
    """

    def __iter__(self) -> Iterator[NetChanges]: ...
    def write_parquet(self, rows: pa.Table) -> str: ...


@dataclass(frozen=True, slots=True)
class NetChanges:
    """What one batch does to one table.

    `rows`: the rows to stand under their keys afterwards, in the table's column order. `stored[i]`: a row with that
    key must be stored already (False: must not). `unchanged`: per column, rows whose value is the stored row's.
    `origins`: key columns of the stored row for rows that take values from it, in row order, null where none is
    needed; None when no row moved. `removed`: keys of stored rows that go. `changes`: log changes behind all this.

    With `soft_delete` no row goes. `deletions`: what the log says of deleted rows, until these have become marked rows
    (`headwater.log.net.soft_delete`); `emptied`: per truncated leaf LSN and commit time (us since 1970) of its first
    TRUNCATE: every stored row in it that is not among `rows` is marked with these.

    `staged`: what was written already (`headwater.apply.staged.files.StagedRows`): then that is all, and the tables
    here are empty. `on_disk`: the same in parts, when the tables here are only views of files; whoever goes through
    `in_parts` needs the memory of one.

    `replaced`: stored rows that it is true of go, but for those among `rows`; only of a reload.
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
    on_disk: Parts | None = None
    staged: object | None = None
    replaced: Predicate | None = None

    @property
    def is_empty(self) -> bool:
        rows = self.rows.num_rows or self.removed.num_rows or self.staged is not None
        return not (rows or self.truncated or self.truncated_leaves or self.replaced)

    def in_parts(self) -> Iterable[NetChanges]:
        """The parts that it lies in; itself when it is in memory."""
        return self.on_disk if self.on_disk is not None else (self,)
