"""What Airflow pays for Headwater: parsing the DAGs of HEADWATER_BENCH_PIPELINES (50) pipeline files, and the time from
the start of a DAG run to the first task of its Spark job, HEADWATER_BENCH_TIMES (5) times.

References of the same run: as many DAGs with a `SparkSubmitOperator` each; and a bare `spark-submit` of one job.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from figures import figure
from rich.console import Console

from headwater.demo.environment import demo_environment
from headwater.demo.shop import Writer
from headwater.demo.story import RELOAD, Story

PIPELINES = int(os.environ.get("HEADWATER_BENCH_PIPELINES", "50"))
TIMES = int(os.environ.get("HEADWATER_BENCH_TIMES", "5"))
OURS = """
import sys, time
import airflow.sdk, airflow.providers.apache.spark.operators.spark_submit
began = time.perf_counter()
from headwater_airflow.dag_factory import headwater_dags
dags = headwater_dags(sys.argv[1] + "/*.yaml")
print(time.perf_counter() - began, len(dags))
"""
PLAIN = """
import sys, time
from airflow.sdk import DAG
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
began = time.perf_counter()
for number in range(int(sys.argv[1])):
    with DAG(f"plain{number}", schedule=None):
        SparkSubmitOperator(task_id="submit", application="job.py", conn_id="spark_default")
print(time.perf_counter() - began, sys.argv[1])
"""
JOB = """
from pyspark.sql import SparkSession
print(SparkSession.builder.getOrCreate().range(10).selectExpr("sum(id)").collect())
"""


def parsed(home: str, code: str, argument: str) -> tuple[float, int]:
    """Median seconds in processes of their own, and how many DAGs there are."""
    found = []
    for _ in range(5):
        command = [sys.executable, "-c", code, argument]
        environment = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found.append(done.stdout.split()[-2:])
    return statistics.median(float(seconds) for seconds, _ in found), int(found[0][1])


def parsing() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        for number in range(PIPELINES):
            tables = "".join(f"  - public.t{table}\n" for table in range(10))
            Path(scratch, f"p{number}.yaml").write_text(
                f"pipeline: p{number}\nsource: {{connection: 'postgresql://nobody@127.0.0.1:1/db'}}\n"
                f"lake: {{root: 'file://{scratch}/lake{number}'}}\ntables:\n{tables}"
            )
        seconds, dags = parsed(scratch, OURS, scratch)
        reference, _ = parsed(scratch, PLAIN, str(dags))
    plain = f"{dags} DAGs with a SparkSubmitOperator each"
    figure(f"parsing the {dags} DAGs of {PIPELINES} pipelines of ten tables", seconds, "s", plain, reference)


def first_tasks(events: Path) -> Iterator[float]:
    """Of each Spark application that has logged to `events`, when its first task began, seconds since 1970."""
    for log in sorted(events.rglob("*local-*")):
        if log.is_file():
            lines = (json.loads(line) for line in log.read_text().splitlines() if "SparkListenerTaskStart" in line)
            moment = next((line["Task Info"]["Launch Time"] / 1000 for line in lines), None)
            if moment is not None:
                yield moment


def starting() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        events = Path(scratch, "events")
        events.mkdir()
        Path(scratch, "spark-defaults.conf").write_text(
            f"spark.eventLog.enabled true\nspark.eventLog.dir {events.as_uri()}\nspark.eventLog.compress false\n"
        )
        job = Path(scratch, "job.py")
        job.write_text(JOB)
        os.environ["SPARK_CONF_DIR"] = scratch

        def first_task_since(began: float) -> float:
            return min(moment for moment in first_tasks(events) if moment >= began) - began

        submit = str(Path(sys.executable).with_name("spark-submit"))
        ours, bare = [], []
        with demo_environment() as demo:
            writer = Writer(demo.server.connect("shop"), rate=5)
            writer.start()
            story = Story(demo, writer, Console(stderr=True), time.monotonic())
            story.await_airflow()
            story.load()
            story.await_replication()
            client = demo.airflow.client
            for _ in range(TIMES):
                run = client.trigger(RELOAD, {"table": "public.orders", "partitions": []})
                if client.wait_for_run(RELOAD, run, 300) != "success":
                    raise RuntimeError(client.log(RELOAD, run, "reload"))
                ours.append(first_task_since(datetime.fromisoformat(client.run(RELOAD, run)["start_date"]).timestamp()))
                began = time.time()
                subprocess.run([submit, "--master", "local[2]", str(job)], check=True, capture_output=True)
                bare.append(first_task_since(began))
            writer.stop()
    what, submitted = f"start of a DAG run to the first task of its Spark job, {TIMES} times", "a bare spark-submit"
    figure(f"{what}: median", statistics.median(ours), "s", submitted, statistics.median(bare))
    figure(f"{what}: longest", max(ours), "s", submitted, statistics.median(bare))


if __name__ == "__main__":
    parsing()
    starting()
