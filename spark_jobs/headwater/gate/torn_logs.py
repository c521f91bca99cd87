"""A table's log whose end had not reached the disk when the power went: what of it is whole, and how it is cut back.

What the disk had not got is missing, empty or cut short, in no order: an entry may be torn below a whole one, a data
file behind a whole entry. What may go is for `headwater.gate.recovery` to say, which knows what was durable.
"""

from __future__ import annotations

import errno
import logging
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from headwater.delta import entries, storage
from headwater.delta.deletion_vectors import FILE_VERSION, DamagedVector, read_vector, vector_file
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import (
    Action,
    TornEntry,
    checkpoints_of,
    checksum_of,
    entries_of,
    log_entry,
    log_path,
    read_actions,
)
from headwater.delta.log_files import UnknownLog, by_version, look, pointed_at
from headwater.delta.whole import lost_file

log = logging.getLogger(__name__)

_POINTER = "_last_checkpoint"
_PARQUET_MAGIC = b"PAR1"
_LEAST_PARQUET = 12
_LATEST = 5
"""So many checkpoints of a table may be torn. Spark syncs none of its own, but a driver syncs the lake each second or
so, and few are made in that time, by replicate, another job and Spark."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The first version of a log that is not whole. `what`: which file, and how; `newest`: nothing whole lies above."""

    version: int
    what: str
    newest: bool


def first_loss(folder: str, durable: int, *, read: bool = False) -> Loss | None:
    """The first version above `durable` that is not whole; None: all are. `read`: all is read from the disk, data files
    to their ends: behind a power cut these may have their length, and zeros for content."""
    if not storage.exists(log_entry(folder, durable + 1)) and durable >= 0:
        return None  # names reach the disk in the order of their making: nothing can be above
    there = [version for version in entries_of(storage.names(log_path(folder))) if version > durable]
    whole: list[tuple[int, list[Action]]] = []
    loss: Loss | None = None
    if read:
        storage.forget(*(log_entry(folder, version) for version in there))
    for version in range(durable + 1, max(there, default=durable) + 1):
        actions = _actions(folder, version, read=read)
        if actions is None and not storage.exists(log_entry(folder, version)) and base(folder) >= version:
            whole = []  # removed by clean-up: a checkpoint holds what it said
            continue
        if actions is None:
            how = "is empty, cut short or cannot be read" if version in there else "is missing"
            newest = not any(_actions(folder, above, read=read) for above in there if above > version)
            loss = Loss(version, f"{log_entry(folder, version)} {how}", newest)
            break
        whole.append((version, actions))
    # What is lost of files counts where they are live; below a loss others may be.
    while (lost := _lost_file(folder, whole, read=read)) is not None:
        version, what = lost
        newest = version == whole[-1][0] and (loss is None or loss.newest)
        loss = Loss(version, what, newest)
        whole = [(known, actions) for known, actions in whole if known < version]
    return loss


def unreadable_end(folder: str, versions: Sequence[int]) -> Loss | None:
    """Of the newest `versions`, which are whole by their entries, the first that has lost what a file holds. What the
    disk does not give back, a mount perhaps for a moment, is no loss here: OSError."""
    commits = [(version, read_actions(folder, version) or []) for version in versions]
    for version, add in sorted(_live(commits).values(), key=lambda found: found[0]):
        path = os.path.join(folder, unquote(add["path"]))
        if not storage.is_readable(path):
            return Loss(version, f"{path} has the right length, and is no data file", version == versions[-1])
    return None


def loss_in_between(folder: str, durable: int) -> Loss | None:
    """The first version above `durable` that has lost a file which is not live at the end any more: the table is whole,
    and cuts that name this version are not. None also where the version before it is not whole either: there clean-up
    has been, and nothing can be cut back to."""
    above = [version for version in entries_of(storage.names(log_path(folder))) if version > durable]
    commits = [(version, _actions(folder, version, read=True) or []) for version in above]
    sound = set(_live(commits))  # `first_loss` has read these: a large file may come back with each new vector
    for version, actions in commits:
        for add in (action["add"] for action in actions if "add" in action):
            if what := _what_is_wrong(folder, add, read=True, is_sound=add["path"] in sound):
                try:
                    return None if lost_file(folder, version - 1) else Loss(version, what, newest=False)
                except (FileNotFoundError, KeyError, TornEntry):
                    return None  # the log does not reach back so far
            sound.add(add["path"])
    return None


def cut_back(folder: str, version: int) -> None:
    """Remove `version` and what follows it, newest first: killed in between, it leaves a log without a hole."""
    for number, name in reversed(by_version(storage.names(log_path(folder)))):
        if number >= version:
            storage.delete(log_path(folder, name))
    pointed = pointed_at(folder)
    if pointed is not None and pointed >= version:
        _drop_pointer(folder)
    entries.forget(folder)
    log.warning("%s: version %d and what follows it had not reached the disk, and is taken away", folder, version)


def drop_torn_checkpoints(folder: str, since: float = 0.0) -> str:
    """A checkpoint that is not whole is none, nor is one of a version whose entry is torn: of that the disk had nothing
    yet. What it stood for is still in the entries below it: these go only when it is on disk. Where they are gone it
    stays, and is returned; else nothing. `since` (seconds since 1970): what was written before is on disk.

    Nothing need point at it: the disk may have the name of the newest, and the pointer as it was before."""
    pointed = pointed_at(folder)  # before the names: a driver beside may make another one meanwhile
    names = storage.names(log_path(folder))
    found, good, torn = checkpoints_of(folder, names), 0, set[int]()
    for version in sorted(found, reverse=True):
        if good >= _LATEST and version != pointed:
            continue
        # Readers begin at these; all of each is read. With thousands of tables that would be most of a start.
        read = (not good or version == pointed) and any(_modified(file) >= since for file in found[version])
        if _is_good(folder, version, found[version], read=read):
            good += 1
        elif all(map(storage.exists, found[version])):  # clean-up has not taken it meanwhile
            torn.add(version)
    whole, there, stays = {-1, *(version for version in found if version not in torn)}, set(entries_of(names)), ""
    for version in sorted(torn):
        begin = max(below for below in whole if below < version)
        # Below a whole one it stands for nothing that is read.
        if version > max(whole) and not there.issuperset(range(begin + 1, version + 1)):
            stays = stays or found[version][0]
            torn.remove(version)
            continue
        for file in found[version]:
            storage.delete(file)
            storage.delete(checksum_of(file))  # of Spark's: the next one there may be another writer's
    if torn:
        log.warning("%s: a checkpoint had not reached the disk, and is taken away", folder)
    now = pointed_at(folder)
    if _POINTER in names and (now in torn or (now == pointed and now not in found)):
        _drop_pointer(folder)  # who reads looks for the newest
    return stays


def is_damaged(folder: str) -> bool:
    """Whether the log of the table in `folder`, if there is one, cannot be read to its end. One without an entry, which
    a process leaves that died over its first, is no table to Spark, and no place for one either."""
    try:
        newest = look(folder).newest
    except UnknownLog:
        return False  # for another engine to say
    except FileNotFoundError:
        return storage.is_folder(log_path(folder))
    try:
        return read_snapshot(folder).version < newest
    except (FileNotFoundError, ValueError, KeyError, TypeError, pa.ArrowException):
        return True
    except OSError as error:  # Arrow's own, of what it cannot decode, have no number
        if error.errno not in (None, errno.EIO):
            raise
        return True


def base(folder: str) -> int:
    """The newest checkpoint's version; -1: there is none."""
    return max(checkpoints_of(folder, storage.names(log_path(folder))), default=-1)


def _lost_file(folder: str, commits: list[tuple[int, list[Action]]], *, read: bool) -> tuple[int, str] | None:
    """Of the files that these commits have added, and that are live behind the last of them, the first that is not as
    its entry says; with the version that added it."""
    for version, add in sorted(_live(commits).values(), key=lambda found: found[0]):
        if why := _what_is_wrong(folder, add, read=read):
            return version, why
    return None


def _live(commits: list[tuple[int, list[Action]]]) -> dict[str, tuple[int, Action]]:
    """Of the files that these commits have added, by their paths, those that are live behind the last of them: the
    version that has, and how."""
    live: dict[str, tuple[int, Action]] = {}
    for version, actions in commits:
        for action in actions:
            if "remove" in action:
                live.pop(action["remove"]["path"], None)
        for action in actions:
            if "add" in action:
                live[action["add"]["path"]] = version, action["add"]
    return live


def _actions(folder: str, version: int, *, read: bool) -> list[Action] | None:
    """As `read_actions`. What is read from the disk and not given by it is as good as not there."""
    try:
        return read_actions(folder, version)
    except OSError as error:
        if not read or error.errno != errno.EIO:
            raise
        return None


def _what_is_wrong(folder: str, add: Mapping[str, Any], *, read: bool, is_sound: bool = False) -> str:
    """With a data file that an entry names (unless it `is_sound`), or its vector; nothing, if both are as it says."""
    try:
        return ("" if is_sound else _file_fault(folder, add, read=read)) or _vector_fault(folder, add, read=read)
    except OSError as error:
        if not read or error.errno != errno.EIO:
            raise
        return f"{os.path.join(folder, unquote(add['path']))}, or its deletion vector, cannot be read: {error}"


def _file_fault(folder: str, add: Mapping[str, Any], *, read: bool) -> str:
    path, size = os.path.join(folder, unquote(add["path"])), int(add["size"])
    found = _size(path)
    if found != size:
        return f"{path} is missing" if found < 0 else f"{path} has {found} bytes, and its entry says {size}"
    if not _is_parquet(path) or (read and not storage.is_readable(path)):
        return f"{path} has the right length, and is no data file"
    return ""


def _vector_fault(folder: str, add: Mapping[str, Any], *, read: bool) -> str:
    try:
        if vector := add.get("deletionVector"):
            place = vector_file(folder, vector)
            if read and place is not None:
                storage.forget(place)
            read_vector(folder, vector)
            if place is not None and storage.read_range(place, 0, 1) != FILE_VERSION:
                return f"{place} does not begin as a file of deletion vectors"
    except FileNotFoundError as error:
        return f"a deletion vector is missing: {error}"
    except DamagedVector as error:
        return str(error)
    return ""


def _size(path: str) -> int:
    try:
        return storage.info(path).size
    except FileNotFoundError:
        return -1


def _modified(path: str) -> float:
    try:
        return storage.info(path).modified
    except FileNotFoundError:
        return 0.0


def _is_good(folder: str, version: int, checkpoint: list[str], *, read: bool) -> bool:
    """OSError where the disk does not give it back, a mount perhaps for a moment: then nobody knows."""
    entry = log_entry(folder, version)
    if read:
        storage.forget(entry)
    try:
        return all(_is_parquet(file) and (not read or storage.is_readable(file)) for file in checkpoint) and (
            not storage.exists(entry) or read_actions(folder, version) is not None
        )
    except FileNotFoundError:
        return False  # clean-up has just taken it


def _is_parquet(file: str) -> bool:
    size = _size(file)
    if size < _LEAST_PARQUET:
        return False
    ends = storage.read_range(file, 0, 4), storage.read_range(file, size - 4, 4)
    return ends == (_PARQUET_MAGIC, _PARQUET_MAGIC)


def _drop_pointer(folder: str) -> None:
    storage.delete(log_path(folder, _POINTER))
    storage.delete(checksum_of(log_path(folder, _POINTER)))
