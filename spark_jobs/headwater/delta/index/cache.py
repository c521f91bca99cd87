"""Indexes of keys kept on local disk from one run of a driver to the next: a start reads only what is new.

`$XDG_CACHE_HOME/headwater/index` (`~/.cache/...`), private to its user, a folder for each table and incarnation with
its runs and one manifest. Everything in it can be built anew from the table, and is, at any doubt: another table id,
key or format, a version whose commit is not the same any more, a damaged file, a folder that others could write to.
It may be deleted at any time. Beyond the limit, or on a disk that is nearly full, the tables that were longest not
used go first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwater.delta import storage
from headwater.delta.index.runs import KeyRun, Stored, read_run
from headwater.delta.log_entries import log_entry

log = logging.getLogger(__name__)

_FORMAT = 1
"""Of manifests, runs and key codes: raise it when one of them changes."""
_MANIFEST = "manifest.json"
_AT_MOST = 20 << 30
"""Bytes of the runs of all tables together."""
_LEFT_FREE = 0.05
"""Of the disk: a cache must never be what fills it."""


def cache_folder() -> Path:
    """Where indexes are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "headwater" / "index"


@dataclass(frozen=True, slots=True)
class Subject:
    """What an index is of: a table, one incarnation of it, and its keys (names and types)."""

    folder: str
    table_id: str
    incarnation: int
    keys: str

    @property
    def name(self) -> str:
        return hashlib.sha256(f"{self.folder}\0{self.table_id}\0{self.incarnation}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Manifest:
    """An index at `version`: its runs, oldest first, and which file each number in their places is.

    `files`: number, name, and how many rows of it were deleted; all numbers are below `numbers`. `generation`: of the
    driver that saved it.
    """

    version: int
    commit: str
    generation: int
    numbers: int
    files: tuple[tuple[int, str, int], ...]
    runs: tuple[Stored, ...]


class IndexCache:
    """The kept index of one table, held by one process. Use `open_cache`."""

    def __init__(self, subject: Subject, path: Path, lock: int) -> None:
        self._subject, self._lock = subject, lock
        self.path = path

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def read(self, version: int, generation: int) -> tuple[Manifest, list[KeyRun]] | None:
        """What was saved at or below `version`, if there is no doubt about it."""
        try:
            document = json.loads((self.path / _MANIFEST).read_text(encoding="utf-8"))
            checksum = document.pop("checksum")
            if checksum != _digest(document) or document.pop("format") != _FORMAT:
                raise ValueError("the manifest is damaged or of another format")
            if document.pop("subject") != asdict(self._subject):
                raise ValueError("it is of another table")
            runs = tuple(Stored(**{**run, "checksums": tuple(run["checksums"])}) for run in document.pop("runs"))
            files = tuple((int(number), str(name), int(deleted)) for number, name, deleted in document.pop("files"))
            manifest = Manifest(**document, files=files, runs=runs)
            if manifest.version > version or manifest.generation > generation:
                raise ValueError("it is ahead of the table")
            if manifest.commit != commit_digest(self._subject.folder, manifest.version):
                raise ValueError("the table's log is not the one that it was saved with")
            found = [read_run(str(self.path), stored) for stored in runs]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.info("%s: the kept index of its keys is not used: %s", self._subject.folder, error)
            self.clear()
            return None
        self.sweep({stored.name for stored in runs})
        return manifest, found

    def write(self, manifest: Manifest) -> None:
        """Make `manifest`, whose runs are written, the saved state."""
        document = {"format": _FORMAT, "subject": asdict(self._subject), **asdict(manifest)}
        # As JSON has it: the checksum is over what will be read.
        document = json.loads(json.dumps(document))
        document["checksum"] = _digest(document)
        scratch = self.path / f"{_MANIFEST}.new"
        for stored in manifest.runs:
            _sync(self.path / stored.name)
        scratch.write_text(json.dumps(document), encoding="utf-8")
        _sync(scratch)
        scratch.replace(self.path / _MANIFEST)

    def sweep(self, kept: set[str]) -> None:
        """Remove what an earlier process left behind."""
        for path in self.path.iterdir():
            if path.name != _MANIFEST and path.name not in kept:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Nothing is kept any more."""
        (self.path / _MANIFEST).unlink(missing_ok=True)
        self.sweep(set())

    def has_room(self, size: int) -> bool:
        """Whether the `size` bytes of this table, which are written, may stay: if need be instead of other tables' that
        nobody uses now."""
        others = [path for path in self.path.parent.iterdir() if path != self.path and path.is_dir()]
        sizes = {path: sum(file.stat().st_size for file in _runs(path)) for path in others}

        def fits() -> bool:
            disk = shutil.disk_usage(self.path)
            return size + sum(sizes.values()) <= _AT_MOST and disk.free >= _LEFT_FREE * disk.total

        for path in sorted(others, key=_last_used):
            if fits():
                break
            if _removed(path):
                del sizes[path]
        return fits()


def open_cache(subject: Subject, *, make: bool) -> IndexCache | None:
    """The kept index of `subject`, locked; None where nothing is kept (without `make`) or can be kept: then the index
    lives with the process."""
    try:
        root = cache_folder()
        if not make and not (root / subject.name).is_dir():
            return None
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = root / subject.name
        path.mkdir(mode=0o700, exist_ok=True)
        for folder in (root, path):
            found = folder.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(f"{folder} is not private to this user")
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.is_dir():
                raise BlockingIOError("it was just removed")
        except OSError:
            os.close(lock)
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.info("%s: the index of its keys is not kept: %s", subject.folder, error)
        return None
    return IndexCache(subject, path, lock)


def commit_digest(folder: str, version: int) -> str:
    """Tells one history of a table from another that has the same version. FileNotFoundError when it is gone."""
    return hashlib.sha256(storage.read(log_entry(folder, version))).hexdigest()


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _runs(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(path.glob("*.run"))
    return []


def _last_used(path: Path) -> float:
    with contextlib.suppress(OSError):
        return (path / _MANIFEST).stat().st_mtime
    return 0.0


def _removed(path: Path) -> bool:
    """Unless a process holds it."""
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
            return True
        finally:
            os.close(lock)
    return False
