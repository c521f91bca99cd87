"""What the pages and the metrics show of one pipeline: gathered from the lake, with the source's last answer beside it.

One `PipelineWatch` per pipeline serves all who look. A look at the lake is kept for a second, an answer of the source
for some (`headwater.monitor.source_watch`); without the source everything is there but lags, slot and transactions, and
`source` says why. Without Spark. Times are ISO 8601 UTC, LSNs text, sizes bytes, durations seconds.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from headwater.lake.health import Facts, health
from headwater.lake.load_files import shown_loads
from headwater.lake.look import IN_STEP, Look, ReportedState
from headwater.lake.looks import often
from headwater.lake.paths import table_path, table_uri
from headwater.lake.position_file import PositionFile
from headwater.lake.reader import LakeReader
from headwater.lake.registry import Registry
from headwater.lake.validations import recent_results
from headwater.lake.wait_log import WaitLog
from headwater.monitor.cures import cure_of
from headwater.monitor.lags import Lags
from headwater.monitor.recent_epochs import RecentEpoch, RecentEpochs
from headwater.monitor.source_watch import FIRST_SECONDS, SourceAnswer, SourceWatch
from headwater.monitor.status import durable_json, load_lives, named_of, remedy_of, room_of, slot_of
from headwater.monitor.table_page import files_of, reason_of, reloads_of, schema_versions
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.waiting.source_state import as_the_source_stands, followed
from headwater.waiting.speed import speed

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
# Readers follow log entry after log entry, and these go after an hour, or with a lake that is made anew.
_ANEW_SECONDS = 600.0
_ALIVE_SECONDS = 3.0  # on a disk a living driver replaces its position file at least once a second
_WATCHED_SECONDS = 90.0
"""Between two looks that still tell that a driver lives: it may have written right behind the first, and died. A page
looks every five seconds, a scraper perhaps once a minute."""
_SHOWN = 20
_POINTS = 60
WAITS_DAYS, _WAITS_SECONDS = 7, 15.0
"""Of how many days waits are shown, and how old what is shown of them may be."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One look, complete: everything that is shown follows from it."""

    look: Look
    registry: Registry | None
    answer: SourceAnswer
    lags: Lags
    loads: list[dict[str, Any]]
    running: bool | None
    at: datetime


class PipelineWatch:
    """The pipeline of one file, for everybody who looks at it. From any thread."""

    def __init__(
        self, pipeline: Pipeline, conninfo: Callable[[], str] | None = None, patience: float = FIRST_SECONDS
    ) -> None:
        """`conninfo` gives the source's connection string (secret); None: as the pipeline file says. `patience`: how
        many seconds who looks waits for the source, where it has not been asked for a while."""
        self.pipeline = pipeline
        self._source = SourceWatch(pipeline, conninfo or pipeline.conninfo)
        self._patience = patience
        self._lock = threading.RLock()
        self._seen: _Seen | None = None
        self._rows: tuple[_Seen, list[dict[str, Any]]] | None = None
        self._looked_at = float("-inf")
        self._wait_log, self._waits_lock = WaitLog(pipeline.lake_path()), threading.Lock()
        self._waits_seen: list[dict[str, Any]] = []
        self._waits_read_at = float("-inf")
        self._file: tuple[Any, float, bool] | None = None  # content, since when, whether we saw it change
        self._file_seen_at = float("-inf")
        self._begin_anew(None)

    def _begin_anew(self, before: RecentEpochs | None) -> None:
        root = self.pipeline.lake_path()
        self._lake = LakeReader(root, self.pipeline.name)
        self._recent = RecentEpochs(root, before=before)
        self._began_at = time.monotonic()

    def await_source(self, seconds: float) -> None:
        """Wait for the source, `seconds` at most, where its last answer is too old to be shown: whoever asks seldom
        would never see one that takes longer than a page's patience. Others are not kept waiting meanwhile."""
        with self._lock:
            unanswered = self._look().answer.state is None
        # Also where none is under way: it may have ended while the rest of the look was made.
        if unanswered and self._source.visited(seconds):
            with self._lock:
                self._looked_at = float("-inf")

    def overview(self) -> dict[str, Any]:
        """The pipeline in one object: the first page shows one of these for each."""
        with self._lock:
            seen = self._look()
            file, state = seen.look.file, seen.answer.state
            lag_bytes, lag_seconds = seen.lags.of_pipeline()
            states = self._states(seen)
            rates = file.rates if file is not None else {}
            moving = speed(rates, lag_bytes, lag_seconds, running=bool(seen.running))
            attention = [
                {"table": name, **_state_json(table, self._remedy(table, seen))}
                for name, table in sorted(states.items(), key=lambda item: item[1].since, reverse=True)
                if table.state == "suspended"
            ]
            newest = self._recent.newest
            return {
                "pipeline": self.pipeline.name,
                "file": self.pipeline.file,
                "lake": self.pipeline.lake.root,
                "state": _pipeline_state(seen, states),
                "health": _with_cure(
                    health(
                        Facts(
                            look=seen.look,
                            tables={row["table"]: row for row in self._tables(seen)},
                            file=shlex.quote(self.pipeline.file),
                            running=seen.running,
                            now=seen.at,
                            outage=seen.answer.outage if state is None else "",
                            load_lives=load_lives(seen.registry, seen.answer.jobs) if state is not None else None,
                            room=room_of(state, seen.answer.wal_bound),
                            eta_seconds=moving["eta_seconds"],
                            named=named_of(self.pipeline),
                        )
                    ).to_json()
                ),
                "running": seen.running,
                "paused": _paused(seen),
                "generation": file.generation if file is not None else None,
                "epoch": file.epoch if file is not None and file.epoch else None,
                "position": file.position.to_json() if file is not None else None,
                "durable_position": durable_json(file),
                "not_durable_bytes": _not_durable(file),
                "read_position": format_lsn(file.read_position) if file is not None else None,
                "published_at": _time(newest.applied_at) if newest is not None else None,
                "seconds_since_publication": _age(newest.applied_at, seen.at) if newest is not None else None,
                "lag_bytes": lag_bytes,
                "lag_seconds": lag_seconds,
                "changes_per_second": self._recent.changes_per_second(seen.at),
                **moving,
                "latency": [[_time(epoch.applied_at), epoch.latency] for epoch in self._recent.with_latency(_POINTS)],
                "tables": dict(sorted(Counter(table.state for table in states.values()).items())),
                "loads": seen.loads,
                "attention": attention[:_SHOWN],
                "more_attention": max(0, len(attention) - _SHOWN),
                "retrying": [{"table": name, **one} for name, one in file.retrying.items()] if file is not None else [],
                "slot": {
                    **slot_of(self.pipeline, state, seen.answer.outage),
                    "wal_bound_bytes": seen.answer.wal_bound if state is not None else None,
                },
                "oldest_transaction": _oldest(seen.answer),
                "source": _source_json(seen.answer),
                "at": _time(seen.at),
            }

    def details(self) -> dict[str, Any]:
        """The overview with its tables, newest epochs, running loads and leases."""
        waits = self._waits()
        with self._lock:
            overview, seen = self.overview(), self._look()
            leases = seen.registry.leases.values() if seen.registry is not None else ()
            return {
                **overview,
                "history": {
                    **self._recent.latencies.to_json(seen.at, overview["lag_seconds"]),
                    "marks": self._marks(seen),
                    "freshness_seconds": min(self._wanted(seen), default=None),
                },
                "table_list": self._tables(seen),
                "epochs": [self._epoch(epoch) for epoch in reversed(self._recent.epochs)][:_POINTS],
                "jobs": [
                    {"what": lease.name, "host": lease.host, "pid": lease.pid, "since": lease.taken_at}
                    for lease in leases
                    if lease.session
                ],
                "reloads": [one for one in reloads_of(seen.registry) if one["running"]] if seen.registry else [],
                "waits": waits,
            }

    def table_rows(self) -> list[dict[str, Any]]:
        """Every table with state and lag: what the metrics tell."""
        with self._lock:
            return self._tables(self._look())

    def table(self, name: str) -> dict[str, Any] | None:
        """One table with its recent history; None when the pipeline has no such table."""
        with self._lock:
            seen = self._look()
            row = next((row for row in self._tables(seen) if row["table"] == name), None)
            if row is None:
                return None
            record = seen.registry.tables.get(name) if seen.registry is not None else None
            history = [
                {**self._epoch(epoch), "path": epoch.tables[name].apply_path, "rows": epoch.tables[name].rows}
                | {"version": epoch.tables[name].version}
                for epoch in reversed(self._recent.epochs)
                if name in epoch.tables
            ][:_POINTS]
            reloads = reloads_of(seen.registry, name) if seen.registry is not None else []
            root = self.pipeline.lake_path()
        for one in history:
            one["because"] = reason_of(table_path(root, record.path), one["version"]) if record is not None else None
        uri = table_uri(root, record.path if record is not None else TableName.parse(name).path)
        entry = self.pipeline.entry_for(TableName.parse(name))
        divergence = (entry.on_divergence if entry is not None else None) or self.pipeline.defaults.on_divergence
        # What costs time, files of a large table, is asked outside of the lock.
        return {
            "pipeline": self.pipeline.name,
            "file": self.pipeline.file,
            "at": _time(seen.at),
            **row,
            "uri": uri,
            "on_divergence": record.on_divergence if record is not None else divergence,
            "incarnation": record.incarnation if record is not None else None,
            "loaded_rows": record.rows if record is not None else None,
            "capture": (
                {"lsn": format_lsn(record.capture.lsn), "taken_at": record.capture.taken_at}
                if record is not None and record.capture is not None
                else None
            ),
            "history": history,
            "reloads": reloads[:_SHOWN],
            "validations": recent_results(root, name),
            "schemas": schema_versions(record) if record is not None else [],
            "files": files_of(root, record, row["version"]) if record is not None else None,
        }

    def _look(self) -> _Seen:
        now = time.monotonic()
        if self._seen is not None and now - self._looked_at < LOOK_SECONDS:
            return self._seen
        if now - self._began_at > _ANEW_SECONDS:
            self._begin_anew(self._recent)
        look, registry = self._lake.look(), self._lake.registry()
        tables = followed(registry, self.pipeline.source.publication)
        self._source.latest(tables, look, wait=0)  # it answers while the ledger is read
        self._recent.refresh()
        answer = self._source.latest(tables, look, wait=self._patience)
        state = answer.state
        moves = self._file_moves(look)
        if state is None:
            running = moves
        else:  # a driver may be connecting again
            running = (state.slot is not None and state.slot.active) or bool(moves)
        look = as_the_source_stands(look, state, lambda: followed(registry, self.pipeline.source.publication))
        loads = shown_loads(self.pipeline.lake_path(), answer.jobs if state is not None else ())
        self._seen = _Seen(look, registry, answer, Lags(look, state), loads, running, datetime.now(UTC))
        self._looked_at = time.monotonic()
        return self._seen

    def _waits(self) -> list[dict[str, Any]]:
        """Of the last days; what nobody decides by may be some seconds old, and missing."""
        with self._waits_lock:
            now = time.monotonic()
            if now - self._waits_read_at > _WAITS_SECONDS:
                self._waits_read_at = now
                try:
                    found = self._wait_log.since(datetime.now(UTC) - timedelta(days=WAITS_DAYS))
                    self._waits_seen = [one.to_json() for one in found]
                except OSError as error:
                    log.warning("pipeline %s: its log of waits cannot be read: %s", self.pipeline.name, error)
            return self._waits_seen

    def _file_moves(self, look: Look) -> bool | None:
        """Whether a driver lives, as far as the lake alone can tell; None: it has not been watched long enough."""
        now, pace = time.monotonic(), often(self.pipeline.lake_path()).file
        unwatched = now - self._file_seen_at > _WATCHED_SECONDS + pace
        self._file_seen_at = now
        if self._file is None or (unwatched and look.file != self._file[0]):
            self._file = (look.file, now, False)
        content, since, changed = self._file
        if look.file != content:
            self._file = (look.file, now, True)
            return look.file is not None and not look.file.ended
        if content is not None and content.ended:
            return False
        if now - since <= _ALIVE_SECONDS + pace:
            return True if changed else None
        return False

    def _wanted(self, seen: _Seen) -> list[float]:
        """The stalenesses that the file allows tables."""
        wanted = [self.pipeline.freshness_of(TableName.parse(name)) for name in seen.look.tables]
        return [seconds for seconds in wanted if seconds is not None]

    def _marks(self, seen: _Seen) -> list[dict[str, str]]:
        """What happened that a person looks for in a chart: tables loaded, reloaded, suspended, by when."""
        if seen.registry is None:
            return []
        happened = [
            *seen.registry.happened(),
            *((one["since"], "reloaded", one["table"]) for one in reloads_of(seen.registry) if one["state"] == "done"),
        ]
        together: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for at, what, name in sorted(happened):
            together.setdefault((at[:16], what), []).append((at, name))  # up to the minute
        return [
            {"at": min(at for at, _ in each), "what": f"{_some(sorted({name for _, name in each}))} {what}"}
            for (_, what), each in sorted(together.items())
        ]

    def _states(self, seen: _Seen) -> dict[str, ReportedState]:
        named = named_of(self.pipeline)
        new = ReportedState("new", "it has not been loaded")
        return {name: seen.look.tables.get(name, new) for name in named | seen.answer.listed | set(seen.look.tables)}

    def _remedy(self, table: ReportedState, seen: _Seen) -> str:
        return remedy_of(table, self.pipeline, running=bool(seen.running))

    def _tables(self, seen: _Seen) -> list[dict[str, Any]]:
        """As `status` shows them. Made once for a look: the health, the page and the metrics follow from it."""
        if self._rows is None or self._rows[0] is not seen:
            self._rows = seen, self._tables_of(seen)
        return self._rows[1]

    def _tables_of(self, seen: _Seen) -> list[dict[str, Any]]:
        lately: dict[str, list[RecentEpoch]] = {}
        for epoch in self._recent.epochs:
            for name in epoch.tables:
                lately.setdefault(name, []).append(epoch)
        rows = []
        for name, table in sorted(self._states(seen).items()):
            version = self._recent.versions.get(name)
            wanted = self.pipeline.freshness_of(TableName.parse(name))
            applied = version.applied_lsn if version is not None else None
            lag_bytes, lag_seconds = seen.lags.of_table(name, applied, wanted)
            touched = lately.get(name, [])
            rows.append(
                {
                    "table": name,
                    **_state_json(table, self._remedy(table, seen)),
                    "retrying": seen.look.retrying(name),
                    "applied_lsn": format_lsn(version.applied_lsn) if version is not None else None,
                    "version": version.version if version is not None else None,
                    "lag_bytes": lag_bytes,
                    "lag_seconds": lag_seconds,
                    "freshness_seconds": wanted,
                    "late": lag_seconds > wanted if lag_seconds is not None and wanted is not None else None,
                    "changes": sum(epoch.tables[name].rows for epoch in touched),
                    "paths": dict(Counter(epoch.tables[name].apply_path for epoch in touched)),
                    "touched_at": _time(touched[-1].applied_at) if touched else None,
                    "latency": [epoch.latency for epoch in touched[-_SHOWN:] if epoch.latency is not None],
                }
            )
        return rows

    def _epoch(self, epoch: RecentEpoch) -> dict[str, Any]:
        busiest = max(epoch.stages, key=lambda name: epoch.stages[name], default=None)
        return {
            "epoch": epoch.epoch,
            "generation": epoch.generation,
            "lsn": format_lsn(epoch.to_lsn),
            "bytes": max(0, epoch.to_lsn - epoch.from_lsn),
            "applied_at": _time(epoch.applied_at),
            "source_time": _time(epoch.source_time) if epoch.source_time is not None else None,
            "changes": epoch.changes,
            "touched": len(epoch.tables),
            "latency": epoch.latency,
            "stages": dict(epoch.stages) if epoch.tables else {},
            "longest_stage": busiest if epoch.tables else None,
        }


def _pipeline_state(seen: _Seen, states: dict[str, ReportedState]) -> str:
    """One word for the pipeline; what needs a person goes first."""
    if any(table.state == "suspended" for table in states.values()):
        return "suspended"
    if any(table.state == "loading" for table in states.values()):
        return "loading"
    if seen.registry is None or not seen.registry.tables:
        return "new"
    if _paused(seen):
        return "paused"
    if seen.running is None:
        return "unknown"
    if not seen.running:
        return "stopped"
    in_step = all(table.state in (IN_STEP, "removed", "new") for table in states.values())
    return "running" if in_step else "catching up"


def _paused(seen: _Seen) -> str | None:
    """Since when nobody may replicate, by `headwater pause`."""
    record = seen.registry.pipeline if seen.registry is not None else None
    return (record.paused or None) if record is not None else None


def _state_json(table: ReportedState, remedy: str) -> dict[str, Any]:
    said = {"state": table.state, "reason": table.reason, "since": table.since or None, "remedy": remedy}
    return _with_cure(said)


def _with_cure(said: Mapping[str, Any]) -> dict[str, Any]:
    """`said` with what a page can do about its remedy."""
    return {**said, "cure": cure_of(said["remedy"])}


def _oldest(answer: SourceAnswer) -> dict[str, Any] | None:
    """The transaction that has been open longest at the source: its log is kept until it ends. Where the role may not
    see the age of the one with the lowest id, which began to write first, that one is named, and `seconds` is the age
    of the oldest that it may see: it has been open for about as long at least."""
    known = answer.state.open_transactions if answer.state is not None else ()
    if not known:
        return None
    first = min(known, key=lambda one: one.xid)
    oldest = max(known, key=lambda one: (one.age or 0.0, -one.xid))
    shown = first if first.age is None else oldest
    return {"seconds": round(oldest.age, 3) if oldest.age is not None else None, "what": str(shown)}


def _source_json(answer: SourceAnswer) -> dict[str, Any]:
    age = round(time.monotonic() - answer.asked_at, 1) if answer.asked_at is not None else None
    return {"answers": answer.state is not None, "age_seconds": age, "reason": answer.outage}


def _not_durable(file: PositionFile | None) -> int | None:
    """Of the source's log, what is published and would not survive a power cut."""
    if file is None or file.durable_position is None:
        return None
    return file.position.lsn - file.durable_position.lsn


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _some(names: Sequence[str]) -> str:
    return f"{names[0]} was" if len(names) == 1 else f"{len(names)} tables were"


def _age(moment: datetime, now: datetime) -> float:
    """By this machine's clock and the driver's: for a person, and for alerts of minutes."""
    return max(0.0, round((now - moment).total_seconds(), 1))
