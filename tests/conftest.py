"""Fixtures of all tests, one module per subject below `tests/fixtures/`."""

from __future__ import annotations

import os

import pytest

from headwater.spark.session import SHORT_LIVED_JVM

os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED_JVM)
# Generating and compiling code for every plan costs a fifth of a MERGE of a few rows, and tests have no others. What
# runs under a spark-submit of its own (the end-to-end tests, the demo) compiles as in production.
os.environ.setdefault(
    "PYSPARK_SUBMIT_ARGS",
    "--conf spark.sql.codegen.wholeStage=false --conf spark.sql.codegen.factoryMode=NO_CODEGEN pyspark-shell",
)

pytest_plugins = [
    "fixtures.airflow_files",
    "fixtures.browser",
    "fixtures.pages",
    "fixtures.postgres",
    "fixtures.power_cut",
    "fixtures.spark",
]

_LONGEST = [
    "test_slices",
    "test_apply_paths",
    "test_airflow",
    "test_power_cut",
    "test_preapply",
    "test_maintain",
    "test_crash_safety",
    "test_clean_stop",
    "test_choice_of_path",
    "test_take_over",
    "test_foreign_writes",
    "test_killed_services",
    "test_marked_rows",
    "test_server_shutdown",
    "test_verify",
    "test_replicate_control",
    "test_toast",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: with a file to each process, one that begins late would keep all others waiting. But not
    the two that start an Airflow at the same time."""
    rank = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
