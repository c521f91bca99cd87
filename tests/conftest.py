"""Fixtures of all tests, one module per subject below `tests/fixtures/`."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from fixtures.class_archive import SMALL, use_class_archive
from fixtures.quick_start import start_processes_quickly
from headwater.spark.session import SHORT_LIVED_JVM

os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED_JVM)
os.environ.setdefault("PYSPARK_SUBMIT_ARGS", " ".join(f"--conf {k}={v}" for k, v in SMALL.items()) + " pyspark-shell")

# Hundreds of processes import the engine: half of that is compiling, where an environment forbids to keep the result.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests import much that stays: the collector, which goes through all of it, need not look so often.
gc.set_threshold(20_000, 20, 20)
start_processes_quickly()
use_class_archive()

pytest_plugins = [
    "fixtures.airflow_files",
    "fixtures.browser",
    "fixtures.object_stores",
    "fixtures.pages",
    "fixtures.postgres",
    "fixtures.power_cut",
    "fixtures.spark",
]

_AIRFLOWS = "tests/end_to_end/"
_UNIT = "tests/unit/"
_INDEPENDENT = ("test_apply_paths.py", "test_choice_of_path.py")
_TOGETHER = {"test_killed_services.py": "test_slices.py"}
"""A file that uses what another one has started, and comes behind it."""
_LONGEST = [
    "test_slices",
    "test_killed_services",
    "test_apply_paths",
    "test_example_dags",
    "test_maintain",
    "test_crash_safety",
    "test_take_over",
    "test_power_cut",
    "test_foreign_writes",
    "test_reload",
    "test_wait",
    "test_rebuild",
    "test_load_beside",
    "test_cluster",
    "test_choice_of_path",
    "test_marked_rows",
    "test_wait_at_standby",
    "test_durability",
    "test_clean_stop",
    "test_failover",
    "test_spark_link",
    "test_preapply",
    "test_slot_loss",
    "test_movements",
    "test_load_partitions",
    "test_partitions",
    "test_server_shutdown",
    "test_verify",
    "test_readers_of_stores",
    "test_replicate_control",
    "test_toast",
]


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A file's tests stay together, so that what they share is made once; also those of two files. Where those of a
    long file share nothing, each may go anywhere."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder, _, name = file.rpartition("/")
        return nodeid if name in _INDEPENDENT else f"{folder}/{_TOGETHER.get(name, name)}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile | None:
    return _ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts an Airflow and the longest files first: one that begins late would keep all others waiting. Unit
    tests last: they never wait, and so fill what time the others leave at the end."""
    rank = {name: number for number, name in enumerate(_LONGEST)}

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        is_airflows, is_unit = (item.nodeid.startswith(folder) for folder in (_AIRFLOWS, _UNIT))
        return is_unit, not is_airflows, rank.get(item.path.stem, len(rank))

    items.sort(key=place)
