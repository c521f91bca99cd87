"""How far a load or reload is, as it is shown while it runs: to whoever started it, and by a file in the lake
(`headwater.lake.load_files`) to `status`, the pages and the metrics.

Counts come from the readers, who tell them at the source (`headwater.source.reading_now`). Nothing here decides
anything: when the source or the lake cannot be reached for it, the job itself will say so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

from headwater.errors import HeadwaterError
from headwater.lake.load_files import LoadFile, read_load_files, remove_load_file, write_load_file
from headwater.lake.registry import now_text
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, connect
from headwater.source.reading_now import Reader, jobs_there, readers
from headwater.terminal.bars import line

log = logging.getLogger(__name__)

Report = Callable[[str], None]
Show = Callable[[LoadFile], None]
"""Is given what the file holds, about once a second."""
State = Literal["waiting", "reading", "committing", "merging", "done"]

_LOOK_SECONDS: Final = 1.0
_LAST_SECONDS: Final = 5.0
_LINE_SECONDS: Final = 30.0
_RATE_SECONDS: Final = 15
_EACH: Final = 4 << 20
"""What a table costs besides its rows, in bytes of it at the source: its capture point and its commit take as long."""


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    rows: int
    bytes: int
    work: float


class _Speed:
    """Over the last fifteen looks: of one table, or of all."""

    def __init__(self) -> None:
        self._moments: deque[_Moment] = deque(maxlen=_RATE_SECONDS)

    def look(self, rows: int, size: int, work: float) -> None:
        self._moments.append(_Moment(time.monotonic(), rows, size, work))

    def shown(self, left: float) -> dict[str, float | None]:
        """Rates, and when the work that is `left` will be done; null where it is not known yet."""
        first, last = (self._moments[0], self._moments[-1]) if self._moments else (None, None)
        if first is None or last is None or last.at <= first.at:
            return {"rows_per_second": None, "bytes_per_second": None, "eta_seconds": None}
        passed = last.at - first.at
        speed = (last.work - first.work) / passed
        return {
            "rows_per_second": round(max(0, last.rows - first.rows) / passed, 1),
            "bytes_per_second": round(max(0, last.bytes - first.bytes) / passed, 1),
            "eta_seconds": round(left / speed, 1) if speed > 0 else None,
        }


@dataclass(slots=True)
class _Table:
    """One table of the job. `size`: bytes at the source; `taken_at`: of its capture point, by this process's clock."""

    name: str
    size: int
    part: str | None = None
    state: State = "waiting"
    snapshot_id: str = ""
    units: int = 0
    taken_at: float = 0.0
    rows: int = 0
    bytes: int = 0
    found: dict[int, Reader] = field(default_factory=dict)
    speed: _Speed = field(default_factory=_Speed)

    @property
    def share(self) -> float:
        """Of its units, by their number: they are of about one size."""
        if self.state in ("merging", "done"):
            return 1.0
        return min(1.0, sum(reader.units for reader in self.found.values()) / self.units) if self.units else 0.0

    @property
    def work(self) -> float:
        return self.share * self.size + (_EACH if self.state in ("merging", "done") else 0)

    def look(self, found: list[Reader]) -> None:
        if self.state != "reading":
            return
        for reader in found:
            if reader.snapshot_id == self.snapshot_id:
                self.found[reader.pid] = reader
        self.rows = sum(reader.rows for reader in self.found.values())
        self.bytes = sum(reader.kibibytes for reader in self.found.values()) << 10
        self.speed.look(self.rows, self.bytes, self.work)

    def shown(self) -> dict[str, Any]:
        state = "committing" if self.state == "reading" and self.units and self.share == 1.0 else self.state
        held = self.state == "reading"
        return {
            "table": self.name,
            "part": self.part,
            "state": state,
            "rows": self.rows,
            "bytes": self.bytes,
            "done": round(self.share, 4),
            **self.speed.shown(self.size - self.share * self.size),
            "snapshot_seconds": round(time.monotonic() - self.taken_at, 1) if held else None,
        }


class LoadProgress:
    """Of one job, while the block lasts. Its methods may be called by several threads."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: str,
        what: Literal["load", "reload"],
        sizes: Mapping[str, int],
        tell: Report,
        show: Show | None = None,
    ) -> None:
        """`session`: the job's application_name at the source, unique: while it is there, the job lives. `sizes`: bytes
        of each table at the source. Without `show`, `tell` is given a line now and then."""
        self._pipeline, self._session, self._what, self._tell, self._show = pipeline, session, what, tell, show
        self._name = session.rpartition(" ")[2]
        self._began, self._since = time.monotonic(), now_text()
        self._tables = {name: _Table(name, size) for name, size in sizes.items()}
        self._speed = _Speed()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-load-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_LAST_SECONDS)
        with contextlib.suppress(OSError):
            remove_load_file(self._pipeline.lake_path(), self._name)

    def size_of(self, table: str) -> int:
        """In bytes at the source."""
        return self._tables[table].size

    def reading(self, table: str, snapshot_id: str, units: int, part: str | None = None) -> None:
        """The table is read at this snapshot, which was taken just now, in so many units; from the beginning."""
        with self._lock:
            one = self._tables[table]
            one.state, one.part, one.snapshot_id, one.units = "reading", part, snapshot_id, units
            one.taken_at, one.rows, one.bytes = time.monotonic(), 0, 0
            one.found.clear()
            one.speed = _Speed()

    def ended(self, table: str, state: Literal["merging", "done"], rows: int) -> None:
        with self._lock:
            self._tables[table].state, self._tables[table].rows = state, rows

    def _run(self) -> None:
        told_at = self._began
        connection: Connection | None = None
        try:
            while True:
                try:
                    connection = connection or self._begin()
                    shown = self._look(connection)
                    write_load_file(self._pipeline.lake_path(), self._name, {"session": self._session, **shown})
                except (HeadwaterError, OSError) as error:
                    log.debug("how far the %s is cannot be told: %s", self._what, error)
                    if connection is not None:
                        connection.close()
                    connection = None
                else:
                    if self._show is not None:
                        self._show(shown)
                    elif time.monotonic() - told_at >= _LINE_SECONDS:
                        told_at = time.monotonic()
                        self._tell(line(shown))
                if self._ended.wait(_LOOK_SECONDS):
                    return
        finally:
            if connection is not None:
                connection.close()

    def _begin(self) -> Connection:
        connection = connect(
            self._pipeline.conninfo(), application_name="headwater load progress", statement_timeout=_LAST_SECONDS
        )
        root = self._pipeline.lake_path()
        files = read_load_files(root)
        alive = jobs_there(connection)
        for name in [name for name, file in files.items() if file["session"] not in alive]:
            remove_load_file(root, name)
        return connection

    def _look(self, connection: Connection) -> LoadFile:
        found = readers(connection)
        with self._lock:
            tables = list(self._tables.values())
            for table in tables:
                table.look(found)
            work, all_work = sum(t.work for t in tables), sum(t.size + _EACH for t in tables)
            rows, size = sum(t.rows for t in tables), sum(t.bytes for t in tables)
            self._speed.look(rows, size, work)
            return {
                "what": self._what,
                "since": self._since,
                "tables": len(tables),
                "tables_done": sum(t.state == "done" for t in tables),
                "rows": rows,
                "bytes": size,
                "done": round(work / all_work, 4) if all_work else 1.0,
                **self._speed.shown(all_work - work),
                "running": [t.shown() for t in tables if t.state not in ("waiting", "done")],
            }
