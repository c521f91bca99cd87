"""What a page can do about a remedy: the run of a DAG that does the same as the command.

A remedy is a sentence that begins with a command, or one that says what a person has to do first. Only the former has
a button: what comes behind "then" would fail, or undo itself, if it were done alone.
"""

from __future__ import annotations

import shlex
from typing import Any, Final

_VALUES: Final = frozenset({"--table", "--partition", "--where"})
_FLAGS: Final = frozenset({"--again", "--repair", "--changed"})


def cure_of(remedy: str) -> dict[str, Any] | None:
    """`{"dag", "conf"}`: the DAG `<pipeline>.<dag>` and the conf of its run; None: a page cannot do it."""
    asked = _command(remedy)
    if asked is None:
        return None
    command, options = asked
    tables: list[str] = options.get("--table", [])
    known = set(options)
    if command == "replicate" and not known:
        return {"dag": "replicate", "conf": {}}
    if command == "resume" and not known:
        return {"dag": "resume", "conf": {}}
    if command == "load" and not known:
        return {"dag": "load", "conf": {}}
    if (command, known) in (("load", {"--table", "--again"}), ("resume", {"--table"})):
        return {"dag": "load", "conf": {"tables": tables, "again": True}}
    if command == "verify" and "--repair" in known <= {"--table", "--repair"}:
        return {"dag": "verify", "conf": {"tables": tables, "repair": True}}
    if command == "reload" and known <= {"--table", "--changed"} and "--changed" in known:
        return {"dag": "reload", "conf": {**({"table": tables[0]} if tables else {}), "changed": True}}
    if command == "reload" and "--table" in known <= {"--table", "--partition", "--where"}:
        conf: dict[str, Any] = {"table": tables[0]}
        if "--partition" in known:
            conf["partitions"] = options["--partition"]
        if "--where" in known:
            conf["where"] = options["--where"][0]
        return {"dag": "reload", "conf": conf}
    return None


def _command(remedy: str) -> tuple[str, dict[str, list[str]]] | None:
    """The command that `remedy` begins with, and its options; None where it begins with something else, or has options
    that only a shell takes."""
    try:
        words = shlex.split(remedy.partition(";")[0])
    except ValueError:  # an apostrophe in the words behind the command
        words = remedy.partition(";")[0].split()
    if words[:1] != ["headwater"] or len(words) < 3:
        return None
    options: dict[str, list[str]] = {}
    rest = iter(words[3:])
    for word in rest:
        option = word.rstrip(",:")
        if not option.startswith("--"):
            break  # words about the command
        if option in _VALUES and (value := next(rest, None)) is not None:
            options.setdefault(option, []).append(value)
        elif option in _FLAGS:
            options[option] = []
        else:
            return None
    return words[1], options
