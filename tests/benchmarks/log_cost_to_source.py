"""What replication costs the source: pgbench alone, beside an idle slot, beside `pg_recvlogical`, beside Headwater.

    PYTHONPATH=spark_jobs:plugins python tests/benchmarks/log_cost_to_source.py

The standard pgbench transaction (three updates and an insert) at full speed, with everything on one machine: where all
cores are busy, a loss of transactions is mostly the CPU that the others take. The cases take turns,
HEADWATER_BENCH_ROUNDS times (3), HEADWATER_BENCH_SECONDS each (20); the medians count. CPU seconds of walsender and
client run until the log of the round has been read, and stand per million changes; so do the bytes that the server
spilled to its disk and those that it sent before their commit (pg_stat_replication_slots).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from backlogs import WORK_MEM, WalsenderCpu, cpu
from figures import figure
from mixed_load import pipeline, server

from headwater.demo.postgres import EmbeddedServer
from headwater.load.load import load
from headwater.pipeline_file.pipeline import Pipeline

ROUNDS = int(os.environ.get("HEADWATER_BENCH_ROUNDS", "3"))
SECONDS = int(os.environ.get("HEADWATER_BENCH_SECONDS", "20"))
SCALE = 10
CHANGES_PER_TRANSACTION = 4
TABLES = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")
OURS = "headwater_bench"
EMPTY = "empty"


@dataclass
class Beside:
    """What runs beside pgbench: its slot, and the process (None: nothing)."""

    slot: str = ""
    process: subprocess.Popen[bytes] | None = None

    def client_cpu(self) -> float:
        """Of the process and its descendants that live."""
        return 0.0 if self.process is None else sum(cpu(pid) or 0.0 for pid in _family(self.process.pid))


@dataclass(frozen=True)
class Round:
    transactions_per_second: float
    changes: int
    walsender_cpu: float
    client_cpu: float
    spilled: int
    streamed: int
    behind_seconds: float


def _family(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _environment(source: EmbeddedServer) -> dict[str, str]:
    secret = (source.folder / "superuser_password").read_text()
    return {**os.environ, "PGPASSWORD": secret, "PGOPTIONS": f"-c logical_decoding_work_mem={WORK_MEM}"}


def _where(source: EmbeddedServer) -> list[str]:
    return ["-h", "127.0.0.1", "-p", str(source.port), "-U", "postgres"]


def pgbench(source: EmbeddedServer, *arguments: str) -> str:
    command = [str(source.tool("pgbench")), *_where(source), *arguments, "postgres"]
    done = subprocess.run(command, check=True, env=_environment(source), capture_output=True, text=True)
    return done.stdout


@contextlib.contextmanager
def alone(source: EmbeddedServer, wanted: Pipeline) -> Iterator[Beside]:
    yield Beside()


@contextlib.contextmanager
def _received(source: EmbeddedServer, slot: str, publications: str) -> Iterator[Beside]:
    with source.connect("postgres") as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    command = [
        *(str(source.tool("pg_recvlogical")), *_where(source), "-d", "postgres", "--slot", slot, "--start"),
        *("-f", os.devnull, "-o", "proto_version=4", "-o", f"publication_names={publications}"),
        *("-o", "binary=true", "-o", "messages=true", "-o", "streaming=on", "-s", "1", "-F", "1"),
    ]
    process = subprocess.Popen(command, env=_environment(source), stderr=subprocess.DEVNULL)
    try:
        yield Beside(slot, process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        with source.connect("postgres") as connection:
            connection.execute("select pg_drop_replication_slot(%s)", [slot])


@contextlib.contextmanager
def beside_an_idle_slot(source: EmbeddedServer, wanted: Pipeline) -> Iterator[Beside]:
    """The server decodes the log and sends none of it."""
    with _received(source, "idle", EMPTY) as running:
        yield running


@contextlib.contextmanager
def beside_pg_recvlogical(source: EmbeddedServer, wanted: Pipeline) -> Iterator[Beside]:
    with _received(source, "reference", f"{OURS},{OURS}_inserts") as running:
        yield running


@contextlib.contextmanager
def beside_headwater(source: EmbeddedServer, wanted: Pipeline) -> Iterator[Beside]:
    command = [sys.executable, "-m", "headwater.cli", "replicate", wanted.file, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Beside(wanted.source.slot, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


CASES: dict[str, Callable[[EmbeddedServer, Pipeline], contextlib.AbstractContextManager[Beside]]] = {
    "alone": alone,
    "idle slot": beside_an_idle_slot,
    "pg_recvlogical": beside_pg_recvlogical,
    "headwater": beside_headwater,
}

CASES_IN_WORDS = {
    "alone": "alone",
    "idle slot": "beside an idle slot",
    "pg_recvlogical": "beside pg_recvlogical",
    "headwater": "beside Headwater",
}


def _drained(source: EmbeddedServer, beside: Beside, look: Callable[[], None]) -> float:
    """Wait until the slot has confirmed what the log holds now; the seconds that took."""
    started = time.perf_counter()
    if beside.process is None:
        return 0.0
    with source.connect("postgres") as connection:
        row = connection.execute("select pg_current_wal_flush_lsn()").fetchone()
        assert row is not None
        query = "select confirmed_flush_lsn >= %s from pg_replication_slots where slot_name = %s"
        while connection.execute(query, [row[0], beside.slot]).fetchone() != (True,):
            if beside.process.poll() is not None:
                raise SystemExit(f"what read the slot {beside.slot} has ended")
            connection.execute("select pg_logical_emit_message(true, 'headwater', '')")
            look()
            time.sleep(0.2)
    return time.perf_counter() - started


def one_round(source: EmbeddedServer, wanted: Pipeline, case: str) -> Round:
    with CASES[case](source, wanted) as beside:
        _drained(source, beside, lambda: None)
        walsender = WalsenderCpu(source, beside.slot)
        walsender.look()
        server_before, client_before, slot_before = walsender.seconds, beside.client_cpu(), _slot(source, beside.slot)
        said = pgbench(source, "-n", "-c", "4", "-j", "1", "-T", str(SECONDS))
        behind = _drained(source, beside, walsender.look)
        walsender.look()
        spilled, streamed = (
            after - before for after, before in zip(_slot(source, beside.slot), slot_before, strict=True)
        )
        return Round(
            float(_number(r"tps = ([\d.]+)", said)),
            int(_number(r"actually processed: (\d+)", said)) * CHANGES_PER_TRANSACTION,
            walsender.seconds - server_before,
            beside.client_cpu() - client_before,
            spilled,
            streamed,
            behind,
        )


def _slot(source: EmbeddedServer, slot: str) -> tuple[int, int]:
    """Bytes spilled, bytes streamed; zero without a slot."""
    with source.connect("postgres") as connection:
        row = connection.execute(
            "select spill_bytes::bigint, stream_bytes::bigint from pg_stat_replication_slots where slot_name = %s",
            [slot],
        ).fetchone()
    return (row[0], row[1]) if row else (0, 0)


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"pgbench said something else: {text}")
    return found[1]


def figures(case: str, rounds: list[Round], alone_tps: float, idle_tps: float) -> None:
    tps = statistics.median(one.transactions_per_second for one in rounds)
    changes = sum(one.changes for one in rounds)

    def per_million(values: list[float]) -> float:
        return sum(values) / changes * 1_000_000

    reference, tps_of_it = (
        ("pgbench alone", alone_tps) if case in ("alone", "idle slot") else ("beside an idle slot", idle_tps)
    )
    what, million = f"pgbench, four clients, {CASES_IN_WORDS[case]}", "for a million changes"
    figure(f"{what}: median of {len(rounds)} rounds", tps, "transactions/s", reference, tps_of_it)
    figure(f"{what}: slowest round", min(one.transactions_per_second for one in rounds), "transactions/s")
    figure(f"{what}: fastest round", max(one.transactions_per_second for one in rounds), "transactions/s")
    if case != "alone":
        figure(f"{what}: processor of the walsender {million}", per_million([r.walsender_cpu for r in rounds]), "s")
        figure(f"{what}: processor of the client {million}", per_million([r.client_cpu for r in rounds]), "s")
        figure(f"{what}: spilled at the source {million}", per_million([float(r.spilled) for r in rounds]), "bytes")
        figure(f"{what}: streamed {million}", per_million([float(r.streamed) for r in rounds]), "bytes")
        figure(f"{what}: longest time to drain at the end", max(r.behind_seconds for r in rounds), "s")


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        pgbench(source, "-i", "-q", "-s", str(SCALE))
        tables = [f"public.{name}" for name in TABLES]
        wanted = pipeline(Path(scratch), source, *tables[:-1], {"name": tables[-1], "insert_only": True})
        load(wanted)
        with source.connect("postgres") as connection:
            connection.execute(f"create publication {EMPTY}")
        pgbench(source, "-n", "-c", "4", "-j", "1", "-T", "5")
        rounds: dict[str, list[Round]] = {case: [] for case in CASES}
        for number in range(ROUNDS):
            for case in list(CASES) if number % 2 == 0 else reversed(CASES):
                rounds[case].append(one_round(source, wanted, case))
        medians = {case: statistics.median(r.transactions_per_second for r in done) for case, done in rounds.items()}
        for case, done in rounds.items():
            figures(case, done, medians["alone"], medians["idle slot"])


if __name__ == "__main__":
    main()
