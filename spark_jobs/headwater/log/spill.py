"""Blocks on local disk: a private folder for each driver, a file for each transaction that is too large for memory.

The source is the retry log, so nothing here is ever synced or recovered: what a driver left behind is swept when the
next one starts. A folder is named by nobody else (mkdtemp, 0700) and locked (flock) by the driver as long as it lives;
a folder that can be locked has no owner any more. A file goes when its transaction aborts, or when the driver has let
go of the last block in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from headwater.errors import HeadwaterError, Refused, Transient
from headwater.log.blocks import Block, Held, Int64, Rows

_PREFIX: Final = "headwater-spill-"
_INT64_BYTES: Final = 8


class SpillFolder:
    """The driver's folder. A context manager: swept, made and locked at the beginning, gone at the end."""

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent or tempfile.gettempdir()
        self.path = ""
        self._lock = -1

    def __enter__(self) -> SpillFolder:
        sweep(self._parent)
        while True:  # another driver's sweep may meet the folder before it is locked
            self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent)
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(self.path):
                    return self
                os.close(self._lock)

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def free() -> tuple[str, int]:
    """Where a driver that is started like this process would spill, and the bytes that are free there."""
    parent = tempfile.gettempdir()
    return parent, shutil.disk_usage(parent).free


def has_less_room_than(folder: str) -> bool:
    """Whether what is spilled lies on another disk than `folder`, and a fuller one."""
    parent, room = free()
    return os.stat(parent).st_dev != os.stat(folder).st_dev and room < shutil.disk_usage(folder).free


def sweep(parent: str) -> list[str]:
    """Remove folders of drivers that are gone; returns them. Those of other users and of living drivers stay."""
    swept = []
    for path in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                swept.append(str(path))
            finally:
                os.close(descriptor)
    return swept


@dataclass(eq=False)
class SpillFile:
    """One file of blocks: its path, and the budget of the folder. It may go from process to process."""

    path: str
    budget: int

    def remove(self) -> None:
        """Idempotent; a file that is gone already is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def remove_after_use(self) -> None:
        """From now on this process owns the file: it goes with the last reference to it."""
        weakref.finalize(self, _unlink, self.path)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


@dataclass(frozen=True, slots=True)
class Spilled:
    """A block's content in `file` from `offset`: `size` bytes of the log, then starts, ends and numbers of its changes.

    There are `stored` of them. `base` is added to their numbers; numbers (before that) in one of the half-open
    ranges `dropped` were rolled back and are left out.
    """

    file: SpillFile
    offset: int
    size: int
    stored: int
    first: int
    last: int
    base: int = 0
    dropped: tuple[tuple[int, int], ...] = ()
    changes: int = field(default=0)

    @property
    def memory(self) -> int:
        return 0

    def load(self) -> Held:
        """A view of the file. Pages of it count as this process's memory while the view lives."""
        numbers = self.stored * _INT64_BYTES
        mapped = np.memmap(self.file.path, np.uint8, "r", self.offset, (self.size + 3 * numbers,)).view(np.ndarray)
        copied = mapped[self.size :].tobytes()  # behind bytes of any length, so that their places are odd
        starts, ends, sequence = np.frombuffer(copied, dtype=np.int64).reshape(3, self.stored)
        held = Held(mapped[: self.size], starts, ends, sequence + self.base)
        return held.part(kept_of(sequence, self.dropped)) if self.dropped else held

    def rebased(self, base: int, dropped: tuple[tuple[int, int], ...]) -> Spilled:
        """At commit: the final numbers, and without what was rolled back."""
        touching = tuple(span for span in dropped if span[0] <= self.last and span[1] > self.first)
        changed = replace(self, base=base, dropped=touching, changes=self.stored)
        return replace(changed, changes=changed.load().changes) if touching else changed


def kept_of(sequence: Int64, dropped: tuple[tuple[int, int], ...]) -> Rows:
    """Which of the numbers lie in none of the half-open ranges."""
    kept = np.ones(len(sequence), dtype=np.bool_)
    for begin, end in dropped:
        kept &= (sequence < begin) | (sequence >= end)
    return kept


def spill_files(blocks: Iterable[Block]) -> list[SpillFile]:
    """The files that the blocks lie in."""
    files = {id(b.content.file): b.content.file for b in blocks if isinstance(b.content, Spilled)}
    return list(files.values())


class SpillStore:
    """Writes blocks below `folder`, where at most `budget` bytes may lie at a time. For one thread."""

    def __init__(self, folder: str, budget: int) -> None:
        self.folder = folder
        self._budget = budget
        self._number = 0
        self.written = 0
        """Bytes written since the start."""

    def new_file(self, kind: str = "blocks") -> SpillFile:
        """A name for a file that nobody has yet."""
        self._number += 1
        return SpillFile(os.path.join(self.folder, f"{os.getpid()}-{id(self)}-{self._number}.{kind}"), self._budget)

    @classmethod
    def beside(cls, file: SpillFile) -> SpillStore:
        """Another store of the same folder and budget, for what is made from the blocks of `file`."""
        return cls(os.path.dirname(file.path), file.budget)

    def used(self) -> int:
        """Bytes on disk now: the driver removes files when it has applied them."""
        with os.scandir(self.folder) as entries:
            return sum(size for entry in entries for size in _size_of(entry))

    def write(self, file: SpillFile, blocks: list[Block]) -> list[Block]:
        """Append the blocks; returns them as they are found there. Transient or Refused, code `spill_full`."""
        contents = [block.load() for block in blocks]
        needed = sum(content.memory for content in contents)
        self.require(needed)
        try:
            descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as stream:
                offset = stream.seek(0, os.SEEK_END)
                written = []
                for block, content in zip(blocks, contents, strict=True):
                    for part in (content.data, content.starts, content.ends, content.sequence):
                        stream.write(memoryview(part))  # type: ignore[arg-type]
                    count, numbers = content.changes, content.sequence
                    first, last = (int(numbers[0]), int(numbers[-1])) if count else (0, -1)
                    where = Spilled(file, offset, content.size, count, first, last, changes=count)
                    written.append(Block(block.relation, where))
                    offset += content.memory
        except OSError as error:
            raise self.refusal(error) from error
        self.written += needed
        return written

    def require(self, needed: int) -> None:
        """Refused, code `spill_full`, when so many bytes more are beyond the budget."""
        if self.used() + needed > self._budget:
            raise self._full(
                Refused,
                f"open and waiting transactions need more than the budget of {self._budget} bytes on disk",
                "raise replicate.spill, or let the source's transaction be split",
            )

    def refusal(self, error: OSError) -> HeadwaterError:
        """The disk did not take what was written."""
        message = f"the disk took no further changes: {error.strerror or error}"
        return self._full(Transient, message, "make room there, or let TMPDIR name a larger disk")

    def _full(self, kind: type[HeadwaterError], message: str, remedy: str) -> HeadwaterError:
        return kind(
            message,
            code="spill_full",
            where=self.folder,
            remedy=f"{remedy}; then run replicate again: nothing is lost, it goes on from the ledger",
        )


def _size_of(entry: os.DirEntry[str]) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):  # the driver has just removed it
        yield entry.stat().st_size
