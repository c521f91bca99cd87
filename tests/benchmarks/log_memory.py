"""Memory of reader and driver for one large transaction, from the log to netted Arrow rows.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_memory.py

Inserts, then updates of as many rows, on 36-byte text keys, each one transaction of HEADWATER_BENCH_ROWS (1,000,000
rows unless set). The reference is a transaction of 20,000 rows in the same run: growth is the peak above its peak.
`anonymous`: what the process itself holds; `resident`: with the pages of mapped files, which the system may take back.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from backlogs import cpu
from mixed_load import report, server

from headwater.embedded import EmbeddedServer
from headwater.jobs.reader import LogReader, ReaderOptions
from headwater.log.net_effect import net_effect
from headwater.position import parse_lsn
from headwater.schema import Column, Leaf, TableSchema, ValueType

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "1000000"))
SMALL = 20_000
VALUES = "lpad(g::text, 36, '0'), g, repeat('n', 60), now()"
INSERT = f"insert into t select {VALUES} from generate_series(%s::int, %s::int) g"
TEXT, INT, TIME = ValueType("text", "string"), ValueType("int4", "int"), ValueType("timestamptz", "timestamp")


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


def position(source: EmbeddedServer) -> int:
    with source.connect("postgres") as connection:
        connection.execute("select pg_logical_emit_message(true, 'end', '')")
        row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def schema(source: EmbeddedServer) -> TableSchema:
    with source.connect("postgres") as connection:
        row = connection.execute("select 't'::regclass::oid::bigint").fetchone()
    assert row is not None
    kinds = {"id": TEXT, "n": INT, "note": TEXT, "at": TIME}
    columns = tuple(Column(name, at, 0, -1, value) for at, (name, value) in enumerate(kinds.items(), 1))
    return TableSchema(row[0], "public", "t", columns, ("id",), (Leaf(row[0], "public", "t", 1),))


def net_up_to(reader: LogReader, end: int, table: TableSchema) -> dict[str, Any]:
    """As the driver does: each chunk's changes netted at once."""
    rows = changes = 0
    started = time.perf_counter()
    while reader.read_position < end or reader.idle_position is None:
        reader.wait(0.05)
        while (chunk := reader.take()) is not None:
            reader.taken(chunk.size)
            blocks = [(block, np.ones(block.changes, dtype=np.bool_)) for block in chunk.blocks]
            if blocks:
                net = net_effect(table, blocks, [], str)
                rows, changes = rows + net.rows.num_rows, changes + net.changes
                del net
            del blocks, chunk
    return {"changes": changes, "rows": rows, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    with server() as source:
        with source.connect("postgres") as connection:
            connection.execute("create table t (id text primary key, n int, note text, at timestamptz)")
            connection.execute("create publication memory for table t")
            connection.execute("create publication memory_inserts")
            connection.execute("select pg_create_logical_replication_slot('memory', 'pgoutput')")
        start, table = position(source), schema(source)
        options = ReaderOptions(
            source.conninfo("postgres"), "memory", ("memory", "memory_inserts"), start, 180000, 1 << 30
        )
        with LogReader(options) as reader:
            pid = reader._process.pid or 0
            watched = {"reader": Peaks(pid), "driver": Peaks(os.getpid())}
            before: dict[str, tuple[float, float]] = {}
            steps = (("reference", INSERT, SMALL), ("inserts", INSERT, ROWS), ("updates", "", ROWS))
            for name, statement, rows in steps:
                for peaks in watched.values():
                    peaks.begin()
                with source.connect("postgres") as connection:
                    if statement:
                        first = SMALL + 1 if rows == ROWS else 1
                        connection.execute(statement, [first, first + rows - 1])
                    else:
                        connection.execute("update t set n = n + 1 where id > lpad(%s, 36, '0')", [str(SMALL)])
                result = net_up_to(reader, position(source), table)
                found = {who: peaks.read() for who, peaks in watched.items()}
                before = before or found
                growth = {
                    f"{who}_{kind}_growth_mb": round(found[who][at] - before[who][at])
                    for who in found
                    for at, kind in enumerate(("anonymous", "resident"))
                }
                report("log_memory", step=name, **result, **growth, reader_cpu_seconds=cpu(pid))


if __name__ == "__main__":
    main()
