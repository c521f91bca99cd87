"""Which way a table's share of a batch takes to Delta, and why; what came of it.

`append`: only inserts that cannot collide. `replace`: the table was truncated, so its content is written anew.
`merge`: everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater.changes import NetChanges
from headwater.lake.registry import TableRecord

ApplyPath = Literal["append", "merge", "replace"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`version`: the table version that this was planned on; `to_lsn`: the applied position afterwards."""

    record: TableRecord
    path: str
    app_id: str
    version: int
    to_lsn: int
    changes: NetChanges
    apply_path: ApplyPath
    because: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The table's commit. `divergence`: rows that met no stored row or met one unexpectedly; 0 in health; `example`
    names a few of their keys. `noted`: commits of others in between that only rearranged files."""

    version: int
    divergence: int = 0
    example: str = ""
    noted: str = ""


def choose(changes: NetChanges, *, insert_only: bool) -> tuple[ApplyPath, str]:
    if changes.truncated:
        return "replace", "the table was truncated in this batch"
    if insert_only and not changes.truncated_leaves:
        return "append", "the table is declared insert-only"
    return "merge", "rows are looked up by key"


class PlanAgain(Exception):
    """The table does not stand at the planned version; nothing of this plan was committed."""
