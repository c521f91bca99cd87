"""The whole way from the log to netted Arrow rows: reader process and decoder, against `pg_recvlogical`.

    PYTHONPATH=spark_jobs python tests/benchmarks/log_whole_way.py [BACKLOG...]

Both read the same backlog with the same options, from slots of the same position, in turns; the better of two counts.
This process is the driver without its lake: what waits is a batch, within the limits that a pipeline has by default,
and each table's share is decoded and netted. One JSON line a backlog: changes and megabytes of the log stream a second
beside the reference's, CPU seconds of walsender, reader and decoder per million changes, and the most memory of both.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from backlogs import (
    PUBLICATIONS,
    Backlog,
    Inserts,
    Mixed,
    Reading,
    Updates,
    WalsenderCpu,
    compared,
    cpu,
    forget_peak,
    peak,
    reference,
    written,
)
from mixed_load import pipeline, report, server

from headwater.demo.postgres import EmbeddedServer
from headwater.log.blocks import Block
from headwater.log.net.net_effect import net_effect
from headwater.replicate.reader.handle import LogReader, ReaderOptions
from headwater.schema import TableSchema
from headwater.source.catalog.catalog import read_catalog

ROUNDS = 2
MAX_CHANGES, MAX_BYTES = 500_000, 256 << 20

BACKLOGS: tuple[Backlog, ...] = (
    Inserts("100 B, 10 columns", 100, 10, commit=1000, mixed=True),
    Inserts("1 kB, 10 columns", 1000, 10, commit=1000, mixed=True),
    Inserts("10 kB, 10 columns", 10_000, 10, commit=100, mixed=True),
    Inserts("200 columns", 1600, 200, commit=1000),
    Inserts("100 B, one transaction", 100, 10, mixed=True),
    Inserts("10 kB, one transaction", 10_000, 10, mixed=True),
    Updates("text keys, updates, key changes, deletes", 200, commit=1000),
    Mixed("single-row commits over 10 tables", 200_000),
)


def table_schemas(source: EmbeddedServer, backlog: Backlog) -> dict[int, TableSchema]:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder, source.connect("postgres") as connection:
        wanted = pipeline(Path(folder), source, *(f"public.{table}" for table in backlog.tables))
        return {table.schema.relation_id: table.schema for table in read_catalog(connection, wanted).tables}


class Batches:
    """What the driver does with its chunks, up to the netted rows, which are let go."""

    def __init__(self, reader: LogReader, schemas: dict[int, TableSchema]) -> None:
        self._reader = reader
        self._schemas = schemas
        self.batches = self.changes = self.size = self.rows = 0

    def net_what_waits(self) -> None:
        while shares := self._collected():
            self.batches += 1
            for relation_id, blocks in shares.items():
                every = [(block, np.ones(block.changes, dtype=np.bool_)) for block in blocks]
                self.rows += net_effect(self._schemas[relation_id], every, [], str).rows.num_rows

    def _collected(self) -> dict[int, list[Block]]:
        shares: dict[int, list[Block]] = {}
        changes = size = 0
        while changes < MAX_CHANGES and size < MAX_BYTES and (chunk := self._reader.take()) is not None:
            self._reader.taken(chunk.size)
            changes, size = changes + chunk.changes, size + chunk.size
            for block in chunk.blocks:
                shares.setdefault(block.relation.relation_id, []).append(block)
        self.changes, self.size = self.changes + changes, self.size + size
        return shares


def net(
    source: EmbeddedServer, slot: str, start: int, end: int, schemas: dict[int, TableSchema]
) -> tuple[Reading, Batches]:
    options = ReaderOptions(source.conninfo("postgres"), slot, PUBLICATIONS, start, 180000, 256 << 20)
    server_cpu = WalsenderCpu(source, slot)
    with LogReader(options) as reader:
        gc.collect()
        forget_peak()
        batches = Batches(reader, schemas)
        pid = reader.pid
        before = cpu(pid) or 0.0  # what starting Python and importing numpy costs is no part of reading
        own, started = time.process_time(), time.perf_counter()
        while reader.read_position < end or reader.idle_position is None:
            reader.wait(0.05)
            batches.net_what_waits()
            server_cpu.look()
        seconds = time.perf_counter() - started
        own = time.process_time() - own
        server_cpu.look()
        spent = (cpu(pid) or 0.0) - before
        reading = Reading(seconds, server_cpu.seconds, spent, own, peak(pid), peak("self"))
    return reading, batches


def measure(source: EmbeddedServer, backlog: Backlog) -> dict[str, Any]:
    slots = [f"{kind}_{number}" for number in range(ROUNDS) for kind in ("reference", "reader")]
    references: list[Reading] = []
    passes: list[Reading] = []
    with written(source, backlog, slots) as (start, end):
        schemas = table_schemas(source, backlog)
        for number in range(ROUNDS):
            references.append(reference(source, f"reference_{number}", end))
            reading, done = net(source, f"reader_{number}", start, end, schemas)
            passes.append(reading)
    figures = compared(done.changes, done.size, passes, references)
    return {"backlog": backlog.name, "batches": done.batches, "rows": done.rows, **figures}


def main() -> None:
    wanted = sys.argv[1:]
    with server() as source:
        for backlog in BACKLOGS:
            if not wanted or any(text in backlog.name for text in wanted):
                report("log_whole_way", **measure(source, backlog))


if __name__ == "__main__":
    main()
