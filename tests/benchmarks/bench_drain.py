"""Draining a mixed backlog (10 tables of 10 columns, one with a 10 kB text, 20/60/20, single-row commits): `replicate
--until now`, and the reader process alone, against `pg_recvlogical` on the same backlog with the same options. Then
every value is compared with the source's. Commits by HEADWATER_BENCH_CHANGES."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from figures import figure
from mixed_load import assert_equal, make_mixed_tables, pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.load.load import load
from headwater.position import format_lsn, parse_lsn
from headwater.replicate.reader.handle import LogReader, ReaderOptions
from headwater.replicate.replicate import replicate

CHANGES = int(os.environ.get("HEADWATER_BENCH_CHANGES", "300000"))
PUBLICATIONS = ("headwater_bench", "headwater_bench_inserts")


def receive(source: EmbeddedServer, end: int) -> float:
    """Seconds that `pg_recvlogical` needs to `end`."""
    environment = {**os.environ, "PGPASSWORD": (source.folder / "superuser_password").read_text()}
    command = [
        *(str(source.tool("pg_recvlogical")), "-h", "127.0.0.1", "-p", str(source.port), "-U", "postgres"),
        *("-d", "postgres", "--slot", "reference", "--start", "-f", os.devnull, "--endpos", format_lsn(end)),
        *("-o", "proto_version=4", "-o", f"publication_names={','.join(PUBLICATIONS)}"),
        *("-o", "binary=true", "-o", "messages=true", "-s", "1"),
    ]
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return time.perf_counter() - started


def read(source: EmbeddedServer, start: int, end: int) -> float:
    """Seconds that our reader process needs to `end`, its chunks taken and dropped."""
    options = ReaderOptions(source.conninfo("postgres"), "reader_only", PUBLICATIONS, start, 180000, 1 << 30)
    with LogReader(options) as reader:
        started = time.perf_counter()
        while reader.read_position < end or reader.idle_position is None:
            reader.wait(0.1)
            while (chunk := reader.take()) is not None:
                reader.taken(chunk.size)
        return time.perf_counter() - started


def cpu_seconds() -> float:
    """Of this process, the driver, and of its children that have ended: the reader."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        tables = make_mixed_tables(source)
        wanted = pipeline(Path(scratch), source, *tables)
        load(wanted)
        with source.connect("postgres") as connection:
            connection.execute("call mixed(2000)")
        replicate(wanted, "now", None, threading.Event())  # warm: the JVM has seen a batch
        with source.connect("postgres") as connection:
            for slot in ("reference", "reader_only"):
                connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            start = parse_lsn(row[0])
            connection.execute("set synchronous_commit = off")
            connection.execute(f"call mixed({CHANGES})")
            row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            end = parse_lsn(row[0])
        reference = receive(source, end)
        reading = read(source, start, end)
        cpu, started = cpu_seconds(), time.perf_counter()
        result = replicate(wanted, "now", None, threading.Event())
        whole, cpu = time.perf_counter() - started, cpu_seconds() - cpu
        assert_equal(source, wanted, tables)
        what, client = f"draining {CHANGES:,} single-row commits over {len(tables)} tables", "pg_recvlogical"
        figure(what, CHANGES / whole, "changes/s", client, CHANGES / reference)
        figure(f"{what}: the reader alone", CHANGES / reading, "changes/s", client, CHANGES / reference)
        figure(f"{what}: processor of driver and reader for 100,000 changes", cpu / CHANGES * 100_000, "s")
        figure(f"{what}: epochs", result["epochs"], "epochs")


if __name__ == "__main__":
    main()
