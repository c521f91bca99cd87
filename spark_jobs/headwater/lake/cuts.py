"""Consistent cuts: which versions of the tables belong together, held by pins, read by Spark.

A cut is plain JSON (the interface's form), so that it travels by XCom and on stdout. Its versions are those of one
epoch; its position is the highest for which they are exact. `read` gives DataFrames at the cut and refuses tables
that are not in step, since their rows belong to an earlier moment than the others'.

A pin is a file `<root>/_headwater/pins/<id>.json` (cut, owner, expiry) that keeps the versions from vacuum and log
clean-up until it expires. Neither Spark nor Arrow at import; Spark is the caller's session.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from os.path import join
from sys import intern
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from headwater.delta import storage
from headwater.delta.spark_rows import rows_of_table
from headwater.errors import Refused
from headwater.lake.look import IN_STEP, NOT_YET_SHOWN, Look, ReportedState
from headwater.lake.paths import control_path, loads_path, pins_path, table_uri
from headwater.lake_root import is_remote
from headwater.names import TableName
from headwater.position import format_lsn, parse_lsn
from headwater.schema import PARTITION_COLUMN
from headwater.spark.stores import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.lake.ledger import Epoch
    from headwater.lake.requirements import WantedParts

Cut = dict[str, Any]
AT_SOURCE = "at the source"
"""The state of a table in a cut that fell back: the cut names no versions, whoever reads it reads the source."""
HISTORY = "~history"
"""Behind a table's name and path: those of its history."""

_SCRATCH_SECONDS = 3600.0
_READ_AT_ONCE = 32
_LOOKED_BACK = 20
"""Commits without changes of the log: files that were gathered, and columns that came."""

# Delta refuses a version older than the retention of deleted files even where nothing of it has been deleted:
# a quiet table's newest cut would be unreadable after a week. Pins and the maintenance job keep what is needed.
_NO_RETENTION_REFUSAL = "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration"


def take_cut(root: str, pipeline: str, look: Look, epoch: Epoch, tables: Sequence[str], lsn: int) -> Cut:
    """The cut of `tables` at `epoch`, exact at `lsn` (see `Verdict.lsn`) for those that are in step."""
    return {
        "pipeline": pipeline,
        "epoch": epoch.epoch,
        "position": epoch.position.at(lsn).to_json(),
        "source_time": time_text(epoch.source_time) if epoch.source_time is not None else None,
        "tables": {name: _table(root, look.tables.get(name), epoch, name) for name in sorted(tables)},
    }


def _table(root: str, state: ReportedState | None, epoch: Epoch, name: str) -> dict[str, Any]:
    version = epoch.tables.get(name)
    relative = state.path if state is not None and state.path else TableName.parse(name).path
    entry: dict[str, Any] = {
        "path": table_uri(root, relative),
        "version": version.version if version is not None else None,
        "applied_lsn": format_lsn(version.applied_lsn) if version is not None else None,
    }
    if version is None:
        return {**entry, "state": "absent", "reason": f"epoch {epoch.epoch} does not hold it"}
    beside = epoch.tables.get(history_name(name))
    if beside is not None:
        entry["history"] = {
            "path": table_uri(root, relative + HISTORY),
            "version": beside.version,
            "applied_lsn": format_lsn(beside.applied_lsn),
        }
    if state is not None and state.state == IN_STEP:
        if epoch.shows(name):
            return {**entry, "state": "in step"}
        state = replace(state, reason=NOT_YET_SHOWN)
    found = state or ReportedState("removed")
    return {**entry, "state": "behind", "since": found.since, "reason": found.reason or f"it is {found.state}"}


def with_parts(cut: Cut, parts: Mapping[str, WantedParts]) -> Cut:
    """`cut`, of some tables only the rows of these partitions: their relation ids stand in the table's entry."""
    tables = {
        name: {**entry, "partitions": dict(parts[name].leaves)} if name in parts else entry
        for name, entry in cut["tables"].items()
    }
    return {**cut, "tables": tables}


def history_name(name: str) -> str:
    """What the history of table `name` is called in ledger rows and appIds. No table has such a name: `~` is quoted."""
    return name + HISTORY


def table_of(name: str) -> str:
    """The table of a ledger row's entry, which may be its history's."""
    return name.removesuffix(HISTORY)


def time_text(time: datetime) -> str:
    """ISO 8601, UTC with `Z`."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Pin:
    """A cut that is kept for `owner` until `expiry`."""

    id: str
    cut: Cut
    owner: str
    expiry: datetime


def pin_cut(root: str, cut: Cut, owner: str, expiry: datetime) -> Pin:
    """Keep the versions of `cut` until `expiry`. Refused when the lake cannot be written here."""
    pin = Pin(uuid.uuid4().hex, cut, owner, expiry)
    text = json.dumps({"cut": cut, "owner": owner, "expiry": time_text(expiry)})
    try:
        # One reader's umask must not keep the others from pinning, nor clean-up from knowing what it has to keep.
        storage.make_shared_folder(pins_path(root))
        # Whole or not at all: maintenance must never meet half a pin and take the cut for free.
        storage.replace(_pin_path(root, pin.id), text.encode(), shared=True)
        storage.sync_files(_pin_path(root, pin.id))  # what was promised outlives the power of the lake's host
    except OSError as error:
        if is_remote(root) and not isinstance(error, PermissionError):
            raise  # the store may answer again
        raise Refused(
            f"the cut cannot be pinned: {error.strerror or error}",
            code="cannot_pin",
            where=pins_path(root),
            remedy="give the waiting user write access to this folder; else the cut may be vacuumed while it is read",
        ) from error
    return pin


def list_pins(root: str, now: datetime | None = None) -> list[Pin]:
    """The pins that have not expired at `now` (default: this moment), oldest expiry first. Refused when one cannot be
    read."""
    moment = now or datetime.now(UTC)
    live = (pin for pin in _pins(root, _pin_ids(root)) if pin.expiry > moment)
    return sorted(live, key=lambda pin: (pin.expiry, pin.id))


@dataclass(frozen=True, slots=True)
class Kept:
    """What a pin keeps until `expiry`. `versions`: of tables, and of their histories under the names of these in the
    ledger."""

    id: str
    owner: str
    expiry: datetime
    versions: Mapping[str, int]


class PinReader:
    """The pins of the lake under `root`, for who looks again and again: no pin is ever written twice, so each is read
    once. From any thread."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, Kept] = {}
        self._reads, self._has_read = Lock(), False

    def look(self) -> list[Kept]:
        """All that are there now, also those that have expired. Refused when one cannot be read."""
        with self._reads:
            self._read(Event())
            return list(self._known.values())

    def read_ahead(self, stop: Event) -> None:
        """Read what the first look would, which may be thousands, or, once `stop` is set, as many as have been."""
        with self._reads:
            if not self._has_read:
                self._read(stop)

    def _read(self, stop: Event) -> None:
        ids = _pin_ids(self._root)
        self._known = {pin_id: self._known[pin_id] for pin_id in ids if pin_id in self._known}
        for pin in _pins(self._root, [pin_id for pin_id in ids if pin_id not in self._known]):
            with _refusing_unread(_pin_path(self._root, pin.id)):
                self._known[pin.id] = Kept(pin.id, pin.owner, pin.expiry, _versions_of(pin.cut))
            if stop.is_set():
                return
        self._has_read = True


def _versions_of(cut: Mapping[str, Any]) -> dict[str, int]:
    found = dict(cut["tables"])
    found |= {history_name(name): table["history"] for name, table in cut["tables"].items() if "history" in table}
    # Thousands of pins name the same tables.
    return {intern(name): table["version"] for name, table in found.items() if table["version"] is not None}


def remove_expired(root: str, now: datetime | None = None, pins: PinReader | None = None) -> int:
    """Remove the pins that have expired at `now`; how many. And what killed processes left of these and other files
    that they were replacing. `pins`: who has read them."""
    moment = now or datetime.now(UTC)
    expired = [f"{pin.id}.json" for pin in (pins or PinReader(root)).look() if pin.expiry <= moment]
    storage.delete_files(pins_path(root), expired)
    for folder in (pins_path(root), control_path(root), loads_path(root)):
        storage.delete_scratch(folder, moment.timestamp() - _SCRATCH_SECONDS)
    return len(expired)


def _pins(root: str, ids: Sequence[str]) -> Iterator[Pin]:
    """Those of `ids` that nobody has released meanwhile; in a store some are read at once."""
    for begin in range(0, len(ids), _READ_AT_ONCE):
        reads = [partial(_pin, root, pin_id) for pin_id in ids[begin : begin + _READ_AT_ONCE]]
        yield from (pin for pin in storage.side_by_side(root, reads) if pin is not None)


def _pin(root: str, pin_id: str) -> Pin | None:
    path = _pin_path(root, pin_id)
    with _refusing_unread(path), contextlib.suppress(FileNotFoundError):
        value = json.loads(storage.read_text(path))
        return Pin(pin_id, value["cut"], value["owner"], datetime.fromisoformat(value["expiry"]))
    return None


@contextlib.contextmanager
def _refusing_unread(place: str) -> Iterator[None]:
    try:
        yield
    except (PermissionError, ValueError, KeyError, TypeError) as error:
        denied = isinstance(error, PermissionError)
        if denied and is_remote(place):
            raise  # the store may let in again
        raise Refused(
            f"a pin cannot be read ({type(error).__name__}): nobody can tell which versions it keeps",
            code="damaged_pin",
            where=place,
            remedy=("let this user read it, or " if denied else "")
            + "remove the file if nobody reads its cut any more",
        ) from error


def remove_torn_pins(root: str) -> None:
    """Pins that a power cut of the lake's host has left empty or cut short: nobody was told of them. Those of users who
    let nobody read them are passed by: whoever has to know what they keep says so."""
    with contextlib.suppress(PermissionError):
        for name in _pin_names(root):
            _remove_torn(join(pins_path(root), name))


def _remove_torn(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        try:
            json.loads(storage.read_text(path))
        except ValueError:
            storage.delete(path)


def release_pin(root: str, pin_id: str) -> None:
    """Give a pin up before it expires; nothing happens when it is already gone."""
    storage.delete(_pin_path(root, pin_id))


def _pin_path(root: str, pin_id: str) -> str:
    return join(pins_path(root), f"{pin_id}.json")


def _pin_names(root: str) -> list[str]:
    return [name for name in storage.names(pins_path(root)) if name.endswith(".json")]


def _pin_ids(root: str) -> list[str]:
    with _refusing_unread(pins_path(root)):
        return [name.removesuffix(".json") for name in _pin_names(root)]


def read(spark: SparkSession, cut: Mapping[str, Any], *, allow_behind: bool = False) -> dict[str, DataFrame]:
    """Each table of `cut` as a DataFrame at the cut's version, by name.

    Refused when a table is not in step; with `allow_behind` such a table is read as it last was, and one that is
    absent is left out. Refused as well when a version is no longer kept.
    """
    refuse_behind(cut, allow_behind=allow_behind)
    return {
        name: read_version(spark, cut, name, table)
        for name, table in cut["tables"].items()
        if table["state"] != "absent"
    }


def is_at_source(cut: Mapping[str, Any]) -> bool:
    """Whether `cut` stands for the source, as `on_timeout="fallback"` gives it."""
    return "fallback" in cut


def refuse_no_cut(cut: object, where: str = "cut") -> None:
    """Refused for what is no cut: a path, or what a wait says that was not satisfied."""
    if isinstance(cut, Mapping) and "pipeline" in cut and isinstance(cut.get("tables"), Mapping):
        return
    told = cut if isinstance(cut, Mapping) else {}
    outcome = told.get("outcome") or (told.get("error") or {}).get("code")
    raise Refused(
        f"this is no cut: the wait ended as {outcome}" if outcome else f"this is no cut, but {type(cut).__name__}",
        code="bad_argument",
        where=where,
        remedy="give what a wait that was satisfied returns: headwater.wait, headwater wait --json, a sensor",
    )


def refuse_at_source(cut: Mapping[str, Any]) -> None:
    """Refused where the lake has no version of the tables."""
    if is_at_source(cut):
        raise Refused(
            "the cut stands for the source and names no versions of the lake",
            code="at_source",
            where=f"cut of pipeline {cut['pipeline']}",
            remedy="read it with headwater.read, or wait for a cut of the lake",
        )


def refuse_behind(cut: Mapping[str, Any], *, allow_behind: bool) -> None:
    """Refused when a table of `cut` is not in step, unless that is allowed; and where the lake has no version of it."""
    refuse_at_source(cut)
    late = {name: table for name, table in cut["tables"].items() if table["state"] != "in step"}
    if late and not allow_behind:
        names = "; ".join(f"{name} is {table['state']}: {table.get('reason', '')}" for name, table in late.items())
        raise Refused(
            f"the cut does not hold every table in step: {names}",
            code="not_in_step",
            where=f"cut of pipeline {cut['pipeline']}, epoch {cut['epoch']}",
            remedy="wait for these tables, leave them out, or read with allow_behind=True",
        )


def allow_old_versions(spark: SparkSession) -> None:
    """Delta's refusal of versions older than its own retention is off in this session."""
    spark.conf.set(_NO_RETENTION_REFUSAL, "false")


def read_version(spark: SparkSession, cut: Mapping[str, Any], name: str, table: Mapping[str, Any]) -> DataFrame:
    """The version that `table`, an entry of `cut`, names; Refused when it is gone."""
    allow_old_versions(spark)
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException

    try:
        frame = rows_of_table(spark, table["path"], table["version"])
        if is_connect(spark):
            _ = frame.schema  # there nobody looks at the table before the first query
        reason = why_gone(cut, table)
        if not reason:
            return frame.where(wanted) if (wanted := partitions_condition(table, "`")) else frame
    except AnalysisException as error:
        reason = error.getCondition() or ""
        if not reason.startswith("DELTA_"):
            raise  # not about the version: a session without Delta, for example
    except Py4JJavaError as error:
        if not str(error.java_exception).startswith("java.io.FileNotFoundException"):
            raise
        reason = "there is no table"
    raise version_gone(cut, name, table, reason)


def partitions_condition(table: Mapping[str, Any], quote: str) -> str:
    """In SQL that writes names between `quote`: which rows of `table`, an entry of a cut, are wanted; empty: all."""
    if "partitions" not in table:
        return ""
    ids = ", ".join(str(int(number)) for number in table["partitions"].values())
    return f"{quote}{PARTITION_COLUMN}{quote} in ({ids})" if ids else "false"


def version_gone(cut: Mapping[str, Any], name: str, table: Mapping[str, Any], reason: str) -> Refused:
    """The error of a version that nobody can read any more."""
    return Refused(
        f"version {table['version']} of {name} cannot be read any more ({reason})",
        code="cut_gone",
        where=f"cut of pipeline {cut['pipeline']}, epoch {cut['epoch']}, {table['path']}",
        remedy="wait again for a new cut; keep a cut longer by its pin or by lake.keep_cuts",
    )


def root_of(name: str, table: Mapping[str, Any]) -> str:
    """The lake in which the table `name` lies, whose entry in a cut is `table`; empty for one that lies elsewhere."""
    try:
        path = storage.path_of(table["path"])
    except ValueError:
        return ""
    root = path.removesuffix(f"/{TableName.parse(name).path}")
    return root if root != path and storage.is_folder(control_path(root)) else ""


def why_gone(cut: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    """Why the version that `table`, an entry of `cut`, names is not what it was; nothing: it is. Asked here and not by
    the first query: Spark would name a file, or leave its rows out if it is told to."""
    from headwater.delta import whole

    try:
        folder = storage.path_of(table["path"])
    except ValueError:
        return ""  # elsewhere: for the reader's own engine to say
    if table.get("state", "in step") == "in step" and not _is_same(folder, cut["pipeline"], table):
        return "a power cut of the lake's host took it, and its number is another version's now"
    return "" if whole.is_whole(folder, table["version"]) else "its files were removed"


def _is_same(folder: str, pipeline: str, table: Mapping[str, Any]) -> bool:
    """Whether the version holds the changes that the cut says: its commit, or the newest before it that brought any,
    carries their position. True where the log does not say (any more)."""
    from headwater.delta.log_entries import position_in

    if not table.get("applied_lsn"):
        return True
    wanted = parse_lsn(table["applied_lsn"])
    for version in range(table["version"], max(table["version"] - _LOOKED_BACK, -1), -1):
        found = position_in(folder, version, f"headwater/{pipeline}/")
        if found is not None:
            return found == wanted
    return True


__all__ = [
    "Cut",
    "Kept",
    "Pin",
    "PinReader",
    "list_pins",
    "pin_cut",
    "read",
    "release_pin",
    "remove_expired",
    "root_of",
    "take_cut",
    "time_text",
    "with_parts",
]
