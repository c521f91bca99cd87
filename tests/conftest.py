"""Fixtures of all tests, one module per subject below `tests/fixtures/`."""

from __future__ import annotations

pytest_plugins = ["fixtures.postgres"]
