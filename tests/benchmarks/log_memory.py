"""Memory of reader and driver for one large transaction, from the log to the published lake.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_memory.py

Inserts, then updates of as many rows, on 36-byte text keys, each one transaction of HEADWATER_BENCH_ROWS (1,000,000
rows unless set). The same on keys that begin and end alike. A tenth as many rows with large values (5 kB): moved to
other keys, which leaves the values out of the log, then inserted and moved in one transaction. One row, changed
half as often. The reference is a transaction of 20,000 rows in the same run: growth is the peak above its peak.
HEADWATER_BENCH_ONLY: a word that the steps' names have that are wanted.
`anonymous`: what the process itself holds; `resident`: with the pages of mapped files, which the system may take back.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from pathlib import Path

import pyarrow as pa
from backlogs import cpu
from figures import figure
from mixed_load import pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.position import parse_lsn
from headwater.replicate.replicate import replicate

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "1000000"))
ONLY = os.environ.get("HEADWATER_BENCH_ONLY", "")
SMALL = 20_000
INSERT = (
    "insert into t select lpad(g::text, 36, '0'), g, repeat('n', 60), now() from generate_series({first}, {last}) g"
)
TABLES = (
    "create table t (id text primary key, n int, note text, at timestamptz)",
    "create table alike (id text primary key, n int, note text)",
    "create table large (id bigint primary key, n int, body text)",
    "alter table large alter body set storage external",
    "create table hot (id bigint primary key, n int)",
    "insert into hot values (1, 0)",
    # By its place: to find the newest of thousands of versions takes longer with each.
    "create procedure heat(times int) language plpgsql as $$ declare place tid; begin "
    "select ctid into place from hot; "
    "for i in 1 .. times loop "
    "update hot set n = i where ctid = place returning ctid into place; "
    "end loop; end $$",
)
FILL_LARGE = f"insert into large select g, 0, repeat(md5(g::text), 160) from generate_series(1, {ROWS // 10}) g"
ALIKE = (
    f"insert into alike select 'customer-' || lpad(g::text, 8, '0') || '-eu-west-1', g, 'n' "
    f"from generate_series(1, {ROWS}) g"
)
MOVE = "update large set id = id + 1000000000 where id {which}"
INSERT_AND_MOVE = (
    f"insert into large select -g, 0, repeat(md5(g::text), 160) from generate_series(1, {ROWS // 10}) g; "
    + MOVE.format(which="< 0")
)
MOVES_STORED = "moves that keep stored values"
UPDATE = "update t set n = n + 1 where id > lpad('{first}', 36, '0')"


class Peaks:
    """The most that a process has held since the last `begin`, in MB; looked at 50 times a second."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/status")
        self._lock = threading.Lock()
        self._most: dict[str, int] = {}
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while self._file.exists():
            try:
                lines = self._file.read_text().splitlines()
            except OSError:
                return
            now = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "RssAnon"))}
            with self._lock:
                self._most = {name: max(value, self._most.get(name, 0)) for name, value in now.items()}
            time.sleep(0.02)

    def begin(self) -> None:
        with self._lock:
            self._most = {}

    def read(self) -> tuple[float, float]:
        with self._lock:
            return self._most.get("RssAnon", 0) / 1000, self._most.get("VmRSS", 0) / 1000


def execute(source: EmbeddedServer, statement: str) -> int:
    """One transaction; a position behind it."""
    with source.connect("postgres") as connection:
        connection.execute(statement)
        connection.execute("select pg_logical_emit_message(true, 'end', '')")
        row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def published(root: str, end: int, driver: threading.Thread) -> None:
    while (file := read_position_file(root)) is None or file.position.lsn < end:
        if not driver.is_alive():
            raise SystemExit("the driver has ended")
        time.sleep(0.05)


def reader_pid() -> int:
    """The child of this process that is a spawned Python and no resource tracker."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        parent = status.read_text().rsplit(")", 1)[1].split()[1]
        if parent == str(os.getpid()) and b"spawn_main" in (status.parent / "cmdline").read_bytes():
            return int(status.parent.name)
    raise SystemExit("no reader process")


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        for statement in TABLES:
            execute(source, statement)
        execute(source, INSERT.format(first=1, last=SMALL))
        if ONLY in MOVES_STORED:
            execute(source, FILL_LARGE)
        wanted = pipeline(Path(scratch), source, "public.t", "public.alike", "public.large", "public.hot")
        load(wanted)
        root, stop = wanted.lake_path(), threading.Event()
        driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
        driver.start()
        published(root, 1, driver)
        pid = reader_pid()
        watched = {"reader": Peaks(pid), "driver": Peaks(os.getpid())}
        before: dict[str, tuple[float, float]] = {}
        steps = (
            ("reference", INSERT.format(first=SMALL + 1, last=2 * SMALL), SMALL),
            ("inserts", INSERT.format(first=2 * SMALL + 1, last=2 * SMALL + ROWS), ROWS),
            ("updates", UPDATE.format(first=2 * SMALL), ROWS),
            ("inserts of keys alike", ALIKE, ROWS),
            ("updates of keys alike", "update alike set n = n + 1", ROWS),
            (MOVES_STORED, MOVE.format(which="> 0"), ROWS // 10),
            ("inserts and moves that keep their values", INSERT_AND_MOVE, ROWS // 10),
            ("changes of one row", f"call heat({ROWS // 2})", ROWS // 2),
        )
        for name, statement, rows in (step for step in steps if ONLY in step[0] or step[0] == "reference"):
            # What earlier steps have left to the allocators is not this one's.
            pa.default_memory_pool().release_unused()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            for peaks in watched.values():
                peaks.begin()
            end, started = execute(source, statement), time.perf_counter()
            published(root, end, driver)
            seconds = round(time.perf_counter() - started, 1)
            found = {who: peaks.read() for who, peaks in watched.items()}
            if not before:  # the reference
                before = found
                continue
            what = f"one transaction of {rows:,} {name}"
            for who in found:
                for at, kind in enumerate(("of its own", "with pages of mapped files")):
                    figure(f"{what}: growth of the {who}, {kind}", found[who][at] - before[who][at], "MB")
            together = sum(found[who][1] - before[who][1] for who in found)
            figure(f"{what}: growth of reader and driver together, with pages of mapped files", together, "MB")
            figure(f"{what}: commit to readable", seconds, "s")
            figure(f"{what}: the driver whole", found["driver"][1], "MB")
            figure(f"{what}: processor of the reader so far", cpu(pid), "s")
        stop.set()
        driver.join()


if __name__ == "__main__":
    main()
