"""When one wait asks the source, and what has come of it.

Every few seconds while the target is not met: to learn whether the driver lives and the wanted tables still are what
was loaded, and to write a marker into the log, without which an idle source's log would never pass a position that lies
just above its last record. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from headwater.errors import Transient
from headwater.lake.freshness import Outcome, Verdict
from headwater.source.catalog.partitions import NamedPart
from headwater.waiting.lookout import Lookout
from headwater.waiting.source_state import SourceState

_ANSWER_SECONDS = 15.0
_VISIT_SECONDS = (1.0, 2.0, 4.0)  # between two visits; the last one is repeated


class SourceVisits:
    """Those of a wait that began at `began` and ends at `deadline`; at the first look one is due.

    `answered`: the source has answered this wait. `asking`: an answer is under way. `driver_seen`: one has shown that a
    driver reads the slot. `outage`: why the last question had no answer.
    """

    def __init__(self, lookout: Lookout, began: float, deadline: float) -> None:
        self._lookout = lookout
        self._began, self._deadline = began, deadline
        self._count = 0
        self.next_at = began
        self.answered = self.asking = self.driver_seen = False
        self.outage: Transient | None = None

    @property
    def state(self) -> SourceState:
        """What the source has answered this wait."""
        assert self._lookout.source is not None
        return self._lookout.source

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.next_at

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed; an answer that is under way is worth waiting for, for a while."""
        return time.monotonic() >= self._deadline + (_ANSWER_SECONDS if self.asking else 0.0)

    def at_once(self) -> None:
        """The next look is to ask."""
        self.next_at = 0.0

    def ask(self, tables: Collection[str], parts: Collection[NamedPart]) -> bool:
        """Have the source answer about `tables` and `parts`; False while it is being asked. SourceUnreachable, other
        Transient, or Refused."""
        # Counted before the question: a source that does not answer is not asked again at each look.
        pause = _VISIT_SECONDS[min(self._count, len(_VISIT_SECONDS) - 1)]
        self._count += 1
        self.asking = False
        try:
            has_answered = self._lookout.ask(tables, self._began, pause, parts)
        except Transient as error:
            self.outage = error
            raise
        finally:
            self.next_at = time.monotonic() + pause
        if not has_answered:
            self._count, self.asking = self._count - 1, True
            self.at_once()
            return False
        self.answered, self.outage = True, None
        self.driver_seen = self.driver_seen or (self.state.slot is not None and self.state.slot.active)
        return True

    def unreachable(self, judged: Verdict) -> Verdict:
        """`judged` as the end of a wait that needed the source."""
        outage = self.outage
        reason = f"the source does not answer: {outage.message}" if outage is not None else judged.reason
        remedy = (outage.remedy if outage is not None else "") or "check the source's connection"
        return replace(judged, outcome=Outcome.SOURCE_UNREACHABLE, reason=reason, remedy=remedy)
