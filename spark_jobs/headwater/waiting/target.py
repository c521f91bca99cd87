"""What one wait is for: its target, the tables, and which of their partitions.

The target is taken once, at the first look, and from then on only becomes more exact: a position that the source could
not be asked for yet is pinned when it answers, a moment becomes a position as soon as a sample at or after it is known,
partitions become the leaves that they were when the wait began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from headwater.errors import Transient
from headwater.gate.same_source import NEW_SOURCE, log_ends_before
from headwater.lake.freshness import Outcome, Verdict, refuse_target
from headwater.lake.look import Look, samples_of
from headwater.lake.requirements import AsConfigured, AtPosition, MaxStaleness, Since, Target, WantedParts
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.source.catalog.partitions import NamedPart
from headwater.waiting.lookout import Lookout
from headwater.waiting.request import WaitRequest
from headwater.waiting.visits import SourceVisits
from headwater.waiting.wanted_partitions import as_met, find_parts, refuse_unwanted, unknown_parts


class WaitTarget:
    """`target`: None until it is taken. `tables`: in order of their names; None until the lake was looked at for all of
    them."""

    def __init__(self, pipeline: Pipeline, request: WaitRequest, lookout: Lookout, visits: SourceVisits) -> None:
        self._pipeline, self._request = pipeline, request
        self._lookout, self._visits = lookout, visits
        self._ledger_asked = False
        self.target: Target | None = request.wanted if isinstance(request.wanted, Target) else None
        self.tables: tuple[str, ...] | None = _in_order(request.tables) or None

    def take(self) -> Verdict | None:
        """Pin the target, or, while the source does not answer, as much of it as is known without. A verdict when the
        source refuses it. Neither, as long as the source is being asked."""
        wanted = self._request.wanted
        if isinstance(wanted, AtPosition) and wanted.timeline is not None:
            self.target = Target(wanted.lsn, wanted.timeline, wanted.system_id)
            return None
        if isinstance(wanted, Since):
            self.target = Target(since=wanted.moment)
            with contextlib.suppress(Transient):  # the lake may know all that is needed
                if self._ask():
                    return self._refusal(self.target)
            return None
        try:
            if not self._ask():
                unanswered = Verdict(Outcome.SOURCE_UNREACHABLE, "the source has not answered")
                return unanswered if self._visits.is_late else None
        except Transient:
            self.target = self._as_known(None)
            return None
        self.target = self._as_known(self._visits.state.position)
        return self._refusal(self.target)

    def settle(self, look: Look) -> Verdict | None:
        """Of which tables, and of which partitions. A verdict as long as the source has not said which these are.
        Refused for partitions of what is not wanted, and for what is no partition."""
        assert self.target is not None
        tables = self._all_tables(look)
        if self._request.partitions:
            refuse_unwanted(self._request.partitions, tables)
        if self._request.validated:
            self.target = replace(self.target, validated=tables)
        return self._find_parts() if self._request.partitions and not self.target.parts else None

    def resolve(self, look: Look) -> None:
        """Find where in the log the moment lies that is waited for: by the driver's samples, else by our own.

        The file holds the samples of some minutes. What lies further back is in the ledger: a lake that is far behind
        would otherwise be waited for up to its newest sample.
        """
        target = self.target
        if target is None or target.since is None or not target.open:
            return
        if look.file is not None:
            samples = samples_of(look.file)
            if not self._ledger_asked and (not samples or samples[0][0] > target.since):
                earlier = self._lookout.lake.first_sample(target.since, samples[0] if samples else None)
                self._ledger_asked = True
                samples += [earlier] if earlier is not None else []
            target = target.resolved(samples, look.log)
        if (source := self._lookout.source) is not None:
            target = target.resolved(source.samples(look.log), source.log)
        self.target = target

    def visit(self) -> Verdict | None:
        """Go to the source once more; a verdict when it says that the target can never be met."""
        try:
            has_answered = self._ask()
        except Transient:
            return None  # an outage of the source: the lake may still get there, and the deadline holds
        if not has_answered:
            return None
        assert self.target is not None
        self.target = self.target.pinned(self._visits.state.position)
        return self._refusal(self.target)

    def partitions(self, *, newest: bool) -> Mapping[str, WantedParts]:
        """The partitions that are wanted, if not all: in the `newest` epoch under the ids that the lake knows by now.
        An earlier one, which was validated, may hold them under the ids of then."""
        parts = self.target.parts if self.target is not None else {}
        return as_met(self._lookout.lake.registry(), parts) if newest and parts else parts

    def _ask(self) -> bool:
        return self._visits.ask(self.tables or (), self._unknown_parts())

    def _refusal(self, target: Target) -> Verdict | None:
        source = self._visits.state
        if source.is_older:
            assert source.lake is not None
            return Verdict(
                Outcome.TIMELINE_CHANGED, log_ends_before(source.position.lsn, source.lake.lsn), remedy=NEW_SOURCE
            )
        return refuse_target(target, source.log, source.position.lsn)

    def _as_known(self, end: Position | None) -> Target:
        """`end`: of the source's log; None: it has not answered."""
        wanted = self._request.wanted
        if isinstance(wanted, AtPosition):
            # Without the source a plain LSN is one of the log that the lake follows.
            log = (end.system_id, end.timeline) if end is not None else self._lookout.lake.look().log
            return Target(wanted.lsn, log[1] if log else None, log[0] if log else None)
        if isinstance(wanted, MaxStaleness):
            return Target(max_staleness=wanted.seconds)
        target = self._as_configured() if isinstance(wanted, AsConfigured) else Target(now=True)
        return target.pinned(end) if end is not None else target

    def _as_configured(self) -> Target:
        """The staleness that the pipeline file allows each table; now for those of which it says nothing."""
        tables = self.tables or self._all_tables(self._lookout.lake.look())
        limits = {name: self._pipeline.freshness_of(TableName.parse(name)) for name in tables}
        by_table = {name: limit for name, limit in limits.items() if limit is not None}
        validated = tuple(name for name in tables if self._pipeline.validated(TableName.parse(name)))
        return Target(by_table=by_table, validated=validated, now=len(by_table) < len(limits))

    def _all_tables(self, look: Look) -> tuple[str, ...]:
        """Those that come later, by a pattern, are none of this wait's business."""
        if self.tables is None:
            self.tables = wanted_tables(self._pipeline, (), look)
        return self.tables

    def _find_parts(self) -> Verdict | None:
        """Which partitions are meant, and which reloads of them are open; a verdict as long as the source, which has to
        be asked for those that the lake has not met, has not answered. Refused for what is no partition."""
        assert self.target is not None
        unknown = self._unknown_parts()
        if unknown and not self._leaves_known(unknown):
            judged = Verdict(None, "the source has not said yet which partitions are meant")
            return self._visits.unreachable(judged) if self._visits.is_late else judged
        leaves = self._visits.state.leaves if unknown else {}
        found = find_parts(self._lookout.lake.registry(), self._request.partitions, leaves)
        self.target = replace(self.target, parts=found)
        return None

    def _unknown_parts(self) -> frozenset[NamedPart]:
        """The partitions that the source is still to be asked about."""
        if not self._request.partitions or (self.target is not None and self.target.parts):
            return frozenset()
        return unknown_parts(self._lookout.lake.registry(), self._request.partitions)

    def _leaves_known(self, parts: frozenset[NamedPart]) -> bool:
        def known() -> bool:
            return self._visits.answered and self._visits.state.leaves.keys() >= parts

        if not known() and self._visits.is_due:
            self.visit()
        return known()


def wanted_tables(pipeline: Pipeline, tables: Iterable[TableName], look: Look) -> tuple[str, ...]:
    """`tables`; none: every one of the pipeline, those named in its file and those that a pattern has brought in."""
    if names := _in_order(tables):
        return names
    named = {str(entry.name) for entry in pipeline.tables if isinstance(entry.name, TableName)}
    return tuple(sorted(named | {name for name, table in look.tables.items() if table.state not in ("new", "removed")}))


def _in_order(tables: Iterable[TableName]) -> tuple[str, ...]:
    return tuple(sorted(set(map(str, tables))))
