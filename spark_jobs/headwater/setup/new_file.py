"""The text of a new pipeline file: the tables that were chosen, and as comments those that cannot be replicated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import yaml

from headwater.names import TableName, TablePattern
from headwater.pipeline_file.quantities import size_text
from headwater.setup.survey import Surveyed

VARIABLE: Final = "HEADWATER_SOURCE"
_FOR_ROWS_THAT_NEVER_CHANGE: Final = frozenset({"no_key", "no_identity", "deferrable_key"})


@dataclass(frozen=True, slots=True)
class Chosen:
    """An entry of the file: `tables` are those that it speaks of, `excluded` those that a pattern leaves out."""

    name: TableName | TablePattern
    tables: tuple[Surveyed, ...]
    excluded: tuple[TableName | TablePattern, ...] = field(default=())


def text_of(name: str, root: str, entries: Iterable[Chosen], left_out: Sequence[Surveyed], source: str) -> str:
    """The file. `source`: how to say where the source is, without its password."""
    lines = [
        "# Made by `headwater init`. Every key: docs/reference/pipeline-file.md. Then: headwater check THIS_FILE",
        f"pipeline: {name}",
        "source:",
        f"  # From the environment, so that no password is in here: export {VARIABLE}={_comment(source)}",
        f"  connection: ${{{VARIABLE}}}",
        "lake:",
        f"  root: {_scalar(root)}",
        "tables:",
    ]
    for entry in entries:
        lines += _entry(entry)
    if left_out:
        lines += ["", "  # Not replicated. To take one in, do what is said, and remove the # before its entry."]
    for table in left_out:
        lines += _left_out(table)
    return "\n".join(lines) + "\n"


def _entry(entry: Chosen) -> list[str]:
    if isinstance(entry.name, TableName):
        [table] = entry.tables
        return [f"  - {_scalar(str(entry.name))}  # {_comment(_facts(table))}"]
    lines = [f"  - name: {_scalar(str(entry.name))}  # {len(entry.tables)} tables now, and those to come"]
    if entry.excluded:
        lines.append("    exclude:")
        lines += [f"      - {_scalar(str(name))}" for name in entry.excluded]
    return lines


def _left_out(table: Surveyed) -> list[str]:
    lines = [f"  # {_comment(str(problem))}" for problem in table.obstacles]
    lines.append(f"  # - name: {_scalar(str(table.name))}")
    if all(problem.code in _FOR_ROWS_THAT_NEVER_CHANGE for problem in table.obstacles):
        lines.append("  #   insert_only: true  # only if its rows never change")
    return lines


def _facts(table: Surveyed) -> str:
    rows = "never counted" if table.rows is None else f"about {table.rows} rows"
    return f"{size_text(table.bytes)}, {rows}, {table.identity}"


def _scalar(text: str) -> str:
    """`text` as a value on one line; `${` is kept from meaning a variable."""
    # Only between double quotes YAML writes a line break as an escape, and not as one.
    style = None if text.isprintable() else '"'
    dumped = yaml.safe_dump(
        [text.replace("${", "$${")], default_flow_style=True, default_style=style, width=1 << 20, allow_unicode=True
    )
    return dumped.strip()[1:-1]


def _comment(text: str) -> str:
    """`text` on one line, without what YAML refuses even in a comment: a name may hold anything."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
