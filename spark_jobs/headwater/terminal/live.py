"""The status of a pipeline again and again: on a terminal in place of the last one, as `top` shows processes; else one
below the other, for a log."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TextIO

from headwater.errors import HeadwaterError
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
    from rich.text import Text

    def seen() -> dict[str, Any] | str:
        """Or why there is nothing to see just now: the next look may tell."""
        try:
            return look()
        except (HeadwaterError, OSError) as error:
            return error.message if isinstance(error, HeadwaterError) else f"the lake cannot be read: {error.strerror}"

    def write(found: dict[str, Any] | str) -> None:
        if isinstance(found, str):
            print(found, file=sys.stderr, flush=True)
        elif as_json:
            print(json.dumps(found), file=out, flush=True)
        else:
            render("status", found, out, verbose=verbose)

    every = max(every, _LEAST_SECONDS)
    console = console_on(out)
    if as_json or not console.is_terminal:
        while not stop.is_set():
            write(seen())
            stop.wait(every)
        return
    shown: dict[str, Any] | None = None
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while not stop.is_set():
            found = seen()
            parts: list[Any] = [Text(found, "red"), Text("")] if isinstance(found, str) else []
            shown = shown if isinstance(found, str) else found
            if shown is not None:
                parts += status_screen(shown, verbose=verbose, size=console.size)
            screen.update(Group(*parts), refresh=True)
            stop.wait(every)
    if shown is not None:
        write(shown)
