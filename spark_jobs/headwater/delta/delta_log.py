"""A Delta table's log without an engine: which files are live at a version, and a commit as exactly the next one.

Source: Delta transaction protocol, "Delta Log Entries", "Action Reconciliation", "Checkpoints". A commit is a file
that is put under its version's name if there is none: the second one is refused, so a lost race is an error and never a
second truth (docs/decisions/0013).
"""

from __future__ import annotations

import json
import os.path
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

from headwater.delta import entries, storage
from headwater.delta.log_entries import (
    Action,
    LostRace,
    checkpoints_of,
    entries_of,
    log_entry,
    log_path,
    read_actions,
    read_lines,
    refuse_torn,
    refuse_torn_newest,
    require_version,
)

STANDS_ON = "headwaterStandsOn"
"""In what a commit of ours says of itself: the `txnId` of the one below it."""
_ROWS_FIRST = re.compile(r'\A\{"numRecords":(\d+)[,}]')
_READ_AT_ONCE: Final = 32
_compact = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class DataFile:
    """A live file. `name`: its path as the log writes it; `vector`: its deletion vector's descriptor, if it has one;
    `rows`: in the file, those that the vector marks included; None when the statistics do not tell."""

    name: str
    size: int
    modification_time: int
    stats: str | None
    partition_values: dict[str, str | None]
    vector: dict[str, Any] | None
    rows: int | None

    @property
    def path(self) -> str:
        """Below the table's folder, as the file system names it."""
        return unquote(self.name)

    def in_folder(self, folder: str) -> str:
        """Where the file lies; its name may be a path of its own."""
        return os.path.join(folder, self.path)

    @property
    def deleted(self) -> int:
        return int(self.vector["cardinality"]) if self.vector else 0


@dataclass(slots=True)
class Snapshot:
    """A table at `version`: what a writer must know of it. `advance` moves it on."""

    folder: str
    version: int = -1
    files: dict[str, DataFile] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)
    protocol: Action = field(default_factory=dict)
    metadata: Action = field(default_factory=dict)
    domains: dict[str, Action] = field(default_factory=dict)

    @property
    def configuration(self) -> dict[str, str]:
        return dict(self.metadata.get("configuration") or {})

    @property
    def features(self) -> frozenset[str]:
        """Table features by name; those that older protocol versions imply are not listed."""
        protocol = self.protocol
        return frozenset([*(protocol.get("readerFeatures") or ()), *(protocol.get("writerFeatures") or ())])

    def copy(self) -> Snapshot:
        """One that `advance` moves on by itself."""
        return replace(self, files=dict(self.files), transactions=dict(self.transactions), domains=dict(self.domains))

    def advance(self, version: int | None = None) -> list[list[Action]]:
        """Follow the commits up to `version` (None: as far as there are any). Returns the actions of each."""
        seen = []
        while version is None or self.version < version:
            actions = read_actions(self.folder, self.version + 1)
            if actions is None:
                refuse_torn(self.folder, self.version + 1)
                break
            self.follow(actions)
            seen.append(actions)
        return seen

    def follow(self, actions: Iterable[Action]) -> None:
        """Take in the actions of the next version."""
        for action in actions:
            if (gone := action.get("remove")) is not None:
                live = self.files.get(gone["path"])
                # The same file may come back in this commit with another vector: then this one is not it.
                if live is not None and _vector_id(live.vector) == _vector_id(gone.get("deletionVector")):
                    del self.files[live.name]
        for action in actions:
            self._take(action)
        self.version += 1

    def _take(self, action: Action) -> None:
        if (add := action.get("add")) is not None:
            self.files[add["path"]] = _data_file(add)
        elif (txn := action.get("txn")) is not None:
            self.transactions[txn["appId"]] = int(txn["version"])
        elif (protocol := action.get("protocol")) is not None:
            self.protocol = protocol
        elif (metadata := action.get("metaData")) is not None:
            self.metadata = metadata
        elif (domain := action.get("domainMetadata")) is not None:
            self.domains[domain["domain"]] = domain
            if domain.get("removed"):
                del self.domains[domain["domain"]]


def read_snapshot(folder: str, version: int | None = None) -> Snapshot:
    """The table at `version` (None: the newest). FileNotFoundError when its log does not reach back that far."""
    names = storage.names(log_path(folder))
    snapshot = _as_listed(folder, names, version)
    if snapshot.version < max(entries_of(names), default=-1) and snapshot.version != version:
        # An entry that was there is not: clean-up may have been faster, behind a checkpoint that was not there yet.
        names, before = storage.names(log_path(folder)), names
        if checkpoints_of(folder, names) != checkpoints_of(folder, before):
            snapshot = _as_listed(folder, names, version)
    if snapshot.version < 0 or (version is not None and snapshot.version != version):
        raise FileNotFoundError(f"the log of {folder} does not hold version {version}")
    return snapshot


def _as_listed(folder: str, names: list[str], version: int | None) -> Snapshot:
    """The same, of a log in which `names` lie; as far as its entries follow each other."""
    snapshot = Snapshot(folder)
    newest = _newest_checkpoint(folder, names, version)
    if newest is not None:
        snapshot.version, parts = newest
        for part in parts:
            with storage.parquet_file(part) as file:
                table = file.read(["add", "txn", "protocol", "metaData", "domainMetadata"])
            for kind in table.column_names:
                # Most rows of a busy table's checkpoint tell of files that are gone: they are null here.
                for value in table[kind].drop_null().to_pylist(maps_as_pydicts="strict"):
                    snapshot._take({kind: value})
    _follow_known(snapshot, [one for one in entries_of(names) if version is None or one <= version])
    snapshot.advance(version)
    return snapshot


def _follow_known(snapshot: Snapshot, versions: Sequence[int]) -> None:
    """Take in those of `versions` that come next: they are there, so that a store is asked for many at once."""
    above = [version for version in versions if version > snapshot.version]
    for begin in range(0, len(above), _READ_AT_ONCE):
        part = above[begin : begin + _READ_AT_ONCE]
        reads = [partial(read_actions, snapshot.folder, version) for version in part]
        for version, actions in zip(part, storage.side_by_side(snapshot.folder, reads), strict=True):
            if actions is None or version != snapshot.version + 1:
                return
            snapshot.follow(actions)


def read_commit_info(folder: str, version: int) -> dict[str, Any]:
    """What the commit says of itself; empty when it says nothing, or is not there (any more)."""
    for line in read_lines(folder, version) or ():
        if line.startswith('{"commitInfo":'):  # of a large commit the other lines take long
            info: dict[str, Any] = json.loads(line)["commitInfo"]
            return info
    return {}


def look_below(folder: str, version: int) -> None:
    """Before the commit `version`: LostRace when the one before it does not exist (the table was made anew),
    EntryReplaced when another program has overwritten one that we have put."""
    if entries.refuse_replaced(folder) != version - 1:
        require_version(folder, version - 1)


def commit(folder: str, version: int, actions: Iterable[Action], *, has_looked: bool = False) -> None:
    """Make `actions` the commit `version`. LostRace when that version exists, Transient when it is torn, and, as
    EntryReplaced, as of `look_below` unless the caller `has_looked`; then nothing has changed."""
    if not has_looked:
        look_below(folder, version)
    _put(folder, version, _standing_on(folder, version - 1, actions))


def append(folder: str, version: int, actions: Iterable[Action], *, has_looked: bool = False) -> None:
    """The same of a table that nobody else writes to: what lies below is taken for what it was, and its being there is
    all that is looked for (`require_version`)."""
    if not has_looked:
        require_version(folder, version - 1)
    _put(folder, version, actions)


def create(folder: str, actions: Iterable[Action]) -> None:
    """Make `actions` the first commit. LostRace when there is a table already."""
    _put(folder, 0, actions)


def _put(folder: str, version: int, actions: Iterable[Action]) -> None:
    written = list(actions)
    text = "\n".join(map(_compact, written))
    try:
        token = storage.put_if_absent(log_entry(folder, version), f"{text}\n".encode())
    except FileExistsError as error:
        refuse_torn_newest(folder, version)
        raise LostRace(f"version {version} of {folder} exists already") from error
    own_id = next((action["commitInfo"]["txnId"] for action in written if "commitInfo" in action), "")
    entries.put(folder, version, token, own_id)


def _standing_on(folder: str, version: int, actions: Iterable[Action]) -> Iterator[Action]:
    """`actions`, whose commit says the name of the one that it stands on: should that be overwritten, it shows."""
    below = entries.txn_id(folder, version)
    for action in actions:
        if below and (info := action.get("commitInfo")) is not None:
            yield {"commitInfo": {**info, STANDS_ON: below}}
        else:
            yield action


def add(file: DataFile, *, data: bool = True) -> Action:
    """`data`: False for a commit that only rearranges rows."""
    action: Action = {
        "path": file.name,
        "partitionValues": file.partition_values,
        "size": file.size,
        "modificationTime": file.modification_time,
        "dataChange": data,
        "stats": file.stats,
    }
    if file.vector is not None:
        action["deletionVector"] = file.vector
    return {"add": action}


def remove(file: DataFile, *, data: bool = True) -> Action:
    action: Action = {
        "path": file.name,
        "deletionTimestamp": now_milliseconds(),
        "dataChange": data,
        "extendedFileMetadata": True,
        "partitionValues": file.partition_values,
        "size": file.size,
    }
    if file.vector is not None:
        action["deletionVector"] = file.vector
    return {"remove": action}


def with_vector(file: DataFile, vector: dict[str, Any]) -> DataFile:
    """The same file with more rows marked as deleted: its statistics are bounds now, no longer tight."""
    return replace(file, vector=vector, stats=_loose(file.stats or "{}"))


def _loose(stats: str) -> str:
    # Most batches touch files that were touched before, and many of them: those are not parsed again.
    if stats.endswith('"tightBounds":false}'):
        return stats
    known = json.loads(stats)
    known.pop("tightBounds", None)
    return _compact({**known, "tightBounds": False})


def transaction(app_id: str, version: int) -> Action:
    return {"txn": {"appId": app_id, "version": version, "lastUpdated": now_milliseconds()}}


def commit_info(
    operation: str, parameters: dict[str, str], metrics: dict[str, int], read_version: int | None
) -> Action:
    """`read_version`: None of a table's first commit. A number below 0 there, and delta-rs reads no history of it."""
    return {
        "commitInfo": {
            "timestamp": now_milliseconds(),
            "operation": operation,
            "operationParameters": parameters,
            "operationMetrics": {name: str(value) for name, value in metrics.items()},
            **({} if read_version is None else {"readVersion": read_version}),
            "isolationLevel": "Serializable",
            "isBlindAppend": False,
            "engineInfo": "Headwater",
            "txnId": str(uuid.uuid4()),
        }
    }


def now_milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _data_file(add: Action) -> DataFile:
    return DataFile(
        name=add["path"],
        size=int(add["size"]),
        modification_time=int(add["modificationTime"]),
        stats=add.get("stats"),
        partition_values=dict(add.get("partitionValues") or {}),
        vector=_vector(add.get("deletionVector")),
        rows=_rows_in(add.get("stats")),
    )


def _rows_in(stats: str | None) -> int | None:
    if not stats:
        return None
    first = _ROWS_FIRST.match(stats)  # where every writer puts it
    rows = first[1] if first is not None else json.loads(stats).get("numRecords")
    return int(rows) if rows is not None else None


def _vector(descriptor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without what a checkpoint adds: columns that this vector does not use."""
    if not descriptor:
        return None
    return {name: value for name, value in descriptor.items() if value is not None}


def _vector_id(descriptor: dict[str, Any] | None) -> tuple[str, int] | None:
    return (descriptor["pathOrInlineDv"], descriptor.get("offset") or 0) if descriptor else None


def _newest_checkpoint(folder: str, names: list[str], version: int | None) -> tuple[int, list[str]] | None:
    """Version and files of the newest complete classic checkpoint at or below `version`; `names`: what lies in the
    log."""
    known = checkpoints_of(folder, names).items()
    whole = [(number, files) for number, files in known if version is None or number <= version]
    return max(whole, default=None, key=lambda checkpoint: checkpoint[0])
