"""What is wrong, or worth a warning, at the source, the lake or in the file: said so that a person can act.

Whoever inspects something returns these and never raises at the first one: `check` shows all of them at once,
and a command that is about to change something refuses with all errors in one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from headwater.errors import Refused

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """`code` is stable and meant for programs; `where` names the table, setting, slot or key in the file."""

    code: str
    severity: Severity
    where: str
    message: str
    remedy: str = ""

    @property
    def is_error(self) -> bool:
        return self.severity == "error"

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}. What to do: {self.remedy}" if self.remedy else text


def error(code: str, where: str, message: str, remedy: str = "") -> Problem:
    return Problem(code, "error", where, message, remedy)


def warning(code: str, where: str, message: str, remedy: str = "") -> Problem:
    return Problem(code, "warning", where, message, remedy)


def refuse_errors(problems: Iterable[Problem]) -> None:
    """Raise `Refused` with every error among `problems` in one message; return when there is none.

    One error keeps its own code, place and remedy; of several the code is `check_failed`.
    """
    errors = [problem for problem in problems if problem.is_error]
    if not errors:
        return
    if len(errors) == 1:
        [one] = errors
        raise Refused(one.message, code=one.code, where=one.where, remedy=one.remedy)
    lines = "\n".join(f"  - [{problem.code}] {problem}" for problem in errors)
    raise Refused(f"{len(errors)} problems stand in the way, nothing was changed:\n{lines}", code="check_failed")
