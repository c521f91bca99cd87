"""A Spark cluster whose executors are processes of their own, started as docker/compose.yaml starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from fixtures.compose import Stack
from fixtures.jobs import in_thread, until
from fixtures.object_stores import S3Server
from fixtures.postgres import Database
from headwater.errors import Refused, Transient
from headwater.lake.executors import LakeAccess, lacking
from headwater.lake.paths import registry_path
from headwater.load.units import UnitReader
from headwater.schema import TableSchema
from headwater.source.reading_now import readers
from headwater.spark.session import SHORT_LIVED_JVM

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

ELSEWHERE = os.path.realpath(sys.executable)
"""A Python whose path is not the driver's, and that finds libraries as the cluster's own environment says."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Executors that find every library, and nothing of Headwater."""
    libraries = sysconfig.get_path("purelib")
    looked = [ELSEWHERE, "-c", "import psycopg, pyarrow; import headwater.errors"]
    found = subprocess.run(looked, env={"PYTHONPATH": libraries}, capture_output=True, text=True)
    assert "No module named 'headwater.errors'" in found.stderr
    programs = Path(sysconfig.get_path("scripts"))
    with Stack(tmp_path_factory.mktemp("cluster"), programs, {"PYTHONPATH": libraries}) as stack:
        stack.start("spark-worker")
        yield stack


def headwater(
    cluster: Stack, database: Database, folder: Path, lake: dict[str, Any], *command: str
) -> tuple[int, dict[str, Any]]:
    """A command beside the cluster, its driver in a process of its own: exit status and JSON."""
    file = folder / "shop.yaml"
    file.write_text(
        "pipeline: shop\nsource: {connection: '${HEADWATER_SOURCE}'}\n"
        f"lake: {json.dumps(lake)}\ntables: [public.orders]\n"
    )
    environment = {
        **os.environ,
        "HEADWATER_SOURCE": database.conninfo,
        "HEADWATER_SPARK_MASTER": cluster.here("spark://spark-master:7077"),
        "HEADWATER_EXECUTOR_PYTHON": ELSEWHERE,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JDK_JAVA_OPTIONS": SHORT_LIVED_JVM,
    }
    program = [sys.executable, "-m", "headwater.cli", command[0], str(file), *command[1:], "--json"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def orders(database: Database) -> Database:
    """More than a unit of rows: the driver loads by itself what is less."""
    database.allow_publishing()
    database.execute(
        "create table orders (id int primary key, amount numeric(10,2), tags text[])",
        "insert into orders select i, i / 7.0, array['a', i::text, repeat('x', 1500)] from generate_series(1, 25000) i",
    )
    return database


def test_a_cluster_that_has_never_heard_of_headwater_loads_and_verifies(
    cluster: Stack, orders: Database, tmp_path: Path, s3_server: S3Server
) -> None:
    """Nothing is mounted where its workers run: the lake is in a store."""
    lake = s3_server.lake("lake")
    loading = in_thread(lambda: headwater(cluster, orders, tmp_path, lake, "load"))
    with orders.connect_as_headwater() as looking:
        told = "the executors say how far they are"
        until(lambda: any(one.rows for one in readers(looking)) or loading.done(), told, 180)
    beside_it = not loading.done()
    status, loaded = loading.result(300)
    assert beside_it
    assert (status, loaded["tables"]["public.orders"]["rows"]) == (0, 25000)
    orders.execute("update orders set tags = null where id % 10 = 0", "delete from orders where id > 24000")
    assert headwater(cluster, orders, tmp_path, lake, "replicate", "--until", "now")[0] == 0
    status, verified = headwater(cluster, orders, tmp_path, lake, "verify")
    assert (status, verified["tables"]["public.orders"]["rows"]) == (0, 24000)
    master = (cluster.folder / "spark-master.log").read_text()
    assert "headwater load" in master
    assert "headwater verify" in master


_LARGE = """
import sys
from pathlib import Path
from headwater.log.net.on_disk import PartsOnDisk
from headwater.spark.session import build_session
from integration.apply.test_apply_paths import by_delta_rs, make_twins, on_disk

COUNT = 20_000

def elsewhere(*_):
    raise AssertionError("executors of a cluster do not read the driver's disk")

PartsOnDisk.write_parquet = elsewhere
two = {"spark.executor.cores": "1", "spark.dynamicAllocation.minExecutors": "2"}
spark = build_session(app_name="headwater large batch test", tuning=two)
assert spark.sparkContext.master.startswith("spark://"), spark.sparkContext.master
lake, spill = Path(sys.argv[1]), Path(sys.argv[2])
twins = make_twins(spark, lake, "uuid", seed=32)
for batch in range(2):
    assert [applied.divergence for applied in twins.apply(on_disk(twins.batch(), spill, 3))] == [0, 0]
    twins.assert_as_the_model()
print(len(by_delta_rs(twins.merged)), *sorted(path.name for path in lake.rglob("rows-*")))

twins = make_twins(spark, lake / "large", "uuid", seed=31)
rows = [twins.row(number) for number in range(COUNT)]
first = twins.changes(rows, [False] * COUNT, [False] * COUNT, [None] * COUNT, [])
again = [twins.row(number) for number in range(COUNT // 2)]
gone = [twins.key(number) for number in range(COUNT // 2, COUNT // 2 + 1000)]
half = COUNT // 2
second = twins.changes(again, [True] * half, [False] * half, [None] * half, gone)
for changes in (first, second):
    assert [applied.divergence for applied in twins.apply(changes)] == [0, 0]
found = by_delta_rs(twins.merged)
assert found == by_delta_rs(twins.direct)
members = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
print(COUNT - len(found), members - 1)
"""


def test_large_batches_reach_the_executors_those_that_are_too_much_for_memory_through_the_lake(
    cluster: Stack, tmp_path: Path
) -> None:
    """Merged there, the rows are those of the other way."""
    (tmp_path / "spill").mkdir()
    environment = {
        **os.environ,
        "HEADWATER_SPARK_MASTER": cluster.here("spark://spark-master:7077"),
        "HEADWATER_EXECUTOR_PYTHON": ELSEWHERE,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = [sys.executable, "-c", _LARGE, str(tmp_path / "lake"), str(tmp_path / "spill")]
    done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    through_the_lake, large = done.stdout.splitlines()
    rows, *left = through_the_lake.split()
    assert int(rows) > 0
    assert left == []
    deleted, executors = map(int, large.split())
    assert deleted == 1000
    assert executors == 2


def failure(spark: SparkSession, task: Callable[[Iterator[Any]], Iterator[Any]]) -> Refused | Transient | None:
    """What a job says whose executors fail in `task`."""
    with pytest.raises(PySparkException) as failed:
        spark.range(1).mapInArrow(task, "id bigint").collect()
    return lacking(str(failed.value))


def test_an_executor_that_does_not_see_the_lake_ends_the_load(spark: SparkSession, tmp_path: Path) -> None:
    lake = str(tmp_path / "not here")
    reader = UnitReader("", "", TableSchema(1, "public", "orders", (), ()), {}, writes_to=LakeAccess.to(lake))
    refused = failure(spark, reader)
    assert refused is not None
    assert (refused.code, refused.where) == ("lake_not_shared", registry_path(lake))


def test_a_python_that_lacks_a_library_is_named_with_what_it_lacks(spark: SparkSession) -> None:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import a_library_that_nobody_has  # type: ignore[import-not-found]

        yield from a_library_that_nobody_has.read(batches)

    refused = failure(spark, task)
    assert refused is not None
    assert refused.code == "executor_python"
    assert "a_library_that_nobody_has" in refused.message
