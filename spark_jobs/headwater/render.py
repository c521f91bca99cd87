"""Results of commands for a person: one table per command, made from the same object that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

_COLUMNS = {
    "load": ("state", "rows", "bytes", "seconds", "capture_lsn"),
    "reload": (
        *("state", "rows", "replaced_rows", "bytes", "seconds", "capture_lsn"),
        *("missing", "extra", "different", "unsettled", "not_repaired", "reasons"),
    ),
    "replicate": ("state", "changes"),
    "pause": ("state",),
    "resume": ("state",),
    "wait": ("state", "version", "applied_lsn", "gap_bytes", "reason"),
    "status": ("state", "applied_lsn", "version", "rows", "lag_bytes", "lag_seconds", "reason", "remedy"),
    "maintain": (
        "files_before",
        "files_after",
        "files_removed",
        "bytes_removed",
        "log_entries_removed",
        "checkpoint",
        "horizon",
        "kept_for",
        "skipped",
        "error",
    ),
    "validate": ("success", "rows", "mode", "failed", "keys", "state", "reason"),
    "waits": ("runs", "satisfied", "p50", "p95", "longest", "last", "last_at"),
    "verify": ("rows", "missing", "extra", "different", "repaired", "not_repaired", "keys"),
}


def render(command: str, result: dict[str, Any], out: TextIO) -> None:
    """Writes `result` of `command` to `out`."""
    from rich.console import Console
    from rich.table import Table

    # Into a file or pipe nothing is cut or folded: there is no width to respect.
    console = Console(file=out, highlight=False, markup=False, width=None if out.isatty() else 1000)
    if command == "check":
        _render_check(console, result)
        return
    tables = result.get("tables") or {}
    grids = {"table": (tables, _COLUMNS.get(command, ()))}
    if result.get("waits"):
        grids["wait"] = ({_wait_of(one): one for one in result["waits"]}, _COLUMNS["waits"])
    if result.get("stages"):
        grids["stage"] = (result["stages"], ("rate", "busy", "latency_seconds"))
    summary = [
        f"{key}: {_cell(value)}"
        for key, value in result.items()
        if key not in ("tables", "stages", "waits") and value not in (None, {})
    ]
    for first, (rows, wanted) in grids.items():
        columns = [column for column in wanted if any(row.get(column) is not None for row in rows.values())]
        grid = Table(first, *columns, box=None, pad_edge=False)
        for name, row in rows.items():
            grid.add_row(*_texts([name, *(row.get(column) for column in columns)]))
        if rows:
            console.print(grid)
    for line in summary:
        console.print(line, soft_wrap=True)


def _render_check(console: Any, result: dict[str, Any]) -> None:
    for problem in result["problems"]:
        where = f"{problem['where']}: " if problem["where"] else ""
        console.print(f"{problem['severity']}: {where}{problem['message']} [{problem['code']}]", soft_wrap=True)
        if problem["remedy"]:
            console.print(f"  what to do: {problem['remedy']}", soft_wrap=True)
    console.print("ready" if result["ok"] else "not ready")


def _wait_of(one: dict[str, Any]) -> str:
    return f"{one['who']}: {one['requirement']} of {', '.join(one['tables']) or 'all tables'}"


def _texts(values: Iterable[Any]) -> Iterable[Any]:
    from rich.text import Text

    # Text, not str: a table may be called [bold].
    return (Text(_cell(value)) for value in values)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_cell(item) for item in value)
    return str(value)
