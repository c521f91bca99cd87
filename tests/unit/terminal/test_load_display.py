"""What a person sees of a load: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from typing import Any

import pytest

from headwater.terminal.bars import line, load_display


def _shown(done: float, rows: int) -> dict[str, Any]:
    figures = {"rows_per_second": 1000.0, "bytes_per_second": 1e6, "eta_seconds": 42.0}
    table = {"table": 'public."[bold]"', "part": None, "state": "reading", "rows": rows, "bytes": 3 << 20}
    whole = {"what": "load", "tables": 3, "tables_done": 1, "rows": rows + 7, "bytes": 4 << 20, "done": done / 2}
    return {**whole, **figures, "running": [{**table, "done": done, **figures, "snapshot_seconds": 1.0}]}


def test_a_terminal_shows_a_bar_for_each_table_and_the_lines_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with load_display() as (tell, show):
            assert show is not None
            show(_shown(0.25, 1234))
            tell("public.done: 7 rows")
            show(_shown(0.5, 2345))
    # The kernel hands on what was written when it gets to it: all of it is there when the terminal has ended.
    text = b"".join(iter(partial(_read, ours), b"")).decode()
    os.close(ours)
    assert "public.done: 7 rows" in text
    for word in ('public."[bold]"', "50%", "reading", "2,345 rows", "3.0 MiB", "42 s left", "1 of 3 tables"):
        assert word in text


def _read(terminal: int) -> bytes:
    """What comes next; nothing when the other side has been closed."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def test_elsewhere_there_are_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with load_display() as (tell, show):
        assert show is None
        tell(line(_shown(0.5, 2345)))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        '1 of 3 tables, 25%, 2,352 rows, 4.0 MiB, 1,000 rows/s, about 42 s left; now public."[bold]" (reading, 50%)\n'
    )
