"""What a wait that goes on can say about itself: how far the lake is, how fast it moves, what blocks it.

Pure: from one look at the lake and what the source answered last. Bytes are of the source's log, seconds go by the
source's clock. Transactions that are open at the source are named only where they do hold a table up: a wait never
waits for them, but a table that was loaded joins the cuts only when those that its snapshot did not see have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headwater.lake.freshness import LOG_RATE, Verdict
from headwater.lake.health import stopped_since
from headwater.lake.look import IN_STEP, Look, complete_until, samples_of
from headwater.lake.requirements import Target
from headwater.pipeline_file.quantities import seconds_text, size_text
from headwater.position import format_lsn
from headwater.source.snapshots import OpenTransaction
from headwater.waiting.source_state import SourceState
from headwater.waiting.speed import bottleneck, by_stage

_SHOWN_TRANSACTIONS = 3


@dataclass(frozen=True, slots=True)
class WaitProgress:
    """`table` is the wanted one that is farthest behind, complete up to `position`; None where nothing is known.

    `gap_bytes`: from there to the target. `gap_seconds`: how long ago the table was known to be complete.
    """

    target: str
    reason: str
    table: str | None = None
    position: int | None = None
    gap_bytes: int | None = None
    gap_seconds: float | None = None
    bytes_per_second: float | None = None
    eta_seconds: float | None = None
    blocker: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "position": format_lsn(self.position) if self.position is not None else None,
            "gap_bytes": self.gap_bytes,
            "gap_seconds": self.gap_seconds,
            "bytes_per_second": self.bytes_per_second,
            "blocker": self.blocker,
        }

    def __str__(self) -> str:
        parts = [f"waiting for {self.target}: {self.reason}"]
        gap = [f"{size_text(self.gap_bytes)} of the log"] if self.gap_bytes is not None else []
        gap += [seconds_text(self.gap_seconds)] if self.gap_seconds is not None else []
        if gap and self.table is not None and self.position is not None:
            parts.append(f"{self.table} is complete up to {format_lsn(self.position)}, {' and '.join(gap)} behind")
        if self.bytes_per_second:
            parts.append(f"{size_text(self.bytes_per_second)}/s are applied")
        if self.eta_seconds is not None:
            parts.append(f"about {seconds_text(self.eta_seconds)} to go")
        if self.blocker:
            parts.append(f"blocked by: {self.blocker}")
        return "; ".join(parts)


def progress(target: Target, judged: Verdict, look: Look, source: SourceState | None, outage: str = "") -> WaitProgress:
    """How the wait for `target` stands. `outage`: why the source did not answer when it was asked last."""
    file = look.file
    named = [name for name in judged.tables if name in look.tables]
    behind = min(named, key=look.covered, default=None) if file is not None and file.epoch else None
    covered = look.covered(behind) if behind is not None else None
    samples = source.samples(look.log) if source is not None else []
    seconds = None
    if file is not None and covered is not None:
        known = samples_of(file) + samples
        now = source.now() if source is not None else max((time for time, _ in known), default=None)
        seconds = _age(now, complete_until(file, covered, samples))
    stopped = source is not None and (source.slot is None or not source.slot.active)
    return WaitProgress(
        target=str(target),
        reason=judged.reason,
        table=behind,
        position=covered,
        gap_bytes=max((gap.gap_bytes for gap in judged.tables.values() if gap.gap_bytes is not None), default=None),
        gap_seconds=seconds,
        # The file of a driver that has ended goes on saying how fast it was.
        bytes_per_second=file.rates.get(LOG_RATE) if file is not None and not stopped else None,
        eta_seconds=judged.eta_seconds if not stopped else None,
        blocker=_blocker(judged, look, named, source, outage),
    )


def _age(now: datetime | None, then: datetime | None) -> float | None:
    return round(max(0.0, (now - then).total_seconds()), 3) if now is not None and then is not None else None


def _blocker(judged: Verdict, look: Look, named: Sequence[str], source: SourceState | None, outage: str) -> str:
    """The one thing that holds the wait up, as far as it can be told; what a person can end comes first."""
    if outage:
        return f"the source does not answer: {outage}"
    if judged.awaits_validation:
        return "no validation has passed at or above the target"
    waiting = [name for name in named if look.tables[name].state != IN_STEP]
    loading = any(look.tables[name].state == "loading" for name in waiting)
    if source is not None and (source.slot is None or not source.slot.active) and not loading:
        # Before the tables' states: without a driver none of them moves.
        return f"replication is stopped, {stopped_since(look, source.now())}"
    if waiting:
        held = f"{waiting[0]} is {look.tables[waiting[0]].state}"
        open_there = _oldest(source.open_transactions) if source is not None else ""
        return f"{held}; transactions open at the source: {open_there}" if open_there else held
    late = [name for name, gap in judged.tables.items() if gap.gap_bytes]
    stage = bottleneck(by_stage(look.file.rates)) if look.file is not None else None
    found = []
    if late and len(late) < len(judged.tables):
        found.append(f"{', '.join(sorted(late))} alone, the other tables are there")
    if stage is not None:
        found.append(f"the stage {stage} is the busiest one")
    return "; ".join(found)


def _oldest(transactions: Sequence[OpenTransaction]) -> str:
    oldest = sorted(transactions, key=lambda one: -(one.age or 0.0))[:_SHOWN_TRANSACTIONS]
    return ", ".join(map(str, oldest))
