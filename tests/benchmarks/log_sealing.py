"""How batches are sealed: latency, commits and files at 10, 1,000 and 10,000 changes/s over 10 tables, and at a step.

For each rate: commit to published (seen from outside), the sum of the stages that the ledger names (the same latency,
seen from inside), batches, table commits and files an hour. The step goes from the lowest rate to the highest: how long
the batches behind it were, in order.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import figure
from mixed_load import make_mixed_tables, pipeline, server

from headwater.delta.small_tables import open_table, read_rows
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.paths import ledger_path
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import parse_lsn
from headwater.replicate.replicate import replicate

RATES = [int(rate) for rate in os.environ.get("HEADWATER_BENCH_RATES", "10,1000,10000").split(",")]
SECONDS = float(os.environ.get("HEADWATER_BENCH_SECONDS", "60"))
_SETTLED = 0.3  # of the time of a rate, before which nothing is counted


class Load:
    """Single-row commits at `rate` a second, in a thread; `marks`: position and moment of some of them."""

    def __init__(self, source: EmbeddedServer) -> None:
        self.rate = RATES[0]
        self.marks: list[tuple[int, float]] = []
        self._source = source
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._source.connect("postgres") as connection:
            connection.execute("set synchronous_commit = off")
            due = time.perf_counter()
            while not self._stop.is_set():
                rate = self.rate
                step = max(1, rate // 20)
                connection.execute(f"call mixed({step})")
                row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
                assert row is not None
                self.marks.append((parse_lsn(row[0]), time.perf_counter()))
                due = max(due + step / rate, time.perf_counter() - 1.0)
                self._stop.wait(max(0.0, due - time.perf_counter()))


@contextmanager
def driver(wanted: Pipeline) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=replicate, args=(wanted, None, None, stop))
    thread.start()
    while read_position_file(wanted.lake_path()) is None:
        time.sleep(0.05)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def observe(root: str, load_: Load, seconds: float) -> list[float]:
    """Delays of the marks that were set in the settled part of the next `seconds`."""
    began = time.perf_counter()
    first, seen, delays = began + _SETTLED * seconds, len(load_.marks), []
    while time.perf_counter() - began < seconds:
        time.sleep(0.01)
        file, now = read_position_file(root), time.perf_counter()
        while file is not None and seen < len(load_.marks) and load_.marks[seen][0] <= file.position.lsn:
            if load_.marks[seen][1] >= first:
                delays.append(now - load_.marks[seen][1])
            seen += 1
    return delays


def epochs_since(root: str, number: int) -> list[dict[str, Any]]:
    table = open_table(ledger_path(root))
    assert table is not None
    return sorted(
        read_rows(table, {"kind": ("epoch", "epoch"), "epoch": (number + 1, None)}).to_pylist(),
        key=lambda row: int(row["epoch"]),
    )


def newest(root: str) -> int:
    file = read_position_file(root)
    return file.epoch if file is not None else 0


def main() -> None:
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        wanted = pipeline(Path(scratch), source, *make_mixed_tables(source))
        load(wanted)
        root = wanted.lake_path()
        with driver(wanted), Load(source) as load_:
            for rate in RATES:
                load_.rate = rate
                before = newest(root)
                delays = observe(root, load_, SECONDS)
                rows = [row for row in epochs_since(root, before) if row["stages"]]
                commits = sum(len([t for t in dict(row["tables"]).values() if t["touched"]]) for row in rows)
                inside = [sum(dict(row["stages"]).values()) for row in rows[int(len(rows) * _SETTLED) :]]
                what, inside_mean = f"sealing at {rate:,} changes/s", statistics.fmean(inside) if inside else None
                stages = "mean of the stages' sums in the ledger"
                p99 = statistics.quantiles(delays, n=100)[98] if len(delays) > 1 else None
                figure(
                    f"{what}: commit to readable, mean",
                    statistics.fmean(delays) if delays else None,
                    "s",
                    stages,
                    inside_mean,
                )
                figure(f"{what}: commit to readable, p50", statistics.median(delays) if delays else None, "s")
                figure(f"{what}: commit to readable, p99", p99, "s")
                figure(f"{what}: batches", len(rows) / SECONDS * 3600, "batches/hour")
                figure(f"{what}: commits of tables", commits / SECONDS * 3600, "commits/hour")
            load_.rate = RATES[0]
            observe(root, load_, 5.0)
            before = newest(root)
            load_.rate = RATES[-1]
            observe(root, load_, 15.0)
            moments = [row["applied_at"].timestamp() for row in epochs_since(root, before)]
            between = [after - earlier for earlier, after in pairwise(moments)][:20]
            step = f"a step from {RATES[0]:,} to {RATES[-1]:,} changes/s"
            figure(f"{step}: longest time between two epochs", max(between, default=None), "s")


if __name__ == "__main__":
    main()
