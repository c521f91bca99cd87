"""Clean-up of one table: files that no version from its horizon on needs, then log entries that none needs.

Only what is known to be superfluous goes. A file goes when the log says that it was removed at or below the horizon and
no version from there on has it. One that the log does not mention at all may belong to a commit that is still to come:
it goes when it is older than any writer that could make that commit (the caller says which that is). Names that begin
with `_` or `.` are not ours to judge, but for Hadoop's checksums of files that go.

Files before log entries: what is killed in between is found again by the next run. Nothing is committed, so no writer
can lose a race to it. Delta's and delta-rs' own vacuums know neither pins nor cuts (docs/decisions/0016).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os.path
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TypeVar

from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import log_entry, log_path
from headwater.delta.log_files import LogFiles, pointed_at
from headwater.delta.whole import Named
from headwater.lake_root import is_remote

_T = TypeVar("_T")
ORPHAN_SECONDS = 24 * 3600.0
"""How long a file may wait for its commit: as long as the longest load of a table, or a driver that was stopped."""
_AT_ONCE = 8
"""Entries of a log that are read at the same time in a store."""
_PART = 500
"""Of the thousand that S3 takes, so that their checksums have a place."""
_NO_FILES = ('{"commitInfo":', '{"txn":', '{"protocol":', '{"metaData":', '{"cdc":', '{"domainMetadata":')
_OTHERS = {"add": (*_NO_FILES, '{"remove":'), "remove": (*_NO_FILES, '{"add":')}


@dataclass(slots=True)
class Cleaned:
    """What went. `files` and `bytes`: data files, deletion vectors and their checksums; `orphans` of them were never
    mentioned by the log; `log_files`: entries, checkpoints and checksums in the log."""

    files: int = 0
    bytes: int = 0
    orphans: int = 0
    log_files: int = 0


@dataclass(slots=True)
class _Known:
    """Paths below the table's folder: `needed` from the horizon on, `removed` at or below it."""

    needed: set[str]
    removed: set[str]


def clean(
    folder: str,
    log: LogFiles,
    horizon: int,
    *,
    log_from: int,
    orphans_before: float | None,
    waiting: Callable[[], set[str]] = set,
    stop: Event,
) -> Cleaned:
    """Remove what versions from `horizon` on do not need, and of the log what those from `log_from` on do not.

    `orphans_before`: files that the log does not mention go when they are older than this (seconds since 1970); None:
    they stay. So do those that are `waiting` for their commit, however old. `stop` ends it early, at a good place.
    FileNotFoundError when another clean-up was faster.
    """
    cleaned = Cleaned()
    # Before the log is read: what waits no longer by then is named there.
    spared = waiting() if orphans_before is not None else set()
    known = _known(folder, log, horizon)
    goes, sums = [], {}
    for file in storage.files_below(folder, _may_hold_files):
        if file.path.endswith(".crc"):
            sums[file.path] = file.size
        if not _is_ours(file.path) or file.path in known.needed:
            continue
        orphan = file.path not in known.removed
        if orphan and (orphans_before is None or file.modified >= orphans_before):
            continue
        if not orphan or os.path.join(folder, file.path) not in spared:
            goes.append((file, orphan))
    entries = _superseded(log, min(horizon, log_from))
    if goes or entries:
        _make_durable(log, known, entries)
    for part in _parts(folder, goes):
        if stop.is_set():
            return cleaned
        checksums = sums.keys() & {_checksum(file.path) for file, _ in part}
        storage.delete_files(folder, [*(file.path for file, _ in part), *checksums])
        cleaned.bytes += sum(file.size for file, _ in part) + sum(sums[name] for name in checksums)
        cleaned.files += len(part)
        cleaned.orphans += sum(orphan for _, orphan in part)
    cleaned.log_files = _clean_log(log, entries, orphans_before, stop)
    return cleaned


def _make_durable(log: LogFiles, known: _Known, entries: list[str]) -> None:
    """What takes the place of what goes is on disk before: checkpoints, versions that removed files, rewritten ones.
    OSError when it is not."""
    storage.sync(log.folder)
    # One that the disk has refused still reads well, and its writer, who was told, is gone.
    stay = [name for _, name in log.names if name.endswith(".parquet") and name not in entries] if entries else []
    for checkpoint in stay:
        if not storage.is_readable(log_path(log.folder, checkpoint)):
            raise OSError(errno.EIO, "the checkpoint is not on the disk as it was written", checkpoint)
    if storage.wants_names(log.folder):  # others may have written them
        needed = (os.path.join(log.folder, path) for path in known.needed)
        storage.sync_files(*needed, *(log_path(log.folder, name) for _, name in log.names))


def _known(folder: str, log: LogFiles, horizon: int) -> _Known:
    needed, removed = Named(), Named()
    for file in read_snapshot(folder, horizon).files.values():
        needed.take({"path": file.name, "deletionVector": file.vector})
    for at in range(0, len(log.entries), _AT_ONCE):
        part = log.entries[at : at + _AT_ONCE]
        texts = storage.side_by_side(folder, [partial(_text, folder, version) for version in part])
        for version, text in zip(part, texts, strict=True):
            if version > horizon and text is None:
                # Without what it added, its files would look like nobody's.
                raise FileNotFoundError(f"version {version} of {folder} was cleaned up meanwhile")
            if text is not None:
                _take(text, "remove" if version <= horizon else "add", removed if version <= horizon else needed)
    # What was committed since the look at the log.
    version = log.newest + 1
    while (text := _text(folder, version)) is not None:
        _take(text, "add", needed)
        version += 1
    return _Known(needed.below(folder), removed.below(folder))


def _text(folder: str, version: int) -> str | None:
    """None when there is no such entry: not yet, or another clean-up took it."""
    try:
        return storage.read_text(log_entry(folder, version))
    except FileNotFoundError:
        return None


def _take(text: str, kind: str, named: Named) -> None:
    """Take in the files of an entry's actions of this `kind`; lines that surely are of another are not parsed."""
    others = _OTHERS[kind]
    for line in text.split("\n"):
        if line and not line.startswith(others):
            action = json.loads(line)
            if kind in action:
                named.take(action[kind])


def _may_hold_files(folder: str) -> bool:
    """A folder of a partition may begin with anything, but has a value."""
    return "=" in folder or not folder.startswith(("_", "."))


def _is_ours(path: str) -> bool:
    """A data file or a deletion vector."""
    name = os.path.basename(path)
    vector = name.startswith("deletion_vector_") and name.endswith(".bin")
    return vector or (name.endswith(".parquet") and not name.startswith(("_", ".")))


def _superseded(log: LogFiles, horizon: int) -> list[str]:
    """Entries below the newest checkpoint at or below the horizon: the oldest version that is read begins there."""
    start = max((version for version in log.checkpoints if version <= horizon), default=0)
    pointer = pointed_at(log.folder)
    # Readers go where the pointer leads, should a slower writer have set it back.
    return log.before(min(start, pointer) if pointer is not None else start)


def _clean_log(log: LogFiles, entries: list[str], orphans_before: float | None, stop: Event) -> int:
    count = 0
    for part in _parts(log.folder, entries):
        if stop.is_set():
            return count
        storage.delete_files(log_path(log.folder), part)
        count += len(part)
    for scratch in [log_path(log.folder, name) for name in log.scratch]:
        with contextlib.suppress(FileNotFoundError):
            if orphans_before is not None and storage.info(scratch).modified < orphans_before:
                storage.delete(scratch)
                count += 1
    return count


def _parts(folder: str, those: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """What goes before it is asked whether to stop: in a store, what goes by one request."""
    size = _PART if is_remote(folder) else 1
    for at in range(0, len(those), size):
        yield those[at : at + size]


def _checksum(path: str) -> str:
    """Hadoop's, of a file."""
    below, name = os.path.split(path)
    return os.path.join(below, f".{name}.crc")
