"""Small Delta tables of our own (ledger, registry, validations): single-commit appends with exclusion, without a JVM.

They are read and written as tables of rows are (`headwater.delta.delta_log`): a commit is the next entry, put if there
is none, and a lost race raises, which is what the fence needs. Who follows one reads an entry for each commit of
others, and asks once where there is none. What is asked is bounds of columns, by which files are left out. Only
checkpoints are delta-rs's (docs/decisions/0055): while it answers SQL no other thread of the process runs, and a store
takes its time.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema

from headwater.delta import delta_log, storage
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.layout import PLAIN
from headwater.delta.log_entries import (
    Action,
    LostRace,
    TornEntry,
    checksum_of,
    files_of,
    log_entry,
    log_path,
    newest_whole,
    note_written,
    require_version,
)
from headwater.delta.new_files import discard, write_rows
from headwater.delta.whole import lost_file
from headwater.errors import Transient
from headwater.lake_root import is_remote

_CONFIGURATION = {
    # Neither table loses old versions behind our back: headwater.maintain.control_tables decides.
    "delta.checkpointInterval": "100",
    "delta.enableExpiredLogCleanup": "false",
    # Nobody reads an old version of these. At one commit a second a week of removed files would fill checkpoints.
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.logRetentionDuration": "interval 1 hours",
}
Bounds = Mapping[str, tuple[Any, Any]]
"""The least and the greatest value of a column, both included; None: any. What is null lies in no bounds."""
_NOTHING: Final = -1
_MANY_ROWS: Final = 10_000
_LONG: Final = 1800.0
"""Seconds after which entries that came meanwhile may have been cleaned up: half of what
`headwater.maintain.control_tables` keeps."""
_ATTEMPTS: Final = 100
_GATHERED_AT_ONCE: Final = 2000
"""Files of one commit: of many more, who publishes all the time would be faster each time."""
_READ_AT_ONCE: Final = 8


class SmallTable:
    """A table as it was last looked at. From one thread at a time."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._told = snapshot.version  # by `look`, or known to whoever has committed it
        self._looked, self._footing = time.monotonic(), self._entry()

    def twin(self) -> SmallTable:
        """Another hold on the table, which stands where this one does and moves by itself."""
        return SmallTable(self._snapshot.copy())

    @property
    def folder(self) -> str:
        return self._snapshot.folder

    @property
    def files(self) -> list[DataFile]:
        """The live ones."""
        return list(self._snapshot.files.values())

    def version(self) -> int:
        return self._snapshot.version

    def transaction_version(self, app_id: str) -> int | None:
        return self._snapshot.transactions.get(app_id)

    def look(self) -> bool:
        """Go on to the newest version; whether there is anything new. It stays where it is while that is torn. What an
        error keeps this look from telling the next one tells."""
        if self._has_lost_its_footing():
            self._told = _NOTHING
            self._snapshot = _newest(self.folder)
        with contextlib.suppress(TornEntry):
            self._snapshot.advance()
        is_new = self.version() != self._told
        if is_new:
            self._footing = self._entry()
        self._told, self._looked = self.version(), time.monotonic()
        return is_new

    def _has_lost_its_footing(self) -> bool:
        """Whether the entry that it stands on is another one by now, since a power cut took it, or is gone: then the
        next one may have come and gone, too, which looks as if nobody had committed. A store loses none, and is not
        asked for what clean-up cannot have got to."""
        if is_remote(self.folder):
            return time.monotonic() - self._looked > _LONG
        return self._entry() != self._footing

    def _entry(self) -> str | None:
        """What tells the entry that it stands on from any other of its number."""
        return None if is_remote(self.folder) else storage.token(log_entry(self.folder, self.version()))

    def commit(self, rows: pa.Table, transactions: dict[str, int], *, in_place_of_all: bool) -> None:
        """Put `rows` as exactly the next version, and stand there. LostRace if it is taken."""
        now, folder = self._snapshot, self.folder
        said = {"mode": "Overwrite" if in_place_of_all else "Append"}
        added: list[DataFile] = []
        try:
            with storage.uploads_beside(folder):
                added = [written.file for written in write_rows(folder, rows.schema, [rows], PLAIN)]
                if has_looked := is_remote(folder):
                    require_version(folder, now.version)
            actions = [
                delta_log.commit_info("WRITE", said, {"numOutputRows": rows.num_rows}, now.version),
                *self._wider(rows.schema),
                *(delta_log.transaction(app, version) for app, version in transactions.items()),
                *(delta_log.remove(file) for file in (self.files if in_place_of_all else ())),
                *(delta_log.add(file) for file in added),
            ]
            delta_log.append(folder, now.version + 1, actions, has_looked=has_looked)
        except LostRace:
            discard(folder, added)
            self._looked = -_LONG  # it may be on what was cleaned up
            raise
        self._follow(actions)

    def _wider(self, schema: pa.Schema) -> list[Action]:
        """What makes room for columns of `schema` that an older Headwater did not have when it made the table."""
        known = json.loads(self._snapshot.metadata["schemaString"])
        names = {column["name"] for column in known["fields"]}
        new = pa.schema([column for column in schema if column.name not in names])
        if not len(new):
            return []
        fields = [*known["fields"], *json.loads(Schema.from_arrow(new).to_json())["fields"]]
        return [{"metaData": {**self._snapshot.metadata, "schemaString": json.dumps({**known, "fields": fields})}}]

    def gather(self, files: list[DataFile]) -> int:
        """Put the rows of `files` into as few new ones, in a commit that changes no row. How many went. LostRace when
        another has done so, or commits faster than this can."""
        read = storage.side_by_side(self.folder, [partial(_rows_in, self.folder, file) for file in files])
        rows = pa.concat_tables(read, promote_options="default")
        added = [written.file for written in write_rows(self.folder, rows.schema, [rows], PLAIN)]
        for _ in range(_ATTEMPTS):
            actions = [
                delta_log.commit_info("OPTIMIZE", {}, {"numRemovedFiles": len(files)}, self.version()),
                *(delta_log.remove(file, data=False) for file in files),
                *(delta_log.add(file, data=False) for file in added),
            ]
            try:
                delta_log.append(self.folder, self.version() + 1, actions)
            except LostRace:
                self._looked = -_LONG
                self.look()
                if not all(file.name in self._snapshot.files for file in files):
                    break
            else:
                self._follow(actions)
                return len(files)
        discard(self.folder, added)
        raise LostRace(f"{self.folder} was written by others at each attempt to gather its files")

    def _follow(self, actions: list[Action]) -> None:
        """We have put the next entry."""
        is_all_told = self._told == self.version()
        self._snapshot.follow(actions)
        self._told = self.version() if is_all_told else _NOTHING
        self._footing = self._entry()


def open_table(path: str) -> SmallTable | None:
    """The table at `path`, or None where there is none. Entries that are torn (`headwater.delta.log_entries`) and what
    was built on them do not count."""
    folder = storage.path_of(path)
    try:
        return SmallTable(_newest(folder))
    except FileNotFoundError:
        return None


def _newest(folder: str) -> Snapshot:
    """FileNotFoundError: there is no table, or none of its versions is whole."""
    try:
        return read_snapshot(folder)
    except TornEntry:
        return read_snapshot(folder, newest_whole(folder))


def open_version(path: str, version: int | None = None) -> DeltaTable:
    """The table at `path` as of `version` (None: the newest), by delta-rs."""
    return DeltaTable(path, version=version, storage_options=storage.delta_rs_options(path))


def create_table(path: str, schema: pa.Schema) -> SmallTable:
    """Create, or open when somebody was faster."""
    found = open_table(path)
    if found is None:
        fields, options = Schema.from_arrow(schema), storage.delta_rs_options(path)
        made = DeltaTable.create(path, fields, mode="ignore", configuration=_CONFIGURATION, storage_options=options)
        note_written(storage.path_of(path), made.version())
        found = SmallTable(read_snapshot(storage.path_of(path)))
    return found


def append_once(
    table: SmallTable, rows: list[dict[str, Any]], schema: pa.Schema, transactions: dict[str, int] | None = None
) -> None:
    """Append `rows` as exactly the next version of `table`, with these `txn` entries; LostRace if it is taken.

    On success `table` stands at the version it committed.
    """
    table.commit(pa.Table.from_pylist(rows, schema=schema), transactions or {}, in_place_of_all=False)


def replace_once(table: SmallTable, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Replace the whole content by `rows` as exactly the next version; LostRace if it is taken."""
    table.commit(pa.Table.from_pylist(rows, schema=schema), {}, in_place_of_all=True)


def make_durable(table: SmallTable, known: int = -1) -> int:
    """Return when the version that `table` has just committed survives a power cut, and the one below, whose writer may
    not have got so far; unless that is `known`, by an earlier call. Returns the version."""
    folder, version = table.folder, table.version()
    if is_remote(folder):
        return version
    versions = (version,) if known == version - 1 else (version - 1, version)
    storage.sync_files(*(file for one in versions for file in files_of(folder, one)))
    return version


def compact(table: SmallTable, target_size: int) -> int:
    """Make files below `target_size` bytes into larger ones; rows stay. Returns how many went. Appends of others in
    between are no conflict; LostRace when another compaction was faster."""
    small = [file for file in table.files if file.size < target_size]
    beginnings = range(0, len(small), _GATHERED_AT_ONCE)
    return sum(table.gather(small[begin : begin + _GATHERED_AT_ONCE]) for begin in beginnings)


def write_checkpoint(folder: str) -> int:
    """A checkpoint of the newest version of the table in `folder`; returns that version. TornEntry, and none is made,
    above an entry that is not whole: who reads would pass it over for good."""
    if (whole := newest_whole(folder)) is not None:
        raise TornEntry(f"{log_entry(folder, whole + 1)} is empty or cut short: no checkpoint is made above it")
    table = open_version(folder)
    # A checkpoint stands for what lies below it, and must not outlive it: a start would take that for whole.
    storage.sync(folder)
    table.create_checkpoint()
    version = int(table.version())
    checkpoint, pointer = log_path(folder, f"{version:020d}.checkpoint.parquet"), log_path(folder, "_last_checkpoint")
    if not is_remote(folder):
        # Hadoop would compare the new files with the checksums of those that Spark wrote before.
        for written in (checkpoint, pointer):
            storage.delete(checksum_of(written))
    # Half a checkpoint would end readers who begin at it.
    storage.sync_files(checkpoint, pointer)
    return version


def rows_of(table: SmallTable) -> list[dict[str, Any]]:
    """All rows."""
    rows: list[dict[str, Any]] = read_rows(table).to_pylist(maps_as_pydicts="strict")
    return rows


def read_rows(table: SmallTable, bounds: Bounds | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows, in no order, in which every column of `bounds` lies in its bounds; these `columns` of them (None: all).
    Files that cannot have one, by their statistics, are not opened. Where there is none it may have no columns."""
    files = [file for file in table.files if may_hold(file, bounds or {})]
    with _named(table):
        reads = [partial(_rows_in, table.folder, file, bounds, columns) for file in files]
        found = storage.side_by_side(table.folder, reads)
    return pa.concat_tables(found, promote_options="default") if found else pa.table({})


def newest_first(
    table: SmallTable, by: str, bounds: Bounds, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The same rows in parts, by falling `by`, a whole number that is in every one of them. No more files are opened
    than the parts that are asked for need; in a store, which is asked side by side, at most twice as many."""
    bounds = {by: (None, None), **bounds}
    files = {file.name: file for file in table.files if may_hold(file, bounds)}
    wanted = None if columns is None else [by, *columns]
    unread, count = sorted((_highest(file, by), name) for name, file in files.items()), 1
    most = _READ_AT_ONCE if is_remote(table.folder) else 1
    while unread:
        rows = pa.table({})
        while unread and (not rows.num_rows or unread[-1][0] >= pc.min(rows[by]).as_py()):
            taken, unread, count = unread[-count:], unread[:-count], min(2 * count, most)
            with _named(table):
                more = storage.side_by_side(
                    table.folder, [partial(_rows_in, table.folder, files[name], bounds, wanted) for _, name in taken]
                )
            rows = pa.concat_tables([*([rows] if rows.num_rows else []), *more], promote_options="default")
        if rows.num_rows:
            yield rows.sort_by([(by, "descending")])


def may_hold(file: DataFile, bounds: Bounds) -> bool:
    """Whether the file may hold a row within `bounds`, by its statistics."""
    known = json.loads(file.stats) if file.stats else {}
    for column, (low, high) in bounds.items():
        least, most = (known.get(kind, {}).get(column) for kind in ("minValues", "maxValues"))
        if least is None or most is None:
            nulls = known.get("nullCount", {}).get(column)
            if nulls is not None and nulls == file.rows:
                return False
            continue
        if isinstance(low or high, datetime):
            # delta-rs cuts both down to milliseconds.
            least, most = datetime.fromisoformat(least), datetime.fromisoformat(most) + timedelta(milliseconds=1)
        if (low is not None and most < low) or (high is not None and least > high):
            return False
    return True


def _highest(file: DataFile, column: str) -> float:
    """No value of a column of whole numbers is greater; of a file that does not tell any may be."""
    found = json.loads(file.stats).get("maxValues", {}).get(column) if file.stats else None
    return math.inf if found is None else int(found)


def _rows_in(
    folder: str, file: DataFile, bounds: Bounds | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    wanted = None if columns is None else list(dict.fromkeys([*columns, *(bounds or {})]))
    is_large = (file.rows or 0) > _MANY_ROWS
    with storage.parquet_file(file.in_folder(folder)) as opened:
        # Of one that was gathered often nothing is wanted: texts of all its rows take much longer to read.
        rows = _within(opened.read(list(bounds)), bounds) if is_large and bounds else None
        if rows is None or rows.num_rows:
            rows = _within(opened.read(wanted, use_threads=is_large), bounds or {})
    return rows if columns is None else rows.select([name for name in columns if name in rows.column_names])


def _within(rows: pa.Table, bounds: Bounds) -> pa.Table:
    for column, (low, high) in bounds.items():
        if column not in rows.column_names:
            return rows.slice(0, 0)  # of a Headwater that did not have it yet
        values, wanted = rows[column], pc.is_valid(rows[column])
        if low is not None:
            wanted = pc.and_(wanted, pc.greater_equal(values, pa.scalar(low, values.type)))
        if high is not None:
            wanted = pc.and_(wanted, pc.less_equal(values, pa.scalar(high, values.type)))
        rows = rows.filter(wanted)
    return rows


@contextlib.contextmanager
def _named(table: SmallTable) -> Iterator[None]:
    """Says what is lost of the table's files, if that is why it cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        try:
            why = lost_file(table.folder, table.version())
        except (FileNotFoundError, TornEntry) as torn:
            why = str(torn)
        if not why:
            raise
        raise Transient(
            f"a file of the lake is missing or damaged: {why}",
            code="lake_unavailable",
            where="the lake's control tables",
            remedy="run headwater replicate PIPELINE.yaml: after a power cut it repairs this, else it says what to do",
        ) from error


__all__ = [
    "Bounds",
    "LostRace",
    "SmallTable",
    "append_once",
    "compact",
    "create_table",
    "make_durable",
    "may_hold",
    "newest_first",
    "open_table",
    "open_version",
    "read_rows",
    "replace_once",
    "rows_of",
    "write_checkpoint",
]
