"""New rows of a table as data files: one, or one for each partition that they touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.delta import storage
from headwater.delta.data_files import NewFile, gathered, write_batches
from headwater.delta.deletion_vectors import vector_file
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import Layout
from headwater.delta.partition_values import folder_of, to_text

Int64 = npt.NDArray[np.int64]
Values = tuple[Any, ...]

_FILE_BYTES = 256 << 20
"""A file takes no further part past so many bytes of Arrow: in Parquet they are a half to a fifth."""
_RUN_FILE_BYTES = 64 << 20
"""Of a file of a run: the more files, the fewer rows are read in vain."""
_OPEN_FILES = 64
"""Partitions whose files are open at the same time; a row group of each is in memory."""


@dataclass(frozen=True, slots=True)
class Written:
    """A new file, and which of the rows that were written it holds, by number in their order."""

    file: DataFile
    numbers: Int64


@dataclass(slots=True)
class _Open:
    file: NewFile
    numbers: list[Int64] = field(default_factory=list)
    size: int = 0

    def finish(self) -> Written:
        return Written(self.file.finish(), np.concatenate(self.numbers))


def write_rows(
    folder: str, schema: pa.Schema, batches: Iterable[pa.Table], layout: Layout, run: str = ""
) -> list[Written]:
    """Write `batches` as new files of the table, of bounded size. As few as can be for each partition; more where rows
    of more than sixty-four partitions come mixed in several parts. `run`: which they are of together, where the table
    is clustered. NameTooLong for a value that cannot be the name of a folder."""
    batches = (batch for batch in batches if batch.num_rows)
    if not layout.partition_by:
        return _files(folder, schema, iter(batches), layout, run)
    open_: dict[Values, _Open] = {}
    done: list[Written] = []
    first = 0
    try:
        for batch in gathered(batches):
            for values, numbers in _partitions(batch, layout.partition_by):
                here = open_.pop(values, None)
                if here is None and len(open_) >= _OPEN_FILES:
                    done.append(open_.pop(next(iter(open_))).finish())
                if here is None:
                    here = _Open(_new_file(folder, schema, layout, values))
                open_[values] = here  # the last one now: the first is the one that has waited longest
                rows = batch.take(pa.array(numbers))
                here.file.write(rows)
                here.numbers.append(first + numbers)
                here.size += rows.nbytes
                if here.size >= _FILE_BYTES:
                    done.append(open_.pop(values).finish())
            first += batch.num_rows
        done += storage.side_by_side(folder, [here.finish for here in open_.values()])
        return done
    except BaseException:
        for left in open_.values():
            left.file.discard()
        discard(folder, [written.file for written in done])
        raise


def _files(folder: str, schema: pa.Schema, rest: Iterator[pa.Table], layout: Layout, run: str) -> list[Written]:
    """Files of bounded size, one after the other."""
    done: list[Written] = []
    rows = 0
    try:
        while (first := next(rest, None)) is not None:
            most = _RUN_FILE_BYTES if run else _FILE_BYTES
            file = write_batches(folder, schema, _one_file(first, rest, most), layout, run=run)
            numbers = np.arange(rows, rows + (file.rows or 0))
            rows += len(numbers)
            done.append(Written(file, numbers))
    except BaseException:
        discard(folder, [written.file for written in done])
        raise
    return done


def _one_file(first: pa.Table, rest: Iterator[pa.Table], most: int) -> Iterator[pa.Table]:
    size = 0
    for batch in chain([first], rest):
        yield batch
        size += batch.nbytes
        if size >= most:
            return


def discard(folder: str, files: Iterable[DataFile]) -> None:
    """Remove files that no commit has added."""
    for file in files:
        storage.delete(file.in_folder(folder))


def discard_vectors(folder: str, files: Iterable[DataFile]) -> None:
    """Remove the files of their deletion vectors, which are new and which no commit has named."""
    stored = {vector_file(folder, file.vector) for file in files if file.vector is not None}
    for place in stored - {None}:
        storage.delete(str(place))


def _new_file(folder: str, schema: pa.Schema, layout: Layout, values: Values) -> NewFile:
    named = dict(zip(layout.partition_by, values, strict=True))
    texts = {layout.in_files(name): to_text(value) for name, value in named.items()}
    # Where names are mapped, folders say nothing: nobody may read values from them.
    return NewFile(folder, schema, layout, texts, folder_of(named) if not layout.physical else "")


def _partitions(batch: pa.Table, partition_by: tuple[str, ...]) -> Iterator[tuple[Values, Int64]]:
    """The values of each partition that occurs, and the numbers of its rows in order."""
    group = np.zeros(batch.num_rows, dtype=np.int64)
    values: list[list[Any]] = []
    columns: list[Int64] = []
    for name in partition_by:
        encoded = batch[name].combine_chunks().dictionary_encode(null_encoding="encode")
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        values.append(encoded.dictionary.to_pylist())
        columns.append(codes)
        # Numbered anew, so that the product of the columns' sizes stays within 64 bits.
        group = np.unique(group * len(values[-1]) + codes, return_inverse=True)[1].reshape(-1)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    for numbers in np.split(order, starts[1:]) if len(order) else []:
        yield tuple(of[int(codes[numbers[0]])] for of, codes in zip(values, columns, strict=True)), numbers
