"""How far those are who read a table at an exported snapshot: each tells it in the application_name of a session at the
source. So everybody who looks there sees it, on whatever machine the reader runs, and it is gone with the reader.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from headwater.source.connection import Connection, errors_named

_PREFIX = "headwater unit "
_TELL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Reader:
    """What one reader has read so far: whole units, and rows with their bytes in memory (in KiB), of the running one,
    too. `pid`: of its session at the source, which tells it from the others of the same snapshot."""

    pid: int
    snapshot_id: str
    units: int
    rows: int
    kibibytes: int


class Tally:
    """What a reader tells, at most once a second, and at the end of each unit."""

    def __init__(self, connection: Connection, snapshot_id: str) -> None:
        """`connection`: in autocommit mode, and free between any two rows that are read."""
        self._connection, self._snapshot_id = connection, snapshot_id
        self._units = self._rows = self._bytes = 0
        self._told_at = float("-inf")

    def read(self, rows: int, size: int) -> None:
        self._rows += rows
        self._bytes += size
        if time.monotonic() - self._told_at >= _TELL_SECONDS:
            self._tell()

    def unit_done(self) -> None:
        self._units += 1
        self._tell()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        # At most 63 bytes are kept of it: room for 100 TiB in 10 thousand million rows.
        name = f"{_PREFIX}{self._snapshot_id} {self._units} {self._rows} {self._bytes >> 10}"
        self._connection.execute("select set_config('application_name', %s, false)", [name])


def readers(connection: Connection) -> list[Reader]:
    """Those of the whole server that have told something. Needs no right."""
    with errors_named("the readers of a load"):
        rows = connection.execute(
            "select pid, application_name from pg_catalog.pg_stat_activity where starts_with(application_name, %s)",
            [_PREFIX],
        ).fetchall()
    found = []
    for pid, name in rows:
        parts = name.removeprefix(_PREFIX).split(" ")
        if len(parts) == 4 and all(part.isdigit() for part in parts[1:]):
            found.append(Reader(pid, parts[0], *map(int, parts[1:])))
    return found


def jobs_there(connection: Connection) -> frozenset[str]:
    """The sessions, by application_name, whose life is that of a load or reload of whatever pipeline."""
    with errors_named("source"):
        rows = connection.execute(
            "select application_name from pg_catalog.pg_stat_activity "
            "where application_name ~ '^headwater (load|reload) [0-9a-f]{16}$'"
        ).fetchall()
    return frozenset(name for (name,) in rows)
