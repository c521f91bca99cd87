"""Questions to a person at a terminal, on stderr: stdout is for the result. Asked again until the answer will do."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from rich.console import Console
from rich.prompt import Confirm
from rich.text import Text

from headwater.terminal.render import render

_T = TypeVar("_T")


class Questions:
    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)

    def ask(self, question: str, read: Callable[[str], _T], default: str = "") -> _T:
        """What `read` makes of the answer; its ValueError is said, and the question comes again."""
        while True:
            hint = f" ({default})" if default else ""
            answer = self._console.input(Text(f"{question}{hint}: ")).strip() or default
            try:
                return read(answer)
            except ValueError as error:
                self._console.print(f"  {error}")

    def show(self, tables: dict[str, Any]) -> None:
        """The tables to choose from, as `render` shows them."""
        render("init", {"tables": tables}, sys.stderr)

    def secret(self, question: str) -> str:
        """By getpass's own prompt: the terminal no longer echoes when it appears, and nothing typed is lost."""
        return getpass.getpass(f"{question}: ").rstrip("\r\n")  # blanks may belong to it

    def confirm(self, question: str) -> bool:
        return Confirm.ask(Text(question), console=self._console, default=True)
