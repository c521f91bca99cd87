"""Fixtures of all tests, one module per subject below `tests/fixtures/`."""

from __future__ import annotations

import os

# A test's JVM lives for seconds: compiling for long runs costs more than it saves (a MERGE: 4 against 6 CPU-s).
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

pytest_plugins = ["fixtures.postgres", "fixtures.spark"]
