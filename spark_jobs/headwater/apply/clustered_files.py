"""Files of a clustered table made into one run: the rows that are alive, in one order, in several files.

The order is found by the clustering columns alone; then the files are written one after the other, each from the rows
of all sources that it takes. Memory holds these columns, the order, and the rows of one new file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.delta.clustering import in_order, new_run, run_of
from headwater.delta.data_files import alive_rows, live_batches, read_rows, write_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.index.codes import Codes, encode
from headwater.delta.layout import Layout
from headwater.delta.new_files import discard
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]

_FILE_BYTES = 16 << 20
"""Of a file of a run, in Parquet."""
_SLICE = 64 * 1024


def rewrite_in_order(
    folder: str,
    schema: TableSchema,
    sources: list[tuple[DataFile, BitMap]],
    kind: pa.Schema,
    layout: Layout,
    still_wanted: Callable[[], None],
) -> tuple[list[tuple[DataFile, Codes | None]], Int64]:
    """The new files with the codes of their keys, and of each row that was alive, in the order of `sources`, its place
    among the new ones. `sources`: with the rows that are gone; `kind`: all columns of the table."""
    wanted = pa.schema([kind.field(name) for name in schema.cluster_by])
    columns = [part for file, gone in sources for part in live_batches(folder, file, gone, wanted, layout)]
    still_wanted()
    order = in_order(pa.concat_tables([wanted.empty_table(), *columns]), schema.cluster_by)
    del columns
    rows = _Rows(folder, sources, kind, layout)
    # One file of a run that is made anew for what is gone of it stays in its run.
    runs = {run_of(file.name) for file, _ in sources}
    run = (runs.pop() if len(runs) == 1 else "") or new_run()
    size = sum(file.size for file, _ in sources)
    count = max(1, min(round(size / _FILE_BYTES), len(order)))
    done: list[tuple[DataFile, Codes | None]] = []
    try:
        for numbers in np.array_split(order, count):
            still_wanted()
            part = rows.take(numbers)
            codes = encode(schema, part.select(list(schema.key))) if schema.key else None
            done.append((write_batches(folder, kind, _slices(part), layout, run=run), codes))
    except BaseException:
        discard(folder, [file for file, _ in done])
        raise
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order), dtype=np.int64)
    return done, places


def _slices(rows: pa.Table) -> Iterator[pa.Table]:
    for first in range(0, max(1, rows.num_rows), _SLICE):
        yield rows.slice(first, _SLICE)


class _Rows:
    """The live rows of several files under numbers from 0 on."""

    def __init__(self, folder: str, sources: list[tuple[DataFile, BitMap]], kind: pa.Schema, layout: Layout) -> None:
        self._folder, self._sources, self._kind, self._layout = folder, sources, kind, layout
        self._alive = [alive_rows(0, file.rows or 0, gone) for file, gone in sources]
        self._first = np.cumsum([0, *map(len, self._alive)])

    def take(self, numbers: Int64) -> pa.Table:
        """These rows, in this order."""
        parts: list[pa.Table] = [self._kind.empty_table()]
        found: list[Int64] = [np.zeros(0, dtype=np.int64)]  # which of `numbers` the rows of each part are
        of = np.searchsorted(self._first, numbers, side="right") - 1
        for index, (file, _) in enumerate(self._sources):
            at = np.flatnonzero(of == index)
            if not len(at):
                continue
            stored = self._alive[index][numbers[at] - self._first[index]]
            for here, rows in read_rows(self._folder, file, stored, self._kind, self._layout):
                parts.append(rows)
                found.append(at[here])
        taken = np.concatenate(found)
        return pa.concat_tables(parts).take(pa.array(np.argsort(taken)))
