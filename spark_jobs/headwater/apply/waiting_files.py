"""Files of a table that wait for the commit which is to name them: tasks have written them among the table's own, for a
reload or a rebuild, in whose folder it is noted what they are.

No commit has named them, so to readers they are not there. Each task notes what it has written; when all have ended the
job lists, in one file, those that count: a task may have been done twice. Clean-up spares what is noted or listed
there. What comes to nothing removes them by these; a file that nobody had noted yet is clean-up's, as any writer's.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from os.path import join
from typing import Any

import pyarrow as pa
from pyroaring import BitMap

from headwater.arrow_types import lake_schema
from headwater.delta import storage
from headwater.delta.data_files import live_batches
from headwater.delta.delta_log import DataFile
from headwater.delta.layout import Layout
from headwater.delta.new_files import discard
from headwater.lake.paths import reloaded_path
from headwater.schema import TableSchema

_LIST = "files.json"
_NOTES = "notes"


@dataclass(frozen=True, slots=True)
class WaitingFiles:
    """All of a reload's. `folder`: the table's."""

    folder: str
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows or 0 for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def places(self) -> list[str]:
        return [file.in_folder(self.folder) for file in self.files]

    def batches(self, schema: TableSchema, layout: Layout) -> Iterator[pa.Table]:
        """The rows, in parts; `layout`: that they were written in."""
        for file in self.files:
            yield from live_batches(self.folder, file, BitMap(), lake_schema(schema), layout)


def make_notes(root: str, name: str) -> str:
    """The folder in which tasks note what they write for the reload `name`."""
    folder = join(reloaded_path(root, name), _NOTES)
    storage.make_folder(folder)  # executors write to it, whoever they run as
    return folder


def put_note(root: str, notes: str, folder: str, files: Sequence[DataFile]) -> None:
    """By a task: these files are written for the table in `folder`."""
    storage.replace(join(notes, f"{uuid.uuid4().hex}.json"), _text(root, folder, files))


def put_list(root: str, name: str, folder: str, files: Sequence[DataFile]) -> None:
    """By the job: these files, and no others, hold the rows of the reload `name`."""
    storage.replace(join(reloaded_path(root, name), _LIST), _text(root, folder, files))


def are_listed(root: str, name: str) -> bool:
    """Whether the rows of the reload `name` lie in such files."""
    return storage.exists(join(reloaded_path(root, name), _LIST))


def waiting_files(root: str, name: str) -> WaitingFiles | None:
    """Those that are listed; None: the rows do not lie in such files. Nor where a power cut has torn the list: it is on
    disk before a driver hears of it, and what it named is then clean-up's."""
    try:
        document = json.loads(storage.read_text(join(reloaded_path(root, name), _LIST)))
    except (FileNotFoundError, ValueError):
        return None
    return _read(root, document)


def discard_waiting(root: str, name: str) -> None:
    """Remove the files of the reload `name`, noted or listed, and what says of them. No commit may name one, or be
    about to."""
    for found in _all(root, name):
        discard(found.folder, found.files)
    storage.delete(join(reloaded_path(root, name), _LIST))
    storage.delete_folder(join(reloaded_path(root, name), _NOTES))


def all_waiting(root: str) -> set[str]:
    """The places of all such files in the lake."""
    names = storage.names(reloaded_path(root, ""))
    return {place for name in names for found in _all(root, name) for place in found.places}


def _all(root: str, name: str) -> Iterator[WaitingFiles]:
    """What was noted, and what was listed; files may be in both."""
    if (listed := waiting_files(root, name)) is not None:
        yield listed
    notes = join(reloaded_path(root, name), _NOTES)
    for note in storage.names(notes):
        try:
            yield _read(root, json.loads(storage.read_text(join(notes, note))))
        except (FileNotFoundError, ValueError):  # it is being written, or has just gone
            continue


def _text(root: str, folder: str, files: Sequence[DataFile]) -> bytes:
    # Who reads it may see the lake under another path.
    below = folder.removeprefix(root).lstrip("/")
    return json.dumps({"below": below, "files": [asdict(file) for file in files]}).encode()


def _read(root: str, document: dict[str, Any]) -> WaitingFiles:
    return WaitingFiles(join(root, document["below"]), tuple(DataFile(**file) for file in document["files"]))
