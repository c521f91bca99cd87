"""The dashboard of the docs: its form, and its queries, which Prometheus' own tool reads. No Grafana has shown it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from fixtures.promtool import promtool
from headwater.lake.health import LEVELS
from headwater.lake.registry import State
from headwater.monitor.metrics import METRICS

FILE = Path(__file__).resolve().parents[3] / "docs" / "grafana.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
LABELS = {metric.sample: set(metric.labels) for metric in METRICS}
COLUMNS = 24

_SELECTOR = re.compile(r"(headwater_\w+)\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_BY = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)\s*\(")


def expressions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of each query its panel's title, its expression and all that it says."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target


def test_it_can_be_imported_asks_for_a_prometheus_and_lets_one_choose_pipelines() -> None:
    (asked,) = DASHBOARD["__inputs"]
    assert (asked["name"], asked["type"], asked["pluginId"]) == ("DS_PROMETHEUS", "datasource", "prometheus")
    (variable,) = DASHBOARD["templating"]["list"]
    assert variable["name"] == "pipeline"
    assert variable["query"]["query"] == variable["definition"] == "label_values(headwater_pipeline_up, pipeline)"
    assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")
    sources = [variable, *PANELS, *(target for _, _, target in expressions())]
    assert all(one["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"} for one in sources)
    assert {panel["type"] for panel in PANELS} <= {part["id"] for part in DASHBOARD["__requires"]}
    assert (DASHBOARD["id"], DASHBOARD["schemaVersion"]) == (None, 39)
    assert (DASHBOARD["time"], DASHBOARD["refresh"]) == ({"from": "now-6h", "to": "now"}, "30s")


def test_each_panel_has_a_place_of_its_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["w"] > 0
        assert place["h"] > 0
        assert 0 <= place["x"] <= COLUMNS - place["w"], panel["title"]
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_each_panel_says_what_it_shows_and_when_to_act(panel: dict[str, Any]) -> None:
    assert panel["title"]
    said = panel["description"]
    assert re.fullmatch(r"[A-Z][^:]+: if .+\.", said), said  # what it shows: if it is so, do this
    assert ". " not in said
    assert "<" not in said  # Grafana takes it for HTML
    assert panel["targets"]
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)
    assert all(target["expr"].strip() for target in panel["targets"])


def test_each_query_asks_for_metrics_that_exist_by_labels_that_they_have() -> None:
    for title, expression, target in expressions():
        selected = list(_SELECTOR.finditer(expression))
        assert selected, title
        for found in selected:
            name, matchers = found[1], _MATCHER.findall(found[2] or "")
            assert name in LABELS, f"{title}: {name}"
            assert {label for label, _, _ in matchers} <= LABELS[name], f"{title}: {found[0]}"
            assert ("pipeline", "=~", "$pipeline") in matchers, f"{title} does not heed the choice: {found[0]}"
            allowed = {"level": set(LEVELS), "state": set(get_args(State)), "pipeline": {"$pipeline"}}
            assert all(value in allowed[label] for label, _, value in matchers), f"{title}: {found[0]}"
        kept: set[str] = set()
        for aggregation in _BY.finditer(expression):
            labels = set(re.findall(r"\w+", aggregation[1]))
            for found in _SELECTOR.finditer(_in_parentheses(expression, aggregation.end())):
                assert labels <= LABELS[found[1]], f"{title}: {aggregation[0]} of {found[1]}"
            kept |= labels
        shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
        assert shown <= kept, f"{title}: {target['legendFormat']}"


def test_the_colours_of_health_and_state_are_those_of_their_values() -> None:
    health = _panel("Health")
    (target,) = health["targets"]
    numbers = dict(re.findall(r'level="(\w+)"\} == 1\) \* (\d)', target["expr"]))
    assert set(numbers) == set(LEVELS)
    named = {mapped["text"]: number for number, mapped in _mappings(health["fieldConfig"]["defaults"]).items()}
    assert {level: named[level] for level in LEVELS} == numbers
    (unreadable,) = set(named) - set(LEVELS)
    assert f"== 0) + {named[unreadable]}" in target["expr"]
    (states,) = (
        {
            name: value
            for one in override["properties"]
            if one["id"] == "mappings"
            for name, value in _mapped(one["value"])
        }
        for override in _panel("Tables by lag")["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == "State"
    )
    assert set(states) == set(get_args(State))


def test_the_columns_of_each_table_are_those_of_its_queries() -> None:
    tables = [panel for panel in PANELS if panel["type"] == "table"]
    assert tables
    for panel in tables:
        labels = {label for t in panel["targets"] for by in _BY.findall(t["expr"]) for label in re.findall(r"\w+", by)}
        columns = {"Time"} | labels | {f"Value #{target['refId']}" for target in panel["targets"]}
        organized = panel["transformations"][-1]["options"]
        hidden, renamed = {name for name, out in organized["excludeByName"].items() if out}, organized["renameByName"]
        assert hidden <= columns
        assert hidden | set(renamed) == columns == set(organized["indexByName"])
        named = [override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]]
        named += [sort["displayName"] for sort in panel["options"]["sortBy"]]
        assert set(named) <= set(renamed.values()), panel["title"]
        assert all(target["format"] == "table" and target["instant"] for target in panel["targets"])


def test_prometheus_accepts_each_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"dashboard:query:{number}", "expr": _filled(expression)}
        for number, (_, expression, _) in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


def test_what_the_first_row_shows_is_what_the_metrics_say(tmp_path: Path) -> None:
    levels = {"fine": "ok", "still": "paused", "slow": "late", "sick": "degraded", "down": "stopped"}
    series = {
        f'headwater_pipeline_health{{pipeline="{name}", level="{level}", instance="{instance}"}}': int(level == own)
        for name, own in levels.items()
        for level in LEVELS
        for instance in ("one", "two")  # two API servers say the same
    }
    series |= {f'headwater_pipeline_up{{pipeline="{name}", instance="one"}}': 1 for name in levels}
    series |= {'headwater_pipeline_up{pipeline="lost", instance="one"}': 0}
    suspended = {
        f'headwater_pipeline_tables{{pipeline="sick", state="suspended", instance="{instance}"}}': 2
        for instance in ("one", "two")
    }
    named = {
        mapped["text"]: int(value) for value, mapped in _mappings(_panel("Health")["fieldConfig"]["defaults"]).items()
    }
    unreadable = max(named.values())
    health = {f'{{pipeline="{name}"}}': named[level] for name, level in levels.items()}
    health['{pipeline="lost"}'] = unreadable
    cases = [
        (series, "Health", health),
        (series, "Suspended tables", {"{}": 0}),
        (series | suspended, "Suspended tables", {"{}": 2}),
        ({'headwater_pipeline_up{pipeline="lost"}': 0}, "Suspended tables", {}),  # nor where none can be read
        ({}, "Suspended tables", {}),  # no metrics arrive: nothing, and not a green zero
    ]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": f"{value}+0x10"} for name, value in given.items()],
            "promql_expr_test": [
                {
                    "expr": _filled(_panel(title)["targets"][0]["expr"]),
                    "eval_time": "5m",
                    "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
                }
            ],
        }
        for given, title, expected in cases
    ]
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def _filled(expression: str) -> str:
    """As Grafana fills it in when all pipelines are chosen."""
    filled = expression.replace("$pipeline", ".*").replace("$__rate_interval", "5m")
    assert "$" not in filled
    return filled


def _panel(title: str) -> dict[str, Any]:
    (found,) = (panel for panel in PANELS if panel["title"] == title)
    return found


def _mappings(field: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(_mapped(field["mappings"]))


def _mapped(mappings: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for mapping in mappings:
        assert mapping["type"] == "value"
        yield from mapping["options"].items()


def _in_parentheses(text: str, start: int) -> str:
    """What follows `start`, which is behind an opening parenthesis, up to the closing one."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    raise AssertionError(f"a parenthesis is not closed: {text}")
