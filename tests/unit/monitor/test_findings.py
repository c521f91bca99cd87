"""What doctor says of facts that no test can wait for: little room, long logs, tables that are late."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import Refused, SourceUnreachable
from headwater.lake.look import Look
from headwater.monitor.examination import Examined, SourceAnswers
from headwater.monitor.findings import exit_status, findings
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.position import Position
from headwater.source.slot import SlotState
from headwater.waiting.source_state import SourceState

ORDERS = "public.orders"


def table(state: str = "active", **more: Any) -> dict[str, Any]:
    return {"state": state, "reason": "", "since": None, "remedy": "", "late": None, "retrying": None, **more}


@pytest.fixture
def seen(tmp_path: Path) -> Examined:
    """A pipeline in step whose driver lives, and whose source did not answer just now."""
    file = tmp_path / "my shop.yaml"
    file.write_text(
        f"pipeline: shop\nsource: {{connection: host=nowhere}}\nlake: {{root: '{tmp_path}'}}\ntables: [{ORDERS}]\n"
    )
    return Examined(
        pipeline=load_pipeline(file),
        known=None,
        look=Look(None, {}),
        newest=None,
        answers=None,
        failure=None,
        running=True,
        lag=(None, None),
        tables={ORDERS: table()},
        applied={},
        unchecked={},
        small={},
        leases=(),
        free={"lake": ("/data", 1 << 40), "spilled changes": ("/tmp", 1 << 40)},
    )


def test_errors_come_before_warnings_and_what_stops_all_before_what_stops_one(seen: Examined) -> None:
    sick = replace(
        seen,
        failure=SourceUnreachable("nobody listens"),
        running=False,
        tables={
            ORDERS: table("suspended", reason="it diverged", remedy="headwater verify PIPELINE.yaml --repair"),
            "public.lines": table(),
            "public.fresh": table("new"),
        },
        unchecked={ORDERS: 1001},
        small={ORDERS: 16, "public.lines": 15},
        free={"lake": ("/data", 1 << 20)},
    )
    found = findings(sick)
    assert [finding.code for finding in found] == [
        *("source_unreachable", "not_running", "suspended"),
        *("not_replicated", "disk_low", "long_log", "small_files"),
    ]
    assert found[-1].where == ORDERS
    assert all(finding.evidence and finding.remedy for finding in found[1:])
    assert found[2].remedy == f"headwater verify '{sick.pipeline.file}' --repair"
    assert "1.0 MiB are free" in found[4].message
    assert exit_status(sick, found) == 4


def test_past_the_bound_tables_are_compared_and_not_loaded_again(seen: Examined) -> None:
    slot = SlotState("headwater_shop", "pgoutput", "x", True, 1, 0x200, 0x100, 3 << 30, "reserved", None, False, None)
    state = SourceState(Position("7", 1, 0x300), (datetime.now(UTC), 0x300), 0.0, slot)
    full = replace(seen, answers=SourceAnswers(state, (), 4 << 30, frozenset(), frozenset()))
    [finding] = findings(full)
    assert (finding.code, finding.severity) == ("wal_ceiling", "warning")
    assert "every table has to be compared (headwater verify --repair)" in finding.message


def test_a_late_table_is_told_with_its_lag_and_no_error(seen: Examined) -> None:
    late = replace(seen, tables={ORDERS: table(late=True, lag_seconds=300.0, freshness_seconds=60.0)})
    [finding] = found = findings(late)
    assert (finding.code, finding.severity, finding.where) == ("late", "warning", ORDERS)
    assert "300 s behind, its freshness 60 s" in finding.message
    assert exit_status(late, found) == 0


@pytest.mark.parametrize(("failure", "expected"), [(SourceUnreachable("gone"), 1), (Refused("no such password"), 2)])
def test_a_source_that_does_not_answer_ends_as_its_error_does(
    seen: Examined, failure: SourceUnreachable | Refused, expected: int
) -> None:
    silent = replace(seen, failure=failure)
    assert exit_status(silent, findings(silent)) == expected
