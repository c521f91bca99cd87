"""Files of a table that wait for the commit which is to name them: tasks have written them among the table's own, and
what they are is noted in the folder of the reload or rebuild that they are for.

No commit has named them, so to readers they are not there. What comes to nothing removes them by the notes; what was
killed before it had noted a file leaves that one to clean-up, as any writer does.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from os.path import join

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

_SUFFIX = ".files.json"


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


def put_note(notes: str, files: Sequence[DataFile]) -> str:
    """Note in the folder `notes` that these files are written; the name of the note."""
    name = f"{uuid.uuid4().hex}{_SUFFIX}"
    storage.replace(join(notes, name), json.dumps([asdict(file) for file in files]).encode())
    return name


def keep_notes(notes: str, folder: str, names: Collection[str]) -> None:
    """Those of other tasks, which did not end or were done again, go, and their files in `folder` with them."""
    for name in _names(notes):
        if name not in names:
            discard(folder, _read(notes, name))
            storage.delete(join(notes, name))


def waiting_files(root: str, name: str, folder: str) -> WaitingFiles | None:
    """Those of the reload `name`, for the table in `folder`; None: its rows do not lie in such files."""
    notes = reloaded_path(root, name)
    found = _names(notes)
    if not found:
        return None
    return WaitingFiles(folder, tuple(file for note in found for file in _read(notes, note)))


def discard_noted(notes: str, folder: str) -> None:
    """Remove what was noted, and the notes. No commit may name it, or be about to."""
    keep_notes(notes, folder, ())


def _names(notes: str) -> list[str]:
    return sorted(name for name in storage.names(notes) if name.endswith(_SUFFIX))


def _read(notes: str, name: str) -> list[DataFile]:
    return [DataFile(**file) for file in json.loads(storage.read_text(join(notes, name)))]
