"""Both ways of comparing."""

from __future__ import annotations

import pytest

from headwater.delta import small_versions
from headwater.verify import comparison


@pytest.fixture(params=["in this process", "by spark"])
def each_comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs twice: its tables are compared as small ones are, and as large ones are, and by nothing else."""
    other = "SparkComparison"
    if request.param == "by spark":
        monkeypatch.setattr(small_versions, "SMALL_BYTES", 0)
        other = "MemoryComparison"

    def not_this_one(*_: object) -> None:
        pytest.fail(f"{other} was made")

    monkeypatch.setattr(comparison, other, not_this_one)
