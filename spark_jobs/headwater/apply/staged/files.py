"""Rows of a transaction that is still open, as data files that no commit names yet; at its commit only links are made.

What comes of the open transaction is applied to a private state, slice by slice: an index of its own says which key it
has put or removed before. A row that the transaction itself replaces or removes later is marked as gone in its
staged file; a stored row that it removes becomes a *tombstone*. What is left at the commit is one row or
one tombstone a key, with what the first change of the key said: whether a stored row must exist.

Staged files lie below `<root>/_headwater/staged/<generation>/<xid>`: that names their owner. No table's log ever names
them there, so whoever is the newest generation may remove those of all others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import join

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.arrow_types import key_schema, lake_schema
from headwater.delta import storage
from headwater.delta.data_files import read_columns, write_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.index import NOWHERE, KeyIndex, file_of, place_of, row_of
from headwater.lake.paths import key_scratch_made, staged_path
from headwater.net_changes import NetChanges
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_KEYS_STAY = 24 * 3600.0
"""Seconds: another process may be about to take them."""
_MOST_TOMBSTONES = 1 << 20
"""The keys of removed rows are held in memory."""
_TOMBSTONES = 0
"""Number of no file: the places of tombstones."""


class CannotStage(Exception):
    """The transaction is applied at its commit, as if nothing had been staged; the message says why."""


class StagedFilesGone(Exception):
    """Somebody has removed what was staged: the transaction is netted from its blocks."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A staged file. `gone`: rows that the transaction itself took back; `stored`: per row, whether the lake must hold
    a row with its key; `codes`: file of the keys of all its rows, empty for a table without a look-up."""

    file: DataFile
    gone: BitMap
    stored: Bool
    codes: str

    def keys(self) -> Codes:
        return _read_codes(self.codes, len(self.stored))


@dataclass(frozen=True, slots=True)
class StagedRows:
    """What a transaction does to one table, staged: `files` below `folder`, `removed` keys, and `changes` behind it."""

    folder: str
    files: tuple[StagedFile, ...]
    removed: pa.Table
    changes: int

    def link(self, files: Sequence[StagedFile], folder: str) -> None:
        """Give files names in the table's `folder`; they stay here, too, should the commit lose its race. May be done
        again, whatever became of the commit."""
        try:
            for staged in files:
                storage.link(join(self.folder, staged.file.name), join(folder, staged.file.name))
        except FileNotFoundError as error:
            for staged in files:
                storage.delete(join(folder, staged.file.name))
            raise StagedFilesGone(str(error)) from error

    def as_changes(self, schema: TableSchema) -> NetChanges:
        """As what a batch does to the table."""
        return NetChanges(
            rows=lake_schema(schema).empty_table(),
            stored=np.zeros(0, dtype=np.bool_),
            unchanged={},
            origins=None,
            removed=key_schema(schema).empty_table(),
            changes=self.changes,
            staged=self,
        )

    def keys_of(self, staged: StagedFile, schema: TableSchema) -> pa.Table:
        return read_columns(self.folder, staged.file, key_schema(schema))


def sweep_staged(root: str, generation: int) -> list[str]:
    """Remove what was staged under other generations than this, the newest one, and keys that were read a day ago;
    returns the folders."""
    others = [name for name in storage.names(staged_path(root)) if _is_left(name, generation)]
    swept = [join(staged_path(root), name) for name in others]
    for folder in swept:
        storage.delete_folder(folder)
    return swept


def _is_left(name: str, generation: int) -> bool:
    made = key_scratch_made(name)
    return name != str(generation) if made is None else made < time.time() - _KEYS_STAY


@dataclass(slots=True)
class _Open:
    file: DataFile
    stored: Bool
    codes: str
    gone: BitMap = field(default_factory=BitMap)


@dataclass(slots=True)
class _Tombstones:
    keys: list[pa.Table] = field(default_factory=list)
    count: int = 0
    gone: BitMap = field(default_factory=BitMap)

    def add(self, keys: pa.Table) -> Int64:
        """Their numbers."""
        numbers = np.arange(self.count, self.count + keys.num_rows, dtype=np.int64)
        self.keys.append(keys)
        self.count += keys.num_rows
        return numbers

    def left(self, schema: pa.Schema) -> pa.Table:
        kept = np.ones(self.count, dtype=np.bool_)
        kept[np.array(self.gone, dtype=np.int64)] = False
        return pa.concat_tables([schema.empty_table(), *self.keys]).filter(pa.array(kept))


class StagedTable:
    """One table's share of one open transaction, below `folder`."""

    def __init__(self, folder: str, schema: TableSchema) -> None:
        self._folder, self._schema = folder, schema
        self._looked_up = bool(schema.key) and not schema.insert_only
        self._index = KeyIndex()
        self._files: list[_Open] = []
        self._tombstones = _Tombstones()
        self._changes = 0
        storage.make_folder(folder, mode=0o700)

    def take(self, net: NetChanges) -> None:
        """Apply the net effect of the changes that follow. CannotStage when it needs what only the lake knows."""
        if net.truncated or net.truncated_leaves:
            raise CannotStage("it truncates")
        if net.unchanged:
            raise CannotStage("it keeps large values that the log does not carry")
        if self._tombstones.count + net.removed.num_rows > _MOST_TOMBSTONES:
            raise CannotStage(f"it removes more than {_MOST_TOMBSTONES} rows")
        self._changes += net.changes
        if not self._looked_up:
            if net.rows.num_rows:
                file = write_batches(self._folder, net.rows.schema, [net.rows])
                self._files.append(_Open(file, np.zeros(net.rows.num_rows, dtype=np.bool_), ""))
            return
        keys = list(self._schema.key)
        self._remove(net.removed)
        if net.rows.num_rows:
            self._put(net.rows, encode(self._schema, net.rows.select(keys)), net.stored.copy())

    def result(self) -> StagedRows:
        files = tuple(StagedFile(open_.file, open_.gone, open_.stored, open_.codes) for open_ in self._files)
        removed = self._tombstones.left(key_schema(self._schema))
        return StagedRows(self._folder, files, removed, self._changes)

    def _put(self, rows: pa.Table, codes: Codes, stored: Bool) -> None:
        before, of_stored = self._take_back(codes)
        stored[before] = of_stored
        file = write_batches(self._folder, lake_schema(self._schema), [rows])
        path = join(self._folder, f"{file.name}.keys")
        _write_codes(path, codes)
        self._files.append(_Open(file, stored, path))
        self._index.put(codes, place_of(len(self._files), np.arange(len(codes), dtype=np.int64)))

    def _remove(self, keys: pa.Table) -> None:
        if not keys.num_rows:
            return
        codes = encode(self._schema, keys)
        before, of_stored = self._take_back(codes)
        # A row that the transaction has inserted itself leaves nothing behind.
        stored = np.ones(len(codes), dtype=np.bool_)
        stored[before] = of_stored
        kept = np.flatnonzero(stored)
        numbers = self._tombstones.add(keys.take(pa.array(kept)))
        self._index.put(codes.take(kept), place_of(_TOMBSTONES, numbers))

    def _take_back(self, codes: Codes) -> tuple[Int64, Bool]:
        """Undo what stands under these keys here: which of them those are, and whether the lake must hold them."""
        places = self._index.find(codes)
        known = np.flatnonzero(places != NOWHERE)
        stored = np.ones(len(codes), dtype=np.bool_)
        live = np.zeros(len(codes), dtype=np.bool_)
        for number in np.unique(file_of(places[known])).tolist():
            here = known[file_of(places[known]) == number]
            rows = row_of(places[here])
            gone = self._tombstones.gone if number == _TOMBSTONES else self._files[number - 1].gone
            alive = ~np.isin(rows, np.array(gone, dtype=np.int64)) if gone else np.ones(len(rows), dtype=np.bool_)
            live[here] = alive
            if number != _TOMBSTONES:
                stored[here] = self._files[number - 1].stored[rows]
            gone.update(BitMap(rows[alive].astype(np.uint32)))
        before = np.flatnonzero(live)
        return before, stored[before]


def _write_codes(path: str, codes: Codes) -> None:
    words = [codes.first] if codes.second is None else [codes.first, codes.second]
    storage.write(path, b"".join(part.tobytes() for part in words))


def _read_codes(path: str, count: int) -> Codes:
    try:
        words = np.frombuffer(storage.read(path), dtype=np.uint64).reshape(-1, count)
    except FileNotFoundError as error:
        raise StagedFilesGone(str(error)) from error
    return Codes(words[0], words[1] if len(words) > 1 else None)
