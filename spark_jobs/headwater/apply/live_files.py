"""The live files of a table by their numbers, and which of their rows are gone.

The place of a row (`headwater.delta.index.index`) is the number of its file and its own number in there. Each number is
given once: places in files that are not live any more lead nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from headwater.delta.deletion_vectors import read_vector
from headwater.delta.delta_log import DataFile, Snapshot
from headwater.delta.index.cache import Manifest
from headwater.delta.index.index import NOWHERE, file_of

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_FEW = 100


@dataclass(slots=True)
class LiveFile:
    """`number`: its name in places."""

    number: int
    file: DataFile
    deleted: BitMap | None = None  # None: not read yet


class LiveFiles:
    """Of the table at `snapshot`, which goes on in place. None are known before `follow`, or `restore` and `follow`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._by_name: dict[str, LiveFile] = {}
        self._by_number: list[LiveFile | None] = []
        self._alive = bytearray()  # the same as ones and zeros

    def __iter__(self) -> Iterator[LiveFile]:
        return iter(self._by_name.values())

    @property
    def numbers(self) -> int:
        """How many have been given."""
        return len(self._by_number)

    @property
    def named(self) -> tuple[tuple[int, str, int], ...]:
        """As of `Manifest.files`."""
        return tuple((live.number, name, live.file.deleted) for name, live in self._by_name.items())

    def alive(self) -> Bool:
        """Of each number, whether its file is live; as it is now."""
        return np.frombuffer(bytes(self._alive), dtype=np.bool_)

    def are_live(self, numbers: Int64) -> Bool:
        return np.frombuffer(self._alive, dtype=np.bool_)[numbers]

    def add(self, file: DataFile, deleted: BitMap | None) -> LiveFile:
        live = LiveFile(len(self._by_number), file, deleted)
        self._by_number.append(live)
        self._alive.append(1)
        self._by_name[file.name] = live
        return live

    def leave_out(self, count: int) -> int:
        """The first of `count` numbers that are given to nobody but files that `take` brings."""
        first = self.numbers
        self._by_number += [None] * count
        self._alive.extend(bytes(count))
        return first

    def take(self, others: Iterable[LiveFile]) -> None:
        """Files with numbers that were left out for them."""
        for live in others:
            self._by_number[live.number], self._alive[live.number] = live, 1
            self._by_name[live.file.name] = live

    def restore(self, manifest: Manifest) -> None:
        """The numbers that an earlier driver has given; `follow` finds out what is new."""
        self._by_number = [None] * manifest.numbers
        self._alive = bytearray(manifest.numbers)
        for number, name, deleted in manifest.files:
            file = self._snapshot.files.get(name)
            # Rows that were deleted and are not any more: their entries may have been superseded since.
            if file is not None and file.deleted >= deleted:
                self._by_name[name] = self._by_number[number] = LiveFile(number, file)
                self._alive[number] = 1

    def follow(self, known: Mapping[str, BitMap]) -> list[LiveFile]:
        """Come in step with the snapshot; the files that are new. `known`: deleted rows by file, where they are."""
        files = self._snapshot.files
        for name in [name for name in self._by_name if name not in files]:
            # Should the same file come back one day, it is a new one here: its entries would be older than others'.
            number = self._by_name.pop(name).number
            self._by_number[number], self._alive[number] = None, 0
        new = []
        for name, file in files.items():
            live = self._by_name.get(name)
            if live is None:
                new.append(self.add(file, None))
            elif live.file is not file:
                live.file, live.deleted = file, known.get(name)
        return new

    def deleted_in(self, live: LiveFile) -> BitMap:
        """Not to be changed."""
        if live.deleted is None:
            live.deleted = deleted_rows(self._snapshot, live.file)
        return live.deleted

    def deleted_under(self, name: str) -> BitMap:
        """Of a file of the snapshot, whether it was met here before or not."""
        live = self._by_name.get(name)
        return self.deleted_in(live) if live is not None else deleted_rows(self._snapshot, self._snapshot.files[name])

    def by_file(self, places: Int64) -> Iterator[tuple[LiveFile | None, Int64]]:
        """Each file with the indices of its places, None for one that is not live; NOWHERE is left out."""
        for number, at in _by_number(places):
            yield self._by_number[number], at

    def by_live_file(self, places: Int64) -> Iterator[tuple[LiveFile, Int64]]:
        """The same of places where rows were found."""
        for live, at in self.by_file(places):
            assert live is not None, "places come from find"
            yield live, at


def deleted_rows(snapshot: Snapshot, file: DataFile) -> BitMap:
    """The rows of `file` that its deletion vector marks."""
    return read_vector(snapshot.folder, file.vector) if file.vector else BitMap()


def are_among(rows: Int64, some: BitMap) -> Bool:
    """Which of `rows` are among these."""
    if len(rows) < _FEW:
        return np.array([row in some for row in rows.tolist()], dtype=np.bool_)
    both = np.array(BitMap(rows.astype(np.uint32)) & some, dtype=np.int64)
    found: Bool = np.isin(rows, both)
    return found


def _by_number(places: Int64) -> list[tuple[int, Int64]]:
    known = np.flatnonzero(places != NOWHERE)
    if not len(known):
        return []
    order = known[np.argsort(file_of(places[known]), kind="stable")]
    numbers, starts = np.unique(file_of(places[order]), return_index=True)
    ends = [*starts[1:].tolist(), len(order)]
    return [(n, order[start:end]) for n, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True)]
