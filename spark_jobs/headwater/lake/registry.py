"""The registry: what is replicated and in which state, in `<root>/_headwater/tables` (a Delta table).

One record per thing: the pipeline, each table, each lease. A change appends the record's next revision in one
exclusive commit; readers keep the highest revision per (kind, name). `format_version` guards against a lake that
a newer Headwater wrote, `pipeline` against two pipelines under one root.

Who sets a table's state: `load` new -> loading -> catching up; `replicate` catching up -> active, any ->
suspended; `load --again` suspended -> loading. "removed" is set when a table has left the pipeline file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa

from headwater.errors import LostLease, Refused
from headwater.lake.commits import DeltaTable, LostRace, append_once, create_table, open_table, replace_once, select
from headwater.lake.paths import registry_path
from headwater.schema import TableSchema

FORMAT_VERSION = 1
_COMPACT_ABOVE = 200  # files: past it the next write replaces the content by the live records

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
    """

    system_id: str
    timeline: int
    slot: str
    publication: str
    start_lsn: int
    made_slot: bool
    made_publication: bool


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One table. `schemas`: from which commit LSN which schema holds, oldest first.

    `membership`: the table's membership in its publication that the load waited for (source.standing); another one
    means that changes are missing from the log. None: an older Headwater loaded it.
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
    schemas: tuple[tuple[int, TableSchema], ...] = field(default=())
    membership: int | None = None

    @property
    def schema(self) -> TableSchema:
        return self.schemas[-1][1]

    def app_id(self, pipeline: str) -> str:
        """The Delta `txn` appId under which this table's commits carry their applied position."""
        return f"headwater/{pipeline}/{self.name}/{self.incarnation}"

    def entered(self, state: State, reason: str = "", remedy: str = "") -> TableRecord:
        return replace(self, state=state, reason=reason, remedy=remedy, since=now_text())


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


class Registry:
    """The registry of one lake root, as last read; `refresh` reads again, `write` changes it."""

    def __init__(self, table: DeltaTable, pipeline: str) -> None:
        self._table = table
        self._pipeline = pipeline
        # Tables are applied in parallel, and each may have something to say about its state.
        self._lock = threading.RLock()
        self._revisions: dict[tuple[str, str], int] = {}
        self.pipeline: PipelineRecord | None = None
        self.tables: dict[str, TableRecord] = {}
        self.leases: dict[str, Lease] = {}
        self._read()

    @classmethod
    def open(cls, root: str, pipeline: str) -> Registry | None:
        """The registry under `root`, None when nothing was ever loaded there; Refused if it is not ours."""
        table = open_table(registry_path(root))
        return cls(table, pipeline) if table is not None else None

    @classmethod
    def create(cls, root: str, pipeline: str) -> Registry:
        return cls(create_table(registry_path(root), _SCHEMA), pipeline)

    def refresh(self) -> None:
        with self._lock:
            before = self._table.version()
            self._table.update_incremental()
            if self._table.version() != before:
                self._read()

    def record(self, name: str) -> TableRecord:
        return self.tables[name]

    def write(self, *records: PipelineRecord | TableRecord | Lease) -> None:
        """Store the records as one commit. The caller is the one driver entitled to change them (lease, slot):
        a lost race against a writer of *other* records is retried, one against the same record raises."""
        with self._lock:
            while not self._written(records):
                pass

    def change(self, name: str, how: Callable[[TableRecord], TableRecord]) -> None:
        """Store what `how` makes of the record of table `name`: threads that change one do not undo each other."""
        with self._lock:
            self.write(how(self.tables[name]))

    def _written(self, records: Sequence[PipelineRecord | TableRecord | Lease]) -> bool:
        """One attempt of `write`: False when it is to be tried again."""
        try:
            self._commit([self._row(record) for record in records])
        except LostRace:
            seen = {key: self._revisions.get(key, 0) for key in map(_key_of, records)}
            self.refresh()
            if any(self._revisions.get(key, 0) != revision for key, revision in seen.items()):
                raise LostLease(
                    "another Headwater job changed the same registry record at the same moment",
                    where=f"registry of pipeline {self._pipeline}",
                    remedy="run the command again",
                ) from None
            return False
        for record in records:
            self._keep(record)
            self._revisions[_key_of(record)] = self._revisions.get(_key_of(record), 0) + 1
        return True

    def _commit(self, rows: list[dict[str, Any]]) -> None:
        if len(self._table.file_uris()) <= _COMPACT_ABOVE:
            append_once(self._table, rows, _SCHEMA)
            return
        written = {(row["kind"], row["name"]) for row in rows}
        live: Iterable[PipelineRecord | TableRecord | Lease] = [
            *([self.pipeline] if self.pipeline else []),
            *self.tables.values(),
            *self.leases.values(),
        ]
        kept = [self._row(r, self._revisions[_key_of(r)]) for r in live if _key_of(r) not in written]
        replace_once(self._table, kept + rows, _SCHEMA)

    def _row(self, record: PipelineRecord | TableRecord | Lease, revision: int | None = None) -> dict[str, Any]:
        kind, name = _key_of(record)
        document = {**asdict(record)}
        if isinstance(record, TableRecord):
            document["schemas"] = [[lsn, schema.to_json()] for lsn, schema in record.schemas]
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
        self._revisions, newest = {}, {}
        for row in select(self._table):
            _refuse_foreign(row, self._pipeline)
            key = (row["kind"], row["name"])
            if row["revision"] > self._revisions.get(key, 0):
                self._revisions[key] = row["revision"]
                newest[key] = row
        self.pipeline, self.tables, self.leases = None, {}, {}
        for (kind, _), row in sorted(newest.items()):
            self._keep(_record_of(kind, json.loads(row["document"])))

    def _keep(self, record: PipelineRecord | TableRecord | Lease) -> None:
        if isinstance(record, PipelineRecord):
            self.pipeline = record
        elif isinstance(record, TableRecord):
            self.tables[record.name] = record
        else:
            self.leases[record.name] = record


def _key_of(record: PipelineRecord | TableRecord | Lease) -> tuple[str, str]:
    if isinstance(record, PipelineRecord):
        return "pipeline", ""
    return ("table" if isinstance(record, TableRecord) else "lease"), record.name


def _record_of(kind: str, document: dict[str, Any]) -> PipelineRecord | TableRecord | Lease:
    if kind == "pipeline":
        return PipelineRecord(**document)
    if kind == "lease":
        return Lease(**document)
    capture = document["capture"]
    document["capture"] = Capture(**capture) if capture else None
    document["schemas"] = tuple((lsn, TableSchema.from_json(schema)) for lsn, schema in document["schemas"])
    return TableRecord(**document)


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
