"""Fixtures of all tests, one module per subject below `tests/fixtures/`."""

from __future__ import annotations

import os

from headwater.session import SHORT_LIVED_JVM

os.environ.setdefault("JDK_JAVA_OPTIONS", SHORT_LIVED_JVM)

pytest_plugins = ["fixtures.airflow_files", "fixtures.postgres", "fixtures.spark"]
