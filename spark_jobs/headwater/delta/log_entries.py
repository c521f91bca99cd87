"""The entries of a Delta table's log, one file for each version: read, and found whole or torn.

An entry is *torn* that is empty or does not end as a whole line: the lake's host lost its power before it was on disk.
As long as none above it is whole it was never committed, and nobody who reads here sees it; `headwater.gate.recovery`
takes it away before anything is written. A torn one below a whole one is damage, which engines pass over in silence.
"""

from __future__ import annotations

import json
import os.path
import re
from typing import Any
from urllib.parse import unquote

from headwater.delta import storage
from headwater.errors import Transient
from headwater.lake_root import is_remote

Action = dict[str, Any]

_BEGINNING = 16 << 10
_OF_FILES = ('{"add":', '{"remove":', '{"cdc":')

_ENTRY = re.compile(r"\A(\d{20})\.json\Z")
# <version>.checkpoint.parquet, or in parts <version>.checkpoint.<part>.<parts>.parquet. Those named by a UUID keep
# their files elsewhere.
_CHECKPOINT = re.compile(r"\A(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet\Z")


def log_path(folder: str, name: str = "") -> str:
    """The log of the Delta table in `folder`, or what is called `name` in it."""
    return os.path.join(folder, "_delta_log", name) if name else os.path.join(folder, "_delta_log")


def log_entry(folder: str, version: int) -> str:
    """The commit `version` of the Delta table in `folder`."""
    return log_path(folder, f"{version:020d}.json")


def checksum_of(place: str) -> str:
    """The file beside `place` by which Hadoop checks it, if Spark wrote it to a disk."""
    folder, name = os.path.split(place)
    return os.path.join(folder, f".{name}.crc")


class LostRace(Exception):
    """Another writer committed the version that this one wanted; reload and decide anew."""


class TornEntry(ValueError):
    """An entry of a log is not whole, and others were built on it."""


def require_version(folder: str, version: int) -> None:
    """LostRace unless the log holds `version`. One that does not has gone on and was cleaned up, or was begun anew: the
    next version's name would be free again, and a commit under it would be lost."""
    if not storage.exists(log_entry(folder, version)) and not any(
        name.startswith(f"{version:020d}.") for name in storage.names(log_path(folder))
    ):
        raise LostRace(f"version {version} of {folder} does not exist (any more)")


def read_actions(folder: str, version: int) -> list[Action] | None:
    """The actions of one commit; None when there is no such file (yet), or one that is torn."""
    lines = read_lines(folder, version)
    try:
        return None if lines is None else [json.loads(line) for line in lines]
    except ValueError:
        return None


def read_lines(folder: str, version: int) -> list[str] | None:
    """The same, as text: None unless the last line is whole."""
    try:
        text = storage.read_text(log_entry(folder, version))
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    # Not splitlines: a text in a file's statistics may hold characters that it takes for the end of a line.
    lines = [line for line in text.split("\n") if line]
    return lines if lines and _is_json(lines[-1]) else None


def position_in(folder: str, version: int, prefix: str) -> int | None:
    """The position that a commit of a pipeline's table carries, under an appId with `prefix`; None: it carries none, or
    is not there. Only the entry's beginning is read: a load's commit names thousands of files behind it. The names of
    many columns may come before, or what a MERGE was about."""
    size = _BEGINNING
    while True:
        try:
            content = storage.read_range(log_entry(folder, version), 0, size)
        except FileNotFoundError:
            return None
        at_end = len(content) < size
        lines = content.decode("utf-8", "replace").split("\n")
        for line in lines if at_end else lines[:-1]:
            if line.startswith('{"txn":') and line.endswith("}"):
                found = json.loads(line)["txn"]
                if found["appId"].startswith(prefix) and found["appId"] != f"{prefix}generation":
                    return int(found["version"])
        if at_end or any(line.startswith(_OF_FILES) for line in lines):
            return None
        size *= 8


def refuse_torn(folder: str, version: int) -> None:
    """TornEntry when the entry `version` is there, is not whole, and is not the newest. None is in a store."""
    entry, above = log_entry(folder, version), log_entry(folder, version + 1)
    if is_remote(storage.path_of(folder)):
        return
    if storage.exists(entry) and storage.exists(above) and read_actions(folder, version) is None:
        raise TornEntry(f"{entry} is empty or cut short, and version {version + 1} was built on it")


def refuse_torn_newest(folder: str, version: int) -> None:
    """Transient when the entry `version`, which is there, is not whole: entries come into being whole, so a power cut
    has left it, and who tries the next version after a look would try this one for ever."""
    if not is_remote(storage.path_of(folder)) and read_actions(folder, version) is None:
        raise Transient(
            f"{log_entry(folder, version)} is empty or cut short, as a power cut leaves it",
            code="lake_unavailable",
            where=folder,
            remedy="headwater replicate PIPELINE.yaml mends it when it starts",
        )


def files_of(folder: str, version: int) -> list[str]:
    """The entry of a version and the files that it has added; vectors are ours alone to write, and not among them."""
    added = [action["add"]["path"] for action in read_actions(folder, version) or () if "add" in action]
    return [log_entry(folder, version), *(os.path.join(folder, unquote(path)) for path in added)]


def note_written(folder: str, version: int) -> None:
    """Another library has committed `version` for this process: where `storage.sync` goes by names it has to know."""
    if storage.wants_names(folder):
        storage.wrote(*files_of(folder, version))


def entries_of(names: list[str]) -> list[int]:
    """The versions that have an entry, in order; `names`: what lies in the log."""
    return sorted(int(found[1]) for name in names if (found := _ENTRY.match(name)) is not None)


def checkpoints_of(folder: str, names: list[str]) -> dict[int, list[str]]:
    """The complete classic checkpoints by version: one file, or all of its parts."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        if (known := _CHECKPOINT.match(name)) is not None:
            found.setdefault((int(known[1]), int(known[2] or 1)), []).append(log_path(folder, name))
    return {version: files for (version, count), files in found.items() if len(files) == count}


def newest_whole(folder: str) -> int | None:
    """The version below the first torn entry behind the newest checkpoint, -1: there is none; None: nothing there is
    torn, as in a store, which has objects whole or not at all."""
    if is_remote(storage.path_of(folder)):
        return None
    try:
        names = storage.names(log_path(folder))
    except NotADirectoryError:
        return None  # for who opens the table to say
    entries, checkpoint = entries_of(names), max(checkpoints_of(folder, names), default=-1)
    torn = (v for v in entries if v > checkpoint and read_lines(folder, v) is None)
    first = next(torn, None)
    return None if first is None else first - 1


def _is_json(line: str) -> bool:
    if not line.endswith("}"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
