"""What `headwater status` shows a person: health, tables by need, what to do; on one screen, and nothing lost."""

from __future__ import annotations

import io
import json
import re
import threading
from typing import Any

import pytest

from headwater.terminal.live import live
from headwater.terminal.render import render

RETRYING = {"since": "2026-03-01T12:00:00Z", "attempts": 2, "reason": "no space is left"}
REASON = "its columns changed at the source: " + "a long story, " * 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns and 24 lines."""
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)


def table(state: str = "active", lag: float | None = 0.4, **more: Any) -> dict[str, Any]:
    known = {"version": 12, "applied_lsn": "16/B374D848", "rows": 1000, "retrying": None, "late": None}
    said = {"reason": "", "remedy": "", "freshness_seconds": None}
    return {"state": state, "lag_seconds": lag, **known, **said, **more}


def shown(tables: dict[str, dict[str, Any]], level: str = "ok", remedy: str = "", **more: Any) -> dict[str, Any]:
    return {
        "pipeline": "shop",
        "health": {"level": level, "sentence": f"The pipeline is {level}.", "remedy": remedy},
        "running": True,
        "tables": tables,
        "loads": [],
        "stages": {"write": {"rate": 5 * 1048576.0, "busy": 0.93, "latency_seconds": 0.21}},
        "bottleneck": "write",
        "epoch": 7,
        "generation": 2,
        "position": {"lsn": "16/B374D848", "timeline": 1, "system_id": "7"},
        "durable_position": None,
        "read_position": "16/B374D900",
        "lag_bytes": 184,
        "slot": {"name": "headwater_shop", "confirmed_lsn": None, "retained_wal_bytes": 4096, "wal_status": "reserved"},
        **more,
    }


def lines_of(result: dict[str, Any], out: io.StringIO | None = None, *, verbose: bool = False) -> list[str]:
    out = out or io.StringIO()
    render("status", result, out, verbose=verbose)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_health_comes_first_and_what_to_do_second() -> None:
    lines = lines_of(shown({"a": table()}, "stopped", "headwater replicate shop.yaml"))
    assert lines[:2] == ["shop: The pipeline is stopped.", "  what to do: headwater replicate shop.yaml"]


def test_what_needs_a_person_stands_above_what_does_not() -> None:
    tables = {
        "a": table(lag=0.2),
        "b": table(lag=7.0),
        "c": table(lag=95.0, late=True, freshness_seconds=60.0),
        "d": table("catching up", reason="it was loaded"),
        "e": table(retrying=RETRYING),
        "f": table("new", None, rows=None),
        "g": table("suspended", None, reason="the column x is now text", remedy="headwater reload shop.yaml --table g"),
    }
    lines = lines_of(shown(tables, "degraded", "headwater doctor shop.yaml"))
    start = next(index for index, line in enumerate(lines) if line.startswith("table"))
    assert [line.split()[0] for line in lines[start + 1 : start + 8]] == ["g", "d", "f", "e", "c", "a", "b"]
    assert any(line.split()[2:] == ["2", "min", "(late:", "1", "min", "allowed)", "1,000"] for line in lines)
    below = lines[start + 8 :]
    assert "g is suspended: the column x is now text" in below
    assert "  what to do: headwater reload shop.yaml --table g" in below
    assert "e fails and is tried again: no space is left" in below
    assert not any("active" in line for line in below)


def test_what_helps_the_pipeline_is_not_said_again_of_the_table() -> None:
    remedy = "headwater reload shop.yaml --table g"
    lines = lines_of(shown({"g": table("suspended", None, reason="why", remedy=remedy)}, "degraded", remedy))
    assert sum(remedy in line for line in lines) == 1


def test_two_hundred_tables_fit_a_screen_and_a_file_gets_all(small: None) -> None:
    tables = {f"t{number:03}": table(lag=number / 1000) for number in range(200)}
    lines = lines_of(shown(tables), Terminal())
    assert len(lines) <= 24
    assert lines[-1] == "and 182 more, active, at most 0.2 s behind; --verbose lists them"
    assert len(lines_of(shown(tables), Terminal(), verbose=True)) > 200
    assert len(lines_of(shown(tables))) > 200


def test_tables_fit_a_terminal_and_lose_nothing(small: None) -> None:
    name = "public.a_rather_long_name_of_a_table_that_somebody_has_made_up_for_a_test_of_widths"
    suspended = table("suspended", 12345.678, rows=1234567890, reason=REASON, remedy="headwater load x.yaml")
    lines = lines_of(shown({name: suspended}, "degraded"), Terminal(), verbose=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("table"))
    end = next(index for index, line in enumerate(lines) if line.startswith(f"{name} is suspended"))
    assert max(map(len, lines[start:end])) <= 80
    width = lines[start].index("state")
    assert re.sub(r"\s", "", "".join(line[:width] for line in lines[start + 1 : end])) == name
    assert f"{name} is suspended: {REASON}".rstrip() in lines
    assert "  what to do: headwater load x.yaml" in lines


def test_positions_and_stages_are_for_those_who_want_them() -> None:
    short, long = lines_of(shown({"a": table()})), lines_of(shown({"a": table()}), verbose=True)
    assert not any("16/B3" in line or "write" in line for line in short)
    assert "published up to: 16/B374D848" in long
    assert "bottleneck: write" in long
    assert any(line.startswith("where the time goes") for line in long)
    ended = lines_of(shown({"a": table()}, running=False), verbose=True)
    assert any(line.startswith("where the time went before the driver ended") for line in ended)


def test_top_shows_it_again_and_again_for_a_program_too() -> None:
    stop, looks, out = threading.Event(), iter(range(3)), io.StringIO()

    def look() -> dict[str, Any]:
        if next(looks) == 2:
            stop.set()
        return shown({"a": table()})

    live(look, out, stop, every=0, as_json=True, verbose=False)
    assert [json.loads(line)["pipeline"] for line in out.getvalue().splitlines()] == ["shop"] * 3


LOADED = {"state": "catching up", "rows": 1200, "bytes": 10, "seconds": 0.5, "capture_lsn": "0/1"}


@pytest.mark.parametrize(
    ("command", "result", "said"),
    [
        (
            "wait",
            {"outcome": "satisfied", "waited_seconds": 0.84, "epoch": 7, "target": "0/300", "tables": {}},
            ["Fresh after 0.8 s: epoch 7 holds everything up to 0/300.", "epoch: 7", "target: 0/300"],
        ),
        (
            "wait",
            {
                "outcome": "not_running",
                "waited_seconds": 60.0,
                "reason": "replication is stopped, no driver since 12:03 UTC",
                "remedy": "headwater replicate shop.yaml",
                "tables": {},
            },
            [
                "Not fresh after 1 min (not running): replication is stopped, no driver since 12:03 UTC.",
                "  what to do: headwater replicate shop.yaml",
            ],
        ),
        (
            "wait",
            {
                "error": {"code": "not_replicated", "message": "public.a is new", "where": "", "remedy": ""},
                "outcome": "not_replicated",
                "waited_seconds": 0.0,
                "reason": "public.a is new",
                "remedy": "headwater load shop.yaml",
                "tables": {},
            },
            ["Not fresh after 0 s (not replicated): public.a is new.", "  what to do: headwater load shop.yaml"],
        ),
        (
            "load",
            {"tables": {"public.a": LOADED, "public.b": LOADED}, "skipped": ["public.b"], "seconds": 2.44},
            [
                "Loaded 1 table with 1,200 rows in 2.4 s; 1 table is loaded already.",
                "table    state       rows bytes seconds read at",
                "public.a catching up 1200 10    0.5     0/1",
                "public.b catching up 1200 10    0.5     0/1",
            ],
        ),
        (
            "load",
            {"tables": {"public.a": {**LOADED, "state": "suspended"}}, "skipped": [], "seconds": 1.0},
            [
                "Loaded 0 tables with 0 rows in 1 s; 1 table is suspended.",
                "table    state     rows bytes seconds read at",
                "public.a suspended 1200 10    0.5     0/1",
            ],
        ),
        (
            "load",
            {"tables": {"public.a": LOADED, "public.b": LOADED}, "skipped": ["public.a", "public.b"], "seconds": 0.2},
            [
                "Nothing to load: 2 tables are loaded already. With --again they are loaded once more.",
                "table    state       rows bytes seconds read at",
                "public.a catching up 1200 10    0.5     0/1",
                "public.b catching up 1200 10    0.5     0/1",
            ],
        ),
        (
            "replicate",
            {
                "epochs": 3,
                "transactions": 20,
                "changes": 1000,
                "position": {"system_id": "7", "timeline": 1, "lsn": "0/200"},
                "stopped_by": "seconds",
                "handed_over": True,
                "tables": {},
            },
            [
                "Ended after its --max-seconds: 1,000 changes of 20 transactions in 3 epochs; the lake holds everything"
                " up to 0/200; another driver has taken over."
            ],
        ),
        (
            "resume",
            {"paused": None, "tables": {}, "done": "Resumed shop", "next": "headwater replicate shop.yaml"},
            ["Resumed shop.", "  next: headwater replicate shop.yaml"],
        ),
        (
            "drop",
            {"dropped": ["slot s"], "kept": ["publication p"]},
            [
                "Dropped at the source: slot s. The lake stays. publication p stays: it was not made for this "
                "pipeline, or the role does not own it."
            ],
        ),
    ],
)
def test_a_command_says_first_what_came_of_it(command: str, result: dict[str, Any], said: list[str]) -> None:
    out = io.StringIO()
    render(command, result, out)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == said
