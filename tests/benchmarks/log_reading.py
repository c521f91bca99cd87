"""Receiving and framing: the reader process, its chunks taken and dropped, against `pg_recvlogical`.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_reading.py [WORKLOAD...]

Both read the same backlog with the same options, from slots of the same position, in turns (reference, reader,
reference, reader), so that neither always finds a cold log; the better of two counts. One JSON line a workload: changes
and megabytes of the log stream a second, CPU seconds of walsender, reader and driver, peak memory of the reader.
HEADWATER_BENCH_MB sets the size of each backlog in megabytes of row data.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mixed_load import report, server

from headwater.embedded import EmbeddedServer
from headwater.jobs.reader import LogReader, ReaderOptions
from headwater.position import format_lsn, parse_lsn

MEGABYTES = int(os.environ.get("HEADWATER_BENCH_MB", "200"))
WORK_MEM = "4MB"
ROUNDS = 2
PUBLICATIONS = ("reading", "reading_inserts")


@dataclass(frozen=True)
class Workload:
    """Inserts into one table of `columns` columns, rows of about `row_bytes`; `commits`: each row its own."""

    name: str
    row_bytes: int
    columns: int
    commits: bool = False

    @property
    def rows(self) -> int:
        rows = MEGABYTES * 1_000_000 // self.row_bytes
        return min(rows, 1_500_000) // (8 if self.commits else 1)

    def statements(self) -> list[str]:
        if self.columns > 10:
            names = [f"c{number} int" for number in range(self.columns - 1)]
            values = ", ".join(f"g + {number}" for number in range(self.columns - 1))
        else:
            filler = max(self.row_bytes - 8 - 4 * (self.columns - 2), 1)
            names = [f"c{number} int" for number in range(self.columns - 2)] + ["filler text"]
            numbers = [f"g + {number}" for number in range(self.columns - 2)]
            values = ", ".join([*numbers, f"substr(repeat(md5(g::text), {filler // 32 + 1}), 1, {filler})"])
        create = f"create table t (id bigint primary key, {', '.join(names)})"
        storage = [] if self.columns > 10 else ["alter table t alter filler set storage external"]
        if not self.commits:
            return [create, *storage, f"insert into t select g, {values} from generate_series(1, {self.rows}) g"]
        loop = f"""do $$ begin for g in 1 .. {self.rows} loop
                   insert into t values (g, {values}); commit; end loop; end $$"""
        return [create, *storage, loop]


WORKLOADS = (
    Workload("100 B, 10 columns", 100, 10),
    Workload("1 kB, 10 columns", 1000, 10),
    Workload("10 kB, 10 columns", 10_000, 10),
    Workload("200 columns", 1600, 200),
    Workload("100 B, single-row commits", 100, 10, commits=True),
)


@dataclass
class Reading:
    """One pass over the backlog. Seconds; CPU seconds by process; `peak_mb`: the reading process's."""

    seconds: float
    walsender_cpu: float
    reader_cpu: float
    driver_cpu: float = 0.0
    peak_mb: float = 0.0


def cpu(pid: int) -> float | None:
    """CPU seconds of a process (proc(5), "stat"); None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class WalsenderCpu:
    """CPU seconds of the walsender of one slot, which ends with its client: looked at as long as it lives."""

    def __init__(self, source: EmbeddedServer, slot: str) -> None:
        self._source, self._slot = source, slot
        self._pid = 0
        self.seconds = 0.0

    def look(self) -> None:
        if not self._pid:
            query = "select active_pid from pg_replication_slots where slot_name = %s"
            with self._source.connect("postgres") as connection:
                row = connection.execute(query, [self._slot]).fetchone()
            self._pid = (row[0] or 0) if row else 0
        if self._pid:
            self.seconds = cpu(self._pid) or self.seconds


def reference(source: EmbeddedServer, slot: str, end: int, work_mem: str = WORK_MEM) -> Reading:
    """`pg_recvlogical` into nothing, with the options of our connection."""
    environment = {
        **os.environ,
        "PGPASSWORD": (source.folder / "superuser_password").read_text(),
        "PGOPTIONS": f"-c logical_decoding_work_mem={work_mem}",
    }
    command = [
        *(str(source.tool("pg_recvlogical")), "-h", "127.0.0.1", "-p", str(source.port), "-U", "postgres"),
        *("-d", "postgres", "--slot", slot, "--start", "-f", os.devnull, "--endpos", format_lsn(end)),
        *("-o", "proto_version=4", "-o", f"publication_names={','.join(PUBLICATIONS)}"),
        *("-o", "binary=true", "-o", "messages=true", "-o", "streaming=on", "-s", "1"),
    ]
    server_cpu = WalsenderCpu(source, slot)
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    spent = 0.0
    while process.poll() is None:
        server_cpu.look()
        spent = cpu(process.pid) or spent
        time.sleep(0.05)
    if process.wait() != 0:
        raise SystemExit(f"pg_recvlogical failed: {process.stderr.read().decode() if process.stderr else ''}")
    return Reading(time.perf_counter() - started, server_cpu.seconds, spent)


def read(source: EmbeddedServer, slot: str, start: int, end: int) -> tuple[Reading, int, int]:
    """Also how many changes and bytes came."""
    options = ReaderOptions(source.conninfo("postgres"), slot, PUBLICATIONS, start, 180000, 256 << 20)
    changes = size = 0
    server_cpu = WalsenderCpu(source, slot)
    own = time.process_time()
    with LogReader(options) as reader:
        started = time.perf_counter()
        pid = reader._process.pid or 0
        before = cpu(pid) or 0.0  # what starting Python and importing numpy costs is no part of reading
        looked = started
        while reader.read_position < end or reader.idle_position is None:
            reader.wait(0.05)
            while (chunk := reader.take()) is not None:
                changes += chunk.changes
                size += chunk.size
                reader.taken(chunk.size)
            if time.perf_counter() - looked > 0.2:
                looked = time.perf_counter()
                server_cpu.look()
        seconds = time.perf_counter() - started
        server_cpu.look()
        spent = (cpu(pid) or 0.0) - before
        peak = _peak(pid)
    return Reading(seconds, server_cpu.seconds, spent, time.process_time() - own, peak), changes, size


def _peak(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        lines = [line for line in status if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) / 1000


@contextlib.contextmanager
def backlog(source: EmbeddedServer, workload: Workload, slots: list[str]) -> Iterator[tuple[int, int]]:
    """The workload's log behind each of `slots`: where it begins and ends."""
    with source.connect("postgres") as connection:
        connection.execute("set synchronous_commit = off")
        create, *rest = workload.statements()
        connection.execute(create)
        for name in PUBLICATIONS:
            connection.execute(f"create publication {name}{' for table t' if name == PUBLICATIONS[0] else ''}")
        for slot in slots:
            connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        start = _position(source, "pg_current_wal_insert_lsn()")
        for statement in rest:
            connection.execute(statement)
        connection.execute("set synchronous_commit = on")
        connection.execute("select pg_logical_emit_message(true, 'end', '')")
        end = _position(source, "pg_current_wal_flush_lsn()")
    yield start, end
    with source.connect("postgres") as connection:
        for slot in slots:
            connection.execute("select pg_drop_replication_slot(%s)", [slot])
        connection.execute("drop table t")
        for name in PUBLICATIONS:
            connection.execute(f"drop publication {name}")


def measure(source: EmbeddedServer, workload: Workload) -> dict[str, Any]:
    slots = [f"{kind}_{number}" for number in range(ROUNDS) for kind in ("reference", "reader")]
    references: list[Reading] = []
    readings: list[Reading] = []
    changes = size = 0
    with backlog(source, workload, slots) as (start, end):
        for number in range(ROUNDS):
            references.append(reference(source, f"reference_{number}", end))
            reading, changes, size = read(source, f"reader_{number}", start, end)
            readings.append(reading)
    best, against = min(readings, key=lambda r: r.seconds), min(references, key=lambda r: r.seconds)
    return {
        "workload": workload.name,
        "changes": changes,
        "log_mb": round(size / 1e6, 1),
        "changes_per_second": round(changes / best.seconds),
        "mb_per_second": round(size / best.seconds / 1e6, 1),
        "reference": "pg_recvlogical",
        "reference_changes_per_second": round(changes / against.seconds),
        "share_of_reference": round(against.seconds / best.seconds, 3),
        "readings": [_rounded(reading) for reading in readings],
        "references": [_rounded(reading) for reading in references],
    }


def _rounded(reading: Reading) -> dict[str, float]:
    return {name: round(value, 2) for name, value in asdict(reading).items()}


def _position(source: EmbeddedServer, function: str) -> int:
    with source.connect("postgres") as connection:
        row = connection.execute(f"select {function}::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def main() -> None:
    wanted = sys.argv[1:]
    with server() as source:
        for workload in WORKLOADS:
            if not wanted or any(text in workload.name for text in wanted):
                report("log_reading", **measure(source, workload))


if __name__ == "__main__":
    main()
