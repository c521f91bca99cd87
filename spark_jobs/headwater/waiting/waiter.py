"""One wait: until the lake is fresh enough, and the cut that is.

A `Waiter` takes its target once (`target`), and from then on `look` compares it with the lake (`judgement`): one small
file and one stat of the registry per look, for all the waits that share a lookout. The source is visited only to take
the target, and every few seconds while it is not met (`visits`). `look` blocks for one look and never sleeps: the
caller paces it. No Spark. Times are seconds of the monotonic clock.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

from headwater.lake import freshness
from headwater.lake.cuts import release_pin
from headwater.lake.freshness import Outcome, Verdict
from headwater.lake.look import Look
from headwater.lake.position_file import PositionFile
from headwater.lake.requirements import Target
from headwater.pipeline_file.pipeline import Pipeline
from headwater.waiting.ending import pinned_cut, record_end
from headwater.waiting.judgement import Judgement
from headwater.waiting.lookout import Lookout
from headwater.waiting.progress import WaitProgress, progress
from headwater.waiting.request import WaitRequest
from headwater.waiting.result import WaitResult
from headwater.waiting.target import WaitTarget
from headwater.waiting.visits import SourceVisits

_TRUSTED_SECONDS = 2.0
"""After so long a wait is judged again, although nothing seems to have changed for it."""


class Waiter:
    """The wait that `request` asks for. A source that does not answer is asked again until the deadline.

    `lookout`: shared with other waits, and then refreshed by whoever owns it. `waiting`: why the wait goes on.
    """

    def __init__(self, pipeline: Pipeline, request: WaitRequest, lookout: Lookout | None = None) -> None:
        self._pipeline, self._request = pipeline, request
        self._is_shared = lookout is not None
        self._lookout = lookout or Lookout(pipeline)
        self._began = self._judged_at = time.monotonic()
        self._deadline = self._began + max(0.0, request.remaining())
        self._visits = SourceVisits(self._lookout, self._began, self._deadline)
        self._wanted = WaitTarget(pipeline, request, self._lookout, self._visits)
        self._judgement = Judgement(pipeline, request, self._wanted, self._lookout, self._visits)
        self._last_file: PositionFile | None = None
        self._file_moved = False
        self.waiting = Verdict(None, "no look has been taken yet")
        self._seen: Look | None = None

    @property
    def target(self) -> Target | None:
        """None until it is taken."""
        return self._wanted.target

    @property
    def tables(self) -> tuple[str, ...]:
        """Those that are waited for; none until it is known which these are."""
        return self._wanted.tables or ()

    @property
    def progress(self) -> WaitProgress | None:
        """How the wait stands as of the last look; None before the first."""
        if self.target is None or self._seen is None:
            return None
        return progress(self.target, self.waiting, self._seen, self._lookout.source, self._lookout.outage)

    @property
    def is_far(self) -> bool:
        """Whether a look would find nothing new: the log has not been read up to the target, the tables' states are
        what they were, and neither deadline nor source is due. At a glance, for many waits that look often."""
        target, seen = self.target, self._seen
        due = min(self._deadline, self._visits.next_at, self._judged_at + _TRUSTED_SECONDS)
        if seen is None or self._request.give_up_early or time.monotonic() >= due:
            return False
        if target is None or target.lsn is None or target.by_table:
            return False
        look = self._lookout.look()
        file, same = look.file, look.tables is seen.tables and (look.paused, look.log) == (seen.paused, seen.log)
        return same and file is not None and max(file.read_position, file.position.lsn) < target.lsn

    def look(self) -> WaitResult | None:
        """One look; None while waiting may still help (`waiting` then says why it is not met)."""
        if not self._is_shared:
            self._lookout.refresh()
        is_taken = self.target is not None
        if not is_taken and (failed := self._wanted.take()) is not None:
            return self._end(failed, Look(None, {}))
        if self.target is None:
            return None
        look = self._lookout.look()
        if (failed := self._wanted.settle(look)) is not None:
            self.waiting = failed
            return self._end(failed, look) if failed.outcome is not None else None
        self._notice_life(look)
        judged, look = self._judged(look, is_taken)
        self.waiting, self._seen, self._judged_at = judged, look, time.monotonic()
        return None if judged.outcome is None else self._end(judged, look)

    def _judged(self, look: Look, may_ask_at_last: bool) -> tuple[Verdict, Look]:
        """The verdict on `look`, or on the one after a visit to the source, where that is due. `may_ask_at_last`: at
        the deadline whether a driver lives is asked for once more; no need in the look that has just asked."""
        self._wanted.resolve(look)
        judged = self._judgement.of(look)
        late = time.monotonic() >= self._deadline
        at_last = late and may_ask_at_last and not self._driver_seen
        if judged.outcome is None and (at_last or self._visits.is_due):
            refused = self._wanted.visit()
            look = self._lookout.look()
            self._wanted.resolve(look)
            judged = refused or self._judgement.of(look)
            # Whether a driver lives is being asked for: that is worth the answer at the deadline, too, for a while.
            late = late and (self._driver_seen or self._visits.is_late)
        if judged.outcome is None and not late and self._request.give_up_early:
            judged = freshness.hopeless(judged, self._deadline - time.monotonic())
        if judged.outcome is None and late:
            judged = self._judgement.at_deadline(judged, look, driver_seen=self._driver_seen)
        return judged, look

    @property
    def _driver_seen(self) -> bool:
        return self._file_moved or self._visits.driver_seen

    def _notice_life(self, look: Look) -> None:
        if self._last_file is not None and look.file != self._last_file:
            self._file_moved = True
        self._last_file = look.file

    def _end(self, judged: Verdict, look: Look) -> WaitResult | None:
        """The result; None when a validated cut was cleaned up before it could be pinned: another one is looked for."""
        outcome = judged.outcome
        assert outcome is not None
        judged = replace(judged, remedy=self._pipeline.with_file(judged.remedy))
        number = judged.epoch or (look.file.epoch if look.file is not None else 0)
        epoch = self._lookout.lake.epoch(number) if number else None
        satisfied = outcome is Outcome.SATISFIED
        result = WaitResult(
            outcome,
            self.target,
            self._waited_seconds(),
            judged,
            self._pipeline.name,
            {name: table.applied_lsn for name, table in epoch.tables.items()} if epoch is not None else {},
            progress=self.progress if not satisfied else None,
        )
        if satisfied:
            assert epoch is not None
            cut, pin = pinned_cut(self._pipeline, self._request, self._wanted, judged, look, epoch)
            if self._judgement.is_gone(cut):
                release_pin(self._pipeline.lake_path(), pin.id)
                return None
            result = replace(result, cut=cut, pin=pin)
        record_end(self._pipeline, self._request, self._wanted, result)
        return result

    def _waited_seconds(self) -> float:
        if self._request.began is None:
            return time.monotonic() - self._began
        return max(0.0, (datetime.now(UTC) - self._request.began).total_seconds())
