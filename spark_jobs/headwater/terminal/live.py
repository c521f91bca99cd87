"""The status of a pipeline again and again: on a terminal in place of the last one, as `top` shows processes; else one
below the other, for a log."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, Final, TextIO

from headwater.terminal.render import console_on, render
from headwater.terminal.status_screen import status_screen

_LEAST_SECONDS: Final = 0.2


def live(
    look: Callable[[], dict[str, Any]],
    out: TextIO,
    stop: threading.Event,
    *,
    every: float,
    as_json: bool,
    verbose: bool,
) -> None:
    """Shows what `look` gives each `every` seconds until `stop`, and leaves the last one on the terminal."""
    from rich.console import Group
    from rich.live import Live

    every = max(every, _LEAST_SECONDS)
    console = console_on(out)
    if as_json or not console.is_terminal:
        while not stop.is_set():
            shown = look()
            if as_json:
                print(json.dumps(shown), file=out, flush=True)
            else:
                render("status", shown, out, verbose=verbose)
            stop.wait(every)
        return
    shown = look()
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while not stop.is_set():
            screen.update(Group(*status_screen(shown, verbose=verbose, size=console.size)), refresh=True)
            stop.wait(every)
            shown = look()
    render("status", shown, out, verbose=verbose)
