"""The alert rules of the docs, by Prometheus' own tool: they are rules, and each goes off for what it is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fixtures.promtool import promtool

RULES = Path(__file__).resolve().parents[3] / "docs" / "alerts.yaml"
GIB = 1 << 30
SHOP, ORDERS = 'pipeline="shop"', 'pipeline="shop", table="public.orders"'
GOES_OFF = {
    "HeadwaterPipelineUnreadable": {f"headwater_pipeline_up{{{SHOP}}}": 0},
    "HeadwaterNotRunning": {
        f"headwater_pipeline_running{{{SHOP}}}": 0,
        f"headwater_pipeline_paused{{{SHOP}}}": 0,
        f'headwater_pipeline_tables{{{SHOP}, state="active"}}': 2,
        f'headwater_pipeline_tables{{{SHOP}, state="suspended"}}': 1,
    },
    "HeadwaterDegraded": {f'headwater_pipeline_health{{{SHOP}, level="degraded"}}': 1},
    "HeadwaterLagging": {f"headwater_pipeline_lag_seconds{{{SHOP}}}": 301},
    "HeadwaterTableLate": {
        f"headwater_table_lag_seconds{{{ORDERS}}}": 61,
        f"headwater_table_freshness_seconds{{{ORDERS}}}": 60,
    },
    "HeadwaterTableSuspended": {f'headwater_table_state{{{ORDERS}, state="suspended"}}': 1},
    "HeadwaterLoadStuck": {f'headwater_table_state{{{ORDERS}, state="loading"}}': 1},
    "HeadwaterTableNotLoaded": {f'headwater_table_state{{{ORDERS}, state="new"}}': 1},
    "HeadwaterRetainedWalNearBound": {
        f"headwater_slot_retained_wal_bytes{{{SHOP}}}": 11 * GIB,
        f"headwater_slot_wal_bound_bytes{{{SHOP}}}": 20 * GIB,
    },
    "HeadwaterRetainedWalUnbounded": {f"headwater_slot_retained_wal_bytes{{{SHOP}}}": 21 * GIB},
    "HeadwaterOldTransaction": {f"headwater_source_oldest_transaction_seconds{{{SHOP}}}": 3601},
    "HeadwaterSourceSilent": {f"headwater_source_up{{{SHOP}}}": 0},
    "HeadwaterMetricsMissing": {"headwater_source_up": 1},  # and no headwater_pipeline_up
}
"""Of each rule the series, with one value each, for which it goes off."""
HEALTHY = {
    f"headwater_pipeline_up{{{SHOP}}}": 1,
    f"headwater_pipeline_running{{{SHOP}}}": 1,
    f'headwater_pipeline_health{{{SHOP}, level="ok"}}': 1,
    f'headwater_pipeline_health{{{SHOP}, level="degraded"}}': 0,
    f"headwater_pipeline_lag_seconds{{{SHOP}}}": 2,
    f"headwater_table_lag_seconds{{{ORDERS}}}": 2,
    f"headwater_table_freshness_seconds{{{ORDERS}}}": 60,
    f'headwater_table_state{{{ORDERS}, state="active"}}': 1,
    f"headwater_slot_retained_wal_bytes{{{SHOP}}}": GIB,
    f"headwater_slot_wal_bound_bytes{{{SHOP}}}": 20 * GIB,
    f"headwater_source_oldest_transaction_seconds{{{SHOP}}}": 5,
    f"headwater_source_up{{{SHOP}}}": 1,
}
NOT_RUNNING = {f"headwater_pipeline_running{{{SHOP}}}": 0}
SILENT = [
    (
        "HeadwaterNotRunning",  # paused by a person
        NOT_RUNNING
        | {f"headwater_pipeline_paused{{{SHOP}}}": 1, f'headwater_pipeline_tables{{{SHOP}, state="active"}}': 2},
    ),
    (
        "HeadwaterNotRunning",  # nothing is loaded
        NOT_RUNNING
        | {f'headwater_pipeline_tables{{{SHOP}, state="{state}"}}': 1 for state in ("new", "loading", "removed")},
    ),
]
"""Series for which a rule does not go off."""


def _lasting(series: dict[str, int]) -> list[dict[str, str]]:
    return [{"series": name, "values": f"{value}+0x600"} for name, value in series.items()]


def test_each_rule_goes_off_for_what_it_is_about_and_none_on_a_pipeline_in_order(tmp_path: Path) -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == set(GOES_OFF)
    tests: list[dict[str, Any]] = []
    for rule in rules:
        expected = [{"exp_labels": _labels(rule), "exp_annotations": _annotations(rule)}]
        tests += [_test(rule["alert"], GOES_OFF[rule["alert"]], expected), _test(rule["alert"], HEALTHY, [])]
    tests += [_test(alert, series, []) for alert, series in SILENT]
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def _test(alert: str, series: dict[str, int], alerts: list[dict[str, Any]]) -> dict[str, Any]:
    """At seven hours every rule has lasted long enough."""
    return {
        "interval": "1m",
        "input_series": _lasting(series),
        "promql_expr_test": [],
        "alert_rule_test": [{"eval_time": "420m", "alertname": alert, "exp_alerts": alerts}],
    }


def _labels(rule: dict[str, Any]) -> dict[str, str]:
    """Those of the series that is compared first, and the rule's own."""
    labels = dict(rule["labels"])
    first = next(iter(GOES_OFF[rule["alert"]]))
    for part in first.partition("{")[2].rstrip("}").split(", "):
        if part and rule["alert"] != "HeadwaterMetricsMissing":
            label, value = part.split("=")
            labels[label] = value.strip('"')
    return labels


def _annotations(rule: dict[str, Any]) -> dict[str, str]:
    """As Prometheus fills them in."""
    values = list(GOES_OFF[rule["alert"]].values())
    filled = {}
    for name, text in rule["annotations"].items():
        for label, value in _labels(rule).items():
            text = text.replace(f"{{{{ $labels.{label} }}}}", value)
        text = text.replace("{{ $value | humanizeDuration }}", {301: "5m 1s", 3601: "1h 0m 1s"}.get(values[0], ""))
        filled[name] = text.replace("{{ $value | humanize1024 }}", f"{values[0] / GIB:g}Gi")
    return filled
