"""One wait: until the lake is fresh enough, and the cut that is.

A `Waiter` takes its target once, and from then on `look` compares it with the lake: one small file and one stat
of the registry per look, for all the waits that share a lookout. The source is visited only to take the target, and
every few seconds while the target is not met: to ask whether the driver lives and the wanted tables still are what was
loaded, and to write a marker into the log, without which an idle source's log would never pass a position that lies
just above its last record. `look` blocks for one look and never sleeps: the caller paces it. No Spark. Times are
seconds of the monotonic clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from headwater.errors import Transient
from headwater.lake import freshness
from headwater.lake.cuts import pin_cut, release_pin, take_cut, time_text, with_parts
from headwater.lake.freshness import (
    AsConfigured,
    AtPosition,
    Look,
    MaxStaleness,
    Outcome,
    Requirement,
    Since,
    Target,
    Verdict,
)
from headwater.lake.position_file import PositionFile
from headwater.lake.wait_log import Waited, record
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.waiting.lookout import Lookout
from headwater.waiting.progress import WaitProgress, progress
from headwater.waiting.result import WaitResult

if TYPE_CHECKING:
    from headwater.lake.ledger import TableVersion
    from headwater.lake.reader import LakeReader
    from headwater.source.catalog.partitions import NamedPart
    from headwater.waiting.source_state import SourceState
    from headwater.waiting.validated import Validations

_NO_END = frozenset({Outcome.FUTURE_POSITION, Outcome.NOT_REPLICATED, Outcome.TIMELINE_CHANGED})
"""Outcomes of questions that were wrong: nobody waited."""
_ANSWER_SECONDS = 15.0
_VISIT_SECONDS = (1.0, 2.0, 4.0)  # between two visits to the source; the last one is repeated
_TRUSTED_SECONDS = 2.0
"""After so long a wait is judged again, although nothing seems to have changed for it."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who waits, the same for each run: for the log of waits. `began`: when, if another process did."""

    who: str
    requirement: str
    began: datetime | None = None


class Waiter:
    """One wait. `requirement` may be a `Target` pinned by an earlier process: it is then not taken anew. A source that
    does not answer is asked again until the deadline.

    `keep`: for how many seconds the cut is pinned, in the name of `owner`. `give_up_early`: end as timed out as soon as
    the time that is still to wait, as estimated, exceeds what is left. `validated`: only what has passed a validation
    counts, of every table; a `Target` says by itself of which. `partitions`: of a table only these are wanted, as
    SQL names them; a `Target` knows them. `lookout`: shared with other waits, and then refreshed
    by whoever owns it. `asker`: the wait is to be in the log of waits.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        requirement: Requirement | Target,
        *,
        timeout: float,
        keep: float,
        owner: str,
        tables: Iterable[TableName] | None = None,
        ignore_suspended: bool = False,
        give_up_early: bool = False,
        validated: bool = False,
        partitions: Mapping[TableName, Sequence[TableName]] | None = None,
        lookout: Lookout | None = None,
        asker: Asker | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._requirement = requirement
        self._keep, self._owner, self._asker = keep, owner, asker
        self._ignore_suspended = ignore_suspended
        self._give_up_early = give_up_early
        self._validated = validated
        self._partitions = dict(partitions or {})
        self._validations: Validations | None = None
        self._shared = lookout is not None
        self._lookout = lookout or Lookout(pipeline)
        self._began = time.monotonic()
        self._deadline = self._began + timeout
        self._visits, self._next_visit, self._judged_at = 0, self._began, self._began
        self._asked = self._unanswered = self._ledger_asked = False
        self._last_file: PositionFile | None = None
        self._seen_alive = False
        self._outage: Transient | None = None
        self.target: Target | None = requirement if isinstance(requirement, Target) else None
        self.tables: tuple[str, ...] | None = tuple(sorted(set(map(str, tables)))) if tables else None
        self.waiting = Verdict(None, "no look has been taken yet")
        self._seen: Look | None = None

    @property
    def _lake(self) -> LakeReader:
        return self._lookout.lake

    @property
    def requirement(self) -> str:
        """As it was asked for, for the log of waits."""
        return self._asker.requirement if self._asker is not None else ""

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
        due = min(self._deadline, self._next_visit, self._judged_at + _TRUSTED_SECONDS)
        if seen is None or self._give_up_early or time.monotonic() >= due:
            return False
        if target is None or target.lsn is None or target.by_table:
            return False
        look = self._lookout.look()
        file, same = look.file, look.tables is seen.tables and (look.paused, look.log) == (seen.paused, seen.log)
        return same and file is not None and max(file.read_position, file.position.lsn) < target.lsn

    def look(self) -> WaitResult | None:
        """One look; None while waiting may still help (`waiting` then says why it is not met)."""
        if not self._shared:
            self._lookout.refresh()
        asked_already = self.target is None
        if self.target is None and (failed := self._take_target()) is not None:
            return self._end(failed, Look(None, {}))
        if self.target is None:
            return None
        look = self._lookout.look()
        if self.tables is None:
            self.tables = wanted_tables(self._pipeline, None, look)
        if self._partitions:
            from headwater.waiting.partitions import refuse_unwanted

            refuse_unwanted(self._partitions, self.tables)
        if self._validated and self.target is not None:
            self.target = replace(self.target, validated=self.tables)
        if self._partitions and not self.target.parts and (failed := self._find_parts()) is not None:
            self.waiting = failed
            return self._end(failed, look) if failed.outcome is not None else None
        self._resolve_moment(look)
        self._notice_life(look)
        judged = self._judge(look)
        late = time.monotonic() >= self._deadline
        at_last = late and not self._seen_alive and not asked_already
        if judged.outcome is None and (time.monotonic() >= self._next_visit or at_last):
            refused = self._visit()
            look = self._lookout.look()
            self._resolve_moment(look)
            judged = refused or self._judge(look)
            # Whether a driver lives is being asked for: that is worth the answer at the deadline, too, for a while.
            asked = self._unanswered and not self._seen_alive
            late = late and not (asked and time.monotonic() < self._deadline + _ANSWER_SECONDS)
        if judged.outcome is None and not late and self._give_up_early:
            judged = freshness.hopeless(judged, self._deadline - time.monotonic())
        if judged.outcome is None and late:
            judged = self._at_deadline(judged)
        self.waiting, self._seen, self._judged_at = judged, look, time.monotonic()
        return None if judged.outcome is None else self._end(judged, look)

    def _take_target(self) -> Verdict | None:
        """Pin the target, or, while the source does not answer, as much of it as is known without. A verdict when the
        source refuses it. Neither, as long as the source is being asked."""
        requirement = self._requirement
        if isinstance(requirement, AtPosition) and requirement.timeline is not None:
            self.target = Target(requirement.lsn, requirement.timeline, requirement.system_id)
            return None
        if isinstance(requirement, Since):
            self.target = Target(since=requirement.moment)
            with contextlib.suppress(Transient):  # the lake may know all that is needed
                self._ask()
            return None
        try:
            if not self._ask():
                late = time.monotonic() >= self._deadline + _ANSWER_SECONDS
                return Verdict(Outcome.SOURCE_UNREACHABLE, "the source has not answered") if late else None
        except Transient:
            self.target = self._target_of(requirement, None)
            return None
        self.target = self._target_of(requirement, self._source.position)
        return self._refusal()

    def _target_of(self, requirement: Requirement | Target, end: Position | None) -> Target:
        """`end`: of the source's log; None: it has not answered."""
        if isinstance(requirement, AtPosition):
            # Without the source a plain LSN is one of the log that the lake follows.
            log = (end.system_id, end.timeline) if end is not None else self._lake.look().log
            return Target(requirement.lsn, log[1] if log else None, log[0] if log else None)
        if isinstance(requirement, MaxStaleness):
            return Target(max_staleness=requirement.seconds)
        target = self._as_configured() if isinstance(requirement, AsConfigured) else Target(now=True)
        return target.pinned(end) if end is not None else target

    def _as_configured(self) -> Target:
        """The staleness that the pipeline file allows each table; now for those of which it says nothing."""
        if self.tables is None:
            self.tables = wanted_tables(self._pipeline, None, self._lake.look())
        limits = {name: self._pipeline.freshness_of(TableName.parse(name)) for name in self.tables}
        by_table = {name: limit for name, limit in limits.items() if limit is not None}
        validated = tuple(name for name in self.tables if self._pipeline.validated(TableName.parse(name)))
        return Target(by_table=by_table, validated=validated, now=len(by_table) < len(limits))

    def _find_parts(self) -> Verdict | None:
        """Which partitions are meant, and which reloads of them are open; a verdict as long as the source, which has to
        be asked for those that the lake has not met, has not answered. Refused for what is no partition."""
        from headwater.waiting.partitions import find_parts

        assert self.target is not None
        unknown = self._unknown_parts()
        if unknown and not self._leaves_known(unknown):
            late = time.monotonic() >= self._deadline + (_ANSWER_SECONDS if self._unanswered else 0.0)
            judged = Verdict(None, "the source has not said yet which partitions are meant")
            return self._unreachable(judged) if late else judged
        leaves = self._source.leaves if unknown else {}
        self.target = replace(self.target, parts=find_parts(self._lake.registry(), self._partitions, leaves))
        return None

    def _unknown_parts(self) -> frozenset[NamedPart]:
        """The partitions that the source is still to be asked about."""
        if not self._partitions or (self.target is not None and self.target.parts):
            return frozenset()
        from headwater.waiting.partitions import unknown_parts

        return unknown_parts(self._lake.registry(), self._partitions)

    def _leaves_known(self, parts: frozenset[NamedPart]) -> bool:
        def known() -> bool:
            return self._asked and self._source.leaves.keys() >= parts

        if not known() and time.monotonic() >= self._next_visit:
            self._visit()
        return known()

    def _resolve_moment(self, look: Look) -> None:
        """Find where in the log the moment lies that is waited for: by the driver's samples, else by our own.

        The file holds the samples of some minutes. What lies further back is in the ledger: a lake that is far behind
        would otherwise be waited for up to its newest sample.
        """
        target = self.target
        if target is None or target.since is None or not target.open:
            return
        if look.file is not None:
            samples = freshness.samples_of(look.file)
            if not self._ledger_asked and (not samples or samples[0][0] > target.since):
                self._ledger_asked = True
                earlier = self._lake.first_sample(target.since, samples[0] if samples else None)
                samples += [earlier] if earlier is not None else []
            target = target.resolved(samples, look.log)
        if (source := self._lookout.source) is not None:
            target = target.resolved([source.sample], source.log)
        self.target = target

    @property
    def _source(self) -> SourceState:
        """What the source has answered this wait."""
        assert self._lookout.source is not None
        return self._lookout.source

    def _ask(self) -> bool:
        """Have the source answer; False while it is being asked."""
        # Counted before the question: a source that does not answer is not asked again at each look.
        pause = _VISIT_SECONDS[min(self._visits, len(_VISIT_SECONDS) - 1)]
        self._visits += 1
        self._unanswered = False
        try:
            answered = self._lookout.ask(self.tables or (), self._began, pause, self._unknown_parts())
        except Transient as error:
            self._outage = error
            raise
        finally:
            self._next_visit = time.monotonic() + pause
        if not answered:
            self._visits, self._next_visit, self._unanswered = self._visits - 1, 0.0, True
            return False
        slot = self._source.slot
        self._asked, self._outage = True, None
        self._seen_alive = self._seen_alive or (slot is not None and slot.active)
        return True

    def _visit(self) -> Verdict | None:
        """Go to the source once more; a verdict when it says that the target can never be met."""
        try:
            answered = self._ask()
        except Transient:
            return None  # an outage of the source: the lake may still get there, and the deadline holds
        if not answered:
            return None
        assert self.target is not None
        self.target = self.target.pinned(self._source.position)
        return self._refusal()

    def _refusal(self) -> Verdict | None:
        assert self.target is not None
        return freshness.refuse_target(self.target, self._source.log, self._source.position.lsn)

    def _judge(self, look: Look) -> Verdict:
        assert self.target is not None
        assert self.tables is not None
        judged = self._verdict(look)
        if self.target.validated:
            judged = self._validated_verdict(judged, look)
        if judged.outcome is Outcome.SATISFIED and look.file is not None:
            held = self._lake.epoch(judged.epoch or look.file.epoch).tables
            missing = [name for name in judged.tables if name not in held]
            if missing:
                return replace(judged, outcome=None, reason=f"no published epoch holds {missing[0]} yet")
            if (anew := self._loaded_since(judged.tables)) is not None:
                self._next_visit = 0.0
                return replace(judged, outcome=None, reason=f"{anew} was loaded anew, the source is asked about it")
            if self.target.parts and (open_reload := self._open_reload(held, judged.tables)):
                return replace(judged, outcome=None, reason=open_reload)
        return judged

    def _verdict(self, look: Look, samples: Sequence[tuple[datetime, int]] = ()) -> Verdict:
        assert self.target is not None
        assert self.tables is not None
        source = self._lookout.source
        judged = freshness.verdict(
            self.target,
            look,
            self.tables,
            source_now=source.now() if source is not None else None,
            samples=[*samples, *(source.samples(look.log) if source is not None else [])],
            ignore_suspended=self._ignore_suspended,
        )
        by_clock = any(self.target.staleness(name) is not None for name in judged.tables)
        other_log = source is not None and look.log not in (None, source.log)
        if judged.outcome in (None, Outcome.SATISFIED) and by_clock and other_log:
            # Either may be the older one: the answer, or the lake, whose driver may be about to follow.
            reason = "the source's log is not the one that the lake follows: how stale the lake is cannot be told"
            return replace(judged, outcome=None, reason=reason, eta_seconds=None)
        return judged

    def _validated_verdict(self, fresh: Verdict, look: Look) -> Verdict:
        from headwater.waiting.validated import Validations  # reads Delta tables: only for those who ask for it

        assert self.target is not None
        if self._validations is None or self._validations.lake is not self._lake:
            self._validations = Validations(self._pipeline.lake_path(), self._lake)
        return self._validations.judge(fresh, look, self.target.validated, self._verdict)

    def _loaded_since(self, names: Iterable[str]) -> str | None:
        """A table whose relation at the source is another one than the source was asked about."""
        if not self._asked:
            return None
        asked = {standing.registered for standing in self._source.standings}
        new = [str(table.name) for table in self._lookout.registered(self.tables or ()) if table not in asked]
        return next((name for name in names if name in new), None)

    def _open_reload(self, held: Mapping[str, TableVersion], required: Collection[str]) -> str:
        """Which reload of a wanted partition is not in the lake yet; empty: none. Of suspended tables that are ignored
        nothing is waited for."""
        from headwater.waiting.partitions import not_yet_reloaded

        registry = self._lake.registry()
        assert self.target is not None
        assert registry is not None, "a table was found in it"
        parts = {name: part for name, part in self.target.parts.items() if name in required}
        return not_yet_reloaded(registry, parts, held)

    def _notice_life(self, look: Look) -> None:
        if self._last_file is not None and look.file != self._last_file:
            self._seen_alive = True
        self._last_file = look.file

    def _at_deadline(self, judged: Verdict) -> Verdict:
        target = self.target
        assert target is not None
        by_clock = target.max_staleness is not None or target.by_table or target.open
        if target.now or (by_clock and self._lookout.source is None):
            return self._unreachable(judged)
        return freshness.at_deadline(judged, seen_alive=self._seen_alive, pipeline_file=self._pipeline.file)

    def _unreachable(self, judged: Verdict) -> Verdict:
        """`judged` as the end of a wait that needed the source."""
        outage = self._outage
        reason = f"the source does not answer: {outage.message}" if outage is not None else judged.reason
        remedy = (outage.remedy if outage is not None else "") or "check the source's connection"
        return replace(judged, outcome=Outcome.SOURCE_UNREACHABLE, reason=reason, remedy=remedy)

    def _end(self, judged: Verdict, look: Look) -> WaitResult | None:
        """The result; None when a validated cut was cleaned up before it could be pinned: another one is looked for."""
        assert judged.outcome is not None
        number = judged.epoch or (look.file.epoch if look.file is not None else 0)
        epoch = self._lake.epoch(number) if number else None
        result = WaitResult(
            judged.outcome,
            self.target,
            self._waited_seconds(),
            judged,
            self._pipeline.name,
            {name: table.applied_lsn for name, table in epoch.tables.items()} if epoch is not None else {},
            progress=self.progress if judged.outcome is not Outcome.SATISFIED else None,
        )
        if judged.outcome is not Outcome.SATISFIED:
            self._record(result)
            return result
        assert epoch is not None
        assert self.tables is not None
        root = self._pipeline.lake_path()
        cut = take_cut(root, self._pipeline.name, look, epoch, self.tables, judged.lsn)
        if self.target is not None and self.target.parts:
            from headwater.waiting.partitions import as_met

            # An earlier epoch, which was validated, may hold them under the ids of then.
            is_newest = look.file is not None and epoch.epoch == look.file.epoch
            cut = with_parts(cut, as_met(self._lake.registry(), self.target.parts) if is_newest else self.target.parts)
        pin = pin_cut(root, cut, self._owner, datetime.now(UTC) + timedelta(seconds=self._keep))
        if self._validations is not None and self._validations.is_gone(cut):
            release_pin(root, pin.id)
            return None
        self._record(result)
        return replace(result, cut=cut, pin=pin)

    def _waited_seconds(self) -> float:
        began = self._asker.began if self._asker is not None else None
        if began is None:
            return time.monotonic() - self._began
        return max(0.0, (datetime.now(UTC) - began).total_seconds())

    def _record(self, result: WaitResult) -> None:
        if self._asker is None or result.outcome in _NO_END:
            return
        at, seconds = time_text(datetime.now(UTC)), round(result.waited_seconds, 3)
        asked = self._asker.who, self._asker.requirement, self.tables or ()
        record(self._pipeline.lake_path(), Waited(at, *asked, str(result.outcome), seconds))


def wanted_tables(pipeline: Pipeline, tables: Iterable[TableName] | None, look: Look) -> tuple[str, ...]:
    """`tables`; None: every one of the pipeline, those named in its file and those that a pattern has brought in."""
    if tables:
        return tuple(sorted(set(map(str, tables))))
    named = {str(entry.name) for entry in pipeline.tables if isinstance(entry.name, TableName)}
    return tuple(sorted(named | {name for name, table in look.tables.items() if table.state not in ("new", "removed")}))
