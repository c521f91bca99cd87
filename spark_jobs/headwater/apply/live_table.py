"""A table as its one writer keeps it in memory: live files, deleted rows, and where each key lies.

`find` leads from keys to live rows, `delete` and `rows_at` work on what was found. All of it is derived from the
table's log and data files and follows them by `advance`; after a lost race it is simply advanced again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.arrow_types import key_schema
from headwater.delta.data_files import alive_rows, column_batches, count_rows, read_rows
from headwater.delta.deletion_vectors import read_vector
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.index.cache import Subject
from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.index import NOWHERE, KeyIndex, file_of, place_of, row_of
from headwater.delta.index.kept_index import KeptIndex
from headwater.delta.layout import Layout, layout_of
from headwater.delta.log_entries import Action
from headwater.delta.where_files import columns_read, matches, may_match
from headwater.predicate import Predicate
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]

_NO_ROWS = BitMap()
_FEW = 100


@dataclass(frozen=True, slots=True)
class Keep:
    """What a kept index belongs to, besides its table: the incarnation, and the driver's generation."""

    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Added:
    """A file of our own commit: its rows stand under `codes` (None: not known), those numbered `gone` are deleted
    already."""

    file: DataFile
    codes: Codes | None
    gone: BitMap = _NO_ROWS


@dataclass(slots=True)
class _Live:
    """A live file: `number` is its name in places, never given twice."""

    number: int
    file: DataFile
    deleted: BitMap | None = None  # None: not read yet


class LiveTable:
    """The table in `folder` at the snapshot's version. One thread at a time."""

    def __init__(
        self, folder: str, schema: TableSchema, kept: Keep | None = None, beside: Executor | None = None
    ) -> None:
        """`kept`, `beside`: as of `keep`; without them the index is not kept, and merged in the caller's turn."""
        self.snapshot: Snapshot = read_snapshot(folder)
        self.keys = key_schema(schema)
        self._schema = schema
        self._folder = folder
        self._beside: Executor | None = None
        self._kept: KeptIndex | None = None
        self._layout: tuple[Action, Layout] | None = None
        self._forget()
        self._count_rows()
        if kept is not None and beside is not None:
            self.keep(kept, beside)

    def keep(self, kept: Keep, beside: Executor) -> None:
        """From now on the index is kept on local disk, as `kept` says, and its large parts are merged and saved by
        `beside`. Said again it changes nothing."""
        if self._kept is not None:
            return
        table_id = str(self.snapshot.metadata.get("id"))
        subject = Subject(self._folder, table_id, kept.incarnation, f"{self.keys.names} {self.keys.types}")
        self._kept = KeptIndex(subject, kept.generation)
        self._beside = beside
        self._index.work_beside(beside, self._kept.folder)

    def _forget(self) -> None:
        """Without files and index; both are derived anew when they are asked for."""
        folder = self._kept.folder if self._kept is not None else lambda: None
        self._index = KeyIndex(lambda: np.frombuffer(bytes(self._alive), dtype=np.bool_), self._beside, folder)
        self._live: dict[str, _Live] = {}
        self._by_number: list[_Live | None] = []
        self._alive = bytearray()  # the same as ones and zeros
        self._indexed = False

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """What fails half way leaves no half of an index."""
        try:
            yield
        except BaseException:
            self._index.close()
            self._forget()
            raise

    @property
    def version(self) -> int:
        return self.snapshot.version

    def index_keys(self) -> None:
        """Find out where each key lies now, and not when the first is looked for."""
        self._ensure_index()

    @property
    def layout(self) -> Layout:
        """How rows lie in the table's files, by its newest metadata."""
        metadata = self.snapshot.metadata
        if self._layout is None or self._layout[0] is not metadata:
            self._layout = metadata, layout_of(metadata)
        return self._layout[1]

    def advance(self, version: int | None = None) -> None:
        """Follow commits of others up to `version` (None: as far as there are any)."""
        if not self.snapshot.advance(version):
            return
        self._count_rows()
        if self._indexed:
            with self._in_step():
                self._follow()

    def follow_own(self, actions: list[Action], deleted: Mapping[str, BitMap], added: Iterable[Added]) -> None:
        """Follow our own commit: it left `deleted` in the files named, and added these."""
        self.snapshot.follow(actions)
        if not self._indexed:
            return
        with self._in_step():
            known = dict(deleted)
            for new in added:
                if new.codes is not None:
                    self._put(new, new.codes)
                    known[new.file.name] = new.gone
            self._follow(known)

    def save_index(self, *, at_once: bool = False) -> None:
        """Behind the ledger: keep the index for the next start, if it is time (or `at_once`)."""
        kept, beside = self._kept, self._beside
        if kept is None or beside is None or not self._indexed:
            return
        kept.collect(self._index)
        if at_once or kept.is_due(self.version):
            files = tuple((live.number, name, live.file.deleted) for name, live in self._live.items())
            kept.save(self._index, self.version, len(self._by_number), files, self._are_live, beside)

    def close(self) -> None:
        """Let go of what is kept. The state is not used any more."""
        self._index.close()
        if self._kept is not None:
            self._kept.close(self._index)

    def deleted_rows(self, name: str) -> BitMap:
        """Of the live file `name`. Not to be changed."""
        live = self._live.get(name)
        if live is not None:
            return self._deleted(live)
        return deleted_rows(self.snapshot, self.snapshot.files[name])

    def find(self, codes: Codes) -> Int64:
        """The place of each key's live row, NOWHERE where there is none."""
        self._ensure_index()
        places = self._index.find(codes)
        rows = row_of(places)
        for number, at in _by_file(places):
            live = self._by_number[number]
            if live is None:
                places[at] = NOWHERE
                continue
            gone = _among(rows[at], self._deleted(live))
            if gone.any():
                places[at[gone]] = NOWHERE
        return places

    def deletions(self, places: Int64, more: Mapping[str, BitMap] = MappingProxyType({})) -> dict[str, BitMap]:
        """By name of each file with rows at `places` or in `more`: its deleted rows with these added."""
        found = {}
        rows = row_of(places).astype(np.uint32)
        for number, at in _by_file(places):
            live = self._by_number[number]
            assert live is not None, "places come from find"
            found[live.file.name] = self._deleted(live) | BitMap(rows[at])
        for name, some in more.items():
            found[name] = found.get(name, self.deleted_rows(name)) | some
        return found

    def rows_at(self, places: Int64, wanted: pa.Schema) -> Iterator[tuple[Int64, pa.Table]]:
        """The columns `wanted` of the rows at `places`, in parts: which of `places`, and their rows."""
        for number, at in _by_file(places):
            live = self._by_number[number]
            assert live is not None, "places come from find"
            for here, rows in read_rows(self._folder, live.file, row_of(places[at]), wanted, self.layout):
                yield at[here], rows

    def rows_of(self, predicate: Predicate, schema: pa.Schema) -> dict[str, BitMap]:
        """By file, the live rows of the predicate, as many as they may be. `schema`: the table's columns."""
        self._ensure_index()
        found, read = {}, columns_read(predicate, schema)
        for name, live in self._live.items():
            if not may_match(predicate, live.file, self.layout, read):
                continue
            rows, first = BitMap(), 0
            for part in column_batches(self._folder, live.file, read, self.layout):
                rows |= BitMap((np.flatnonzero(matches(predicate, part)) + first).astype(np.uint32))
                first += part.num_rows
            rows -= self._deleted(live)
            if rows:
                found[name] = rows
        return found

    def are_among(self, places: Int64, rows: Mapping[str, BitMap]) -> npt.NDArray[np.bool_]:
        """Which of `places` are of these rows, by file."""
        found = np.zeros(len(places), dtype=np.bool_)
        for number, at in _by_file(places):
            live = self._by_number[number]
            assert live is not None, "places come from find"
            if live.file.name in rows:
                found[at] = _among(row_of(places[at]), rows[live.file.name])
        return found

    def _ensure_index(self) -> None:
        if not self._indexed:
            with self._in_step():
                self._restore()
                self._follow()
                self._indexed = True

    def _restore(self) -> None:
        """Begin with the index that an earlier driver has kept; `_follow` reads what is new."""
        found = self._kept.restore(self.version) if self._kept is not None else None
        if found is None:
            return
        manifest, runs = found
        self._by_number = [None] * manifest.numbers
        self._alive = bytearray(manifest.numbers)
        for number, name, deleted in manifest.files:
            file = self.snapshot.files.get(name)
            # Rows that were deleted and are not any more: their entries may have been superseded since.
            if file is not None and file.deleted >= deleted:
                self._live[name] = self._by_number[number] = _Live(number, file)
                self._alive[number] = 1
        self._index.adopt(runs)

    def _put(self, new: Added, codes: Codes) -> None:
        live = self._register(new.file, new.gone)
        rows = np.arange(len(codes), dtype=np.int64)
        if new.gone:
            rows = np.setdiff1d(rows, np.array(new.gone, dtype=np.int64))
            codes = codes.take(rows)
        self._index.put(codes, place_of(live.number, rows))

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
        if new and self.keys.names:
            self._read_keys(new)

    def _count_rows(self) -> None:
        """Statistics may be missing; without the number of rows a file's vector cannot be written."""
        files = self.snapshot.files
        for name in [name for name, file in files.items() if file.rows is None]:
            files[name] = count_rows(self._folder, files[name])

    def _are_live(self, numbers: Int64) -> npt.NDArray[np.bool_]:
        return np.frombuffer(self._alive, dtype=np.bool_)[numbers]

    def _register(self, file: DataFile, deleted: BitMap | None) -> _Live:
        live = _Live(len(self._by_number), file, deleted)
        self._by_number.append(live)
        self._alive.append(1)
        self._live[file.name] = live
        return live

    def _read_keys(self, files: list[_Live]) -> None:
        self._index.build(part for live in files for part in self._keys_in(live))

    def _keys_in(self, live: _Live) -> Iterator[tuple[Codes, Int64]]:
        """The codes of the file's live rows, and their places."""
        deleted, first = self._deleted(live), 0
        for keys in column_batches(self._folder, live.file, self.keys, self.layout):
            rows = alive_rows(first, keys.num_rows, deleted)
            first += keys.num_rows
            part = keys if len(rows) == keys.num_rows else keys.take(pa.array(rows - first + keys.num_rows))
            yield encode(self._schema, part), place_of(live.number, rows)

    def _deleted(self, live: _Live) -> BitMap:
        if live.deleted is None:
            live.deleted = deleted_rows(self.snapshot, live.file)
        return live.deleted


def deleted_rows(snapshot: Snapshot, file: DataFile) -> BitMap:
    """The rows of `file` that its deletion vector marks."""
    return read_vector(snapshot.folder, file.vector) if file.vector else BitMap()


def _among(rows: Int64, some: BitMap) -> npt.NDArray[np.bool_]:
    """Which of `rows` are among these."""
    if len(rows) < _FEW:
        return np.array([row in some for row in rows.tolist()], dtype=np.bool_)
    both = np.array(BitMap(rows.astype(np.uint32)) & some, dtype=np.int64)
    found: npt.NDArray[np.bool_] = np.isin(rows, both)
    return found


def _by_file(places: Int64) -> list[tuple[int, Int64]]:
    """File numbers with the indices of their places; NOWHERE is left out."""
    known = np.flatnonzero(places != NOWHERE)
    if not len(known):
        return []
    order = known[np.argsort(file_of(places[known]), kind="stable")]
    numbers, starts = np.unique(file_of(places[order]), return_index=True)
    ends = [*starts[1:].tolist(), len(order)]
    return [(n, order[start:end]) for n, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True)]
