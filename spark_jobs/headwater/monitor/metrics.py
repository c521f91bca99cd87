"""The pipelines as metrics in OpenMetrics text form: what one alerts on, from the same looks as the pages.

Every figure follows from the lake or the source's last answer, none from this process: however many processes answer
the scrapes, they say the same. So there is no counter of changes, which the ledger does not sum up, but their rate.
A figure that is not known now (the source does not answer, nothing is loaded) is left out, never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.lake.health import LEVELS

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `unit` is the end of its name, as OpenMetrics has it; a counter's sample ends with `_total`."""

    name: str
    labels: tuple[str, ...]
    help: str
    unit: str = ""
    counter: bool = False

    @property
    def sample(self) -> str:
        """The name that a query uses."""
        return f"{self.name}_total" if self.counter else self.name


_PIPELINE, _TABLE = ("pipeline",), ("pipeline", "table")

UP = Metric("headwater_pipeline_up", _PIPELINE, "1: the pipeline's file and lake can be read; 0: they cannot.")
RUNNING = Metric("headwater_pipeline_running", _PIPELINE, "1: a replicate driver lives; 0: none does.")
HEALTH = Metric("headwater_pipeline_health", ("pipeline", "level"), "1 for the level that the pipeline's health has.")
PAUSED = Metric("headwater_pipeline_paused", _PIPELINE, "1: paused by `headwater pause`; 0: not paused.")
EPOCHS = Metric("headwater_pipeline_epochs", _PIPELINE, "Epochs published: the newest one's number.", counter=True)
GENERATION = Metric("headwater_pipeline_generation", _PIPELINE, "Driver starts; rises with every slice.", counter=True)
LAG_SECONDS = Metric("headwater_pipeline_lag_seconds", _PIPELINE, "How stale the stalest active table is.", "seconds")
LAG_BYTES = Metric("headwater_pipeline_lag_bytes", _PIPELINE, "The same in bytes of the source's log.", "bytes")
NOT_DURABLE = Metric(
    "headwater_pipeline_not_durable_bytes",
    _PIPELINE,
    "Log whose changes are published but would not survive a power cut of the lake's host yet: the slot keeps it.",
    "bytes",
)
PUBLICATION_AGE = Metric(
    "headwater_pipeline_publication_age_seconds", _PIPELINE, "Time since the newest epoch was published.", "seconds"
)
CHANGE_RATE = Metric(
    "headwater_pipeline_changes_per_second", _PIPELINE, "Changes published in the last minute, a second."
)
TABLES = Metric("headwater_pipeline_tables", ("pipeline", "state"), "How many tables are in this state.")
STAGE_BUSY = Metric(
    "headwater_stage_busy_ratio",
    ("pipeline", "stage"),
    "Share of the last ten seconds for which the stage worked; near 1: it is the limit.",
    "ratio",
)
SOURCE_UP = Metric("headwater_source_up", _PIPELINE, "1: the source answered when it was asked last.")
SLOT_ACTIVE = Metric("headwater_slot_active", _PIPELINE, "1: the replication slot is being read.")
RETAINED = Metric("headwater_slot_retained_wal_bytes", _PIPELINE, "Log that the source keeps for the slot.", "bytes")
WAL_BOUND = Metric(
    "headwater_slot_wal_bound_bytes",
    _PIPELINE,
    "The most it keeps, by max_slot_wal_keep_size or source.wal_ceiling; absent when neither is set.",
    "bytes",
)
TRANSACTION = Metric(
    "headwater_source_oldest_transaction_seconds",
    _PIPELINE,
    "Age of the oldest open transaction of the source that has an id, where the role may see it.",
    "seconds",
)
_LOAD = ("pipeline", "job")
LOAD_DONE = Metric("headwater_load_done_ratio", _LOAD, "Share of a load or reload (`job`) that is done.", "ratio")
LOAD_ETA = Metric("headwater_load_eta_seconds", _LOAD, "When it will be done at the present speed.", "seconds")
LOAD_RATE = Metric("headwater_load_rows_per_second", _LOAD, "Rows that it reads a second.")
LOAD_SNAPSHOT = Metric(
    "headwater_load_snapshot_seconds",
    _LOAD,
    "Age of the oldest snapshot that it holds at the source, where nothing is vacuumed meanwhile.",
    "seconds",
)
TABLE_STATE = Metric("headwater_table_state", (*_TABLE, "state"), "1 for the state that the table is in.")
TABLE_LAG_SECONDS = Metric("headwater_table_lag_seconds", _TABLE, "How stale the table is.", "seconds")
TABLE_LAG_BYTES = Metric("headwater_table_lag_bytes", _TABLE, "The same in bytes of the source's log.", "bytes")
TABLE_FRESHNESS = Metric(
    "headwater_table_freshness_seconds", _TABLE, "The staleness that the pipeline file allows the table.", "seconds"
)
TABLE_VERSION = Metric("headwater_table_version", _TABLE, "Version of the Delta table in the newest epoch.")

METRICS: tuple[Metric, ...] = (
    UP,
    RUNNING,
    HEALTH,
    PAUSED,
    EPOCHS,
    GENERATION,
    LAG_SECONDS,
    LAG_BYTES,
    NOT_DURABLE,
    PUBLICATION_AGE,
    CHANGE_RATE,
    TABLES,
    STAGE_BUSY,
    SOURCE_UP,
    SLOT_ACTIVE,
    RETAINED,
    WAL_BOUND,
    TRANSACTION,
    LOAD_DONE,
    LOAD_ETA,
    LOAD_RATE,
    LOAD_SNAPSHOT,
    TABLE_STATE,
    TABLE_LAG_SECONDS,
    TABLE_LAG_BYTES,
    TABLE_FRESHNESS,
    TABLE_VERSION,
)

Sample = tuple[Metric, tuple[str, ...], float]


def exposition(samples: Iterable[Sample]) -> str:
    """The text of a scrape."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.openmetrics.exposition import generate_latest

    families: dict[str, Any] = {}
    for metric, labels, value in samples:
        if metric.name not in families:
            kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
            families[metric.name] = kind(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
        families[metric.name].add_metric(labels, value)
    found = _Families([families[metric.name] for metric in METRICS if metric.name in families])
    text: bytes = generate_latest(found)  # type: ignore[no-untyped-call]
    return text.decode()


@dataclass(frozen=True, slots=True)
class _Families:
    """As much of a registry as the exposition asks for."""

    families: Sequence[Any]

    def collect(self) -> Sequence[Any]:
        return self.families


def unreadable(pipeline: str) -> Iterator[Sample]:
    """Of a pipeline whose file or lake cannot be read."""
    yield UP, (pipeline,), 0.0


def samples(overview: Mapping[str, Any], tables: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    """Of `PipelineWatch.overview()` and `.table_rows()`."""
    name = str(overview["pipeline"])
    slot, transaction = overview["slot"], overview["oldest_transaction"] or {}
    known = [
        (UP, True),
        (RUNNING, overview["running"]),
        (PAUSED, overview["paused"] is not None),
        (EPOCHS, overview["epoch"]),
        (GENERATION, overview["generation"]),
        (LAG_SECONDS, overview["lag_seconds"]),
        (LAG_BYTES, overview["lag_bytes"]),
        (NOT_DURABLE, overview["not_durable_bytes"]),
        (PUBLICATION_AGE, overview["seconds_since_publication"]),
        (CHANGE_RATE, overview["changes_per_second"]),
        (SOURCE_UP, overview["source"]["answers"]),
        (SLOT_ACTIVE, slot["active"]),
        (RETAINED, slot["retained_wal_bytes"]),
        (WAL_BOUND, slot["wal_bound_bytes"]),
        (TRANSACTION, transaction.get("seconds")),
    ]
    for metric, value in known:
        if value is not None:
            yield metric, (name,), float(value)
    for level in LEVELS:
        yield HEALTH, (name, level), float(overview["health"]["level"] == level)
    for state, count in overview["tables"].items():
        yield TABLES, (name, state), float(count)
    for stage, measures in overview["stages"].items():
        if overview["running"] and measures["busy"] is not None:  # else it is the share of an earlier driver
            yield STAGE_BUSY, (name, stage), float(measures["busy"])
    yield from _of_loads(name, overview["loads"])
    for table in tables:
        labels = (name, str(table["table"]))
        yield TABLE_STATE, (*labels, str(table["state"])), 1.0
        measured = [
            (TABLE_LAG_SECONDS, table["lag_seconds"]),
            (TABLE_LAG_BYTES, table["lag_bytes"]),
            (TABLE_FRESHNESS, table["freshness_seconds"]),
            (TABLE_VERSION, table["version"]),
        ]
        for metric, value in measured:
            if value is not None:
                yield metric, labels, float(value)


def _of_loads(pipeline: str, loads: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
    """Of several reloads at once the one that is farthest back."""
    for job in sorted({str(load["what"]) for load in loads}):
        found = [load for load in loads if load["what"] == job]
        snapshots = [table["snapshot_seconds"] for load in found for table in load["running"]]
        measured = [
            (LOAD_DONE, min(load["done"] for load in found)),
            (LOAD_ETA, max((load["eta_seconds"] for load in found if load["eta_seconds"] is not None), default=None)),
            (LOAD_RATE, sum(load["rows_per_second"] or 0.0 for load in found)),
            (LOAD_SNAPSHOT, max((age for age in snapshots if age is not None), default=None)),
        ]
        for metric, value in measured:
            if value is not None:
                yield metric, (pipeline, job), float(value)
