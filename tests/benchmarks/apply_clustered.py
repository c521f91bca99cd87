"""What `cluster_by` gains a query and costs the writer: two tables with the same rows and changes, one of them
clustered by customer and day, HEADWATER_BENCH_EPOCHS epochs of random updates with upkeep beside them, without a rest.
Then the rows of one customer, and of one day, are asked for: files whose bounds let them hold one, and the time by
delta-rs and by Spark, side by side.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from figures import figure

from headwater.apply import small_files as upkeep
from headwater.apply import whole_table
from headwater.apply.applier import Applier
from headwater.apply.direct import Fence
from headwater.apply.plan import Plan
from headwater.arrow_types import lake_schema
from headwater.delta import clustering
from headwater.delta.delta_log import read_snapshot
from headwater.delta.layout import layout_of
from headwater.delta.where_files import columns_read, may_match
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.predicate import OneOf, Predicate
from headwater.schema import Column, TableSchema, ValueType
from headwater.spark.session import build_session

EPOCHS = int(os.environ.get("HEADWATER_BENCH_EPOCHS", "600"))
ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "3000000"))
UPDATES = int(os.environ.get("HEADWATER_BENCH_UPDATES", "1000"))
CUSTOMERS, DAYS = 20_000, 2_000
CLUSTER_BY = ("customer", "day")
COLUMNS = {
    "id": ValueType("int8", "bigint"),
    "customer": ValueType("int4", "int"),
    "day": ValueType("date", "date"),
    "amount": ValueType("int8", "bigint"),
    "note": ValueType("text", "string"),
}
PLAIN = TableSchema(
    1, "public", "t", tuple(Column(n, at, 0, -1, v) for at, (n, v) in enumerate(COLUMNS.items(), 1)), ("id",)
)
WHAT, PLAINLY = f"{ROWS:,} rows clustered by customer and day", "not clustered"
SCHEMAS = {"plain": PLAIN, "clustered": replace(PLAIN, cluster_by=CLUSTER_BY)}
QUERIES: dict[str, tuple[str, Predicate]] = {
    "customer": ("customer = 777", OneOf("customer", (777,))),
    "day": ("day = date '1973-01-01'", OneOf("day", (date(1973, 1, 1),))),
}


def rows_of(ids: Any, second: int) -> pa.Table:
    customers = (ids * 2_654_435_761 % CUSTOMERS).astype(np.int32)
    days = (ids * 40_503 % DAYS).astype(np.int32)
    notes = pa.array([f"note {second} of {number}" for number in ids.tolist()])
    columns = [pa.array(ids), pa.array(customers), pa.array(days).cast(pa.date32()), pa.array(ids * second), notes]
    return pa.table(columns, schema=lake_schema(PLAIN))


def load(folder: Path, schema: TableSchema) -> float:
    began = time.perf_counter()
    whole_table.create(str(folder), schema, 3600.0)
    parts = (rows_of(np.arange(first, min(first + 100_000, ROWS)), 1) for first in range(0, ROWS, 100_000))
    batches = (batch for part in parts for batch in part.to_batches())
    whole_table.overwrite(str(folder), schema, batches, "load", 1)
    return time.perf_counter() - began


def side_by_side(works: list[Callable[[], object]], times: int = 7) -> list[float]:
    """The median seconds of each, one after the other so many times."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(times):
        for work, seconds in zip(works, found, strict=True):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in found]


def main() -> None:
    spark = build_session("clustered", app_name="benchmark of cluster_by")
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as root:
        folders = {name: Path(root, name) for name in SCHEMAS}
        loaded = {name: load(folders[name], schema) for name, schema in SCHEMAS.items()}
        figure(f"{WHAT}: load", loaded["clustered"], "s", PLAINLY, loaded["plain"])
        asked(spark, folders, "loaded")
        live(spark, folders)
        asked(spark, folders, f"after {EPOCHS} epochs")


def live(spark: Any, folders: dict[str, Path]) -> None:
    """Every row is as likely to be updated as any other."""
    upkeep._LONGEST_REST = 0.0  # epochs follow each other without their second
    chance = np.random.default_rng(1)
    appliers = {name: Applier(lambda: spark, Fence("headwater/bench/generation", 1)) for name in folders}
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    cpu = dict.fromkeys(folders, 0.0)
    for epoch in range(2, EPOCHS + 2):
        rows = rows_of(chance.choice(ROWS, UPDATES, replace=False), epoch)
        gone = rows.select(["id"]).slice(0, 0)
        changes = NetChanges(rows, np.ones(UPDATES, dtype=np.bool_), {}, None, gone, UPDATES)
        for name, folder in folders.items():
            record = TableRecord("public.t", name, "active", schemas=((0, SCHEMAS[name]),))
            began, spent = time.perf_counter(), time.process_time()
            version = DeltaTable(str(folder)).version()
            applied = appliers[name].commit(
                Plan(record, str(folder), f"bench/{name}", version, epoch, changes, "positional", "")
            )
            assert not applied.divergence
            appliers[name].keep_up(str(folder), SCHEMAS[name], applied.version)
            seconds[name].append(time.perf_counter() - began)
            cpu[name] += time.process_time() - spent
    for name in folders:
        appliers[name].close()
    clustered, plain = (statistics.median(seconds[name]) * 1000 for name in ("clustered", "plain"))
    figure(f"{WHAT}: one epoch of {UPDATES:,} updates, median of {EPOCHS}", clustered, "ms", PLAINLY, plain)
    figure(f"{WHAT}: processor of {EPOCHS} epochs", cpu["clustered"], "s", PLAINLY, cpu["plain"])


def asked(spark: Any, folders: dict[str, Path], when: str) -> None:
    for column, (condition, predicate) in QUERIES.items():
        answers = {name: by_delta_rs(folder, condition) for name, folder in folders.items()}
        assert len(set(answers.values())) == 1, answers
        rust = side_by_side([partial(by_delta_rs, folder, condition) for folder in folders.values()])
        java = side_by_side([partial(by_spark, spark, folder, condition) for folder in folders.values()])
        question = f"{WHAT}: rows of one {column}, {when}"
        for engine, times in (("delta-rs", rust), ("Spark", java)):
            plain, clustered = (taken * 1000 for taken in times)
            figure(f"{question}, by {engine}", clustered, "ms", PLAINLY, plain)
        plain_files, files = (files_of(folder, predicate) for folder in folders.values())
        figure(f"{question}: files that may hold them", files.asked, "files", PLAINLY, plain_files.asked)
        figure(f"{question}: files", files.all, "files", PLAINLY, plain_files.all)
        figure(f"{question}: runs of them", files.runs, "runs", PLAINLY, plain_files.runs)


class Files(NamedTuple):
    all: int
    runs: int
    asked: int  # those whose bounds let them hold a row that is asked for


def files_of(folder: Path, predicate: Predicate) -> Files:
    snapshot = read_snapshot(str(folder))
    layout, read = layout_of(snapshot.metadata), columns_read(predicate, lake_schema(PLAIN))
    files = list(snapshot.files.values())
    runs = {clustering.run_of(file.name) or file.name for file in files}
    return Files(len(files), len(runs), sum(may_match(predicate, file, layout, read) for file in files))


def by_delta_rs(folder: Path, condition: str) -> tuple[int, int]:
    sql = f"select count(*) as n, sum(amount) as s from t where {condition}"
    table = pa.table(QueryBuilder().register("t", DeltaTable(str(folder))).execute(sql).read_all())
    return table["n"][0].as_py(), table["s"][0].as_py()


def by_spark(spark: Any, folder: Path, condition: str) -> None:
    spark.read.format("delta").load(str(folder)).where(condition).selectExpr("count(*)", "sum(amount)").collect()


if __name__ == "__main__":
    main()
