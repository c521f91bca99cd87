"""Sorted runs of key codes with their places: what an index of keys is made of, in memory or mapped from a file.

A run never changes. It is looked up through every 128th of its first words, which stay in memory, so that a key costs
a page or two of the file however long the run is; and runs are merged part by part, so that merging needs no more
memory than a part. A file holds first words, second words (if there are any) and places, one after the other; it lies
on local disk, since only that can be mapped, and is no part of the lake.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from headwater.delta.index.codes import Codes, UInt64

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

NOWHERE = -1
_SAMPLED = 128
_PART = 1 << 19
"""Entries that are merged at a time."""
_SHORT = 1 << 16
"""Entries of a run that is in the processor's cache as it is."""
_WORD = 8
_BULK = 1 << 16
"""Keys from which on a look-up touches most pages of a mapped run."""
_HELD = 32 << 20
"""Bytes of a mapped run that such a look-up holds at a time."""


class Abandoned(Exception):
    """A merge was told to end."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A run's file: `capacity` is the distance of its sections, `checksums` are those of their `count` words each."""

    name: str
    count: int
    capacity: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KeyRun:
    """Entries ascending by both words of their codes' first; no key twice. `samples`: every 128th first word.

    `stored`: its file, if that has a name; unnamed ones end with the mapping, however the process ends.
    """

    codes: Codes
    place: Int64
    samples: UInt64
    stored: Stored | None = None
    mapping: mmap.mmap | None = None

    def __len__(self) -> int:
        return len(self.place)

    def let_pages_go(self) -> None:
        """A mapped run's pages no longer count as this process's memory; those still needed come back from the
        system's cache of the file."""
        if self.mapping is not None:
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def look_up(self, codes: Codes) -> Int64:
        """The place of each key, NOWHERE for those that are not in this run. Quickest for ascending codes."""
        if self.mapping is None or len(codes) < _BULK:
            return self._look_up(codes)
        # Many keys touch every page of a run: a part of it at a time is held, as long as the keys ascend.
        step = -(-len(codes) * _HELD // max(self.mapping.size(), _HELD))
        found = []
        for start in range(0, len(codes), step):
            found.append(self._look_up(part_of(codes, start, start + step)))
            self.let_pages_go()
        return np.concatenate(found)

    def _look_up(self, codes: Codes) -> Int64:
        at = self.position(codes.first)
        found = np.full(len(codes), NOWHERE, dtype=np.int64)
        open_ = np.flatnonzero(at < len(self.place))
        while len(open_):
            here = at[open_]
            same = self.codes.first[here] == codes.first[open_]
            open_, here = open_[same], here[same]
            if self.codes.second is None or codes.second is None:
                found[open_] = self.place[here]
                break
            same = self.codes.second[here] == codes.second[open_]
            found[open_[same]] = self.place[here[same]]
            # The same first word and another second one: the next entry may be it.
            open_ = open_[~same]
            at[open_] += 1
            open_ = open_[at[open_] < len(self.place)]
        return found

    def position(self, first: UInt64) -> Int64:
        """The first entry of which the first word is not below each of `first`."""
        if len(self.place) <= _SHORT:
            return np.searchsorted(self.codes.first, first).astype(np.int64)
        block = np.searchsorted(self.samples, first).astype(np.int64)
        low = np.maximum((block - 1) * _SAMPLED + 1, 0)
        high = np.minimum(block * _SAMPLED, len(self.place))
        words = self.codes.first
        for _ in range(_SAMPLED.bit_length()):
            open_ = low < high
            middle = (low + high) >> 1
            below = open_ & (words[np.minimum(middle, len(words) - 1)] < first)
            low = np.where(below, middle + 1, low)
            high = np.where(open_ & ~below, middle, high)
        return low


def run_of(codes: Codes, place: Int64) -> KeyRun:
    """Of entries that are in order already."""
    return KeyRun(codes, place, codes.first[::_SAMPLED].copy())


def sorted_run(codes: Codes, places: Int64) -> KeyRun:
    """No key may occur twice."""
    order = np.argsort(codes.first)
    return run_of(codes.take(order), places[order])


def merged(
    runs: Sequence[KeyRun],
    is_live: Callable[[Int64], Bool],
    sink: RunFile | None,
    stop: Callable[[], bool] = lambda: False,
) -> KeyRun:
    """One run of several, oldest first: of a key in more than one of them the newest place, and only what `is_live`.

    Into `sink`; None: in memory. Abandoned when `stop` says so.
    """
    parts: list[tuple[Codes, Int64]] = []
    for bounds in _bounds(runs):
        if stop():
            raise Abandoned
        newest_first = [(run, *bound) for run, bound in zip(reversed(runs), reversed(bounds), strict=True)]
        codes = Codes.joined([part_of(run.codes, low, high) for run, low, high in newest_first])
        places = np.concatenate([run.place[low:high] for run, low, high in newest_first])
        order = _order(codes)
        codes, places = codes.take(order), places[order]
        kept = np.flatnonzero(_first_of_key(codes) & is_live(places))
        part = codes.take(kept), places[kept]
        if sink is None:
            parts.append(part)
        else:
            sink.write(*part)
        for run in runs:
            run.let_pages_go()
    if sink is not None:
        return sink.finish()
    return run_of(Codes.joined([codes for codes, _ in parts]), np.concatenate([places for _, places in parts]))


def _bounds(runs: Sequence[KeyRun]) -> list[list[tuple[int, int]]]:
    """Which entries of each run belong to each part; all entries with the same first word to the same one."""
    samples = np.sort(np.concatenate([run.samples for run in runs]))
    cuts = np.unique(samples[_PART // _SAMPLED :: _PART // _SAMPLED])
    edges = [np.concatenate([[0], run.position(cuts), [len(run)]]) for run in runs]
    return [[(int(edge[i]), int(edge[i + 1])) for edge in edges] for i in range(len(cuts) + 1)]


def part_of(codes: Codes, low: int, high: int) -> Codes:
    """The codes numbered `low` to `high`, the latter left out."""
    return Codes(codes.first[low:high], codes.second[low:high] if codes.second is not None else None)


def _order(codes: Codes) -> Int64:
    """By both words, and equal keys in the order in which they stand."""
    order = np.argsort(codes.first, kind="stable")
    if codes.second is None:
        return order
    # Few keys share a first word: only these are sorted by the second.
    again = codes.first[order[1:]] == codes.first[order[:-1]]
    tied = np.flatnonzero(np.concatenate([[False], again]) | np.concatenate([again, [False]]))
    if len(tied):
        of_tied = order[tied]
        order[tied] = of_tied[np.lexsort((codes.second[of_tied], codes.first[of_tied]))]
    return order


def _first_of_key(codes: Codes) -> Bool:
    if not len(codes):
        return np.zeros(0, dtype=np.bool_)
    again = codes.first[1:] == codes.first[:-1]
    if codes.second is not None:
        again &= codes.second[1:] == codes.second[:-1]
    return np.concatenate([[True], ~again])


class RunFile:
    """A run on its way to local disk. `folder`: where it gets a name; None: it has none."""

    def __init__(self, folder: str | None, capacity: int, words: int) -> None:
        self._capacity, self._sections, self._count = max(capacity, 1), words + 1, 0
        self._path = Path(folder) / f"{uuid.uuid4().hex}.run" if folder is not None else None
        self._checksums = [0] * self._sections
        self._samples: list[UInt64] = []
        self._file: IO[Any]
        if self._path is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        else:
            self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b")
        try:
            # A full disk is an error here, and a signal later.
            os.posix_fallocate(self._file.fileno(), 0, self._capacity * self._sections * _WORD)
        except BaseException:
            self.discard()
            raise

    def write(self, codes: Codes, places: Int64) -> None:
        """The next entries in order."""
        self._samples.append(codes.first[-self._count % _SAMPLED :: _SAMPLED].copy())
        sections = [codes.first, *([codes.second] if codes.second is not None else []), places]
        for section, words in enumerate(sections):
            data = np.ascontiguousarray(words).view(np.uint8).data
            self._checksums[section] = zlib.crc32(data, self._checksums[section])
            _write_at(self._file.fileno(), data, (section * self._capacity + self._count) * _WORD)
        self._count += len(places)

    def finish(self) -> KeyRun:
        with self._file as file:
            mapping, mapped = _mapped(file)
        name = self._path.name if self._path is not None else ""
        stored = Stored(name, self._count, self._capacity, tuple(self._checksums)) if name else None
        codes, places = _sections_of(mapped, self._capacity, self._count)
        samples = np.concatenate(self._samples) if self._samples else np.zeros(0, dtype=np.uint64)
        return KeyRun(codes, places, samples, stored, mapping)

    def discard(self) -> None:
        self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def remove_runs(folder: str, names: Iterable[str]) -> None:
    """A mapping holds its run as long as it is used."""
    for name in names:
        (Path(folder) / name).unlink(missing_ok=True)


def read_run(folder: str, stored: Stored) -> KeyRun:
    """The run in a named file. ValueError (or OSError) when it is not what was written."""
    sections = len(stored.checksums)
    with (Path(folder) / stored.name).open("rb") as file:
        if not 0 <= stored.count <= stored.capacity or os.fstat(file.fileno()).st_size != (
            stored.capacity * sections * _WORD
        ):
            raise ValueError(f"{stored.name} has another size")
        mapping, mapped = _mapped(file)
    for section, checksum in enumerate(stored.checksums):
        words = mapped[section * stored.capacity :][: stored.count]
        if _checksum(words) != checksum:
            raise ValueError(f"{stored.name} is damaged")
    codes, places = _sections_of(mapped, stored.capacity, stored.count)
    run = KeyRun(codes, places, codes.first[::_SAMPLED].copy(), stored, mapping)
    run.let_pages_go()
    return run


def _checksum(words: UInt64) -> int:
    checksum = 0
    for start in range(0, len(words), _PART):
        checksum = zlib.crc32(words[start : start + _PART].view(np.uint8).data, checksum)
    return checksum


def _mapped(file: IO[Any]) -> tuple[mmap.mmap, UInt64]:
    """The whole file, and its words; no memmap, whose slices cost more than a look-up."""
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return mapping, np.frombuffer(mapping, dtype=np.uint64)


def _sections_of(mapped: UInt64, capacity: int, count: int) -> tuple[Codes, Int64]:
    parts = [mapped[start : start + count] for start in range(0, len(mapped), capacity)]
    return Codes(parts[0], parts[1] if len(parts) == 3 else None), parts[-1].view(np.int64)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
