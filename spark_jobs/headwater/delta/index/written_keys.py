"""The keys of the rows that a commit writes, kept until the commit is there and the index takes them. Many of them wait
on local disk, which is no part of the lake."""

from __future__ import annotations

import tempfile
from typing import IO

import numpy as np
import numpy.typing as npt

from headwater.delta.index.codes import Codes, UInt64

_IN_MEMORY = 1 << 21
"""Keys beyond so many wait on local disk."""


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

    def take(self, numbers: npt.NDArray[np.int64] | None) -> Codes:
        """The codes of the rows `numbers`; of all rows (None)."""
        if not self._on_disk:
            self._held = [Codes.joined(self._held)]
            return self._held[0] if numbers is None else self._held[0].take(numbers)
        return Codes(*(_read(file, numbers) for file in self._on_disk))

    def _spill(self) -> None:
        codes, self._held = Codes.joined(self._held), []
        words = [codes.first] if codes.second is None else [codes.first, codes.second]
        if not self._on_disk:
            # They have no names: they end with this object, however the process ends.
            self._on_disk = [tempfile.TemporaryFile() for _ in words]  # noqa: SIM115
        for file, values in zip(self._on_disk, words, strict=True):
            file.write(np.ascontiguousarray(values).data)


def _read(file: IO[bytes], numbers: npt.NDArray[np.int64] | None) -> UInt64:
    file.flush()
    values: UInt64 = np.memmap(file, dtype=np.uint64, mode="r")
    return np.array(values) if numbers is None else values[numbers]
