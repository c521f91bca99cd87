"""What a load has written and not committed yet: a note for each stretch of the table, so that the next attempt, in
the same command or after a kill, need not read at the source what has not changed there.

A note is no part of the table and may vanish at any time. Whoever finds one proves that its rows are still those of the
source (`headwater.load.stretches`) before it takes the files, and none is taken whose load has committed: the table has
gone on with those files since.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields, replace
from os.path import join

from headwater.delta import storage
from headwater.delta.delta_log import DataFile, Snapshot
from headwater.delta.new_files import discard
from headwater.lake.paths import stretches_path, table_path
from headwater.lake.registry import TableRecord

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class StretchNote:
    """The rows of pages `first` to `end` (exclusive; None: to the end) of a relation, as a snapshot with these bounds
    saw them, and the files that hold them. `like`: digest of all that must be the same for them to be of use; `size`:
    of the rows, in bytes of memory."""

    relation_id: int
    first: int
    end: int | None
    like: str
    xmin: int
    xmax: int
    rows: int
    size: int
    files: tuple[DataFile, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StretchNote:
        """ValueError, KeyError or TypeError for what is no note."""
        document = json.loads(text)
        files = tuple(DataFile(**file) for file in document.pop("files"))
        return cls(**{field.name: document[field.name] for field in fields(cls) if field.name != "files"}, files=files)


@dataclass(frozen=True, slots=True)
class StretchNotes:
    """Those of the load of `record`, at its incarnation, into the lake at `root`."""

    root: str
    pipeline: str
    record: TableRecord

    def write(self, note: StretchNote) -> None:
        """Its files are written."""
        folder = self._path(self.record.incarnation)
        storage.make_folder(folder)
        storage.replace(join(folder, f"{note.relation_id}-{note.first}{_SUFFIX}"), note.to_json().encode())

    def count(self) -> int:
        """How many stretches this load has written or taken over."""
        return len(storage.names(self._path(self.record.incarnation)))

    def earlier(self, snapshot: Snapshot) -> list[StretchNote]:
        """What loads before this one have left and never committed, of each stretch the newest; their files are there.
        `snapshot`: of the table, as it stands before this load."""
        found: dict[tuple[int, int], StretchNote] = {}
        for incarnation in sorted(self._loads(), reverse=True):
            if incarnation < self.record.incarnation and not self._has_committed(snapshot, incarnation):
                for note in self._of(incarnation):
                    # A load behind that one may have committed them: a table cannot take again what it has.
                    if not any(file.name in snapshot.files for file in note.files) and all(
                        map(self._is_there, note.files)
                    ):
                        found.setdefault((note.relation_id, note.first), note)
        return list(found.values())

    def forget(self, snapshot: Snapshot, kept: Collection[DataFile]) -> None:
        """This load has committed the files `kept` over `snapshot`: nothing that it or one before it has noted is
        needed any more."""
        needed = {*(file.name for file in kept), *snapshot.files}
        for incarnation in self._loads():
            if incarnation > self.record.incarnation:
                continue
            # The files of one that has committed are the table's.
            if incarnation == self.record.incarnation or not self._has_committed(snapshot, incarnation):
                files = [file for note in self._of(incarnation) for file in note.files if file.name not in needed]
                discard(self._folder, files)
            storage.delete_folder(self._path(incarnation))

    def _is_there(self, file: DataFile) -> bool:
        try:
            return storage.info(file.in_folder(self._folder)).size == file.size
        except FileNotFoundError:
            return False

    @property
    def _folder(self) -> str:
        return table_path(self.root, self.record.path)

    def _path(self, incarnation: int | None = None) -> str:
        return stretches_path(self.root, self.record.path, "" if incarnation is None else str(incarnation))

    def _loads(self) -> list[int]:
        """Incarnations of the table whose loads have notes."""
        return [int(name) for name in storage.names(self._path()) if name.isdigit()]

    def _has_committed(self, snapshot: Snapshot, incarnation: int) -> bool:
        return replace(self.record, incarnation=incarnation).app_id(self.pipeline) in snapshot.transactions

    def _of(self, incarnation: int) -> Iterator[StretchNote]:
        for name in storage.names(self._path(incarnation)):
            if not name.endswith(_SUFFIX):
                continue  # it is being written
            try:
                yield StretchNote.from_json(storage.read_text(join(self._path(incarnation), name)))
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue
