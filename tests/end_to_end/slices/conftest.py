"""One Airflow for the tests of slices, and behind them for those that kill its services: each start of one costs a
minute of processor time. It has OpenLineage's provider write its events into files."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from fixtures.airflow_processes import AT_REST, PATIENT_TASKS, slices_of
from headwater.demo.airflow_server import example_dags
from headwater.demo.environment import Demo, demo_environment
from headwater.demo.shop import Writer
from headwater.demo.story import Story

FIRST_SECONDS = 120.0
"""Of a slice; the next one is given half to make itself ready."""

WAITS = """
import os

from airflow.sdk import DAG
from headwater_airflow.sensors.freshness import FreshnessSensor

with DAG("waits", schedule=None, catchup=False, is_paused_upon_creation=False):
    FreshnessSensor(task_id="fresh", pipeline=os.environ["HEADWATER_PIPELINES"] + "/shop.yaml", require="now")
"""


@pytest.fixture(scope="package")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of OpenLineage's events, one file each."""
    return tmp_path_factory.mktemp("lineage")


@pytest.fixture(scope="package")
def dags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dags")
    shutil.copy(example_dags() / "headwater_example_downstream.py", folder)
    (folder / "headwater_pipelines.py").write_text(slices_of(FIRST_SECONDS))
    (folder / "waits.py").write_text(WAITS)
    return folder


@pytest.fixture(scope="package")
def demo(told: Path, dags: Path) -> Iterator[Demo]:
    transport = {"type": "file", "log_file_path": str(told / "event"), "debug_mode": True}
    lineage = {
        **AT_REST,
        **PATIENT_TASKS,
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport),
        "AIRFLOW__OPENLINEAGE__EXECUTION_TIMEOUT": "120",
        "AIRFLOW__OPENLINEAGE__SPARK_INJECT_PARENT_JOB_INFO": "True",
    }
    with demo_environment(dags=dags, environ=lineage) as running:
        yield running


@pytest.fixture(scope="package")
def writer(demo: Demo) -> Iterator[Writer]:
    writer = Writer(demo.server.connect("shop"), rate=1)
    writer.start()
    yield writer
    writer.stop()


@pytest.fixture(scope="package")
def story(demo: Demo, writer: Writer) -> Story:
    """Loaded, and replicating."""
    story = Story(demo, writer, Console(), time.monotonic())
    story.await_airflow()
    story.load()
    story.await_replication()
    return story
