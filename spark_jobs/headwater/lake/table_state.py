"""A table as its one writer keeps it in memory: live files, deleted rows, and where each key lies.

`find` leads from keys to live rows, `delete` and `rows_at` work on what was found. All of it is derived from the
table's log and data files and follows them by `advance`; after a lost race it is simply advanced again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.arrow_types import key_schema
from headwater.lake.data_files import read_columns, read_rows
from headwater.lake.deletion_vectors import read_vector
from headwater.lake.delta_log import Action, DataFile, Snapshot, read_snapshot
from headwater.lake.key_codes import Codes, encode
from headwater.lake.key_index import NOWHERE, KeyIndex, file_of, place_of, row_of
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]

_NO_ROWS = BitMap()


@dataclass(slots=True)
class _Live:
    """A live file: `number` is its name in places, never given twice."""

    number: int
    file: DataFile
    deleted: BitMap | None = None  # None: not read yet


@dataclass(frozen=True, slots=True)
class Added:
    """A new file of our own commit: the keys of its rows, if they are known, and which of these are gone already."""

    file: DataFile
    codes: Codes | None
    gone: BitMap = _NO_ROWS


class TableState:
    """The table in `folder` at the snapshot's version. One thread at a time."""

    def __init__(self, folder: str, schema: TableSchema) -> None:
        self.snapshot: Snapshot = read_snapshot(folder)
        self.keys = key_schema(schema)
        self._schema = schema
        self._folder = folder
        self._index = KeyIndex(self._are_live)
        self._live: dict[str, _Live] = {}
        self._by_number: list[_Live | None] = []
        self._alive = bytearray()  # the same as ones and zeros
        self._indexed = False

    @property
    def version(self) -> int:
        return self.snapshot.version

    def advance(self, version: int) -> None:
        """Follow commits of others up to `version`."""
        if self.snapshot.advance(version) and self._indexed:
            self._follow()

    def follow_own(self, actions: list[Action], deleted: Mapping[str, BitMap], added: Iterable[Added]) -> None:
        """Follow our own commit: it left `deleted` in the files named. Of `added` one file is looked at at a time."""
        self.snapshot.follow(actions)
        if not self._indexed:
            return
        known = dict(deleted)
        for new in added:
            if new.codes is not None:
                self._put(new, new.codes)
                known[new.file.name] = new.gone
        self._follow(known)

    def _put(self, new: Added, codes: Codes) -> None:
        live = self._register(new.file, new.gone)
        rows = np.arange(len(codes), dtype=np.int64)
        if new.gone:
            rows = np.setdiff1d(rows, np.array(new.gone, dtype=np.int64))
            codes = codes.take(rows)
        self._index.put(codes, place_of(live.number, rows))

    def deleted_rows(self, name: str) -> BitMap:
        """Of the live file `name`. Not to be changed."""
        live = self._live.get(name)
        if live is not None:
            return self._deleted(live)
        vector = self.snapshot.files[name].vector
        return read_vector(self._folder, vector) if vector else BitMap()

    def find(self, codes: Codes) -> Int64:
        """The place of each key's live row, NOWHERE where there is none."""
        self._ensure_index()
        places = self._index.find(codes)
        for number, at in _by_file(places):
            live = self._by_number[number]
            if live is None:
                places[at] = NOWHERE
                continue
            deleted = self._deleted(live)
            if deleted:
                rows = row_of(places[at])
                gone = np.array(BitMap(rows.astype(np.uint32)) & deleted, dtype=np.int64)
                places[at[np.isin(rows, gone)]] = NOWHERE
        return places

    def deletions(self, places: Int64) -> dict[str, BitMap]:
        """By name of each file with rows at `places`: its deleted rows with these added."""
        found = {}
        for number, at in _by_file(places):
            live = self._by_number[number]
            assert live is not None, "places come from find"
            found[live.file.name] = self._deleted(live) | BitMap(row_of(places[at]).astype(np.uint32))
        return found

    def rows_at(self, places: Int64, wanted: pa.Schema) -> Iterator[tuple[Int64, pa.Table]]:
        """The columns `wanted` of the rows at `places`, in parts: which of `places`, and their rows."""
        for number, at in _by_file(places):
            live = self._by_number[number]
            assert live is not None, "places come from find"
            for here, rows in read_rows(self._folder, live.file, row_of(places[at]), wanted):
                yield at[here], rows

    def _ensure_index(self) -> None:
        if not self._indexed:
            self._indexed = True
            self._follow()

    def _follow(self, known: Mapping[str, BitMap] = MappingProxyType({})) -> None:
        """Bring files and index in step with the snapshot; in the usual case only vectors have changed, as `known`."""
        files = self.snapshot.files
        for name in [name for name in self._live if name not in files]:
            # Should the same file come back one day, it is a new one here: its entries would be older than others'.
            number = self._live.pop(name).number
            self._by_number[number], self._alive[number] = None, 0
        new = []
        for name, file in files.items():
            live = self._live.get(name)
            if live is None:
                new.append(self._register(file, None))
            elif live.file is not file:
                live.file, live.deleted = file, known.get(name)
        if new:
            self._read_keys(new)

    def _are_live(self, numbers: Int64) -> npt.NDArray[np.bool_]:
        return np.frombuffer(self._alive, dtype=np.bool_)[numbers]

    def _register(self, file: DataFile, deleted: BitMap | None) -> _Live:
        live = _Live(len(self._by_number), file, deleted)
        self._by_number.append(live)
        self._alive.append(1)
        self._live[file.name] = live
        return live

    def _read_keys(self, files: list[_Live]) -> None:
        for live in files:
            keys = read_columns(self._folder, live.file, self.keys)
            rows = np.arange(keys.num_rows, dtype=np.int64)
            deleted = self._deleted(live)
            if deleted:
                kept = np.ones(keys.num_rows, dtype=np.bool_)
                kept[np.array(deleted, dtype=np.int64)] = False
                rows = rows[kept]
                keys = keys.take(pa.array(rows))
            self._index.put(encode(self._schema, keys), place_of(live.number, rows))

    def _deleted(self, live: _Live) -> BitMap:
        if live.deleted is None:
            live.deleted = read_vector(self._folder, live.file.vector) if live.file.vector else BitMap()
        return live.deleted


def _by_file(places: Int64) -> list[tuple[int, Int64]]:
    """File numbers with the indices of their places; NOWHERE is left out."""
    known = np.flatnonzero(places != NOWHERE)
    if not len(known):
        return []
    order = known[np.argsort(file_of(places[known]), kind="stable")]
    numbers, starts = np.unique(file_of(places[order]), return_index=True)
    return list(zip(numbers.tolist(), np.split(order, starts[1:]), strict=True))
