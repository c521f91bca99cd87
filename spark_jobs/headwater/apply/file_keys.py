"""The keys of rows in data files, in the form that an index takes: read here, or by Spark's tasks where they are many.

One thread reads and sorts one to seven million a second. Each task leaves runs in a folder of the lake that nobody else
knows, whose writer takes them one after the other: to merge them is the smaller part of the work. What a process that
was killed has left there goes a day later, with what was staged (`headwater.apply.staged.files.sweep_staged`).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import join

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.apply.by_spark.tasks import FileTasks, shared_out
from headwater.arrow_types import key_schema
from headwater.delta import storage
from headwater.delta.data_files import alive_rows, column_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.index import place_of
from headwater.delta.index.runs import sorted_run
from headwater.delta.layout import Layout
from headwater.lake.paths import key_scratch
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Keys = tuple[Codes, Int64]
"""Codes, and the places of their rows."""

MANY = 1 << 25
"""Rows from which on tasks read them: one thread takes from five seconds to half a minute."""
_OF_A_RUN = 1 << 21
_OF_A_TASK = 1 << 22


@dataclass(frozen=True, slots=True)
class Numbered:
    """A file of a table by its number in places, and which of its rows are gone."""

    number: int
    file: DataFile
    deleted: BitMap


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """Where keys are read: the table's folder, its columns, and how they lie in its files."""

    folder: str
    schema: TableSchema
    layout: Layout

    def read(self, numbered: Numbered) -> Iterator[Keys]:
        """Of the file's live rows, in parts."""
        first = 0
        for keys in column_batches(self.folder, numbered.file, key_schema(self.schema), self.layout):
            rows = alive_rows(first, keys.num_rows, numbered.deleted)
            part = keys if len(rows) == keys.num_rows else keys.take(pa.array(rows - first))
            first += keys.num_rows
            yield encode(self.schema, part), place_of(numbered.number, rows)


def runs_by_tasks(files: KeyFiles, numbered: Sequence[Numbered], tasks: FileTasks) -> Iterator[Keys] | None:
    """The keys of all of the files in runs, each in the order of its codes; no key may occur twice. None: they are for
    the caller to read, because they are few, or no task could. RunsGone while they are taken; InterruptedError when
    nobody wants them any more."""
    if sum(one.file.rows or 0 for one in numbered) < MANY:
        return None
    scratch = key_scratch(tasks.root)
    runs: list[str] = []
    try:
        storage.make_folder(scratch)
        shares = shared_out(numbered, lambda one: one.file.rows or 0, _OF_A_TASK)
        made = tasks.by_tasks_alone(_ReadKeys(files, scratch, _OF_A_RUN), shares)
        runs = list(chain.from_iterable(made or ()))
    finally:
        if not runs:
            _remove(scratch)
    return _taken(scratch, runs) if made is not None else None


class RunsGone(Exception):
    """What tasks have left cannot be read any more."""


def _taken(scratch: str, runs: Sequence[str]) -> Iterator[Keys]:
    try:
        for name in runs:
            try:
                with pa.ipc.open_file(storage.read(join(scratch, name))) as file:
                    first, *second, places = (column.combine_chunks().to_numpy() for column in file.read_all().columns)
            except (OSError, pa.ArrowException) as error:
                raise RunsGone(str(error)) from error
            yield Codes(first, *second), places
            with contextlib.suppress(OSError):
                storage.delete(join(scratch, name))
    finally:
        _remove(scratch)


def _remove(scratch: str) -> None:
    with contextlib.suppress(OSError):  # it is old one day, and swept
        storage.delete_folder(scratch)


@dataclass(frozen=True)
class _ReadKeys:
    """Writes the keys of some files as runs of at least so many; their names below `scratch`."""

    files: KeyFiles
    scratch: str
    of_a_run: int

    def __call__(self, numbered: list[Numbered]) -> list[str]:
        names: list[str] = []
        waiting: list[Keys] = []
        for keys in chain.from_iterable(map(self.files.read, numbered)):
            waiting.append(keys)
            if sum(len(places) for _, places in waiting) >= self.of_a_run:
                names.append(self._write(waiting))
        return names if not waiting else [*names, self._write(waiting)]

    def _write(self, waiting: list[Keys]) -> str:
        run = sorted_run(Codes.joined([codes for codes, _ in waiting]), np.concatenate([at for _, at in waiting]))
        waiting.clear()
        words = [run.codes.first, *([run.codes.second] if run.codes.second is not None else []), run.place]
        table = pa.table([pa.array(each) for each in words], names=[str(at) for at in range(len(words))])
        sink, name = pa.BufferOutputStream(), f"{uuid.uuid4()}.arrow"
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
        storage.write(join(self.scratch, name), sink.getvalue().to_pybytes())
        return name
