"""Values that rows kept when they moved to a key of another part: told part by part, and asked for by the number of the
change that moved the row.

Memory holds some numbers per such change; the values lie in files, which nobody else can find.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.log.net.kept_values import Lenders, followed
from headwater.log.net.on_disk import on_disk
from headwater.log.spill import SpillStore
from headwater.log.values.wire import fixed

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]  # half the memory
Bool = npt.NDArray[np.bool_]


class MovedValues:
    """`numbers`: of the changes, ascending; `names`: the columns that they may have left out. First every part's share
    is added, then it may be asked."""

    def __init__(self, numbers: Int64, names: Iterable[str], store: SpillStore) -> None:
        self.numbers = numbers
        self.names = sorted(names)
        self._store = store
        count = len(numbers)
        self._has = {name: np.zeros(count, dtype=np.bool_) for name in self.names}
        self._parent: Int32 = np.arange(count, dtype=np.int32)
        self._part, self._place = (np.zeros(count, dtype=np.int32) for _ in range(2))
        self._tables: list[pa.Table] = []

    def add(self, numbers: Int64, lenders: Lenders, origins: pa.Table, rows: pa.Table) -> None:
        """A part tells of the rows that the changes `numbers` took away from it. `origins`: the keys of the stored rows
        that have what the part has not; `rows`: the part's new rows."""
        at = np.searchsorted(self.numbers, numbers)
        self._part[at], self._place[at] = len(self._tables), np.arange(len(at))
        linked = lenders.move >= 0
        self._parent[at[linked]] = np.searchsorted(self.numbers, lenders.move[linked])
        # Key columns by their places: a large value may be of a column of any name.
        columns = dict(zip(map(str, range(origins.num_columns)), origins.columns, strict=True))
        for name in self.names:
            lending = lenders.rows[name]
            self._has[name][at] = lending >= 0
            columns["value " + name] = rows[name].take(fixed(pa.int64(), lending, lending >= 0))
        self._tables.append(on_disk(pa.table(columns), self._store))

    def values(self, name: str, numbers: Int64) -> tuple[Int64, pa.ChunkedArray]:
        """Of which of the changes the batch has the value of `name`, and these values."""
        has = self._has[name]
        giving = followed(np.where(has, np.arange(len(has), dtype=np.int32), self._parent))
        target = giving[np.searchsorted(self.numbers, numbers)]
        found = np.flatnonzero(has[target])
        order, taken = self._taken(["value " + name], target[found])
        return found[order], taken.column(0)

    def origins(self, numbers: Int64, keys: pa.Schema) -> tuple[Int64, pa.Table]:
        """The keys under which the rows were stored before the batch; each of which of the changes."""
        target = followed(self._parent)[np.searchsorted(self.numbers, numbers)]
        order, taken = self._taken([str(place) for place in range(len(keys))], target)
        return order, taken.rename_columns(keys.names)

    def _taken(self, columns: list[str], target: npt.NDArray[np.integer]) -> tuple[Int64, pa.Table]:
        """File by file, and in which order that is: to bring large values into another one copies them once more."""
        part = self._part[target]
        tables = [self._tables[0].select(columns).schema.empty_table()]
        for number in np.unique(part).tolist():
            places = self._place[target[part == number]].astype(np.int64)
            tables.append(self._tables[number].select(columns).take(fixed(pa.int64(), places, None)))
        return np.argsort(part, kind="stable"), pa.concat_tables(tables)
