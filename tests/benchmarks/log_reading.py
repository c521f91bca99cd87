"""Receiving and framing: the reader process, its chunks taken and dropped, against `pg_recvlogical`.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_reading.py [BACKLOG...]

Both read the same backlog with the same options, from slots of the same position, in turns (reference, reader,
reference, reader), so that neither always finds a cold log; the better of two counts. One JSON line a backlog: changes
and megabytes of the log stream a second, CPU seconds of walsender, reader and driver, peak memory of the reader.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from backlogs import PUBLICATIONS, Inserts, Reading, WalsenderCpu, compared, cpu, peak, reference, written
from mixed_load import report, server

from headwater.demo.postgres import EmbeddedServer
from headwater.replicate.reader.handle import LogReader, ReaderOptions

ROUNDS = 2

BACKLOGS = (
    Inserts("100 B, 10 columns", 100, 10),
    Inserts("1 kB, 10 columns", 1000, 10),
    Inserts("10 kB, 10 columns", 10_000, 10),
    Inserts("200 columns", 1600, 200),
    Inserts("100 B, single-row commits", 100, 10, commit=1),
)


def read(source: EmbeddedServer, slot: str, start: int, end: int) -> tuple[Reading, int, int]:
    """Also how many changes and bytes came."""
    options = ReaderOptions(source.conninfo("postgres"), slot, PUBLICATIONS, start, 180000, 256 << 20)
    changes = size = 0
    server_cpu = WalsenderCpu(source, slot)
    own = time.process_time()
    with LogReader(options) as reader:
        started = time.perf_counter()
        pid = reader.pid
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
        most = peak(pid)
    return Reading(seconds, server_cpu.seconds, spent, time.process_time() - own, most), changes, size


def measure(source: EmbeddedServer, backlog: Inserts) -> dict[str, Any]:
    slots = [f"{kind}_{number}" for number in range(ROUNDS) for kind in ("reference", "reader")]
    references: list[Reading] = []
    readings: list[Reading] = []
    changes = size = 0
    with written(source, backlog, slots) as (start, end):
        for number in range(ROUNDS):
            references.append(reference(source, f"reference_{number}", end))
            reading, changes, size = read(source, f"reader_{number}", start, end)
            readings.append(reading)
    return {"workload": backlog.name, **compared(changes, size, readings, references)}


def main() -> None:
    wanted = sys.argv[1:]
    with server() as source:
        for backlog in BACKLOGS:
            if not wanted or any(text in backlog.name for text in wanted):
                report("log_reading", **measure(source, backlog))


if __name__ == "__main__":
    main()
