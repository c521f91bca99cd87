"""Which way a table's share of a batch takes to Delta, and why; what came of it.

`append`: only inserts that cannot collide. `replace`: the table was truncated, so its content is written anew.
`positional`: rows are found by key and marked as deleted where they stand. `merge`: what the direct paths leave to
Delta's own writer, and the oracle of the others in tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headwater.errors import Diverged
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.position import format_lsn
from headwater.schema import TableSchema

ApplyPath = Literal["append", "positional", "merge", "replace"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`version`: the table version that this was planned on; `to_lsn`: the applied position afterwards.

    `by_engine`: why Spark must write this table; empty: it is written directly. `verified`: afterwards every row is the
    source's, whoever wrote before; only of a direct write. `refuses_divergence`: what contradicts the stored rows is
    not written: Diverged, with nothing committed, so that no kill behind a commit forgets it. Of what was made
    ready (`headwater.apply.made_ready`): `becomes`, the columns that the table has from now on; `counters`: more of
    what the commit counts, by appId.
    """

    record: TableRecord
    path: str
    app_id: str
    version: int
    to_lsn: int
    changes: NetChanges
    apply_path: ApplyPath
    because: str
    by_engine: str = ""
    verified: bool = False
    refuses_divergence: bool = False
    becomes: TableSchema | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Applied:
    """The table's commit. `divergence`: rows that met no stored row or met one unexpectedly; 0 in health; `example`
    names a few of their keys. `noted`: commits of others in between that only rearranged files. `apply_path`: the way
    that was taken, where it turned out to be shorter than the planned one; else empty. `gone`: stored rows that are not
    there any more; None: not counted."""

    version: int
    divergence: int = 0
    example: str = ""
    noted: str = ""
    apply_path: str = ""
    gone: int | None = None


def choose(changes: NetChanges, schema: TableSchema, by_engine: str) -> tuple[ApplyPath, str]:
    """The path and the reason for it."""
    if changes.is_empty:
        return "append", "nothing is left of the batch, and the table has yet to see this driver's generation"
    if changes.truncated:
        return "replace", "the table was truncated in this batch"
    if changes.truncated_leaves and schema.soft_delete and not schema.partitioned and not by_engine:
        return "replace", "the table was truncated in this batch, and its rows stay as deleted"
    if changes.truncated_leaves:
        because = "partitions were truncated in this batch"
        if schema.soft_delete:
            return "merge", f"{because}, and their rows stay as deleted" if schema.partitioned else by_engine
        return ("merge", f"{because}, and {by_engine}") if by_engine else ("positional", because)
    if changes.replaced is not None:
        because = "rows of a predicate are replaced"
        return ("merge", f"{because}, and {by_engine}") if by_engine else ("positional", because)
    if schema.insert_only:
        return "append", "the table is declared insert-only"
    if by_engine:
        return "merge", by_engine
    return "positional", "rows are found by key"


def diverged(plan: Plan, rows: int, example: str) -> Diverged:
    """The error that suspends the table. `example`: some of the keys."""
    message = f"{rows} rows of the log contradict the lake up to {format_lsn(plan.to_lsn)}: {example}"
    name = plan.record.name
    return Diverged(message, where=name, remedy=f"headwater load PIPELINE.yaml --table {name} --again")


class PlanAgain(Exception):
    """The table does not stand at the planned version; nothing of this plan was committed."""
