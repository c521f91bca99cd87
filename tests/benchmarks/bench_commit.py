"""One small commit, four ways in one session: a ledger row as a driver writes it, the same row by delta-rs, an empty
commit by Delta Kernel in the JVM, and a one-row append by Spark; and the look at the fence that a driver takes each
second, against delta-rs bringing a table up to date that it has followed from the same moment on. What delta-rs does
takes longer with each entry since the last checkpoint. Commits by HEADWATER_BENCH_COMMITS, 60 at most in the JVM."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction, write_deltalake
from figures import figure
from pyspark.sql import SparkSession

from headwater.lake.ledger import Ledger, TableVersion
from headwater.lake.paths import ledger_path
from headwater.position import Position
from headwater.spark.session import build_session

COMMITS = int(os.environ.get("HEADWATER_BENCH_COMMITS", "300"))
IN_THE_JVM = min(COMMITS, 60)
WARM_UP = 5
POSITION = Position("7", 1, 1)
TABLES = {f"public.t{number}": TableVersion(number, 1, "active", 1, "merge", True) for number in range(10)}


def timed(commit: Callable[[int], None], commits: int = COMMITS) -> dict[str, float]:
    """Milliseconds of `commit`, called with 1, 2, 3, …; the first ones do not count."""
    taken = []
    for number in range(1, WARM_UP + commits + 1):
        started = time.perf_counter()
        commit(number)
        taken.append((time.perf_counter() - started) * 1000)
    counted = sorted(taken[WARM_UP:])
    return {"fastest": counted[0], "median": statistics.median(counted)}


def ledger_row(ledger: Ledger) -> Callable[[int], None]:
    """An epoch that names ten tables: data file, `txn` entry and the exclusive commit, as a driver writes it."""

    def commit(number: int) -> None:
        at = POSITION.at(number + 1)
        ledger.publish(at, TABLES, all_tables=TABLES, source_time=None, sample=None, stages={})

    return commit


def append_by_delta_rs(root: str, path: str) -> Callable[[int], None]:
    """Rows as the ledger has them, as exactly the next version."""
    row = DeltaTable(ledger_path(root)).to_pyarrow_table().slice(0, 1)
    write_deltalake(path, row)
    table = DeltaTable(path)
    hooks = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

    def commit(number: int) -> None:
        said = CommitProperties(max_commit_retries=0, app_transactions=[Transaction("bench", number)])
        write_deltalake(table, row, mode="append", commit_properties=said, post_commithook_properties=hooks)

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
        lake = os.path.join(scratch, "lake")
        ledger = Ledger(lake, "bench")
        ledger.begin_generation(POSITION)
        followed = DeltaTable(ledger_path(lake))  # from the beginning on, as a driver's
        ours = timed(ledger_row(ledger))
        look = timed(lambda number: ledger.check_fence())
        update = timed(lambda number: followed.update_incremental())
        delta_rs = timed(append_by_delta_rs(lake, os.path.join(scratch, "delta-rs")))
        kernel = timed(kernel_commit(spark, os.path.join(scratch, "kernel")), IN_THE_JVM)
        append = timed(spark_append(spark, os.path.join(scratch, "spark")), IN_THE_JVM)
        for which, value in ours.items():
            what = f"one ledger row of ten tables: {which} of {COMMITS}"
            figure(what, value, "ms", "the same row by delta-rs", delta_rs[which])
            figure(f"{what}, beside Kernel", value, "ms", "an empty commit by Delta Kernel", kernel[which])
            figure(f"{what}, beside Spark", value, "ms", "a one-row append by Spark", append[which])
            seen = f"one look at the fence, {COMMITS} rows behind the driver's start: {which} of {COMMITS}"
            figure(seen, look[which], "ms", "delta-rs bringing the ledger up to date", update[which])


if __name__ == "__main__":
    main()
