"""One table's batch, directly written and by Spark MERGE in turn: random keys updated in a table of
HEADWATER_BENCH_ROWS rows, 1,000 to a million at a time, integer and uuid keys. Medians over several batches where they
are small. The same without an index of keys (a first batch, or a cache that was removed) is its own figure: it is
built then."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from figures import figure

from headwater.apply.applier import Applier
from headwater.apply.direct import Fence
from headwater.apply.plan import Plan
from headwater.arrow_types import lake_schema
from headwater.delta.index.cache import cache_folder
from headwater.delta.tables import create
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.schema import Column, TableSchema, ValueType
from headwater.spark.session import build_session

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "5000000"))
BATCHES = 5
KEYS = {
    "bigint": (ValueType("int8", "bigint"), "id", "id"),
    # The digits of a hash: statistics of files prune nothing.
    "uuid": (
        ValueType("uuid", "string"),
        "concat_ws('-', substr(h, 1, 8), substr(h, 9, 4), substr(h, 13, 4), substr(h, 17, 4), substr(h, 21, 12)) as id",
        "md5(cast(id as string)) as h",
    ),
}
PAYLOAD = {"a": ValueType("int4", "int"), "b": ValueType("int8", "bigint"), "note": ValueType("text", "string")}


def make_table(spark: object, folder: Path, kind: str) -> tuple[TableRecord, pa.ChunkedArray]:
    value, key, inner = KEYS[kind]
    columns = tuple(Column(name, at, 0, -1, v) for at, (name, v) in enumerate({"id": value, **PAYLOAD}.items(), 1))
    schema = TableSchema(1, "public", "t", columns, ("id",))
    create(spark, str(folder), schema)  # type: ignore[arg-type]
    inner = inner if inner != "id" else "id as h"
    frame = spark.range(ROWS).selectExpr("id", inner)  # type: ignore[attr-defined]
    frame = frame.selectExpr(
        "cast(h as bigint) as id" if kind == "bigint" else key,
        "cast(id as int) as a",
        "id as b",
        "concat('note ', id) as note",
    )
    frame.write.format("delta").mode("append").save(str(folder))
    record = TableRecord("public.t", "t", "active", incarnation=1, schemas=((0, schema),))
    found = QueryBuilder().register("t", DeltaTable(str(folder))).execute("select id from t").read_all()
    return record, pa.table(found)["id"].cast(lake_schema(schema).field("id").type)


def updates(record: TableRecord, ids: pa.ChunkedArray, count: int, chance: np.random.Generator) -> NetChanges:
    chosen = ids.take(pa.array(chance.choice(len(ids), count, replace=False)))
    numbers = np.arange(count)
    rows = pa.table(
        [chosen, pa.array(numbers, pa.int32()), pa.array(numbers), pa.array(["changed"] * count)],
        schema=lake_schema(record.schema),
    )
    return NetChanges(rows, np.ones(count, dtype=np.bool_), {}, None, rows.select(["id"]).slice(0, 0), count)


@dataclass
class Table:
    applier: Applier
    record: TableRecord
    ids: pa.ChunkedArray
    folder: Path
    lsn: int = 0

    def apply(self, count: int, by_engine: str = "") -> tuple[float, float]:
        """Wall and CPU seconds (of this process) of one batch."""
        self.lsn += 1
        changes = updates(self.record, self.ids, count, np.random.default_rng(self.lsn))
        version, folder = DeltaTable(str(self.folder)).version(), str(self.folder)
        plan = Plan(self.record, folder, "bench/t", version, self.lsn, changes, "positional", "", by_engine)
        if by_engine:
            plan = replace(plan, apply_path="merge")
        wall, cpu = time.perf_counter(), time.process_time()
        applied = self.applier.commit(plan)
        assert applied.divergence == 0, applied
        return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    spark = build_session()
    for kind in KEYS:
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
            os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
            folder = Path(scratch) / "t"
            record, ids = make_table(spark, folder, kind)
            table = Table(Applier(lambda: spark, Fence("bench/generation", 1)), record, ids, folder)
            table.apply(1000)
            table.apply(1000, "warm")
            for count in (1000, 100_000, 1_000_000):
                direct = [table.apply(count) for _ in range(BATCHES if count <= 100_000 else 1)]
                merged = [table.apply(count, "reference")[0] for _ in range(2 if count <= 100_000 else 1)]
                table.applier.close()
                shutil.rmtree(cache_folder(), ignore_errors=True)
                table.applier = Applier(lambda: spark, Fence("bench/generation", table.lsn))
                cold, _ = table.apply(count)
                what = f"{count:,} random keys updated in a table of {ROWS:,} rows, {kind} key"
                merge = "Spark MERGE"
                figure(what, statistics.median(wall for wall, _ in direct), "s", merge, statistics.median(merged))
                figure(f"{what}: processor", statistics.median(cpu for _, cpu in direct), "s")
                figure(f"{what}: the first batch, which builds the index of keys", cold, "s")
            table.applier.close()


if __name__ == "__main__":
    main()
