"""A load on a terminal: a bar for each table that is being read and one for all, on stderr, above them the lines that
the job says. Where stderr is no terminal there are the lines alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Say = Callable[[str], None]
Show = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def load_display() -> Iterator[tuple[Say, Show | None]]:
    """What a job tells its lines, and how far it is (None: nobody looks)."""
    if not sys.stderr.isatty():
        yield say, None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    # Names are text: a table may be called [bold].
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    console = Console(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=console, transient=True) as progress:
        yield console.print, _Bars(progress).show


def say(line: str) -> None:
    """Progress of a job: a person's business, so never on stdout."""
    print(line, file=sys.stderr, flush=True)


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, shown: dict[str, Any]) -> None:
        running = {table["table"]: table for table in shown["running"]}
        for name in set(self._tasks) - set(running) - {""}:
            self._progress.remove_task(self._tasks.pop(name))
        for name, table in running.items():
            self._bar(name, name, table, table["state"])
        # The last one: made anew, it would stand above tables that come later.
        if "" in self._tasks:
            self._progress.remove_task(self._tasks.pop(""))
        self._bar("", f"{shown['tables_done']} of {shown['tables']} tables", shown, "")

    def _bar(self, key: str, title: str, of: dict[str, Any], state: str) -> None:
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(title, total=1.0, figures="")
        self._progress.update(self._tasks[key], completed=of["done"], figures=_figures(of, state))


def _figures(of: dict[str, Any], state: str) -> str:
    parts = [state] if state else []
    parts += [f"{of['rows']:,} rows", f"{of['bytes'] / (1 << 20):,.1f} MiB"]
    if of["rows_per_second"] is not None:
        parts.append(f"{of['rows_per_second']:,.0f} rows/s")
    if of["eta_seconds"] is not None:
        parts.append(f"{of['eta_seconds']:.0f} s left")
    return "  ".join(parts)


def line(shown: dict[str, Any]) -> str:
    """For a person: `3 of 201 tables, 42 %, 1,200,000 rows, 120.0 MiB, …`."""
    parts = [
        f"{shown['tables_done']} of {shown['tables']} tables",
        f"{shown['done']:.0%}",
        f"{shown['rows']:,} rows",
        f"{shown['bytes'] / (1 << 20):.1f} MiB",
    ]
    if shown["rows_per_second"] is not None:
        parts.append(f"{shown['rows_per_second']:,.0f} rows/s")
    if shown["eta_seconds"] is not None:
        parts.append(f"about {shown['eta_seconds']:.0f} s left")
    now = ", ".join(f"{t['table']} ({t['state']}, {t['done']:.0%})" for t in shown["running"])
    return ", ".join(parts) + (f"; now {now}" if now else "")
