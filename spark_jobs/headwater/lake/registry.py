"""The registry: what is replicated and in which state, in `<root>/_headwater/tables` (a Delta table).

One record per thing: the pipeline, each table, each lease, each reload and what a driver keeps for a job. A change
appends the record's next revision in one exclusive commit; readers keep the highest revision per (kind, name).
`format_version` guards against a lake that a newer Headwater wrote, `pipeline` against two pipelines under one root.
It stands for all files of the lake.
For a week what is over stays: reloads that have ended, and revisions of a table that no longer count and say when it
was loaded or suspended. The pages show it.
A record is on disk when its write returns: a power cut may take the newest epochs, and not what jobs have agreed on.
A reader takes older formats as they are; the first writer stores every record in its own format, at once: from then on
no older Headwater opens the lake and misses what it does not know.

Who sets a table's state: `load` new (it is published from now on) -> loading -> catching up; `replicate` catching up ->
active, any -> suspended, and suspended -> catching up when its attached partitions were reloaded; `load --again`
suspended -> loading.
"removed" is set when a table has left the pipeline file. A running driver follows all of it within a second
(`headwater.replicate.beside.following`), so each record has one writer at a time.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import pyarrow as pa

from headwater.delta.log_entries import log_entry
from headwater.delta.small_tables import (
    LostRace,
    SmallTable,
    append_once,
    create_table,
    make_durable,
    open_table,
    replace_once,
    rows_of,
)
from headwater.delta.whole import lost_file
from headwater.errors import DamagedLake, LostLease, Refused, Transient
from headwater.lake.paths import registry_path
from headwater.lake.reload_records import Keeping, Reload, is_past
from headwater.schema import Leaf, TableSchema

FORMAT_VERSION = 8
"""1 knew neither reloads nor what is kept for them, 2 no columns that come and go while a table is replicated, 3 no
columns and rows that stay at the source, 4 no columns that are hidden, 5 no rebuilds, 6 no clustered tables, 7 no
suspended tables that are followed."""
_COMPACT_ABOVE = 50
"""Files: past it the next write replaces the content by the live records. Whoever opens the registry reads them all, in
a store by a request each."""
TOLD: Final = timedelta(days=7)
"""So long what is over stays in the registry."""

log = logging.getLogger(__name__)

State = Literal["new", "loading", "catching up", "active", "suspended", "removed"]

_SCHEMA = pa.schema(
    [
        ("format_version", pa.int32()),
        ("pipeline", pa.string()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("revision", pa.int64()),
        ("written_at", pa.timestamp("us", "UTC")),
        ("document", pa.string()),
    ]
)


def now_text() -> str:
    """This moment as ISO 8601 UTC with `Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Capture:
    """The capture point of a table's load: what its rows contain, and until when visibility decides.

    `lsn`: every commit visible in `snapshot` ends at or below it. `handover_end`: past it no transaction can be
    visible any more; None while transactions that were open at the snapshot still run.
    """

    lsn: int
    snapshot: str
    handover_end: int | None
    taken_at: str


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """The source this lake was built from, and what Headwater created there.

    `start_lsn` is the slot's position when it was created: until the first epoch it takes the ledger's place.
    `paused`: since when nobody may replicate; empty: anybody may. `history`: the timelines that this one comes from,
    each with the LSN at which it ended; empty: none, or no driver has asked yet.
    """

    system_id: str
    timeline: int
    slot: str
    publication: str
    start_lsn: int
    made_slot: bool
    made_publication: bool
    paused: str = ""
    history: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One table. `schemas`: from which commit LSN which schema holds, oldest first.

    `membership`: the table's membership in its publication that the load waited for (source.standing); another one
    means that changes are missing from the log. None: an older Headwater loaded it.
    `unread`: relation ids of partitions that were attached and have yet to be reloaded: until then the table is
    suspended, and its other rows are followed.
    """

    name: str
    path: str
    state: State
    reason: str = ""
    remedy: str = ""
    since: str = ""
    incarnation: int = 0
    start_lsn: int = 0
    capture: Capture | None = None
    rows: int | None = None
    on_divergence: str = "suspend"
    on_schema_change: str = "evolve"
    schemas: tuple[tuple[int, TableSchema], ...] = field(default=())
    membership: int | None = None
    unread: tuple[int, ...] = ()

    @property
    def is_followed(self) -> bool:
        """Whether a driver applies its changes."""
        return self.state in ("active", "catching up") or bool(self.unread)

    @property
    def schema(self) -> TableSchema:
        return self.schemas[-1][1]

    @property
    def phase(self) -> tuple[int, State]:
        """Which load of it counts, and its state."""
        return self.incarnation, self.state

    @property
    def holds_rows(self) -> bool:
        """Whether the lake has rows of it, in step or not: also while it is loaded again because of what was wrong."""
        return self.state in ("active", "catching up", "suspended") or (self.state == "loading" and bool(self.reason))

    def schema_in(self, kinds: Mapping[str, str]) -> TableSchema:
        """The newest whose columns, in these types, are all among those of a version of the lake's table: its types by
        name."""

        def fits(schema: TableSchema) -> bool:
            return all(kinds.get(column.name) == column.value.lake for column in schema.columns)

        return next((schema for _, schema in reversed(self.schemas) if fits(schema)), self.schema)

    def began_above(self, lsn: int) -> bool:
        """Whether a ledger row at `lsn` is of a load before the present one, of which no row lies below its capture
        point, and none is there before it has ended."""
        return self.state == "loading" or lsn < self.start_lsn

    def app_id(self, pipeline: str) -> str:
        """The Delta `txn` appId under which this table's commits carry their applied position."""
        return f"headwater/{pipeline}/{self.name}/{self.incarnation}"

    def entered(self, state: State, reason: str = "", remedy: str = "") -> TableRecord:
        return replace(self, state=state, reason=reason, remedy=remedy, since=now_text(), unread=())


@dataclass(frozen=True, slots=True)
class Lease:
    """Who does what just now. It is alive while its holder's session at the source is: no clock decides that.

    `session`: the holder's application_name at the source, unique by `holder`; empty: released.
    """

    name: str
    holder: str
    session: str
    host: str
    pid: int
    taken_at: str


Record = PipelineRecord | TableRecord | Lease | Reload | Keeping
Event = tuple[str, str, str]
"""When, "loaded" or "suspended", and which table."""


class Registry:
    """The registry of one lake root, as last read; `refresh` reads again, `write` changes it.

    The mappings are the same objects for good: who holds one sees what a refresh has brought.
    """

    def __init__(self, table: SmallTable, folder: str, pipeline: str) -> None:
        self._table, self._folder = table, folder
        self._pipeline = pipeline
        # Tables are applied in parallel, and each may have something to say about its state.
        self._lock = threading.RLock()
        self._revisions: dict[tuple[str, str], int] = {}
        self._format = FORMAT_VERSION  # the oldest that a record is stored in
        self._durable = -1  # the version that was written here last
        self._is_read = False  # whole, as far as the table was looked at
        self._former: dict[Event, dict[str, Any]] = {}  # what no record tells any more, and the row that does
        self.pipeline: PipelineRecord | None = None
        self.tables: dict[str, TableRecord] = {}
        self.leases: dict[str, Lease] = {}
        self.reloads: dict[str, Reload] = {}
        self.kept: dict[str, Keeping] = {}
        self._mappings: dict[str, dict[str, Any]] = {
            "table": self.tables,
            "lease": self.leases,
            "reload": self.reloads,
            "keeping": self.kept,
        }
        self._read()

    @classmethod
    def open(cls, root: str, pipeline: str) -> Registry | None:
        """The registry under `root`, None when nothing was ever loaded there; Refused if it is not ours."""
        folder = registry_path(root)
        try:
            table = open_table(folder)
            return cls(table, folder, pipeline) if table is not None else None
        except (OSError, ValueError, pa.ArrowException, Transient) as error:
            why = lost_file(folder)
            if not why:
                raise
            raise DamagedLake(why) from error

    @classmethod
    def create(cls, root: str, pipeline: str) -> Registry:
        return cls(create_table(registry_path(root), _SCHEMA), registry_path(root), pipeline)

    @property
    def log_entry(self) -> str:
        """The file of the registry's log that made the version that was read last."""
        return log_entry(self._folder, self._table.version())

    def refresh(self) -> bool:
        """Read what others have written since; whether there is anything."""
        with self._lock:
            was_read, self._is_read = self._is_read, False  # an error leaves it so: the table may have moved on
            if is_new := self._table.look():
                self._durable = -1
            if is_new or not was_read:
                self._read()
            self._is_read = True
            return is_new

    def record(self, name: str) -> TableRecord:
        return self.tables[name]

    def happened(self) -> set[Event]:
        """When each table was loaded and suspended in the last week, as far as it is known."""
        since = _week_ago().isoformat()
        events = {*self._former, *(event for record in self.tables.values() for event in _events_of(record))}
        return {event for event in events if event[0] >= since}

    def write(self, *records: Record) -> None:
        """Store the records as one commit. The caller is the one entitled to change them (lease, slot): a lost race
        against a writer of *other* records is retried, one against the same record raises."""
        with self._lock:
            seen = self._revisions_of(records)
            while not self._stored(records):
                if self._revisions_of(records) != seen:
                    raise LostLease(
                        "another Headwater job changed the same registry record at the same moment",
                        where=f"registry of pipeline {self._pipeline}",
                        remedy="run the command again",
                    )

    def change(self, name: str, how: Callable[[TableRecord], TableRecord | None]) -> None:
        """Store what `how` makes of the record of table `name`, None: nothing. Neither threads nor jobs that change
        one undo each other: after a lost race `how` is asked again."""
        self.change_each([name], how)

    def change_each(self, names: Sequence[str], how: Callable[[TableRecord], TableRecord | None]) -> None:
        """The same of several tables, in one commit: hundreds of them would sync the disk hundreds of times."""
        self._change(lambda: [record for name in names if (record := how(self.tables[name])) is not None])

    def begin(self, name: str, how: Callable[[TableRecord | None], TableRecord]) -> TableRecord:
        """The same for a table that may have none yet (None); what was stored."""
        with self._lock:
            self._change(lambda: [how(self.tables.get(name))])
            return self.tables[name]

    def change_lease(self, name: str, how: Callable[[Lease | None], Lease | None]) -> None:
        """The same of the lease `name`; None: nobody has held it yet. What `how` has looked at is what it replaces."""
        self._change(lambda: _some(how(self.leases.get(name))))

    def add(self, how: Callable[[], Record]) -> None:
        """Store what `how` makes, which has looked at the registry: after a lost race it is asked, and looks, again."""
        self._change(lambda: [how()])

    def change_keeping(self, name: str, how: Callable[[Keeping | None], Keeping | None]) -> bool:
        """The same of what a driver keeps under `name`; whether it was stored."""
        return self._change(lambda: _some(how(self.kept.get(name))))

    def _change(self, how: Callable[[], Sequence[Record]]) -> bool:
        with self._lock:
            while (records := how()) and not self._stored(records):
                pass
            return bool(records)

    def upgrade(self) -> None:
        """Store every record in this Headwater's format, if one is in an older format; each write does so, too."""
        with self._lock:
            while self._format < FORMAT_VERSION and not self._stored([]):
                pass

    def _revisions_of(self, records: Sequence[Record]) -> list[int]:
        return [self._revisions.get(_key_of(record), 0) for record in records]

    def _stored(self, records: Sequence[Record]) -> bool:
        """One attempt to write: False when the registry had to be read again, as behind a lost race."""
        if not self._is_read:
            # The table stands behind what a refresh has failed to read: nobody would lose a race against this write.
            self._read()
            return False
        for record in records:
            if isinstance(record, TableRecord) and (before := self.tables.get(record.name)) is not None:
                self._put_by(self._row(before, self._revisions[_key_of(before)]), record)
        try:
            self._commit([self._row(record) for record in records])
        except LostRace:
            self.refresh()
            return False
        for record in records:
            self._keep(record)
            self._revisions[_key_of(record)] = self._revisions.get(_key_of(record), 0) + 1
        return True

    def _commit(self, rows: list[dict[str, Any]]) -> None:
        if len(self._table.files) <= _COMPACT_ABOVE and self._format == FORMAT_VERSION:
            append_once(self._table, rows, _SCHEMA)
            self._durable = make_durable(self._table, self._durable)
            return
        written = {(row["kind"], row["name"]) for row in rows}
        week_ago, jobs = _week_ago(), {*self.reloads, *self.kept}
        past = {name for name in jobs if is_past(self.reloads.get(name), self.kept.get(name), week_ago)}
        live: Iterable[Record] = [
            *([self.pipeline] if self.pipeline else []),
            *self.tables.values(),
            *self.leases.values(),
            *(reload for reload in self.reloads.values() if reload.name not in past),
            *(kept for kept in self.kept.values() if kept.name not in past),
        ]
        kept = [self._row(r, self._revisions[_key_of(r)]) for r in live if _key_of(r) not in written]
        self._former = {event: row for event, row in self._former.items() if event[0] >= week_ago.isoformat()}
        former = {(row["name"], row["revision"]): row for row in self._former.values()}
        replace_once(self._table, [*former.values(), *kept, *rows], _SCHEMA)
        self._durable = make_durable(self._table, self._durable)
        if self._format < FORMAT_VERSION:
            log.info("pipeline %s: format %d of the lake is now %d", self._pipeline, self._format, FORMAT_VERSION)
            self._format = FORMAT_VERSION

    def _put_by(self, row: dict[str, Any], record: TableRecord) -> None:
        """The row of a table that `record` stands for by now, if it tells what no other does. Of its schemas nobody
        asks."""
        document, told = json.loads(row["document"]), _events_of(record)
        capture = document["capture"] or {}
        for event in _events(row["name"], document["state"], document["since"], capture.get("taken_at", "")):
            if event not in told and event not in self._former:
                self._former[event] = {**row, "document": json.dumps({**document, "schemas": []})}

    def _row(self, record: Record, revision: int | None = None) -> dict[str, Any]:
        kind, name = _key_of(record)
        if isinstance(record, TableRecord):
            schemas = [[lsn, schema.to_json()] for lsn, schema in record.schemas]
            document = {**asdict(replace(record, schemas=())), "schemas": schemas}
        else:
            document = asdict(record)
        return {
            "format_version": FORMAT_VERSION,
            "pipeline": self._pipeline,
            "kind": kind,
            "name": name,
            "revision": revision if revision is not None else self._revisions.get((kind, name), 0) + 1,
            "written_at": datetime.now(UTC),
            "document": json.dumps(document),
        }

    def _read(self) -> None:
        revisions: dict[tuple[str, str], int] = {}
        newest = {}
        rows = rows_of(self._table)
        for row in rows:
            _refuse_foreign(row, self._pipeline)
            key = (row["kind"], row["name"])
            if row["revision"] > revisions.get(key, 0):
                revisions[key] = row["revision"]
                newest[key] = row
        self._revisions = revisions
        self._format = min((row["format_version"] for row in newest.values()), default=FORMAT_VERSION)
        for kind, records in self._mappings.items():
            for name in [name for name in records if (kind, name) not in newest]:
                del records[name]
        for (kind, _), row in sorted(newest.items()):
            self._keep(_record_of(kind, json.loads(row["document"])))
        self._former = {}
        for row in sorted(rows, key=lambda row: int(row["revision"])):
            if row["kind"] == "table" and row["revision"] < revisions["table", row["name"]]:
                self._put_by(row, self.tables[row["name"]])
        self._is_read = True

    def _keep(self, record: Record) -> None:
        if isinstance(record, PipelineRecord):
            self.pipeline = record
            return
        kind, name = _key_of(record)
        self._mappings[kind][name] = record


_KINDS: dict[str, Any] = {
    "pipeline": PipelineRecord,
    "table": TableRecord,
    "lease": Lease,
    "reload": Reload,
    "keeping": Keeping,
}


def _events_of(record: TableRecord) -> list[Event]:
    return _events(record.name, record.state, record.since, record.capture.taken_at if record.capture else "")


def _events(name: str, state: str, since: str, loaded: str) -> list[Event]:
    suspended = since if state == "suspended" else ""
    return [(at, what, name) for at, what in ((loaded, "loaded"), (suspended, "suspended")) if at]


def _week_ago() -> datetime:
    return datetime.now(UTC) - TOLD


def _some(record: Record | None) -> list[Record]:
    return [] if record is None else [record]


def _key_of(record: Record) -> tuple[str, str]:
    kind = next(kind for kind, type_ in _KINDS.items() if type(record) is type_)
    return kind, "" if isinstance(record, PipelineRecord) else record.name


def _record_of(kind: str, document: dict[str, Any]) -> Record:
    if kind == "reload":
        unknown = tuple(Leaf(**leaf) for leaf in document["unknown"])
        shape = TableSchema.from_json(document["shape"]) if document.get("shape") else None
        return Reload(**{**document, "leaves": tuple(document["leaves"]), "unknown": unknown, "shape": shape})
    if kind == "pipeline":
        ended = tuple((timeline, lsn) for timeline, lsn in document.pop("history", ()))
        return PipelineRecord(**document, history=ended)
    if kind != "table":
        record: Record = _KINDS[kind](**document)
        return record
    capture = document["capture"]
    document["capture"] = Capture(**capture) if capture else None
    document["schemas"] = tuple((lsn, TableSchema.from_json(schema)) for lsn, schema in document["schemas"])
    return TableRecord(**{**document, "unread": tuple(document.get("unread", ()))})


def _refuse_foreign(row: dict[str, Any], pipeline: str) -> None:
    if row["format_version"] > FORMAT_VERSION:
        raise Refused(
            f"this lake was written by a newer Headwater (format {row['format_version']}, this one knows "
            f"{FORMAT_VERSION})",
            code="newer_format",
            where=f"registry of pipeline {row['pipeline']}",
            remedy="upgrade Headwater here; nothing was changed",
        )
    if row["pipeline"] != pipeline:
        raise Refused(
            f"the lake root already belongs to the pipeline {row['pipeline']!r}",
            code="foreign_root",
            where=f"pipeline {pipeline}, key lake.root",
            remedy="give every pipeline a root of its own",
        )
