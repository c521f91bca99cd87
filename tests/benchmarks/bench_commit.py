"""One small commit, three ways in one session: a ledger row by delta-rs, an empty one by Delta Kernel in the JVM, and
a one-row append by Spark. Commits each by HEADWATER_BENCH_COMMITS."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from figures import figure
from pyspark.sql import SparkSession

from headwater.lake.ledger import Ledger, TableVersion
from headwater.position import Position
from headwater.spark.session import build_session

COMMITS = int(os.environ.get("HEADWATER_BENCH_COMMITS", "60"))
WARM_UP = 5
TABLES = {f"public.t{number}": TableVersion(number, 1, "active", 1, "merge", True) for number in range(10)}


def timed(commit: Callable[[int], None]) -> dict[str, float]:
    """Milliseconds of `commit`, called with 1, 2, 3, …; the first ones do not count."""
    taken = []
    for number in range(1, WARM_UP + COMMITS + 1):
        started = time.perf_counter()
        commit(number)
        taken.append((time.perf_counter() - started) * 1000)
    counted = sorted(taken[WARM_UP:])
    return {"fastest": counted[0], "median": statistics.median(counted)}


def ledger_row(root: str) -> Callable[[int], None]:
    """An epoch that names ten tables: data file, `txn` entry and the exclusive commit, as a driver writes it."""
    position = Position("7", 1, 1)
    ledger = Ledger(root, "bench")
    ledger.begin_generation(position)

    def commit(number: int) -> None:
        at = position.at(number + 1)
        ledger.publish(at, TABLES, all_tables=TABLES, source_time=None, sample=None, stages={})

    return commit


def kernel_commit(spark: SparkSession, path: str) -> Callable[[int], None]:
    """A `txn` entry and no row: the least that Kernel can commit. The snapshot is the one its own commit returned."""
    spark.range(1).write.format("delta").save(path)
    jvm: Any = spark._jvm
    kernel = jvm.io.delta.kernel
    engine = kernel.defaults.engine.DefaultEngine.create(jvm.org.apache.hadoop.conf.Configuration())
    newest = [kernel.TableManager.loadSnapshot(path).build(engine)]

    def commit(number: int) -> None:
        building = newest[0].buildUpdateTableTransaction("bench", kernel.Operation.MANUAL_UPDATE)
        transaction = building.withTransactionId("bench", number).withMaxRetries(0).build(engine)
        result = transaction.commit(engine, kernel.utils.CloseableIterable.emptyIterable())
        newest[0] = result.getPostCommitSnapshot().get()

    return commit


def spark_append(spark: SparkSession, path: str) -> Callable[[int], None]:
    def commit(number: int) -> None:
        spark.createDataFrame([(number,)], "id int").coalesce(1).write.format("delta").mode("append").save(path)

    return commit


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        spark = build_session()
        ours = timed(ledger_row(os.path.join(scratch, "lake")))
        kernel = timed(kernel_commit(spark, os.path.join(scratch, "kernel")))
        append = timed(spark_append(spark, os.path.join(scratch, "spark")))
        for which, value in ours.items():
            what = f"one ledger row of ten tables, by delta-rs: {which} of {COMMITS}"
            figure(what, value, "ms", "an empty commit by Delta Kernel", kernel[which])
            figure(f"{what}, beside Spark", value, "ms", "a one-row append by Spark", append[which])


if __name__ == "__main__":
    main()
