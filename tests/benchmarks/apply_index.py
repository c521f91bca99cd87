"""What 1,000 random keys cost in a table of HEADWATER_BENCH_ROWS rows (20 M), beside a table of 1 M rows in one run,
for each kind of key; how long the index is built and opened again, how large it is, and what memory the process takes.

The tables are narrow and made without Spark, in files of 4 M rows (some 40 MB, as upkeep would leave them). They are
removed afterwards; HEADWATER_BENCH_KEYS names the kinds (bigint,uuid,composite,text).
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from direct_tables import make_table
from figures import figure

from headwater.apply.applier import Applier
from headwater.apply.direct import Fence
from headwater.apply.plan import Plan
from headwater.arrow_types import lake_schema
from headwater.delta.index.cache import cache_folder
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.schema import Column, TableSchema, ValueType

Int64 = npt.NDArray[np.int64]

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "20000000"))
SMALL = 1_000_000
KINDS = os.environ.get("HEADWATER_BENCH_KEYS", "bigint,uuid").split(",")
FILE = 4_000_000
KEYS = 1000
BATCHES = 30
BYTES_PER_ROW = 80  # of files and index together, at most


def bigints(numbers: Int64) -> list[pa.Array]:
    return [pa.array(numbers)]


def composites(numbers: Int64) -> list[pa.Array]:
    return [pa.array((numbers // 10).astype(np.int32)), pa.array((numbers % 10).astype(np.int32))]


def texts(numbers: Int64) -> list[pa.Array]:
    return [pa.array(numbers).cast(pa.string())]


def uuids(numbers: Int64) -> list[pa.Array]:
    """Scattered, so that the statistics of no file prune anything; each number always has the same one."""
    words = np.stack([numbers.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15), numbers.view(np.uint64)], axis=1)
    digits = np.ascontiguousarray(words.astype(">u8")).view(np.uint8).reshape(-1, 16)
    hexadecimal = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    characters = np.full((len(numbers), 36), ord("-"), dtype=np.uint8)
    places = [place for place in range(36) if place not in (8, 13, 18, 23)]
    characters[:, places[0::2]], characters[:, places[1::2]] = hexadecimal[digits >> 4], hexadecimal[digits & 15]
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * 36
    return [pa.Array.from_buffers(pa.string(), len(numbers), [None, pa.py_buffer(offsets), pa.py_buffer(characters)])]


BIGINT, INT, TEXT = ValueType("int8", "bigint"), ValueType("int4", "int"), ValueType("text", "string")
KEY: dict[str, tuple[list[ValueType], Callable[[Int64], list[pa.Array]]]] = {
    "bigint": ([BIGINT], bigints),
    "uuid": ([ValueType("uuid", "string")], uuids),
    "composite": ([INT, INT], composites),
    "text": ([TEXT], texts),
}


def schema_of(kind: str) -> TableSchema:
    values = {**{f"k{at}": value for at, value in enumerate(KEY[kind][0])}, "a": INT}
    columns = tuple(Column(name, at, 0, -1, value) for at, (name, value) in enumerate(values.items(), 1))
    return TableSchema(1, "public", "t", columns, tuple(name for name in values if name != "a"))


def rows_of(schema: TableSchema, kind: str, numbers: Int64) -> pa.Table:
    return pa.table([*KEY[kind][1](numbers), pa.array(numbers.astype(np.int32))], schema=lake_schema(schema))


def no_spark() -> object:
    raise AssertionError("the table needs no Spark")


@dataclass
class Table:
    folder: Path
    kind: str
    rows: int
    generation: int = 1
    lsn: int = 0
    version: int = 0
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schema = schema_of(self.kind)
        self.record = TableRecord("public.t", "t", "active", incarnation=1, schemas=((0, self.schema),))
        self.chance = np.random.default_rng(1)
        self.open()

    def open(self) -> None:
        self.applier = Applier(no_spark, Fence("bench/generation", self.generation))  # type: ignore[arg-type]

    def apply(self) -> float:
        """Seconds of one batch, with what is done behind the ledger left out."""
        self.lsn += 1
        numbers = np.unique(self.chance.integers(0, self.rows, KEYS))
        rows = rows_of(self.schema, self.kind, numbers)
        stored = np.ones(len(numbers), dtype=np.bool_)
        removed = rows.select(list(self.schema.key)).slice(0, 0)
        changes = NetChanges(rows, stored, {}, None, removed, len(numbers))
        folder = str(self.folder)
        plan = Plan(self.record, folder, "bench/t", self.version, self.lsn, changes, "positional", "")
        started = time.perf_counter()
        applied = self.applier.commit(plan)
        seconds = time.perf_counter() - started
        assert applied.divergence == 0, applied
        self.version = self.applier.keep_up(folder, self.schema, applied.version)
        return seconds


def resident() -> dict[str, int]:
    """MiB of this process: its own memory, and pages of mapped files, which the system may take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) >> 10 for line in lines if line.startswith("Rss")}
    return {"own_mib": found["RssAnon"], "mapped_mib": found["RssFile"] + found["RssShmem"]}


def measure(scratch: Path, kind: str) -> float:
    tables = {}
    for rows in (SMALL, ROWS):
        folder = scratch / f"{kind}-{rows}"
        schema = schema_of(kind)
        parts = (range(low, min(low + FILE, rows)) for low in range(0, rows, FILE))
        make_table(folder, schema, (rows_of(schema, kind, np.arange(part.start, part.stop)) for part in parts))
        tables[rows] = Table(folder, kind, rows)
    first = {rows: table.apply() for rows, table in tables.items()}
    for _ in range(BATCHES):
        for table in tables.values():
            table.times.append(table.apply())
    memory = resident()
    large = tables[ROWS]
    started = time.perf_counter()
    for table in tables.values():
        table.applier.close()
    saving = time.perf_counter() - started
    kept = sum(file.stat().st_size for file in cache_folder().rglob("*.run"))
    large.generation = 2
    large.open()
    gc.collect()
    again = large.apply()
    large.applier.close()
    cost = {rows: statistics.median(table.times) for rows, table in tables.items()}
    what, small = f"{KEYS:,} random keys in a table of {ROWS:,} rows, {kind}", f"a table of {SMALL:,} rows"
    figure(what, cost[ROWS] * 1000, "ms", small, cost[SMALL] * 1000)
    figure(f"{what}: worst", max(large.times) * 1000, "ms")
    figure(f"{what}: the index built", first[ROWS], "s")
    figure(f"{what}: the index saved", saving, "s")
    figure(f"{what}: the index opened again after a restart", again, "s")
    figure(f"{what}: the index on disk", kept / (ROWS + SMALL), "bytes/row")
    figure(f"{what}: peak memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "MiB")
    figure(f"{what}: memory of its own", memory["own_mib"], "MiB")
    figure(f"{what}: pages of mapped files", memory["mapped_mib"], "MiB")
    for table in tables.values():
        shutil.rmtree(table.folder)
    return cost[ROWS]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        free, needed = shutil.disk_usage(scratch).free, (ROWS + SMALL) * BYTES_PER_ROW
        if free < needed:
            raise SystemExit(f"{needed >> 30} GiB are needed below {scratch}, {free >> 30} are free")
        os.environ["XDG_CACHE_HOME"] = str(Path(scratch) / "cache")
        costs = {}
        for kind in KINDS:
            costs[kind] = measure(Path(scratch), kind)
            shutil.rmtree(cache_folder(), ignore_errors=True)
        if "bigint" in costs:
            for kind, cost in costs.items():
                what = f"{KEYS:,} random keys in a table of {ROWS:,} rows, {kind} beside bigint"
                if kind != "bigint":
                    figure(what, cost * 1000, "ms", "bigint keys", costs["bigint"] * 1000)


if __name__ == "__main__":
    main()
