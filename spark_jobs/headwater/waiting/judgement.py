"""Whether the lake, as one look shows it, holds what a wait is for: the verdict on freshness, and what else must be so
before a cut is handed out.

`headwater.lake.freshness` judges values. Here is what has to be looked up for it, and what it cannot see: the epoch's
own tables, the relations that the source was asked about, validations, reloads of partitions.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headwater.lake import freshness
from headwater.lake.freshness import Outcome, Verdict
from headwater.lake.health import stopped_since
from headwater.lake.look import NOT_YET_SHOWN, Look
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.waiting.lookout import Lookout
from headwater.waiting.request import WaitRequest
from headwater.waiting.target import WaitTarget
from headwater.waiting.visits import SourceVisits
from headwater.waiting.wanted_partitions import not_yet_reloaded

if TYPE_CHECKING:
    from headwater.lake.ledger import Epoch, TableVersion
    from headwater.lake.requirements import Target
    from headwater.waiting.validated_cuts import ValidatedCuts


class Judgement:
    """Of the looks of one wait, once `wanted` has been settled."""

    def __init__(
        self, pipeline: Pipeline, request: WaitRequest, wanted: WaitTarget, lookout: Lookout, visits: SourceVisits
    ) -> None:
        self._pipeline, self._request = pipeline, request
        self._wanted, self._lookout, self._visits = wanted, lookout, visits
        self._validated: ValidatedCuts | None = None

    def of(self, look: Look) -> Verdict:
        judged = self._freshness(look)
        if judged.outcome is Outcome.NOT_REPLICATED:
            return self._with_entry(judged)
        if self._target.validated:
            judged = self._by_validation(judged, look)
        if judged.outcome is Outcome.SATISFIED and look.file is not None:
            epoch = self._lookout.lake.epoch(judged.epoch or look.file.epoch)
            if missing := self._still_missing(judged.tables, epoch):
                return replace(judged, outcome=None, reason=missing)
        return judged

    def at_deadline(self, judged: Verdict, look: Look, *, driver_seen: bool) -> Verdict:
        """What a wait ends as that is not satisfied by now, as `look` shows the lake."""
        target = self._target
        by_clock = target.max_staleness is not None or target.by_table or target.open
        if target.now or (by_clock and self._lookout.source is None):
            return self._visits.unreachable(judged)
        # In a store a driver writes seldom while nothing happens: that it was not seen says little without the source.
        stopped = "no driver was seen alive during the wait"
        if self._lookout.source is not None:
            stopped = f"replication is stopped, {stopped_since(look, datetime.now(UTC))}"
        file = shlex.quote(self._pipeline.file)
        return freshness.at_deadline(judged, alive=driver_seen, stopped=stopped, pipeline_file=file)

    def is_gone(self, cut: Mapping[str, Any]) -> bool:
        """Whether the validated `cut`, which is pinned by now, was cleaned up before; then it is not offered again."""
        return self._validated is not None and self._validated.is_gone(cut)

    @property
    def _target(self) -> Target:
        assert self._wanted.target is not None
        return self._wanted.target

    def _freshness(self, look: Look, samples: Sequence[tuple[datetime, int]] = ()) -> Verdict:
        assert self._wanted.tables is not None
        source = self._lookout.source
        judged = freshness.verdict(
            self._target,
            look,
            self._wanted.tables,
            source_now=source.now() if source is not None else None,
            samples=[*samples, *(source.samples(look.log) if source is not None else [])],
            ignore_suspended=self._request.ignore_suspended,
        )
        by_clock = any(self._target.staleness(name) is not None for name in judged.tables)
        other_log = source is not None and not source.is_of(look.log)
        if judged.outcome in (None, Outcome.SATISFIED) and by_clock and other_log:
            # Either may be the older one: the answer, or the lake, whose driver may be about to follow.
            reason = "the source's log is not the one that the lake follows: how stale the lake is cannot be told"
            return replace(judged, outcome=None, reason=reason, eta_seconds=None)
        return judged

    def _with_entry(self, judged: Verdict) -> Verdict:
        """`judged`, which says that a table is not replicated; to load it, the pipeline file has to speak of it."""
        unknown = [name for name in judged.tables if self._pipeline.entry_for(TableName.parse(name)) is None]
        if not unknown:
            return judged
        return replace(
            judged, remedy=f"name {unknown[0]} under `tables` in PIPELINE.yaml, then headwater load PIPELINE.yaml"
        )

    def _by_validation(self, fresh: Verdict, look: Look) -> Verdict:
        from headwater.waiting.validated_cuts import ValidatedCuts  # reads Delta tables: only for those who ask for it

        lake = self._lookout.lake
        if self._validated is None or self._validated.lake is not lake:
            self._validated = ValidatedCuts(self._pipeline.lake_path(), lake)
        return self._validated.judge(fresh, look, self._target.validated, self._freshness)

    def _still_missing(self, required: Collection[str], epoch: Epoch) -> str:
        """What stands against `epoch`, fresh as it is; empty when nothing does."""
        if missing := [name for name in required if not epoch.shows(name)]:
            return f"{missing[0]}: {NOT_YET_SHOWN}"
        if (anew := self._loaded_since(required)) is not None:
            self._visits.at_once()
            return f"{anew} was loaded again, the source is asked about it"
        return self._open_reload(epoch.tables, required) if self._target.parts else ""

    def _loaded_since(self, names: Iterable[str]) -> str | None:
        """A table whose relation at the source is another one than the source was asked about."""
        if not self._visits.answered:
            return None
        asked = {standing.registered for standing in self._visits.state.standings}
        new = [str(table.name) for table in self._lookout.registered(self._wanted.tables or ()) if table not in asked]
        return next((name for name in names if name in new), None)

    def _open_reload(self, held: Mapping[str, TableVersion], required: Collection[str]) -> str:
        """Which reload of a wanted partition is not in the lake yet; empty: none. Of suspended tables that are ignored
        nothing is waited for."""
        registry = self._lookout.lake.registry()
        assert registry is not None, "a table was found in it"
        parts = {name: part for name, part in self._target.parts.items() if name in required}
        return not_yet_reloaded(registry, parts, held)
