"""Commit at the source -> position published across the boundary of two slices, without Airflow.

Drivers are processes of their own, as a scheduler starts them. Warm: the next one is started beside the running one,
with --take-over. Reference of the same run: cold boundaries, where the next one is started when the last has ended.
What two drivers at once cost is read from /proc while they overlap.

HEADWATER_BENCH_RATE changes a second (1,000), HEADWATER_BENCH_BOUNDARIES of each kind (4), HEADWATER_BENCH_ROWS rows of
each table before (100,000), HEADWATER_BENCH_BY=spark-submit: drivers as Airflow starts them, with a JVM each.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_latency import STEP, write
from figures import figure
from mixed_load import TABLES, make_mixed_tables, pipeline, server

import headwater
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.position_file import read_position_file
from headwater.pipeline_file.pipeline import Pipeline
from headwater.spark.session import job_conf, submit_environment

RATE = int(os.environ.get("HEADWATER_BENCH_RATE", "1000"))
BOUNDARIES = int(os.environ.get("HEADWATER_BENCH_BOUNDARIES", "4"))
ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "100000"))
BY = os.environ.get("HEADWATER_BENCH_BY", "python")
BETWEEN = 12.0
"""Seconds of quiet between two boundaries, with their last and first thirds left out of both."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Driver:
    """`headwater replicate` in a process of its own."""

    def __init__(self, wanted: Pipeline, folder: Path, *arguments: str) -> None:
        self._out = folder / f"{time.monotonic_ns()}.json"
        script = Path(headwater.__file__).parents[1] / "headwater_replicate.py"
        command = [sys.executable, "-m", "headwater.cli", "replicate"]
        environment = dict(os.environ)
        if BY == "spark-submit":
            conf = [part for name, value in job_conf().items() for part in ("--conf", f"{name}={value}")]
            command = [shutil.which("spark-submit") or "spark-submit", "--master", "local[2]", *conf, str(script)]
            environment |= submit_environment()
        with self._out.open("wb") as out, self._out.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, wanted.file, "--json", *arguments], stdout=out, stderr=log, env=environment
            )

    def stop(self) -> None:
        """Cleanly: below a JVM the signal is for the Python driver alone."""
        for process in [*_family(self.process.pid)]:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if b"python" in command[0] and any(b"headwater_replicate" in c or c == b"replicate" for c in command):
                    os.kill(process, signal.SIGTERM)

    def result(self) -> dict[str, Any]:
        status = self.process.wait(120)
        text = self._out.read_text()
        if status:
            raise RuntimeError(f"a driver ended with {status}: {text} {self._out.with_suffix('.log').read_text()}")
        found: dict[str, Any] = json.loads(text[text.index("{") :])
        return found

    def cost(self) -> tuple[float, float]:
        """(resident MB, CPU seconds so far) of the driver with its reader and its JVM."""
        memory = cpu = 0.0
        for process in _family(self.process.pid):
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                cpu += (int(fields[11]) + int(fields[12])) / _TICKS
                memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        return memory, cpu


def _family(parent: int) -> Iterator[int]:
    yield parent
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _family(int(child))


@dataclass
class Watch:
    """Compares what is written with what is published, and notes whose generation published it."""

    root: str
    marks: list[tuple[int, float]] = field(default_factory=list)
    delays: list[tuple[float, float]] = field(default_factory=list)
    """When it was committed, and how long it took to be published."""
    begun: dict[int, float] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.wait(0.01):
            file = read_position_file(self.root)
            now = time.perf_counter()
            if file is None:
                continue
            self.begun.setdefault(file.generation, now)
            while len(self.delays) < len(self.marks) and self.marks[len(self.delays)][0] <= file.position.lsn:
                at = self.marks[len(self.delays)][1]
                self.delays.append((at, now - at))

    def await_generation(self, generation: int) -> float:
        while generation not in self.begun:
            if self.stop.wait(0.02):
                raise RuntimeError("stopped")
        return self.begun[generation]

    def between(self, begin: float, end: float) -> list[float]:
        return [delay for at, delay in self.delays if begin <= at < end]


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        wanted = pipeline(Path(scratch), source, *make_mixed_tables(source))
        _fill(source)
        command = [sys.executable, "-m", "headwater.cli", "load", wanted.file, "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        watch = Watch(wanted.lake_path())
        watching = threading.Thread(target=watch.run)
        stop_writing = threading.Event()
        arguments = (source.conninfo("postgres"), watch.marks, stop_writing, RATE)
        writing = threading.Thread(target=write, args=arguments)
        try:
            _measure(wanted, Path(scratch), watch, watching, writing)
        finally:
            stop_writing.set()
            watch.stop.set()
            for thread in (writing, watching):
                if thread.ident is not None:
                    thread.join()


def _fill(source: EmbeddedServer) -> None:
    with source.connect("postgres") as connection:
        for number in range(TABLES):
            connection.execute(
                f"insert into t{number} (id, a, b, note, amount, at) "
                "select g, g, g %% 100, 'note ' || g, g, now() from generate_series(20001, %s) g",
                [max(20_000, ROWS)],
            )


def _measure(
    wanted: Pipeline, folder: Path, watch: Watch, watching: threading.Thread, writing: threading.Thread
) -> None:
    running, generation = Driver(wanted, folder), 1
    try:
        watching.start()
        writing.start()
        watch.await_generation(1)
        time.sleep(BETWEEN)
        alone_memory, before = running.cost()
        began = time.perf_counter()
        time.sleep(BETWEEN)
        alone_cpu = (running.cost()[1] - before) / (time.perf_counter() - began)
        boundaries: dict[str, list[list[float]]] = {"warm": [], "cold": []}
        overlaps: list[tuple[float, float, float]] = []
        for kind in ("warm", "cold") * BOUNDARIES:
            began = time.perf_counter()
            if kind == "warm":
                successor = Driver(wanted, folder, "--take-over")
                overlaps.append(_while_both_run(running, successor))
                assert running.result()["handed_over"]
            else:
                running.stop()
                running.result()
                successor = Driver(wanted, folder)
            running, generation = successor, generation + 1
            taken = watch.await_generation(generation)
            time.sleep(BETWEEN)
            boundaries[kind].append(watch.between(max(began, taken - BETWEEN), taken + BETWEEN / 2))
        quiet = watch.between(watch.begun[1] + BETWEEN / 3, watch.begun[1] + 2 * BETWEEN)
    finally:
        running.stop()
        running.result()
    seconds = sorted(overlap[2] for overlap in overlaps)
    what = f"commit to readable across a slice boundary, {RATE:,} changes/s over {TABLES} tables, by {BY}"
    cold, reference = _figures(boundaries["cold"]), "cold boundaries: the next driver starts when the last has ended"
    for case, found in (("warm", _figures(boundaries["warm"])), ("without a boundary", _figures([quiet]))):
        for name, value in found.items():
            figure(f"{what}: {case}, {name}", value, "s", reference, cold[name])
    figure(f"{what}: two drivers overlap for", statistics.median(seconds), "s")
    both = max(overlap[0] for overlap in overlaps)
    figure(f"{what}: resident memory of two drivers", both, "MB", "one driver", alone_memory)
    spent = statistics.median(overlap[1] for overlap in overlaps)
    figure(
        f"{what}: processor of a successor until it has taken over", spent, "s", "one driver, each second", alone_cpu
    )


def _while_both_run(running: Driver, successor: Driver) -> tuple[float, float, float]:
    """(most resident MB of both, CPU seconds of the successor, seconds) until the one that ran has ended."""
    began, most, cpu = time.perf_counter(), 0.0, 0.0
    while running.process.poll() is None:
        memory, cpu = successor.cost()
        most = max(most, memory + running.cost()[0])
        time.sleep(0.2)
    return most, cpu, time.perf_counter() - began


def _figures(windows: list[list[float]]) -> dict[str, float]:
    """Of the delays of all windows, and the median of each window's largest."""
    delays = sorted(delay for window in windows for delay in window)
    worst = [max(window) for window in windows if window]
    return {
        "p50": statistics.median(delays),
        "p99": statistics.quantiles(delays, n=100)[98],
        "median of each boundary's worst": statistics.median(worst),
        "worst": delays[-1],
    }


if __name__ == "__main__":
    assert STEP <= 0.1, "delays are measured by the step"
    main()
