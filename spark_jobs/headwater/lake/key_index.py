"""Where the rows of a table lie, by key: sorted runs, newest first, in memory or in unnamed files of the local disk.

A cache of the lake, never its truth: built from key columns, dropped at will. An entry says "the row with this key
was put at this place"; whether it still stands there, the table's live files and their deletion vectors know. The
newest entry of a key supersedes the older ones, so a key that it does not lead to a live row has none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headwater.lake.key_codes import Codes, UInt64

Int64 = npt.NDArray[np.int64]

NOWHERE = -1
_ROW_BITS = 32
_ON_DISK_ABOVE = 1 << 21
"""Entries of a run that are kept on disk: mapped, so that the memory is the page cache's to give and to take."""


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
            open_ = open_[found[open_] == NOWHERE]
        return found

    def _merged(self, older: _Run, newer: _Run) -> _Run:
        """Both as one; of a key that is in both, the newer place."""
        codes = Codes.joined([newer.codes, older.codes])
        places = np.concatenate([newer.place, older.place])
        order = _order(codes)
        codes, places = codes.take(order), places[order]
        again = codes.first[1:] == codes.first[:-1]
        if codes.second is not None:
            again &= codes.second[1:] == codes.second[:-1]
        kept = np.concatenate([[True], ~again]) & self._is_live(file_of(places))
        return _kept(codes.take(np.flatnonzero(kept)), places[kept])


def place_of(file: int, rows: Int64) -> Int64:
    return (np.int64(file) << np.int64(_ROW_BITS)) | rows


def file_of(places: Int64) -> Int64:
    return places >> np.int64(_ROW_BITS)


def row_of(places: Int64) -> Int64:
    return places & np.int64((1 << _ROW_BITS) - 1)


def _sorted(codes: Codes, places: Int64) -> _Run:
    order = np.argsort(codes.first, kind="stable")
    return _kept(codes.take(order), places[order])


def _order(codes: Codes) -> Int64:
    """By both words, and equal keys in the order in which they stand."""
    if codes.second is None:
        return np.argsort(codes.first, kind="stable")
    return np.lexsort((codes.second, codes.first))


def _kept(codes: Codes, places: Int64) -> _Run:
    if len(places) <= _ON_DISK_ABOVE:
        return _Run(codes, places)
    second = _on_disk(codes.second) if codes.second is not None else None
    return _Run(Codes(_on_disk(codes.first), second), _on_disk(places.view(np.uint64)).view(np.int64))


def _on_disk(values: UInt64) -> UInt64:
    # The file has no name any more when this returns: it ends with the mapping, however the process ends.
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, values.nbytes)  # a full disk is an error here, and a signal later
        mapped = np.memmap(file, dtype=np.uint64, mode="w+", shape=values.shape)
    mapped[:] = values
    return mapped


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
