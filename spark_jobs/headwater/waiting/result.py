"""How a wait ended: the object that the command prints, the sensor returns and the trigger sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import HeadwaterError, Refused
from headwater.lake.cuts import Cut, Pin, time_text
from headwater.lake.freshness import Outcome, Verdict
from headwater.lake.requirements import Target
from headwater.position import format_lsn
from headwater.waiting.progress import WaitProgress


class NotFresh(HeadwaterError):
    """A wait that ended otherwise than satisfied. `code` is the outcome, `exit_status` the command's."""

    default_code = Outcome.TIMED_OUT

    @property
    def exit_status(self) -> int:  # type: ignore[override]
        return Outcome(self.code).exit_status


@dataclass(frozen=True, slots=True)
class WaitResult:
    """How a wait ended. `cut` and `pin` are set exactly when `outcome` is satisfied."""

    outcome: Outcome
    target: Target | None
    waited_seconds: float
    verdict: Verdict
    pipeline: str
    applied: Mapping[str, int] = field(default_factory=dict)
    cut: Cut | None = None
    pin: Pin | None = None
    progress: WaitProgress | None = None

    @property
    def exit_status(self) -> int:
        return self.outcome.exit_status

    @property
    def _taken(self) -> str | None:
        return str(self.target) if self.target is not None and not self.target.now else None

    def to_json(self) -> dict[str, Any]:
        """The interface's object: the cut and how long it took, or why not and what to do."""
        common: dict[str, Any] = {
            "outcome": str(self.outcome),
            "target": self._taken,
            "waited_seconds": round(self.waited_seconds, 3),
        }
        if self.target is not None and self.target.validated:
            common["validated"] = list(self.target.validated)
        if self.verdict.ignored:
            common["ignored"] = list(self.verdict.ignored)
        if self.cut is not None and self.pin is not None:
            return {**self.cut, **common, "pin": {"id": self.pin.id, "expiry": time_text(self.pin.expiry)}}
        result = {
            **common,
            "eta_seconds": self.verdict.eta_seconds,
            "reason": self.verdict.reason,
            "remedy": self.verdict.remedy,
            "tables": {
                name: {
                    "applied_lsn": format_lsn(self.applied[name]) if name in self.applied else None,
                    "gap_bytes": gap.gap_bytes,
                    "state": gap.state,
                    "reason": gap.reason,
                }
                for name, gap in self.verdict.tables.items()
            },
        }
        if self.progress is not None:
            result["progress"] = self.progress.to_json()
        # A refused wait is an error of its caller, and is shown as every command shows one.
        return {**self.error().to_json(), **result} if self.exit_status == Refused.exit_status else result

    def error(self) -> NotFresh:
        return NotFresh(
            self.verdict.reason or str(self.outcome),
            code=str(self.outcome),
            where=f"wait of pipeline {self.pipeline}, target {self._taken or 'not taken'}",
            remedy=self.verdict.remedy,
        )
