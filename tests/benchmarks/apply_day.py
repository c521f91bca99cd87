"""A day of one-second epochs, as far as HEADWATER_BENCH_EPOCHS of it go, without waiting for the clock.

Two tables get the same changes through the applier, epochs go through the ledger, upkeep runs beside them as in a
driver; every entry carries the second it stands for. One table is cleaned up as the caretaker does it, each 300 epochs,
with `lake.keep_cuts` of an hour; the other one is the reference: compacted alike, never cleaned. Then a query is timed
beside the same rows freshly written, with and without deletion vectors (what vectors cost the engine by themselves),
and a cold start over HEADWATER_BENCH_TABLES of such logs.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
from bench_apply import PAYLOAD
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from figures import figure
from pyroaring import BitMap

from headwater.apply import small_files as upkeep
from headwater.apply.applier import Applier
from headwater.apply.direct import Fence
from headwater.apply.plan import Plan
from headwater.arrow_types import lake_schema
from headwater.delta import delta_log, log_files
from headwater.delta.deletion_vectors import write_vectors
from headwater.delta.delta_log import read_snapshot
from headwater.delta.tables import create
from headwater.lake import ledger as ledger_module
from headwater.lake.horizon import Horizons
from headwater.lake.ledger import Ledger, TableVersion
from headwater.lake.paths import ledger_path
from headwater.lake.registry import TableRecord
from headwater.maintain.cleanup import clean
from headwater.maintain.control_tables import keep_ledger
from headwater.net_changes import NetChanges
from headwater.position import Position
from headwater.schema import Column, TableSchema, ValueType
from headwater.spark.session import build_session

EPOCHS = int(os.environ.get("HEADWATER_BENCH_EPOCHS", "6000"))
ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "300000"))
UPDATES = int(os.environ.get("HEADWATER_BENCH_UPDATES", "100"))
TABLES = int(os.environ.get("HEADWATER_BENCH_TABLES", "500"))
KEEP_CUTS = 3600.0
CLEAN_EVERY = 300
REPORT_EVERY = 1000
KEPT, REFERENCE = "public.kept", "public.reference"
WORDS = {KEPT: "the table", REFERENCE: "the table that is never cleaned", "ledger": "the ledger"}
BEGIN = datetime(2024, 5, 1, tzinfo=UTC)


class Clock:
    """The second of the day that is being lived; the ledger's, too."""

    now = BEGIN

    @classmethod
    def install(cls) -> None:
        class Simulated(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return Clock.now

        ledger_module.datetime = Simulated  # type: ignore[attr-defined]

    @classmethod
    def stamp(cls, folder: Path, version: int) -> None:
        moment = cls.now.timestamp()
        entry = folder / "_delta_log" / f"{version:020d}.json"
        if entry.exists():
            os.utime(entry, (moment, moment))


def schema() -> TableSchema:
    columns = {"id": ValueType("int8", "bigint"), **PAYLOAD}
    return TableSchema(
        1, "public", "t", tuple(Column(n, at, 0, -1, v) for at, (n, v) in enumerate(columns.items(), 1)), ("id",)
    )


class Changes:
    """Each epoch's net changes: random updates, and a tenth as many inserts and deletes."""

    def __init__(self) -> None:
        self.ids, self.next = np.arange(ROWS), ROWS
        self.chance = np.random.default_rng(1)

    def take(self, second: int) -> NetChanges:
        some = UPDATES // 10
        at = self.chance.choice(len(self.ids), UPDATES + some, replace=False)
        updated, removed = self.ids[at[:UPDATES]], self.ids[at[UPDATES:]]
        inserted = np.arange(self.next, self.next + some)
        self.next += some
        self.ids[at[UPDATES:]] = inserted
        ids = np.concatenate([updated, inserted])
        shape = lake_schema(schema())
        columns = [
            pa.array(ids),
            pa.array(ids % 1000, pa.int32()),
            pa.array(ids * second),
            pa.array([f"note {second}"] * len(ids)),
        ]
        stored = np.concatenate([np.ones(UPDATES, dtype=np.bool_), np.zeros(some, dtype=np.bool_)])
        gone = pa.table({"id": removed}, schema=pa.schema([shape.field("id")]))
        return NetChanges(pa.table(columns, schema=shape), stored, {}, None, gone, len(ids) + some)


class Day:
    """The lake, its driver's parts, and what they cost."""

    def __init__(self, root: Path, spark: Any) -> None:
        self.root, self.schema = root, schema()
        self.folders = {name: root / name.replace(".", "/") for name in (KEPT, REFERENCE)}
        self.ledger = Ledger(str(root), "day")
        self.ledger.begin_generation(Position("7", 1, 1))
        self.applier = Applier(lambda: spark, Fence("headwater/day/generation", 1))
        self.records = {
            name: TableRecord(name, name.replace(".", "/"), "active", schemas=((0, self.schema),))
            for name in self.folders
        }
        self.versions = dict.fromkeys(self.folders, 1)
        self.changes = Changes()
        self.apply_seconds: list[float] = []
        self.clean_seconds: list[float] = []
        for folder in self.folders.values():
            create(spark, str(folder), self.schema, KEEP_CUTS)
            ids = np.arange(ROWS)
            columns = [pa.array(ids), pa.array(ids % 1000, pa.int32()), pa.array(ids), pa.repeat("loaded", ROWS)]
            # By the writer of what it is compared with: as many files of the same size.
            write_deltalake(str(folder), pa.table(columns, schema=lake_schema(self.schema)), mode="append")
            for version in (0, 1):
                Clock.stamp(folder, version)

    def live(self, second: int) -> None:
        Clock.now = BEGIN + timedelta(seconds=second)
        changes = self.changes.take(second)
        began = time.perf_counter()
        for name, folder in self.folders.items():
            plan = Plan(
                self.records[name], str(folder), f"day/{name}", self.versions[name], second, changes, "positional", ""
            )
            applied = self.applier.commit(plan)
            assert not applied.divergence, applied.example
            self.versions[name] = applied.version
            Clock.stamp(folder, applied.version)
        tables = {
            name: TableVersion(version, second, "active", 1, "positional", True)
            for name, version in self.versions.items()
        }
        self.ledger.publish(
            Position("7", 1, second + 1), tables, all_tables=tables, source_time=None, sample=None, stages={}
        )
        Clock.stamp(Path(ledger_path(str(self.root))), self.ledger._table.version())
        for name, folder in self.folders.items():
            self.versions[name] = self.applier.keep_up(str(folder), self.schema, self.versions[name])
            Clock.stamp(folder, self.versions[name])
        self.apply_seconds.append(time.perf_counter() - began)
        if second % CLEAN_EVERY == 0:
            began = time.perf_counter()
            self.clean()
            self.clean_seconds.append(time.perf_counter() - began)

    def clean(self) -> None:
        """As the caretaker does it, at the simulated moment."""
        folder = str(self.folders[KEPT])
        log = log_files.look(folder)
        horizon = Horizons.read(str(self.root), KEEP_CUTS, Clock.now).of(KEPT, log)
        assert horizon is not None
        clean(folder, log, horizon.version, log_from=horizon.log_from, orphans_before=None, stop=Event())
        # Its own upkeep counts back from the real time.
        keep_ledger(str(self.root), Event(), keep=time.time() - Clock.now.timestamp() + KEEP_CUTS)
        control = ledger_path(str(self.root))
        Clock.stamp(Path(control), DeltaTable(control).version())

    def report(self, second: int) -> None:
        for name, folder in {**self.folders, "ledger": Path(ledger_path(str(self.root)))}.items():
            for what, count in counted(folder).items():
                unit = "MB" if what == "megabytes" else "files"
                shown = what.replace("_", " ")
                figure(f"{shown} of {WORDS[name]} after {second:,} epochs, {ROWS:,} rows", count, unit)


def counted(folder: Path) -> dict[str, int]:
    log = [entry.name for entry in os.scandir(folder / "_delta_log")]
    files = [entry for entry in os.scandir(folder) if entry.is_file()]
    return {
        "live_files": len(read_snapshot(str(folder)).files),
        "data_files": sum(entry.name.endswith(".parquet") for entry in files),
        "deletion_vector_files": sum(entry.name.endswith(".bin") for entry in files),
        "log_entries": sum(name.endswith(".json") for name in log),
        "checkpoints": sum("checkpoint" in name and name.endswith(".parquet") for name in log),
        "checksums": sum(name.endswith(".crc") for name in [*log, *(entry.name for entry in files)]),
        "megabytes": sum(entry.stat().st_size for entry in files) >> 20,
    }


def side_by_side(works: list[Callable[[], object]], times: int = 7) -> list[float]:
    """The median seconds of each, taken in turns: what else the machine does meets all of them."""
    found: list[list[float]] = [[] for _ in works]
    for turn in range(times + 2):
        for work, seconds in zip(works, found, strict=True):
            began = time.perf_counter()
            work()
            if turn >= 2:
                seconds.append(time.perf_counter() - began)
    return [round(statistics.median(seconds), 4) for seconds in found]


def opening(folder: Path) -> Callable[[], object]:
    return lambda: DeltaTable(str(folder))


def by_delta_rs(folder: Path) -> Callable[[], object]:
    question, table = "select a, count(*), sum(b), max(note) from t group by a", DeltaTable(str(folder))
    return lambda: QueryBuilder().register("t", table).execute(question).read_all()


def by_spark(spark: Any, folder: Path) -> Callable[[], object]:
    def ask() -> object:
        return spark.read.format("delta").load(str(folder)).groupBy("a").agg({"b": "sum", "note": "max"}).collect()

    return ask


def queries(day: Day, spark: Any) -> None:
    fresh = day.root / "fresh"
    rows = QueryBuilder().register("t", DeltaTable(str(day.folders[KEPT]))).execute("select * from t").read_all()
    write_deltalake(str(fresh), pa.table(rows))
    folder = day.folders[KEPT]
    snapshot = read_snapshot(str(folder)).files.values()
    deleted = sum(file.deleted for file in snapshot)
    figure(f"files after {EPOCHS:,} epochs on {ROWS:,} rows", len(snapshot), "files")
    figure(f"deleted rows in them after {EPOCHS:,} epochs on {ROWS:,} rows", deleted, "rows")
    marked = day.root / "marked"
    mark(spark, marked, pa.table(rows), deleted)
    asked = (("delta-rs", by_delta_rs), ("delta-rs, opening alone", opening), ("Spark", lambda f: by_spark(spark, f)))
    for engine, ask in asked:
        found, reference, engines_own = side_by_side([ask(folder), ask(fresh), ask(marked)])
        compacted, what = (
            "the same rows freshly written",
            f"a query of {ROWS:,} rows after {EPOCHS:,} epochs, by {engine}",
        )
        figure(what, found, "s", compacted, reference)
        figure(f"{what}: freshly written with as many rows deleted", engines_own, "s", compacted, reference)


def mark(spark: Any, folder: Path, rows: pa.Table, deleted: int) -> None:
    """`rows` and `deleted` more as freshly written, of which as many at random are marked as deleted."""
    create(spark, str(folder), schema(), KEEP_CUTS)
    write_deltalake(str(folder), pa.concat_tables([rows, rows.slice(0, deleted)]), mode="append")
    snapshot = read_snapshot(str(folder))
    chance, share = np.random.default_rng(2), deleted / (rows.num_rows + deleted)
    gone = {
        name: BitMap(chance.choice(file.rows or 0, round((file.rows or 0) * share), replace=False).astype(np.uint32))
        for name, file in snapshot.files.items()
    }
    vectors = write_vectors(str(folder), gone)
    actions = [delta_log.commit_info("DELETE", {}, {}, snapshot.version)]
    for name, file in snapshot.files.items():
        actions += [
            delta_log.remove(file, data=True),
            delta_log.add(delta_log.with_vector(file, vectors[name]), data=True),
        ]
    delta_log.commit(str(folder), snapshot.version + 1, actions)


def cold_start(day: Day) -> None:
    """Each table's log is a link to the one that was made: what is counted is looking, reading and parsing."""
    for name, source in day.folders.items():
        folders = [str(day.root / "cold" / name / str(number)) for number in range(TABLES)]
        for folder in folders:
            Path(folder).mkdir(parents=True)
            (Path(folder) / "_delta_log").symlink_to(source / "_delta_log", target_is_directory=True)
        began = time.perf_counter()
        for folder in folders:
            DeltaTable(folder).version()
        opened = time.perf_counter() - began
        began = time.perf_counter()
        for folder in folders:
            read_snapshot(folder)
        loaded = time.perf_counter() - began
        what = f"opening {TABLES:,} logs of {EPOCHS:,} epochs of {WORDS[name]}"
        figure(f"{what}, by delta-rs", opened, "s", "our own snapshots", loaded)


def main() -> None:
    spark = build_session()
    Clock.install()
    upkeep._LONGEST_REST = 0.0  # epochs follow each other without their second
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        day = Day(Path(scratch), spark)
        spent = time.process_time()
        for second in range(1, EPOCHS + 1):
            day.live(second)
            if second % REPORT_EVERY == 0 or second == EPOCHS:
                day.report(second)
        day.applier.close()
        what, one_each = f"{EPOCHS:,} epochs on {ROWS:,} rows", statistics.median(day.apply_seconds)
        figure(f"{what}: one epoch over two tables, ledger row and upkeep included", one_each, "s")
        figure(f"{what}: processor of one epoch", (time.process_time() - spent) / EPOCHS, "s")
        if day.clean_seconds:
            figure(f"{what}: one clean-up of {CLEAN_EVERY}", statistics.median(day.clean_seconds[-5:]), "s")
        figure(f"{what}: clean-up's share of the time that they stand for", sum(day.clean_seconds) / EPOCHS * 100, "%")
        ledger = sum(f.stat().st_size for f in Path(ledger_path(scratch)).glob("*.parquet"))
        figure(f"{what}: the ledger on disk", ledger / EPOCHS, "bytes/row")
        queries(day, spark)
        cold_start(day)


if __name__ == "__main__":
    main()
