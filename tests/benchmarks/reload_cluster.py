"""What touches a whole table, on a Spark cluster of one worker and of two, with a core each: load, compaction, the
first index of its keys, reload of half of it, rebuild, a column added with a default, verify; and how long the table's
own changes waited meanwhile.

HEADWATER_BENCH_ROWS rows (6,000,000) of ten columns in 20 partitions by ranges of the key. All of it shares this
machine's cores: source, driver, master, workers. One process for each cluster; Spark and its executors are started
before anything is measured. Beside reload, rebuild and the new column one row is updated ten times a second, and its
longest way from commit to a published epoch counts. With each time it prints how many cores were busy meanwhile: where
it is all of them, a third worker's core would have to be of another machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from figures import figure
from mixed_load import make_parted_table, server

from headwater.apply import file_keys
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.live_table import LiveTable
from headwater.lake.paths import table_path
from headwater.lake.position_file import read_position_file
from headwater.lake.registry import Registry
from headwater.load.load import load
from headwater.maintain.maintain import maintain
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.position import parse_lsn
from headwater.reload.rebuild import rebuild
from headwater.reload.reload import reload
from headwater.replicate.replicate import replicate
from headwater.spark.session import job_session
from headwater.verify.verify import verify

ROWS = int(os.environ.get("HEADWATER_BENCH_ROWS", "6000000"))
PARTS = 20
TABLE = TableName("public", "parted")


def main() -> None:
    size = ROWS // PARTS
    found: dict[int, dict[str, float]] = {}
    with server() as source, tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        make_parted_table(source, PARTS, size)
        for workers in (1, 2):
            folder = Path(scratch) / f"workers-{workers}"
            folder.mkdir()
            with source.connect("postgres") as connection:
                connection.execute("alter table parted drop column if exists more")
            with cluster(folder, workers) as master:
                found[workers] = measured(folder, source.conninfo("postgres"), master, workers)
            with source.connect("postgres") as connection:
                for (slot,) in connection.execute("select slot_name from pg_replication_slots").fetchall():
                    connection.execute("select pg_drop_replication_slot(%s)", [slot])
    for what, seconds in found[2].items():
        figure(f"{what}, {ROWS:,} rows, two workers of a core each", seconds, "s", "one worker", found[1][what])


def measured(folder: Path, conninfo: str, master: str, workers: int) -> dict[str, float]:
    environment = {**os.environ, "HEADWATER_SPARK_MASTER": master, "SPARK_LOCAL_IP": "127.0.0.1"}
    asked = [sys.executable, __file__, "--one", str(folder), conninfo, str(workers)]
    done = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[str]:
    """Master and workers, as processes of their own; the master's address."""
    program = str(Path(sys.executable).parent / "spark-class")
    port = 17000 + os.getpid() % 1000 + workers
    master = f"spark://127.0.0.1:{port}"
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    here = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "2g", "--host", "127.0.0.1"]
    commands = [
        here,
        *([*worker, "--webui-port", "0", "--work-dir", str(folder / "work"), master] for _ in range(workers)),
    ]
    with (folder / "cluster.log").open("wb") as log:
        running = [
            subprocess.Popen([program, *command], env=environment, stdout=log, stderr=log) for command in commands
        ]
        try:
            yield master
        finally:
            for process in reversed(running):
                process.terminate()
            for process in running:
                process.wait(30)


def one(folder: Path, conninfo: str, workers: int) -> dict[str, float]:
    """All of it on the cluster that the environment names."""
    file = folder / "bench.yaml"

    def declare(**entry: Any) -> Pipeline:
        tables = [{"name": str(TABLE), **entry}]
        document = {
            "pipeline": f"bench{workers}",
            "source": {"connection": conninfo},
            "lake": {"root": (folder / "lake").as_uri()},
            "load": {"connections": workers},
            "tables": tables,
        }
        file.write_text(json.dumps(document))
        return load_pipeline(file)

    wanted = declare()
    context = job_session(wanted.name, "benchmark", wanted.lake_path()).sparkContext
    while len(set(context.parallelize(range(8), 8).map(_whose).collect())) < workers:
        time.sleep(0.5)
    seconds: dict[str, float] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        began, busy = time.monotonic(), busy_seconds()
        found = work()
        seconds[what] = time.monotonic() - began
        cores = (busy_seconds() - busy) / seconds[what]
        print(f"{what}, {workers} workers: {seconds[what]:.1f} s, {cores:.2f} cores busy", file=sys.stderr)
        return found

    timed("loaded", lambda: load(wanted, [TABLE]))
    assert timed("compacted", lambda: maintain(wanted))["tables"][str(TABLE)]["compacted"]
    timed("the keys of all rows read for an index", lambda: index_keys(wanted))
    stop = threading.Event()
    driver = threading.Thread(target=replicate, args=(wanted, None, None, stop))
    driver.start()
    try:
        while not status(wanted)["running"]:
            time.sleep(0.2)
        half = [TableName("public", f"parted_{number}") for number in range(PARTS // 2)]
        with Probe(wanted, conninfo) as probe:
            time.sleep(5)
        seconds["longest way of a change to a published epoch, nothing beside it"] = probe.longest
        for what, work in (
            ("half of it reloaded", lambda: reload(wanted, TABLE, half)),
            ("rebuilt, partitioned by another column", lambda: rebuild(declare(partition_by=["category"]), TABLE)),
            ("rebuilt, without partitions", lambda: rebuild(declare(), TABLE)),
        ):
            with Probe(wanted, conninfo) as probe:
                timed(what, work)
            seconds[
                f"longest way of a change to a published epoch while it was {what.replace('half of it', 'half')}"
            ] = probe.longest
        timed("a column added with a default", lambda: add_column(wanted, conninfo))
        timed("verified", lambda: _same(verify(wanted, [TABLE])))
    finally:
        stop.set()
        driver.join()
    return seconds


def index_keys(pipeline: Pipeline) -> None:
    root = pipeline.lake_path()
    registry = Registry.open(root, pipeline.name)
    assert registry is not None
    record = registry.tables[str(TABLE)]
    tasks = FileTasks(lambda: job_session(pipeline.name, "benchmark", root), root)
    file_keys.MANY = min(file_keys.MANY, ROWS)
    table = LiveTable(table_path(root, record.path), record.schema, tasks=tasks)
    table.index_keys()
    table.close()


def add_column(pipeline: Pipeline, conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("alter table parted add more int default 7")
        connection.execute("update parted set a = a + 1 where id = 1")
        lsn = _now(connection)
    until_published(pipeline, lsn)


def busy_seconds() -> float:
    """Of all cores, since the machine started."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _same(found: dict[str, Any]) -> None:
    table = found["tables"][str(TABLE)]
    assert (table["missing"], table["extra"], table["different"]) == (0, 0, 0), table


def _whose(_: int) -> int:
    time.sleep(0.2)
    return os.getppid()


def _now(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def until_published(pipeline: Pipeline, lsn: int) -> None:
    root = pipeline.lake_path()
    while (file := read_position_file(root)) is None or file.position.lsn < lsn:
        time.sleep(0.02)


class Probe:
    """One row, updated ten times a second; `longest`: of its ways to a published epoch, in seconds."""

    def __init__(self, pipeline: Pipeline, conninfo: str) -> None:
        self._pipeline, self._conninfo = pipeline, conninfo
        self._stop = threading.Event()
        self.longest = 0.0
        self._threads = [threading.Thread(target=self._write), threading.Thread(target=self._follow)]
        self._waiting: list[tuple[int, float]] = []

    def __enter__(self) -> Probe:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            while not self._stop.wait(0.1):
                connection.execute("update parted set a = a + 1 where id = 0")
                self._waiting.append((_now(connection), time.monotonic()))

    def _follow(self) -> None:
        root = self._pipeline.lake_path()
        while not self._stop.wait(0.02) or self._waiting:
            file = read_position_file(root)
            while file is not None and self._waiting and self._waiting[0][0] <= file.position.lsn:
                self.longest = max(self.longest, time.monotonic() - self._waiting.pop(0)[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    else:
        main()
