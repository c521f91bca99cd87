"""What Headwater promises in figures: the table of docs/benchmarks.md. Each names one figure that a program prints."""

from __future__ import annotations

from dataclasses import dataclass

from figures import Figure


@dataclass(frozen=True)
class Promise:
    words: str
    page: str  # below docs/benchmarks/
    program: str
    figure: str
    bound: float
    of_reference: bool = False  # the bound is so many times the reference of the same run
    at_least: bool = False  # else at most

    def target(self, figure: Figure) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.bound:,g} {'times the reference' if self.of_reference else figure.unit}"

    def kept(self, figure: Figure) -> bool:
        value = figure.value / (figure.reference_value or 1) if self.of_reference else figure.value
        return value >= self.bound if self.at_least else value <= self.bound


PROMISES = (
    Promise(
        "Commit at the source to readable in the lake, 1,000 changes/s over 10 tables: half of them",
        "latency",
        "bench_latency",
        "commit to readable, 1,000 changes/s over 10 tables, 60 s: p50",
        1,
    ),
    Promise(
        "The same: 99 of 100",
        "latency",
        "bench_latency",
        "commit to readable, 1,000 changes/s over 10 tables, 60 s: p99",
        3,
    ),
    Promise(
        "The same where one slice hands over to the next: 99 of 100",
        "latency",
        "bench_slices",
        "commit to readable across a slice boundary, 1,000 changes/s over 10 tables, by python: warm, p99",
        3,
    ),
    Promise(
        "10,000 changes/s over 500 tables: half of them",
        "latency",
        "latency_many_tables",
        "commit to readable, 10,000 changes/s over 500 tables, 600 s: p50",
        2,
    ),
    Promise(
        "Draining a backlog of single-row commits over 10 tables",
        "throughput",
        "bench_drain",
        "draining 300,000 single-row commits over 10 tables",
        0.6,
        of_reference=True,
        at_least=True,
    ),
    Promise(
        "Catching up after ten minutes without replication, while the source goes on",
        "throughput",
        "log_catch_up",
        "catching up after a stop of 600 s while 5,000 changes/s go on: rate",
        2,
        at_least=True,
    ),
    Promise(
        "1,000 random keys updated in a table of 5 million rows",
        "apply",
        "bench_apply",
        "1,000 random keys updated in a table of 5,000,000 rows, bigint key",
        0.2,
    ),
    Promise(
        "100,000 random keys updated in it",
        "apply",
        "bench_apply",
        "100,000 random keys updated in a table of 5,000,000 rows, bigint key",
        0.5,
    ),
    Promise(
        "1,000 random keys in a table of 100 million rows",
        "apply",
        "apply_index",
        "1,000 random keys in a table of 100,000,000 rows, uuid",
        1.5,
        of_reference=True,
    ),
    Promise(
        "Bulk load of 2 million rows of ten columns",
        "load",
        "bench_load",
        "bulk load of 2,000,000 rows x 10 columns",
        1.6,
        of_reference=True,
    ),
    Promise(
        "Memory that a transaction of 10 million rows adds to reader and driver",
        "memory",
        "log_memory",
        "one transaction of 10,000,000 updates: growth of reader and driver together, with pages of mapped files",
        512,
    ),
    Promise(
        "pgbench at full speed beside Headwater, on the same two cores",
        "source",
        "log_cost_to_source",
        "pgbench, four clients, beside Headwater: median of 3 rounds",
        0.95,
        of_reference=True,
        at_least=True,
    ),
    Promise(
        "A query by Spark of 12 million rows under replication",
        "reading",
        "apply_day",
        "a query of 12,000,000 rows after 1,500 epochs, by Spark",
        1.3,
        of_reference=True,
    ),
    Promise(
        "1,000 waiting sensors woken: the last one, after the position is published",
        "waits",
        "freshness_sensors",
        "1,000 sensors woken at once, by a few changes: the last",
        1,
    ),
    Promise(
        "30 readers that wait for now and read, beside 10,000 commits/s: their mean",
        "waits",
        "freshness_waits",
        "30 readers wait for now and read, beside 10,000 commits/s: mean",
        1,
    ),
)
