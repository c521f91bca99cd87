"""A table as its one writer keeps it in memory: live files with their deleted rows (`headwater.apply.live_files`), and
an index of where each key lies (`headwater.delta.index.index`).

`find` leads from keys to live rows, `deletions` and `rows_at` work on what was found. All of it is derived from the
table's log and data files and follows them by `advance`; after a lost race it is simply advanced again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.file_keys import KeyFiles, Keys, Numbered, RunsGone, runs_by_tasks
from headwater.apply.live_files import LiveFiles, are_among
from headwater.arrow_types import key_schema
from headwater.delta.data_files import count_rows, read_rows
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.index.cache import Subject
from headwater.delta.index.codes import Codes
from headwater.delta.index.index import NOWHERE, KeyIndex, place_of, row_of
from headwater.delta.index.kept_index import KeptIndex
from headwater.delta.layout import Layout, layout_of
from headwater.delta.log_entries import Action
from headwater.delta.where_files import columns_read, rows_matching
from headwater.predicate import Predicate
from headwater.schema import TableSchema

log = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]

_NO_ROWS = BitMap()
_MORE_FILES = 1 << 14
"""Than were written at first: what brings them forward adds some."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What a kept index belongs to, besides its table: the incarnation, and the driver's generation."""

    incarnation: int
    generation: int


@dataclass(frozen=True, slots=True)
class Added:
    """A file of our own commit: its rows stand under `codes` (None: not known), those numbered `gone` are deleted
    already."""

    file: DataFile
    codes: Codes | None
    gone: BitMap = _NO_ROWS


@dataclass(frozen=True, slots=True)
class _Room:
    """Numbers from `first` on that are left out in the files `of` a table."""

    first: int
    count: int
    of: LiveFiles


@dataclass(frozen=True, slots=True)
class Base:
    """A table as it stood in its writer's turn, for what is made ready beside it. `files`: names by number; `keys`:
    where each key lay."""

    snapshot: Snapshot
    files: Mapping[int, str]
    keys: KeyIndex
    room: _Room


@dataclass(frozen=True, slots=True)
class Aside:
    """Files that are made ready: `snapshot`, which is the caller's own, says of them what a log would. `still_wanted`
    raises when they are not."""

    snapshot: Snapshot
    room: _Room
    still_wanted: Callable[[], None]


class LiveTable:
    """The table in `folder` at the snapshot's version. One thread at a time."""

    def __init__(
        self,
        folder: str,
        schema: TableSchema,
        kept: Keep | None = None,
        beside: Executor | None = None,
        aside: Aside | None = None,
        tasks: FileTasks | None = None,
    ) -> None:
        """`kept`, `beside`: as of `keep`; without them the index is not kept, and merged in the caller's turn. `aside`:
        not the table itself, but files that are made ready to become its own. `tasks` read many keys."""
        self.snapshot: Snapshot = read_snapshot(folder) if aside is None else aside.snapshot
        self._room = aside.room if aside is not None else None
        self._still_wanted = aside.still_wanted if aside is not None else lambda: None
        self.keys = key_schema(schema)
        self._schema = schema
        self._folder = folder
        self._tasks = tasks
        self._beside: Executor | None = None
        self._kept: KeptIndex | None = None
        self._layout: tuple[Action, Layout] | None = None
        self._forget()
        self._count_rows()
        if kept is not None and beside is not None:
            self.keep(kept, beside, tasks)

    def keep(self, kept: Keep, beside: Executor, tasks: FileTasks | None = None) -> None:
        """From now on the index is kept on local disk, as `kept` says, its large parts are merged and saved by
        `beside`, and `tasks` read many keys. Said again it changes nothing."""
        self._tasks = tasks  # whoever has read it until now may have ended
        if self._kept is not None:
            return
        table_id = str(self.snapshot.metadata.get("id"))
        subject = Subject(self._folder, table_id, kept.incarnation, f"{self.keys.names} {self.keys.types}")
        self._kept = KeptIndex(subject, kept.generation)
        self._beside = beside
        self._index.work_beside(beside, self._kept.folder)

    def _forget(self) -> None:
        """Without files and index; both are derived anew when they are asked for."""
        folder = self._kept.folder if self._kept is not None else lambda: None
        self._files = LiveFiles(self.snapshot)
        if self._room is not None:
            self._files.leave_out(self._room.first)
        self._index = KeyIndex(self._files.alive, self._beside, folder)
        self._indexed = False

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """What fails half way leaves no half of an index."""
        try:
            yield
        except BaseException:
            self._index.close()
            self._forget()
            raise

    @property
    def version(self) -> int:
        return self.snapshot.version

    def index_keys(self) -> None:
        """Find out where each key lies now, and not when the first is looked for."""
        self._ensure_index()

    def all_keys(self) -> Iterator[Codes]:
        """Of the rows that are there and of some that were, in parts."""
        self._ensure_index()
        return self._index.keys()

    @property
    def layout(self) -> Layout:
        """How rows lie in the table's files, by its newest metadata."""
        metadata = self.snapshot.metadata
        if self._layout is None or self._layout[0] is not metadata:
            self._layout = metadata, layout_of(metadata)
        return self._layout[1]

    def advance(self, version: int | None = None) -> None:
        """Follow commits of others up to `version` (None: as far as there are any)."""
        if not self.snapshot.advance(version):
            return
        self._count_rows()
        if self._indexed:
            with self._in_step():
                self._follow()

    def base(self, files: int, *, part: bool) -> Base:
        """What about so many `files` are made ready by, as a `part` of the table, or as all of it: then nobody asks
        where its keys are."""
        if part:
            self._ensure_index()
        snapshot, count = self.snapshot, files + _MORE_FILES
        stands = replace(snapshot, files=dict(snapshot.files), transactions=dict(snapshot.transactions))
        if not self._indexed:  # its numbers are yet to be given
            return Base(stands, {}, KeyIndex(), _Room(0, 0, LiveFiles(stands)))
        numbers = {live.number: live.file.name for live in self._files}
        room = _Room(self._files.leave_out(count), count, self._files)
        return Base(stands, numbers, self._index.as_it_is(), room)

    def follow_own(self, actions: list[Action], deleted: Mapping[str, BitMap], added: Iterable[Added]) -> None:
        """Follow our own commit: it left `deleted` in the files named, and added these."""
        self.snapshot.follow(actions)
        if not self._indexed:
            return
        with self._in_step():
            known = dict(deleted)
            for new in added:
                if new.codes is not None:
                    self._put(new, new.codes)
                    known[new.file.name] = new.gone
            self._follow(known)

    def follow_ready(
        self,
        actions: list[Action],
        deleted: Mapping[str, BitMap],
        ready: LiveTable,
        moved_out: tuple[Codes, Int64],
    ) -> None:
        """Follow our own commit: it left `deleted` in the files named, and added all that was made `ready`.

        `moved_out`: keys whose rows have left that for another place, and that place. The index of what was made ready
        says of each that it has no row, which must not be the last word."""
        self.snapshot.follow(actions)
        if not self._indexed:
            return
        with self._in_step():
            known = dict(deleted)
            if ready.fits_into(self):
                self._files.take(ready._files)
                self._index.take(ready._index)
                self._index.put(*moved_out)
                known |= {live.file.name: ready._files.deleted_in(live) for live in ready._files}
            self._follow(known)

    def fits_into(self, table: LiveTable) -> bool:
        """Whether its numbers are free there; they are not in what has been read anew since. Nobody minds where the
        table does not know its keys."""
        room = self._room
        if not table._indexed:
            return True
        if room is None or room.of is not table._files or not self._indexed:
            return False
        return self._files.numbers <= room.first + room.count

    def save_index(self, *, at_once: bool = False) -> None:
        """Behind the ledger: keep the index for the next start, if it is time (or `at_once`)."""
        kept, beside = self._kept, self._beside
        if kept is None or beside is None or not self._indexed:
            return
        kept.collect(self._index)
        if at_once or kept.is_due(self.version):
            files = self._files
            kept.save(self._index, self.version, files.numbers, files.named, files.are_live, beside)

    def close(self) -> None:
        """Let go of what is kept. The state is not used any more."""
        self._index.close()
        if self._kept is not None:
            self._kept.close(self._index)

    def deleted_rows(self, name: str) -> BitMap:
        """Of the live file `name`. Not to be changed."""
        return self._files.deleted_under(name)

    def find(self, codes: Codes) -> Int64:
        """The place of each key's live row, NOWHERE where there is none."""
        self._ensure_index()
        places = self._index.find(codes)
        rows = row_of(places)
        for live, at in self._files.by_file(places):
            if live is None:
                places[at] = NOWHERE
                continue
            gone = are_among(rows[at], self._files.deleted_in(live))
            if gone.any():
                places[at[gone]] = NOWHERE
        return places

    def deletions(self, places: Int64, more: Mapping[str, BitMap] = MappingProxyType({})) -> dict[str, BitMap]:
        """By name of each file with rows at `places` or in `more`: its deleted rows with these added."""
        found = {}
        rows = row_of(places).astype(np.uint32)
        for live, at in self._files.by_live_file(places):
            found[live.file.name] = self._files.deleted_in(live) | BitMap(rows[at])
        for name, some in more.items():
            found[name] = found.get(name, self.deleted_rows(name)) | some
        return found

    def rows_at(self, places: Int64, wanted: pa.Schema) -> Iterator[tuple[Int64, pa.Table]]:
        """The columns `wanted` of the rows at `places`, in parts: which of `places`, and their rows."""
        for live, at in self._files.by_live_file(places):
            for here, rows in read_rows(self._folder, live.file, row_of(places[at]), wanted, self.layout):
                yield at[here], rows

    def rows_of(
        self, predicate: Predicate, schema: pa.Schema, known: Mapping[str, BitMap] = MappingProxyType({})
    ) -> dict[str, BitMap]:
        """By file, the live rows of the predicate, as many as they may be. `schema`: the table's columns. `known`: what
        `rows_matching` has found in some of the files."""
        self._ensure_index()
        found, read = {}, columns_read(predicate, schema)
        for live in self._files:
            rows = known.get(live.file.name)
            if rows is None:
                rows = rows_matching(predicate, self._folder, live.file, self.layout, read)
            if rows := rows - self._files.deleted_in(live):
                found[live.file.name] = rows
        return found

    def are_among(self, places: Int64, rows: Mapping[str, BitMap]) -> npt.NDArray[np.bool_]:
        """Which of `places` are of these rows, by file."""
        found = np.zeros(len(places), dtype=np.bool_)
        for live, at in self._files.by_live_file(places):
            if live.file.name in rows:
                found[at] = are_among(row_of(places[at]), rows[live.file.name])
        return found

    def _ensure_index(self) -> None:
        if not self._indexed:
            with self._in_step():
                self._restore()
                self._follow()
                self._indexed = True

    def _restore(self) -> None:
        """Begin with the index that an earlier driver has kept; `_follow` reads what is new."""
        found = self._kept.restore(self.version) if self._kept is not None else None
        if found is None:
            return
        manifest, runs = found
        self._files.restore(manifest)
        self._index.adopt(runs)

    def _put(self, new: Added, codes: Codes) -> None:
        live = self._files.add(new.file, new.gone)
        rows = np.arange(len(codes), dtype=np.int64)
        if new.gone:
            rows = np.setdiff1d(rows, np.array(new.gone, dtype=np.int64))
            codes = codes.take(rows)
        self._index.put(codes, place_of(live.number, rows))

    def _follow(self, known: Mapping[str, BitMap] = MappingProxyType({})) -> None:
        """Bring files and index in step with the snapshot; in the usual case only vectors have changed, as `known`."""
        new = self._files.follow(known)
        if new and self.keys.names:
            files = KeyFiles(self._folder, self._schema, self.layout)
            self._read_keys(files, [Numbered(live.number, live.file, self._files.deleted_in(live)) for live in new])

    def _read_keys(self, files: KeyFiles, new: list[Numbered]) -> None:
        runs = runs_by_tasks(files, new, self._tasks) if self._tasks is not None else None
        if runs is not None:
            try:
                self._index.build(runs, in_order=True)
                return
            except RunsGone as error:
                log.warning(
                    "%s: its keys are read by one thread, since what tasks read is gone: %s", self._folder, error
                )
        self._index.build(self._wanted(part for one in new for part in files.read(one)))

    def _wanted(self, parts: Iterable[Keys]) -> Iterator[Keys]:
        for part in parts:
            self._still_wanted()
            yield part

    def _count_rows(self) -> None:
        """Statistics may be missing; without the number of rows a file's vector cannot be written."""
        files = self.snapshot.files
        for name in [name for name, file in files.items() if file.rows is None]:
            files[name] = count_rows(self._folder, files[name])
