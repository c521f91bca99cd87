"""Where the rows of a table lie, by key: sorted runs, newest first, in memory or in unnamed files of the local disk.

A cache of the lake, never its truth: built from key columns, dropped at will. An entry says "the row with this key
was put at this place"; whether it still stands there, the table's live files and their deletion vectors know. The
newest entry of a key supersedes the older ones, so a key that it does not lead to a live row has none.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headwater.lake.key_codes import Codes, UInt64

Int64 = npt.NDArray[np.int64]

NOWHERE = -1
_ROW_BITS = 32
_ON_DISK_ABOVE = 1 << 21
"""Entries of a run that are kept on disk: mapped, so that the memory is the page cache's to give and to take."""
_MERGED_AT_ONCE = 1 << 19
_MANY_KEYS = 1 << 16
"""A look-up of so many touches most pages of a mapped run: they are given back after it."""


@dataclass(frozen=True, slots=True)
class _Run:
    codes: Codes
    place: Int64


class KeyIndex:
    """Places by key. A place is a file's number and a row's number in it, packed into 64 bits by `place_of`."""

    def __init__(self, is_live: Callable[[Int64], npt.NDArray[np.bool_]] = lambda files: files >= 0) -> None:
        """`is_live`: which of these file numbers still are files of the table; entries of others are forgotten."""
        self._is_live = is_live
        self._runs: list[_Run] = []  # oldest first

    def __len__(self) -> int:
        return sum(len(run.place) for run in self._runs)

    def put(self, codes: Codes, places: Int64) -> None:
        """These keys stand at these places now. No key may occur twice in one call."""
        if not len(codes):
            return
        self._runs.append(_sorted(codes, places))
        # As in a log-structured merge tree: each entry is rewritten a number of times that grows with the logarithm.
        while len(self._runs) > 1 and len(self._runs[-1].place) * 2 >= len(self._runs[-2].place):
            newer, older = self._runs.pop(), self._runs.pop()
            self._runs.append(self._merged(older, newer))

    def find(self, codes: Codes) -> Int64:
        """The newest place of each key, NOWHERE for keys that were never put."""
        found = np.full(len(codes), NOWHERE, dtype=np.int64)
        open_ = np.arange(len(codes))
        for run in reversed(self._runs):
            if not len(open_):
                break
            found[open_] = _look_up(run, codes.take(open_))
            if len(open_) >= _MANY_KEYS:
                _give_back(run)
            open_ = open_[found[open_] == NOWHERE]
        return found

    def _merged(self, older: _Run, newer: _Run) -> _Run:
        """Both as one; of a key that is in both, the newer place. Large runs are merged a range of keys at a time."""
        if len(older.place) + len(newer.place) <= _ON_DISK_ABOVE:
            return _Run(*self._merged_entries(older, newer))
        words = 2 if older.codes.second is not None else 1
        files = [_Column() for _ in range(words + 1)]
        for left, right in _ranges(older, newer):
            codes, places = self._merged_entries(left, right)
            columns = (codes.first, codes.second, places.view(np.uint64)) if words == 2 else (codes.first, places)
            for file, values in zip(files, columns, strict=True):
                file.write(values)  # type: ignore[arg-type]
            _give_back(older)
            _give_back(newer)
        first, *second, place = (file.mapped() for file in files)
        return _Run(Codes(first, second[0] if second else None), place.view(np.int64))

    def _merged_entries(self, older: _Run, newer: _Run) -> tuple[Codes, Int64]:
        codes = Codes.joined([newer.codes, older.codes])
        places = np.concatenate([newer.place, older.place])
        order = _order(codes)
        codes, places = codes.take(order), places[order]
        again = codes.first[1:] == codes.first[:-1]
        if codes.second is not None:
            again &= codes.second[1:] == codes.second[:-1]
        kept = self._is_live(file_of(places))
        kept[1:] &= ~again
        return codes.take(np.flatnonzero(kept)), places[kept]


def _ranges(older: _Run, newer: _Run) -> Iterator[tuple[_Run, _Run]]:
    """Both runs cut at the same keys, in pieces of about `_MERGED_AT_ONCE` entries at most."""
    runs, at = (older, newer), [0, 0]
    while any(begin < len(run.place) for run, begin in zip(runs, at, strict=True)):
        border = min(
            run.codes.first[min(begin + _MERGED_AT_ONCE, len(run.place)) - 1]
            for run, begin in zip(runs, at, strict=True)
            if begin < len(run.place)
        )
        ends = [int(np.searchsorted(run.codes.first, border, side="right")) for run in runs]
        left, right = (_piece(run, begin, end) for run, begin, end in zip(runs, at, ends, strict=True))
        yield left, right
        at = ends


def _piece(run: _Run, begin: int, end: int) -> _Run:
    second = run.codes.second
    codes = Codes(run.codes.first[begin:end], second[begin:end] if second is not None else None)
    return _Run(codes, run.place[begin:end])


def place_of(file: int, rows: Int64) -> Int64:
    return (np.int64(file) << np.int64(_ROW_BITS)) | rows


def file_of(places: Int64) -> Int64:
    return places >> np.int64(_ROW_BITS)


def row_of(places: Int64) -> Int64:
    return places & np.int64((1 << _ROW_BITS) - 1)


def _sorted(codes: Codes, places: Int64) -> _Run:
    order = np.argsort(codes.first, kind="stable")
    codes, places = codes.take(order), places[order]
    if len(places) <= _ON_DISK_ABOVE:
        return _Run(codes, places)
    second = _on_disk(codes.second) if codes.second is not None else None
    return _Run(Codes(_on_disk(codes.first), second), _on_disk(places.view(np.uint64)).view(np.int64))


def _order(codes: Codes) -> Int64:
    """By both words, and equal keys in the order in which they stand."""
    if codes.second is None:
        return np.argsort(codes.first, kind="stable")
    return np.lexsort((codes.second, codes.first))


class _Column:
    """Values of a run on their way to disk. The file has no name: it ends with the mapping."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def write(self, values: UInt64) -> None:
        self._file.write(np.ascontiguousarray(values).data)

    def mapped(self) -> UInt64:
        self._file.flush()  # a full disk is an error here, and no signal later
        with self._file as file:
            size = file.tell()
            return np.memmap(file, dtype=np.uint64, mode="r", shape=size // 8) if size else np.zeros(0, np.uint64)


def _on_disk(values: UInt64) -> UInt64:
    column = _Column()
    column.write(values)
    return column.mapped()


def _give_back(run: _Run) -> None:
    """Pages of a mapped run stay in the page cache, and are this process's memory no longer."""
    for values in (run.codes.first, run.codes.second, run.place):
        if isinstance(values, np.memmap):
            values._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def _look_up(run: _Run, codes: Codes) -> Int64:
    at = np.searchsorted(run.codes.first, codes.first)
    found = np.full(len(codes), NOWHERE, dtype=np.int64)
    open_ = np.flatnonzero(at < len(run.place))
    while len(open_):
        here = at[open_]
        open_, here = _narrowed(run.codes.first[here] == codes.first[open_], open_, here)
        if run.codes.second is None or codes.second is None:
            found[open_] = run.place[here]
            return found
        same = run.codes.second[here] == codes.second[open_]
        found[open_[same]] = run.place[here[same]]
        # The same first word and another second one: the next entry may be it.
        open_ = open_[~same]
        at[open_] += 1
        open_ = open_[at[open_] < len(run.place)]
    return found


def _narrowed(mask: npt.NDArray[np.bool_], *arrays: Int64) -> tuple[Int64, ...]:
    return tuple(array[mask] for array in arrays)
