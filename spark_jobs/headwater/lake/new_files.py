"""The new data files of one commit: rows of any number as files of bounded size, and the keys that went into them.

What is written here belongs to nothing until a commit adds it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from headwater.lake.data_files import write_batches
from headwater.lake.delta_log import DataFile
from headwater.lake.key_codes import Codes, UInt64

FILE_BYTES = 256 << 20
"""A file takes no further part past so many bytes of Arrow: in Parquet they are a half to a fifth."""
_IN_MEMORY = 1 << 21
"""Keys beyond so many wait on local disk."""
_WORD_BYTES = 8


def write_files(folder: str, schema: pa.Schema, batches: Iterable[pa.Table]) -> list[DataFile]:
    """Write the rows as new files; none when there are no rows. All of them go again when one fails."""
    rest = (batch for batch in batches if batch.num_rows)
    files: list[DataFile] = []
    try:
        while (first := next(rest, None)) is not None:
            files.append(write_batches(folder, schema, _one_file(first, rest)))
    except BaseException:
        remove_files(folder, files)
        raise
    return files


def remove_files(folder: str, files: Sequence[DataFile]) -> None:
    """No commit has named them, and none will."""
    for file in files:
        (Path(folder) / file.name).unlink(missing_ok=True)


def _one_file(first: pa.Table, rest: Iterator[pa.Table]) -> Iterator[pa.Table]:
    size = 0
    for batch in chain([first], rest):
        yield batch
        size += batch.nbytes
        if size >= FILE_BYTES:
            return


class WrittenKeys:
    """The codes of rows, numbered in the order in which they were written: first all are added, then some are taken."""

    def __init__(self) -> None:
        self._held: list[Codes] = []
        self._count = 0
        self._on_disk: list[IO[bytes]] = []

    def add(self, codes: Codes) -> None:
        self._count += len(codes)
        self._held.append(codes)
        if self._on_disk or self._count > _IN_MEMORY:
            self._spill()

    def take(self, first: int, count: int) -> Codes:
        """The codes of `count` rows from the row `first` on."""
        if not self._on_disk:
            self._held = [Codes.joined(self._held)]
            return self._held[0].take(np.arange(first, first + count))
        return Codes(*(_read(file, first, count) for file in self._on_disk))

    def _spill(self) -> None:
        codes, self._held = Codes.joined(self._held), []
        words = [codes.first] if codes.second is None else [codes.first, codes.second]
        if not self._on_disk:
            # They have no names: they end with this object, however the process ends.
            self._on_disk = [tempfile.TemporaryFile() for _ in words]  # noqa: SIM115
        for file, values in zip(self._on_disk, words, strict=True):
            file.write(np.ascontiguousarray(values).data)


def _read(file: IO[bytes], first: int, count: int) -> UInt64:
    file.seek(first * _WORD_BYTES)
    return np.frombuffer(file.read(count * _WORD_BYTES), dtype=np.uint64)
