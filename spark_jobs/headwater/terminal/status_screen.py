"""A pipeline on one screen of a terminal: its health, its tables with what needs a person first, and what to do.

Made from the object that `status --json` prints. `verbose` adds positions, versions and where the time goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from headwater.pipeline_file.quantities import seconds_text, size_text
from headwater.terminal.bars import line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STYLES: Final = {"ok": "green", "late": "yellow", "degraded": "red", "stopped": "red", "paused": "cyan"}
_RANK: Final = ("suspended", "loading", "catching up", "new", "active", "removed")
_OTHER_LINES: Final = 6  # of a screen: health, headings, the rest of the tables in one line, the prompt
_BEHIND: Final = 10.0  # seconds
_UNKNOWN: Final = "–"


def status_screen(
    shown: Mapping[str, Any], *, verbose: bool = False, size: tuple[int, int] | None = None
) -> list[RenderableType]:
    """The parts, one below the other: sentences (Text), which are not to be folded, and tables. `size`: columns and
    lines of the terminal; None: all tables are wanted, as `verbose` wants them."""
    from rich.text import Text

    health, tables = shown["health"], dict(sorted(shown["tables"].items(), key=_need))
    parts: list[RenderableType] = [
        Text.assemble((f"{shown['pipeline']}: ", "bold"), (health["sentence"], _STYLES[health["level"]]))
    ]
    if health["remedy"]:
        parts.append(Text(f"  what to do: {health['remedy']}"))
    below = _sentences({name: table for name, table in tables.items() if name != health.get("table")}, health["remedy"])
    below += [f"{load['what']} since {load['since']}: {line(load)}" for load in shown["loads"]]
    room = len(tables)
    if size is not None and not verbose:
        columns, lines = size
        room = max(3, lines - _OTHER_LINES - sum(1 + len(sentence) // columns for sentence in below))
    if tables:
        parts += [Text(""), _tables(dict(list(tables.items())[:room]), verbose=verbose)]
    if rest := list(tables.items())[room:]:
        parts.append(Text(f"and {_rest(rest)}; --verbose lists them", "dim"))
    parts += map(Text, below)
    return [*parts, *_details(shown)] if verbose else parts


def _need(item: tuple[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """What needs a person first, then what is farthest behind. Tables that keep up keep their places."""
    name, table = item
    rank = _RANK.index(table["state"]) if table["state"] in _RANK else len(_RANK)
    return rank, table["retrying"] is None, not table["late"], -((table["lag_seconds"] or 0.0) // _BEHIND), name


def _tables(tables: Mapping[str, Mapping[str, Any]], *, verbose: bool) -> Table:
    columns = ["table", "state", "behind", "rows", *(["version", "applied position"] if verbose else [])]
    rows = [
        [
            name,
            table["state"],
            _behind(table),
            f"{table['rows']:,}" if table.get("rows") is not None else "",
            *([str(table["version"] or ""), table["applied_lsn"] or ""] if verbose else []),
        ]
        for name, table in tables.items()
    ]
    return grid(columns, rows)


def grid(columns: list[str], rows: list[list[str]]) -> Table:
    """A table without lines that fits the terminal; columns in which nobody has anything are left out."""
    from rich.table import Table
    from rich.text import Text

    shown = [index for index in range(len(columns)) if not index or any(row[index] for row in rows)]
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index in shown:
        # A narrow terminal folds, the widest first, and loses nothing; headings fold between their words.
        made.add_column(columns[index], overflow="fold")
    for row in rows:
        # Text, not str: a table may be called [bold].
        made.add_row(*(Text(row[index]) for index in shown))
    return made


def _behind(table: Mapping[str, Any]) -> str:
    if table["state"] in ("new", "removed"):
        return ""
    if table["lag_seconds"] is None:
        return _UNKNOWN
    late = f" (late: {seconds_text(table['freshness_seconds'])} allowed)" if table["late"] else ""
    return f"{seconds_text(table['lag_seconds'])}{late}"


def _sentences(tables: Mapping[str, Mapping[str, Any]], remedy: str) -> list[str]:
    """Why tables are not in step, and what helps where that is not what helps the pipeline."""
    found = []
    for name, table in tables.items():
        if table["state"] in ("active", "removed", "new"):
            reason = f"fails and is tried again: {table['retrying']['reason']}" if table["retrying"] else ""
        else:
            reason = f"{table['state']}: {table['reason']}" if table["reason"] else ""
        if reason:
            found.append(f"{name} is {reason}" if not reason.startswith("fails") else f"{name} {reason}")
        if reason and table["remedy"] and table["remedy"] != remedy:
            found.append(f"  what to do: {table['remedy']}")
    return found


def _rest(rest: list[tuple[str, Mapping[str, Any]]]) -> str:
    states = sorted({table["state"] for _, table in rest})
    lags = [table["lag_seconds"] for _, table in rest if table["lag_seconds"] is not None]
    behind = f", at most {seconds_text(max(lags))} behind" if lags else ""
    return f"{len(rest)} more, {' or '.join(states)}{behind}"


def _details(shown: Mapping[str, Any]) -> list[RenderableType]:
    """Where the time goes and where everything stands."""
    from rich.text import Text

    parts: list[RenderableType] = []
    if shown["stages"]:
        heading = "where the time goes" if shown["running"] else "where the time went before the driver ended"
        rows = [
            [
                name,
                f"{stage['busy']:.0%}" if stage["busy"] is not None else "",
                f"{size_text(stage['rate'])}/s" if stage["rate"] is not None else "",
                seconds_text(stage["latency_seconds"]) if stage["latency_seconds"] is not None else "",
            ]
            for name, stage in shown["stages"].items()
        ]
        parts += [Text(""), grid([heading, "busy", "speed while busy", "of the newest epoch"], rows)]
    position, durable = shown["position"] or {}, shown["durable_position"] or {}
    slot = shown["slot"]
    kept = slot["retained_wal_bytes"]
    known = {
        "epoch": f"{shown['epoch']} of generation {shown['generation']}" if shown["epoch"] else "",
        "published up to": position.get("lsn", ""),
        "safe from a power cut up to": durable.get("lsn", ""),
        "read up to": shown["read_position"] or "",
        "behind": size_text(shown["lag_bytes"]) + " of the log" if shown["lag_bytes"] is not None else "",
        "slot": slot["name"],
        "confirmed up to": slot["confirmed_lsn"] or "",
        "log kept for the slot": size_text(kept) if kept is not None else "",
        "slot's state": slot.get("reason") or slot["wal_status"] or "",
        "bottleneck": shown["bottleneck"] or "",
    }
    return [*parts, Text(""), *(Text(f"{name}: {value}") for name, value in known.items() if value)]
